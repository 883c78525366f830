"""Commands about datasets: `pale data check`, `pale data coco`, `pale data convert`, `pale data pack`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from ..core.progress import select_progress
from ..data.checks.settings import CheckSettings
from .console import print_line
from .options import Reporting, argument, option


class Check(Reporting, CheckSettings, name="data check"):
    """Find problems in images, masks or annotations before training.

    Examples:
        pale data check DIR --sheet sheet.png
        pale data check DIR --images images --masks masks --classes classes.txt
        pale data check DIR --images '{split}' --annotations 'annotations/{split}.json'
        pale data check DIR --kind yolo
        pale data check DIR --kind voc --task segmentation
    """

    def run(self) -> int:
        """Check and print; return 1 if training would fail or its metrics would be wrong."""
        from ..data.checks.images import draw_contact_sheet
        from ..data.checks.tables import describe_problems
        from ..tools.check_data import check_data

        found, parts = check_data(self, select_progress(self.json))
        self.report(found.plain(), parts, describe_problems(found))
        if self.sheet:  # after the report, which is printed even if drawing fails
            split = next(iter(found.plain()["counts"]))
            drawn = draw_contact_sheet(self.root, split, self.sheet)
            if not self.json:
                print_line(f"{self.sheet} written: {drawn} of {split}")
        return 0 if found.good else 1


class Coco(Reporting, name="data coco"):
    """Write annotations in COCO format from images and instance masks."""

    images: Path = argument("folder of images")
    masks: Path = argument("folder of masks: each value above 0 is an object")
    output: Path = option("annotation file to write", "-o", metavar="FILE")
    classes: list[str] = option("names of the classes", default=["object"], metavar="NAME")
    divisor: int | None = option(
        "the class of a value is value // divisor, starting with 1 (Cityscapes: 1000)"
    )

    def run(self) -> None:
        """Convert, write, and print how to train."""
        from ..tools.convert_data import write_annotations

        written = write_annotations(
            self.images,
            self.masks,
            self.output,
            self.classes,
            self.divisor,
            select_progress(self.json),
        )
        self.report(written.counts | {"skipped": written.skipped}, written.lines())


class Convert(Reporting, name="data convert"):
    """Write annotations in COCO format from labels of YOLO or Pascal VOC.

    Training, evaluation and `pale data check` read these labels directly (--data.kind, --kind); other programs may
    need the annotations. File names in them are relative to DIR.
    """

    root: Path = argument("folder of the dataset, for YOLO also its data.yaml", metavar="DIR")
    output: Path = argument("folder for SPLIT.json", metavar="OUT")
    kind: Literal["yolo", "voc"] = option("format of the labels")
    splits: list[str] = option("splits to convert", default=["train", "val"], metavar="NAME")

    def run(self) -> None:
        """Convert, and print what was written."""
        from ..tools.convert_data import convert_labels

        counts = convert_labels(self.kind, self.root, self.output, self.splits)
        text = "{0}: {1[images]} images, {1[annotations]} objects, {1[categories]} classes"
        self.report(counts, [text.format(split, found) for split, found in counts.items()])


class Pack(Reporting, name="data pack"):
    """Pack folders of images into tar shards."""

    root: Path = argument("folder with train/<class>/<image> and val/...", metavar="DIR")
    output: Path = argument("folder for the shards", metavar="OUT")
    splits: list[str] = option("folders to pack", default=["train", "val"], metavar="NAME")
    shard_mb: float = option("size of a shard in MiB", default=256, metavar="MB")

    def run(self) -> None:
        """Pack, and print how to train."""
        from ..tools.convert_data import pack_folders

        track = select_progress(self.json)
        packed = pack_folders(self.root, self.output, self.splits, self.shard_mb, track)
        lines = [f"{split}: {n} images in {shards} shards" for split, (n, shards) in packed.items()]
        hint = f"train with: pale train RECIPE --data.kind shards --data.root {self.output}"
        plain = {k: {"pictures": n, "shards": shards} for k, (n, shards) in packed.items()}
        self.report(plain, lines, hint)


COMMANDS = (Check, Coco, Convert, Pack)
