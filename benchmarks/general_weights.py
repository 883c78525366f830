"""Publish a pre-trained classifier as general-purpose weights: packed, measured on every source, with card and entry.

    python benchmarks/general_weights.py RUN DATA OUT --words DATA/words.txt

RUN is a finished run of a `pretrain` recipe on the sets that pretraining_data.py prepared in DATA; words.txt is the
list in Tiny-ImageNet-200. OUT gets NAME.safetensors, NAME.md and an entry in index.json, and NAME.json with the same
figures, hardware, versions, commit and command: the first three are files of src/pale/weights/zoo. The figures are
those of the packed file in float32, on the validation split of each source over its own classes; beside them are
those of the weights before packing. Nothing in them was used to choose settings. If the run started from included
weights, the card has their checksum and command.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from planned_runs import describe_machine, write_result
from pretraining_sources import SOURCES

from pale.predict.bundle import load
from pale.recipes import get
from pale.recipes.files import read_recipe
from pale.recipes.kinds import Classification
from pale.tools.measure import measure
from pale.tools.publish import pack, read
from pale.train.distributed import join
from pale.train.log import read as read_log
from pale.train.report.settings import different_settings
from pale.weights import zoo
from pale.weights.read import Weights
from pale.weights.write import save_weights

LICENSE = "cc-by-nc-4.0"
TAG = "general"  # in timm: pale_nano.general
TERMS = (
    "The weights are ours, CC BY-NC 4.0: for research and other non-commercial use, because images of several sources "
    "may be used for research only. The code is Apache-2.0. No image is contained."
)


def main(argv: list[str] | None = None) -> None:
    """Pack, measure, and write card, entry and result file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, metavar="RUN")
    parser.add_argument("data", type=Path, metavar="DATA")
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--name", default="general_nano", help="name of the weights (%(default)s)")
    parser.add_argument("--words", type=Path, help="names of WordNet ids")
    parser.add_argument("--note", help="what else a reader must know of the run, for the card")
    parser.add_argument("--batch", type=int, default=64, help="of the evaluation (%(default)s)")
    parser.add_argument("--workers", type=int, default=1, help="of the evaluation (%(default)s)")
    args = parser.parse_args(argv)
    publish(args)


def publish(args: argparse.Namespace) -> None:
    """Write all files of the weights into OUT."""
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"{args.name}.safetensors"
    weights, recipe = read(args.run)
    if not isinstance(recipe, Classification) or not recipe.data.is_mixture:
        raise SystemExit(f"{args.run} must be a classifier trained with --data.mix")
    run = read_recipe(args.run / "recipe.yaml")  # with the weights that it started from
    assert isinstance(run, Classification)
    whole = args.out / f"{args.name}-float32.safetensors"
    save_with_all_sources(weights, recipe, whole)
    size = pack(whole, path, license=LICENSE, words=args.words)
    with join() as world:
        options = {"batch": args.batch, "workers": args.workers}
        packed, before = (measure(each, args.data, world, **options) for each in (path, whole))
        facts = describe_machine(world)
    whole.unlink()
    events = read_log(args.run / "log.jsonl")
    row = {
        "name": args.name,
        "file_bytes": size,
        "packed": packed,
        "before_packing": before,
        "steps": max(event["step"] for event in events),
        "training": next(event for event in events if event["event"] == "start"),
        "sources": sources(args.data, recipe, events),
        "start": describe_start(run),
        "note": args.note,
        "recipe": recipe.plain(),
        **facts,
    }
    write_result(args.out / f"{args.name}.json", row)
    entry = make_entry(path, row, run, sum(t.numel() for t in weights.tensors.values()))
    (args.out / entry.card).write_text(card(entry, row, recipe))
    zoo.add_entry(entry, args.out)
    print(f"{path}: {size / 1e6:.2f} MB, {entry.headline}")


def save_with_all_sources(weights: Weights, recipe: Classification, target: Path) -> None:
    """Write weights with a recipe that evaluates every source, also those that the run did not."""
    mix = [each.plain() | {"val": each.val or "val"} for each in recipe.data.mix or ()]
    about = weights.about | {"recipe": recipe.override({"data.mix": mix}).plain()}
    save_weights(target, weights.tensors, about)


def sources(
    data: Path, recipe: Classification, events: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return the sources of a mixture with their sizes and terms."""
    notes = " ".join(event["text"] for event in events if event["event"] == "note")
    found = []
    for each in recipe.data.mix or ():
        manifest = json.loads((data / each.name / "manifest.json").read_text())
        (known,) = (source for source in SOURCES if source.name == each.name)
        found.append(
            {
                "name": each.name,
                "labels": each.labels,
                "weight": each.weight,
                "classes": len(manifest["classes"]),
                "images": int(re.findall(rf"[:;] {re.escape(each.name)} (\d+) images", notes)[-1]),
                "repository": known.repository,
                "commit": known.commit,
                "terms": known.terms,
            }
        )
    return found


def describe_start(recipe: Classification) -> dict[str, Any] | None:
    """Return name, checksum and command of the included weights that the run started from; None without any.

    These are the weights in the package now: write the card before the new files replace them.
    """
    if recipe.model.weights is None:
        return None
    entry = zoo.get_entry(str(recipe.model.weights))
    return {"name": entry.name, "sha256": entry.sha256, "command": entry.command}


def make_entry(
    path: Path, row: dict[str, Any], recipe: Classification, params: int
) -> zoo.ZooEntry:
    """Return the entry of the index; these weights are those of `pretrained=True` without a tag."""
    about = load(path).about()
    names = ", ".join(source["name"] for source in row["sources"])
    return zoo.ZooEntry(
        path.stem,
        recipe.kind,
        recipe.model.name,
        path.name,
        f"{path.stem}.md",
        row["file_bytes"],
        zoo.file_sha256(path),
        params,
        len(about["classes"]),
        {name: round(value, 4) for name, value in row["packed"].items()},
        names,
        recipe.name,
        training_command(recipe),
        LICENSE,
        {
            "tag": TAG,
            "default": True,
            "input_size": [3, about["size"], about["size"]],
            "crop_pct": about["crop"],
            "interpolation": about["interpolation"],
            "mean": [round(value, 4) for value in about["mean"]],
            "std": [round(value, 4) for value in about["std"]],
            "label_names": about["classes"],
        },
    )


def training_command(recipe: Classification) -> str:
    """Return the command of the run, with the settings that differ from the recipe of the same name."""
    changed = different_settings([recipe, get(recipe.name)])
    settings = " ".join(
        f"--{name} {shlex.quote(values[0])}"
        for name, values in changed.items()
        if name not in ("data.mix", "data.root", "data.workers", "model.new_head", "model.weights")
    )
    start = "" if recipe.model.weights is None else "--init START "
    return f"pale train {recipe.name} {start}--data.root DATA --data.mix @sources.yaml {settings}"


def card(entry: zoo.ZooEntry, row: dict[str, Any], recipe: Classification) -> str:
    """Return the model card, as the Hugging Face hub shows it."""
    mix = "\n".join(
        f"- {{name: {source['name']}, labels: {source['labels']}, weight: {source['weight']}}}"
        for source in row["sources"]
    )
    samples = row["steps"] * recipe.batch
    facts, trained = row["environment"], row["training"]
    *smaller, largest = [size for _, size in recipe.data.sizes] or [recipe.data.size]
    sizes = f"{', '.join(map(str, smaller))} and {largest}" if smaller else str(largest)
    lines = []
    for source in row["sources"]:
        name = source["name"]
        metric, word = ("map", "mAP") if source["labels"] == "multi" else ("top1", "top-1")
        after, before = (row[part][f"{name}.{metric}"] for part in ("packed", "before_packing"))
        lines.append(
            f"| {name} | {source['images']:,} | {source['classes']} | {word} | {after:.2f} | {before:.2f} | "
            f"{source['terms']} |"
        )
    table = "\n".join(lines)
    what = (
        f"A backbone to start from: {entry.model} of the [Pale Transformer](https://arxiv.org/abs/2112.14000), "
        f"{entry.params / 1e6:.2f} M parameters in {entry.bytes / 1e6:.2f} MB, trained to name {entry.classes} "
        f"objects, animals, places and tags on {len(row['sources'])} public image sets. `pale train finetune` starts "
        "from it."
    )
    start = row["start"]
    first = "random weights" if start is None else f"an earlier `{start['name']}`"
    made = (
        f"Recipe `{recipe.name}`, seed {recipe.seed}, {row['steps']} steps of {recipe.batch} images ({samples:,} "
        f"samples) from {first}; no other data, no distillation. The moving average after the last step is stored; "
        "nothing was chosen on the validation images."
    )
    if row["note"]:
        made += f" {row['note']}"
    earlier = ""
    if start is not None:
        earlier = f"- START is the file with sha256 `{start['sha256']}`, made by\n  `{start['command']}`\n"
    masks = f"small_masks.upernet_{'nano' if entry.model == 'pale_nano' else 'pale_t'}"
    limits = (
        f"This run saw {samples / 1e6:.2f} million samples of {sizes} px; usual ImageNet weights saw some 400 "
        "million of 224 px. As a classifier it is weak, and the probabilities of classes of different sources were "
        "never trained to be comparable; use it as a start. "
        "No set of faces, text, medical or aerial images is among its data; COCO and the scenes show people."
    )
    return f"""---
license: {entry.license}
library_name: timm
pipeline_tag: image-classification
tags: [pale-transformer, vision]
---

# {entry.name}

{_paragraph(what)}

```bash
pale train finetune --data.root photos --model.name {entry.model}    # starts from these weights
pale train {masks} --data.root DIR --init {entry.name}
pale predict photo.jpg --weights {entry.name}
pale weights export {entry.name} DIR
```

```python
import pale, timm

model = timm.create_model("{entry.timm_name}", pretrained=True, num_classes=10)
names = timm.create_model("{entry.model}", pretrained=True).pretrained_cfg["label_names"]
```

## How good

This file, unpacked, in float32 at {recipe.data.size} px, on the validation split of each source, over its own
classes, in per cent:

| source | training images | classes | metric | this file | before packing | terms of the images |
| --- | --- | --- | --- | --- | --- | --- |
{table}

docs/weights.md of the repository has results on other data.

## How it was made

{_paragraph(made, "- ")}
{earlier}- Again: prepare DATA with `benchmarks/pretraining_data.py`, then
  `{entry.command}`,
  then `python benchmarks/general_weights.py RUN DATA OUT --words DATA/words.txt`.
- Trained on {trained["device"]}, CPU threads: {trained["threads"]}, torch {trained["torch"]}, timm {trained["timm"]},
  commit {trained["commit"][:7]}; measured on {facts["device"]}, torch {facts["torch"]}.
- Stored as int8 with a scale for each output channel; norms and biases float32, depthwise kernels float16.
- sha256 `{entry.sha256}`

sources.yaml:

```yaml
{mix}
```

## Limits

{_paragraph(limits)}

## Licence

{_paragraph(TERMS)}
"""


def _paragraph(text: str, bullet: str = "") -> str:
    return textwrap.fill(text, 118, initial_indent=bullet, subsequent_indent=" " * len(bullet))


if __name__ == "__main__":
    main()
