"""Bulk prediction: start, memory and throughput of `pale predict --shard` beside a plain loop, on a CPU.

    python benchmarks/bulk.py /tmp/bulk --images 100000 -o benchmarks/results/bulk_cpu.md

Writes generated JPEG files (about 160x120) and weights of pale_nano into the folder, unless they are there. Then

- one command predicts all of them, while its memory is read every second; its start is the time until the first result;
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

CLASSES = 100


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
    times: dict[str, list[float]] = {"job": [], "loop": [], "loop with threads": []}
    work: dict[str, list[float]] = {way: [] for way in times}
    plain_loop(predictor, [item.path for item in items[:200]], 2)  # warm up
    for turn in range(rounds):
        part = items[turn * slice_ : (turn + 1) * slice_]
        paths = [item.path for item in part]
        for path in paths:  # all three read from the page cache
            Path(path).read_bytes()
        ways = list(times)
        for way in ways[turn % 3 :] + ways[: turn % 3]:
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
    found: dict = {way: slice_ / statistics.median(t) for way, t in times.items()}
    for way in times:
        ratios = [a / b for a, b in zip(times[way], times["job"], strict=True)]
        found[f"ratio to {way}"] = (statistics.median(ratios), *quartiles(ratios))
        found[f"cpu ms, {way}"] = 1000 * statistics.median(work[way]) / slice_
    return found


def report(args: argparse.Namespace, found: dict) -> str:
    whole, slices, memory = found["command"], found["slices"], found["command"]["memory_mb"]
    tenth = max(1, len(memory) // 10)
    parts = [memory[i : i + tenth] for i in range(0, tenth * 10, tenth)]
    tenths = [statistics.median(part) for part in parts if part]  # a short run has fewer samples
    lines = [
        "# Bulk prediction on two CPU cores",
        "",
        f"{time.strftime('%Y-%m-%d')}, {platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, "
        f"{torch.get_num_threads()} threads; {args.images:,} JPEG files of 160x120, pale_nano at "
        f"{args.size} px, batch 16. Load average when it started: {found['load'][0]:.1f}, when it ended: "
        f"{found['load'][1]:.1f}.",
        f"`python benchmarks/bulk.py DIR --images {args.images} --size {args.size} --slice {args.slice} "
        f"--rounds {args.rounds}`",
        "",
        f"| one command, {whole['predicted']:,} of {args.images:,} files in {whole['seconds'] / 60:.1f} min | |",
        "| --- | --- |",
        f"| time until the first result (imports, weights, listing all files) | {whole['start_s']:.1f} s, "
        f"{whole['start_cpu_s']:.1f} s of CPU time |",
        f"| throughput after it | {whole['images_per_s']:.0f} images/s |",
        f"| resident memory, median of each tenth of the time | {', '.join(f'{m:.0f}' for m in tenths)} MB |",
        f"| peak | {max(memory):.0f} MB |",
        "",
        f"In one process, in turn on slices of {args.slice} files, {args.rounds} rounds:",
        "",
        "| | images/s (median) | CPU ms per image | speed of the job relative to it (median, quartiles) |",
        "| --- | --- | --- | --- |",
    ]
    for way in ("job", "loop", "loop with threads"):
        ratio, low, high = slices[f"ratio to {way}"]
        lines.append(
            f"| {way} | {slices[way]:.0f} | {slices[f'cpu ms, {way}']:.2f} | {ratio:.2f} ({low:.2f} to {high:.2f}) |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--images", type=int, default=100_000)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--slice", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--minutes", type=float, default=60, help="time limit of the command")
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    root, weights = args.folder / f"images-{args.images}", args.folder / "nano.safetensors"
    write_images(root, args.images)
    write_weights(weights, args.size)
    load = os.getloadavg()[0]
    items = list(local_items([root]))
    found = {"slices": compare(weights, items, args.folder / "slices", args.slice, args.rounds)}
    found["command"] = run_command(root, weights, args.folder / "out", args.minutes)
    found["load"] = [load, os.getloadavg()[0]]
    text = report(args, found)
    print(text)
    if args.output:
        args.output.write_text(text)


if __name__ == "__main__":
    main()
