"""Mask R-CNN (He et al., ICCV 2017) from the parts of torchvision, changed to compute what mmdetection computes.

The paper used mmdetection. Small subclasses remove most differences: anchors of exact sizes on exact strides,
low-quality matches only from an IoU of 0.3, L1 box losses, RoIAlign with aligned corners and an adaptive number of
sampling points, binary mask targets, initial weights. docs/detection.md lists the remaining differences. Random
sampling depends on the sample and not on the process. Boxes are always computed in float32, also under autocast.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.models.detection.roi_heads import RoIHeads
from torchvision.models.detection.rpn import RegionProposalNetwork, RPNHead

from ...compat import top_anchors
from ...core.settings import MAX_WIDTH, Settings
from ...data.transforms.images import normalise
from ..backbones import DenseModel, layer_groups, parameters_without_decay
from .loss import box_losses, mask_targets
from .pyramid import FeaturePyramid, build_pyramid
from .roi import roi_align
from .suppression import batched_nms
from .targets import Objects, match_anchors, match_regions, random_keys, sample_candidates

RATIOS = (0.5, 1.0, 2.0)  # height over width
BOX_POOL, MASK_POOL = 7, 14
FINEST_SCALE = 56  # see `PyramidRoIAlign`
# For torch.compile: two passes of Inductor fail with dynamic sizes in PyTorch 2.11 (its issue 181563, and reductions
# of mixed order).
DYNAMIC = {"triton.coalesce_tiling_analysis": False, "triton.mix_order_reduction": False}


class Heads(Settings):
    """Sizes of Mask R-CNN's heads; the defaults are the paper's.

    Attributes:
        masks: predict masks beside boxes.
        width: channels of the feature pyramid.
        box_width: width of the two hidden layers of the box head.
        mask_width: channels of the mask head.
        mask_layers: number of 3x3 convolutions in the mask head.
        anchor: side of an anchor, as a multiple of the stride of its level.
        rpn_samples: anchors per image in the loss; at most half of them are positive.
        box_samples: regions per image in the loss; at most a quarter of them are positive.
        proposals: regions per image after NMS, in training and inference.
    """

    masks: bool = True
    width: int = Field(default=256, ge=1, le=MAX_WIDTH)
    box_width: int = Field(default=1024, ge=1, le=MAX_WIDTH)
    mask_width: int = Field(default=256, ge=1, le=MAX_WIDTH)
    mask_layers: int = Field(default=4, ge=1, le=64)
    anchor: float = Field(default=8.0, gt=0)
    rpn_samples: int = Field(default=256, ge=1, le=1 << 16)
    box_samples: int = Field(default=512, ge=1, le=1 << 16)
    proposals: int = Field(default=1000, ge=1, le=10_000)


class Anchors(nn.Module):
    """Anchors of exact size on exact strides, in float32; torchvision rounds both."""

    def __init__(self, strides: Sequence[int], scale: float) -> None:
        super().__init__()
        self.strides = tuple(strides)
        h = torch.tensor(RATIOS).sqrt()
        self.cell = torch.stack([-1 / h, -h, 1 / h, h], 1) * scale / 2  # (3, 4), in strides

    def num_anchors_per_location(self) -> list[int]:
        """Return the number of anchors per location of each level, which torchvision asks for."""
        return [len(RATIOS)] * len(self.strides)

    def forward(self, images: ImageList, maps: list[Tensor]) -> list[Tensor]:
        """Return the anchors of each image, (n, 4)."""
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


class FloatRPNHead(RPNHead):
    """RPN head with outputs in float32: in 16 bits, boxes would be off by pixels."""

    def forward(self, x: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Return scores and box codes of each level."""
        scores, codes = super().forward(x)
        return [s.float() for s in scores], [c.float() for c in codes]


class FloatBoxPredictor(FastRCNNPredictor):
    """Box predictor with outputs in float32."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return class scores (n, classes + 1) and box codes (n, 4 (classes + 1))."""
        scores, codes = super().forward(x)
        return scores.float(), codes.float()


class RPN(RegionProposalNetwork):
    """Region proposal network with an L1 box loss."""

    samples: int  # anchors per image in the loss

    def forward(
        self,
        images: ImageList,
        features: OrderedDict[str, Tensor],
        targets: Objects | None = None,
    ) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Return the regions of each image, best first, and in training the losses."""
        maps = list(features.values())
        scores, codes = self.head(maps)
        b, levels = len(images.image_sizes), [s[0].numel() for s in scores]
        anchors = self.anchor_generator(images, maps)[0]
        scores = torch.cat([s.permute(0, 2, 3, 1).flatten(1) for s in scores], 1)
        codes = torch.cat([c.permute(0, 2, 3, 1).reshape(b, -1, 4) for c in codes], 1)
        repeated = anchors.expand(b, -1, -1).reshape(-1, 4)
        boxes = self.box_coder.decode_single(codes.detach().reshape(-1, 4), repeated)
        boxes = boxes.view(b, -1, 4)
        regions, _ = self.filter_proposals(boxes, scores, images.image_sizes, levels)
        if not self.training:
            return regions, {}
        assert targets is not None
        return regions, self.losses(scores, codes, anchors, targets)

    def filter_proposals(
        self,
        proposals: Tensor,
        objectness: Tensor,
        image_shapes: list[tuple[int, int]],
        num_anchors_per_level: list[int],
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return boxes and scores of each image: the best of each level after NMS, as in torchvision."""
        device = proposals.device
        sizes = [min(self.pre_nms_top_n(), n) for n in num_anchors_per_level]
        place = top_anchors(self, objectness.detach(), num_anchors_per_level)
        scores = objectness.detach().gather(1, place).sigmoid()
        boxes = proposals.gather(1, place[..., None].expand(-1, -1, 4))
        edges = torch.tensor([(w, h, w, h) for h, w in image_shapes], dtype=boxes.dtype)
        boxes = torch.minimum(boxes.clamp(min=0), edges.to(device, non_blocking=True)[:, None])
        large = ((boxes[..., 2:] - boxes[..., :2]) >= self.min_size).all(2)
        alive = large & (scores >= self.score_thresh)
        # One list per level and image, best first, all padded to one length.
        lists = _levels(boxes, sizes).flatten(0, 1), _levels(alive, sizes).flatten(0, 1)
        kept = batched_nms(*lists, self.nms_thresh).view(len(boxes), len(sizes), -1)
        kept = torch.cat([kept[:, i, :n] for i, n in enumerate(sizes)], 1)
        scores = torch.where(kept, scores, -1.0)
        scores, place = scores.topk(min(self.post_nms_top_n(), scores.shape[1]))
        boxes = boxes.gather(1, place[..., None].expand(-1, -1, 4))
        counts = (scores >= 0).sum(1).tolist()
        return (
            [x[:n] for x, n in zip(boxes, counts, strict=True)],
            [x[:n] for x, n in zip(scores, counts, strict=True)],
        )

    def losses(
        self, scores: Tensor, codes: Tensor, anchors: Tensor, objects: Objects
    ) -> dict[str, Tensor]:
        """Return objectness and box loss of the sampled anchors."""
        labels, boxes = match_anchors(objects, anchors)
        places = torch.arange(len(anchors), device=scores.device).expand_as(labels)
        random = random_keys(objects.seeds, places)
        positive, negative = sample_candidates(labels, random, self.samples, 0.5)
        chosen = positive | negative
        count = chosen.sum().clamp(min=1)
        objectness = F.binary_cross_entropy_with_logits(
            scores, positive.float(), chosen.float(), reduction="sum"
        )
        repeated = anchors.expand_as(boxes).reshape(-1, 4)
        wanted = self.box_coder.encode_single(boxes.view(-1, 4), repeated).view_as(codes)
        # Codes of anchors without an object may be NaN or Inf; they must not contribute.
        wanted = torch.where(positive[..., None], wanted, codes.detach())
        box = F.l1_loss(codes, wanted, reduction="sum")
        return {"objectness": objectness / count, "proposal": box / count}


class PyramidRoIAlign(nn.Module):
    """RoIAlign on the pyramid level that fits the size of each region, with aligned corners and adaptive sampling.

    Regions with a side below 112 pixels (twice `FINEST_SCALE`) are read from P2, from 112 on from P3, and so on.
    """

    def __init__(self, strides: Sequence[int], side: int) -> None:
        super().__init__()
        self.strides, self.side = tuple(strides), side

    def forward(self, maps: Sequence[Tensor], regions: Tensor) -> Tensor:
        """Return the features of regions (n, 5), image and box: (n, c, side, side); maps are finest first."""
        h, w = regions[:, 4] - regions[:, 2], regions[:, 3] - regions[:, 1]
        scale = (h * w).clamp(min=0).sqrt()
        level = (scale / FINEST_SCALE + 1e-6).log2().floor().clamp(0, len(self.strides) - 1)
        level, order = level.sort(stable=True)
        numbers = torch.arange(len(self.strides), device=level.device)
        counts = (level == numbers[:, None]).sum(1).tolist()
        # Levels without regions too: DDP expects every level in the graph.
        found = [
            roi_align(x, mine, self.side, 1 / stride)
            for mine, stride, x in zip(
                regions[order].split(counts), self.strides, maps, strict=False
            )
        ]
        return torch.cat(found).index_select(0, order.argsort())


class Regions(RoIHeads):
    """Box and mask heads with mmdetection's losses; masks are `MASK_SIDE` x `MASK_SIDE`, relative to their boxes."""

    samples: int  # regions per image in the loss

    def forward(
        self,
        features: OrderedDict[str, Tensor],
        proposals: list[Tensor],
        image_shapes: list[tuple[int, int]],
        targets: Objects | None = None,
    ) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
        """Return the detections of each image, or in training the losses."""
        maps = list(features.values())
        if self.training:
            assert targets is not None
            return [], self.losses(maps, proposals, targets)
        logits, codes = self.classify(maps, numbered(proposals))
        boxes, scores, classes = self.postprocess_detections(logits, codes, proposals, image_shapes)
        found = [
            {"boxes": b, "labels": c, "scores": s}
            for b, c, s in zip(boxes, classes, scores, strict=True)
        ]
        if self.has_mask():
            masks_by_class = self._masks(maps, numbered(boxes))
            places = torch.arange(len(masks_by_class), device=masks_by_class.device)
            own = masks_by_class[places, torch.cat(classes)]
            for entry, masks in zip(
                found, own.sigmoid().split([len(b) for b in boxes]), strict=True
            ):
                entry["masks"] = masks
        return found, {}

    def classify(self, maps: list[Tensor], regions: Tensor) -> tuple[Tensor, Tensor]:
        """Return class logits and box codes of regions (n, 5), image and box."""
        return self.box_predictor(self.box_head(self.box_roi_pool(maps, regions)))

    def _masks(self, maps: list[Tensor], regions: Tensor) -> Tensor:
        x = self.mask_roi_pool(maps, regions)
        if x.is_cuda:  # otherwise each convolution converts its input to this layout
            x = x.contiguous(memory_format=torch.channels_last)
        return self.mask_predictor(self.mask_head(x)).float()

    def losses(
        self, maps: list[Tensor], proposals: list[Tensor], objects: Objects
    ) -> dict[str, Tensor]:
        """Return the losses of the sampled regions; the boxes of the objects are candidates too."""
        regions, labels, codes, which = self.sample(proposals, objects)
        losses = box_losses(*self.classify(maps, regions), labels, codes)
        if self.has_mask():
            positive = (labels > 0).nonzero()[:, 0]
            classes, regions, which = labels[positive], regions[positive], which[positive]
            losses["mask"] = self._mask_loss(maps, regions, classes, which, objects)
        return losses

    def sample(
        self, proposals: list[Tensor], objects: Objects
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return sampled regions (n, 5), their classes, box codes, and the index of their object in its image."""
        device = proposals[0].device
        counts = torch.tensor([len(p) for p in proposals]).to(device, non_blocking=True)
        candidates = pad_sequence([p.float() for p in proposals], batch_first=True)
        places = torch.arange(candidates.shape[1], device=device).expand(len(candidates), -1)
        known = torch.cat([places < counts[:, None], objects.known], 1)
        # Objects are numbered after the proposals of their image, so that sampling does not depend on other images.
        own = torch.arange(objects.known.shape[1], device=device) + counts[:, None]
        places = torch.cat([places, own], 1)
        candidates = torch.cat([candidates, objects.boxes], 1)
        labels, which = match_regions(objects, candidates, known)
        random = random_keys(None if objects.seeds is None else objects.seeds ^ 1, places)
        positive, negative = sample_candidates(labels, random, self.samples, 0.25)
        image, place = (positive | negative).nonzero().unbind(1)
        boxes, which = candidates[image, place], which[image, place]
        codes = self.box_coder.encode_single(objects.boxes[image, which], boxes)
        return torch.cat([image[:, None].to(boxes), boxes], 1), labels[image, place], codes, which

    def _mask_loss(
        self,
        maps: list[Tensor],
        regions: Tensor,
        classes: Tensor,
        which: Tensor,
        objects: Objects,
    ) -> Tensor:
        logits = self._masks(maps, regions)
        if not len(logits):
            return logits.sum() * 0
        own = logits[torch.arange(len(logits), device=logits.device), classes]
        wanted = mask_targets(objects.masks, regions, which)
        return F.binary_cross_entropy_with_logits(own, wanted)


def _levels(x: Tensor, sizes: Sequence[int]) -> Tensor:
    """Split concatenated levels (b, n, ...) into (b, levels, size of the largest, ...), padded with 0."""
    largest, rest = max(sizes), [0] * 2 * (x.ndim - 2)
    return torch.stack(
        [F.pad(y, (*rest, 0, largest - y.shape[1])) for y in x.split(list(sizes), 1)], 1
    )


def numbered(boxes: Sequence[Tensor]) -> Tensor:
    """Concatenate the boxes of each image to regions (n, 5), with the index of the image."""
    number = torch.cat([torch.full_like(b[:, :1], i) for i, b in enumerate(boxes)])
    return torch.cat([number, torch.cat(list(boxes))], 1)


class MaskRCNN(nn.Module):
    """Mask R-CNN: feature pyramid, region proposals, box and mask heads.

    In training `model(images, targets)` returns the losses by name; in evaluation mode the detections of each image:
    boxes (n, 4) in pixels, labels from 1 on, scores, and masks (n, 28, 28) relative to the boxes (`rle.paste_masks`
    draws them at the size of the image).

    Args:
        body: backbone and pyramid.
        classes: number of classes without the background.
        heads: sizes of the heads.
    """

    def __init__(self, body: FeaturePyramid, classes: int, heads: Heads | None = None) -> None:
        super().__init__()
        heads = heads or Heads()
        width, strides = body.out_channels, body.strides
        self.body, self.with_masks = body, heads.masks
        self.rpn = RPN(
            Anchors(strides, heads.anchor),
            FloatRPNHead(width, len(RATIOS)),
            fg_iou_thresh=0.7,
            bg_iou_thresh=0.3,
            batch_size_per_image=heads.rpn_samples,
            positive_fraction=0.5,
            pre_nms_top_n={"training": 2 * heads.proposals, "testing": heads.proposals},
            post_nms_top_n={"training": heads.proposals, "testing": heads.proposals},
            nms_thresh=0.7,
        )
        self.rpn.samples = heads.rpn_samples
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
            fg_iou_thresh=0.5,
            bg_iou_thresh=0.5,
            batch_size_per_image=heads.box_samples,
            positive_fraction=0.25,
            bbox_reg_weights=None,
            score_thresh=0.05,
            nms_thresh=0.5,
            detections_per_img=100,
            **masks,
        )
        self.roi_heads.samples = heads.box_samples
        # Layers that new classes replace; `load_into` reads this.
        classifiers = ["roi_heads.box_predictor"]
        if heads.masks:
            classifiers.append("roi_heads.mask_predictor.mask_fcn_logits")
        self.pretrained_cfg = {"classifier": tuple(classifiers), "background": 1}
        init_heads(self)

    def forward(
        self, images: ImageList | Sequence[Tensor], targets: list[dict[str, Any]] | None = None
    ) -> Any:
        """Return the losses by name in training, else a dict for each image.

        Args:
            images: normalised and padded, with the size of each; or a list of uint8 (3, h, w).
            targets: for each image boxes (n, 4), labels from 1 on, masks (n, h, w), and "seed" of its sampling.
        """
        if not isinstance(images, ImageList):
            images = batch_images(images)
        maps = self.body(images.tensors)
        objects = None
        if self.training:
            if targets is None:
                raise ValueError(
                    "in training a detector needs targets; for detections, call eval()"
                )
            objects = Objects.of(targets, images.tensors.device)
        proposals, rpn = self.rpn(images, maps, objects)
        found, losses = self.roi_heads(maps, proposals, images.image_sizes, objects)
        if not self.training:
            return found
        return rpn | losses

    def set_thresholds(self, score: float, nms: float, max_detections: int) -> None:
        """Set score threshold, IoU threshold of NMS, and maximum number of detections per image."""
        self.roi_heads.score_thresh, self.roi_heads.nms_thresh = score, nms
        self.roi_heads.detections_per_img = max_detections

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute the blocks of the backbone in the backward pass."""
        self.body.set_grad_checkpointing(enable)

    @property
    def recordable(self) -> nn.Module:
        """The part whose forward and backward pass a CUDA graph can record, if all images have one size."""
        return self.body

    def compile_parts(self) -> None:
        """Compile backbone and pyramid, once for all sizes; the rest has irregular shapes and stays eager."""
        self.body.compile(dynamic=True, options=DYNAMIC)

    def no_weight_decay(self) -> set[str]:
        """Return the parameters that the backbone exempts from weight decay."""
        return parameters_without_decay(self.body.backbone, "body.backbone.model.")

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Return the groups for layer-wise learning rates: the layers of the backbone, then the heads."""
        return layer_groups(self.body.backbone, coarse, "body.backbone.model.")


def batch_images(images: Sequence[Tensor]) -> ImageList:
    """Normalise images, uint8 (3, h, w), and pad them right and below with zeros to a common multiple of 32."""
    h, w = (max(x.shape[i] for x in images) for i in (1, 2))
    out = images[0].new_zeros(len(images), 3, h + -h % 32, w + -w % 32, dtype=torch.float32)
    for place, image in zip(out, images, strict=True):
        place[:, : image.shape[1], : image.shape[2]] = normalise(image[None])[0]
    return ImageList(out, [(x.shape[1], x.shape[2]) for x in images])


@torch.no_grad()
def init_heads(model: MaskRCNN) -> None:
    """Initialise as mmdetection: Xavier for hidden layers, normal with 0.01 and 0.001 for class and box outputs."""
    box = model.roi_heads
    for layer in (box.box_head.fc6, box.box_head.fc7):
        nn.init.xavier_uniform_(layer.weight)
        nn.init.zeros_(layer.bias)
    for layer, std in ((box.box_predictor.cls_score, 0.01), (box.box_predictor.bbox_pred, 0.001)):
        nn.init.normal_(layer.weight, std=std)
        nn.init.zeros_(layer.bias)


class DetectionModel(DenseModel):
    """Settings of Mask R-CNN, of its backbone, and of the weights that they start from.

    Attributes:
        heads: sizes of the heads.
    """

    heads: Heads = Heads()

    def network(self, classes: int, size: int | tuple[int, int]) -> MaskRCNN:
        """Build the model with random weights."""
        return MaskRCNN(build_pyramid(self, size, self.heads.width), classes, self.heads)
