"""Throughput of `pale serve` beside the bare model: both decode the same JPEG files and run the same batched model.

    python benchmarks/serving.py                      # writes benchmarks/results/serving_cpu.md
    python benchmarks/serving.py --seconds 10 --rounds 3
    python benchmarks/serving.py --device cuda --output benchmarks/results/serving_h200.md

The bare loop decodes and preprocesses in threads ahead of the model, with the decoder and batch size of the server, in
a process of its own. Rounds of loop and server alternate. The clients, processes of their own, share the processor with
the server, as does everything else on the machine. All processes run during the whole comparison, so that nothing is
loaded or compiled between measurements; the ones that are not measured wait.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import io
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

ROOT = Path(__file__).parent.parent
CLIENTS = (1, 8, 64)
SIDE = (640, 480)
WARM = 0.5  # seconds before each measurement; answers in this time are not counted
AHEAD = 4  # batches that the bare loop decodes ahead of the model
PACKAGES = ("torch", "triton", "timm", "pillow", "uvicorn", "h11", "fastapi")
# A GPU is faster with larger batches; a CPU is not, and its model takes longer to load than to run.
DEFAULTS = {
    "cpu": {"weights": "classify_pets", "batch": 8, "client_processes": 1},
    "cuda": {"weights": "pale_tiny", "batch": 32, "client_processes": 4},
}
Found = dict[str, list[dict[str, float]]]


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


def respond(about: dict[str, Any], handle: Any) -> None:
    """Print a line of JSON, then one for each line of JSON that arrives, until there are no more."""
    print(json.dumps(about), flush=True)
    for line in sys.stdin:
        print(json.dumps(handle(**json.loads(line))), flush=True)


def bare(options: argparse.Namespace) -> None:
    """Measure the loop without a server, and decoding alone, on request."""
    import torch

    from pale.predict import Predictor
    from pale.serve.limits import Limits
    from pale.serve.service import DECODERS
    from pale.serve.upload import decode_upload, open_upload
    from pale.train.environment import commit

    torch.set_num_threads(1)
    batch, limits, files = options.batch, Limits(), photos()
    predictor = Predictor(options.bare, device=options.device, batch=batch)

    def read(number: int) -> tuple[Image.Image, torch.Tensor]:
        image = decode_upload(open_upload(files[number % len(files)], limits))
        return image, predictor.prepare(image)

    def measure(model: bool, seconds: float) -> dict[str, float]:
        with ThreadPoolExecutor(DECODERS) as pool:
            waiting = [pool.submit(read, n) for n in range(AHEAD * batch)]
            window, worked = Window(seconds), 0.0
            while window.open:
                decoded = [each.result() for each in waiting[:batch]]
                waiting = waiting[batch:] + [pool.submit(read, n) for n in range(batch)]
                start = time.perf_counter()
                if model:
                    images, tensors = zip(*decoded, strict=True)
                    predictor.predict(images, ["image"] * batch, tensors)
                if window.count(batch):
                    worked += time.perf_counter() - start
            found = {"rate": window.rate}
            if model:
                found |= {
                    "batch": batch,
                    "model_ms": 1000 * worked * batch / max(1, window.counted),
                }
            return found

    measure(True, WARM)  # what is compiled or allocated at the first call
    cuda = options.device == "cuda"
    device = torch.cuda.get_device_name() if cuda else f"{platform.machine()} processor"
    respond({"device": device, "commit": commit(), "decoders": DECODERS}, measure)


class Window:
    """Counts what is done in a time that starts after `WARM` seconds; both sides are in full work then.

    Args:
        seconds: length of that time.
    """

    def __init__(self, seconds: float) -> None:
        self.start, self.seconds, self.counted = time.perf_counter() + WARM, seconds, 0
        self.first = self.last = self.start

    @property
    def open(self) -> bool:
        """Whether the time has not passed."""
        return time.perf_counter() < self.start + self.seconds

    def count(self, number: int = 1) -> bool:
        """Count what is done now; return whether it is in the time."""
        now = time.perf_counter()
        if now < self.start:
            self.first = self.last = now
            return False
        if now > self.start + self.seconds and self.counted:
            return False
        self.counted += number
        self.last = now
        return True

    @property
    def rate(self) -> float:
        """Number per second, from the last one before the time to the last one in it."""
        return self.counted / (self.last - self.first) if self.counted else 0.0


def load(options: argparse.Namespace) -> None:
    """Send requests on request, from clients that send their next one at once."""
    host, port = options.load.removeprefix("http://").rsplit(":", 1)
    files = photos()
    path = f"POST /predict/classification HTTP/1.1\r\nHost: {host}\r\nContent-Length: "
    requests = [f"{path}{len(content)}\r\n\r\n".encode() + content for content in files]

    async def client(number: int, window: Window, found: dict[str, int]) -> None:
        reader, writer = await asyncio.open_connection(host, int(port))
        while window.open:
            writer.write(requests[number % len(requests)])
            number += 1
            head = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"\r\ncontent-length: *(\d+)", head, re.IGNORECASE)
            assert length is not None
            await reader.readexactly(int(length[1]))
            if head.split(maxsplit=2)[1] == b"200":
                window.count()
            else:
                found["refused"] += 1
        writer.close()

    async def run(numbers: list[int], seconds: float) -> dict[str, float]:
        window, found = Window(seconds), {"refused": 0}
        await asyncio.gather(*(client(number, window, found) for number in numbers))
        return found | {"rate": window.rate}

    respond({}, lambda **asked: asyncio.run(run(**asked)))


@dataclass
class Helper:
    """Another process of this program, or a server.

    Attributes:
        process: its process; it reads and prints lines of JSON.
        about: the first line that it has printed.
    """

    process: subprocess.Popen[str]
    about: dict[str, Any]

    def send(self, **asked: object) -> None:
        """Send a request."""
        assert self.process.stdin is not None
        print(json.dumps(asked), file=self.process.stdin, flush=True)

    def receive(self) -> dict[str, Any]:
        """Return the next line that it prints."""
        assert self.process.stdout is not None
        if not (line := self.process.stdout.readline()):
            raise RuntimeError(f"{self.process.args} ended with code {self.process.wait()}")
        found: dict[str, Any] = json.loads(line)
        return found

    def ask(self, **asked: object) -> dict[str, Any]:
        """Send a request and return its response."""
        self.send(**asked)
        return self.receive()


@contextmanager
def started(*words: object) -> Iterator[Helper]:
    """Start Python with these arguments, and stop it at the end."""
    command, pipe = [sys.executable, *map(str, words)], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        helper = Helper(process, {})
        try:
            helper.about = helper.receive()
            yield helper
        finally:
            process.terminate()


def batches(url: str) -> tuple[float, float, float]:
    """Return the numbers of batches and of their images so far, and the seconds of the model."""
    with urllib.request.urlopen(f"{url}/metrics") as page:
        text = page.read().decode()

    def total(name: str) -> float:
        found = re.search(rf'^{name}{{kind="predict".*}} (\S+)$', text, re.MULTILINE)
        return float(found[1]) if found else 0.0

    names = ("pale_batch_pictures_count", "pale_batch_pictures_sum", "pale_model_seconds_sum")
    count, images, seconds = map(total, names)
    return count, images, seconds


def ask_server(url: str, helpers: list[Helper], clients: int, seconds: float) -> dict[str, float]:
    """Return images per second of so many clients together, with the mean batch of the server."""
    before = batches(url)
    busy = helpers[:clients]
    for n, helper in enumerate(busy):
        helper.send(numbers=list(range(n, clients, len(busy))), seconds=seconds)
    answers = [helper.receive() for helper in busy]
    if any(answer["refused"] for answer in answers):
        raise RuntimeError(f"the server refused requests of {clients} clients: {answers}")
    count, images, worked = (b - a for a, b in zip(before, batches(url), strict=True))
    rate = sum(answer["rate"] for answer in answers)
    return {"rate": rate, "batch": images / count, "model_ms": 1000 * worked / count}


def measure(options: argparse.Namespace) -> tuple[Found, dict[str, Any]]:
    """Return the results of each kind of run, by round, and a description of the machine."""
    found: Found = {name: [] for name in ("loop", "decode", *map(str, CLIENTS))}
    same = ["--device", options.device, "--batch", options.batch]
    words = ["-m", "pale", "serve", "--json", "--port", 0, "--threads", 1, *same]
    with ExitStack() as stack:
        server = stack.enter_context(started(*words, "--weights", options.weights))
        url = server.about["url"]
        loop = stack.enter_context(started(__file__, "--bare", options.weights, *same))
        helpers = [
            stack.enter_context(started(__file__, "--load", url))
            for _ in range(options.client_processes)
        ]
        for clients in CLIENTS:
            ask_server(url, helpers, clients, WARM)
        for _ in range(options.rounds):
            found["loop"].append(loop.ask(model=True, seconds=options.seconds))
            for clients in reversed(CLIENTS):
                found[str(clients)].append(ask_server(url, helpers, clients, options.seconds))
            found["decode"].append(loop.ask(model=False, seconds=options.seconds / 2))
    return found, loop.about


def report(found: Found, about: dict[str, Any], options: argparse.Namespace) -> str:
    """Return the page of results."""
    medians = {name: median(rounds, "rate") for name, rounds in found.items()}
    on = "a CPU" if options.device == "cpu" else f"one {about['device']}"
    versions = ", ".join(f"{name} {version(name)}" for name in PACKAGES if is_installed(name))
    plural = "es" * (options.client_processes > 1)
    lines = [
        f"# Serving throughput on {on}",
        "",
        f"{datetime.date.today()}, commit {about['commit']}, {about['device']}, {os.cpu_count()} cores, "
        f"Python {platform.python_version()}, {versions}; uvloop {'' if is_installed('uvloop') else 'not '}installed; "
        f"load average at the end {os.getloadavg()[0]:.1f}.",
        "",
        f"Model `{options.weights}`, JPEG files of {SIDE[0]}x{SIDE[1]} pixels, batches of up to {options.batch}, "
        f"{about['decoders']} threads that decode, one PyTorch thread. The bare loop decodes the same files with the "
        "same decoder in as many threads and runs the same batched model in one process, without HTTP. Medians of "
        f"{options.rounds} rounds of {options.seconds:g} s; loop and server alternate. The clients are "
        f"{options.client_processes} process{plural} on the same cores as the server. Other work on the machine "
        "changes the rates more than the ratios.",
        "",
        "| | images/s (median) | lowest to highest | of the bare loop | of decoding | images per batch | "
        "model, ms per batch |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, rounds in found.items():
        rates = [each["rate"] for each in rounds]
        shares = [f"{100 * medians[name] / medians[other]:.0f} %" for other in ("loop", "decode")]
        more = [
            f"{median(rounds, key):.1f}" if key in rounds[0] else ""
            for key in ("batch", "model_ms")
        ]
        cells = [
            title(name),
            f"{medians[name]:.1f}",
            f"{min(rates):.1f} to {max(rates):.1f}",
            *shares,
            *more,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", "```bash", command_line(options), "```", ""])


def title(name: str) -> str:
    """Return the first cell of a row."""
    known = {"loop": "bare loop", "decode": "decoding and preprocessing alone"}
    return known.get(name) or f"`pale serve`, {name} client{'s' * (name != '1')}"


def median(rounds: list[dict[str, float]], key: str) -> float:
    """Return the median of a value over the rounds."""
    return statistics.median(each[key] for each in rounds)


def is_installed(name: str) -> bool:
    """Return whether a package is installed."""
    try:
        version(name)
    except ModuleNotFoundError:
        return False
    return True


def command_line(options: argparse.Namespace) -> str:
    """Return the command that repeats the measurement."""
    words = [f"--device {options.device}"] if options.device != "cpu" else []
    for name, default in DEFAULTS[options.device].items():
        if (value := getattr(options, name)) != default:
            words.append(f"--{name.replace('_', '-')} {value}")
    words += [f"--seconds {options.seconds:g}", f"--rounds {options.rounds}"]
    return " ".join(["python benchmarks/serving.py", *words])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=DEFAULTS, default="cpu")
    parser.add_argument("--weights", help="default: classify_pets; with --device cuda: pale_tiny")
    parser.add_argument("--batch", type=int, help="default: 8; with --device cuda: 32")
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--client-processes", type=int, help="default: 1; with --device cuda: 4")
    parser.add_argument("--output", type=Path, help="default: benchmarks/results/serving_DEVICE.md")
    parser.add_argument("--bare", help=argparse.SUPPRESS)
    parser.add_argument("--load", help=argparse.SUPPRESS)
    options = parser.parse_args()
    for name, default in DEFAULTS[options.device].items():
        if getattr(options, name) is None:
            setattr(options, name, default)
    if options.bare:
        bare(options)
    elif options.load:
        load(options)
    else:
        text = report(*measure(options), options)
        output = options.output or ROOT / f"benchmarks/results/serving_{options.device}.md"
        output.write_text(text)
        print(text)


if __name__ == "__main__":
    main()
