"""Write predictions as annotations that other tools import: COCO (CVAT, FiftyOne), YOLO and Label Studio.

Images are named relative to the given folder, because these tools look them up there. A region is a box, a shape, or
both; without either it is a class of the whole image, which only Label Studio supports. A segmenter's class
`background` is not an object and is left out. Shapes are exact: run-length codes, or outlines along the edges of
pixels.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, TextIO
from urllib.parse import quote

import numpy as np
import yaml
from numpy.typing import NDArray

from ..core.escaping import escape_html
from ..data import rle
from ..data.outlines import join_outlines, outlines
from ..data.reading import display_name
from ..data.sources.paths import output_stem
from ..errors import DataError, SettingsError
from ..tasks.prediction import Prediction, Region
from .bundle import ModelBundle

AnnotationFormat = Literal["coco", "yolo", "label-studio"]
BACKGROUND = "background"
LOCAL_FILES = "/data/local-files/?d="  # URL prefix of Label Studio with local storage
RUN_SIZES = (3, 4, 8, 16)  # bits of a run length in Label Studio's code


class AnnotationWriter(ABC):
    """Writes the regions of predictions.

    Args:
        folder: existing folder for the files.
        classes: class names of the model.
        roots: folders that image names are relative to; other images are named without a folder.
    """

    whole_images: ClassVar[bool] = False  # whether a class of a whole image can be written

    def __init__(self, folder: Path, classes: Sequence[str], roots: Sequence[Path] = ()) -> None:
        self.folder, self.roots = folder, roots
        self.classes = [name for name in classes if name != BACKGROUND]
        self._number = {name: i for i, name in enumerate(self.classes)}

    def add(self, prediction: Prediction) -> None:
        """Write one prediction."""
        regions = [r for r in prediction.regions() if r.label != BACKGROUND]
        if not self.whole_images and any(r.box is None and r.shape is None for r in regions):
            raise SettingsError(
                "a classifier has no boxes or shapes, which this format needs; use --format label-studio"
            )
        self.write(prediction, self._relative(prediction.name), regions)

    @abstractmethod
    def write(self, prediction: Prediction, name: str, regions: Sequence[Region]) -> None:
        """Write the regions of an image."""

    def close(self) -> None:
        """Complete the files."""
        return None

    def _relative(self, name: str) -> str:
        path = Path(name)
        for root in self.roots:
            if path.is_relative_to(display_name(root)):
                inside = path.relative_to(display_name(root))
                # The name may be one of an archive: every relative path is relative to ".".
                return (
                    path.name if ".." in inside.parts or inside.is_absolute() else inside.as_posix()
                )
        return path.name


class CocoWriter(AnnotationWriter):
    """Writes coco.json: ids from 1, boxes, areas, shapes as run-length codes, scores."""

    def __init__(self, folder: Path, classes: Sequence[str], roots: Sequence[Path] = ()) -> None:
        super().__init__(folder, classes, roots)
        categories = [
            {"id": i, "name": name, "supercategory": ""}
            for i, name in enumerate(self.classes, start=1)
        ]
        self.content: dict[str, list[dict[str, Any]]] = {
            "images": [],
            "annotations": [],
            "categories": categories,
        }

    def write(self, prediction: Prediction, name: str, regions: Sequence[Region]) -> None:
        """Add an image."""
        w, h = prediction.image.size
        number = len(self.content["images"]) + 1
        entry = {"id": number, "file_name": name, "width": w, "height": h}
        self.content["images"].append(entry)
        for region in regions:
            box = region.bounds((h, w))
            found = {
                "id": len(self.content["annotations"]) + 1,
                "image_id": number,
                "category_id": self._number[region.label] + 1,
                "bbox": box,
                "area": box[2] * box[3] if region.shape is None else rle.area(region.shape, (h, w)),
                "iscrowd": 0,
                "segmentation": [] if region.shape is None else region.shape,
            }
            score = {} if region.score is None else {"score": region.score}
            self.content["annotations"].append(found | score)

    def close(self) -> None:
        """Write the file."""
        (self.folder / "coco.json").write_text(json.dumps(self.content) + "\n", encoding="utf-8")


class YoloWriter(AnnotationWriter):
    """Writes yolo/labels/NAME.txt and yolo/data.yaml; yolo/images is the place for the images.

    A shape is a polygon, an object without one a box. Parts and holes of a shape are joined to one polygon. There is no
    score, so that the files can be used as labels.
    """

    def __init__(self, folder: Path, classes: Sequence[str], roots: Sequence[Path] = ()) -> None:
        super().__init__(folder, classes, roots)
        self.folder = folder / "yolo"
        self.folder.mkdir(exist_ok=True)
        self._written: set[Path] = set()
        names = {"names": dict(enumerate(self.classes))}
        text = yaml.safe_dump({"train": "images", "val": "images"} | names, sort_keys=False)
        (self.folder / "data.yaml").write_text(text)

    def write(self, prediction: Prediction, name: str, regions: Sequence[Region]) -> None:
        """Write the label file of an image; it is empty without objects."""
        w, h = prediction.image.size
        lines = []
        for region in regions:
            values = (
                _centre(region.bounds((h, w)), (h, w))
                if region.shape is None
                else _polygon(region.shape, (h, w))
            )
            if values:
                number = self._number[region.label]
                lines.append(" ".join([str(number), *(f"{v:.7g}" for v in values)]))
        path = self.folder / "labels" / Path(output_stem(name)).with_suffix(".txt")
        if path in self._written:
            raise DataError(
                f"{name} and another image have one label file, {path}; YOLO names labels without the image's suffix: "
                "rename one of them, or predict them into different folders"
            )
        self._written.add(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(line + "\n" for line in lines))


class LabelStudioWriter(AnnotationWriter):
    """Writes label_studio.json, tasks with predictions, and label_studio.xml, the labelling configuration.

    A shape is a brush region, a box a rectangle, a class of the whole image a choice.

    Args:
        folder: where files are written.
        classes: names of the model.
        roots: folders that images are named relative to.
        url: beginning of the images' addresses.
        model: name of the model, shown with its predictions.
    """

    whole_images = True

    def __init__(
        self,
        folder: Path,
        classes: Sequence[str],
        roots: Sequence[Path] = (),
        url: str = LOCAL_FILES,
        model: str = "pale",
    ) -> None:
        super().__init__(folder, classes, roots)
        self.url, self.model = url, model
        self._kinds: set[str] = set()
        self._file: TextIO = (folder / "label_studio.json").open("w", encoding="utf-8")
        self._file.write("[")
        self._separator = "\n"

    def write(self, prediction: Prediction, name: str, regions: Sequence[Region]) -> None:
        """Add a task."""
        w, h = prediction.image.size
        results = [self._result(i, region, (h, w)) for i, region in enumerate(regions)]
        scores = [region.score for region in regions if region.score is not None]
        found: dict[str, Any] = {"model_version": self.model, "result": results}
        if scores:
            found["score"] = float(np.mean(scores))
        task = {"data": {"image": self.url + quote(name)}, "predictions": [found]}
        self._file.write(self._separator + json.dumps(task))
        self._file.flush()
        self._separator = ",\n"

    def _result(self, place: int, region: Region, size: tuple[int, int]) -> dict[str, Any]:
        h, w = size
        value: dict[str, Any] = {}
        kind = "choices"
        if region.shape is not None:
            kind = "brushlabels"
            value = {"format": "rle", "rle": encode_brush(rle.draw(region.shape, size))}
        elif region.box is not None:
            kind = "rectanglelabels"
            left, top, width, height = region.box
            value = {"x": 100 * left / w, "y": 100 * top / h, "rotation": 0}
            value |= {"width": 100 * width / w, "height": 100 * height / h}
        self._kinds.add(kind)
        found = {
            "id": f"region-{place}",
            "type": kind,
            "from_name": kind.removesuffix("labels"),
            "to_name": "image",
            "original_width": w,
            "original_height": h,
            "image_rotation": 0,
            "value": value | {kind: [region.label]},
        }
        return found if region.score is None else found | {"score": region.score}

    def close(self) -> None:
        """Complete the tasks and write the configuration."""
        self._file.write("]\n")
        self._file.close()
        kinds = sorted(self._kinds) or ["rectanglelabels"]
        tags = {"choices": "Choices", "brushlabels": "BrushLabels"}
        lines = ["<View>", '  <Image name="image" value="$image"/>']
        for kind in kinds:
            tag = tags.get(kind, "RectangleLabels")
            item = "Choice" if kind == "choices" else "Label"
            lines.append(f'  <{tag} name="{kind.removesuffix("labels")}" toName="image">')
            lines += [f'    <{item} value="{escape_html(name)}"/>' for name in self.classes]
            lines.append(f"  </{tag}>")
        text = "\n".join([*lines, "</View>"]) + "\n"
        (self.folder / "label_studio.xml").write_text(text, encoding="utf-8")


def annotation_writer(
    form: AnnotationFormat,
    folder: Path,
    model: ModelBundle,
    inputs: Sequence[Path],
    url: str | None = None,
) -> AnnotationWriter:
    """Return the writer of a format.

    Args:
        form: name of the format.
        folder: where files are written; it exists.
        model: whose predictions are written.
        inputs: predicted images and folders; images are named relative to the folders.
        url: Label Studio: beginning of the images' addresses; None: its local storage.
    """
    roots = [path for path in inputs if path.is_dir()]
    if form == "label-studio":
        return LabelStudioWriter(
            folder, model.classes, roots, LOCAL_FILES if url is None else url, model.name
        )
    return {"coco": CocoWriter, "yolo": YoloWriter}[form](folder, model.classes, roots)


def _centre(box: Sequence[float], size: tuple[int, int]) -> list[float]:
    left, top, width, height = box
    h, w = size
    return [(left + width / 2) / w, (top + height / 2) / h, width / w, height / h]


def _polygon(shape: object, size: tuple[int, int]) -> list[float]:
    loops = outlines(rle.draw(shape, size))
    if not loops:
        return []
    h, w = size
    points: list[float] = (join_outlines(loops) / (w, h)).ravel().tolist()
    return points


def encode_brush(mask: NDArray[np.uint8]) -> list[int]:
    """Return the run-length code of Label Studio's brush for a mask (h, w) of 0 and 1.

    The code is a string of bits for the values of an RGBA image, here 0 or 255 in all four channels: their number (32
    bits), the bits of a value less one (5), those of four kinds of run lengths less one (4 each), then for each run a
    one, the kind (2), the length less one, and the value.
    """
    pixels = mask.ravel() > 0
    starts = np.concatenate([[0], np.flatnonzero(pixels[1:] != pixels[:-1]) + 1])
    lengths = 4 * np.diff([*starts, len(pixels)])
    bits = [f"{4 * len(pixels):032b}", f"{7:05b}", *(f"{size - 1:04b}" for size in RUN_SIZES)]
    longest = 1 << RUN_SIZES[-1]
    for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
        value = "11111111" if pixels[start] else "00000000"
        while length > 0:
            part = min(length, longest)
            kind = next(i for i, size in enumerate(RUN_SIZES) if part <= 1 << size)
            bits.append(f"1{kind:02b}{part - 1:0{RUN_SIZES[kind]}b}{value}")
            length -= part
    text = "".join(bits)
    text += "0" * (-len(text) % 8)
    return list(int(text, 2).to_bytes(len(text) // 8, "big"))
