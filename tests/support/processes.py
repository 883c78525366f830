"""Separate processes: commands in two processes by torchrun, and tests in Triton's interpreter."""

import importlib
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from pale.ops.launching import AVAILABLE, INTERPRETED

DEVICE = "cpu" if INTERPRETED else "cuda"  # where kernels run
needs_triton = pytest.mark.skipif(not AVAILABLE, reason="Triton is not installed")

KINDS = {
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
}


def torchrun(
    *arguments: object, script: tuple[str, ...] = ("-m", "pale"), restarts: int = 0
) -> str:
    """Return the output of a command."""
    done = _torchrun(arguments, script, restarts)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout


def torchrun_failing(*arguments: object) -> str:
    """Return the output of a command that must fail."""
    done = _torchrun(arguments, ("-m", "pale"), 0)
    assert done.returncode != 0, done.stdout[-4000:]
    return done.stderr


def _torchrun(
    arguments: tuple[object, ...], script: tuple[str, ...], restarts: int
) -> subprocess.CompletedProcess[str]:
    """Give the processes a folder for temporary files that is deleted afterwards."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [f"--max-restarts={restarts}"] * bool(restarts)
    with tempfile.TemporaryDirectory(prefix="launch") as folder:
        own = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TMPDIR": folder}
        return subprocess.run(
            [*command, *script, *map(str, arguments)],
            capture_output=True,
            text=True,
            check=False,
            env=os.environ | own,
            timeout=180,
        )


def kernels(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test of kernels: on a GPU, or in the second process, which is Triton's interpreter on the CPU."""
    return test if INTERPRETED else pytest.mark.gpu(test)


def in_the_interpreter(module: str) -> None:
    """Run the tests of a module (its `__file__`) again in Triton's interpreter, where kernels accept CPU tensors."""
    env = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    env.pop("PYTEST_XDIST_WORKER", None)
    # Its numpy warns of exp2(-inf), of numbers that run over and the like, which the kernels mean.
    options = ["-q", "-m", "not gpu", "-p", "no:cacheprovider", "-p", "no:xdist"]
    options += ["-W", "ignore::RuntimeWarning"]
    # That of Triton 3.6 reads scalars in a way that NumPy 1.26 deprecates.
    options += ["-W", "ignore:Conversion of an array with ndim:DeprecationWarning"]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *options, module],
        cwd=Path(__file__).parents[2],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert " passed" in run.stdout
    assert "no CUDA device" not in run.stdout  # what needs a GPU is deselected, not skipped


def compiling(capability: int, compiled: list[str]) -> Callable[..., None]:
    """Replace `launch`: compile the kernel for an NVIDIA GPU, which need not exist, and record its name."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    def build(module, name, grid, *args, options, **constants):
        kernel = getattr(importlib.import_module(module), name)
        kinds = {int: "i32", float: "fp32"}
        given = [kinds.get(type(x)) or KINDS[x.dtype] for x in args] + ["constexpr"] * len(
            constants
        )
        source = ASTSource(kernel, dict(zip(kernel.arg_names, given, strict=True)), constants)
        options = options | {"enable_fp_fusion": True}
        triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        compiled.append(name)

    return build


@contextmanager
def full_disk(room: int) -> Iterator[None]:
    """Limit files of this process to `room` bytes; writing more fails as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def heed_ctrl_c() -> None:
    """Restore Ctrl-C in a new process: one started by a background job would ignore it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
