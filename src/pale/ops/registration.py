"""Register operators that run Triton kernels with PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from .launching import INTERPRETED

_library = torch.library.Library("pale", "FRAGMENT")
_device = "CPU" if INTERPRETED else "CUDA"


def define(
    schema: str, fake: Callable[..., Any]
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function as the operator of `schema`; `fake` returns empty results of the same shapes.

    `torch.library.custom_op` is not used: it adds about 15 us to every call.
    """
    name = schema.partition("(")[0]
    _library.define(schema)
    torch.library.register_fake(f"pale::{name}", fake, lib=_library)

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        _library.impl(name, function, _device)
        operator: Callable[..., Any] = getattr(torch.ops.pale, name).default
        return operator

    return register


def differentiate(
    name: str, backward: Callable[..., Any], save: Callable[[Any, tuple[Any, ...], Any], None]
) -> None:
    """Register the backward of an operator; `save` stores what it needs. Gradients of unused results are None."""

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.set_materialize_grads(False)
        save(ctx, inputs, output)

    torch.library.register_autograd(f"pale::{name}", backward, setup_context=setup, lib=_library)


def autograd_function(
    name: str,
    backward: Callable[..., Any],
    save: Callable[[Any, tuple[Any, ...], Any], None],
) -> Callable[..., Any]:
    """Return a function that calls an operator with many arguments; the arguments are those of `differentiate`.

    In eager mode it uses a node of its own: the one that PyTorch generates looks up the default value of each argument
    at every call, in a time that grows with the square of their number (170 us for 31). A second
    derivative raises an error.
    """
    operator = getattr(torch.ops.pale, name).default

    def forward(ctx: Any, *inputs: Any) -> Any:
        output = operator(*inputs)
        ctx.set_materialize_grads(False)
        save(ctx, inputs, output)
        return output

    once: Any = once_differentiable(backward)
    methods = {"forward": staticmethod(forward), "backward": staticmethod(once)}
    node: Any = type(f"pale_{name}", (torch.autograd.Function,), methods)

    def call(*inputs: Any) -> Any:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return operator(*inputs)
        return node.apply(*inputs)

    return call
