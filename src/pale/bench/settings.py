"""Settings that all benchmarks share. PyTorch is imported late, for a fast `pale --help`."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Literal, get_args

from ..core.options import option, settings_class
from ..errors import SettingsError, UnavailableError

Device = Literal["auto", "cpu", "cuda"]
DType = Literal["auto", "fp32", "bf16", "fp16"]
DEVICES, DTYPE_NAMES = get_args(Device), get_args(DType)
MIN_ROUNDS = 2  # for quartiles


@settings_class
class BenchSettings:
    """Settings that all rows of a benchmark share. No round starts after the time limit of a row.

    Attributes:
        autocast: run in autocast with fp32 weights instead of converting the weights.
        features: measure only `forward_features`.
        optimized: apply `pale.optimize` to the first model.
    """

    size: tuple[int, ...] = option("side of the images, or height and width", default=(224,))
    device: Device = option("device", default="auto")
    dtype: DType = option("number format (default: bf16 on CUDA, fp32 on a CPU)", default="auto")
    rounds: int = option("number of timed runs", default=30)
    seconds: float = option("maximum time for a row of the table, in seconds", default=60.0)
    autocast: bool = False
    features: bool = False
    optimized: bool = False

    def __post_init__(self) -> None:
        """Check the values, and replace a single side."""
        if len(self.size) not in (1, 2):
            raise SettingsError(
                f"--size needs a side, or height and width, got {len(self.size)} numbers"
            )
        object.__setattr__(self, "size", (self.size[0], self.size[-1]))
        for name, known in (("device", DEVICES), ("dtype", DTYPE_NAMES)):
            if getattr(self, name) not in known:
                words = ", ".join(map(repr, known))
                raise SettingsError(f"{name} must be one of {words}, got {getattr(self, name)!r}")
        if min(self.size) < 1 or self.rounds < MIN_ROUNDS or self.seconds <= 0:
            raise SettingsError(
                f"size must be at least 1, rounds at least {MIN_ROUNDS} (for quartiles), seconds more than 0, "
                f"got size={self.size}, rounds={self.rounds}, seconds={self.seconds}"
            )
        if self.optimized and self.autocast:
            raise SettingsError(
                "an optimized model has its own dtype and takes no autocast; leave out one of the two"
            )

    def plain(self) -> dict[str, Any]:
        """Return the settings as a JSON object."""
        return {each.name: getattr(self, each.name) for each in fields(BenchSettings)}

    def resolved(self) -> BenchSettings:
        """Return the settings for this machine, with "auto" replaced; raise an error if it lacks the device."""
        import torch

        cuda = torch.cuda.is_available()
        if self.device == "cuda" and not cuda:
            raise UnavailableError(
                "device 'cuda' needs a CUDA device, and there is none; use 'cpu'"
            )
        device = ("cuda" if cuda else "cpu") if self.device == "auto" else self.device
        dtype = ("bf16" if device == "cuda" else "fp32") if self.dtype == "auto" else self.dtype
        return BenchSettings(**self.plain() | {"device": device, "dtype": dtype})
