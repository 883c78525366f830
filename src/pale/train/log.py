"""What a run tells: a line of JSON for every event, always; a live display on a terminal, plain lines elsewhere."""

from __future__ import annotations

import json
import math
import sys
import time
from collections import deque
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

PLAIN_SECONDS = 10.0  # between two lines where there is no terminal
SAID_SKIPS = 3
BARS = " ▁▂▃▄▅▆▇█"


class Log:
    """A file of JSON lines; one that goes on forgets what came after the step it goes on from."""

    def __init__(self, path: Path, step: int, tensorboard: bool = False) -> None:
        self.board = _board(path.parent / "tensorboard", step) if tensorboard else None
        kept = [entry for entry in read(path) if _done(entry) <= step] if step else []
        temporary = path.with_name(f".{path.name}")
        temporary.write_text("".join(json.dumps(_plain(entry)) + "\n" for entry in kept))
        temporary.replace(path)
        self.file = path.open("a")

    def write(self, event: str, **values: Any) -> None:
        """Add an event."""
        self.file.write(json.dumps(_plain({"event": event, **values}), allow_nan=False) + "\n")
        self.file.flush()
        if self.board is not None and event in ("step", "eval"):
            for name, value in values.items():
                if name != "step" and value is not None:
                    self.board.add_scalar(f"{event}/{name}", value, values["step"])
            self.board.flush()

    def close(self) -> None:
        """No more events."""
        self.file.close()
        if self.board is not None:
            self.board.close()


def _done(entry: dict[str, Any]) -> int:
    """How many steps are done after an event; that of a skipped step bears its number, from 0."""
    return int(entry.get("step", 0)) + (entry.get("event") == "skipped")


def _plain(value: Any) -> Any:
    """The same, with null for what is no number, for which JSON has no word."""
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _board(folder: Path, step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ValueError(
            "tensorboard=true needs the package tensorboard: pip install 'pale-transformer[track]'"
        ) from None
    # What a killed run wrote beyond its last checkpoint is hidden.
    return SummaryWriter(str(folder), purge_step=step + 1)


def read(path: Path) -> list[dict[str, Any]]:
    """The events of a log; a line cut short is passed over."""
    if not path.is_file():
        return []
    entries = []
    for line in path.read_text().splitlines():
        try:
            entries.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return entries


class Display:
    """Progress for people: live on a terminal."""

    def __init__(self, title: str, steps: int, start: int, quiet: bool = False) -> None:
        self.title, self.steps, self.start, self.quiet = title, steps, start, quiet
        self.console = Console(
            width=None if sys.stdout.isatty() else 140, highlight=False, quiet=quiet
        )
        live = self.console.is_terminal and not quiet
        self.live = Live(console=self.console, refresh_per_second=4) if live else None
        self.values: dict[str, Any] = {}
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

    def say(self, text: str) -> None:
        """A line that stays."""
        self.console.print(Text(text))

    def step(self, **values: Any) -> None:
        """New figures of training."""
        self.values |= values
        if math.isfinite(values["loss"]):
            self.losses.append(values["loss"])
        now = time.monotonic()
        if self.live:
            self.live.update(self._panel())
        elif now - self.last_line >= PLAIN_SECONDS or values["step"] == self.steps:
            self.last_line = now
            self.say(self._line())

    def skipped(self, text: str) -> None:
        """A step that was left out; the first few are told in full."""
        self.skips += 1
        if self.skips <= SAID_SKIPS:
            more = (
                "; more of them are counted, log.jsonl has all" if self.skips == SAID_SKIPS else ""
            )
            self.say(f"skipped {text}{more}")

    def evaluated(self, text: str) -> None:
        """Figures of an evaluation."""
        self.values["evaluation"] = text
        self.say(text)
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
        lines: list[RenderableType] = [Text(self.title, style="bold"), table, figures]
        lines.append(Text(sparkline(self.losses)))
        if "evaluation" in v:
            lines.append(Text(v["evaluation"], style="green"))
        return Group(*lines)


def sparkline(values: Any, width: int = 72) -> str:
    """A curve in one line of text: means of `width` pieces, the greatest as a full block."""
    values = list(values)
    if not values:
        return ""
    pieces = min(width, len(values))
    edges = [round(i * len(values) / pieces) for i in range(pieces + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges) if b > a]
    top = max(means)
    if not top > 0:
        return BARS[0] * len(means)
    return "".join(BARS[min(8, max(0, round(8 * mean / top)))] for mean in means)
