"""Web page and HTTP API (the extra `serve`).

A request passes through `guard` (host, token, headers), `routes`, `upload` (body and image, within limits) and
`batching` (a queue and a thread for each model). Nothing is written to disk, and no path in a request is ever opened.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .limits import Limits

if TYPE_CHECKING:
    from .app import create_app
    from .models import Models, default_weights

__all__ = ["Limits", "Models", "create_app", "default_weights"]

# Imported when they are first used: `pale serve --help` needs neither PyTorch nor FastAPI.
_MODULES = {"Models": ".models", "create_app": ".app", "default_weights": ".models"}


def __getattr__(name: str) -> Any:
    """Import a name of the package when it is first used."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name], __name__), name)
