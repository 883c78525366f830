"""Average precision against pycocotools, on random and on real labels with crowds; merging of processes."""

import contextlib
import io
import json
import math
import os
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from pale.data.sources.coco import CocoFiles
from pale.data.sources.instances import SceneInstances, from_masks
from pale.data.sources.scenes import Scenes
from pale.tasks.detection.metric import (
    FIGURES,
    AveragePrecision,
    as_results,
    average_precision,
    image_score,
)


def oracle(images, labels, detections, categories, kind) -> tuple[list[float], np.ndarray]:
    """Return the figures of pycocotools in per cent, and the AP of each category."""
    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO()
        truth.dataset = {
            "info": {},
            "images": images,
            "annotations": [dict(e) | {"id": i} for i, e in enumerate(labels, start=1)],
            "categories": [{"id": c, "name": str(c)} for c in categories],
        }
        truth.createIndex()
        evaluation = COCOeval(truth, truth.loadRes([dict(d) for d in detections]), kind)
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    precision = evaluation.eval["precision"][:, :, :, 0, -1]
    precision = np.where(precision < 0, np.nan, precision)
    return [100 * v for v in evaluation.stats[:6]], 100 * precision.mean((0, 1))


def guesses(source, rng, noise: float) -> list[dict]:
    """Return detections from labels: moved, removed, duplicated, relabelled, with slightly informative scores."""
    out = []
    for i in range(len(source)):
        found = source.instances(i)
        h, w = found.size
        for k in range(len(found)):
            for _ in range(int(rng.integers(0, 4))):
                shift = rng.normal(0, noise, 2) * (found.boxes[k, 2:] - found.boxes[k, :2])
                mask = np.roll(found.subset(np.array([k])).masks()[0], shift.astype(int), (1, 0))
                moved = from_masks((h, w), [mask], [int(found.labels[k])])
                label = int(
                    found.labels[k] if rng.random() < 0.8 else rng.integers(len(source.classes))
                )
                entry = moved.annotations(source.image_id(i), source.categories)
                if entry:
                    out.append(
                        entry[0]
                        | {"category_id": source.categories[label], "score": float(rng.random())}
                    )
        left, top = rng.uniform(0, (w / 2, h / 2))
        mask = np.zeros((h, w), np.uint8)
        mask[int(top) : int(top) + h // 3, int(left) : int(left) + w // 3] = 1
        stray = from_masks((h, w), [mask], [0]).annotations(source.image_id(i), source.categories)[
            0
        ]
        out.append(stray | {"score": float(rng.random())})
    for entry in out:
        entry.pop("iscrowd"), entry.pop("area")
    return out


def compared(source, rng, noise=0.15):
    images = [
        {"id": source.image_id(i), "height": source.size(i)[0], "width": source.size(i)[1]}
        for i in range(len(source))
    ]
    labels = [
        entry
        for i in range(len(source))
        for entry in source.instances(i).annotations(source.image_id(i), source.categories)
    ]
    detections = guesses(source, rng, noise)
    for kind in ("bbox", "segm"):
        figures, table = average_precision(images, labels, detections, source.categories, kind)
        expected, per_class = oracle(images, labels, detections, source.categories, kind)
        for name, value in zip(FIGURES, expected, strict=True):
            if value < 0:
                assert math.isnan(figures[name]), name
            else:
                assert figures[name] == pytest.approx(value, abs=1e-4), (kind, name)
        np.testing.assert_allclose(table[:, 0], per_class, atol=1e-4)
        assert 5 < figures["ap50"] < 95


@pytest.mark.parametrize("seed", range(3))
def test_figures_are_pycocotools_on_random_detections(seed):
    compared(SceneInstances(Scenes(30, 120, seed, (1, 5))), np.random.default_rng(seed))


@pytest.mark.data
def test_figures_are_pycocotools_on_real_labels_with_crowds(project, tmp_path):
    path = Path(os.environ.get("PALE_DATA", project.parent / "shared/data")) / "coco-mini.tar"
    if not path.is_file():
        pytest.skip(f"{path} is not there; PALE_DATA names the folder")
    with tarfile.open(path) as tar:
        member = "coco-mini/annotations/instances_val2017.json"
        tar.extract(member, tmp_path, filter="data")
    source = CocoFiles(tmp_path / member, tmp_path)
    assert sum(int(source.instances(i).crowd.sum()) for i in range(len(source))) == 14
    compared(source, np.random.default_rng(0), noise=0.05)


def found_in(own, rng, size) -> dict[str, torch.Tensor]:
    """Return outputs of a model for an image of `size`: the labels, slightly moved."""
    scale = np.array([size[1] / own.size[1], size[0] / own.size[0]] * 2)
    boxes = own.boxes * scale + rng.normal(0, 1.5, own.boxes.shape)
    return {
        "boxes": torch.from_numpy(boxes).float(),
        "labels": torch.from_numpy(own.labels) + 1,
        "scores": torch.from_numpy(rng.random(len(own))).float(),
        "masks": torch.full((len(own), 28, 28), 0.9),
    }


class Fake(torch.nn.Module):
    """Returns the detections of `found_in` for any image."""

    def __init__(self, answers):
        super().__init__()
        self.answers = answers

    def forward(self, images):
        return [self.answers.pop(0) for _ in images.image_sizes]


def measured(source, parts):
    """Return the metric over parts of the dataset, one per process, merged in this order."""
    metrics = []
    for part in parts:
        rng = {i: np.random.default_rng(i) for i in part}
        own = [source.instances(i) for i in part]
        model = Fake([found_in(o, rng[i], (96, 96)) for i, o in zip(part, own, strict=True)])
        metric = AveragePrecision(source.classes, source.categories, True, source.image_id)
        for k in range(0, len(part), 2):
            pair = part[k : k + 2]
            batch = {
                "images": torch.zeros(len(pair), 3, 96, 96),
                "sizes": [(96, 96)] * len(pair),
                "instances": own[k : k + 2],
                "keys": torch.tensor([(0, i) for i in pair]),
            }
            metric.update(model, batch)
        metrics.append(metric)
    first = metrics[0]
    states = [
        json.loads(json.dumps(m.state())) for m in metrics
    ]  # plain values, as gathering sends them
    return first.merge(states), first.details()


def test_two_processes_give_the_figures_of_one():
    source = SceneInstances(Scenes(14, 64, 1, (1, 4)))
    one, details = measured(source, [list(range(14))])
    two, other = measured(source, [list(range(0, 14, 2)), list(range(1, 14, 2))])
    assert one == two
    assert details == other
    assert one["images"] == 14
    assert 10 < one["box_ap50"] <= 100
    assert len(details["gallery"]) == 12
    scores = [entry["f1"] for entry in details["gallery"]]
    assert scores == sorted(scores, reverse=True)
    rows = details["per_class"]
    assert sum(row["objects"] for row in rows) == sum(len(source.instances(i)) for i in range(14))
    few = SceneInstances(Scenes(1, 64, 1, (1, 1)))
    absent = [row for row in measured(few, [[0]])[1]["per_class"] if not row["objects"]]
    assert absent
    assert all(row["box_ap"] is None for row in absent)


def test_results_are_in_pixels_of_the_original_image_and_fit_json():
    mask = np.zeros((50, 80), np.uint8)
    mask[10:30, 20:60] = 1
    own = from_masks((50, 80), [mask], [1])
    found = {
        "boxes": torch.tensor([[40.0, 20, 120, 60]]),
        "labels": torch.tensor([2]),
        "scores": torch.tensor([0.75]),
        "masks": torch.ones(1, 28, 28),
    }
    (entry,) = json.loads(json.dumps(as_results(found, (100, 160), (50, 80), 7, [4, 9])))
    assert entry["bbox"] == [20, 10, 40, 20]
    assert (entry["image_id"], entry["category_id"], entry["score"]) == (7, 9, 0.75)
    assert entry["segmentation"] == own.shapes[0]
    assert image_score(own, [entry]) == 100
    assert image_score(own, []) == 0
    assert image_score(own, [entry, entry | {"bbox": [0, 0, 5, 5]}]) == pytest.approx(200 / 3)
    assert image_score(own.subset(np.array([False])), []) == 100


def test_no_detections_give_zero_and_no_objects_are_an_error():
    source = SceneInstances(Scenes(3, 48, 0, (1, 2)))
    metric = AveragePrecision(source.classes, source.categories, True, source.image_id)
    labels = [
        e for i in range(3) for e in source.instances(i).annotations(i + 1, source.categories)
    ]
    images = [{"id": i + 1, "height": 48, "width": 48, "index": i} for i in range(3)]
    figures = metric.merge([(images, labels, [], [])])
    assert figures["box_ap"] == figures["mask_ap50"] == 0
    with pytest.raises(ValueError, match="the validation set has no object"):
        metric.merge([(images, [], [], [])])
    crowds = [entry | {"iscrowd": 1} for entry in labels]
    with pytest.raises(ValueError, match="the validation set has no object"):
        metric.merge([(images, crowds, [], [])])
