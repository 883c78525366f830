"""Pale Transformer (AAAI 2022): a vision backbone whose attention works on interlaced rows and columns."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .predict import Predictor

__version__ = "0.1.0"
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


def _is_command(started: list[str], typed: list[str]) -> bool:
    """Whether this process is the command `pale`, by sys.argv and sys.orig_argv.

    It imports PyTorch only when it has work to do, so that help and errors come at once.
    """
    if started[:1] == ["-m"]:  # Python is still looking for the module, which may be anybody's
        return "pale" in typed[typed.index("-m") + 1 :][:1] if "-m" in typed else False
    return Path((started or [""])[0]).stem == "pale"


if TYPE_CHECKING or not _is_command(sys.argv, sys.orig_argv):
    from . import ops
    from .export import export
    from .optimize import optimize
    from .pale_transformer import PaleConfig, PaleTransformer, create_model
    from .warm_up import warm_up


def __getattr__(name: str) -> Any:
    """`Predictor`, which brings the recipes of all tasks, is imported when it is asked for."""
    if name == "Predictor":
        from .predict import Predictor

        return Predictor
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
