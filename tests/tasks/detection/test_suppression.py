"""Batched NMS against torchvision, list by list: on a GPU, and in Triton's interpreter."""

import pytest
import torch
from support.processes import DEVICE, compiling, in_the_interpreter, kernels, needs_triton
from torchvision.ops import nms

from pale.ops.launching import INTERPRETED, launches
from pale.tasks.detection import suppression
from pale.tasks.detection.suppression import batched_nms


def lists(p, k, device="cpu"):
    generator = torch.Generator().manual_seed(k)
    corner = 60 * torch.rand(p, k, 2, generator=generator)
    boxes = torch.cat([corner, corner + 5 + 40 * torch.rand(p, k, 2, generator=generator)], 2)
    alive = torch.rand(p, k, generator=generator) < 0.8
    return boxes.to(device), alive.to(device)


def expected(boxes, alive, overlap):
    """Compute NMS in the obvious way: each kept box, best first, removes those that it overlaps."""
    kept = torch.zeros_like(alive)
    for row, some, mine in zip(kept, boxes, alive, strict=True):
        place = mine.nonzero()[:, 0]
        scores = torch.linspace(1, 0, len(place), device=boxes.device)
        row[place[nms(some[place], scores, overlap)]] = True
    return kept


@kernels
@needs_triton
@pytest.mark.parametrize("k", [1, 31, 64, 150] if INTERPRETED else [1, 31, 64, 1000, 2000])
@pytest.mark.parametrize("overlap", [0.3, 0.7])
def test_kernels_keep_the_same_boxes_as_torchvision(k, overlap):
    boxes, alive = lists(3, k, DEVICE)
    launches.clear()
    kept = batched_nms(boxes, alive, overlap)
    assert launches == {"overlap_bits": 1, "walk": 1}
    assert torch.equal(kept, expected(boxes, alive, overlap))


@kernels
@needs_triton
def test_dead_and_empty_boxes_suppress_nothing():
    boxes = torch.tensor([[[0.0, 0, 9, 9]] * 3, [[4.0, 4, 4, 4]] * 3], device=DEVICE)
    alive = torch.tensor([[False, True, True], [True, True, True]], device=DEVICE)
    found = batched_nms(boxes, alive, 0.7).tolist()
    assert found == [[False, True, False], [True, True, True]]


@pytest.mark.skipif(INTERPRETED, reason="this is without the kernels")
def test_the_fallback_without_kernels_gives_the_same():
    boxes, alive = lists(4, 40)
    assert torch.equal(batched_nms(boxes, alive, 0.5), expected(boxes, alive, 0.5))
    boxes = torch.tensor([[[0.0, 0, 9, 9]] * 3, [[4.0, 4, 4, 4]] * 3])
    alive = torch.tensor([[False, True, True], [True, True, True]])
    assert batched_nms(boxes, alive, 0.7).tolist() == [[False, True, False], [True, True, True]]


@needs_triton
@pytest.mark.skipif(INTERPRETED, reason="nothing is compiled in the interpreter")
@pytest.mark.parametrize("capability", [75, 90])
def test_kernels_compile(monkeypatch, capability):
    compiled: list[str] = []
    monkeypatch.setattr(suppression, "launch", compiling(capability, compiled))
    suppression.nms_by_kernels(*lists(1, 40), 0.7)
    assert compiled == ["overlap_bits", "walk"]


@pytest.mark.slow
@needs_triton
@pytest.mark.skipif(INTERPRETED, reason="this is the interpreter already")
def test_everything_in_the_interpreter():
    in_the_interpreter(__file__)
