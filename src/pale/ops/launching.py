"""Launch Triton kernels. Triton is imported at the first launch."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from threading import get_ident
from typing import Any

import torch
from torch import Tensor

AVAILABLE = importlib.util.find_spec("triton") is not None
# Triton decides this when the kernels are defined, so it is read once.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DTYPES = (torch.float16, torch.bfloat16, torch.float32)

# Kernels that call `begin` first: GPUs that support it set them up while the previous kernel still runs.
WAITING = frozenset(
    [
        *("stem", "conv_norm", "conv_three", "linear", "linear_norm", "whole_mlp", "add_norm"),
        *("attention_forward", "attention_forward_group"),
    ]
)

# Kernel launches by name, for tests: a back-end that is tested must have run.
launches: Counter[str] = Counter()
_compiled: dict[Any, tuple[Any, tuple[Any, ...]]] = {}


@dataclass(frozen=True)
class Target:
    """What kernels are compiled for.

    Attributes:
        capability: compute capability, 90 for Hopper.
        dependent: whether a kernel can be set up before the previous one has ended.
    """

    capability: int
    dependent: bool


@dataclass(frozen=True)
class Launch:
    """Everything about a launch that determines the compilation of its kernel.

    Attributes:
        module: where the kernel is defined.
        name: name of the kernel.
        kinds: dtype of each tensor, with " unaligned" if its address is no multiple of 16, and i32, i64 or fp32.
        options: num_warps, num_stages, ...
        constants: compile-time arguments.
    """

    module: str
    name: str
    kinds: tuple[str, ...]
    options: tuple[tuple[str, Any], ...]
    constants: tuple[tuple[str, Any], ...]

    def plain(self) -> list[Any]:
        """Return JSON values."""
        return [self.module, self.name, self.kinds, self.options, self.constants]

    @classmethod
    def from_plain(cls, values: list[Any]) -> Launch:
        """Return the launch of the JSON values."""
        module, name, kinds, *pairs = values
        options, constants = (tuple((key, value) for key, value in each) for each in pairs)
        return cls(module, name, tuple(kinds), options, constants)


# Launches recorded in place of being run, by thread, and what is compiled for in place of the GPUs of this machine.
_recorded: dict[int, dict[Launch, None]] = {}
_target: Target | None = None


def launch(
    module: str,
    name: str,
    grid: tuple[int, ...],
    *args: Any,
    options: dict[str, Any],
    **constants: Any,
) -> None:
    """Run a kernel.

    The kernels specialise only on dtypes and 16-byte alignment, so a compiled kernel is found here by a short key;
    Triton's own launch inspects every argument.

    Args:
        module: where the kernel is defined.
        name: name of the kernel.
        grid: number of programs, in up to three dimensions.
        args: tensors and numbers, in the kernel's order.
        options: num_warps, num_stages, ...
        constants: compile-time arguments, which come last in every kernel here.
    """
    if 0 in grid:
        return
    if _recorded and (found := _recorded.get(get_ident())) is not None:
        found[_describe(module, name, args, options, constants)] = None
        return
    launches[name] += 1
    device = args[0].device
    if INTERPRETED:
        getattr(importlib.import_module(module), name)[grid](*args, **options, **constants)
        return
    if device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            _run(module, name, grid, args, options, constants)
    else:
        _run(module, name, grid, args, options, constants)


def _run(
    module: str,
    name: str,
    grid: tuple[int, ...],
    args: tuple[Any, ...],
    options: dict[str, Any],
    constants: dict[str, Any],
) -> None:
    # Triton distinguishes numbers of up to 31 bits from longer ones.
    kinds = [
        (x.dtype, x.data_ptr() % 16)
        if isinstance(x, Tensor)
        else isinstance(x, int) and x.bit_length() > 31
        for x in args
    ]
    device = args[0].device.index
    key = module, name, device, *kinds, *options.items(), *constants.items()
    if (found := _compiled.get(key)) is None:
        kernel = getattr(importlib.import_module(module), name)
        compiled = kernel[grid](*args, **compile_options(name, options), **constants)
        order = tuple(constants[n] for n in kernel.arg_names if n in constants)
        _compiled[key] = compiled, order
        return
    compiled, order = found
    compiled[(*grid, 1, 1)[:3]](*args, *order)


def compile_options(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a kernel that are passed to Triton."""
    # Triton warns that its default will change.
    options = options | {"enable_fp_fusion": True}
    return options | {"launch_pdl": True} if name in WAITING and dependent_launch() else options


def _describe(
    module: str,
    name: str,
    args: tuple[Any, ...],
    options: dict[str, Any],
    constants: dict[str, Any],
) -> Launch:
    kinds = tuple(map(_kind, args))
    return Launch(module, name, kinds, tuple(options.items()), tuple(constants.items()))


def _kind(x: Tensor | float) -> str:
    if isinstance(x, Tensor):
        dtype = str(x.dtype).removeprefix("torch.")
        return f"{dtype} unaligned" if x.data_ptr() % 16 else dtype
    if isinstance(x, float):
        return "fp32"
    return "i32" if x.bit_length() <= 31 else "i64"


@contextmanager
def recording() -> Iterator[dict[Launch, None]]:
    """Record launches of this thread in place of running them: results keep whatever their memory held.

    The backward pass runs in this thread too.
    """
    found: dict[Launch, None] = {}
    before = _recorded.get(get_ident())
    _recorded[get_ident()] = found
    try:
        with torch.autograd.set_multithreading_enabled(False):
            yield found
    finally:
        del _recorded[get_ident()]
        if before is not None:
            _recorded[get_ident()] = before


def compile_for(target: Target) -> None:
    """Choose configurations for `target` in place of the GPUs of this machine, before the first launch."""
    global _target
    _target = target


@cache
def dependent_launch() -> bool:
    """Return whether all GPUs can set up a kernel before the previous one has ended (Hopper and later)."""
    if _target is not None:
        return _target.dependent
    if INTERPRETED or torch.version.hip is not None or not torch.cuda.is_available():
        return False
    devices = range(torch.cuda.device_count())
    return all(torch.cuda.get_device_capability(device) >= (9, 0) for device in devices)


@cache
def capability(device: torch.device) -> int:
    """Return the compute capability, 90 for Hopper; the interpreter uses the configurations of Hopper."""
    if _target is not None:
        return _target.capability
    if device.type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor
