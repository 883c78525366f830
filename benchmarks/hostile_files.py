"""Files that are damaged, oversized or made to attack, and the commands that read them, for `hostile.py`."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import random
import struct
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import yaml
from PIL import Image

from pale.weights.zoo.index import FOLDER as FILES

MARKUP = "<script>alert(1)</script>"
ESCAPE = "\x1b]0;owned\x07\x1b[31m"
NUMBERS = [0, -1, 1e308, float("nan"), float("inf"), 2**63, 10**30, "x", None, [], {}, True, MARKUP]
OPTIONS = {
    "pretrained": True,
    "pretrained_cfg": {"url": "http://127.0.0.1:9/x", "file": "/etc/passwd"},
    "pretrained_cfg_overlay": {"hf_hub_id": "x/y"},
    "checkpoint_path": "/etc/passwd",
    "cache_dir": "/tmp/hostile-cache",
    "depths": [10**6, 1, 1, 1],
    "channels": [10**6] * 4,
    "img_size": 10**9,
}


def png(width: int, height: int, colour: int = 2, depth: int = 8, data: bytes = b"") -> bytes:
    """Return a PNG file that declares such a size, whatever its data hold."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(kind + content))
        return struct.pack(">I", len(content)) + kind + content + check

    head = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    body = chunk(b"IDAT", zlib.compress(data, 9))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + body + chunk(b"IEND", b"")


def encoded(draw: random.Random, kind: str, mode: str = "RGB", side: int = 64) -> bytes:
    """Return a valid image file of random pixels."""
    shape = (side, side) if mode in ("L", "P", "I;16") else (side, side, len(mode))
    dtype = np.uint16 if mode == "I;16" else np.uint8
    pixels = np.random.default_rng(draw.getrandbits(32)).integers(0, 255, shape).astype(dtype)
    if mode in ("P", "CMYK"):
        image = Image.fromarray(pixels[..., :3] if mode == "CMYK" else pixels).convert(mode)
    else:
        image = Image.fromarray(pixels)
    content = io.BytesIO()
    image.save(content, kind)
    return content.getvalue()


def damaged(draw: random.Random, content: bytes) -> bytes:
    """Return a file with bytes cut off, changed, repeated or inserted."""
    content = bytearray(content)
    for _ in range(draw.randint(1, 12)):
        place = draw.randrange(max(len(content), 1))
        match draw.randrange(4):
            case 0:
                content = content[: max(place, 1)]
            case 1:
                content[place : place + 1] = bytes([draw.randrange(256)])
            case 2:
                content[place:place] = content[place : place + draw.randrange(64)]
            case _:
                content[place:place] = draw.randbytes(draw.randrange(16))
    return bytes(content)


def hostile_image(draw: random.Random) -> bytes:
    """Return a file that claims to be an image."""
    kinds: list[Callable[[], bytes]] = [
        lambda: damaged(draw, encoded(draw, "JPEG")),
        lambda: damaged(draw, encoded(draw, "PNG")),
        lambda: damaged(draw, encoded(draw, "WEBP")),
        lambda: damaged(draw, encoded(draw, "TIFF")),
        lambda: damaged(draw, encoded(draw, "GIF", "L")),
        lambda: damaged(draw, encoded(draw, "BMP")),
        lambda: encoded(draw, "TIFF", "CMYK"),
        lambda: encoded(draw, "PNG", "RGBA"),
        lambda: encoded(draw, "PNG", "I;16"),
        lambda: encoded(draw, "JPEG", "CMYK"),
        lambda: (
            b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 64 64\n(/tmp/gs) (w) file\nshowpage\n"
        ),
        lambda: png(draw.choice([2_000_000, 60_000, 12_000]), 1, data=b"\0" * 36_001),
        lambda: png(1, draw.choice([2_000_000, 60_000, 12_000]), data=b"\0" * 60_000),
        lambda: png(draw.choice([9_000, 40_000, 2**31 - 1]), draw.choice([9_000, 40_000])),
        lambda: png(13_000, 13_000, 2, 8, b"\0" * (13_000 * 3 + 1) * 200),
        lambda: png(8_000, 8_000, 6, 16, b"\0" * 1_000_000),
        lambda: b"",
        lambda: draw.randbytes(draw.randrange(4000)),
        lambda: b"<svg xmlns='http://www.w3.org/2000/svg'><script>alert(1)</script></svg>",
        lambda: b"GIF89a" + b"\xff\xff\xff\xff" + draw.randbytes(200),
        lambda: b"II*\0" + draw.randbytes(300),
    ]
    return draw.choice(kinds)()


def hostile_name(draw: random.Random, number: int) -> bytes:
    """Return a file name that no one would choose."""
    parts = [
        b"",
        b"=1+1,",
        MARKUP.encode().replace(b"/", b""),
        ESCAPE.encode(),
        b"\xff\xfe",
        b"-o",
        b"a\nb",
    ]
    suffix = draw.choice([b".jpg", b".png", b".JPEG", b".tif", b".webp", b".gif"])
    return draw.choice(parts) + b"%d" % number + suffix


def image_folder(draw: random.Random, folder: Path, count: int = 6) -> Path:
    """Write hostile images, a FIFO, a device and a loop among them; return the folder."""
    folder.mkdir(parents=True)
    for i in range(count):
        Path(os.fsdecode(os.fsencode(folder) + b"/" + hostile_name(draw, i))).write_bytes(
            hostile_image(draw)
        )
    (folder / "good.png").write_bytes(encoded(draw, "PNG"))
    match draw.randrange(5):
        case 0:
            os.mkfifo(folder / "pipe.jpg")
        case 1:
            (folder / "zero.jpg").symlink_to("/dev/zero")
        case 2:
            (folder / "loop.jpg").symlink_to("loop.jpg")
        case 3:
            (folder / "folder.jpg").mkdir()
    return folder


def nested(draw: random.Random, value: object, change: object) -> object:
    """Return a copy of a JSON value with one place replaced."""
    if isinstance(value, dict) and value and draw.random() < 0.9:
        key = draw.choice(list(value))
        return value | {key: nested(draw, value[key], change)}
    if isinstance(value, list) and value and draw.random() < 0.9:
        i = draw.randrange(len(value))
        return [*value[:i], nested(draw, value[i], change), *value[i + 1 :]]
    return change


def hostile_weights(draw: random.Random, path: Path) -> Path:
    """Write a copy of weights from the package with a changed header or changed bytes; return its path."""
    source = FILES / f"{draw.choice(['classify', 'segment', 'detect'])}_pets.safetensors"
    content = source.read_bytes()
    size = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + size])
    match draw.randrange(5):
        case 0:
            path.write_bytes(damaged(draw, content))
            return path
        case 1:
            header = nested(draw, header, draw.choice(NUMBERS))
        case 2:
            about = json.loads(header["__metadata__"]["pale"])
            about = nested(draw, about, draw.choice([*NUMBERS, ESCAPE]))
            header["__metadata__"]["pale"] = json.dumps(about)
        case _:
            about = json.loads(header["__metadata__"]["pale"])
            key = draw.choice(list(OPTIONS))
            about["recipe"]["model"].setdefault("options", {})[key] = OPTIONS[key]
            header["__metadata__"]["pale"] = json.dumps(about)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + size :])
    return path


def run_folder(draw: random.Random, folder: Path, recipe: dict) -> Path:
    """Write a run folder with hostile files in it; return it."""
    folder.mkdir(parents=True)
    recipe = nested(draw, recipe, draw.choice([*NUMBERS, ESCAPE]))
    text = yaml.safe_dump(recipe) if draw.random() < 0.8 else "a: &a [x]\nb: [*a, *a]\n" * 50
    (folder / "recipe.yaml").write_text(text)
    event = {"event": "step", "step": 1, "steps": 5, "loss": 1.0, "lr": 0.1, "images_per_s": 1.0}
    event |= {"epoch": 0.1, "memory_mb": 1.0, "data_wait": 0.0, "grad_norm": 1.0}
    events = [nested(draw, event, draw.choice([*NUMBERS, MARKUP])) for _ in range(4)]
    lines = [json.dumps(event) for event in events] + [draw.choice(["", "{", "\x00", "[]"])]
    (folder / "log.jsonl").write_bytes("\n".join(lines).encode() + draw.randbytes(3))
    detail = {"classes": [MARKUP, ESCAPE], "confusion": [[1, 2], [3, 4]], "count": MARKUP}
    (folder / "evaluation.json").write_text(json.dumps(nested(draw, detail, draw.choice(NUMBERS))))
    (folder / "checkpoints" / "step_00000001").mkdir(parents=True)
    manifest = {"files": {"../../../etc/passwd": "0" * 64}, "step": draw.choice([1, -5, "x"])}
    (folder / "checkpoints" / "step_00000001" / "manifest.json").write_text(json.dumps(manifest))
    (folder / "checkpoints" / "step_00000002.bak").mkdir()
    return folder


def coco(draw: random.Random, folder: Path) -> Path:
    """Write hostile annotations in COCO's format; return the folder."""
    (folder / "train").mkdir(parents=True)
    (folder / "train" / "1.png").write_bytes(encoded(draw, "PNG"))
    far = draw.choice([1e7, 1e30, float("nan"), -1e9, 1e3])
    shape: object = [[0, 0, far, 0, far, far, 0, far]]
    if draw.random() < 0.4:
        size = draw.choice([[64, 64], [10**6, 10**6], [-1, 4]])
        shape = {"size": size, "counts": draw.choice([[0, 4096], [2**40], "abc", [1, -5]])}
    entry = {"id": 1, "image_id": 1, "category_id": 1, "bbox": [0, 0, far, 9], "area": 9}
    entry |= {"iscrowd": draw.choice([0, 1]), "segmentation": shape}
    content: object = {
        "images": [{"id": 1, "file_name": "1.png", "width": 64, "height": 64}],
        "categories": [{"id": 1, "name": draw.choice(["cat", MARKUP, ESCAPE, "=1+1"])}],
        "annotations": [entry],
    }
    if draw.random() < 0.5:
        content = nested(draw, content, draw.choice([*NUMBERS, "../../../etc/passwd"]))
    (folder / "train.json").write_text(json.dumps(content))
    return folder


def hostile_tar(draw: random.Random, path: Path) -> Path:
    """Write an archive with members made to attack, or damaged; return its path."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for i in range(4):
            name = draw.choice(["a", "../../../b", "/c", ESCAPE, MARKUP, "x" * 300, "=1+1"])
            member = tarfile.TarInfo(f"{name}{i}.{draw.choice(['jpg', 'png', 'cls'])}")
            image = hostile_image(draw) if draw.random() < 0.6 else encoded(draw, "PNG")
            member.size = len(image)
            tar.addfile(member, io.BytesIO(image))
    data = bytearray(content.getvalue())
    for _ in range(draw.randrange(4)):  # sizes and types of headers, which have a checksum
        place = 512 * draw.randrange(max(1, len(data) // 512))
        size = draw.choice([-512, -1024, 2**40, 2**62, 0])
        head = data[place : place + 512]
        head[124:136] = (b"\xff" if size < 0 else b"\x80") + (size % 2**88).to_bytes(11, "big")
        head[156:157] = draw.choice([b"0", b"L", b"x", b"S", b"2"])
        head[148:156] = b" " * 8
        head[148:156] = b"%06o\0 " % sum(head)
        data[place : place + 512] = head
    path.write_bytes(damaged(draw, bytes(data)) if draw.random() < 0.3 else bytes(data))
    return path


def yolo(draw: random.Random, folder: Path) -> Path:
    """Write hostile labels in YOLO's format; return the folder."""
    for part in ("images", "labels"):
        (folder / part / "train").mkdir(parents=True)
    (folder / "images" / "train" / "a.png").write_bytes(encoded(draw, "PNG"))
    lines = [
        draw.choice(
            ["0 .5 .5 .1 .1", "0 0 0 1 0 1 1", "9" * 400, "0 nan .5 .1 .1", "0 1e308 0 1 1"]
        )
        for _ in range(draw.choice([3, 30_000]))
    ]
    text = "\n".join(lines) + draw.choice(["", "\0", "\x1b[31m", " x" * 1000])
    (folder / "labels" / "train" / "a.txt").write_bytes(text.encode())
    split = draw.choice(["images/train", "../../../etc", "/etc", "http://127.0.0.1:9/x", ESCAPE])
    names = draw.choice(["[cat]", f"['{MARKUP}']", "[" + "a," * 200_000 + "b]", "{0: a, 7: b}"])
    about = f"train: {json.dumps(split)}\nval: images/train\nnames: {names}\n"
    content = about.encode()
    (folder / "data.yaml").write_bytes(damaged(draw, content) if draw.random() < 0.3 else content)
    return folder


def voc(draw: random.Random, folder: Path) -> Path:
    """Write hostile labels in VOC's format; return the folder."""
    for part in ("JPEGImages", "Annotations", "ImageSets/Main", "SegmentationObject"):
        (folder / part).mkdir(parents=True)
    (folder / "JPEGImages" / "a.png").write_bytes(encoded(draw, "PNG"))
    mask = hostile_image(draw) if draw.random() < 0.5 else encoded(draw, "PNG", draw.choice("LP"))
    (folder / "SegmentationObject" / "a.png").write_bytes(mask)
    name = draw.choice(["cat", "&lt;script&gt;", "&x;", "=1+1"])
    side = draw.choice(["64", "10000000", "nan", "-3", "1e300"])
    corners = "".join(
        f"<{corner}>{draw.choice(['1', '9', '1e9', 'nan', ''])}</{corner}>"
        for corner in ("xmin", "ymin", "xmax", "ymax")
    )
    one = f"<object><name>{name}</name><bndbox>{corners}</bndbox></object>"
    kind = '<!DOCTYPE a [<!ENTITY x "y">]>' if draw.random() < 0.2 else ""
    size = f"<size><width>{side}</width><height>64</height></size>"
    many = one * draw.choice([1, 300, 25_000])
    text = f"{kind}<annotation>{size}{many}</annotation>".encode()
    (folder / "Annotations" / "a.xml").write_bytes(
        damaged(draw, text) if draw.random() < 0.3 else text
    )
    listed = draw.choice(["a", "../../a", "a\0b", ESCAPE])
    (folder / "ImageSets" / "Main" / "train.txt").write_text(f"{listed}\na\n")
    return folder


def parts(draw: random.Random, folder: Path) -> Path:
    """Write the output of a shard that no job wrote; return the folder."""
    part = folder / "parts" / "0000-of-0001" / "part-000000"
    part.mkdir(parents=True)
    shards = draw.choice([1, 1, 1, True, 10**9, "x"])
    (folder / "bulk.json").write_text(json.dumps({"version": 1, "shards": shards}))
    (part.parent / "done.json").write_text("{}")
    lines = draw.choice([b'{"picture": "a.jpg"}\n', b"x\n", b"[" * 99_999, ESCAPE.encode()])
    content = {"predictions.jsonl": lines, "predictions.csv": b"image\n\0\n", "failures.jsonl": b""}
    if draw.random() < 0.5:
        content["objects.json"] = draw.choice([b"[]", b"{}", b"[" * 99_999])
    files = {}
    for name, value in content.items():
        (part / name).write_bytes(value)
        files[name] = {"bytes": len(value), "sha256": hashlib.sha256(value).hexdigest()}
    if draw.random() < 0.2:
        (part / "predictions.csv").unlink()
        os.mkfifo(part / "predictions.csv")
        files["predictions.csv"]["bytes"] = 0
    about = {"predicted": draw.choice([1, 0, -1, 10**12, None]), "failed": 0, "files": files}
    (part / "part.json").write_text(json.dumps(about))
    return folder


def index(draw: random.Random, folder: Path) -> Path:
    """Write a hostile index of weights; return its folder."""
    folder.mkdir()
    content = json.loads((FILES / "index.json").read_text())
    content = nested(draw, content, draw.choice([*NUMBERS, ESCAPE, "../../../etc/passwd"]))
    (folder / "index.json").write_text(json.dumps(content))
    return folder


def hostile_infer(draw: random.Random) -> tuple[bytes, dict[str, str]]:
    """Return body and headers of a request of the Open Inference Protocol."""
    image = hostile_image(draw)
    tensor: dict = {"name": "image", "datatype": "BYTES", "shape": [1]}
    headers: dict[str, str] = {}
    rest = b""
    if draw.random() < 0.5:
        tensor["data"] = [base64.b64encode(image).decode()]
    else:
        rest = struct.pack("<I", draw.choice([len(image), 2**32 - 1, 0])) + image
        tensor["parameters"] = {"binary_data_size": draw.choice([len(rest), 0, -1, 2**40])}
    request: object = {"id": "1", "inputs": [tensor]}
    if draw.random() < 0.6:
        request = nested(draw, request, draw.choice([*NUMBERS, ESCAPE, "\ud800", [[]] * 1000]))
    text = json.dumps(request).encode()
    if draw.random() < 0.1:
        text = draw.choice([b"[" * 100_000, b"{" + b'"a":' * 1000, damaged(draw, text)])
    if rest:
        length = str(draw.choice([len(text), len(text), 0, -1, 10**11]))
        headers["Inference-Header-Content-Length"] = length
    return text + rest, headers


def command(draw: random.Random, folder: Path, recipe: dict) -> list[str]:
    """Write the files of one case; return the command line that reads them."""
    out = folder / "out"
    folder.mkdir(parents=True)
    match draw.randrange(16):
        case 0 | 1 | 2 | 3:
            task = draw.choice(["classification", "segmentation", "detection"])
            words = ["predict", image_folder(draw, folder / "in"), "--task", task, "-o", out]
        case 4:
            image_folder(draw, folder / "in" / "train" / draw.choice(["a", ESCAPE, "=x"]))
            words = ["data", "check", folder / "in", "--workers", 1]
        case 5:
            weights = hostile_weights(draw, folder / "w.safetensors")
            (folder / "a.png").write_bytes(encoded(draw, "PNG"))
            words = ["predict", folder / "a.png", "--weights", weights]
        case 6:
            weights = hostile_weights(draw, folder / "w.safetensors")
            (folder / "a.png").write_bytes(encoded(draw, "PNG"))
            words = [
                "view",
                "attention",
                folder / "a.png",
                "--weights",
                weights,
                "-o",
                f"{out}.png",
            ]
        case 7:
            words = ["report", run_folder(draw, folder / "run", recipe)]
        case 8:
            kind = draw.choice([["train", "--resume"], ["eval"], ["train", "--config"]])
            run = run_folder(draw, folder / "run", recipe)
            words = [*kind, run / "recipe.yaml" if kind[-1] == "--config" else run]
            words += ["--output", folder / "new"] if kind[-1] == "--config" else []
        case 9:
            words = ["predict", hostile_tar(draw, folder / "a.tar"), "-o", out]
            words += draw.choice([[], ["--task", "detection", "--format", "yolo"]])
        case 10:
            kind = draw.choice(["yolo", "voc"])
            root = {"yolo": yolo, "voc": voc}[kind](draw, folder / "in")
            words = ["data", "check", root, "--kind", kind, "--splits", "train", "--workers", 1]
        case 11:
            words = ["predict", "--merge", parts(draw, folder / "parts")]
        case 12:
            runs = [run_folder(draw, folder / f"run{i}", recipe) for i in range(2)]
            words = ["report", *runs, "-o", out.with_suffix(".html")]
        case 13:
            weights = hostile_weights(draw, folder / "w.safetensors")
            words = draw.choice(
                [
                    ["weights", "--folder", index(draw, folder / "zoo")],
                    ["weights", "pack", weights, "-o", out.with_suffix(".safetensors")],
                    ["weights", "export", weights, out],
                ]
            )
        case 14:
            (folder / "in").mkdir()
            (folder / "in" / "a.png").write_bytes(encoded(draw, "PNG"))
            lines = [
                "a.png",
                "../../../etc/passwd",
                "/dev/zero",
                "http://127.0.0.1:9/x.png",
                ESCAPE,
                "a\0",
            ]
            draw.shuffle(lines)
            (folder / "in" / "list.txt").write_text("\n".join(lines[: draw.randint(1, 6)]))
            words = ["predict", folder / "in" / "list.txt", "-o", out]
        case _:
            root = coco(draw, folder / "in")
            words = ["data", "check", root, "--annotations", "{split}.json", "--images", "{split}"]
            words += ["--splits", "train", "--workers", 1]
    return [os.fspath(word) if isinstance(word, Path) else str(word) for word in words]
