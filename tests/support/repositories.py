"""Git repositories of images without a work tree, and an executor without processes, for tests of data preparation."""

from __future__ import annotations

import io
import os
import subprocess
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image


def photo(seed: int, size: tuple[int, int] = (64, 64), file: str = "JPEG", **options: Any) -> bytes:
    """Return an encoded image of smooth random blobs; the same seed gives the same scene in any size."""
    pixels = np.random.default_rng(seed).integers(0, 256, (6, 6, 3), np.uint8)
    buffer = io.BytesIO()
    image = Image.fromarray(pixels).resize((256, 256), Image.Resampling.BICUBIC)
    image.resize(size, Image.Resampling.LANCZOS).save(buffer, file, **options)
    return buffer.getvalue()


def commit(folder: Path, *trees: dict[str, bytes]) -> str:
    """Write a bare repository with a commit of each tree of files, one after the other; return the last commit."""
    folder.mkdir(parents=True)
    env = os.environ | {
        f"GIT_{who}_{what}": "a@b" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")
    }

    def git(*words: str, content: bytes = b"") -> str:
        command = ["git", f"--git-dir={folder}", *words]
        return (
            subprocess.run(command, input=content, env=env, check=True, capture_output=True)
            .stdout.decode()
            .strip()
        )

    git("init", "-q", "--bare")
    lines = []
    for files in trees:
        lines.append(b"commit refs/heads/main\ncommitter a <a@b> 0 +0000\ndata 1\nx\ndeleteall\n")
        for name, content in files.items():
            mode = "120000" if name.endswith("link.jpg") else "100644"
            lines.append(
                f"M {mode} inline {name}\ndata {len(content)}\n".encode() + content + b"\n"
            )
    git("fast-import", "--quiet", content=b"".join(lines))
    return git("rev-parse", "refs/heads/main")


class InlineExecutor:
    """Runs jobs in this process when they are submitted."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def __enter__(self) -> InlineExecutor:
        return self

    def __exit__(self, *_: object) -> None: ...

    def shutdown(self, **_: object) -> None: ...

    def submit(self, function: Callable[..., Any], *words: object) -> Any:
        future: Future[Any] = Future()
        future.set_result(function(*words))
        return future
