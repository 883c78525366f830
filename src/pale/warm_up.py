"""Kernels compiled before the first picture comes, for pictures of any size."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .fused import dtype_of
from .ops.block import triton_op as pieces
from .optimize import FusedBlock, FusedStem
from .pale_transformer import PaleBlock, PatchMerging

# A map of one row has groups of as many tokens as columns, and of few. Kernels of the attention differ by the power of
# two above a group's size, and by what is left of it after blocks of 32 and of 64: of each kind there is one here.
WIDTHS = (16, 32, 64, 128, 150, 160, 276, 300, 320)


def warm_up(model: nn.Module) -> None:
    """Compile all kernels that a model can need, whatever the sizes of its images.

    Without this each kernel is compiled (and kept on disk) when it is first needed, most of them at the first call, and
    some when a size comes whose maps are much smaller or larger than those before. After this none is: for a server, or
    for training at many sizes. Where no kernels run, as on a CPU, it does nothing.

    Call it as the model will be called: on its device, in training or evaluation mode, under the same autocast, and
    under `no_grad` or `inference_mode` for inference. Weights, gradients and random numbers stay as they are.

    Args:
        model: a `PaleTransformer`, what `pale.optimize` makes of one, or any module with one inside.
    """
    parameter = next(model.parameters())
    like = parameter.new_empty(0)
    if pieces.unsupported(like.to(dtype_of(like)), 16) is not None:
        return
    known = set()
    devices = [like.device] if like.is_cuda else []
    with torch.random.fork_rng(devices=devices):
        for module in model.modules():
            if (key := _key(module)) is not None and key not in known:
                known.add(key)
                for x in _inputs(module, like):
                    _run(module, x)


def _key(module: nn.Module) -> Any:
    """What decides the kernels of a module; None for one that is not ours."""
    if isinstance(module, PaleBlock):
        cpe, drops = module.cpe is not None, not isinstance(module.drop_path1, nn.Identity)
        return (
            PaleBlock,
            module.attn.region,
            _channels(module),
            module.mlp.fc1.out_features,
            cpe,
            drops,
        )
    if isinstance(module, FusedBlock):
        fc1 = module.fc1.out_features
        return FusedBlock, module.attn.region, _channels(module), fc1, module.has_cpe
    return id(module) if isinstance(module, PatchMerging | FusedStem) else None


def _channels(block: PaleBlock | FusedBlock) -> int:
    return block.norm1.normalized_shape[0]


def _inputs(module: nn.Module, like: Tensor) -> Iterator[Tensor]:
    """Few tokens and many, and groups of all kinds."""
    many = pieces.FEW + 1
    if isinstance(module, PatchMerging | FusedStem):
        channels = module.channels if isinstance(module, FusedStem) else module.conv.in_channels
        stride = module.stride if isinstance(module, FusedStem) else module.conv.stride[0]
        for columns in (1, many):
            yield like.new_zeros(1, channels, 1, stride * columns)
        return
    assert isinstance(module, PaleBlock | FusedBlock)
    channels = _channels(module)
    for width in WIDTHS:
        yield like.new_zeros(1, 1, width, channels)
    yield like.new_zeros(-(-many // WIDTHS[-1]), 1, WIDTHS[-1], channels)


def _run(module: nn.Module, x: Tensor) -> None:
    if isinstance(module, PaleBlock):  # a map comes from a norm before it
        x = x.to(dtype_of(x))
    trained = [p for p in module.parameters() if p.requires_grad]
    y = module(x.requires_grad_(torch.is_grad_enabled()))
    if y.requires_grad:
        torch.autograd.grad(y.sum(), [x, *trained], allow_unused=True)
