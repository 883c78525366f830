"""Compile kernels before the first image, for images of any size."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..ops import compiling
from ..ops.block import grids
from ..ops.launching import Launch, recording
from .fused import dtype_of
from .optimize import FusedBlock, FusedStem
from .pale_transformer import PaleBlock, PatchMerging

# Widths of maps with one row; a group has as many tokens as the width, or few. Attention kernels are specialised on
# the next power of two of the group size, and on its remainder modulo 32 and 64; each case occurs here.
WIDTHS = (16, 32, 64, 128, 150, 160, 276, 300, 320)


def warm_up(model: nn.Module, jobs: int | None = None) -> None:
    """Compile all kernels that a model can need, for images of every size.

    Without it each kernel is compiled (and cached on disk) when it is first needed: most at the first call, some at the
    first image whose maps are much smaller or larger than before. Useful for a server, or for training at many sizes.
    Does nothing if no kernels run, as on a CPU.

    Kernels that are not in Triton's cache are compiled in several threads. If that fails, they are compiled one after
    the other, with a warning.

    Call it under the conditions in which the model will run: on its device, in training or evaluation mode, under the
    same autocast, and under `no_grad` or `inference_mode` for inference. Weights, gradients and the state of random
    generators do not change.

    Args:
        model: a `PaleTransformer`, the result of `pale.optimize`, or any module that contains one.
        jobs: maximum number of threads that compile (default: the number of cores, at most 16).
    """
    if jobs is not None and jobs < 1:
        raise ValueError(f"jobs must be at least 1, got {jobs}; leave it out for as many as cores")
    parameter = next(model.parameters())
    like = parameter.new_empty(0)
    if grids.unsupported(like.to(dtype_of(like)), 16) is not None:
        return
    compile_ahead(model, jobs)
    _run_all(model, like)


def record(model: nn.Module) -> list[Launch]:
    """Return the launches of a warm-up, without running kernels; the conditions are those of `warm_up`."""
    like = next(model.parameters()).new_empty(0)
    with recording() as launches:
        _run_all(model, like)
    return list(launches)


def compile_ahead(model: nn.Module, jobs: int | None = None) -> None:
    """Compile the kernels of `warm_up` that are not in Triton's cache, in several threads, and run none.

    What fails here is left to the first launch, with a warning. Does nothing with one thread, which would gain nothing.
    """
    like = next(model.parameters()).new_empty(0)
    if grids.unsupported(like.to(dtype_of(like)), 16) is not None:
        return
    if not compiling.can_compile(like.device) or compiling.thread_count(2, jobs) == 1:
        return
    from triton.errors import TritonError

    try:
        with torch.cuda.device(like.device):
            compiling.compile_kernels(record(model), like.device, jobs)
    except (TritonError, RuntimeError, OSError) as error:
        reason = str(error).partition("\n")[0]
        warnings.warn(
            f"kernels could not be compiled in several threads ({type(error).__name__}: {reason}); they are compiled "
            "one after the other, which takes longer",
            stacklevel=3,
        )


def _run_all(model: nn.Module, like: Tensor) -> None:
    known = set()
    devices = [like.device] if like.is_cuda else []
    with torch.random.fork_rng(devices=devices):
        for module in model.modules():
            if (key := _key(module)) is not None and key not in known:
                known.add(key)
                for x in _inputs(module, like):
                    _run(module, x)


def _key(module: nn.Module) -> Any:
    """Return a value that determines the kernels of a module; None for modules without kernels."""
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
    """Yield inputs with few and many tokens, and with groups of all specialised sizes."""
    many = grids.FEW + 1
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
    if isinstance(module, PaleBlock):  # the norm before it returns this dtype
        x = x.to(dtype_of(x))
    trained = [p for p in module.parameters() if p.requires_grad]
    y = module(x.requires_grad_(torch.is_grad_enabled()))
    if y.requires_grad:
        torch.autograd.grad(y.sum(), [x, *trained], allow_unused=True)
