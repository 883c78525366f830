"""Writing into folders that someone else may have made, such as a run folder from the network."""

from __future__ import annotations

from pathlib import Path


def fresh_path(path: Path) -> Path:
    """Remove a file or link at a path and return the path: what is written to it then follows no link elsewhere."""
    path.unlink(missing_ok=True)
    return path
