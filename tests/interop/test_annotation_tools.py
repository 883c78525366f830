"""Annotation tools read what `pale predict --format` writes, and we read what they write (`make test-interop`).

No server and no database: the readers, writers and validators of each project are called as a library.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from interop.models import client_warnings
from PIL import Image
from support.label_files import segmentation_on
from support.predictions import (
    CLASSES,
    SIZE,
    classified,
    detected,
    nothing,
    segmented,
    shapes,
    written,
)

from pale.data import rle
from pale.data.sources.coco import CocoFiles
from pale.data.sources.label_formats import read_labels
from pale.predict.annotations import CocoWriter, LabelStudioWriter, YoloWriter

pytestmark = pytest.mark.slow
ROOTS = [Path("photos")]
BOXES = [entry["bbox"] for entry in detected("a").objects]


def save_images(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("a", "b"):
        Image.new("RGB", SIZE[::-1]).save(folder / f"{name}.png")
    return folder


def write_coco(root: Path) -> tuple[Path, Path]:
    """Write an image with three objects and one without; return the images and the annotations."""
    root.mkdir(exist_ok=True)
    written(CocoWriter(root, CLASSES, ROOTS), detected("photos/a.png"), nothing("photos/b.png"))
    return save_images(root / "images"), root / "coco.json"


@client_warnings
class TestLabelStudio:
    client = "label-studio-sdk"

    def tasks(self, folder: Path, *predictions: object) -> tuple[str, list[dict]]:
        written(LabelStudioWriter(folder, CLASSES, ROOTS), *predictions)
        config = (folder / "label_studio.xml").read_text()
        return config, json.loads((folder / "label_studio.json").read_text())

    def test_predictions_fit_their_configuration(self, tmp_path: Path) -> None:
        """`LabelInterface.validate` and `validate_prediction`: boxes, brushes and choices of `--format label-studio`"""
        from label_studio_sdk.label_interface import LabelInterface

        found = (detected("photos/a.png", masks=False), detected("photos/b.png"))
        config, tasks = self.tasks(tmp_path, *found, segmented("c.png"), classified("d.png"))
        interface = LabelInterface(config)
        interface.validate()
        assert len(tasks) == 4
        for task in tasks:
            assert interface.validate_task({"data": task["data"]})
            (prediction,) = task["predictions"]
            assert interface.validate_prediction(prediction, return_errors=True) == []
            wrong = json.loads(json.dumps(prediction).replace('"image"', '"picture"'))
            assert not interface.validate_prediction(wrong)

    def test_tasks_are_its_objects(self, tmp_path: Path) -> None:
        """`label_interface.objects`: predictions as `PredictionValue` with regions"""
        from label_studio_sdk.label_interface.objects import PredictionValue

        _, tasks = self.tasks(tmp_path, detected("photos/a.png", masks=False))
        value = PredictionValue(**tasks[0]["predictions"][0])
        assert value.score == pytest.approx(0.8)
        assert len(value.result) == 3

    def test_brushes_are_decoded_to_the_same_masks(self, tmp_path: Path) -> None:
        """`converter.brush.decode_rle`: every pixel of shapes with holes and parts"""
        from label_studio_sdk.converter import brush

        _, tasks = self.tasks(tmp_path, detected("photos/a.png"))
        for result, mask in zip(tasks[0]["predictions"][0]["result"], shapes(), strict=True):
            decoded = brush.decode_rle(result["value"]["rle"]).reshape(*SIZE, 4)
            assert np.array_equal(decoded[..., 3] > 0, mask > 0)

    def test_its_converter_gives_the_same_boxes(self, tmp_path: Path) -> None:
        """`converter.Converter.convert_to_coco` of the predictions, as if they had been accepted: the same boxes"""
        from label_studio_sdk.converter import Converter

        config, tasks = self.tasks(tmp_path, detected("photos/a.png", masks=False))
        image = save_images(tmp_path / "images") / "a.png"
        task = {"id": 1, "data": {"image": str(image)}}
        accepted = {"id": 1, "completed_by": 1, "result": tasks[0]["predictions"][0]["result"]}
        (tmp_path / "tasks.json").write_text(json.dumps([task | {"annotations": [accepted]}]))
        converter = Converter(config, str(tmp_path), download_resources=False)
        converter.convert_to_coco(str(tmp_path / "tasks.json"), str(tmp_path / "out"), is_dir=False)
        found = json.loads((tmp_path / "out/result.json").read_text())
        names = {c["id"]: c["name"] for c in found["categories"]}
        assert [names[e["category_id"]] for e in found["annotations"]] == list(CLASSES)
        assert np.array([e["bbox"] for e in found["annotations"]]) == pytest.approx(
            np.array(BOXES), abs=1e-3
        )


@client_warnings
class TestDatumaro:
    client = "datumaro"

    def dataset(self, root: Path):
        import datumaro

        images, annotations = write_coco(root / "written")
        (root / "coco/annotations").mkdir(parents=True)
        shutil.copytree(images, root / "coco/images/default")
        shutil.copy(annotations, root / "coco/annotations/instances_default.json")
        return datumaro.Dataset.import_from(str(root / "coco"), "coco_instances")

    def test_coco_is_imported_as_by_cvat(self, tmp_path: Path) -> None:
        """Importer `coco_instances`, which CVAT uses: the same boxes, masks and classes from `--format coco`"""
        found = {item.id: item.annotations for item in self.dataset(tmp_path)}
        assert found["b"] == []
        masks = {a.label: np.asarray(a.image) for a in found["a"] if hasattr(a, "image")}
        boxes = {a.label: a.get_bbox() for a in found["a"] if not hasattr(a, "image")}
        for i, mask in enumerate(shapes()):
            assert np.array_equal(masks[i] > 0, mask > 0)
            assert boxes[i] == pytest.approx(BOXES[i])

    def test_its_pascal_voc_is_read(self, tmp_path: Path) -> None:
        """Exporter `voc`: our reader gives the same masks and classes; boxes, which it counts from 0, within a pixel"""
        self.dataset(tmp_path).export(str(tmp_path / "voc"), "voc", save_media=True)
        read = read_labels("voc", tmp_path / "voc", "default").require_readable()
        found = CocoFiles(read.origin, read.folder, content=read.content)
        assert found.classes == list(CLASSES)
        own = found.instances([found.name(i).endswith("a.png") for i in range(2)].index(True))
        for label, box, mask in zip(own.labels, own.boxes, own.masks(), strict=True):
            x, y, w, h = BOXES[label]
            assert box == pytest.approx([x, y, x + w, y + h], abs=1)
            assert np.array_equal(mask, shapes()[label])
        (tmp_path / "voc/ImageSets/Segmentation/default.txt").write_text("a\n")
        data = segmentation_on("voc", tmp_path / "voc", data__val="default").data
        assert np.array_equal(data.val_source(0).mask(0), segmented("a").labels)


@client_warnings
class TestFiftyOne:
    client = "fiftyone"

    def test_coco_is_imported(self, tmp_path: Path) -> None:
        """`COCODetectionDatasetImporter` without a database: the same boxes, masks, classes and scores"""
        from fiftyone.utils.coco import COCODetectionDatasetImporter

        images, annotations = write_coco(tmp_path)
        importer = COCODetectionDatasetImporter(
            data_path=str(images), labels_path=str(annotations), label_types=["segmentations"]
        )
        with importer:
            found = {Path(path).name: labels for path, _, labels in importer}
        assert not found["b.png"]
        for i, entry in enumerate(found["a.png"].detections):
            assert entry.label == CLASSES[i]
            assert entry.confidence == pytest.approx(0.9 - 0.1 * i)
            sides = np.array([SIZE[1], SIZE[0]] * 2)
            assert np.array(entry.bounding_box) * sides == pytest.approx(BOXES[i])
            x, y, w, h = BOXES[i]  # to which it cuts masks
            rows, columns = slice(round(y), round(y + h)), slice(round(x), round(x + w))
            assert np.array_equal(entry.mask, shapes()[i][rows, columns] > 0)


@client_warnings
class TestSupervision:
    client = "supervision"

    def test_yolo_is_read(self, tmp_path: Path) -> None:
        """`DetectionDataset.from_yolo`: the same classes and boxes; OpenCV draws masks a pixel wider"""
        import supervision

        root = written(
            YoloWriter(tmp_path, CLASSES, ROOTS), detected("photos/a.png"), nothing("photos/b.png")
        )
        images = save_images(root / "images")
        found = supervision.DetectionDataset.from_yolo(
            str(images), str(root / "labels"), str(root / "data.yaml"), force_masks=True
        )
        assert found.classes == list(CLASSES)
        objects = {Path(path).name: entry for path, _, entry in found}
        assert len(objects["b.png"]) == 0
        own = objects["a.png"]
        assert own.class_id.tolist() == [0, 1, 2]
        for box, mask, ours in zip(own.xyxy, own.mask, shapes(), strict=True):
            assert box == pytest.approx(rle.box_of(ours), abs=1e-3)
            grown = np.pad(ours, 1)
            near = np.max([np.roll(grown, (y, x), (0, 1)) for x in (0, 1) for y in (0, 1)], 0)
            assert mask[ours > 0].all()
            outside = mask & (near[1:-1, 1:-1] == 0)
            assert outside.sum() <= 8  # of the edge that joins two parts

    @pytest.mark.parametrize("kind", ["yolo", "voc"])
    def test_what_it_writes_is_read(self, tmp_path: Path, kind: str) -> None:
        """`as_yolo` and `as_pascal_voc` of boxes: our reader gives the same boxes and classes"""
        import supervision

        images, annotations = write_coco(tmp_path)
        found = supervision.DetectionDataset.from_coco(str(images), str(annotations))
        root = tmp_path / "out"
        for _, _, entry in found:
            entry.mask = None
            entry.xyxy = np.round(entry.xyxy)
        boxes = np.round([[x, y, x + w, y + h] for x, y, w, h in BOXES])
        if kind == "yolo":
            found.as_yolo(*(str(root / p) for p in ("images/train", "labels/train", "data.yaml")))
        else:
            found.as_pascal_voc(str(root / "JPEGImages"), str(root / "Annotations"))
        read = read_labels(kind, root, "train", whole=True).require_readable()
        ours = CocoFiles(read.origin, read.folder, content=read.content)
        own = ours.instances(0)
        assert [ours.classes[label] for label in own.labels] == list(CLASSES)
        # It writes five digits.
        assert own.boxes == pytest.approx(boxes, abs=2e-5 * max(SIZE) + 1e-6)
