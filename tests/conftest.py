import importlib.util
import os
from pathlib import Path

import pytest
import torch
from PIL import EpsImagePlugin

if importlib.util.find_spec("hypothesis") is None:
    from support import without_hypothesis

    without_hypothesis.install()
from hypothesis import settings

pytest_plugins = ["support.gpu_families", "support.recording"]

# Tests (files, or all in a folder) that need more than the package and pytest; without it they are skipped.
SERVER = ("fastapi", "uvicorn", "python_multipart", "prometheus_client")
NEEDS = {
    "serve/": ("httpx", *SERVER),
    "tasks/detection/test_metric.py": ("pycocotools",),
    "exporting/test_export.py": ("httpx", *SERVER),
    "test_deploy.py": SERVER,
}

# The same examples every time, so that a change is judged by itself; HYPOTHESIS_PROFILE=default draws new ones.
# No example has a time limit of its own: it would be one of the machine, and tests have theirs.
settings.register_profile("same", derandomize=True, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))

# Two xdist workers on two cores: one thread each.
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)


def pytest_addoption(parser):
    # Where pytest-timeout is not installed, tests have no time limit.
    if importlib.util.find_spec("pytest_timeout") is None:
        parser.addini("timeout", "of pytest-timeout, which is not installed")


def pytest_configure(config):
    if importlib.util.find_spec("pytest_timeout") is None:
        config.addinivalue_line("markers", "timeout: of pytest-timeout, which is not installed")


class _Lacking(pytest.Module):
    """A file of tests for which something is not installed."""

    missing: tuple[str, ...]

    def collect(self):
        reason = f"not installed: {', '.join(self.missing)}"
        pytest.skip(reason, allow_module_level=True)


def pytest_pycollect_makemodule(module_path, parent):
    place = module_path.relative_to(Path(__file__).parent).as_posix()
    needed = [name for start, names in NEEDS.items() if place.startswith(start) for name in names]
    missing = tuple(name for name in needed if importlib.util.find_spec(name) is None)
    if not missing:
        return None
    module = _Lacking.from_parent(parent, path=module_path)
    module.missing = missing
    return module


def pytest_collection_modifyitems(items):
    # Long ones first, or one worker would be left with them at the end.
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):  # `keywords` has the names of folders too
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def project() -> Path:
    """The project's root folder."""
    return Path(__file__).parent.parent


@pytest.fixture(scope="session")
def made(tmp_path_factory) -> dict[str, Path]:
    """Return small untrained weights of each task; several packages test with them, and none changes them."""
    from support.weights import weights

    return weights(tmp_path_factory.mktemp("weights"))


@pytest.fixture
def ghostscript(tmp_path, monkeypatch) -> Path:
    """Install a program `gs` that creates a file when it runs; return the path of that file."""
    started = tmp_path / "bin/started"
    started.parent.mkdir()
    (tmp_path / "bin/gs").write_text(f"#!/bin/sh\necho 10.0\n: > {started}\n")
    (tmp_path / "bin/gs").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)
    return started
