"""Output of a run: a JSON line per event in log.jsonl, and a live display, or plain lines without a terminal."""

from __future__ import annotations

import json
import math
import shlex
import sys
import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.text import Text

from ..core.console import Console, Table
from ..core.escaping import escape_line, escape_message
from ..core.files import fresh_path
from ..core.plain_json import Json, parse_json
from ..errors import UnavailableError
from ..tasks.base import Task

PLAIN_SECONDS = 10.0  # seconds between two lines without a terminal
PRINTED_SKIPS = 3  # skipped steps that are printed in full
BARS = " ▁▂▃▄▅▆▇█"


class Log:
    """Write events as JSON lines; a run that resumes drops the events after the step it resumes from.

    While the file cannot be written, lines are kept in memory; writing is retried with each new event.
    """

    def __init__(self, path: Path, step: int, tensorboard: bool = False) -> None:
        self.board = _board(path.parent / "tensorboard", step) if tensorboard else None
        kept = [entry for entry in read(path) if _done(entry) <= step] if step else []
        temporary = fresh_path(path.with_name(f".{path.name}"))
        temporary.write_text("".join(json.dumps(_plain(entry)) + "\n" for entry in kept))
        temporary.replace(path)
        self.path, self.file = path, path.open("ab", buffering=0)
        self.unwritten = b""

    def write(self, event: str, **values: object) -> None:
        """Add an event."""
        line = json.dumps(_plain({"event": event, **values}), allow_nan=False) + "\n"
        self.unwritten += line.encode()
        with suppress(OSError):  # if the disk does not recover, writing a checkpoint stops the run
            self.flush()
        if self.board is not None and event in ("step", "eval"):
            for name, value in values.items():
                if name != "step" and value is not None:
                    self.board.add_scalar(f"{event}/{name}", value, values["step"])
            self.board.flush()

    def flush(self) -> None:
        """Write the lines that are not in the file yet; raise OSError if that fails."""
        if self.file.closed:  # after a failure: the file system may have been unavailable
            self.file = self.path.open("ab", buffering=0)
        try:
            while self.unwritten:
                written = self.file.write(
                    self.unwritten
                )  # on a full disk possibly only a part of the line
                self.unwritten = self.unwritten[written or 0 :]
        except OSError:
            self.file.close()
            raise

    def close(self) -> None:
        """Close the file."""
        self.file.close()
        if self.board is not None:
            self.board.close()


def _done(entry: Json) -> int:
    """Return the steps done after an event; the event of a skipped step holds its number, from 0."""
    step = entry.get("step", 0)
    return (step if isinstance(step, int) else 0) + (entry.get("event") == "skipped")


def _plain(value: object) -> object:
    """Replace NaN and Inf, which JSON cannot represent, by None."""
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _board(folder: Path, step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise UnavailableError(
            "tensorboard=true needs the package tensorboard: pip install 'pale-transformer[track]'"
        ) from None
    # Hide what a killed run wrote after its last checkpoint.
    return SummaryWriter(str(folder), purge_step=step + 1)


def read(path: Path) -> list[Json]:
    """Return the events of a log; damaged or truncated lines are ignored."""
    if not path.is_file():
        return []
    entries = []
    with path.open("rb") as lines:
        for line in lines:
            try:
                entry = parse_json(line.decode())
            except ValueError:  # not JSON, not UTF-8, or nested too deeply
                continue
            if isinstance(entry, dict) and isinstance(entry.get("event"), str):
                entries.append(entry)
    return entries


class Display:
    """Progress display: live on a terminal, else lines.

    Args:
        title: title of the live display.
        steps: length of the run.
        start: step at which it starts.
        quiet: print nothing.
    """

    def __init__(self, title: str, steps: int, start: int, quiet: bool = False) -> None:
        self.title, self.steps, self.start, self.quiet = title, steps, start, quiet
        self.console = Console(width=None if sys.stdout.isatty() else 140, quiet=quiet)
        live = self.console.is_terminal and not quiet
        self.live = Live(console=self.console, refresh_per_second=4) if live else None
        self.values: Json = {}
        self.skips = 0
        self.losses: deque[float] = deque(maxlen=4096)
        self.began = time.monotonic()
        self.last_line = 0.0

    def __enter__(self) -> Self:
        if self.live:
            self.live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if self.live:
            self.live.stop()

    def print(self, text: str, wrap: bool = True) -> None:
        """Print a line above the live display; lines in files are not wrapped, nor are commands, which are pasted."""
        self.console.print(Text(escape_message(text)), soft_wrap=not wrap or self.live is None)

    def step(self, **values: Any) -> None:
        """Show the values of a step."""
        self.values |= values
        if math.isfinite(values["loss"]):
            self.losses.append(values["loss"])
        now = time.monotonic()
        if self.live:
            self.live.update(self._panel())
        elif now - self.last_line >= PLAIN_SECONDS or values["step"] == self.steps:
            self.last_line = now
            self.print(self._line())

    def skipped(self, text: str) -> None:
        """Count a skipped step; print the first few in full."""
        self.skips += 1
        if self.skips <= PRINTED_SKIPS:
            last = self.skips == PRINTED_SKIPS
            more = "; further ones are counted, log.jsonl lists all" if last else ""
            self.print(f"skipped {text}{more}")

    def evaluated(self, text: str) -> None:
        """Show the result of an evaluation."""
        self.values["evaluation"] = text
        self.print(text)
        if self.live:
            self.live.update(self._panel())

    def _left(self) -> str:
        done = self.values["step"] - self.start
        spent = time.monotonic() - self.began
        left = spent / max(done, 1) * (self.steps - self.values["step"])
        return str(timedelta(seconds=round(left)))

    def _line(self) -> str:
        v = self.values
        memory = f", {v['memory_mb']:.0f} MB" if v.get("memory_mb") else ""
        skips = f", {self.skips} skipped" if self.skips else ""
        return (
            f"step {v['step']}/{self.steps}, epoch {v['epoch']:.2f}, loss {v['loss']:.4f}, lr {v['lr']:.2e}, "
            f"{v['images_per_s']:.0f} images/s, waiting for data {v['data_wait']:.0%}{memory}{skips}, "
            f"{self._left()} left"
        )

    def _panel(self) -> RenderableType:
        v = self.values
        table = Table.grid(padding=(0, 2))
        table.add_row(
            f"step {v['step']}/{self.steps}",
            ProgressBar(total=self.steps, completed=v["step"], width=40),
            f"{self._left()} left",
        )
        figures = Table.grid(padding=(0, 2))
        figures.add_row(
            f"epoch {v['epoch']:.2f}",
            f"loss {v['loss']:.4f}",
            f"lr {v['lr']:.2e}",
            f"{v['images_per_s']:.0f} images/s",
            f"waiting for data {v['data_wait']:.0%}",
            f"{v['memory_mb']:.0f} MB" if v.get("memory_mb") else "",
            f"{self.skips} skipped" if self.skips else "",
        )
        title = Text(escape_line(self.title), style="bold")
        lines: list[RenderableType] = [title, table, figures]
        lines.append(Text(sparkline(self.losses)))
        if "evaluation" in v:
            lines.append(Text(escape_message(v["evaluation"]), style="green"))
        return Group(*lines)


def sparkline(values: Iterable[float], width: int = 72) -> str:
    """Return a curve as one line of text: means of `width` parts; the largest is a full block."""
    values = list(values)
    if not values:
        return ""
    parts = min(width, len(values))
    edges = [round(i * len(values) / parts) for i in range(parts + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges) if b > a]
    top = max(means)
    if not top > 0:
        return BARS[0] * len(means)
    return "".join(BARS[min(8, max(0, round(8 * mean / top)))] for mean in means)


def next_steps(run: Path, task: Task, best: float) -> list[str]:
    """Return the result of a finished run, and commands that use its best weights."""
    weights = shlex.quote(str(run / "best.safetensors"))
    example = task.val_name(0)
    example = shlex.quote(example) if Path(example).is_file() else "IMAGE"
    model = shlex.quote(str(run / "model.onnx"))
    return [
        f"best {task.headline.get(task.best, task.best)} {best:.4g} on the validation set; next:",
        f"  pale predict {example} --weights {weights} -o {shlex.quote(str(run / 'predicted'))}",
        f"  pale serve --weights {weights}",
        f"  pale export {weights} -o {model}",
    ]
