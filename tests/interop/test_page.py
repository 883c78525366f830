"""The table of docs/works-with.md is what the results say, and every row of the results is a test that exists."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def program(project: Path) -> ModuleType:
    """Return benchmarks/interop.py as a module."""
    spec = importlib.util.spec_from_file_location(
        "interop_program", project / "benchmarks/interop.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_shows_the_results(program: ModuleType) -> None:
    results = json.loads(program.RESULTS.read_text())
    assert results["rows"]
    assert program.summary(results) in program.PAGE.read_text()


def test_every_result_is_that_of_a_test(program: ModuleType, project: Path) -> None:
    for row in json.loads(program.RESULTS.read_text())["rows"]:
        file, _, test = row["test"].partition("::")
        assert f"def {test.partition('[')[0]}(" in (project / file).read_text(), row["test"]


def test_a_failure_is_shown_as_one(program: ModuleType) -> None:
    row = {"client": "x", "version": "1", "what": "y", "torch": "2", "model": "pale"}
    bad = row | {"result": "failed", "figure": "inf", "unit": "of z", "bound": "1e-05"}
    peer = row | {"model": "swin", "result": "passed", "figure": "1e-07"}
    line = program.table({"rows": [bad, row | {"result": "passed"}, peer]}).splitlines()[-1]
    assert line == "| x 1 | y | **1 of 2 failed** | inf of z | 1e-05 | swin: passed (1e-07) |"
