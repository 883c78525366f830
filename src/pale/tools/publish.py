"""Publish weights: packed for a package, or as a folder for timm and the Hugging Face hub."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from ..data.sources.words import name_classes, read_words
from ..errors import SettingsError
from ..recipes.files import recipe_to_yaml
from ..recipes.schema import Recipe
from ..recipes.stored import stored_recipe
from ..weights import zoo
from ..weights.read import Weights, load_weights
from ..weights.write import save_weights

# Paths of the training machine: private, and wrong on other machines.
PATHS = ("data.root", "model.weights", "model.init", "token_labels.store")
READABLE = 0o644  # mode of published files; safetensors makes files that only the owner can read


def read(
    source: Path, recipe: str | None = None, folder: Path | None = None
) -> tuple[Weights, Recipe]:
    """Return weights of a run, a file, or a name in the folder's index, and their recipe without paths."""
    if not source.exists():
        source = zoo.find_file(str(source), folder) or source
    weights = load_weights(source)
    return weights, without_paths(stored_recipe(weights.about, source, recipe))


def without_paths(recipe: Recipe) -> Recipe:
    """Return the recipe without paths, so that it can be used on any machine; it loads a whole model."""
    values = recipe.plain()
    changes: dict[str, object] = {"model.new_head": False}
    for name in PATHS:
        part, _, last = name.partition(".")
        if last in values.get(part, {}):
            changes[name] = None
    if sources := values.get("data", {}).get("mix"):
        changes["data.mix"] = [source | {"root": None} for source in sources]
    return recipe.override(changes)


def pack(
    source: Path,
    output: Path,
    recipe: str | None = None,
    license: str | None = None,
    words: Path | None = None,
) -> int:
    """Write the weights of a run or a file in a quarter of the space; returns the bytes.

    Args:
        source: a run or a file.
        output: the file to write.
        recipe: for weights of another project: the name of the recipe that describes the model.
        license: of the weights, as an SPDX identifier in lower case, for the header.
        words: list of words with names for classes that are WordNet ids; predictions then show the names.
    """
    if output.suffix != ".safetensors":
        raise SettingsError(
            f"packed weights must be a .safetensors file, got {output}; change the suffix"
        )
    weights, chosen = read(source, recipe)
    about = weights.about | {"recipe": chosen.plain()} | ({"license": license} if license else {})
    if words is not None:
        classes = weights.about.get("classes") or []
        about["label_names"] = name_classes(classes, read_words(words))
        if about["label_names"] == classes:
            raise SettingsError(
                f"{words} names none of the {len(classes)} classes of {source}, so --words has no effect; remove it, "
                "or give a list with lines such as 'n01443537 goldfish'"
            )
    output.parent.mkdir(parents=True, exist_ok=True)
    save_weights(output, weights.tensors, about, packed=True)
    output.chmod(READABLE)
    return output.stat().st_size


def export(
    source: Path, target: Path, recipe: str | None = None, folder: Path | None = None
) -> list[Path]:
    """Write weights as float32 into a folder: model.safetensors, recipe.yaml, and the card if there is one.

    A classifier also gets timm's config.json: after `import pale`, `timm.create_model("local-dir:FOLDER",
    pretrained=True)` loads the model, also from the hub after the folder has been uploaded.

    Args:
        source: a run, a file, or a name in the index of the folder.
        target: the folder to write; it is created, or must be empty.
        recipe: for weights of another project: the name of the recipe that describes the model.
        folder: where names are looked up.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise SettingsError(f"{target} exists and is not an empty folder; choose another")
    weights, chosen = read(source, recipe, folder)
    where = folder or zoo.index.FOLDER
    entries = [] if source.exists() else zoo.list_entries(where)
    entry = next((e for e in entries if str(source) in (e.name, e.timm_name)), None)
    if entry is not None and entry.license:
        weights = replace(weights, about=weights.about | {"license": entry.license})
    target.mkdir(parents=True, exist_ok=True)
    chosen.task_class.pipeline.write_hub_config(chosen, weights, source, target / "config.json")
    about = weights.about | {"recipe": chosen.plain()}
    save_weights(target / "model.safetensors", weights.tensors, about)
    (target / "model.safetensors").chmod(READABLE)
    (target / "recipe.yaml").write_text(recipe_to_yaml(chosen))
    if entry is not None and (where / entry.card).is_file():
        shutil.copyfile(where / entry.card, target / "README.md")
    return sorted(target.iterdir())
