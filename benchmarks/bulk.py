"""Bulk prediction: start, memory and throughput of `pale predict --shard` beside a plain loop, on a CPU.

    python benchmarks/bulk.py /tmp/bulk --images 20000 -o benchmarks/results/bulk_cpu.md

Writes generated JPEG files (about 160x120) and weights of pale_nano into the folder, unless they are there. Then

- one command predicts all of them at the first size, while its memory is read every second; its start is the time until
  the first result;
- slices of the same files are predicted in one process, in turn by a job (parts written, synced, verified) and by two
  loops that read, decode and resize the same files, run the same model on batches of the same size, and write nothing:
  one does this one after the other, the other decodes in two threads while the model runs. The result is the median
  over slices of the ratio to each loop.
"""

import argparse
import itertools
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from pale.bench.timing import quartiles
from pale.data.sources.items import FileItem, Shard, local_items
from pale.predict import Predictor, as_image
from pale.predict.bulk import predict_shard
from pale.recipes import get
from pale.weights.write import save_weights

ROOT = Path(__file__).parent.parent
CLASSES = 100
WAYS = ("job", "loop", "loop with threads")


def write_images(root: Path, count: int) -> None:
    """Write JPEG files of noise on a coarse grid, 1000 to a folder; each has its own content."""
    rng = np.random.default_rng(0)
    for number in range(count):
        path = root / f"{number // 1000:04d}" / f"{number:07d}.jpg"
        if number % 1000 == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
        grid = rng.integers(0, 256, (6, 8, 3), np.uint8)
        if not path.exists():
            Image.fromarray(grid).resize((160, 120), Image.Resampling.BILINEAR).save(
                path, quality=90
            )


def write_weights(path: Path, size: int) -> None:
    recipe = get("quickstart").override({"data.size": size})
    torch.manual_seed(0)
    model = recipe.model.build(CLASSES, size)
    classes = [f"class {i}" for i in range(CLASSES)]
    save_weights(path, model.state_dict(), {"recipe": recipe.plain(), "classes": classes})


def rss_mb(process: int) -> float:
    """Return the resident memory of a process, MB."""
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    return 0.0


def cpu_s(process: int) -> float:
    """Return the CPU time that a process has used, seconds."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def run_command(root: Path, weights: Path, output: Path, minutes: float) -> dict:
    """Predict all images with the command, or as many as time allows; measure its start, memory and throughput."""
    shutil.rmtree(output, ignore_errors=True)
    command = [
        sys.executable,
        "-m",
        "pale",
        "predict",
        str(root),
        "--shard",
        "0/1",
        "-o",
        str(output),
    ]
    command += ["--weights", str(weights), "--device", "cpu", "--json"]
    began = time.monotonic()
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    start, start_cpu, memory = None, 0.0, []
    while child.poll() is None:
        if time.monotonic() - began > 60 * minutes:
            child.terminate()  # it writes the part that it has
            child.wait()
            break
        if start is None:
            if next(output.glob("parts/*/.part-*"), None) is not None:
                start, start_cpu = time.monotonic() - began, cpu_s(child.pid)
        elif not memory or time.monotonic() - memory[-1][0] >= 1:
            memory.append((time.monotonic(), rss_mb(child.pid)))
        time.sleep(0.05 if start is None else 0.25)
    seconds = time.monotonic() - began
    assert child.returncode in (0, 130), child.returncode
    assert start is not None
    parts = [json.loads(path.read_text()) for path in output.glob("parts/*/part-*/part.json")]
    predicted = sum(part["predicted"] for part in parts)
    return {
        "start_s": start,
        "start_cpu_s": start_cpu,
        "seconds": seconds,
        "images_per_s": predicted / (seconds - start),
        "predicted": predicted,
        "memory_mb": [round(value, 1) for _, value in memory],
    }


@torch.no_grad()
def plain_loop(predictor: Predictor, paths: list[str], threads: int) -> int:
    """Decode, prepare and classify; return the number of images.

    Args:
        predictor: whose model and preprocessing are used.
        paths: of the images.
        threads: that decode the next batch while the model runs; 0: one step after the other.
    """
    model, pipeline = predictor.loaded.model, predictor.loaded.pipeline

    def read(path: str) -> torch.Tensor:
        return pipeline.prepare(as_image(path))

    def batches() -> Iterator[list[torch.Tensor]]:
        parts = [
            paths[i : i + predictor.batch_size] for i in range(0, len(paths), predictor.batch_size)
        ]
        if not threads:
            yield from ([read(path) for path in part] for part in parts)
            return
        with ThreadPoolExecutor(threads) as pool:
            ahead = [[pool.submit(read, path) for path in part] for part in parts[:2]]
            for part in itertools.chain(parts[2:], [[], []]):
                yield [each.result() for each in ahead.pop(0)]
                ahead.append([pool.submit(read, path) for path in part])

    done = 0
    for tensors in batches():
        if tensors:
            best = pipeline.forward(model, tensors).softmax(1).topk(5)
            done += len(best.values.tolist())
    return done


def compare(weights: Path, items: list[FileItem], folder: Path, slice_: int, rounds: int) -> dict:
    """Time the job and both loops on slices of the files, in turn."""
    predictor = Predictor(weights, device="cpu")
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    work: dict[str, list[float]] = {way: [] for way in WAYS}
    plain_loop(predictor, [item.path for item in items[:200]], 2)  # warm up
    for turn in range(rounds):
        start = turn * slice_ % (len(items) - slice_ + 1)
        part = items[start : start + slice_]
        paths = [item.path for item in part]
        for path in paths:  # all three read from the page cache
            Path(path).read_bytes()
        for way in WAYS[turn % 3 :] + WAYS[: turn % 3]:
            began, used = time.perf_counter(), time.process_time()
            if way == "job":
                shutil.rmtree(folder, ignore_errors=True)
                done = predict_shard(predictor, part, folder, Shard()).predicted
            else:
                done = plain_loop(predictor, paths, 2 if "threads" in way else 0)
            times[way].append(time.perf_counter() - began)
            work[way].append(time.process_time() - used)
            assert done == len(part), (way, done)
        print(
            turn, {way: f"{slice_ / found[-1]:.0f}/s" for way, found in times.items()}, flush=True
        )
    found: dict = {}
    for way in WAYS:
        speeds = [slice_ / seconds for seconds in times[way]]
        ratios = [a / b for a, b in zip(times[way], times["job"], strict=True)]
        found[way] = (statistics.median(speeds), *quartiles(speeds))
        found[f"ratio to {way}"] = (statistics.median(ratios), *quartiles(ratios))
        found[f"cpu ms, {way}"] = 1000 * statistics.median(work[way]) / slice_
    return found


def report(args: argparse.Namespace, whole: dict, cases: list[dict], load: list[float]) -> str:
    """Return the page of results."""
    tenth = max(1, len(whole["memory_mb"]) // 10)
    parts = [whole["memory_mb"][i : i + tenth] for i in range(0, tenth * 10, tenth)]
    tenths = [statistics.median(part) for part in parts if part]  # a short run has fewer samples
    git = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    commit = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    typed = f"--images {args.images} --rounds {args.rounds}"
    typed += "".join(f" --case {size}:{count}" for size, count in args.case)
    lines = [
        "# Bulk prediction on a CPU",
        "",
        f"{time.strftime('%Y-%m-%d')}, commit {commit.strip()}, {platform.machine()}, {os.cpu_count()} cores, torch "
        f"{torch.__version__}, {torch.get_num_threads()} threads; generated JPEG files of 160x120, pale_nano, batch "
        f"16. Load average when it started: {load[0]:.1f}, when it ended: {load[1]:.1f}.",
        "",
        f"| one command, {whole['predicted']:,} of {args.images:,} files at {args.case[0][0]} px in "
        f"{whole['seconds']:.0f} s | |",
        "| --- | --- |",
        f"| time until the first result (imports, weights, listing all files) | {whole['start_s']:.1f} s, "
        f"{whole['start_cpu_s']:.1f} s of CPU time |",
        f"| throughput after it | {whole['images_per_s']:.0f} images/s |",
        f"| resident memory, median of each tenth of the time | {', '.join(f'{m:.0f}' for m in tenths)} MB |",
        f"| peak | {max(whole['memory_mb']):.0f} MB |",
        "",
        f"In one process, in turn on slices of the files, {args.rounds} rounds; 160 px is the size of the included "
        "classifier:",
        "",
        "| size | files in a slice | | images/s (median, quartiles) | CPU ms per image | speed of the job relative to "
        "it (median, quartiles) |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for (size, count), found in zip(args.case, cases, strict=True):
        for way in WAYS:
            speed, ratio = (
                f"{middle:{digits}} ({low:{digits}} to {high:{digits}})"
                for digits, (middle, low, high) in (
                    (".0f", found[way]),
                    (".2f", found[f"ratio to {way}"]),
                )
            )
            cpu = found[f"cpu ms, {way}"]
            lines.append(f"| {size} px | {count} | {way} | {speed} | {cpu:.2f} | {ratio} |")
    lines += ["", "```bash", f"python benchmarks/bulk.py DIR {typed}", "```"]
    return "\n".join(lines) + "\n"


def case(text: str) -> tuple[int, int]:
    """Return the side of the model input and the files of a slice, from SIZE:FILES."""
    size, _, count = text.partition(":")
    return int(size), int(count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--images", type=int, default=20_000)
    parser.add_argument("--case", type=case, action="append", metavar="SIZE:FILES")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--minutes", type=float, default=60, help="time limit of the command")
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    args.case = args.case or [(32, 2000), (160, 250)]
    root = args.folder / f"images-{args.images}"
    weights = {size: args.folder / f"nano-{size}.safetensors" for size, _ in args.case}
    write_images(root, args.images)
    for size, path in weights.items():
        write_weights(path, size)
    load = [os.getloadavg()[0]]
    items = list(local_items([root]))
    slices = args.folder / "slices"
    cases = [compare(weights[size], items, slices, n, args.rounds) for size, n in args.case]
    whole = run_command(root, weights[args.case[0][0]], args.folder / "out", args.minutes)
    load.append(os.getloadavg()[0])
    text = report(args, whole, cases, load)
    print(text)
    if args.output:
        args.output.write_text(text)


if __name__ == "__main__":
    main()
