"""Puts our models before timm's own test file, `tests/test_models.py` of its source distribution.

timm's two tests of `forward_intermediates` choose models by the name of the file that registers them. Listed among
Swin's, ours are chosen as well. `test_timm_suite.py` uses `models_listed_as_swin`; by hand, on any of timm's tests:

    PYTHONPATH=src:tests pytest -p timm_plugin -c TIMM/pyproject.toml TIMM/tests/test_models.py -k "pale and not script"
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from timm.models import _registry as registry

import pale  # noqa: F401  (registers the models)

MODELS = frozenset(registry._module_to_models["pale_transformer"])


@contextmanager
def models_listed_as_swin() -> Iterator[None]:
    """Inside, timm's registry lists our models in the file of Swin too."""
    swin = registry._module_to_models["swin_transformer"]
    swin |= MODELS
    try:
        yield
    finally:
        swin -= MODELS


def pytest_collection(session: object) -> None:
    """As a pytest plugin: list them for the whole run."""
    registry._module_to_models["swin_transformer"] |= MODELS
