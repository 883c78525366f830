"""A block on the GPU: the same modules and weights as in `PaleBlock.forward`, through the fused pieces of `ops.block`.

Every map is written and read as rarely as the kernels allow; between the pieces it stays in the dtype of autocast, the
residual stream included, where plain PyTorch goes back to float32 at every norm.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .layers import DepthwiseConv, Linear, Mlp, SeparableConv, untouched
from .ops.block import triton_op as pieces
from .ops.pale_attention import triton_op as attention
from .ops.sizes import exporting

if TYPE_CHECKING:
    from .pale_transformer import PaleBlock, PatchMerging

BACKENDS = ("auto", "triton")


def takes(block: PaleBlock, x: Tensor) -> bool:
    """Whether the kernels can run `block` on `x`, (b, h, w, c), and nobody put something of their own into it."""
    attn, mlp = block.attn, block.mlp
    if pieces.unsupported(x, x.shape[-1]) is not None or exporting():
        return False
    if getattr(attn, "backend", None) not in BACKENDS or not untouched(attn, type(attn)):
        return False
    if x.shape[-1] // attn.heads not in attention.HEAD_DIMS:
        return False
    phis = attn.phi_q, attn.phi_k, attn.phi_v
    return (
        (block.cpe is None or untouched(block.cpe, DepthwiseConv))
        and untouched(block.norm1, nn.LayerNorm)
        and untouched(block.norm2, nn.LayerNorm)
        and all(untouched(phi, SeparableConv) for phi in phis)
        and all(untouched(phi.depthwise, DepthwiseConv) for phi in phis)
        and all(untouched(phi.pointwise, Linear) for phi in phis)
        and untouched(attn.proj, Linear)
        and untouched(mlp, Mlp)
        and untouched(mlp.fc1, Linear)
        and untouched(mlp.act, nn.GELU)
        and untouched(mlp.fc2, Linear)
        # The kernels load and sum 16 numbers at a time.
        and mlp.fc1.out_features % 16 == 0
    )


def takes_merging(merging: PatchMerging, x: Tensor) -> bool:
    """The same for a patch merging, of (b, c_in, h, w)."""
    channels = merging.norm.normalized_shape[0]
    if pieces.unsupported(x, channels) is not None or exporting():
        return False
    return (
        merging.backend in BACKENDS
        and untouched(merging.conv, nn.Conv2d)
        and untouched(merging.norm, nn.LayerNorm)
    )


def dtype_of(x: Tensor) -> torch.dtype:
    """The dtype to compute in: autocast's where it is on."""
    device = x.device.type
    if not torch.is_autocast_enabled(device):
        return x.dtype
    return torch.get_autocast_dtype(device)


def norm(x: Tensor, layer: nn.LayerNorm, bias: Tensor | None = None) -> Tensor:
    """LayerNorm of x + bias in the dtype to compute in."""
    y: Tensor = pieces.norm(x.to(dtype_of(x)), bias, layer.weight, layer.bias, layer.eps)
    return y


def cast(dtype: torch.dtype, *weights: Tensor) -> list[Tensor]:
    """The weights in `dtype`: in one piece, as there are many and most are small."""
    if all(weight.dtype == dtype for weight in weights):
        return list(weights)
    flat = torch.cat([weight.flatten() for weight in weights]).to(dtype)
    parts = flat.split([weight.numel() for weight in weights])
    return [part.view(weight.shape) for part, weight in zip(parts, weights, strict=True)]


def factors(drop_path: nn.Module, x: Tensor) -> Tensor | None:
    """Drop path's factor of each image; the module shows it when it is given ones."""
    if not drop_path.training or isinstance(drop_path, nn.Identity):
        return None
    y: Tensor = drop_path(x.new_ones(len(x), 1, 1, 1)).flatten()
    return y


def merge(merging: PatchMerging, x: Tensor) -> Tensor:
    """`PatchMerging.forward`; the bias of the convolution is added where the norm reads the map."""
    conv = merging.conv
    y = conv._conv_forward(x, conv.weight, None).permute(0, 2, 3, 1)
    return norm(y, merging.norm, conv.bias)


def forward(block: PaleBlock, x: Tensor) -> Tensor:
    """`PaleBlock.forward` (Eq. 8 to 10)."""
    x = x.to(dtype_of(x))
    attn, mlp, norm1, norm2 = block.attn, block.mlp, block.norm1, block.norm2
    if block.cpe is None:
        y = norm(x, norm1)
    else:
        cpe = block.cpe
        x, y = pieces.conv_norm(x, cpe.weight, cpe.bias, norm1.weight, norm1.bias, norm1.eps)
    phis = attn.phi_q, attn.phi_k, attn.phi_v
    maps = pieces.conv_three(y, *(phi.depthwise.weight for phi in phis))
    pointwise = [phi.pointwise for phi in phis]
    linears = *pointwise, attn.proj, mlp.fc1, mlp.fc2
    *weights, b_1 = cast(x.dtype, *(layer.weight for layer in linears), mlp.fc1.bias)
    w_q, w_k, w_v, w_proj, w_1, w_2 = weights
    q, k, v = pieces.linear_three(maps, w_q, w_k, w_v, *(layer.bias for layer in pointwise))
    y = F.linear(attn.attend(q, k, v), w_proj)
    scale, next_scale = factors(block.drop_path1, x), factors(block.drop_path2, x)
    affine = norm2.weight, norm2.bias, norm2.eps
    residual = x, y, attn.proj.bias, scale
    return pieces.finish(*residual, *affine, w_1, b_1, w_2, mlp.fc2.bias, next_scale)
