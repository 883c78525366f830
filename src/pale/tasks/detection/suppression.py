"""Non-maximum suppression (NMS) of many lists of boxes at once.

torchvision processes one list at a time and synchronises CPU and GPU after each; a batch of 16 images has 80 lists of
proposals.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.ops import nms

from ...ops.launching import AVAILABLE, INTERPRETED, launch

MODULE = "pale.tasks.detection.suppression_kernels"
BITS = 32  # bits in a word


def batched_nms(boxes: Tensor, alive: Tensor, overlap: float) -> Tensor:
    """Return which boxes are kept, (p, k), by greedy suppression from the first to the last box of each list.

    Args:
        boxes: p lists of k boxes, (p, k, 4), float32, each sorted by score, best first.
        alive: (p, k); other boxes are not kept and suppress nothing.
        overlap: IoU threshold.
    """
    if AVAILABLE and (boxes.is_cuda or INTERPRETED):
        return nms_by_kernels(boxes, alive, overlap)
    kept = torch.zeros_like(alive)
    for row, some, mine in zip(kept, boxes, alive, strict=True):
        place = mine.nonzero()[:, 0]
        best_first = torch.arange(len(place), 0, -1, device=boxes.device, dtype=boxes.dtype)
        row[place[nms(some[place], best_first, overlap)]] = True
    return kept


def nms_by_kernels(boxes: Tensor, alive: Tensor, overlap: float) -> Tensor:
    """Compute `batched_nms` with two Triton kernels."""
    p, k = alive.shape
    words = -(-k // BITS)
    boxes = boxes.contiguous()
    bits = boxes.new_empty(p * k + 1, words, dtype=torch.int32)
    options, block = {"num_warps": 4}, 64
    launch(
        *(MODULE, "overlap_bits", (p, -(-k // block), words), boxes, bits, k, words, overlap),
        options=options,
        BLOCK=block,
    )
    shifts = torch.arange(BITS, device=boxes.device, dtype=torch.int32)
    padded = F.pad(~alive, (0, words * BITS - k)).view(p, words, BITS)
    gone = (padded.int() << shifts).sum(2, dtype=torch.int32)
    wide = max(32, 1 << (words - 1).bit_length())
    launch(MODULE, "walk", (p,), bits, gone, k, words, options={"num_warps": 1}, BLOCK=wide)
    stays = (gone[..., None] >> shifts & 1) == 0
    return stays.view(p, -1)[:, :k]
