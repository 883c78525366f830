"""Throughput of `pale serve` beside the bare model: both decode the same JPEG files and run the same batched model.

    python benchmarks/serving.py                      # writes benchmarks/results/serving_cpu.md
    python benchmarks/serving.py --seconds 10 --rounds 3

The bare loop decodes and preprocesses in threads ahead of the model, with the decoder and batch size of the server, in
a process of its own. Rounds of loop and server alternate. The clients, a process of their own, share the processor with
the server, as does everything else on the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import io
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "benchmarks/results/serving_cpu.md"
CLIENTS = (1, 8, 64)
BATCH = 8
SIDE = (640, 480)
WARM = 1.0  # seconds


def photos(count: int = 16) -> list[bytes]:
    """Return JPEG files of smooth random images."""
    found = []
    for seed in range(count):
        small = np.random.default_rng(seed).integers(0, 256, (30, 40, 3), np.uint8)
        content = io.BytesIO()
        image = Image.fromarray(small).resize(SIDE, Image.Resampling.BICUBIC)
        image.save(content, "JPEG", quality=90)
        found.append(content.getvalue())
    return found


def bare(weights: str, seconds: float) -> None:
    """Print images per second of the loop without a server, and of decoding alone."""
    import torch

    from pale.predict import Predictor
    from pale.serve.limits import Limits
    from pale.serve.service import DECODERS
    from pale.serve.upload import decode_upload, open_upload

    torch.set_num_threads(1)
    predictor, limits, files = Predictor(weights, device="cpu", batch=BATCH), Limits(), photos()

    def read(number: int):
        image = decode_upload(open_upload(files[number % len(files)], limits))
        return image, predictor.prepare(image)

    def rate(duration: float, model: bool) -> float:
        with ThreadPoolExecutor(DECODERS) as pool:
            waiting = [pool.submit(read, n) for n in range(4 * BATCH)]
            count, start = 0, time.perf_counter()
            while (taken := time.perf_counter() - start) < duration:
                batch = [each.result() for each in waiting[:BATCH]]
                waiting = waiting[BATCH:] + [pool.submit(read, count + n) for n in range(BATCH)]
                if model:
                    images, tensors = zip(*batch, strict=True)
                    predictor.predict(images, ["image"] * BATCH, tensors)
                count += BATCH
            return count / taken

    rate(WARM, True)
    print(json.dumps({"loop": rate(seconds, True), "decode": rate(seconds / 2, False)}))


async def load(url: str, clients: int, seconds: float) -> tuple[int, int, float]:
    """Return images answered, requests refused, and seconds, of clients that send their next request at once."""
    host, port = url.removeprefix("http://").rsplit(":", 1)
    files, answered, refused = photos(), 0, 0
    start = time.perf_counter()

    async def client(number: int) -> None:
        nonlocal answered, refused
        reader, writer = await asyncio.open_connection(host, int(port))
        while time.perf_counter() - start < seconds:
            content = files[number % len(files)]
            number += 1
            head = f"POST /predict/classification HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(content)}\r\n\r\n"
            writer.write(head.encode() + content)
            about = await reader.readuntil(b"\r\n\r\n")
            length = next(
                int(line.split(b":")[1])
                for line in about.lower().splitlines()
                if line.startswith(b"content-length")
            )
            await reader.readexactly(length)
            if about.split()[1] == b"200":
                answered += 1
            else:
                refused += 1
        writer.close()

    await asyncio.gather(*(client(n) for n in range(clients)))
    return answered, refused, time.perf_counter() - start


def call(*words: object) -> dict:
    """Run this program in another process and return what it prints."""
    command = [sys.executable, __file__, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def measure(weights: str, seconds: float, rounds: int) -> dict[str, list[float]]:
    """Return images per second of each kind of run, by round."""
    found: dict[str, list[float]] = {name: [] for name in ("loop", "decode", *map(str, CLIENTS))}
    words = [sys.executable, "-m", "pale", "serve", "--json", "--port", "0", "--device", "cpu"]
    words += ["--threads", "1", "--weights", weights, "--batch", str(BATCH)]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as server:
        try:
            url = json.loads(server.stdout.readline())["url"]
            call("--load", url, "--clients", 8, "--seconds", WARM)
            for _ in range(rounds):
                for name, rate in call("--bare", weights, "--seconds", seconds).items():
                    found[name].append(rate)
                for clients in CLIENTS:
                    done = call("--load", url, "--clients", clients, "--seconds", seconds)
                    assert not done["refused"], done
                    found[str(clients)].append(done["rate"])
        finally:
            server.terminate()
    return found


def report(found: dict[str, list[float]], options: argparse.Namespace) -> str:
    """Return the page of results."""
    import torch

    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    commit = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    loop = statistics.median(found["loop"])
    names = {
        "loop": "bare loop",
        "decode": "decoding and preprocessing alone",
        **{str(n): f"`pale serve`, {n} client{'s' * (n > 1)}" for n in CLIENTS},
    }
    lines = [
        "# Serving throughput on a CPU",
        "",
        f"{datetime.date.today()}, commit {commit.stdout.strip()}, {platform.machine()}, {os.cpu_count()} cores, "
        f"Python {platform.python_version()}, torch {torch.__version__}; load average at the end "
        f"{os.getloadavg()[0]:.1f}.",
        "",
        f"Model `{options.weights}`, JPEG files of {SIDE[0]}x{SIDE[1]} pixels, batches of up to {BATCH}, one PyTorch "
        "thread. The bare loop decodes the same files with the same decoder in threads and runs the same batched model "
        f"in one process, without HTTP. Medians of {options.rounds} rounds of {options.seconds:g} s; loop and server "
        "alternate. The clients run on the same cores as the server. The machine is shared with other work, so the "
        "ratios are more reliable than the rates. "
        "Not measured: a GPU.",
        "",
        "| | images/s (median) | lowest to highest | of the bare loop |",
        "| --- | ---: | ---: | ---: |",
    ]
    for name, rates in found.items():
        median = statistics.median(rates)
        span = f"{min(rates):.1f} to {max(rates):.1f}"
        lines.append(f"| {names[name]} | {median:.1f} | {span} | {100 * median / loop:.0f} % |")
    typed = f"python benchmarks/serving.py --seconds {options.seconds:g} --rounds {options.rounds}"
    return "\n".join([*lines, "", "```bash", typed, "```", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weights", default="classify_pets")
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--bare", help=argparse.SUPPRESS)
    parser.add_argument("--load", help=argparse.SUPPRESS)
    parser.add_argument("--clients", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.bare:
        bare(options.bare, options.seconds)
    elif options.load:
        answered, refused, taken = asyncio.run(load(options.load, options.clients, options.seconds))
        print(json.dumps({"rate": answered / taken, "refused": refused}))
    else:
        text = report(measure(options.weights, options.seconds, options.rounds), options)
        RESULT.write_text(text)
        print(text)


if __name__ == "__main__":
    main()
