"""A small mixture: a folder and shards with one class per image, and shards with tags. Colours show the classes."""

import io
import json
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image
from support.recipes import classification_recipe

from pale.data.sources.images import read_folder
from pale.data.sources.shards import write_shards
from pale.recipes.kinds import Classification

COLOURS = {"dog": (200, 40, 40), "fox": (40, 200, 40), "bee": (40, 40, 200), "owl": (200, 200, 40)}
SOURCES = (
    {"name": "tags", "labels": "multi", "weight": 2.0},
    {"name": "folder", "kind": "folder"},
    {"name": "shards", "weight": 0.5},
)


def encode(image: Image.Image) -> bytes:
    """Return an image as PNG."""
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def add_file(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    """Add a file to a tar."""
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


def write_tag_shard(path: Path, labels: list) -> None:
    """Write a shard with an image of noise and a JSON file for each entry, {"labels": entry}."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(len(labels))
    with tarfile.open(path, "w") as tar:
        for i, names in enumerate(labels):
            pixels = rng.integers(0, 60, (36, 40, 3), np.uint8)
            for stripe, name in enumerate(names if isinstance(names, list) else ()):
                pixels[9 * stripe : 9 * stripe + 9] += np.array(COLOURS.get(name, 0), np.uint8)
            add_file(tar, f"{i:04d}.png", encode(Image.fromarray(pixels)))
            add_file(tar, f"{i:04d}.json", json.dumps({"labels": names}).encode())


def write_mixture(root: Path) -> Path:
    """Write the three sources of `SOURCES`: 12, 8 and 12 training images, 6, 4 and 6 for validation."""
    rng = np.random.default_rng(1)
    for split, n in (("train", 12), ("val", 6)):
        tags = [[name for name in ("bee", "car", "dog") if rng.random() < 0.5] for _ in range(n)]
        write_tag_shard(root / "tags" / f"{split}-000000.tar", [["bee", "car", "dog"], *tags[1:]])
        for source, names, each in (("folder", "dog fox", 3), ("plain", "fox bee owl", 3)):
            for name in names.split():
                folder = root / source / split / name
                folder.mkdir(parents=True)
                for i in range(n // each):
                    noise = rng.integers(0, 50, (40, 36, 3)) + np.array(COLOURS[name])
                    Image.fromarray(noise.astype(np.uint8)).save(folder / f"{i}.png")
        write_shards(read_folder(root / "plain" / split), root / "shards", split, 4096)
    return root


def mixture_recipe(root: Path, **changes) -> Classification:
    """Return the small recipe on such a mixture, with augmentation, mixing, drop path and EMA."""
    given = {"data__mix": list(SOURCES), "data__root": str(root), "batch": 6, "epochs": 2}
    return classification_recipe(**given | changes)
