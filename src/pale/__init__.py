"""Pale Transformer (AAAI 2022): a vision backbone whose attention works on interlaced rows and columns."""

from . import ops
from .export import export
from .optimize import optimize
from .pale_transformer import PaleConfig, PaleTransformer, create_model
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
]
