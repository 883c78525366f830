"""The Pale Transformer, in the order of the paper's Methodology section.

Maps are NCHW between the stages, for timm and everything built on it, and NHWC inside them; with
channels-last memory the two are the same bytes. No size is stored anywhere (but for APE): one model
serves any height and width.

Initialisation, which the paper does not give. Linear layers: truncated normal, 0.02, as DeiT, Swin
and CSWin. The depthwise halves of phi_q, phi_k, phi_v and the patch merging convolutions: normal
with variance 1 / fan-in, so that normalised input stays at unit scale. CPE stands *on* the residual
stream, `x + CPE(x)` in every block, where an ordinary convolution init multiplies: 22 blocks of it
let the stream grow by orders of magnitude. It starts as a truncated normal of 0.02: a block then
adds 0.06 of the stream, which keeps its scale to the last stage and still carries the zero padding,
hence position, from the first step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, cast, get_args

import timm
import torch
import torch.nn.functional as F
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.layers import ClassifierHead, DropPath, calculate_drop_path_rates, get_device_dtype
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models._features import feature_take_indices
from timm.models._features_fx import register_notrace_function, register_notrace_module
from timm.models._manipulate import checkpoint_seq
from torch import Tensor, nn

from . import fused
from .layers import (
    DepthwiseConv,
    LayerNorm2d,
    Linear,
    Mlp,
    SeparableConv,
    TokenMix,
    separable_convs,
)
from .ops.linear import linear
from .ops.pale_attention import Backend, pale_attention
from .ops.pale_attention.region import Region, check_word
from .ops.sizes import any_size, exporting, opaque_sizes

AttentionMode = Literal["parallel", "sequential", "vanilla", "axial", "cross"]
Position = Literal["cpe", "ape", "none"]

register_notrace_function(pale_attention)
register_notrace_function(linear)


@dataclass(frozen=True)
class PaleConfig:
    """An architecture: one entry for each stage i, in the paper's symbols, and the choices of its ablations.

    Attributes:
        channels: C_i.
        heads: H_i; both halves together.
        depths: blocks of each stage.
        pale_size: S_i, one or one a stage; None is the paper's 7, or 1 for axial.
        mlp_ratio: R_i.
        attention: parallel, sequential, vanilla, axial or cross.
        position: cpe, ape or none.
        stem_stride: P_1; 2 or 1 suit images of 32 to 64 px.
        img_size: read by APE alone: the size of its maps.
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
        for name in ("channels", "heads", "depths", "mlp_ratio"):
            kinds = (int, float) if name == "mlp_ratio" else (int,)
            value = getattr(self, name)
            if not isinstance(value, tuple) or any(type(v) not in kinds or v <= 0 for v in value):
                what = "numbers above 0" if name == "mlp_ratio" else "whole numbers of at least 1"
                raise ValueError(f"{name} must be {what}, one a stage, got {value!r}")
        stages = len(self.depths)
        for name in ("channels", "heads", "mlp_ratio"):
            if len(getattr(self, name)) != stages:
                raise ValueError(
                    f"{name} needs one entry for each of the {stages} stages of {self.depths=}, "
                    f"got {getattr(self, name)}"
                )
        if self.stem_stride not in (4, 2, 1):
            raise ValueError(
                f"stem_stride must be 4, 2 or 1, got {self.stem_stride}; the paper's is 4"
            )
        for c, heads in zip(self.channels, self.heads, strict=True):
            if c % heads or (heads % 2 and self.attention in ("parallel", "axial", "cross")):
                raise ValueError(
                    f"heads must divide the channels and, for attention={self.attention!r}, be even: "
                    f"got {heads} heads for {c} channels; 'sequential' and 'vanilla' take odd head counts"
                )
        if len(self.pale_sizes) != stages or any(
            type(s) is not int or s < 1 for s in self.pale_sizes
        ):
            raise ValueError(
                f"pale_size must be one whole number of at least 1, or {stages}, one a stage, got {self.pale_size}"
            )
        if self.attention == "axial" and set(self.pale_sizes) != {1}:
            raise ValueError(
                f"axial attention has pale size 1 by definition, got pale_size={self.pale_size}; "
                "leave it out, or use attention='parallel'"
            )

    @property
    def pale_sizes(self) -> tuple[int, ...]:
        """S_i, one a stage."""
        size = (
            self.pale_size if self.pale_size is not None else 1 if self.attention == "axial" else 7
        )
        return size if isinstance(size, tuple) else (size,) * len(self.depths)

    def region(self, stage: int, block: int) -> Region:
        """Where the given block attends; rows and columns of a pale are alike in number, s_r = s_c = S_i."""
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
        """Height and width of the map in each stage for an `h` x `w` image."""
        maps = [(-(-h // self.stem_stride), -(-w // self.stem_stride))]
        for _ in self.depths[1:]:
            maps.append((-(-maps[-1][0] // 2), -(-maps[-1][1] // 2)))
        return maps


PALE_T = PaleConfig(channels=(64, 128, 256, 512), heads=(2, 4, 8, 16))
PALE_S = PaleConfig(channels=(96, 192, 384, 768), heads=(2, 4, 8, 16))
PALE_B = PaleConfig(channels=(128, 256, 512, 1024), heads=(4, 8, 16, 32))
# Not of the paper: for laptops and tests.
PALE_NANO = PaleConfig(channels=(32, 64, 128, 192), heads=(2, 2, 4, 6), depths=(2, 2, 4, 2))

VARIANTS = {"pale_nano": PALE_NANO, "pale_tiny": PALE_T, "pale_small": PALE_S, "pale_base": PALE_B}


@register_notrace_module
class PatchMerging(nn.Module):
    """Overlapping convolution that shrinks the map, 7x7 at the image and 3x3 after, then LayerNorm."""

    def __init__(
        self, c_in: int, c: int, kernel: int, stride: int, backend: Backend, **dd: Any
    ) -> None:
        super().__init__()
        self.backend = backend
        self.conv = nn.Conv2d(c_in, c, kernel, stride=stride, padding=kernel // 2, **dd)
        self.norm = nn.LayerNorm(c, **dd)

    def forward(self, x: Tensor) -> Tensor:
        """(b, c_in, h, w) -> (b, h / stride, w / stride, c), rounded up."""
        if not exporting():  # which memory format a map has depends on its size
            x = x.contiguous(memory_format=torch.channels_last)
        if fused.takes_merging(self, x):
            return fused.merge(self, x)
        return self.norm(self.conv(x).permute(0, 2, 3, 1))


class CPE(DepthwiseConv):
    """Conditional position encoding (Eq. 8): what a 3x3 depthwise convolution makes of each token's surroundings."""


class APE(nn.Module):
    """Absolute position encoding (ablation): a learned map, resized to the input."""

    def __init__(self, h: int, w: int, c: int, **dd: Any) -> None:
        super().__init__()
        self.map = nn.Parameter(torch.zeros(1, h, w, c, **dd))

    def forward(self, x: Tensor) -> Tensor:
        """The encoding for `x`, (b, h, w, c), as (1, h, w, c)."""
        return resize_map(self.map, x)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # Weights learned at another size fit after resizing, whoever loads them.
        if (map_ := state_dict.get(prefix + "map")) is not None:
            state_dict[prefix + "map"] = resize_map(map_, self.map)
        super()._load_from_state_dict(state_dict, prefix, *args)


def resize_map(map_: Tensor, like: Tensor) -> Tensor:
    """Resize (1, h, w, c) to the height and width of `like`, (b, h, w, c)."""
    size = like.shape[1], like.shape[2]
    if not any_size() and map_.shape[1:3] == size:
        return map_
    x = F.interpolate(map_.permute(0, 3, 1, 2).float(), size, mode="bicubic", antialias=True)
    return x.permute(0, 2, 3, 1).to(map_.dtype)


register_notrace_function(resize_map)
register_notrace_function(opaque_sizes)


class PSAttention(nn.Module):
    """Pale-shaped self-attention (Eq. 1 to 3): phi, attention inside the groups of `region`, projection.

    phi_q, phi_k and phi_v see all channels; the split into X_r and X_c is one of heads, inside the
    operator.
    """

    def __init__(
        self, c: int, heads: int, region: Region, backend: Backend = "auto", **dd: Any
    ) -> None:
        super().__init__()
        self.heads, self.region, self.backend = heads, region, backend
        self.phi_q = SeparableConv(c, **dd)
        self.phi_k = SeparableConv(c, **dd)
        self.phi_v = SeparableConv(c, **dd)
        self.proj = Linear(c, c, **dd)

    def forward(self, x: Tensor) -> Tensor:
        """(b, h, w, c) -> (b, h, w, c)."""
        return self.proj(self.attend(*separable_convs(x, self.phi_q, self.phi_k, self.phi_v)))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention alone; all tensors are (b, h, w, c)."""
        q, k, v = (y.unflatten(-1, (self.heads, -1)) for y in (q, k, v))
        region = self.region
        y = pale_attention(
            q,
            k,
            v,
            pale_size=region.pale_size,
            scope=region.scope,
            grouping=region.grouping,
            backend=self.backend,
        )
        return y.flatten(-2)

    def extra_repr(self) -> str:
        """What the sub-modules do not show."""
        return f"heads={self.heads}, {self.region}, backend={self.backend!r}"


@register_notrace_module
class PaleBlock(nn.Module):
    """A Pale Transformer block (Eq. 8 to 10)."""

    def __init__(
        self, config: PaleConfig, stage: int, block: int, drop_path: float, **dd: Any
    ) -> None:
        super().__init__()
        c = config.channels[stage]
        self.cpe = CPE(c, **dd) if config.position == "cpe" else None
        self.norm1 = nn.LayerNorm(c, **dd)
        self.attn = PSAttention(
            c, config.heads[stage], config.region(stage, block), config.backend, **dd
        )
        self.norm2 = nn.LayerNorm(c, **dd)
        self.mlp = Mlp(c, int(c * config.mlp_ratio[stage]), **dd)
        # Two, as in timm: training draws each call's mask by module.
        self.drop_path1 = DropPath(drop_path) if drop_path else nn.Identity()
        self.drop_path2 = DropPath(drop_path) if drop_path else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """(b, h, w, c) -> (b, h, w, c)."""
        if fused.takes(self, x):
            return fused.forward(self, x)
        if self.cpe is not None:
            x = x + self.cpe(x)
        x = x + self.drop_path1(self.attn(self.norm1(x)))
        x = x + self.drop_path2(self.mlp(self.norm2(x)))
        return x


class PaleStage(nn.Module):
    """Patch merging, then the blocks."""

    def __init__(
        self, config: PaleConfig, stage: int, in_chans: int, drop_path: Sequence[float], **dd: Any
    ) -> None:
        super().__init__()
        c = config.channels[stage]
        if stage == 0:
            kernel, stride = 7, config.stem_stride
        else:
            in_chans, kernel, stride = config.channels[stage - 1], 3, 2
        self.merge = PatchMerging(in_chans, c, kernel, stride, config.backend, **dd)
        self.first = stage == 0
        self.ape = None
        if config.position == "ape":
            self.ape = APE(*config.maps(*image_size(config.img_size))[stage], c, **dd)
        self.blocks = nn.Sequential(
            *(PaleBlock(config, stage, i, drop_path[i], **dd) for i in range(config.depths[stage]))
        )
        self.grad_checkpointing = False

    def forward(self, x: Tensor, mix: TokenMix | None = None) -> Tensor:
        """(b, c_in, h, w) -> (b, c, h / stride, w / stride), rounded up; `mix` works on the merged tokens."""
        x = self.merge(opaque_sizes(x) if self.first else x)
        if mix is not None:
            x = mix(x)
        if self.ape is not None:
            x = x + self.ape(x)
        x = checkpoint_seq(self.blocks, x) if self.grad_checkpointing else self.blocks(x)
        return x.permute(0, 3, 1, 2)


class PaleTransformer(nn.Module):
    """The backbone (Figure 2a) with its classifier: LayerNorm, global average pool, linear."""

    def __init__(
        self,
        config: PaleConfig,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "avg",
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        dd: dict[str, Any] = {"device": device, "dtype": dtype}
        self.config = config
        self.in_chans, self.num_classes, self.global_pool = in_chans, num_classes, global_pool
        self.num_features = self.head_hidden_size = config.channels[-1]
        self.grad_checkpointing = False
        self.token_mix: TokenMix | None = None  # set by training with MixToken or token labels
        drop_path = calculate_drop_path_rates(drop_path_rate, config.depths, stagewise=True)
        self.stages = nn.Sequential(
            *(PaleStage(config, i, in_chans, drop_path[i], **dd) for i in range(len(config.depths)))
        )
        self.feature_info = [
            {"num_chs": c, "reduction": config.stem_stride * 2**i, "module": f"stages.{i}"}
            for i, c in enumerate(config.channels)
        ]
        self.norm: nn.Module = LayerNorm2d(self.num_features, **dd)
        self.head = ClassifierHead(
            self.num_features, num_classes, pool_type=_fast(global_pool), drop_rate=drop_rate, **dd
        )
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """Draw all weights anew; the reasons stand at the top of this file."""
        for module in self.modules():
            if isinstance(module, nn.Linear | CPE):
                nn.init.trunc_normal_(module.weight, std=0.02)
            elif isinstance(module, nn.Conv2d):
                nn.init.normal_(module.weight, std=math.prod(module.weight.shape[1:]) ** -0.5)
            elif isinstance(module, APE):
                nn.init.trunc_normal_(module.map, std=0.02)
            if isinstance(module, nn.Linear | nn.Conv2d) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward_features(self, x: Tensor) -> Tensor:
        """(b, in_chans, h, w) -> the last map after its norm, (b, C_4, h / 32, w / 32), rounded up."""
        return self.norm(self.stages(x))

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """The last map -> logits, or the pooled features."""
        return self.head(x, pre_logits=pre_logits)

    def forward(self, x: Tensor) -> Tensor:
        """(b, in_chans, h, w) -> logits (b, num_classes); with `token_mix`, in training, `forward_tokens`."""
        if self.training and self.token_mix is not None:
            return self.forward_tokens(x)  # type: ignore[return-value]
        return self.forward_head(self.forward_features(x))

    def forward_tokens(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(b, in_chans, h, w) -> logits (b, num_classes), and at every place of the last map, (b, h, w, num_classes).

        Tokens are mixed by `token_mix` after the first patch merging. Without dropout the former are the
        mean of the latter.
        """
        first, *others = self.stages
        x = first(x, self.token_mix)
        for stage in others:
            x = stage(x)
        x = self.norm(x)
        return self.forward_head(x), self.head.fc(x.permute(0, 2, 3, 1))

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """The maps of the chosen stages, (b, C_i, h, w) each, before them what `forward_features` gives.

        Args:
            x: images, (b, in_chans, h, w).
            indices: stages by number, the last n of them, or all.
            norm: give the last map after the final norm.
            stop_early: leave out the stages after the last chosen one.
            output_fmt: "NCHW", the only one.
            intermediates_only: give the list alone.
        """
        if output_fmt != "NCHW":
            raise ValueError(
                f"output_fmt must be 'NCHW', got {output_fmt!r}; permute the maps yourself for another"
            )
        take, last = feature_take_indices(len(self.stages), indices)
        stages = self.stages[: last + 1] if stop_early else self.stages
        maps = []
        for i, stage in enumerate(stages):
            x = stage(x)
            if i in take:
                maps.append(self.norm(x) if norm and i == len(self.stages) - 1 else x)
        if intermediates_only:
            return maps
        return (self.norm(x) if len(stages) == len(self.stages) else x), maps

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Drop what the chosen stages do not need, so that no parameter is left without a gradient."""
        take, last = feature_take_indices(len(self.stages), indices)
        self.stages = self.stages[: last + 1]
        if prune_norm:
            self.norm = nn.Identity()
        if prune_head:
            self.reset_classifier(0, "")
        return take

    def get_classifier(self) -> nn.Module:
        """The linear classifier."""
        return self.head.fc

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Put a new classifier in place, or none (0)."""
        self.num_classes = num_classes
        if global_pool is not None:
            self.global_pool = global_pool
        pool_type = None if global_pool is None else _fast(global_pool)
        self.head.reset(num_classes, pool_type, **get_device_dtype(self))

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute each block in the backward pass in place of keeping its activations."""
        self.grad_checkpointing = enable
        for stage in self.stages:
            cast("PaleStage", stage).grad_checkpointing = enable

    def set_input_size(self, img_size: int | tuple[int, int]) -> None:
        """Resize APE's maps for images of another size; without APE there is nothing to set."""
        self.config = replace(self.config, img_size=img_size)
        for stage, (h, w) in zip(self.stages, self.config.maps(*image_size(img_size)), strict=True):
            if (ape := cast("PaleStage", stage).ape) is not None:
                ape.map = nn.Parameter(resize_map(ape.map.detach(), ape.map.new_empty(1, h, w, 1)))

    def no_weight_decay(self) -> set[str]:
        """Parameters that are positions, not weights."""
        return {name for name, _ in self.named_parameters() if name.endswith("ape.map")}

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """How timm's layer-wise learning-rate decay cuts the model."""
        blocks = [
            (r"^stages\.(\d+)\.(?:merge|ape)", (0,)),
            (r"^stages\.(\d+)\.blocks\.(\d+)", None),
            (r"^norm", (99999,)),
        ]
        return {
            "stem": r"^stages\.0\.(?:merge|ape)",
            "blocks": r"^stages\.(\d+)" if coarse else blocks,
        }


def _fast(global_pool: str) -> str:
    # timm's plain reductions: adaptive pooling ties an exported program to maps of several pixels.
    return f"fast{global_pool.removeprefix('fast')}" if global_pool else ""


def image_size(size: int | tuple[int, int]) -> tuple[int, int]:
    """Height and width."""
    return size if isinstance(size, tuple) else (size, size)


def _cfg() -> dict[str, Any]:
    # crop_pct: short side 256, centre 224, as the papers that this one follows evaluate.
    return {
        "num_classes": 1000,
        "input_size": (3, 224, 224),
        "pool_size": (7, 7),
        "crop_pct": 0.875,
        "interpolation": "bicubic",
        "fixed_input_size": False,
        "mean": IMAGENET_DEFAULT_MEAN,
        "std": IMAGENET_DEFAULT_STD,
        "first_conv": "stages.0.merge.conv",
        "classifier": "head.fc",
        "license": "apache-2.0",
        "paper_ids": "arXiv:2112.14000",
    }


default_cfgs = generate_default_cfgs({f"{name}.untrained": _cfg() for name in VARIANTS})


def _create(variant: str, pretrained: bool, **kwargs: Any) -> PaleTransformer:
    architecture = {f.name: kwargs.pop(f.name) for f in fields(PaleConfig) if f.name in kwargs}
    model = build_model_with_cfg(
        PaleTransformer,
        variant,
        pretrained,
        config=replace(VARIANTS[variant], **architecture),
        feature_cfg={
            "out_indices": kwargs.pop("out_indices", (0, 1, 2, 3)),
            "feature_cls": "getter",
        },
        **kwargs,
    )
    return model


@register_model
def pale_nano(pretrained: bool = False, **kwargs: Any) -> PaleTransformer:
    """Ours, not the paper's: 2 M parameters, for laptops and tests."""
    return _create("pale_nano", pretrained, **kwargs)


@register_model
def pale_tiny(pretrained: bool = False, **kwargs: Any) -> PaleTransformer:
    """Pale-T of the paper."""
    return _create("pale_tiny", pretrained, **kwargs)


@register_model
def pale_small(pretrained: bool = False, **kwargs: Any) -> PaleTransformer:
    """Pale-S of the paper."""
    return _create("pale_small", pretrained, **kwargs)


@register_model
def pale_base(pretrained: bool = False, **kwargs: Any) -> PaleTransformer:
    """Pale-B of the paper."""
    return _create("pale_base", pretrained, **kwargs)


def variant(name: str) -> PaleConfig:
    """The configuration that goes by a model's name, with or without timm's tag ("pale_tiny.untrained")."""
    base = name.partition(".")[0]
    check_word("model", base, tuple(VARIANTS))
    return VARIANTS[base]


def create_model(name: str = "pale_tiny", **kwargs: Any) -> PaleTransformer:
    """A model by name, as `timm.create_model` makes it.

    Args:
        name: pale_nano, pale_tiny, pale_small or pale_base.
        kwargs: the fields of `PaleConfig` (attention, pale_size, position, stem_stride, img_size,
            backend, ...), the arguments of `PaleTransformer` (in_chans, num_classes,
            drop_path_rate, ...), and timm's (features_only, ...).
    """
    variant(name)
    return timm.create_model(name, **kwargs)
