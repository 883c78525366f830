"""Open hostile files in a separate process; print for each the result, seconds of CPU time and MiB of memory.

Run as `python hostile_sizes.py FOLDER [NAME ...]`: the folder must be empty, names select cases.
"""

import json
import os
import resource
import struct
import sys
import time
from pathlib import Path

import torch
from support import hostile
from support.recipes import CLASSIFICATION
from support.weights import RECIPES
from support.weights import weights as small_weights

from pale.predict import bundle as loading
from pale.recipes.files import read_recipe


def case(task, **changes):
    return lambda folder: hostile.write(folder / "a.safetensors", hostile.recipe(task, **changes))


def options(task, **given):
    return case(task, model__options=given, model__drop_path=0)


def peer(task, name, **given):
    return case(task, model__name=name, model__options=given, model__drop_path=0)


def raw(header: bytes, length: int | None = None, body: bytes = b""):
    def make(folder):
        path = folder / "a.safetensors"
        path.write_bytes(
            struct.pack("<Q", len(header) if length is None else length) + header + body
        )
        return path

    return make


def about(text: str):
    return raw(json.dumps({"__metadata__": {"pale": text}}).encode())


def many_tensors(folder):
    entries = {
        f"t{i}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(40_000)
    }
    return raw(json.dumps(entries).encode())(folder)


def sparse(folder):
    """Write a sparse file of a terabyte."""
    size = 1 << 40
    values = hostile.recipe("classification")
    header = {
        "__metadata__": {"pale": json.dumps({"recipe": values, "classes": ["a"], "crc32": 1})},
        "w": {"dtype": "F32", "shape": [1 << 20, size >> 22], "data_offsets": [0, size]},
    }
    text = json.dumps(header).encode()
    path = raw(text)(folder)
    os.truncate(path, 8 + len(text) + size)
    return path


def shared(dtype: str, offset: int = 0):
    """Write a large model whose tensors all are the same bytes of a small file."""

    def make(folder):
        given = {"channels": [1024] * 4, "heads": [2] * 4, "depths": [2, 2, 12, 2]}
        changes = {"model__options": given, "model__drop_path": 0}
        with torch.device("meta"):
            tensors = RECIPES["classification"](**changes).model.build(2, 32).state_dict()
        size = {"I8": 1, "F32": 4}[dtype]
        values = hostile.recipe("classification", **changes)
        header = {"__metadata__": {"pale": json.dumps({"recipe": values, "classes": ["a", "b"]})}}
        for name, tensor in tensors.items():
            end = offset or tensor.numel() * size
            shape = list(tensor.shape)
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [0, end]}
        text = json.dumps(header).encode()
        return raw(text, body=bytes(size * max(t.numel() for t in tensors.values())))(folder)

    return make


def honest(task: str, later: dict, **changes):
    """Write weights that fit a recipe, and change the recipe."""

    def make(folder):
        recipe = RECIPES[task](**changes)
        model = recipe.model.build(2, 32)
        values = hostile.recipe(task, **changes | later)
        return hostile.write(folder / "a.safetensors", values, tensors=model.state_dict())

    return make


def yaml_file(text: str):
    def make(folder):
        path = folder / "recipe.yaml"
        path.write_text(text)
        return path

    return make


LAUGHS = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{c}: &{c} [{','.join([f'*{p}'] * 9)}]\n" for p, c in zip("abcdefgh", "bcdefghi", strict=True)
)
SWIN = {"embed_dim": 8, "depths": [2, 2], "num_heads": [1, 2], "img_size": 224}
WIDE = [8192] * 4
CASES = {
    "wide": options("classification", channels=WIDE, heads=[2] * 4),
    "wide segmenter": options("segmentation", channels=WIDE, heads=[2] * 4),
    "wide detector": options("detection", channels=WIDE, heads=[2] * 4),
    "deep": options("classification", depths=[1, 1, 1, 30_000]),
    "deeper": options("classification", depths=[1, 1, 1, 10**9]),
    "ratio": options("classification", mlp_ratio=[60_000.0] * 4),
    "infinite ratio": options("classification", mlp_ratio=[float("inf")] * 4),
    "NaN": options("classification", drop_rate=float("nan")),
    "positions": case(
        "classification", model__position="ape", model__options={"img_size": [65_536, 65_536]}
    ),
    "head": case("segmentation", model__width=10**9),
    "wide head": case("segmentation", model__width=16_384, model__auxiliary=16_384),
    "boxes": case("detection", model__heads__box_width=10**7),
    "wide boxes": case("detection", model__heads__box_width=16_384, model__heads__width=16_384),
    "mask layers": case("detection", model__heads__mask_layers=10**6),
    "large peer": peer("classification", "vit_7b_patch16_dinov3"),
    "window": peer("classification", "swin_tiny_patch4_window7_224", img_size=16_384),
    "one window": peer("segmentation", "swin_tiny_patch4_window7_224", window_size=4096),
    "deep peer": peer("classification", "swin_tiny_patch4_window7_224", depths=[2, 2, 60_000, 2]),
    "masks": honest(
        "classification",
        {"model__options": SWIN | {"img_size": 16_384}},
        model__name="swin_tiny_patch4_window7_224",
        model__options=SWIN,
        model__drop_path=0,
    ),
    "map": honest(
        "classification",
        {"model__options": CLASSIFICATION["model.options"] | {"img_size": 65_536}},
        model__position="ape",
    ),
    "size": case("classification", data__size=10**6),
    "crop": case("classification", data__crop=1e-7),
    "window of a segmenter": case("segmentation", test__mode="slide", test__stride=1),
    "scales": case("segmentation", test__scales=[1.0] * 10**5),
    "classes": about(json.dumps({"classes": ["x"] * 600_000})),
    "no names": about(json.dumps({"recipe": {}, "classes": [[1]]})),
    "no table": about("[1]"),
    "nested": about("[" * 100_000 + "]" * 100_000),
    "nested recipe": about('{"recipe": ' + '{"model":' * 50_000 + "1" + "}" * 50_001),
    "long number": about('{"step": ' + "9" * 10_000 + "}"),
    "long header": raw(b" " * (90 << 20)),
    "false length": raw(b"{}", 1 << 62),
    "many tensors": many_tensors,
    "sparse": sparse,
    "shared bytes": shared("I8"),
    "shared floats": shared("F32"),
    "too few bytes": shared("F32", 4096),
    "laughs": yaml_file(f"{LAUGHS}name: *i\n"),
    "nested yaml": yaml_file("[" * 100_000),
    "long yaml": yaml_file("a: [" + "1," * 3_000_000 + "]"),
    "long yaml number": yaml_file("epochs: " + "1:" * 200_000 + "1\n"),
}


def peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def open_file(path: Path) -> str:
    try:
        read_recipe(path) if path.suffix == ".yaml" else loading.load(path)
    except ValueError as error:
        return f"refused: {str(error)[-300:]}"
    except (Exception, MemoryError) as error:
        return f"{type(error).__name__}: {str(error)[:100]}"
    return "opened"


def main(folder: Path, names: list[str]) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (4 << 30, 4 << 30))
    torch.set_num_threads(1)
    for path in small_weights(folder).values():
        loading.load(path)  # what an honest file takes is there from now on
    for name, make in CASES.items():
        if names and name not in names:
            continue
        path = make(folder)
        before, start = peak(), time.process_time()
        result = open_file(path)
        row = [name, result, round(time.process_time() - start, 2), round(peak() - before)]
        sys.stdout.write(json.dumps(row) + "\n")
        sys.stdout.flush()
        path.unlink()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
