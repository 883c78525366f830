"""The blocks of a Pale Transformer in the form in which ONNX runtimes compute them fastest.

`rewrite` returns a copy of a model in which each block computes the same function, up to rounding, with fewer and
larger operations:

- tokens are the rows of a matrix, (b * h * w, c), so that a linear layer is one Gemm with its bias;
- only the first layer of the MLP is MatMul and Add, on (1, b * h * w, c): onnxruntime adds this bias as part of GELU,
  but for a matrix it would make a Gemm, which writes the bias to the whole result before it multiplies;
- the pointwise layers of phi are 1x1 convolutions: onnxruntime computes them in the layout of the depthwise
  convolutions before them, with blocks of channels. For quantization, which is of products of matrices, they are Gemm;
- attention is one operator (`onnx_attention`), which also spares the tracer hundreds of nodes for the sizes of groups;
- `x + CPE(x)` is one convolution: the residual connection is added to the middle of its kernels;
- the scale d^-0.5 is part of phi_Q;
- phi_K has no bias: it adds the same number to all scores of a query. That of phi_V is part of the projection, because
  the attention weights of a query sum to 1.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from timm.layers import DropPath
from torch import Tensor, nn

from ..model.fused import is_plain_norm
from ..model.layers import Mlp, SeparableConv, is_exact_gelu
from ..model.pale_transformer import PaleBlock, PSAttention
from ..ops.shortcuts import is_plain, is_plain_depthwise, is_watched
from .onnx_attention import attention, token_map, tokens

L = TypeVar("L", nn.Linear, nn.Conv2d)


class OnnxBlock(nn.Module):
    """A block with the weights of `block`, which must pass `can_rewrite`; for `torch.export` only."""

    def __init__(self, block: PaleBlock, quantize: bool) -> None:
        super().__init__()
        attn: Any = block.attn
        self.heads, self.region = attn.heads, attn.region
        self.cpe = None if block.cpe is None else _with_identity(block.cpe)
        self.norm1, self.norm2 = block.norm1, block.norm2
        fc1, self.act, self.fc2 = block.mlp.fc1, block.mlp.act, block.mlp.fc2
        self.weight1 = nn.Parameter(fc1.weight.detach().t().contiguous(), requires_grad=False)
        self.bias1 = fc1.bias
        phis = attn.phi_q, attn.phi_k, attn.phi_v
        q, k, v = (phi.pointwise for phi in phis)
        scale = (q.out_features // self.heads) ** -0.5
        layers = (q.weight * scale, q.bias * scale), (k.weight, None), (v.weight, None)
        make = _linear if quantize else _pointwise
        self.phis = nn.ModuleList(
            OnnxPhi(phi.depthwise, make(*layer)) for phi, layer in zip(phis, layers, strict=True)
        )
        self.proj = _linear(attn.proj.weight, attn.proj.bias + attn.proj.weight @ v.bias)

    def forward(self, x: Tensor) -> Tensor:
        """(b, h, w, c) -> (b, h, w, c)."""
        like = x
        if self.cpe is not None:
            x = _channels_last(self.cpe(_channels_first(x)))
        x = tokens(x)
        y = _channels_first(token_map(self.norm1(x), like))
        q, k, v = (phi(y) for phi in self.phis)
        x = x + self.proj(attention(q, k, v, like, self.heads, self.region))
        y = torch.matmul(self.norm2(x).unsqueeze(0), self.weight1) + self.bias1
        x = x + self.fc2(self.act(y).squeeze(0))
        return token_map(x, like)


class OnnxPhi(nn.Module):
    """A depthwise convolution and a pointwise layer, which is linear or a convolution."""

    def __init__(self, depthwise: nn.Conv2d, pointwise: nn.Linear | nn.Conv2d) -> None:
        super().__init__()
        self.depthwise, self.pointwise = depthwise, pointwise

    def forward(self, y: Tensor) -> Tensor:
        """(b, c, h, w) -> (b * h * w, c)."""
        y = self.depthwise(y)
        if isinstance(self.pointwise, nn.Conv2d):
            return tokens(_channels_last(self.pointwise(y)))
        return self.pointwise(tokens(_channels_last(y)))


def rewrite(model: nn.Module, quantize: bool = False) -> nn.Module | None:
    """Return a copy of `model` with other blocks, or None if it has no block or one that cannot be rewritten.

    Args:
        model: the model.
        quantize: whether its linear layers will be quantized; they stay linear then.
    """
    blocks = [module for module in model.modules() if isinstance(module, PaleBlock)]
    if not blocks or not all(map(can_rewrite, blocks)):
        return None
    model = copy.deepcopy(model)
    for parent, name, block in list(_blocks(model)):
        setattr(parent, name, OnnxBlock(block, quantize))
    return model


def can_rewrite(block: PaleBlock) -> bool:
    """Return whether calling `block` in evaluation mode does what `OnnxBlock` assumes, and nothing else."""
    attn, mlp = block.attn, block.mlp
    drop_paths = block.drop_path1, block.drop_path2
    return (
        is_plain(block, PaleBlock)
        and not block.training
        and not is_watched()
        and (block.cpe is None or is_plain_depthwise(block.cpe))
        and is_plain_norm(block.norm1)
        and is_plain_norm(block.norm2)
        and _is_plain_attention(attn)
        and is_plain(mlp, Mlp)
        and is_exact_gelu(mlp.act)
        and all(map(_is_plain_linear, (mlp.fc1, mlp.fc2)))
        and {nn.Identity, DropPath}.issuperset(map(type, drop_paths))
        and {torch.float32}.issuperset(p.dtype for p in block.parameters())
    )


def _is_plain_attention(attn: nn.Module) -> bool:
    return (
        is_plain(attn, PSAttention)
        and all(map(_is_plain_phi, (attn.phi_q, attn.phi_k, attn.phi_v)))
        and _is_plain_linear(attn.proj)
    )


def _is_plain_phi(phi: nn.Module) -> bool:
    return (
        is_plain(phi, SeparableConv)
        and is_plain_depthwise(phi.depthwise)
        and _is_plain_linear(phi.pointwise)
    )


def _is_plain_linear(layer: nn.Module) -> bool:
    return is_plain(layer, nn.Linear) and layer.bias is not None


def _blocks(model: nn.Module) -> Iterator[tuple[nn.Module, str, PaleBlock]]:
    for parent in model.modules():
        for name, child in parent.named_children():
            if isinstance(child, PaleBlock):
                yield parent, name, child


def _with_identity(conv: nn.Conv2d) -> nn.Conv2d:
    conv = copy.deepcopy(conv)
    with torch.no_grad():
        conv.weight[:, 0, 1, 1] += 1
    return conv


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    c_out, c_in = weight.shape
    layer = nn.Linear(c_in, c_out, bias=bias is not None, device="meta")
    return _with_weights(layer, weight, bias)


def _pointwise(weight: Tensor, bias: Tensor | None) -> nn.Conv2d:
    c_out, c_in = weight.shape
    layer = nn.Conv2d(c_in, c_out, 1, bias=bias is not None, device="meta")
    return _with_weights(layer, weight[:, :, None, None], bias)


def _with_weights(layer: L, weight: Tensor, bias: Tensor | None) -> L:
    layer.weight = nn.Parameter(weight.detach(), requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias.detach(), requires_grad=False)
    return layer


def _channels_first(x: Tensor) -> Tensor:
    return x.permute(0, 3, 1, 2)


def _channels_last(x: Tensor) -> Tensor:
    return x.permute(0, 2, 3, 1)
