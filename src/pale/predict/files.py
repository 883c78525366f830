"""Write predictions into a folder: JSON lines and CSV rows, one after the other, and drawn images."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from ..core.escaping import csv_row
from ..tasks.prediction import Collector, Prediction
from .annotations import AnnotationWriter

QUALITY = 90  # quality of JPEG files


class Folder:
    """Writes predictions into a folder; results so far are kept if the program ends early.

    `predictions.jsonl` and `predictions.csv` grow with each image. A task may add further images, such as NAME_mask.png
    of segmentation, and a file of all predictions when the folder is closed, such as objects.json of detection.

    Args:
        path: the folder; it is created. Results of an earlier call in it are replaced.
        drawn: write NAME_predicted.jpg, the prediction drawn on the image.
        flush: pass each line to the system immediately.
    """

    annotations: AnnotationWriter | None = (
        None  # writes the predictions in the format of another tool
    )

    def __init__(self, path: Path, drawn: bool = True, flush: bool = True) -> None:
        self.path, self.drawn, self.flush = path, drawn, flush
        path.mkdir(parents=True, exist_ok=True)
        self._lines: TextIO = (path / "predictions.jsonl").open("w", encoding="utf-8")
        self._rows: TextIO = (path / "predictions.csv").open("w", newline="", encoding="utf-8")
        self._writer: Any = None
        self._columns: list[str] = []
        self._collector: Collector | None = None

    def __enter__(self) -> Folder:
        return self

    def add(
        self,
        prediction: Prediction,
        stem: str | None = None,
        where: Mapping[str, object] | None = None,
    ) -> None:
        """Write one prediction.

        Args:
            prediction: prediction to write.
            stem: prefix of the names of its images; None: no images are written.
            where: further values of its line and rows, such as the frame of a video.
        """
        more = dict(where or {})
        self._lines.write(json.dumps(prediction.plain() | more) + "\n")
        for row in prediction.rows():
            full = row | more
            if self._writer is None:
                self._writer, self._columns = csv.writer(self._rows), list(full)
                self._writer.writerow(csv_row(self._columns))
            self._writer.writerow(csv_row(full.get(name) for name in self._columns))
        if self.flush:
            self._lines.flush()
            self._rows.flush()
        if prediction.collector is not None:
            self._collector = self._collector or prediction.collector()
            self._collector.add(prediction)
        if self.annotations is not None:
            self.annotations.add(prediction)
        if stem is not None:
            self._draw(prediction, stem)

    def _draw(self, prediction: Prediction, stem: str) -> None:
        target = self.path / stem
        target.parent.mkdir(parents=True, exist_ok=True)
        for end, image in prediction.extra_images().items():
            image.save(f"{target}{end}")
        if self.drawn:
            prediction.draw().save(f"{target}_predicted.jpg", quality=QUALITY)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the files."""
        self.close()

    def close(self) -> None:
        """Close the files; the file of all predictions holds those so far."""
        if self._lines.closed:
            return
        with ExitStack() as both:  # close the second too if the disk is full
            both.callback(self._rows.close)
            both.callback(self._lines.close)
        if self._collector is not None:
            self._collector.write(self.path)
        if self.annotations is not None:
            self.annotations.close()
