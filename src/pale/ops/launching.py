"""Launch Triton kernels. Triton is imported at the first launch."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections import Counter
from functools import cache
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
        # Triton warns that its default will change.
        options = options | {"enable_fp_fusion": True}
        if name in WAITING and dependent_launch():
            options = options | {"launch_pdl": True}
        compiled = kernel[grid](*args, **options, **constants)
        order = tuple(constants[n] for n in kernel.arg_names if n in constants)
        _compiled[key] = compiled, order
        return
    compiled, order = found
    compiled[(*grid, 1, 1)[:3]](*args, *order)


@cache
def dependent_launch() -> bool:
    """Return whether all GPUs can set up a kernel before the previous one has ended (Hopper and later)."""
    if INTERPRETED or torch.version.hip is not None or not torch.cuda.is_available():
        return False
    devices = range(torch.cuda.device_count())
    return all(torch.cuda.get_device_capability(device) >= (9, 0) for device in devices)


@cache
def capability(device: torch.device) -> int:
    """Return the compute capability, 90 for Hopper; the interpreter uses the configurations of Hopper."""
    if device.type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor
