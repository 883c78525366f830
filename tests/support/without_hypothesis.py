"""Replace hypothesis if it is not installed: its tests are skipped with a reason, all others are collected."""

import sys
from types import ModuleType
from typing import Any

import pytest

REASON = "hypothesis is not installed"


class _Anything:
    """Any strategy, and any method of one."""

    def __getattr__(self, name: str) -> "_Anything":
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> "_Anything":
        return self

    def __or__(self, other: object) -> "_Anything":
        return self


class _Settings:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __call__(self, test: Any) -> Any:
        return test

    register_profile = load_profile = staticmethod(lambda *args, **kwargs: None)


def given(*args: Any, **kwargs: Any) -> Any:
    return pytest.mark.skip(reason=REASON)


def _strategy(name: str) -> _Anything:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Anything()


def install() -> None:
    """Install the replacement as the module hypothesis."""
    module, strategies = ModuleType("hypothesis"), ModuleType("hypothesis.strategies")
    strategies.__getattr__ = _strategy
    vars(module).update(
        given=given, settings=_Settings, HealthCheck=(), assume=_Anything(), strategies=strategies
    )
    sys.modules |= {"hypothesis": module, "hypothesis.strategies": strategies}
