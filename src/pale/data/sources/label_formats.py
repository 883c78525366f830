"""Formats of datasets with one label file per image: detect and read them."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from .label_files import THREADS, LabelledImages
from .voc import looks_like_voc, read_voc
from .yolo import looks_like_yolo, read_yolo

LabelFormat = Literal["yolo", "voc"]


def read_labels(
    form: LabelFormat, root: Path, split: str, whole: bool = False, threads: int = THREADS
) -> LabelledImages:
    """Read a split of a dataset.

    Args:
        form: format of the labels.
        root: folder of the dataset; for YOLO also its data.yaml.
        split: name of the split.
        whole: take all images if the dataset has no such split, for holding out a share of them.
        threads: number of threads that read files.
    """
    read = read_yolo if form == "yolo" else read_voc
    return read(root, split, whole, threads)


def detect_format(root: Path) -> LabelFormat | None:
    """Return the format of a dataset, detected from its folders, or None."""
    return "yolo" if looks_like_yolo(root) else "voc" if looks_like_voc(root) else None
