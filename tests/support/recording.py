"""Append the result of a session to a table: `--record FILE` writes versions, counts and commit."""

import platform
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
import torch

from pale.train.environment import commit

COLUMNS = {
    "date": "date (UTC)",
    "commit": "commit",
    "tests": "tests",
    "device": "device",
    "python": "Python",
    "versions": "versions",
    "passed": "passed",
    "failed": "failed",
    "skipped": "skipped",
    "minutes": "minutes",
}
PACKAGES = [
    *("torch", "torchvision", "timm", "triton", "numpy", "pillow", "pydantic", "pyyaml", "rich"),
    *("safetensors", "shtab", "transformers", "segmentation-models-pytorch", "onnx", "onnxscript"),
    *("onnxruntime", "tensorboard", "faster-coco-eval", "av", "fastapi", "starlette", "h11"),
    *("uvicorn", "python-multipart", "prometheus-client"),
]
INTRODUCTION = """# {title}

Written by the run itself (`pytest --record`), one row a run, the newest last. Rows with failures are kept.

"""
TITLES = {
    "test_gpu": "The tests on a GPU: `make test-gpu`",
    "versions": "The tests with other versions: `make test-lowest`, other Pythons",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", type=Path, help="add the result to this table (Markdown)")


def pytest_sessionstart(session: pytest.Session) -> None:
    session.config.stash[STARTED] = time.monotonic()


STARTED = pytest.StashKey[float]()


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    path = config.getoption("--record")
    # Of several processes the first has all counts.
    if path is None or config.getoption("collectonly") or hasattr(config, "workerinput"):
        return
    stats = terminalreporter.stats
    counts = {
        "passed": len(stats.get("passed", [])),
        "failed": len(stats.get("failed", [])) + len(stats.get("error", [])),
        "skipped": len(stats.get("skipped", [])),
    }
    minutes = f"{(time.monotonic() - config.stash[STARTED]) / 60:.1f}"
    write(path, row(config) | {k: str(v) for k, v in counts.items()} | {"minutes": minutes})


def row(config: pytest.Config) -> dict[str, str]:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    places = [a for a in config.args if not Path(a).is_absolute() and a != "tests"]
    marks = f"-m '{config.option.markexpr}'" if config.option.markexpr else ""
    return {
        "date": time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
        "commit": commit() or "unknown",
        "tests": f"`{' '.join(['pytest', *places, marks]).strip()}`",
        "device": device,
        "python": platform.python_version(),
        "versions": ", ".join(installed()),
    }


def installed() -> Iterator[str]:
    for package in PACKAGES:
        try:
            yield f"{package} {version(package)}"
        except PackageNotFoundError:
            continue


def write(path: Path, values: dict[str, str]) -> None:
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        title = TITLES.get(path.stem, path.stem)
        names = " | ".join(COLUMNS.values())
        lines = f"| {names} |\n|{' --- |' * len(COLUMNS)}\n"
        path.write_text(INTRODUCTION.format(title=title) + lines)
    cells = " | ".join(values[name].replace("|", "/") for name in COLUMNS)
    with path.open("a") as file:
        file.write(f"| {cells} |\n")
