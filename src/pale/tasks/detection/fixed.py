"""Mask R-CNN with outputs of a fixed size, for export: the same computation with tensors of constant shape.

The number of boxes between the stages of a detector depends on the image, which tracers and ONNX runtimes support only
in part. Here every stage keeps a fixed number of slots: the best of each level, the proposals, the candidates, the
objects. Empty slots have a score below all others. NMS marks slots instead of selecting them. Each region is pooled
from every level, as an empty region unless it is the region's own level.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.ops import nms, roi_align

from .model import FINEST_SCALE, MaskRCNN, PyramidRoIAlign

CANDIDATES = 2000  # (region, class) pairs before the last NMS
MIN_SIDE = {"proposal": 1e-3, "object": 1e-2}  # as in torchvision
PADDED_TO = 32
NAMES = ("boxes", "scores", "labels", "masks")


class FixedMaskRCNN(nn.Module):
    """One normalised image (1, 3, h, w) -> boxes (n, 4), scores (n,), labels (n,) from 1 on, masks (n, 28, 28).

    n is the maximum number of objects; empty slots have score 0 and label 0. A detector without masks returns the
    first three only.
    """

    def __init__(self, model: MaskRCNN) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """Return boxes, scores, labels and masks."""
        h, w = images.shape[-2:]
        padded = F.pad(images, (0, -w % PADDED_TO, 0, -h % PADDED_TO))
        edge = torch.stack([_scalar(n, images) for n in (w, h, w, h)])
        maps = list(self.model.body(padded).values())
        boxes, alive = self._proposals(maps, edge)
        boxes, scores, labels = self._objects(maps, boxes, alive, edge)
        if not self.model.with_masks:
            return boxes, scores, labels
        heads = self.model.roi_heads
        pooled = _pooled(heads.mask_roi_pool, maps, boxes)
        logits = heads.mask_predictor(heads.mask_head(pooled)).float()
        own = logits.gather(1, labels.view(-1, 1, 1, 1).expand(-1, 1, *logits.shape[2:]))[:, 0]
        return boxes, scores, labels, own.sigmoid()

    def _proposals(self, maps: list[Tensor], edge: Tensor) -> tuple[Tensor, Tensor]:
        """Return the regions, (n, 4), and which slots hold one."""
        rpn = self.model.rpn
        every, codes = rpn.head(maps)
        best = rpn.pre_nms_top_n()
        cell = rpn.anchor_generator.cell.to(edge.device)
        found_boxes, found_scores, levels = [], [], []
        strides = rpn.anchor_generator.strides
        for number, (score, code, stride) in enumerate(zip(every, codes, strides, strict=True)):
            h, w = score.shape[-2:]
            y, x = (torch.arange(n, device=score.device, dtype=torch.float32) for n in (h, w))
            v, u = torch.meshgrid(y, x, indexing="ij")
            centres = torch.stack([u, v, u, v], -1).reshape(-1, 1, 4)
            anchors = ((centres + cell) * stride).reshape(-1, 4)
            code = code.reshape(len(cell), 4, h, w).permute(2, 3, 0, 1).reshape(-1, 4)
            flat = score.permute(0, 2, 3, 1).reshape(-1)
            flat = F.pad(flat, (0, best), value=float("-inf"))  # a small map has fewer than `best`
            top, place = flat.topk(best)
            anchors, code = (F.pad(t, (0, 0, 0, best))[place] for t in (anchors, code))
            boxes = rpn.box_coder.decode_single(code, anchors)
            found_boxes.append(boxes)
            found_scores.append(top.sigmoid())
            levels.append(torch.full_like(top, number))
        boxes, scores = _clipped(torch.cat(found_boxes), edge), torch.cat(found_scores)
        alive = _large(boxes, MIN_SIDE["proposal"]) & (scores > 0)
        scores = _suppressed(boxes, scores, alive, torch.cat(levels), rpn.nms_thresh)
        top, place = scores.topk(min(rpn.post_nms_top_n(), len(scores)))
        return boxes[place], top > 0

    def _objects(
        self, maps: list[Tensor], regions: Tensor, alive: Tensor, edge: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        heads = self.model.roi_heads
        pooled = _pooled(heads.box_roi_pool, maps, regions)
        logits, codes = heads.box_predictor(heads.box_head(pooled))
        n, classes = logits.shape
        boxes = heads.box_coder.decode_single(codes, regions).reshape(n, classes, 4)
        boxes = _clipped(boxes[:, 1:].reshape(-1, 4), edge)
        scores = torch.where(alive[:, None], logits.softmax(-1)[:, 1:], 0.0).reshape(-1)
        able = (scores > heads.score_thresh) & _large(boxes, MIN_SIDE["object"])
        scores, place = torch.where(able, scores, 0.0).topk(min(CANDIDATES, n * (classes - 1)))
        boxes, labels = boxes[place], place % (classes - 1) + 1
        scores = _suppressed(boxes, scores, scores > 0, labels.float(), heads.nms_thresh)
        scores, place = scores.topk(min(heads.detections_per_img, len(scores)))
        scores, found = scores.clamp(min=0), scores > 0
        return boxes[place] * found[:, None], scores, labels[place] * found


def _suppressed(
    boxes: Tensor, scores: Tensor, alive: Tensor, kinds: Tensor, overlap: float
) -> Tensor:
    """Return the scores, -1 if a better box of the same kind overlaps or the box is not alive."""
    scores = torch.where(alive, scores, -1.0)
    apart = boxes + (kinds * (boxes.max() + 1))[:, None]
    kept = torch.zeros_like(scores).index_fill(0, nms(apart, scores, overlap), 1.0)
    return torch.where((kept > 0) & alive, scores, -1.0)


def _pooled(pool: PyramidRoIAlign, maps: list[Tensor], boxes: Tensor) -> Tensor:
    """Return `PyramidRoIAlign` of one image, computed on every level for every box."""
    size = boxes[:, 2:] - boxes[:, :2]
    scale = size.prod(1).clamp(min=0).sqrt()
    level = (scale / FINEST_SCALE + 1e-6).log2().floor().clamp(0, len(pool.strides) - 1)
    out: Tensor | None = None
    for i, (stride, x) in enumerate(zip(pool.strides, maps, strict=False)):
        mine = (level == i)[:, None]
        regions = torch.cat([torch.zeros_like(boxes[:, :1]), torch.where(mine, boxes, 0.0)], 1)
        found = roi_align(x, regions, pool.side, 1 / stride, 0, aligned=True)
        found = torch.where(mine[..., None, None], found, 0.0)
        out = found if out is None else out + found
    assert out is not None
    return out


def _clipped(boxes: Tensor, edge: Tensor) -> Tensor:
    return torch.minimum(boxes.clamp(min=0), edge)


def _large(boxes: Tensor, side: float) -> Tensor:
    return ((boxes[:, 2:] - boxes[:, :2]) >= side).all(1)


def _scalar(n: int, like: Tensor) -> Tensor:
    return torch.scalar_tensor(n, dtype=like.dtype, device=like.device)
