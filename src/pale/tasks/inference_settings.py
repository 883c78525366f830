"""Options of inference on the command line. This module imports nothing heavy, for a fast `pale --help`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from ..core.options import option, settings_class
from ..errors import SettingsError
from . import TASKS


@settings_class
class InferenceSettings:
    """A model and its inference options."""

    weights: str | None = option(
        "run folder, .safetensors file of a run, or name listed by pale weights (default: the included "
        "weights for the task)",
        default=None,
        metavar="MODEL",
    )
    task: str | None = option(
        "task (default: the task of the weights, or classification)", default=None, choices=TASKS
    )
    device: Literal["cpu", "cuda"] | None = option(
        "device (default: cuda if available)", default=None
    )
    batch: int | None = option(
        "images per batch (default 16, for segmenters and detectors 4)", default=None
    )
    top: int = option("classifiers: number of classes per image", default=5)
    score: float = option("detectors and multi-label classifiers: score threshold", default=0.5)
    own_size: bool = option("segmenters, detectors: do not resize images", default=False)
    slide: bool = option("segmenters: use sliding windows on large images", default=False)
    multi: bool = option("segmenters: average several scales and flipped images", default=False)


@settings_class
class OutputSettings:
    """Options for the output files."""

    output: Path | None = option(
        "folder for JSON, CSV, masks and drawn images", "-o", default=None, metavar="DIR"
    )
    format: Literal["coco", "yolo", "label-studio"] | None = option(
        "with -o: also write annotations for other tools: COCO JSON (CVAT, FiftyOne), YOLO or Label Studio",
        default=None,
    )
    image_url: str | None = option(
        "label-studio: URL prefix of the images (default: local storage)",
        default=None,
        metavar="URL",
    )
    every: int = option("videos: use every Nth frame", default=1)
    no_drawing: bool = option("do not write drawn images", default=False)

    def check_output(self, video: Path | None) -> None:
        """Raise if a setting has no effect.

        Args:
            video: one of the inputs that is a video, if any.
        """
        if self.every < 1:
            raise SettingsError(f"--every must be at least 1, got {self.every}")
        if self.format is not None and self.output is None:
            raise SettingsError(
                "--format writes annotations of images into the folder of -o; give -o DIR"
            )
        if self.format is not None and video is not None:
            raise SettingsError(
                f"--format writes annotations of images, not of videos such as {video}; leave it out"
            )
        if self.image_url is not None and self.format != "label-studio":
            raise SettingsError("--image-url applies to --format label-studio; leave it out")

    def check_shard(self) -> None:
        """Raise if a setting has no effect on shards."""
        if self.format is not None:
            raise SettingsError("--format is not written by shards; leave it out")
