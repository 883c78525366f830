"""Hostile files against the commands, and hostile uploads against a running server.

    python benchmarks/hostile.py --cases 1000 --uploads 1000 -o benchmarks/results/hostile

Every case is one command on generated files, in a process of its own (a fork of one that has imported the package):
images, masks, annotations, recipes, run folders and weights that are damaged, oversized or made to attack. Counted are
tracebacks, cases that take longer than --seconds, deaths by a signal, and the peak memory. The server gets the images
as uploads on every task; counted are answers of 5xx, requests without an answer and peak memory.
Writes OUT.json and OUT.md with versions, commit and command; the files of cases that failed stay in --work.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import resource
import shlex
import signal
import struct
import subprocess
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import httpx
import numpy as np
import yaml
from PIL import Image
from safetensors import safe_open

from pale.cli.main import main as cli
from pale.serve.limits import Limits
from pale.train.distributed import join
from pale.train.environment import environment
from pale.weights.zoo.index import FOLDER as FILES

WAIT = 10  # a case may take so many times its CPU time, for it may run beside others
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


def command(draw: random.Random, folder: Path, recipe: dict) -> list[str]:
    """Write the files of one case; return the command line that reads them."""
    out = folder / "out"
    folder.mkdir(parents=True)
    match draw.randrange(10):
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
        case _:
            root = coco(draw, folder / "in")
            words = ["data", "check", root, "--annotations", "{split}.json", "--images", "{split}"]
            words += ["--splits", "train", "--workers", 1]
    return [os.fspath(word) if isinstance(word, Path) else str(word) for word in words]


def cpu_seconds(process: int) -> float:
    """Return the CPU time of a process so far."""
    values = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(values[11]) + int(values[12])) / os.sysconf("SC_CLK_TCK")


def executed(words: list[str], seconds: float) -> dict:
    """Run a command in a fork; return how it ended."""
    read, write = os.pipe()
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        os.close(read)
        for number in (1, 2):
            os.dup2(write, number)
        code = 70
        try:
            sys.argv = ["pale", *words]
            code = cli(words)
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code if isinstance(code, int) else 1)
    os.close(write)
    os.set_blocking(read, False)
    output, killed = b"", False
    while True:
        with contextlib.suppress(BlockingIOError):
            output = (output + os.read(read, 1 << 20))[-1_000_000:]
        done, status, usage = os.wait4(child, os.WNOHANG)
        if done:
            break
        if cpu_seconds(child) > seconds or time.monotonic() - began > WAIT * seconds:
            os.kill(child, signal.SIGKILL)
            killed = True
        time.sleep(0.01)
    with contextlib.suppress(BlockingIOError):
        output += os.read(read, 1 << 20)
    os.close(read)
    return {
        "command": " ".join(words[: 2 if words[0] in ("data", "view") else 1]),
        "code": os.waitstatus_to_exitcode(status),
        "seconds": usage.ru_utime + usage.ru_stime,
        "hang": killed,
        "traceback": b"Traceback (most recent call last)" in output,
        "escape": b"\x1b]0;" in output,
        "peak_mb": usage.ru_maxrss / 1024,
        "output": output[-1500:].decode(errors="replace"),
        "words": words,
    }


def files(args: argparse.Namespace) -> dict:
    """Run all cases; return the counts, and keep the folders of those that failed."""
    with safe_open(FILES / "classify_pets.safetensors", "np") as opened:
        recipe = json.loads(opened.metadata()["pale"])["recipe"]
    cases, failed = [], []
    for i in range(args.first, args.first + args.cases):
        folder = args.work / str(i)
        words = command(random.Random(i), folder, recipe)
        count = sum(not path.is_dir() for path in folder.rglob("*"))
        case = executed(words, args.seconds) | {"case": i, "files": count}
        cases.append(case)
        bad = case["traceback"] or case["hang"] or case["code"] < 0 or case["escape"]
        if bad or case["peak_mb"] > args.memory_mb:
            failed.append(case)
            flags = {k: v for k, v in case.items() if k not in ("output", "words")}
            print(f"{flags}\n{shlex.join(case['words'])}\n{case['output'][-600:]}", flush=True)
        else:
            subprocess.run(["rm", "-rf", folder], check=True)
    return {
        "cases": len(cases),
        "files": sum(case["files"] for case in cases),
        "commands": dict(Counter(case["command"] for case in cases)),
        "exit_codes": dict(Counter(str(case["code"]) for case in cases)),
        "tracebacks": sum(case["traceback"] for case in cases),
        "hangs": sum(case["hang"] for case in cases),
        "signals": sum(case["code"] < 0 and not case["hang"] for case in cases),
        "raw_escapes": sum(case["escape"] for case in cases),
        "longest_s": max(case["seconds"] for case in cases),
        "peak_mb": max(case["peak_mb"] for case in cases),
        "base_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "bound_mb": args.memory_mb,
        "limit_s": args.seconds,
        "failed": failed,
    }


def uploads(args: argparse.Namespace) -> dict:
    """Send hostile images to a server on every task; return the counts."""
    words = [sys.executable, "-m", "pale", "serve", "--json", "--device", "cpu", "--port", "0"]
    server = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        about = json.loads(server.stdout.readline())
        status = Path(f"/proc/{server.pid}/status")

        def memory(name: str) -> float:
            line = next(x for x in status.read_text().splitlines() if x.startswith(name))
            return int(line.split()[1]) / 1024

        idle, found, longest = memory("VmRSS"), Counter(), 0.0
        with httpx.Client(base_url=about["url"], timeout=60, trust_env=False) as client:
            for i in range(args.uploads):
                draw = random.Random(f"upload {i}")
                task = draw.choice(["classification", "segmentation", "detection"])
                path = f"/predict/{task}" + draw.choice(["", "?output=drawn"])
                began = time.monotonic()
                try:
                    answer = client.post(path, content=hostile_image(draw))
                    found[str(answer.status_code)] += 1
                except httpx.HTTPError as error:
                    found[type(error).__name__] += 1
                longest = max(longest, time.monotonic() - began)
            client.get("/health").raise_for_status()
        return {
            "uploads": args.uploads,
            "answers": dict(found),
            "server_errors": sum(n for code, n in found.items() if code.startswith("5")),
            "unanswered": sum(n for code, n in found.items() if not code.isdigit()),
            "longest_s": longest,
            "idle_mb": idle,
            "peak_mb": memory("VmHWM"),
            "bound_mb": idle + 1.25 * Limits().memory_mb * 1e6 / 2**20,
        }
    finally:
        server.terminate()
        server.communicate(timeout=60)


def table(report: dict) -> str:
    """Return the result as Markdown."""
    lines = [
        "# Hostile files and uploads",
        "",
        "Generated files that are damaged, oversized or made to attack (images, file names, FIFOs, masks, annotations,",
        "recipes, run folders, weights), each read by a command in a process of its own; and such images sent to a",
        "running `pale serve`, to all three tasks. Memory is the largest resident set of a process; `base` is that of",
        "a process that has only imported the package and predicted nothing, or of the server before the first upload.",
        "",
    ]
    if found := report.get("files"):
        commands = ", ".join(f"{k} {v}" for k, v in sorted(found["commands"].items()))
        codes = ", ".join(f"{k}: {v}" for k, v in sorted(found["exit_codes"].items()))
        lines += [
            "| files | result |",
            "| --- | --- |",
            f"| files | {found['files']} |",
            f"| commands | {found['cases']} ({commands}) |",
            f"| exit codes | {codes} |",
            f"| tracebacks | {found['tracebacks']} |",
            f"| hangs (over {found['limit_s']:.0f} s of CPU time, or {WAIT} times that) | {found['hangs']} |",
            f"| deaths by a signal | {found['signals']} |",
            f"| terminal escapes printed raw | {found['raw_escapes']} |",
            f"| longest command | {found['longest_s']:.1f} s of CPU time |",
            f"| peak memory, MB | {found['peak_mb']:.0f} (base {found['base_mb']:.0f}, "
            f"bound {found['bound_mb']:.0f}) |",
            "",
            described(found),
            "",
        ]
    if found := report.get("uploads"):
        answers = ", ".join(f"{k}: {v}" for k, v in sorted(found["answers"].items()))
        lines += [
            "| uploads | result |",
            "| --- | --- |",
            f"| uploads | {found['uploads']} |",
            f"| answers by status | {answers} |",
            f"| answers of 5xx | {found['server_errors']} |",
            f"| without an answer | {found['unanswered']} |",
            f"| longest answer | {found['longest_s']:.1f} s |",
            f"| peak memory, MB | {found['peak_mb']:.0f} (base {found['idle_mb']:.0f}, "
            f"bound {found['bound_mb']:.0f}) |",
            "",
            described(found),
            "",
        ]
    return "\n".join(lines)


def described(found: dict) -> str:
    """Return the line that names command, date and versions."""
    facts = found["environment"]
    return (
        f"`{found['command']}`, {found['date']}, {found['seconds']} s; pale {facts['pale']}, "
        f"commit {facts['commit']}, torch {facts['torch']}, timm {facts['timm']}, Python {facts['python']}, CPU."
    )


def recorded(part: Callable[[argparse.Namespace], dict]) -> Callable[[argparse.Namespace], dict]:
    """Add command, date, duration and versions to the result of a part."""

    def run(args: argparse.Namespace) -> dict:
        began = time.monotonic()
        with join() as world:
            about = {
                "environment": environment(world),
                "command": shlex.join(["python", *sys.argv]),
            }
        found = part(args)
        about |= {
            "date": time.strftime("%Y-%m-%d"),
            "seconds": round(time.monotonic() - began),
        }
        return about | found

    return run


PARTS = {"files": recorded(files), "uploads": recorded(uploads)}
NUMBER = {"files": "cases", "uploads": "uploads"}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=1000, help="0: keep those of an earlier run")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--uploads", type=int, default=1000, help="0: keep those of an earlier run")
    parser.add_argument(
        "--seconds", type=float, default=60, help="CPU time; a case that takes longer hangs"
    )
    parser.add_argument("--memory-mb", type=float, default=2500, help="bound of a case")
    parser.add_argument("--work", type=Path, default=Path("runs/hostile"), help="generated files")
    parser.add_argument("-o", "--output", type=Path, required=True, help="without suffix")
    args = parser.parse_args()
    report = {part: run(args) for part, run in PARTS.items() if getattr(args, NUMBER[part])}
    args.output.parent.mkdir(parents=True, exist_ok=True)
    path = args.output.with_suffix(".json")
    earlier = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(earlier | report, indent=1) + "\n")
    args.output.with_suffix(".md").write_text(table(earlier | report))
    print(table(report))
    failed = len(report["files"]["failed"]) if "files" in report else 0
    if found := report.get("uploads"):
        failed += found["server_errors"] + found["unanswered"]
        failed += found["peak_mb"] > found["bound_mb"]
    if failed:
        raise SystemExit(f"{failed} cases failed; {args.work} has the files of commands")


if __name__ == "__main__":
    main()
