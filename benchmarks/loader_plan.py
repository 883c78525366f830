"""Measure what one image costs a worker of the training loader, at its own size and scaled down before packing.

    python benchmarks/loader_plan.py PHOTOS -o benchmarks/results/loader_plan_cpu

PHOTOS is a folder of JPEG files. Each is read, decoded and augmented as `imagenet.pale_t` does at 224 px, in one
process without a GPU, from the original files and from copies with a short side of 256 and 320 pixels (quality 90). The
figure is CPU time, so that a busy machine changes it little. Writes OUT.json and OUT.md.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
from PIL import Image, ImageOps

from pale.recipes import get
from pale.train.distributed import World
from pale.train.environment import environment

SHORT = (None, 320, 256)  # pixels; None: as it is


def copy_photos(photos: list[Path], folder: Path, short: int | None) -> Path:
    """Write the photos as a dataset of one class; return its root."""
    target = folder / "train" / "photo"
    target.mkdir(parents=True)
    for path in photos:
        if short is None:
            (target / path.name).write_bytes(path.read_bytes())
            continue
        with Image.open(path) as image:
            image = ImageOps.exif_transpose(image).convert("RGB")
        ratio = min(1.0, short / min(image.size))
        size = tuple(round(side * ratio) for side in image.size)
        image.resize(size, Image.Resampling.BICUBIC).save(target / path.name, quality=90)
    return folder


def measure(root: Path, rounds: int) -> dict:
    """Return CPU milliseconds per image, median over rounds, and the mean size of a file."""
    recipe = get("imagenet.pale_t").override(
        {"data.root": str(root), "data.hold_out": 0.01, "data.on_device": "nothing"}
    )
    data = recipe.task().train_data(torch.device("cpu"))
    count = len(data)
    for index in range(20):
        data[(0, index)]
    found = []
    for epoch in range(1, rounds + 1):
        began = time.process_time()
        for index in range(count):
            data[(epoch, index)]
        found.append(1e3 * (time.process_time() - began) / count)
    sizes = [path.stat().st_size for path in (root / "train/photo").iterdir()]
    return {
        "cpu_ms": statistics.median(found),
        "rounds": found,
        "file_kb": sum(sizes) / len(sizes) / 1e3,
    }


def main() -> None:
    """Measure and write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("photos", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True, help="result without suffix")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    photos = sorted(options.photos.rglob("*.jpg"))
    rows = []
    with tempfile.TemporaryDirectory() as name:
        for short in SHORT:
            root = copy_photos(photos, Path(name) / str(short), short)
            rows.append({"short": short} | measure(root, options.rounds))
    about = environment(World(torch.device("cpu")))
    about["images"] = len(photos)
    options.output.with_suffix(".json").write_text(
        json.dumps({"about": about, "rows": rows}, indent=1) + "\n"
    )
    lines = [
        "# What an image costs a worker of the training loader",
        "",
        f"`imagenet.pale_t` at 224 px, read, decoded and augmented by one process without a GPU; {len(photos)} JPEG "
        f"files, medians of {options.rounds} rounds. {about['device']}, torch {about['torch']}, "
        f"commit {about['commit'][:7]}.",
        "",
        "| short side of the files | mean size | CPU time per image | of the first row |",
        "| --- | --- | --- | --- |",
    ]
    for row in rows:
        side = "as they are" if row["short"] is None else f"at most {row['short']} px"
        share = row["cpu_ms"] / rows[0]["cpu_ms"]
        lines.append(f"| {side} | {row['file_kb']:.0f} kB | {row['cpu_ms']:.2f} ms | {share:.2f} |")
    options.output.with_suffix(".md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
