"""What the tests of clients leave for the page "Works with": `benchmarks/interop.py` reads it from pytest's report."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable

import pytest
import torch

Measured = Callable[..., None]


@pytest.fixture(autouse=True)
def _client(request: pytest.FixtureRequest, record_property: Callable[[str, object], None]) -> None:
    """Record the client of the test, `client` of its class, and what is run: the test's docstring."""
    client = getattr(request.cls, "client", None)
    if client is None:
        return
    try:
        version = importlib.metadata.version(client)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{client} is not installed")
    record_property("client", client)
    record_property("version", version)
    record_property("torch", str(torch.__version__))  # a class of its own, which xdist cannot send
    callspec = getattr(request.node, "callspec", None)
    record_property("model", callspec.params.get("name", "pale") if callspec else "pale")
    what = " ".join((request.function.__doc__ or "").split())
    assert what, f"{request.node.name} needs a docstring: the page shows it"
    record_property("what", what)


@pytest.fixture
def measured(record_property: Callable[[str, object], None]) -> Measured:
    """Return a function that checks a figure against its bound and records both."""

    def check(value: float, at_most: float, unit: str = "of the largest logit") -> None:
        record_property("figure", f"{value:.2g}")
        record_property("bound", f"{at_most:.2g}")
        record_property("unit", unit)
        assert value <= at_most, f"{value:.3g} {unit}; at most {at_most:.3g} is right"

    return check
