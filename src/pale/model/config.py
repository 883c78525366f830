"""Configuration of an architecture, checked when it is created."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from ..ops.pale_attention import Backend
from ..ops.pale_attention.region import Region, check_word

AttentionMode = Literal["parallel", "sequential", "vanilla", "axial", "cross"]
Position = Literal["cpe", "ape", "none"]


@dataclass(frozen=True)
class PaleConfig:
    """An architecture: one entry per stage i, in the paper's symbols, and the choices of its ablations.

    Attributes:
        channels: C_i.
        heads: H_i; both halves together.
        depths: blocks of each stage.
        pale_size: S_i, one for all stages or one per stage; None means the paper's 7, or 1 for axial.
        mlp_ratio: R_i.
        attention: parallel, sequential, vanilla, axial or cross.
        position: cpe, ape or none.
        stem_stride: P_1; 2 or 1 suit images of 32 to 64 px.
        img_size: image size of the maps of APE; not used otherwise.
        backend: auto, or reference, sdpa, triton.
    """

    channels: tuple[int, ...]  # C_i
    heads: tuple[int, ...]  # H_i
    depths: tuple[int, ...] = (2, 2, 16, 2)
    pale_size: int | tuple[int, ...] | None = None  # S_i
    mlp_ratio: tuple[float, ...] = (4, 4, 4, 4)  # R_i
    attention: AttentionMode = "parallel"
    position: Position = "cpe"
    stem_stride: int = 4  # P_1
    img_size: int | tuple[int, int] = 224
    backend: Backend = "auto"

    def __post_init__(self) -> None:
        """Check everything that can be checked without an image."""
        for name in ("channels", "heads", "depths", "mlp_ratio", "pale_size", "img_size"):
            if isinstance(value := getattr(self, name), list):
                object.__setattr__(self, name, tuple(value))
        check_word("attention", self.attention, get_args(AttentionMode))
        check_word("position", self.position, get_args(Position))
        check_word("backend", self.backend, get_args(Backend))
        _check_stages(self)
        if self.stem_stride not in (4, 2, 1):
            raise ValueError(
                f"stem_stride must be 4, 2 or 1, got {self.stem_stride}; the paper's is 4"
            )
        _check_heads(self)
        _check_pale_size(self)

    @property
    def pale_sizes(self) -> tuple[int, ...]:
        """S_i, one per stage."""
        size = (
            self.pale_size if self.pale_size is not None else 1 if self.attention == "axial" else 7
        )
        return size if isinstance(size, tuple) else (size,) * len(self.depths)

    def region(self, stage: int, block: int) -> Region:
        """Return the region of the given block; a pale has as many rows as columns, s_r = s_c = S_i."""
        s = self.pale_sizes[stage], self.pale_sizes[stage]
        match self.attention:
            case "parallel" | "axial":
                return Region(s, "parallel")
            case "sequential":
                return Region(s, "row" if block % 2 == 0 else "column")
            case "vanilla":
                return Region(s, "pale")
            case "cross":
                return Region(s, "parallel", "contiguous")

    def maps(self, h: int, w: int) -> list[tuple[int, int]]:
        """Return height and width of the map in each stage for an `h` x `w` image."""
        maps = [(-(-h // self.stem_stride), -(-w // self.stem_stride))]
        for _ in self.depths[1:]:
            maps.append((-(-maps[-1][0] // 2), -(-maps[-1][1] // 2)))
        return maps


def _check_stages(config: PaleConfig) -> None:
    for name in ("depths", "channels", "heads", "mlp_ratio"):  # the others are compared with depths
        kinds = (int, float) if name == "mlp_ratio" else (int,)
        value = getattr(config, name)
        if not isinstance(value, tuple) or any(type(v) not in kinds or v <= 0 for v in value):
            what = "numbers above 0" if name == "mlp_ratio" else "whole numbers of at least 1"
            raise ValueError(f"{name} must be {what}, one per stage, got {value!r}")
        if name != "depths" and len(value) != len(config.depths):
            raise ValueError(
                f"{name} needs one entry for each of the {len(config.depths)} stages of depths={config.depths}, "
                f"got {value}"
            )


def _check_heads(config: PaleConfig) -> None:
    split = config.attention in ("parallel", "axial", "cross")
    for c, heads in zip(config.channels, config.heads, strict=True):
        if c % heads or (heads % 2 and split):
            raise ValueError(
                f"heads must divide the channels and, for attention={config.attention!r}, be even: "
                f"got {heads} heads for {c} channels; 'sequential' and 'vanilla' take odd head counts"
            )


def _check_pale_size(config: PaleConfig) -> None:
    sizes, stages = config.pale_sizes, len(config.depths)
    if len(sizes) != stages or any(type(s) is not int or s < 1 for s in sizes):
        raise ValueError(
            f"pale_size must be one whole number of at least 1, or {stages}, one per stage, got {config.pale_size}"
        )
    if config.attention == "axial" and set(sizes) != {1}:
        raise ValueError(
            f"axial attention has pale size 1 by definition, got pale_size={config.pale_size}; "
            "leave it out, or use attention='parallel'"
        )


def image_size(size: int | tuple[int, int]) -> tuple[int, int]:
    """Height and width."""
    return size if isinstance(size, tuple) else (size, size)
