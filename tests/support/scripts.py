"""Imports of the programs in benchmarks/, which are not in a package."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
# The programs that transfer.py imports, in this order, and itself.
TRANSFER = (
    *("pretraining_sources", "pretraining_images", "pretraining_data", "planned_runs"),
    *("transfer_sets", "transfer_data", "transfer_plan", "transfer"),
)


def import_scripts(monkeypatch: pytest.MonkeyPatch, *names: str) -> dict[str, ModuleType]:
    """Import programs anew, so that no test sees what another one changed in them."""
    monkeypatch.syspath_prepend(str(FOLDER))
    for name in names:
        sys.modules.pop(name, None)
    return {name: importlib.import_module(name) for name in names}
