"""A block with the fused operators of `ops.block`, on the modules and weights of `PaleBlock`.

The kernels read and write each map as few times as possible. Between operators all maps have the dtype of
autocast, including the residual stream; plain PyTorch returns to float32 at every norm.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.nn.functional as F
from timm.layers import DropPath
from torch import Tensor, nn

from ..ops.block import triton_op as pieces
from ..ops.pale_attention import triton_op as attention
from ..ops.shortcuts import (
    is_plain,
    is_plain_depthwise,
    is_transformed,
    is_watched,
    plain_kind,
    signature,
)
from ..ops.sizes import exporting
from .layers import Mlp, SeparableConv, is_exact_gelu

if TYPE_CHECKING:
    from .pale_transformer import PaleBlock, PatchMerging

BACKENDS = ("auto", "triton")
plain_kind(DropPath)


# By channels and signature; a process has few different ones.
_fusible: dict[tuple[int, tuple[Any, ...]], bool] = {}
MAX_SIGNATURES = 256


def can_fuse(block: PaleBlock, x: Tensor) -> bool:
    """Return whether the kernels can run `block` on `x`, (b, h, w, c), and calling its parts would do nothing else.

    One pass over the modules of the block gives its signature; what follows from a signature is computed once.
    """
    if not can_fuse_input(x, x.shape[-1]) or is_watched() or 0 in x.shape[1:]:
        return False
    if torch.compiler.is_compiling():  # the compiler guards on the attributes read here
        return is_fusible(block, x.shape[-1]) and _on_device(block, x.device)
    found = signature(block, x.device)
    if found is None:
        return is_fusible(block, x.shape[-1]) and _on_device(block, x.device)
    key = x.shape[-1], found
    if (fusible := _fusible.get(key)) is None:
        if len(_fusible) >= MAX_SIGNATURES:
            _fusible.clear()
        fusible = _fusible[key] = is_fusible(block, x.shape[-1])
    return fusible


def can_fuse_input(x: Tensor, channels: int) -> bool:
    """Return whether the kernels can run now on maps with `c` channels, on the device and in the dtype of `x`."""
    return not (is_transformed(x) or pieces.unsupported(x, channels) is not None or exporting())


def is_fusible(block: PaleBlock, c: int) -> bool:
    """Return whether the kernels can run a block of `c` channels; reads only what `signature` holds."""
    from .pale_transformer import PSAttention

    attn, mlp = block.attn, block.mlp
    return (
        is_plain(attn, PSAttention)
        and is_plain(mlp, Mlp)
        and attn.backend in BACKENDS
        and c // attn.heads in attention.HEAD_DIMS
        and (block.cpe is None or (is_plain_depthwise(block.cpe) and block.cpe.bias is not None))
        and is_plain_norm(block.norm1)
        and is_plain_norm(block.norm2)
        and all(map(_is_fusible_phi, (attn.phi_q, attn.phi_k, attn.phi_v)))
        and all(map(_is_biased_linear, (attn.proj, mlp.fc1, mlp.fc2)))
        and is_exact_gelu(mlp.act)
        # The kernels load and add 16 numbers at a time.
        and mlp.fc1.out_features % 16 == 0
        and all(map(_only_scales_images, (block.drop_path1, block.drop_path2)))
    )


def _on_device(block: PaleBlock, device: torch.device) -> bool:
    """Return whether all weights are on `device`; if not (offloaded, not yet moved), PyTorch raises the error."""
    return all(parameter.device == device for parameter in block.parameters())


def _is_fusible_phi(phi: nn.Module) -> bool:
    return (
        is_plain(phi, SeparableConv)
        and is_plain_depthwise(phi.depthwise)
        and phi.depthwise.bias is None
        and _is_biased_linear(phi.pointwise)
    )


def _is_biased_linear(layer: nn.Module) -> bool:
    return is_plain(layer, nn.Linear) and layer.bias is not None


def _only_scales_images(drop_path: nn.Module) -> bool:
    """Return whether `module` only multiplies each image by a factor in training, see `factors`."""
    if type(drop_path) is nn.Identity or type(drop_path) is DropPath:
        return is_plain(drop_path, type(drop_path))
    return getattr(type(drop_path), "scales_images", False) is True


def can_fuse_merging(merging: PatchMerging, x: Tensor) -> bool:
    """Return whether the kernels can run a patch merging of (b, c_in, h, w)."""
    conv, norm = merging.conv, merging.norm
    return (
        merging.backend in BACKENDS
        and can_fuse_input(x, 16)
        and not is_watched()
        and is_plain(conv, nn.Conv2d)
        and conv.padding_mode == "zeros"
        and is_plain_norm(norm)
        and pieces.unsupported(x, norm.normalized_shape[0]) is None
        and conv.weight.device == norm.weight.device == x.device
    )


def is_plain_norm(layer: nn.Module) -> TypeGuard[nn.LayerNorm]:
    """Return whether calling `layer` is LayerNorm over the channels, with weight and bias, and nothing else."""
    return (
        is_plain(layer, nn.LayerNorm)
        and len(layer.normalized_shape) == 1
        and layer.weight is not None
        and layer.bias is not None
    )


def dtype_of(x: Tensor) -> torch.dtype:
    """Return the dtype to compute in: that of autocast if it is on."""
    device = x.device.type
    if not torch.is_autocast_enabled(device):
        return x.dtype
    return torch.get_autocast_dtype(device)


def norm(x: Tensor, layer: nn.LayerNorm, bias: Tensor | None = None) -> Tensor:
    """Return LayerNorm of x + bias in the dtype to compute in."""
    y: Tensor = pieces.norm(x.to(dtype_of(x)), bias, layer.weight, layer.bias, layer.eps)
    return y


def factors(block: PaleBlock, x: Tensor) -> tuple[Tensor | None, ...]:
    """Return the factors of both drop paths for each image: the results of the modules for ones."""
    drops = block.drop_path1, block.drop_path2
    active = [drop.training and not isinstance(drop, nn.Identity) for drop in drops]
    ones = x.new_ones(len(x), 1, 1, 1) if any(active) else x
    return tuple(drop(ones) if on else None for drop, on in zip(drops, active, strict=True))


def merge(merging: PatchMerging, x: Tensor) -> Tensor:
    """Run `PatchMerging.forward`; the norm adds the bias of the convolution."""
    conv = merging.conv
    y = F.conv2d(x, conv.weight, None, conv.stride, conv.padding, conv.dilation, conv.groups)
    y = y.permute(0, 2, 3, 1)
    return norm(y, merging.norm, conv.bias)


def forward(block: PaleBlock, x: Tensor) -> Tensor:
    """Run `PaleBlock.forward` (Eq. 8 to 10)."""
    x = x.to(dtype_of(x))
    cpe, attn, mlp, norm1, norm2 = block.cpe, block.attn, block.mlp, block.norm1, block.norm2
    phis = attn.phi_q, attn.phi_k, attn.phi_v
    pointwise = [phi.pointwise for phi in phis]
    region = attn.region
    out: Tensor = pieces.block(
        x,
        None if cpe is None else cpe.weight,
        None if cpe is None else cpe.bias,
        norm1.weight,
        norm1.bias,
        *(phi.depthwise.weight for phi in phis),
        *(layer.weight for layer in pointwise),
        *(layer.bias for layer in pointwise),
        *(attn.proj.weight, attn.proj.bias, norm2.weight, norm2.bias),
        *(mlp.fc1.weight, mlp.fc1.bias, mlp.fc2.weight, mlp.fc2.bias),
        *(*factors(block, x), norm1.eps, norm2.eps),
        *(attn.heads, *region.pale_size, region.scope, region.grouping),
    )
    return out
