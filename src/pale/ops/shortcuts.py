"""Checks before a shortcut around a module, or an operator that other tools do not know, is used.

Libraries change a model from outside: hooks, a `forward` of an instance, other classes, parametrizations, tensor
subclasses, tracers, functional transforms. Reading the weights of a layer instead of calling it is correct only if the
call would do nothing else. The model is therefore built of PyTorch's own layers, which these libraries know, and the
module that holds a layer checks it at every call, because all of this may change between two calls.

`is_plain` checks one layer. `signature` describes all modules of a block in one pass, as a value on which the result of
many such checks depends; equal values have equal results, so these are computed once per value.
"""

from __future__ import annotations

from typing import Any, TypeGuard, TypeVar

import torch
from torch import Tensor, nn

from ..compat import (
    compiled_call_name,
    has_global_hooks,
    has_hooks,
    is_func_transform,
    is_tracing,
    module_call,
    module_state,
    parameters_of,
)

Kind = TypeVar("Kind", bound=type[nn.Module])
Layer = TypeVar("Layer", bound=nn.Module)

_CALL, _COMPILED_CALL = module_call(), compiled_call_name()
_TENSORS = frozenset([Tensor, nn.Parameter, type(None)])
# The forward pass of each class; a class whose `forward` was replaced computes something else.
_forwards: dict[type[nn.Module], Any] = {}
# The attributes of an instance on which decisions depend.
_settings: dict[type[nn.Module], tuple[str, ...]] = {}


def plain_kind(kind: Kind, *settings: str) -> Kind:
    """Register a class of modules, as a decorator or with the attributes on which decisions depend."""
    _forwards[kind], _settings[kind] = kind.forward, settings
    return kind


plain_kind(nn.Linear, "out_features")
plain_kind(
    nn.Conv2d,
    *("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups"),
    "padding_mode",
)
plain_kind(nn.LayerNorm, "normalized_shape")
plain_kind(nn.BatchNorm2d)
plain_kind(nn.GELU, "approximate")
plain_kind(nn.Identity)


def is_plain(module: nn.Module, kind: type[Layer]) -> TypeGuard[Layer]:
    """Return whether calling `module` runs the forward pass of exactly `kind`, on ordinary tensors, and nothing else.

    `is_watched` checks what concerns all modules; call it once.
    """
    if type(module) is not kind or kind.forward is not _forwards[kind]:
        return False
    own = module.__dict__
    if "forward" in own or "weight" in own or "bias" in own or has_hooks(module):
        return False
    parameters = parameters_of(module).values()
    if torch.compiler.is_compiling():  # in a form that the compiler can trace
        return all(type(p) in (Tensor, nn.Parameter, type(None)) for p in parameters)
    return own.get(_COMPILED_CALL) is None and _TENSORS.issuperset(map(type, parameters))


def is_plain_depthwise(module: nn.Module) -> TypeGuard[nn.Conv2d]:
    """Return whether calling `module` is a 3x3 depthwise convolution that keeps the size of a map, and nothing else."""
    return (
        is_plain(module, nn.Conv2d)
        and module.groups == module.in_channels == module.out_channels
        and module.kernel_size == (3, 3)
        and module.stride == module.padding == module.dilation == (1, 1)
        and module.padding_mode == "zeros"
    )


def signature(root: nn.Module, device: torch.device) -> tuple[Any, ...] | None:
    """Return a value that determines the result of all `is_plain` checks inside `root`, or None if it has none.

    The value holds, for every module: class, names of submodules, registered attributes and the types of the
    parameters. There is none if a module inside `root` has hooks, a replaced `forward`, a tensor as an ordinary
    attribute, a compiled call or an unregistered class, or if a parameter is on another device; then each layer has to
    be checked. Hooks of `root` itself are run by its own call.
    """
    if any([kind.forward is not forward for kind, forward in _forwards.items()]):  # noqa: C419
        return None
    try:
        parameters, children, *_ = module_state(root.__dict__)
        return None if parameters else _describe(type(root), children, device)
    # An attribute or a child was deleted, or a class is not registered.
    except (AttributeError, KeyError):
        return None


def _describe(
    root: type[nn.Module], children: dict[str, nn.Module], device: torch.device
) -> tuple[Any, ...] | None:
    modules: list[nn.Module] = [*children.values()]
    value: list[Any] = [root, *children]
    for module in modules:  # grows in the loop
        own, kind = module.__dict__, type(module)
        parameters, children, hooks, pre_hooks, back_hooks, back_pre_hooks = module_state(own)
        if hooks or pre_hooks or back_hooks or back_pre_hooks:
            return None
        if "forward" in own or "weight" in own or "bias" in own or _COMPILED_CALL in own:
            return None
        value.append(kind)
        for name in _settings[kind]:
            value.append(own[name])
        if children:
            value += children
            modules += children.values()
        for parameter in parameters.values():
            value.append(type(parameter))
            if parameter is not None and parameter.device != device:
                return None
    return tuple(value)


def is_watched() -> bool:
    """Return whether calls of all modules are observed: global hooks, a replaced `nn.Module.__call__`."""
    if has_global_hooks():
        return True
    return not torch.compiler.is_compiling() and nn.Module.__call__ is not _CALL


def is_transformed(x: Tensor) -> bool:
    """Return whether `x` is a tensor subclass, or a tracer or a transform of `torch.func` (vmap, grad) is active.

    `torch.compile` and `torch.export` do not count: the former supports the operators of this package, the latter is
    detected by `sizes.exporting`.
    """
    if type(x) is not Tensor and type(x) is not nn.Parameter:
        return True
    if torch.compiler.is_compiling():
        return False
    return is_tracing() or is_func_transform()
