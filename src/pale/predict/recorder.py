"""Process that writes the kernel launches of a model to a file: `python -m pale.predict.recorder`, see `kernels`.

Run with TRITON_INTERPRET=1, on a CPU. Nothing is launched.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
from timm.layers import DropPath
from torch import nn

from ..errors import PaleError, SettingsError
from ..model.optimize import optimize
from ..model.pale_transformer import PaleBlock
from ..model.warm_up import record
from ..ops.launching import Launch, Target, compile_for
from .bundle import load

# CPUs compute float16 slowly. Operators treat both 16-bit dtypes in the same way: bfloat16 is recorded and renamed.
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.bfloat16, "fp32": torch.float32}


def main() -> None:
    """Write the launches, or the error of the user, as JSON."""
    source, capability, dtypes, training = json.loads(sys.argv[1])
    compile_for(Target(capability, False))
    try:
        model = load(source).model
        found = [
            as_half(launch) if name == "fp16" else launch
            for name in dtypes
            for launch in record_model(model, source, DTYPES[name], training)
        ]
    except PaleError as error:
        answer: dict[str, object] = {"error": str(error)}
    else:
        answer = {"launches": [launch.plain() for launch in found]}
    Path(sys.argv[2]).write_text(json.dumps(answer))


def as_half(launch: Launch) -> Launch:
    """Return the launch with float16 in place of bfloat16."""
    return replace(launch, kinds=tuple(x.replace("bfloat16", "float16") for x in launch.kinds))


def record_model(model: nn.Module, source: str, dtype: torch.dtype, training: bool) -> list[Launch]:
    """Return the launches of a model in inference, optimized or not, and in training, with and without drop path."""
    blocks = [module for module in model.modules() if isinstance(module, PaleBlock)]
    if not blocks:
        raise SettingsError(
            f"{source} has no kernels to compile: it contains no Pale Transformer; name a model such as pale_tiny, or "
            "the run of one"
        )
    drop_paths = [(block.drop_path1, block.drop_path2) for block in blocks]
    found: dict[Launch, None] = {}
    with torch.no_grad():
        found |= dict.fromkeys(record(optimize(model, dtype)))
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        with torch.no_grad():
            found |= dict.fromkeys(record(model.eval()))
        if training:
            for drop_path in (nn.Identity(), DropPath(0.1)):
                for block in blocks:
                    block.drop_path1 = block.drop_path2 = drop_path
                found |= dict.fromkeys(record(model.train()))
    for block, (first, second) in zip(blocks, drop_paths, strict=True):
        block.drop_path1, block.drop_path2 = first, second
    return list(found)


if __name__ == "__main__":
    main()
