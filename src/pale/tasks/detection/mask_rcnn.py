"""Mask R-CNN (He et al., ICCV 2017) from torchvision's parts, brought to what mmdetection computes.

The paper's figures were made with mmdetection. Where torchvision differs and a small subclass can help, it
does: anchors of exact sizes on exact strides, low-quality matches from an IoU of 0.3 on alone, L1 box losses,
RoIAlign with aligned corners and as many points as the region asks for, binary mask targets, initial
weights. docs/detection.md lists what still differs. What is drawn depends on the sample and not on the
process. Box arithmetic is always in float32, whatever autocast makes of the convolutions.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn
from torchvision.models.detection import _utils as parts
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.models.detection.roi_heads import RoIHeads
from torchvision.models.detection.rpn import RegionProposalNetwork, RPNHead
from torchvision.ops import roi_align

from ...data.transforms import normalise
from ...settings import Settings
from ..backbones import layer_groups, spared
from .pyramid import FeaturePyramid

RATIOS = (0.5, 1.0, 2.0)  # height over width
LEAST_MATCH = 0.3  # IoU under which an object's best anchor is not its own
BOX_POOL, MASK_POOL, MASK_SIDE = 7, 14, 28
FINEST_SCALE = 56  # side of a region from which on P3 is used


class Heads(Settings):
    """Sizes of Mask R-CNN's heads; the defaults are the paper's.

    Attributes:
        masks: predict masks beside boxes.
        width: channels of the feature pyramid.
        box_width: of the two hidden layers of the box head.
        mask_width: channels of the mask head.
        mask_layers: its 3x3 convolutions.
        anchor: side of an anchor, in strides of its level.
        rpn_samples: anchors of an image in the loss, half of them positive at most.
        box_samples: regions of an image in the loss, a quarter of them positive at most.
        proposals: regions of an image after suppression, in training and after.
    """

    masks: bool = True
    width: int = Field(default=256, ge=1)
    box_width: int = Field(default=1024, ge=1)
    mask_width: int = Field(default=256, ge=1)
    mask_layers: int = Field(default=4, ge=1)
    anchor: float = Field(default=8.0, gt=0)
    rpn_samples: int = Field(default=256, ge=1)
    box_samples: int = Field(default=512, ge=1)
    proposals: int = Field(default=1000, ge=1)


class Anchors(nn.Module):
    """Anchors on exact strides, unrounded, in float32; torchvision rounds both."""

    def __init__(self, strides: Sequence[int], scale: float) -> None:
        super().__init__()
        self.strides = tuple(strides)
        h = torch.tensor(RATIOS).sqrt()
        self.cell = torch.stack([-1 / h, -h, 1 / h, h], 1) * scale / 2  # (3, 4), in strides

    def num_anchors_per_location(self) -> list[int]:
        """As torchvision asks."""
        return [len(RATIOS)] * len(self.strides)

    def forward(self, images: ImageList, maps: list[Tensor]) -> list[Tensor]:
        """(n, 4) for each image."""
        device = maps[0].device
        cell = self.cell.to(device)
        found = []
        for stride, level in zip(self.strides, maps, strict=True):
            h, w = level.shape[-2:]
            y = torch.arange(h, device=device, dtype=torch.float32)
            x = torch.arange(w, device=device, dtype=torch.float32)
            v, u = torch.meshgrid(y, x, indexing="ij")
            centres = torch.stack([u, v, u, v], -1).view(-1, 1, 4)
            found.append(((centres + cell) * stride).view(-1, 4))
        anchors = torch.cat(found)
        return [anchors] * len(images.image_sizes)


class LowQualityMatcher(parts.Matcher):
    """An object's best anchor is its own from an IoU of `LEAST_MATCH` on."""

    def set_low_quality_matches_(
        self, matches: Tensor, all_matches: Tensor, match_quality_matrix: Tensor
    ) -> None:
        """Write into `matches`, as torchvision does."""
        best = match_quality_matrix.max(1, keepdim=True).values
        own = (match_quality_matrix == best) & (best >= LEAST_MATCH)
        taken = own.any(0)
        matches[taken] = all_matches[taken]


class Sampler(parts.BalancedPositiveNegativeSampler):
    """Positives and negatives drawn from each image's own seed, so that no process or neighbour changes them.

    `seeds` is set before a pass; None: from PyTorch's generator, as torchvision does.
    """

    seeds: Sequence[int] | None = None

    def __call__(self, matched_idxs: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """0 and 1 for each candidate of each image."""
        if self.seeds is None:
            return super().__call__(matched_idxs)
        positives, negatives = [], []
        for labels, seed in zip(matched_idxs, self.seeds, strict=True):
            generator = torch.Generator(labels.device).manual_seed(seed)
            rank = torch.rand(len(labels), generator=generator, device=labels.device)
            limit = int(self.batch_size_per_image * self.positive_fraction)
            positive = self._first(labels >= 1, rank, limit)
            negative = self._first(labels == 0, rank, self.batch_size_per_image - positive.sum())
            positives.append(positive)
            negatives.append(negative)
        return positives, negatives

    def _first(self, candidate: Tensor, rank: Tensor, count: int | Tensor) -> Tensor:
        order = torch.where(candidate, rank, 2.0).argsort()
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order), device=order.device)
        return (candidate & (place < count)).to(torch.uint8)


class FloatRPNHead(RPNHead):
    """Scores and box codes in float32: in 16 bits, boxes would jump by pixels."""

    def forward(self, x: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Of each level."""
        scores, codes = super().forward(x)
        return [s.float() for s in scores], [c.float() for c in codes]


class FloatBoxPredictor(FastRCNNPredictor):
    """Class scores and box codes in float32."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(n, classes + 1), (n, 4 (classes + 1))."""
        scores, codes = super().forward(x)
        return scores.float(), codes.float()


class RPN(RegionProposalNetwork):
    """Region proposals with an L1 box loss."""

    def compute_loss(
        self,
        objectness: Tensor,
        pred_bbox_deltas: Tensor,
        labels: list[Tensor],
        regression_targets: list[Tensor],
    ) -> tuple[Tensor, Tensor]:
        """Objectness and box loss, over the sampled anchors."""
        positive, negative = (torch.cat(x).bool() for x in self.fg_bg_sampler(labels))
        chosen = positive | negative
        count = chosen.sum().clamp(min=1)
        target, codes = torch.cat(labels), torch.cat(regression_targets)
        every = F.binary_cross_entropy_with_logits(
            objectness.flatten()[chosen], target[chosen], reduction="sum"
        )
        box = F.l1_loss(pred_bbox_deltas[positive], codes[positive], reduction="sum")
        return every / count, box / count


class PyramidRoIAlign(nn.Module):
    """Regions of interest from the level of their size, corners aligned, points as dense as the map.

    A region smaller than 112 pixels a side comes from P2, from 112 on from P3, and so on.
    """

    def __init__(self, strides: Sequence[int], side: int) -> None:
        super().__init__()
        self.strides, self.side = tuple(strides), side

    def forward(self, maps: Sequence[Tensor], boxes: Sequence[Tensor]) -> Tensor:
        """Maps of the pyramid, finest first, and boxes of each image -> (n, c, side, side)."""
        number = torch.cat([torch.full_like(b[:, :1], i) for i, b in enumerate(boxes)])
        regions = torch.cat([number, torch.cat(list(boxes))], 1)
        h, w = regions[:, 4] - regions[:, 2], regions[:, 3] - regions[:, 1]
        scale = (h * w).clamp(min=0).sqrt()
        level = (scale / FINEST_SCALE + 1e-6).log2().floor().clamp(0, len(self.strides) - 1)
        out = maps[0].new_zeros(len(regions), maps[0].shape[1], self.side, self.side)
        for i, (stride, x) in enumerate(zip(self.strides, maps, strict=False)):
            mine = (level == i).nonzero()[:, 0]
            # Also where there is none: every level has its part in the graph, as DDP expects.
            found = roi_align(x, regions[mine], self.side, 1 / stride, 0, aligned=True)
            out = out.index_copy(0, mine, found.to(out.dtype))
        return out


class Regions(RoIHeads):
    """Box and mask heads with mmdetection's losses; masks leave as `MASK_SIDE` squares over their boxes."""

    def forward(
        self,
        features: OrderedDict[str, Tensor],
        proposals: list[Tensor],
        image_shapes: list[tuple[int, int]],
        targets: list[dict[str, Any]] | None = None,
    ) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
        """Detections of each image, or in training the losses."""
        maps = list(features.values())
        if self.training:
            assert targets is not None
            chosen, matched, labels, codes = self.select_training_samples(proposals, targets)
            scores, guesses = self._boxes(maps, chosen)
            losses = box_losses(scores, guesses, torch.cat(labels), torch.cat(codes))
            if self.has_mask():
                losses |= {"mask": self._mask_loss(maps, chosen, matched, labels, targets)}
            return [], losses
        scores, guesses = self._boxes(maps, proposals)
        boxes, confidence, classes = self.postprocess_detections(
            scores, guesses, proposals, image_shapes
        )
        found = [
            {"boxes": b, "labels": c, "scores": s}
            for b, c, s in zip(boxes, classes, confidence, strict=True)
        ]
        if self.has_mask():
            logits = self._masks(maps, boxes)
            own = logits[torch.arange(len(logits), device=logits.device), torch.cat(classes)]
            for entry, masks in zip(
                found, own.sigmoid().split([len(b) for b in boxes]), strict=True
            ):
                entry["masks"] = masks
        return found, {}

    def _boxes(self, maps: list[Tensor], boxes: list[Tensor]) -> tuple[Tensor, Tensor]:
        return self.box_predictor(self.box_head(self.box_roi_pool(maps, boxes)))

    def _masks(self, maps: list[Tensor], boxes: list[Tensor]) -> Tensor:
        return self.mask_predictor(self.mask_head(self.mask_roi_pool(maps, boxes))).float()

    def _mask_loss(
        self,
        maps: list[Tensor],
        boxes: list[Tensor],
        matched: list[Tensor],
        labels: list[Tensor],
        targets: list[dict[str, Any]],
    ) -> Tensor:
        positive = [label > 0 for label in labels]
        boxes = [b[p] for b, p in zip(boxes, positive, strict=True)]
        logits = self._masks(maps, boxes)
        if not len(logits):
            return logits.sum() * 0
        wanted = [
            mask_targets(t["masks"], b, m[p])
            for t, b, m, p in zip(targets, boxes, matched, positive, strict=True)
        ]
        classes = torch.cat([label[p] for label, p in zip(labels, positive, strict=True)])
        own = logits[torch.arange(len(logits), device=logits.device), classes]
        return F.binary_cross_entropy_with_logits(own, torch.cat(wanted))


def box_losses(scores: Tensor, guesses: Tensor, labels: Tensor, codes: Tensor) -> dict[str, Tensor]:
    """Cross-entropy over the sampled regions, and L1 between box codes, divided by as many."""
    positive = (labels > 0).nonzero()[:, 0]
    own = guesses.view(len(labels), -1, 4)[positive, labels[positive]]
    count = max(1, len(labels))
    return {
        "class": F.cross_entropy(scores, labels, reduction="sum") / count,
        "box": F.l1_loss(own, codes[positive], reduction="sum") / count,
    }


def mask_targets(masks: Tensor, boxes: Tensor, which: Tensor) -> Tensor:
    """What lies of the masks (n, h, w) number `which` in the boxes (m, 4): 0 or 1, (m, side, side)."""
    if not len(boxes):
        return boxes.new_zeros(0, MASK_SIDE, MASK_SIDE)
    regions = torch.cat([which[:, None].to(boxes), boxes], 1)
    inside = roi_align(masks[:, None].to(boxes), regions, MASK_SIDE, 1.0, 0, aligned=True)
    return (inside[:, 0] >= 0.5).to(boxes)


class MaskRCNN(nn.Module):
    """Pyramid, proposals, box and mask heads.

    In training `model(images, targets)` gives the losses by name; after, detections of each image: boxes
    (n, 4) in its pixels, labels from 1 on, scores, and masks (n, 28, 28) over the boxes (`paste` makes
    pictures of them).

    Args:
        body: gives the maps.
        classes: without the background.
        heads: their sizes.
    """

    def __init__(self, body: FeaturePyramid, classes: int, heads: Heads | None = None) -> None:
        super().__init__()
        heads = heads or Heads()
        width, strides = body.out_channels, body.strides
        self.body, self.with_masks = body, heads.masks
        self.rpn = RPN(
            Anchors(strides, heads.anchor),
            FloatRPNHead(width, len(RATIOS)),
            0.7,
            0.3,
            heads.rpn_samples,
            0.5,
            {"training": 2 * heads.proposals, "testing": heads.proposals},
            {"training": heads.proposals, "testing": heads.proposals},
            0.7,
        )
        self.rpn.proposal_matcher = LowQualityMatcher(0.7, 0.3, allow_low_quality_matches=True)
        self.rpn.fg_bg_sampler = Sampler(heads.rpn_samples, 0.5)
        masks: dict[str, Any] = {}
        if heads.masks:
            c = heads.mask_width
            masks = {
                "mask_roi_pool": PyramidRoIAlign(strides[:-1], MASK_POOL),
                "mask_head": MaskRCNNHeads(width, (c,) * heads.mask_layers, 1),
                "mask_predictor": MaskRCNNPredictor(c, c, classes + 1),
            }
        self.roi_heads = Regions(
            PyramidRoIAlign(strides[:-1], BOX_POOL),
            TwoMLPHead(width * BOX_POOL**2, heads.box_width),
            FloatBoxPredictor(heads.box_width, classes + 1),
            0.5,
            0.5,
            heads.box_samples,
            0.25,
            None,
            0.05,
            0.5,
            100,
            **masks,
        )
        self.roi_heads.fg_bg_sampler = Sampler(heads.box_samples, 0.25)
        # What a new set of classes replaces; `weights.put` reads it.
        several = ["roi_heads.box_predictor"]
        several += ["roi_heads.mask_predictor.mask_fcn_logits"] * heads.masks
        self.pretrained_cfg = {"classifier": tuple(several), "background": 1}
        init_heads(self)

    def forward(
        self, images: ImageList | Sequence[Tensor], targets: list[dict[str, Any]] | None = None
    ) -> Any:
        """Losses by name in training, else a dict for each image.

        Args:
            images: normalised and padded, with the size of each; or a list of uint8 (3, h, w).
            targets: of each image boxes (n, 4), labels from 1 on, masks (n, h, w), and "seed" of its draws.
        """
        if not isinstance(images, ImageList):
            images = batch_images(images)
        self._seed(targets)
        maps = self.body(images.tensors)
        proposals, rpn = self.rpn(images, maps, targets)
        found, losses = self.roi_heads(maps, proposals, images.image_sizes, targets)
        if not self.training:
            return found
        named = {"objectness": rpn["loss_objectness"], "proposal": rpn["loss_rpn_box_reg"]}
        return named | losses

    def _seed(self, targets: list[dict[str, Any]] | None) -> None:
        seeds = None
        if self.training and targets is not None and all("seed" in t for t in targets):
            seeds = [int(t["seed"]) for t in targets]
        self.rpn.fg_bg_sampler.seeds = seeds
        self.roi_heads.fg_bg_sampler.seeds = seeds and [s ^ 1 for s in seeds]

    def limits(self, score: float, nms: float, most: int) -> None:
        """How detections are chosen: least score, greatest overlap, how many of an image."""
        self.roi_heads.score_thresh, self.roi_heads.nms_thresh = score, nms
        self.roi_heads.detections_per_img = most

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Compute the backbone's blocks again in the backward pass."""
        self.body.set_grad_checkpointing(enable)

    def compile_parts(self) -> None:
        """Compile what has a regular shape, once for all sizes: backbone and pyramid; the rest stays eager."""
        self.body.compile(dynamic=True)

    def no_weight_decay(self) -> set[str]:
        """What the backbone names."""
        return spared(self.body.backbone, "body.backbone.model.")

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Layers for layer-wise learning rates: those of the backbone, then the heads."""
        return layer_groups(self.body.backbone, coarse, "body.backbone.model.")


def batch_images(images: Sequence[Tensor]) -> ImageList:
    """Images uint8 (3, h, w), normalised and padded with zeros, right and below, to a common multiple of 32."""
    h, w = (max(x.shape[i] for x in images) for i in (1, 2))
    out = images[0].new_zeros(len(images), 3, h + -h % 32, w + -w % 32, dtype=torch.float32)
    for place, image in zip(out, images, strict=True):
        place[:, : image.shape[1], : image.shape[2]] = normalise(image[None])[0]
    return ImageList(out, [(x.shape[1], x.shape[2]) for x in images])


@torch.no_grad()
def init_heads(model: MaskRCNN) -> None:
    """mmdetection's: Xavier for the hidden layers, normals of 0.01 and 0.001 before classes and boxes."""
    box = model.roi_heads
    for layer in (box.box_head.fc6, box.box_head.fc7):
        nn.init.xavier_uniform_(layer.weight)
        nn.init.zeros_(layer.bias)
    for layer, std in ((box.box_predictor.cls_score, 0.01), (box.box_predictor.bbox_pred, 0.001)):
        nn.init.normal_(layer.weight, std=std)
        nn.init.zeros_(layer.bias)
