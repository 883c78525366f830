"""Pale Transformer (AAAI 2022): a vision backbone whose attention works on interlaced rows and columns.

The public names are imported when they are first used (PEP 562), so that the command line starts at once. The models
are registered with timm as soon as both packages are imported, in any order.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import sys
import threading
from importlib.machinery import ModuleSpec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

    from . import ops
    from .exporting import export
    from .model.optimize import optimize
    from .model.pale_transformer import PaleConfig, PaleTransformer, create_model
    from .model.warm_up import warm_up
    from .predict import Predictor

__version__ = "0.2.0"
__all__ = [
    "PaleConfig",
    "PaleTransformer",
    "Predictor",
    "create_model",
    "export",
    "ops",
    "optimize",
    "warm_up",
]

_MODULES = {
    "PaleConfig": ".model.pale_transformer",
    "PaleTransformer": ".model.pale_transformer",
    "Predictor": ".predict",
    "create_model": ".model.pale_transformer",
    "export": ".exporting",
    "ops": ".ops",
    "optimize": ".model.optimize",
    "warm_up": ".model.warm_up",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(_MODULES[name], __name__)
    value = module if name == "ops" else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return the public names, whatever has been imported so far."""
    return sorted([*__all__, "__version__"])


class _TimmImport(importlib.abc.MetaPathFinder):
    """Registers the models with timm when timm is imported after this package.

    It stays in place until then: others ask for the spec without importing timm, such as transformers, which looks
    whether timm is installed.
    """

    def __init__(self) -> None:
        self._searching = threading.local()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return timm's own spec, with a loader that also imports the models of this package."""
        if fullname != "timm" or getattr(self._searching, "now", False):
            return None
        self._searching.now = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._searching.now = False
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                execute(module)
                importlib.import_module(".model.pale_transformer", __name__)

            spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


if "timm" in sys.modules:
    importlib.import_module(".model.pale_transformer", __name__)
else:
    sys.meta_path.insert(0, _TimmImport())
