"""Predictions in a folder: a line of JSON and rows of CSV for each picture as it comes, and what is better seen."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from .results import Detected, Prediction, Segmented

QUALITY = 90  # of JPEG


class Folder:
    """Writes predictions below a folder; what was added stays, whenever it ends.

    `predictions.jsonl` and `predictions.csv` grow with each picture. Segmentation adds NAME_mask.png (class numbers, in
    their colours), detection `objects.json` in COCO's format when the folder is closed.

    Args:
        path: the folder; it is made. Results of an earlier call in it are replaced.
        drawn: write NAME_predicted.jpg, the prediction drawn on the picture.
    """

    def __init__(self, path: Path, drawn: bool = True) -> None:
        self.path, self.drawn = path, drawn
        path.mkdir(parents=True, exist_ok=True)
        self._lines: TextIO = (path / "predictions.jsonl").open("w")
        self._rows: TextIO = (path / "predictions.csv").open("w", newline="")
        self._writer: csv.DictWriter[str] | None = None
        self._images: list[dict[str, Any]] = []
        self._objects: list[dict[str, Any]] = []
        self._categories: list[dict[str, Any]] = []

    def __enter__(self) -> Folder:
        return self

    def add(
        self, said: Prediction, stem: str | None = None, where: Mapping[str, Any] | None = None
    ) -> None:
        """One prediction.

        Args:
            said: what was predicted.
            stem: its pictures are named by this; none: no pictures.
            where: what else a line and a row should tell, such as the frame of a video.
        """
        more = dict(where or {})
        self._lines.write(json.dumps(said.plain() | more) + "\n")
        self._lines.flush()
        for row in said.rows():
            full = row | more
            if self._writer is None:
                self._writer = csv.DictWriter(self._rows, list(full))
                self._writer.writeheader()
            self._writer.writerow({k: v for k, v in full.items() if k in self._writer.fieldnames})
        self._rows.flush()
        if isinstance(said, Detected):
            self._collect(said)
        if stem is not None:
            self._draw(said, stem)

    def _draw(self, said: Prediction, stem: str) -> None:
        target = self.path / stem
        target.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(said, Segmented):
            said.mask().save(f"{target}_mask.png")
        if self.drawn:
            said.draw().save(f"{target}_predicted.jpg", quality=QUALITY)

    def _collect(self, said: Detected) -> None:
        number = len(self._images) + 1
        about = {"file_name": said.name, "width": said.picture.width, "height": said.picture.height}
        self._images.append({"id": number} | about)
        self._objects += [{"image_id": number} | entry for entry in said.objects]
        pairs = zip(said.categories, said.classes, strict=True)
        self._categories = [{"id": c, "name": n} for c, n in pairs]

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the files; objects.json holds what was found until now."""
        self._lines.close()
        self._rows.close()
        if self._images:
            content = {"images": self._images, "categories": self._categories}
            content["annotations"] = self._objects
            (self.path / "objects.json").write_text(json.dumps(content) + "\n")
