"""Write into folders from untrusted sources, such as a downloaded run folder."""

from __future__ import annotations

from pathlib import Path


def fresh_path(path: Path) -> Path:
    """Remove a file or link at a path and return the path, so that writing to it cannot follow a link."""
    path.unlink(missing_ok=True)
    return path
