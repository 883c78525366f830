"""Traces of small models, for tests."""

from functools import cache

import pytest
import torch
from PIL import Image

import pale
from pale.data.sources.scenes import draw_scene
from pale.view.attention import AttentionTrace, trace_attention

MODES = ["parallel", "sequential", "vanilla", "axial", "cross"]
SMALL = {"depths": (2, 2), "channels": (8, 16), "heads": (2, 4), "mlp_ratio": (2, 2)}
each_mode = pytest.mark.parametrize("attention", MODES)


def scene(width: int = 90, height: int = 70) -> Image.Image:
    return Image.fromarray(draw_scene(3, 1, 128).image).resize((width, height))


@cache
def traced(attention: str = "parallel") -> AttentionTrace:
    torch.manual_seed(1)
    model = pale.create_model("pale_nano", attention=attention, num_classes=5, **SMALL)
    for parameter in model.parameters():  # or all weights would be nearly equal
        if parameter.dim() > 1:
            parameter.data.mul_(4)
    return trace_attention(scene(), model, size=60)
