"""Attention as one operator that a compiler does not trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...compat import include_autograd
from .region import Region

Attend = Callable[[Tensor, Tensor, Tensor, Region], Tensor]

_library = torch.library.Library("pale", "FRAGMENT")
_REGION = "int s_r, int s_c, str scope, str grouping"


def operator(name: str, attend: Attend) -> Attend:
    """Register `attend` as pale::<name>_attention and return a function that calls it.

    The backward runs `attend` again and differentiates it, so that every device keeps PyTorch's own backward kernels.
    """
    forward, backward = f"{name}_attention", f"{name}_attention_backward"

    def compute(q: Tensor, k: Tensor, v: Tensor, s_r: int, s_c: int, *words: Any) -> Tensor:
        return attend(q, k, v, Region((s_r, s_c), *words)).contiguous()

    def differentiate(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, s_r: int, s_c: int, *words: Any
    ) -> tuple[Tensor, ...]:
        # Under a dispatch mode autograd is off; this turns it on again.
        with include_autograd(), torch.enable_grad():
            q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
            out = attend(q, k, v, Region((s_r, s_c), *words))
            grads = torch.autograd.grad(out, (q, k, v), grad)
        return tuple(x.contiguous() for x in grads)

    # Without `custom_op`, whose kernels run with autograd off.
    _library.define(f"{forward}(Tensor q, Tensor k, Tensor v, {_REGION}) -> Tensor")
    _library.impl(forward, compute, "CompositeExplicitAutograd")
    _library.define(
        f"{backward}(Tensor grad, Tensor q, Tensor k, Tensor v, {_REGION}) -> (Tensor, Tensor, Tensor)"
    )
    _library.impl(backward, differentiate, "CompositeExplicitAutograd")

    @torch.library.register_fake(f"pale::{forward}", lib=_library)
    def _(q: Tensor, *_: Any) -> Tensor:
        return q.new_empty(q.shape)

    @torch.library.register_fake(f"pale::{backward}", lib=_library)
    def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, ...]:
        return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)

    def save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:3])
        ctx.region = inputs[3:]

    def gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        run = getattr(torch.ops.pale, backward)
        return *run(grad, *ctx.saved_tensors, *ctx.region), None, None, None, None

    torch.library.register_autograd(f"pale::{forward}", gradients, setup_context=save, lib=_library)

    def call(q: Tensor, k: Tensor, v: Tensor, region: Region) -> Tensor:
        out: Tensor = getattr(torch.ops.pale, forward)(
            q, k, v, *region.pale_size, region.scope, region.grouping
        )
        return out

    return call
