"""Where this machine is another: without Triton, on Windows (by what it lacks), with its paths.

Nothing here runs on Windows or macOS itself; the documentation states this.
"""

import subprocess
import sys
from pathlib import Path, PureWindowsPath

import pytest

HERE = Path(__file__).parent


def elsewhere(without: str, doing: str, place: Path) -> str:
    """Output of a process for which something is missing."""
    done = subprocess.run(
        [sys.executable, str(HERE / "support/platforms.py"), without, doing, str(place)],
        capture_output=True,
        text=True,
        check=False,
        timeout=550,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("without", ["triton", "windows"])
def test_every_module_is_imported_where_this_is_missing(tmp_path, without):
    assert int(elsewhere(without, "import", tmp_path)) > 120


@pytest.mark.slow
@pytest.mark.parametrize("without", ["triton", "windows"])
def test_a_model_is_trained_resumed_and_used_where_this_is_missing(tmp_path, without):
    out = elsewhere(without, "use", tmp_path)
    assert "top-1" in out or "top1" in out
    assert (tmp_path / "run/weights.safetensors").is_file()


@pytest.mark.parametrize(
    "name", ["photo.jpg", r"C:\photos\photo.jpg", r"..\..\photo.jpg", "a/b\\photo.jpg"]
)
def test_of_an_uploads_name_the_last_part_is_kept_whatever_system_it_comes_from(name):
    reading = pytest.importorskip("pale.serve.upload", reason="serving needs the extra serve")
    assert PureWindowsPath(name).name == "photo.jpg"
    assert reading.plain_name(name) == "photo.jpg"
