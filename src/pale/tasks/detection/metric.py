"""COCO's average precision of boxes and masks by faster-coco-eval, and the best and worst images for the report.

Each process keeps its detections and labels in COCO's JSON format, with masks as run lengths; the lists of all
processes are concatenated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torchvision.models.detection.image_list import ImageList

from ...data import rle
from ...data.sources.instances import Instances
from ...errors import DataError
from ..base import Batch
from ..gallery import best_and_worst
from ..prediction import Json

# Images, labels, detections, and scores of the images.
State = tuple[list[Json], list[Json], list[Json], list[Json]]
Kind = Literal["bbox", "segm"]
FIGURES = ("ap", "ap50", "ap75", "ap_small", "ap_medium", "ap_large")
PREFIX: dict[Kind, str] = {"bbox": "box", "segm": "mask"}
MIN_SCORE = 0.3  # of detections that are shown, and that count for the score of an image


def average_precision(
    images: Sequence[Json],
    labels: Sequence[Json],
    detections: Sequence[Json],
    categories: Sequence[int],
    kind: Kind,
) -> tuple[dict[str, float], NDArray[np.float64]]:
    """Return the figures in per cent, and AP, AP50 and AP75 of each category (k, 3); NaN without any object.

    Args:
        images: "id", "height", "width" of each.
        labels: COCO's annotations; their ids are set here.
        detections: COCO's results.
        categories: ids of the categories.
        kind: boxes or masks.
    """
    rle.codec()  # raises an error if the package is missing
    from faster_coco_eval import COCO, COCOeval_faster

    listed = [{"id": c, "name": str(c)} for c in categories]
    numbered = [entry | {"id": i} for i, entry in enumerate(labels, start=1)]
    if not detections or not labels:
        there = {entry["category_id"] for entry in labels if not entry["iscrowd"]}
        rows = [[0.0 if c in there else np.nan] * 3 for c in categories]
        return dict.fromkeys(FIGURES, 0.0 if there else np.nan), np.array(rows)
    truth = COCO({"images": list(images), "annotations": numbered, "categories": listed})
    found = truth.loadRes([dict(d) for d in detections])
    evaluation = COCOeval_faster(truth, found, iouType=kind, print_function=lambda *a, **k: None)
    evaluation.params.catIds = list(categories)
    evaluation.params.imgIds = [image["id"] for image in images]
    evaluation.evaluate()
    evaluation.accumulate()
    evaluation.summarize()
    figures = {
        name: 100 * float(value) for name, value in zip(FIGURES, evaluation.stats[:6], strict=True)
    }
    figures = {name: v if v >= 0 else float("nan") for name, v in figures.items()}
    precision = np.asarray(evaluation.eval["precision"])[:, :, :, 0, -1]  # (iou, recall, k)
    precision = np.where(precision < 0, np.nan, precision)
    columns = [precision.mean((0, 1)), precision[0].mean(0), precision[5].mean(0)]
    return figures, 100 * np.stack(columns, 1)


class AveragePrecision:
    """Average precision of the detections in the validation set.

    Args:
        names: names of the classes.
        categories: their ids in COCO's JSON.
        masks: evaluate masks too.
        image_id: returns the id of an image from its index.
    """

    def __init__(
        self,
        names: Sequence[str],
        categories: Sequence[int],
        masks: bool,
        image_id: Callable[[int], int],
    ) -> None:
        self.names, self.categories, self.masks = list(names), list(categories), masks
        self.image_id = image_id
        self.images: list[Json] = []
        self.labels: list[Json] = []
        self.detections: list[Json] = []
        self.tables: dict[Kind, NDArray[np.float64]] = {}
        self.scores: list[Json] = []

    @torch.no_grad()
    def update(self, model: nn.Module, batch: Batch) -> None:
        """Add the detections of a prepared batch."""
        found = model(ImageList(batch["images"], batch["sizes"]))
        for entry, size, own, key in zip(
            found, batch["sizes"], batch["instances"], batch["keys"], strict=True
        ):
            index = int(key[1])
            identity = self.image_id(index)
            h, w = own.size
            self.images.append({"id": identity, "height": h, "width": w, "index": index})
            self.labels += own.annotations(identity, self.categories)
            results = as_results(entry, size, own.size, identity, self.categories)
            self.detections += results
            self.scores.append({"index": index, "f1": image_score(own, results)})

    def state(self) -> State:
        """Return images, labels, detections, and scores of the images."""
        return self.images, self.labels, self.detections, self.scores

    def merge(self, states: Sequence[State]) -> dict[str, float]:
        """Return the figures over all processes."""
        self.images = sorted((i for s in states for i in s[0]), key=lambda image: image["index"])
        place = {image["id"]: image["index"] for image in self.images}
        self.labels, self.detections = (
            sorted((x for s in states for x in s[part]), key=lambda x: place[x["image_id"]])
            for part in (1, 2)
        )
        self.scores = [score for s in states for score in s[3]]
        kinds: tuple[Kind, ...] = ("bbox", "segm") if self.masks else ("bbox",)
        figures: dict[str, float] = {}
        for kind in kinds:
            found, self.tables[kind] = average_precision(
                self.images, self.labels, self.detections, self.categories, kind
            )
            # NaN: there are no objects of this size.
            figures |= {f"{PREFIX[kind]}_{n}": v for n, v in found.items() if v == v}
        if "box_ap" not in figures:
            raise DataError("the validation set has no object, so nothing can be measured")
        return figures | {"images": float(len(self.images))}

    def per_class(self) -> list[Json]:
        """Return a row for each class, with None for figures that are undefined."""
        count = dict.fromkeys(self.categories, 0)
        for label in self.labels:
            count[label["category_id"]] += not label["iscrowd"]
        rows: list[Json] = []
        for i, name in enumerate(self.names):
            row: Json = {"class": name, "objects": count[self.categories[i]]}
            for kind, table in self.tables.items():
                for column, value in zip(("ap", "ap50", "ap75"), table[i], strict=True):
                    row[f"{PREFIX[kind]}_{column}"] = None if np.isnan(value) else float(value)
            rows.append(row)
        return rows

    def details(self) -> Json:
        """Return class names, the table of classes, and the best and worst images with their detections."""
        shown = best_and_worst(self.scores, "f1")
        wanted = {s["index"] for s in shown}
        place = {image["id"]: image["index"] for image in self.images}
        by_image: dict[int, list[Json]] = {}
        for found in self.detections:
            index = place[found["image_id"]]
            if index in wanted and found["score"] >= MIN_SCORE:
                by_image.setdefault(index, []).append(found)
        gallery = [s | {"detections": by_image.get(s["index"], [])} for s in shown]
        return {"classes": self.names, "per_class": self.per_class(), "gallery": gallery}


def as_results(
    found: dict[str, Tensor],
    size: tuple[int, int],
    own: tuple[int, int],
    identity: int,
    categories: Sequence[int],
) -> list[Json]:
    """Return the detections in one image as COCO's results, in pixels of the original image.

    Args:
        found: output of the model.
        size: height and width of the model's input.
        own: height and width of the original image.
        identity: id of the image.
        categories: id of each class.
    """
    scale = np.array([own[1] / size[1], own[0] / size[0]] * 2)
    boxes = found["boxes"].double().cpu().numpy() * scale
    scores, labels = found["scores"].float().cpu().tolist(), found["labels"].cpu().tolist()
    masks = found["masks"].float().cpu().numpy() if "masks" in found else None
    out = []
    for i, (left, top, right, bottom) in enumerate(boxes.tolist()):
        entry: Json = {
            "image_id": identity,
            "category_id": categories[labels[i] - 1],
            "bbox": [left, top, right - left, bottom - top],
            "score": scores[i],
        }
        if masks is not None:
            entry["segmentation"] = rle.encode(
                rle.paste_masks(masks[i : i + 1], boxes[i : i + 1], own)[0]
            )
        out.append(entry)
    return out


def image_score(own: Instances, results: Sequence[Json]) -> float:
    """Return the score of one image, 0 to 100: F1 of detections above `MIN_SCORE` at IoU 0.5, of any class."""
    own = own.subset(~own.crowd)
    boxes = [r["bbox"] for r in results if r["score"] >= MIN_SCORE]
    if not len(own) or not boxes:
        return 100.0 if len(own) == len(boxes) else 0.0
    guesses = np.array(boxes)
    guesses[:, 2:] += guesses[:, :2]
    low = np.maximum(own.boxes[:, None, :2], guesses[None, :, :2])
    high = np.minimum(own.boxes[:, None, 2:], guesses[None, :, 2:])
    inside = (high - low).clip(min=0).prod(-1)
    area = [(b[:, 2:] - b[:, :2]).prod(-1) for b in (own.boxes, guesses)]
    overlap = inside / (area[0][:, None] + area[1][None] - inside)
    hits = 0
    while overlap.size and overlap.max() >= 0.5:
        i, j = np.unravel_index(overlap.argmax(), overlap.shape)
        overlap = np.delete(np.delete(overlap, i, 0), j, 1)
        hits += 1
    return 200.0 * hits / (len(own) + len(boxes))
