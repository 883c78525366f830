"""Simulate a process on Windows, or without Triton. Arguments: what is missing, then what to do.

Third-party packages are imported before anything is removed, so that failures are those of this package.
"""

import ast
import importlib.util
import os
import pkgutil
import shutil
import signal
import sys
from pathlib import Path

# What Windows lacks, of what an importable module or a name of `os` and `signal` is.
MODULES = ("fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "syslog")
OS = [
    *("O_NONBLOCK", "O_NOFOLLOW", "O_CLOEXEC", "O_DIRECTORY", "O_NOCTTY", "pread", "pwrite"),
    *("fork", "getuid", "geteuid", "getgid", "statvfs", "uname", "mkfifo", "sched_getaffinity"),
    *("posix_fadvise", "sendfile", "killpg", "setsid", "getpgid", "getloadavg", "chown", "fchmod"),
]
SIGNALS = ("SIGHUP", "SIGKILL", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGCHLD", "SIGPIPE", "alarm")


class Refuse:
    """Hides modules of these names, none of which may be imported already."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def load_others() -> None:
    """Import all installed third-party packages that the package uses, but not the package."""
    root = Path(importlib.util.find_spec("pale").origin).parent
    names = set()
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
                names.add(node.module)
    for name in sorted(names - set(MODULES) - {"pale"}):
        if name.partition(".")[0] not in ("triton", "pale"):
            try:
                importlib.import_module(name)
            except ImportError:
                continue


def without_triton() -> None:
    """Hide Triton before PyTorch is imported, so that PyTorch works without it too."""
    sys.meta_path.insert(0, Refuse(("triton",)))
    sys.modules["triton"] = None


def on_windows() -> None:
    """Remove what Windows lacks; folders cannot be opened, and read-only files cannot be flushed."""
    for name in MODULES:
        sys.modules.pop(name, None)
    sys.meta_path.insert(0, Refuse(MODULES))
    for place, gone in ((os, OS), (signal, SIGNALS)):
        for name in gone:
            vars(place).pop(name, None)
    opened, synced, modes = os.open, os.fsync, {}

    def open_file(path, flags, *args, **kwargs):
        if os.path.isdir(path):
            raise PermissionError(13, "Permission denied", os.fspath(path))
        descriptor = opened(path, flags, *args, **kwargs)
        modes[descriptor] = flags & (os.O_RDWR | os.O_WRONLY)
        return descriptor

    def fsync(descriptor):
        if modes.get(descriptor, 1) == 0:
            raise OSError(9, "Bad file descriptor")
        synced(descriptor)

    os.open, os.fsync = open_file, fsync
    shutil._use_fd_functions = False  # of Linux: it opens folders
    sys.platform = "win32"


def import_all(skip: tuple[str, ...] = ()) -> int:
    """Import every module of the package except kernels, which need Triton, and `__main__`."""
    import pale

    count = 0
    for found in pkgutil.walk_packages(pale.__path__, "pale."):
        if not found.name.endswith(("__main__", *skip)):
            importlib.import_module(found.name)
            count += 1
    return count


def use(folder: Path) -> None:
    """Train, stop, resume, evaluate and predict with files, as a user would."""
    import numpy as np
    from PIL import Image

    from pale.cli.main import main
    from pale.data.sources.images import read_folder as images_in
    from pale.data.sources.shards import ShardFiles, write_shards

    rng = np.random.default_rng(0)
    for i in range(8):
        place = folder / f"photos/{'train' if i < 6 else 'val'}/{'ab'[i % 2]}"
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (40, 40, 3), dtype=np.uint8)).save(place / f"{i}.png")
    words = ["train", "small_data.pale_nano", "--data.root", str(folder / "photos")]
    words += ["--data.size", "32", "--batch", "2", "--data.workers", "0", "--device", "cpu"]
    words += ["--model.options", '{"depths": [1, 1, 1, 1]}', "--output", str(folder / "run")]
    assert main([*words, "--epochs", "2", "--warmup_epochs", "0", "--saving.every_steps", "2"]) == 0
    assert main(["train", "--resume", str(folder / "run"), "--epochs", "3", "--device", "cpu"]) == 0
    assert main(["eval", str(folder / "run"), "--device", "cpu"]) == 0
    photo = str(folder / "photos/val/a")
    assert main(["predict", photo, "--weights", str(folder / "run"), "--device", "cpu"]) == 0
    assert main(["info", "pale_nano"]) == 0
    assert main(["doctor"]) == 0
    source = images_in(folder / "photos/train")
    write_shards(source, folder / "shards", "train", 10**6)
    shards = ShardFiles(folder / "shards", "train")
    found = sorted(shards.content(i) for i in range(len(shards.labels)))
    assert found == sorted(source.content(i) for i in range(len(source)))


if __name__ == "__main__":
    without, doing, place = sys.argv[1:]
    if without == "triton":
        without_triton()
    else:
        load_others()
        on_windows()
    if doing == "import":
        count = import_all(("_kernels", "prologue") if without == "triton" else ())
        sys.stdout.write(f"{count}\n")
    else:
        use(Path(place))
