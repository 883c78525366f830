r"""Run timm's test file, `tests/test_models.py` of its source distribution, on our models.

timm's two tests of `forward_intermediates` select models by the name of the file that registers them, so our models are
listed there as models of Swin. `test_timm_suite.py` uses `models_listed_as_swin`; by hand, on any test of timm:

    PYTHONPATH=src:tests pytest -p support.timm_plugin -c TIMM/pyproject.toml TIMM/tests/test_models.py \
      -k "pale and not script"
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from timm.models import _registry as registry

import pale  # noqa: F401  (registers the models)

MODELS = frozenset(registry._module_to_models["pale_transformer"])


@contextmanager
def models_listed_as_swin() -> Iterator[None]:
    """List our models in timm's registry as if the file of Swin had registered them."""
    swin = registry._module_to_models["swin_transformer"]
    swin |= MODELS
    try:
        yield
    finally:
        swin -= MODELS


def pytest_collection(session: object) -> None:
    """List our models for the whole session, as a pytest plugin."""
    registry._module_to_models["swin_transformer"] |= MODELS
