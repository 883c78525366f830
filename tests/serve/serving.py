"""Servers for tests: in a thread of this process, or as the command in a process of its own."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import torch
import uvicorn

from pale.recipes import get
from pale.serve import Limits, Models, create_app
from pale.serve.app import Service
from pale.serve.run import bind, configure, url
from pale.weights.write import save_weights


class Running:
    """A server in a thread; `client` sends requests to it, `service` is its state."""

    def __init__(self, address: str, service: Service) -> None:
        self.url, self.service = address, service
        self.client = httpx.Client(base_url=address, timeout=120, trust_env=False)


@contextmanager
def running(
    models: Models, limits: Limits | None = None, hosts=(), token: str | None = None
) -> Iterator[Running]:
    listening = bind("127.0.0.1", 0)
    app = create_app(models, limits, hosts, token)
    server = uvicorn.Server(configure(app, 5))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        until(lambda: server.started)
        found = Running(url(listening), app.state.service)
        yield found
        found.client.close()
    finally:
        server.should_exit = True
        thread.join(60)
        listening.close()
    assert not thread.is_alive()


def nano_weights(folder: Path) -> Path:
    """The classifier of `pale train quickstart`, pale_nano at 40 px, untrained."""
    recipe = get("quickstart")
    torch.manual_seed(0)
    model = recipe.model.build(8, recipe.data.size)
    path = folder / "nano.safetensors"
    about = {"recipe": recipe.plain(), "classes": [f"class {i}" for i in range(8)]}
    save_weights(path, model.state_dict(), about)
    return path


def until(holds, seconds: float = 60) -> None:
    """Wait until the condition holds."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "the condition did not hold in time"
        time.sleep(0.01)


class Command:
    """`pale serve` as a process."""

    def __init__(self, *words: object) -> None:
        command = [sys.executable, "-m", "pale", "serve", "--json", "--device", "cpu"]
        command += ["--port", "0", "--threads", "1", *map(str, words)]
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )

    def wait(self) -> None:
        """Wait until it accepts requests."""
        line = self.process.stdout.readline()
        assert line, self.process.communicate(timeout=60)[1]
        self.about = json.loads(line)
        self.url = self.about["url"]

    def rss(self) -> int:
        """Return the memory in bytes."""
        with open(f"/proc/{self.process.pid}/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def forget_peak(self) -> None:
        """Measure the peak from now on."""
        with open(f"/proc/{self.process.pid}/clear_refs", "w") as file:
            file.write("5")

    def peak(self) -> int:
        """Return the maximum memory since then, in bytes."""
        with open(f"/proc/{self.process.pid}/status") as file:
            return next(1024 * int(line.split()[1]) for line in file if line.startswith("VmHWM"))

    def stop(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """Ask it to stop: return the exit code and its stderr."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            _, noted = self.process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        return self.process.returncode, noted


@contextmanager
def commands(*several: list[object]) -> Iterator[list[Command]]:
    """Servers, one for each list of options; they start at the same time."""
    found = [Command(*words) for words in several]
    try:
        for each in found:
            each.wait()
        yield found
    finally:
        for each in found:
            with each.process:  # closes its pipes
                if each.process.poll() is None:
                    each.process.kill()
