"""Installed versions, devices, and the attention back-end that each device uses, with reasons against the others."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from typing import cast

import torch

from .. import __version__
from ..core.plain_json import Json
from ..ops.block import triton_op
from ..ops.pale_attention import BACKENDS, Backend, choose, pale_attention
from ..ops.pale_attention.region import Region

PACKAGES = (
    "torch",
    "torchvision",
    "timm",
    "triton",
    "transformers",
    "segmentation-models-pytorch",
    "onnxruntime",
)


def examine() -> Json:
    """Return versions, devices and back-ends for JSON."""
    return {
        "pale": __version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "packages": {name: _version(name) for name in PACKAGES},
        "devices": [_device(torch.device(name)) for name in _devices()],
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _devices() -> list[str]:
    names = ["cpu"]
    names += [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        names.append("mps")
    return names


def _device(device: torch.device) -> Json:
    if device.type == "cuda":
        props = torch.cuda.get_device_properties(device)
        about = f"{props.name}, compute {props.major}.{props.minor}, {props.total_memory / 2**30:.0f} GiB"
        dtype = torch.bfloat16
    else:
        about = (
            f"{os.cpu_count()} cores, PyTorch threads: {torch.get_num_threads()}"
            if device.type == "cpu"
            else "Apple GPU"
        )
        dtype = torch.float32
    region = Region((7, 7))
    q = torch.randn(1, 14, 14, 4, 32, device=device, dtype=dtype)
    name = cast(Backend, choose(q, region))
    # Run it, because only that shows that it works. A failure must be visible, so no error is caught.
    works = bool(pale_attention(q, q, q, region=region, backend=name).isfinite().all())
    reasons = {other: BACKENDS[other].unsupported(q, region) for other in BACKENDS if other != name}
    return {
        "device": str(device),
        "about": about,
        "backend": name,
        "works": works,
        "blocks": triton_op.unsupported(q, q[0, 0, 0].numel()) or "fused kernels",
        "others": {other: reason or f"{name} comes first" for other, reason in reasons.items()},
    }
