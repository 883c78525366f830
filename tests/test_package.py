"""The package as it is installed: version, import time, and the wheel alone in an empty environment."""

import re
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
import yaml

import pale


@pytest.mark.slow
def test_importing_pale_takes_little_more_than_importing_timm():
    code = "import timm, time; t = time.process_time(); import pale; print(time.process_time() - t)"
    times = [
        float(subprocess.check_output([sys.executable, "-c", code], text=True)) for _ in range(3)
    ]
    assert min(times) < 0.3


def test_importing_pale_imports_no_triton_and_no_optional_package():
    code = "import sys, timm; before = set(sys.modules); import pale; print(*sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not re.findall(
        r"\b(triton|transformers|segmentation_models_pytorch|onnx|rich|fastapi|uvicorn)\b",
        done.stdout,
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_wheel_alone_in_an_empty_environment_runs(project: Path, tmp_path: Path):
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--outdir", tmp_path, project],
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("pale_transformer-*.whl")
    with zipfile.ZipFile(wheel) as file:
        inside = set(file.namelist())
    # Weights, cards and their index, pages and examples too.
    listed = subprocess.check_output(["git", "-C", project, "ls-files", "src/pale"], text=True)
    assert {path.removeprefix("src/") for path in listed.splitlines()} <= inside
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    subprocess.run(
        [python, "-m", "pip", "install", "--quiet", wheel], check=True, capture_output=True
    )
    code = "import torch, timm, pale; print(timm.create_model('pale_nano')(torch.randn(1, 3, 97, 130)).shape)"
    done = subprocess.run(
        [python, "-c", code], check=True, capture_output=True, text=True, cwd=tmp_path
    )
    assert "1, 1000" in done.stdout
    done = subprocess.run(
        [python.parent / "pale", "doctor"], check=True, capture_output=True, text=True, cwd=tmp_path
    )
    assert "works" in done.stdout


def test_changelog_citation_and_package_have_the_same_version(project: Path):
    heading = re.search(
        r"^## (\S+) \((.+)\)$", (project / "CHANGELOG.md").read_text(), re.MULTILINE
    )
    citation = yaml.safe_load((project / "CITATION.cff").read_text())
    assert heading.group(1) == pale.__version__ == citation["version"]
    if heading.group(2) != "unreleased":
        assert heading.group(2) == str(citation["date-released"])
