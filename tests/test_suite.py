"""The suite itself: a GPU run without kernels fails, missing tools skip, results become rows of a table."""

import os
import subprocess
import sys
from collections import Counter
from types import SimpleNamespace

import pytest
from support import gpu_families, recording

from pale.ops import launching as kernels

HIDE = """
import importlib.util, sys
hidden = {hidden!r}
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *a: None if name.split(".")[0] in hidden else found(name, *a)
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in hidden:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Refuse())
import pytest
raise SystemExit(pytest.main(sys.argv[1:]))
"""


def run(project, *words, hidden=()):
    command = [sys.executable, "-c", HIDE.format(hidden=set(hidden))]
    plugins = {"pytest_timeout": "no:timeout", "hypothesis": "no:hypothesispytest"}
    without = ["no:cacheprovider", "no:xdist", *(plugins[x] for x in hidden if x in plugins)]
    options = [x for plugin in without for x in ("-p", plugin)]
    return subprocess.run(
        [*command, "-q", *options, *words],
        cwd=project,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_a_gpu_run_without_a_gpu_fails_and_names_every_family(project):
    done = run(project, "-m", "gpu", "--every-family", "tests/tasks/detection/test_suppression.py")
    assert done.returncode == 1, done.stdout + done.stderr
    for family in gpu_families.KERNELS:
        assert f"{family}: no kernel has run" in done.stdout
    for family in gpu_families.CALLS:
        assert f"{family}: was not called" in done.stdout


def test_a_family_of_which_one_kernel_did_not_run_is_missing(monkeypatch):
    pytest.importorskip("triton", reason="Triton is not installed")
    everything = {
        (module, kernel.__name__): None
        for modules in gpu_families.KERNELS.values()
        for module in modules
        for kernel in gpu_families.programs(module)
    }
    monkeypatch.setattr(kernels, "_compiled", everything)
    monkeypatch.setattr(gpu_families, "calls", dict.fromkeys(gpu_families.CALLS, 1))
    assert gpu_families.missing() == {}
    del everything["pale.tasks.segmentation.loss_kernels", "loss_gather"]
    assert gpu_families.missing() == {"loss": "these kernels have not run: loss_gather"}
    gpu_families.calls["graphs"] = 0
    assert gpu_families.missing().keys() == {"loss", "graphs"}


def test_families_of_other_processes_count(monkeypatch):
    monkeypatch.setattr(kernels, "_compiled", {})
    monkeypatch.setattr(gpu_families, "calls", Counter())
    monkeypatch.setattr(gpu_families, "of_others", [])
    module = "pale.tasks.detection.suppression_kernels"
    reported = {"kernels": [[module, "walk"]], "calls": {"graphs": 3}}
    gpu_families.pytest_testnodedown(SimpleNamespace(workeroutput={"families": reported}))
    gpu_families.pytest_testnodedown(SimpleNamespace())  # one that crashed
    assert gpu_families.ran() == {module: {"walk"}}
    assert gpu_families.calls == {"graphs": 3}


def test_every_kernel_that_is_launched_belongs_to_a_family(project):
    files = {str(p.relative_to(project / "src")) for p in (project / "src").rglob("*_kernels.py")}
    known = {m.replace(".", "/") + ".py" for ms in gpu_families.KERNELS.values() for m in ms}
    assert files == known


@pytest.mark.slow
def test_without_the_tools_of_the_tests_all_is_collected_and_their_tests_are_skipped(project):
    hidden = ("hypothesis", "pycocotools", "httpx", "fastapi", "playwright", "pytest_timeout")
    done = run(project, "--collect-only", "-m", "gpu", hidden=hidden)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    assert "tests/ops/test_triton.py::test_no_images_and_many_images" in done.stdout
    files = (
        "tests/tasks/segmentation/test_resizing.py",
        "tests/tasks/detection/test_metric.py",
        "tests/serve",
    )
    done = run(project, *files, hidden=hidden)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    for reason in ("hypothesis is not installed", "installed: pycocotools", "installed: httpx"):
        assert reason in done.stdout


def test_a_result_is_a_row_with_versions_counts_and_commit(tmp_path, request, monkeypatch):
    monkeypatch.setenv("PALE_COMMIT", "abc1234")
    path = tmp_path / "results/versions.md"
    counts = {"passed": "3", "failed": "1", "skipped": "2", "minutes": "0.1"}
    for _ in range(2):
        recording.write(path, recording.row(request.config) | counts)
    *_, head, line, first, second = path.read_text().splitlines()
    assert head.count("|") == line.count("|") == first.count("|") == second.count("|")
    assert "| abc1234 |" in first
    assert "torch 2." in first
    assert first.endswith("| 3 | 1 | 2 | 0.1 |")


def test_make_targets_join_options_of_conftest_and_their_values(project):
    # Before conftest.py is loaded, "--record FILE" reads as an option and a path of tests, so that conftest.py is not
    # found if the file exists.
    lines = (project / "Makefile").read_text().splitlines()
    recorded = [line for line in lines if "--record" in line]
    assert len(recorded) == 2
    assert all("--record=benchmarks/results/" in line for line in recorded)
