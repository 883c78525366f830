"""Record network and file access while a hostile file is read, by audit events; and write such files."""

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from support.weights import RECIPES

WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


@dataclass
class Deeds:
    """Connections and name look-ups, and files opened for reading and writing."""

    network: list[str] = field(default_factory=list)
    read: list[str] = field(default_factory=list)
    written: list[str] = field(default_factory=list)


_recording: list[Deeds] = []


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if not _recording:
        return
    if event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "urllib.Request"):
        _recording[-1].network.append(f"{event} {args}")
    elif event == "open" and isinstance(args[0], str | bytes):
        writes = bool((args[2] or 0) & WRITES) or any(c in (args[1] or "") for c in "wax+")
        deeds = _recording[-1].written if writes else _recording[-1].read
        deeds.append(os.fsdecode(args[0]))
    elif event in ("os.mkdir", "os.rename", "os.remove", "subprocess.Popen", "os.system"):
        _recording[-1].written.append(str(args[0]))


sys.addaudithook(_audit)  # for good: hooks cannot be removed


@contextlib.contextmanager
def recorded() -> Iterator[Deeds]:
    deeds = Deeds()
    _recording.append(deeds)
    try:
        yield deeds
    finally:
        _recording.remove(deeds)


def recipe(task: str, **changes: Any) -> dict[str, Any]:
    """Return plain values of the small recipe of a task, with unchecked changes by dotted name ("__" for ".")."""
    values = RECIPES[task]().plain()
    for name, value in changes.items():
        *path, last = name.split("__")
        part = values
        for each in path:
            part = part[each]
        part[last] = value
    return values


def write(path: Path, values: Any, classes: Any = ("a", "b"), tensors: Any = None) -> Path:
    """Write a weights file with any header."""
    about = {"recipe": values, "classes": list(classes) if isinstance(classes, tuple) else classes}
    stored = {"w": torch.zeros(1)} if tensors is None else tensors
    save_file(stored, path, metadata={"pale": json.dumps(about)})
    return path
