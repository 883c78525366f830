"""Weights on their way out: packed small for a package, or as a folder that timm and the hub read."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from timm.models._hub import save_config_for_hf

from .. import weights as weight_files
from .. import zoo
from ..pale_transformer import VARIANTS
from ..recipes import get
from ..recipes.schema import Classification, Recipe, parse, text
from ..settings import vary

# Where a run's files lay is nobody's business, and elsewhere not true.
PATHS = ("data.root", "model.weights", "model.init", "token_labels.store")


def read(
    source: Path, recipe: str | None = None, folder: Path | None = None
) -> tuple[weight_files.Weights, Recipe]:
    """Weights of a run, a file, or a name of the folder's, and the recipe they say, without paths."""
    if not source.exists():
        source = zoo.find(str(source), folder) or source
    weights = weight_files.load(source)
    if recipe is None and "recipe" not in weights.about:
        raise ValueError(
            f"{source} does not say which model it is for; name a recipe: --recipe imagenet.pale_t"
        )
    chosen = get(recipe) if recipe else parse(weights.about["recipe"], str(source))
    return weights, without_paths(chosen)


def without_paths(recipe: Recipe) -> Recipe:
    """The recipe as any machine can read it: nothing that says where files lie, a whole model to be loaded."""
    values = recipe.plain()
    changes: dict[str, Any] = {"model.new_head": False}
    for name in PATHS:
        part, _, last = name.partition(".")
        if last in values.get(part, {}):
            changes[name] = None
    return recipe.override(changes)


def pack(source: Path, output: Path, recipe: str | None = None) -> int:
    """Write the weights of a run or a file in a quarter of the space; gives the bytes."""
    if output.suffix != ".safetensors":
        raise ValueError(f"packed weights are a .safetensors file, got {output}; name it so")
    weights, chosen = read(source, recipe)
    about = weights.about | {"recipe": chosen.plain()}
    output.parent.mkdir(parents=True, exist_ok=True)
    weight_files.save(output, weights.tensors, about, packed=True)
    output.chmod(0o644)  # safetensors lets the owner alone read
    return output.stat().st_size


def export(
    source: Path, target: Path, recipe: str | None = None, folder: Path | None = None
) -> list[Path]:
    """Write weights as float32 into a folder: model.safetensors, recipe.yaml, and the card where there is one.

    A classifier gets timm's config.json too: after `import pale`, `timm.create_model("local-dir:FOLDER",
    pretrained=True)` is the model, and so it is from the hub once the folder lies there.

    Args:
        source: a run, a file, or a name that the folder's index lists.
        target: the folder to write; made where it is not there, and must be empty.
        recipe: for foreign weights: the name of the recipe that says the model.
        folder: where names are looked up.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{target} is there already and not an empty folder; choose another")
    weights, chosen = read(source, recipe, folder)
    target.mkdir(parents=True, exist_ok=True)
    if isinstance(chosen, Classification):
        _config(chosen, weights, source, target / "config.json")
    about = weights.about | {"recipe": chosen.plain()}
    weight_files.save(target / "model.safetensors", weights.tensors, about)
    (target / "recipe.yaml").write_text(text(chosen))
    where = folder or zoo.FOLDER
    for entry in zoo.entries(where):
        if entry.name == str(source) and not source.exists() and (where / entry.card).is_file():
            shutil.copyfile(where / entry.card, target / "README.md")
    return sorted(target.iterdir())


def _config(
    recipe: Classification, weights: weight_files.Weights, source: Path, path: Path
) -> None:
    """The config.json of timm; the weights are tried on the model first."""
    classes = list(weights.about.get("classes") or ())
    size = recipe.data.size
    settings = vary(recipe.model, weights=None, new_head=False)
    model: Any = settings.build(len(classes) or 1000, size)
    weight_files.put(model, weights, source, new_head=False)
    how = recipe.augment.interpolation
    model.pretrained_cfg = model.pretrained_cfg | {
        "num_classes": model.num_classes,
        "input_size": (3, size, size),
        "pool_size": (-(-size // 32),) * 2,
        "crop_pct": recipe.data.crop,
        "interpolation": "bicubic" if how == "random" else how,
        "tag": "",
    }
    arguments: dict[str, Any] = dict(settings.options)
    if settings.name in VARIANTS:
        given = ("attention", "position", "pale_size", "stem_stride")
        default = type(settings).model_fields
        plain = settings.plain()
        arguments |= {n: plain[n] for n in given if getattr(settings, n) != default[n].default}
        if settings.position == "ape":
            arguments["img_size"] = size
    names = {"label_names": classes} if classes else {}
    save_config_for_hf(model, path, model_config=names, model_args=arguments)
