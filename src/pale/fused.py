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
    from .pale_transformer import PaleBlock

BACKENDS = ("auto", "triton")


def takes(block: PaleBlock, x: Tensor) -> bool:
    """Whether the kernels can run `block` on `x`, (b, h, w, c), and nobody put something of their own into it."""
    attn, mlp = block.attn, block.mlp
    if pieces.unsupported(x) is not None or exporting():
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


def takes_norm(layer: nn.LayerNorm, backend: str, x: Tensor) -> bool:
    """The same for a LayerNorm alone."""
    if backend not in BACKENDS or pieces.unsupported(x) is not None or exporting():
        return False
    return untouched(layer, nn.LayerNorm)


def dtype_of(x: Tensor) -> torch.dtype:
    """The dtype to compute in: autocast's where it is on."""
    device = x.device.type
    if not torch.is_autocast_enabled(device):
        return x.dtype
    return torch.get_autocast_dtype(device)


def norm(x: Tensor, layer: nn.LayerNorm) -> Tensor:
    """LayerNorm in the dtype to compute in."""
    y: Tensor = pieces.norm(x.to(dtype_of(x)), layer.weight, layer.bias, layer.eps)
    return y


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
    weights, biases = [p.weight for p in pointwise], [p.bias for p in pointwise]
    q, k, v = pieces.linear_three(maps, *weights, *biases)
    y = F.linear(attn.attend(q, k, v), attn.proj.weight)
    # Drop path is one factor an image; the module shows it when it is given ones.
    dropping = block.training and not isinstance(block.drop_path1, nn.Identity)
    scale = block.drop_path1(x.new_ones(len(x), 1, 1, 1)).flatten() if dropping else None
    affine = norm2.weight, norm2.bias, norm2.eps
    x, y = pieces.add_norm(x, y, attn.proj.bias, scale, *affine)
    y = pieces.mlp(y, mlp.fc1.weight, mlp.fc1.bias, mlp.fc2.weight, mlp.fc2.bias)
    return x + block.drop_path2(y)
