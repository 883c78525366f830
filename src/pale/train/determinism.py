"""Global settings of PyTorch during a run, as context managers that restore them.

With deterministic algorithms two runs on one machine are bit-equal, also on a GPU. Without them the last bits differ
from run to run: the order of the GPU's threads decides the order of sums in the gradients of RoIAlign, adaptive pooling
and indexing, and cuDNN selects algorithms by timing them. The Triton kernels of this package use no atomic operation
and no autotuning, so they need no other back-end here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch

from ..errors import SettingsError

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
FIXED = (":4096:8", ":16:8")  # cuBLAS documents that results are reproducible with these


def prepare_cublas() -> None:
    """Request a fixed workspace from cuBLAS; call this before CUDA is first used, when cuBLAS reads the setting."""
    os.environ.setdefault(WORKSPACE, FIXED[0])


@contextmanager
def deterministic(enabled: bool, device: torch.device) -> Iterator[None]:
    """Use only deterministic algorithms; an operation without one raises.

    Args:
        enabled: if false, nothing changes.
        device: where the run computes.
    """
    if not enabled:
        yield
        return
    if device.type == "cuda":
        _require_fixed_workspace()
    cudnn, memory = torch.backends.cudnn, cast("Any", torch.utils.deterministic)
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    flags = cudnn.deterministic, cudnn.benchmark
    fill = memory.fill_uninitialized_memory
    try:
        torch.use_deterministic_algorithms(True)
        cudnn.deterministic, cudnn.benchmark = True, False
        # Filling would write every new tensor twice; no code here reads uninitialised memory.
        memory.fill_uninitialized_memory = False
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        cudnn.deterministic, cudnn.benchmark = flags
        memory.fill_uninitialized_memory = fill


def _require_fixed_workspace() -> None:
    if WORKSPACE not in os.environ and not torch.cuda.is_initialized():
        prepare_cublas()
    if (found := os.environ.get(WORKSPACE)) not in FIXED:
        raise SettingsError(
            f"deterministic=true needs {WORKSPACE}={FIXED[0]} in the environment before CUDA is first used, got "
            f"{found}; set it before Python starts"
        )


@contextmanager
def without_cudnn_attention(device: torch.device) -> Iterator[None]:
    """Disable cuDNN attention: with torch 2.11 a compiled model that used it did not learn."""
    if device.type != "cuda":
        yield
        return
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


@contextmanager
def keep_random_state(device: torch.device) -> Iterator[None]:
    """Restore PyTorch's random generators at the end: each step seeds them."""
    devices = [torch.cuda.current_device()] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        yield
