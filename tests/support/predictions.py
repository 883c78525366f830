"""Predictions made by hand, with objects whose shapes have parts and holes."""

from pathlib import Path

import numpy as np
from PIL import Image

from pale.data import rle
from pale.data.sources.class_list import palette
from pale.tasks.classification.inference import Classified
from pale.tasks.detection.inference import Detected
from pale.tasks.segmentation.inference import Segmented

CLASSES = ("cat", "dog <b>&'", "bird")
SIZE = (40, 60)  # height and width


def shapes() -> list[np.ndarray]:
    """Return a rectangle, a ring, and an object of two parts."""
    masks = [np.zeros(SIZE, np.uint8) for _ in range(3)]
    masks[0][3:20, 4:31] = 1
    masks[1][20:38, 30:58] = 1
    masks[1][25:30, 40:50] = 0
    masks[2][0:5, 40:60] = masks[2][8:14, 35:41] = 1
    return masks


def detected(name: str, masks: bool = True) -> Detected:
    """Return three objects, the boxes a fraction of a pixel larger than the shapes."""
    objects = []
    for i, mask in enumerate(shapes()):
        left, top, right, bottom = rle.box_of(mask)
        entry = {
            "category_id": 10 * i + 10,
            "bbox": [left + 0.25, top + 0.5, right - left - 0.25, bottom - top - 0.5],
            "score": 0.9 - 0.1 * i,
        }
        objects.append(entry | ({"segmentation": rle.encode(mask)} if masks else {}))
    image = Image.new("RGB", SIZE[::-1], "green")
    return Detected(name, image, objects, CLASSES, (10, 20, 30))


def nothing(name: str) -> Detected:
    """Return a prediction without objects."""
    return Detected(name, Image.new("RGB", SIZE[::-1]), [], CLASSES, (10, 20, 30))


def segmented(name: str) -> Segmented:
    """Return a mask of background and three classes."""
    labels = np.zeros(SIZE, np.uint8)
    for i, mask in enumerate(shapes(), start=1):
        labels[mask > 0] = i
    names = ("background", *CLASSES)
    return Segmented(name, Image.new("RGB", SIZE[::-1]), labels, names, palette(4))


def classified(name: str) -> Classified:
    """Return the probabilities of two classes."""
    return Classified(name, Image.new("RGB", SIZE[::-1]), {"dog <b>&'": 0.8, "cat": 0.2})


def written(writer, *predictions) -> Path:
    """Write predictions and return the folder."""
    for prediction in predictions:
        writer.add(prediction)
    writer.close()
    return writer.folder
