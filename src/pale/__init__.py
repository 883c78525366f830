"""Pale Transformer (AAAI 2022): a vision backbone whose attention works on interlaced rows and columns."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

__version__ = "0.1.0"
__all__ = ["PaleConfig", "PaleTransformer", "create_model", "export", "ops", "optimize"]

# The command `pale` (or `python -m pale`) imports PyTorch when it has work to do, so that help and errors come at once.
if TYPE_CHECKING or Path((sys.argv or [""])[0]).stem not in ("pale", "-m"):
    from . import ops
    from .export import export
    from .optimize import optimize
    from .pale_transformer import PaleConfig, PaleTransformer, create_model
