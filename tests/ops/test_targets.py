"""The kernels of a Pale-T compile for GPUs that are not present, within their shared memory.

A training step and a step of inference run with launches recorded in place of done; what they would have launched is
compiled for each target. The interpreter's flag lets operators take CPU tensors but forbids compiling, so two processes
do it.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

# Shared memory of a program in bytes, and dtypes, by compute capability.
TARGETS = {75: (65536, ["fp16"]), 80: (166912, ["bf16"]), 89: (101376, ["bf16", "fp32"])}
# Convolutions, norms and sums use almost no shared memory.
NAMES = ("stem", "linear", "linear_norm", "whole_mlp", "attention_")


def collect(capability: int, dtype_name: str) -> list[tuple]:
    """Return the launches of a Pale-T, for each kernel the one with the largest blocks."""
    import torch

    import pale
    from pale.ops import launching
    from pale.ops.block import grids
    from pale.ops.pale_attention import triton_op as attention

    found = {}
    kinds = {torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32"}

    def record(module, name, grid, *args, options, **constants):
        if name.startswith(NAMES):
            given = tuple(
                kinds[x.dtype] if isinstance(x, torch.Tensor) else type(x).__name__ for x in args
            )
            size = math.prod(n for key, n in constants.items() if key.startswith("BLOCK"))
            call = module, name, given, tuple(constants.items()), tuple(options.items())
            found[name] = max(found.get(name, (0, ())), (size, call))

    grids.launch = attention.launch = record
    launching.compile_for(launching.Target(capability, False))
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}[dtype_name]
    model = pale.create_model("pale_tiny").to(dtype)
    x = torch.randn(1, 3, 224, 224).to(dtype)
    model(x).sum().backward()
    quick = pale.optimize(model, dtype=dtype)
    quick(x)
    grids.FEW = 0  # as for a large batch
    quick(x)
    return [call for _, call in found.values()]


def compile_all(capability: int, dtype_name: str) -> None:
    """Compile the launches that `collect` returns; print shared memory and name of each."""
    collected = subprocess.run(
        [sys.executable, __file__, str(capability), dtype_name, "collect"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        stdout=subprocess.PIPE,
        check=True,
    )
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    for module, name, given, constants, options in json.loads(collected.stdout):
        kernel = getattr(importlib.import_module(module), name)
        signature = dict(zip(kernel.arg_names, given, strict=False))
        names = {"int": "i32", "float": "fp32"}
        signature = {arg: names.get(kind, kind) for arg, kind in signature.items()}
        signature |= {arg: "constexpr" for arg, _ in constants}
        signature = {arg: signature[arg] for arg in kernel.arg_names}
        aligned = {
            (i,): [["tt.divisibility", 16]]
            for i, arg in enumerate(kernel.arg_names)
            if signature[arg].startswith("*")
        }
        source = ASTSource(kernel, signature, dict(constants), aligned)
        target = GPUTarget("cuda", capability, 32)
        compiled = triton.compile(source, target=target, options=dict(options))
        sys.stdout.write(f"{compiled.metadata.shared} {name} {constants} {options}\n")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize(
    ("capability", "dtype"),
    [(cc, dtype) for cc, (_, dtypes) in TARGETS.items() for dtype in dtypes],
)
def test_kernels_compile_within_shared_memory(capability, dtype):
    run = subprocess.run(
        [sys.executable, __file__, str(capability), dtype],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    lines = run.stdout.splitlines()
    assert {line.split()[1] for line in lines} >= {"stem", "linear", "linear_norm", "whole_mlp"}
    assert len(lines) >= 6
    limit = TARGETS[capability][0]
    assert not [line for line in lines if int(line.split()[0]) > limit]


if __name__ == "__main__":
    if sys.argv[3:]:
        sys.stdout.write(json.dumps(collect(int(sys.argv[1]), sys.argv[2])))
    else:
        compile_all(int(sys.argv[1]), sys.argv[2])
