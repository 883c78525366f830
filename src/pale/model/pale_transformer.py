"""The Pale Transformer, in the order of the paper's Methodology section.

Maps are NCHW between the stages, as in timm, and NHWC inside them; with channels-last memory the two are the same
bytes. No parameter depends on the image size (except APE): one model runs at any height and width.

The paper does not describe the initialisation. Linear layers: truncated normal, 0.02, as in DeiT, Swin and CSWin. The
depthwise halves of phi_q, phi_k, phi_v and the patch merging convolutions: normal with variance 1 / fan-in, so that
normalised input stays at unit scale. CPE is on the residual stream, `x + CPE(x)` in every block, where an ordinary
initialisation of convolutions lets the stream grow by orders of magnitude over 22 blocks. It is therefore a truncated
normal of 0.02: a block adds 0.06 of the stream, which keeps its scale to the last stage and still contains the zero
padding, hence the position, from the first step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, cast

import timm
import torch
import torch.fx
import torch.nn.functional as F
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.layers import ClassifierHead, DropPath, calculate_drop_path_rates, get_device_dtype
from timm.models import (
    build_model_with_cfg,
    checkpoint_seq,
    generate_default_cfgs,
    register_model,
    register_notrace_function,
    register_notrace_module,
)
from torch import Tensor, nn

from ..compat import feature_take_indices
from ..ops.pale_attention import Backend, pale_attention
from ..ops.pale_attention.region import Region, check_word
from ..ops.shortcuts import is_transformed, plain_kind
from ..ops.sizes import any_size, exporting, opaque_sizes
from ..weights.zoo.index import UNTRAINED
from . import fused
from .config import AttentionMode as AttentionMode
from .config import PaleConfig as PaleConfig
from .config import Position as Position
from .config import image_size as image_size
from .layers import (
    LayerNorm2d,
    Mlp,
    SeparableConv,
    convolve,
    depthwise,
    project,
    separable_convs,
)
from .pretrained import default_tag, load_pretrained, names_weights, tagged_configs

register_notrace_function(pale_attention)
torch.fx.wrap("pale_attention")  # for other tracers than timm's

PALE_T = PaleConfig(channels=(64, 128, 256, 512), heads=(2, 4, 8, 16))
PALE_S = PaleConfig(channels=(96, 192, 384, 768), heads=(2, 4, 8, 16))
PALE_B = PaleConfig(channels=(128, 256, 512, 1024), heads=(4, 8, 16, 32))
# Not in the paper: for laptops and tests.
PALE_NANO = PaleConfig(channels=(32, 64, 128, 192), heads=(2, 2, 4, 6), depths=(2, 2, 4, 2))

VARIANTS = {"pale_nano": PALE_NANO, "pale_tiny": PALE_T, "pale_small": PALE_S, "pale_base": PALE_B}


@register_notrace_module
class PatchMerging(nn.Module):
    """Overlapping convolution with stride, 7x7 for the image and 3x3 for maps, then LayerNorm."""

    def __init__(
        self, c_in: int, c: int, kernel: int, stride: int, backend: Backend, **dd: Any
    ) -> None:
        super().__init__()
        self.backend = backend
        self.conv = nn.Conv2d(c_in, c, kernel, stride=stride, padding=kernel // 2, **dd)
        self.norm = nn.LayerNorm(c, **dd)

    def forward(self, x: Tensor) -> Tensor:
        """(b, c_in, h, w) -> (b, h / stride, w / stride, c), rounded up."""
        # The memory format of a map depends on its size; `vmap` supports only the default.
        if not exporting() and not is_transformed(x):
            x = x.contiguous(memory_format=torch.channels_last)
        if fused.can_fuse_merging(self, x):
            return fused.merge(self, x)
        return self.norm(self.conv(x).permute(0, 2, 3, 1))


class APE(nn.Module):
    """Absolute position encoding (ablation): a learned map, resized to the input."""

    def __init__(self, h: int, w: int, c: int, **dd: Any) -> None:
        super().__init__()
        self.map = nn.Parameter(torch.zeros(1, h, w, c, **dd))
        self.register_load_state_dict_pre_hook(_resize_loaded_map)  # type: ignore[no-untyped-call]

    def forward(self, x: Tensor) -> Tensor:
        """Return the encoding for `x`, (b, h, w, c), as (1, h, w, c)."""
        return resize_map(self.map, x)


def _resize_loaded_map(ape: APE, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Resize weights that were learned at another size before they are loaded."""
    if (map_ := state_dict.get(prefix + "map")) is not None:
        state_dict[prefix + "map"] = resize_map(map_, ape.map)


def resize_map(map_: Tensor, like: Tensor) -> Tensor:
    """Resize (1, h, w, c) to the height and width of `like`, (b, h, w, c)."""
    size = like.shape[1], like.shape[2]
    if not any_size(*size) and map_.shape[1:3] == size:
        return map_
    x = F.interpolate(map_.permute(0, 3, 1, 2).float(), size, mode="bicubic", antialias=True)
    return x.permute(0, 2, 3, 1).to(map_.dtype)


register_notrace_function(resize_map)
torch.fx.wrap("resize_map")
register_notrace_function(opaque_sizes)


class PSAttention(nn.Module):
    """Pale-shaped self-attention (Eq. 1 to 3): phi, attention inside the groups of `region`, projection.

    phi_q, phi_k and phi_v use all channels; the operator splits the heads into X_r and X_c.
    """

    def __init__(
        self, c: int, heads: int, region: Region, backend: Backend = "auto", **dd: Any
    ) -> None:
        super().__init__()
        self.heads, self.region, self.backend = heads, region, backend
        self.phi_q = SeparableConv(c, **dd)
        self.phi_k = SeparableConv(c, **dd)
        self.phi_v = SeparableConv(c, **dd)
        self.proj = nn.Linear(c, c, **dd)

    def forward(self, x: Tensor) -> Tensor:
        """(b, h, w, c) -> (b, h, w, c)."""
        q, k, v = separable_convs(x, self.phi_q, self.phi_k, self.phi_v)
        return project(self.proj, self.attend(q, k, v))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return attention without phi and projection; all tensors are (b, h, w, c)."""
        q, k, v = (y.unflatten(-1, (self.heads, -1)) for y in (q, k, v))
        return pale_attention(q, k, v, region=self.region, backend=self.backend).flatten(-2)

    def extra_repr(self) -> str:
        """Return the settings for `repr`."""
        return f"heads={self.heads}, {self.region}, backend={self.backend!r}"


plain_kind(PSAttention, "heads", "backend")


@register_notrace_module
class PaleBlock(nn.Module):
    """A Pale Transformer block (Eq. 8 to 10)."""

    def __init__(
        self, config: PaleConfig, stage: int, block: int, drop_path: float, **dd: Any
    ) -> None:
        super().__init__()
        c = config.channels[stage]
        # Conditional position encoding: depthwise convolution of the token map.
        self.cpe = depthwise(c, **dd) if config.position == "cpe" else None
        self.norm1 = nn.LayerNorm(c, **dd)
        self.attn = PSAttention(
            c, config.heads[stage], config.region(stage, block), config.backend, **dd
        )
        self.norm2 = nn.LayerNorm(c, **dd)
        self.mlp = Mlp(c, int(c * config.mlp_ratio[stage]), **dd)
        # Two, as in timm: in training each module draws its own mask.
        self.drop_path1 = DropPath(drop_path) if drop_path else nn.Identity()
        self.drop_path2 = DropPath(drop_path) if drop_path else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """(b, h, w, c) -> (b, h, w, c)."""
        if fused.can_fuse(self, x):
            return fused.forward(self, x)
        if self.cpe is not None:
            x = x + convolve(self.cpe, x)
        x = x + self.drop_path1(self.attn(self.norm1(x)))
        x = x + self.drop_path2(self.mlp(self.norm2(x)))
        return x


plain_kind(PaleBlock)


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

    def forward(self, x: Tensor, token_mask: Tensor | None = None) -> Tensor:
        """(b, c_in, h, w) -> (b, c, h / stride, w / stride), rounded up.

        MixToken: where `token_mask`, (h / stride, w / stride), is set, the merged tokens come from the image at the
        opposite place in the batch.
        """
        x = self.merge(opaque_sizes(x) if self.first else x)
        if token_mask is not None:
            x = torch.where(token_mask[..., None], x.flip(0), x)
        if self.ape is not None:
            x = x + self.ape(x)
        x = checkpoint_seq(self.blocks, x) if self.grad_checkpointing else self.blocks(x)
        return x.permute(0, 3, 1, 2)


class Head(ClassifierHead):  # type: ignore[misc]
    """timm's classifier; without pooling (global_pool='') it returns logits for every token of the map."""

    def forward(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """(b, c, h, w) -> (b, num_classes), or (b, num_classes, h, w) without pooling."""
        if self.global_pool.pool_type or pre_logits:
            return super().forward(x, pre_logits)
        y: Tensor = self.fc(self.drop(x).permute(0, 2, 3, 1))
        return y.permute(0, 3, 1, 2)


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
        drop_path = calculate_drop_path_rates(drop_path_rate, config.depths, stagewise=True)
        self.stages = nn.Sequential(
            *(PaleStage(config, i, in_chans, drop_path[i], **dd) for i in range(len(config.depths)))
        )
        self.feature_info = [
            {"num_chs": c, "reduction": config.stem_stride * 2**i, "module": f"stages.{i}"}
            for i, c in enumerate(config.channels)
        ]
        self.norm: nn.Module = LayerNorm2d(self.num_features, **dd)
        self.head = Head(
            self.num_features, num_classes, pool_type=_fast(global_pool), drop_rate=drop_rate, **dd
        )
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """Initialise all weights; the reasons are at the top of this file."""
        encodings = {block.cpe for block in self.modules() if isinstance(block, PaleBlock)}
        for module in self.modules():
            if isinstance(module, nn.Linear) or module in encodings:
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
        """Return logits of the last map, or the pooled features."""
        return self.head(x, pre_logits=pre_logits)

    def forward(self, x: Tensor) -> Tensor:
        """(b, in_chans, h, w) -> logits (b, num_classes)."""
        return self.forward_head(self.forward_features(x))

    def forward_tokens(self, x: Tensor, token_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(b, in_chans, h, w) -> logits (b, num_classes) and dense logits of the last map, (b, h, w, num_classes).

        Without dropout the logits are the mean of the dense logits.

        Args:
            x: images.
            token_mask: tokens that MixToken replaces after the first patch merging, (h, w) of the first map, boolean.
        """
        first, *others = self.stages
        x = first(x, token_mask)
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
        """Return the result of `forward_features` and the maps of the chosen stages, (b, C_i, h, w) each.

        Args:
            x: images, (b, in_chans, h, w).
            indices: stages by number, the last n of them, or all.
            norm: apply the final norm to the last map.
            stop_early: skip the stages after the last chosen one.
            output_fmt: must be "NCHW".
            intermediates_only: return only the list of maps.
        """
        if output_fmt != "NCHW":
            raise ValueError(
                f"output_fmt must be 'NCHW', got {output_fmt!r}; permute the maps for another layout"
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
        """Remove what the chosen stages do not need, so that every parameter gets a gradient."""
        take, last = feature_take_indices(len(self.stages), indices)
        self.stages = self.stages[: last + 1]
        if prune_norm:
            self.norm = nn.Identity()
        if prune_head:
            self.reset_classifier(0, "")
        return take

    def get_classifier(self) -> nn.Module:
        """Return the linear classifier."""
        return self.head.fc

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the classifier, or remove it (0)."""
        self.num_classes = num_classes
        if global_pool is not None:
            self.global_pool = global_pool
        pool_type = None if global_pool is None else _fast(global_pool)
        self.head.reset(num_classes, pool_type, **get_device_dtype(self))

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute each block in the backward pass instead of storing its activations."""
        self.grad_checkpointing = enable
        for stage in self.stages:
            cast("PaleStage", stage).grad_checkpointing = enable

    def set_input_size(self, img_size: int | tuple[int, int]) -> None:
        """Resize the maps of APE for images of another size; does nothing without APE."""
        self.config = replace(self.config, img_size=img_size)
        for stage, (h, w) in zip(self.stages, self.config.maps(*image_size(img_size)), strict=True):
            if (ape := cast("PaleStage", stage).ape) is not None:
                ape.map = nn.Parameter(resize_map(ape.map.detach(), ape.map.new_empty(1, h, w, 1)))

    def load_pretrained(self, path: str) -> None:
        """Load included or packed weights; timm calls this for a `pretrained_cfg` with `custom_load`."""
        load_pretrained(self, Path(path))

    def no_weight_decay(self) -> set[str]:
        """Return the names of position encodings, which get no weight decay."""
        return {name for name, _ in self.named_parameters() if name.endswith("ape.map")}

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Return the parameter groups for timm's layer-wise learning rate decay."""
        blocks = [
            (r"^stages\.(\d+)\.(?:merge|ape)", (0,)),
            (r"^stages\.(\d+)\.blocks\.(\d+)", None),
            (r"^norm", (99999,)),
        ]
        return {
            "stem": r"^stages\.0\.(?:merge|ape)",
            "blocks": r"^stages\.(\d+)" if coarse else blocks,
        }


class TokenTransformer(PaleTransformer):
    """A Pale Transformer for training with MixToken or token labels; parameters and state-dict keys are the same.

    Given a token mask, `forward` returns dense logits too, because DDP, FSDP and `torch.compile` wrap only `forward`.
    """

    def forward(  # type: ignore[override]
        self, x: Tensor, token_mask: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return logits; with `token_mask`, the result of `forward_tokens`."""
        return super().forward(x) if token_mask is None else self.forward_tokens(x, token_mask)


def _fast(global_pool: str) -> str:
    # timm's plain reductions: adaptive pooling ties an exported program to maps of several pixels.
    return f"fast{global_pool.removeprefix('fast')}" if global_pool else ""


def _cfg() -> dict[str, Any]:
    # crop_pct: short side 256, centre 224, as in the evaluation of DeiT, Swin and CSWin.
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


# Without a tag, a model has 1000 classes whatever weights there are. timm makes the first tag with weights the
# default, unless a later one has an asterisk.
default_cfgs = generate_default_cfgs(
    tagged_configs(_cfg(), VARIANTS) | {f"{name}.{UNTRAINED}*": _cfg() for name in VARIANTS}
)


def _create(variant: str, pretrained: bool, **kwargs: Any) -> PaleTransformer:
    architecture = {f.name: kwargs.pop(f.name) for f in fields(PaleConfig) if f.name in kwargs}
    if pretrained and not names_weights(kwargs):
        kwargs["pretrained_cfg"] = default_tag(variant)
    model = build_model_with_cfg(
        TokenTransformer if kwargs.pop("token_outputs", False) else PaleTransformer,
        variant,
        pretrained,
        config=replace(VARIANTS[variant], **architecture),
        feature_cfg={
            "out_indices": kwargs.pop("out_indices", (0, 1, 2, 3)),
            "feature_cls": "getter",
            "flatten_sequential": True,  # for the feature classes that find stages by name
        },
        **kwargs,
    )
    return model


@register_model
def pale_nano(pretrained: bool = False, **kwargs: Any) -> PaleTransformer:
    """Pale-nano, not in the paper: 2 M parameters, for laptops and tests."""
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
    """Return the configuration of a model by its name, with or without timm's tag ("pale_tiny.untrained")."""
    base = name.partition(".")[0]
    check_word("model", base, tuple(VARIANTS))
    return VARIANTS[base]


def create_model(name: str = "pale_tiny", **kwargs: Any) -> PaleTransformer:
    """Return a model by name, created by `timm.create_model`.

    Args:
        name: pale_nano, pale_tiny, pale_small or pale_base; with a tag and `pretrained=True`, included weights:
            "pale_nano.pets" (`timm.list_pretrained("pale*")` lists them).
        kwargs: the fields of `PaleConfig` (attention, pale_size, position, stem_stride, img_size,
            backend, ...), the arguments of `PaleTransformer` (in_chans, num_classes,
            drop_path_rate, ...), and timm's (features_only, ...).
    """
    variant(name)
    return timm.create_model(name, **kwargs)
