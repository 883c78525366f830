"""Conversions of datasets: folders into shards, instance masks and labels into annotations in COCO format."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..core.progress import Track, no_progress
from ..data.sources.convert import convert_masks
from ..data.sources.images import read_folder
from ..data.sources.label_formats import LabelFormat, read_labels
from ..data.sources.shards import write_shards
from ..errors import DataError, SettingsError


@dataclass(frozen=True)
class WrittenAnnotations:
    """Annotations in COCO format that were written.

    Attributes:
        images: folder of the images.
        file: annotation file.
        counts: number of images, annotations and categories.
        skipped: number of regions that were left out, by mask value.
    """

    images: Path
    file: Path
    counts: dict[str, int]
    skipped: Counter[int]

    def lines(self) -> Iterator[str]:
        """Yield lines about the written files, and a command that trains with them."""
        yield f"{self.file}: {self.counts['images']} images, {self.counts['annotations']} objects"
        if self.skipped:
            values = ", ".join(str(value) for value in sorted(self.skipped))
            total = self.skipped.total()
            yield f"{total} regions with values below the divisor are left out: values {values}"
        images, annotations = (shlex.quote(str(path)) for path in (self.images, self.file))
        yield (
            f"train with: pale train small_boxes.mask_rcnn_pale_t --data.root . --data.images {images} "
            f"--data.annotations {annotations} --data.hold_out 0.2"
        )


def write_annotations(
    images: Path,
    masks: Path,
    file: Path,
    classes: Sequence[str],
    divisor: int | None = None,
    track: Track = no_progress,
) -> WrittenAnnotations:
    """Write annotations in COCO format from images and instance masks; see `convert_masks`."""
    skipped: Counter[int] = Counter()
    content = convert_masks(images, masks, classes, divisor, track, skipped)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content))
    counts = {part: len(content[part]) for part in ("images", "annotations", "categories")}
    return WrittenAnnotations(images, file, counts, skipped)


def convert_labels(
    form: LabelFormat, root: Path, output: Path, splits: Sequence[str]
) -> dict[str, dict[str, int]]:
    """Write SPLIT.json in COCO format for each split; return the number of images, annotations and categories.

    Args:
        form: format of the labels.
        root: folder of the dataset; file names in the annotations are relative to it.
        output: folder for the annotation files.
        splits: splits to convert; one that does not exist is an error.
    """
    # Read all before anything is written.
    found = {split: read_labels(form, root, split).require_readable() for split in splits}
    counts = {}
    for split, labels in found.items():
        try:
            text = json.dumps(labels.content, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise DataError(
                f"the split {split} of {root} has a file whose name is not UTF-8, which JSON cannot hold; rename it"
            ) from None
        path = output / f"{split.replace('/', '_')}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text)
        counts[split] = {part: len(entries) for part, entries in labels.content.items()}
    return counts


def pack_folders(
    root: Path,
    output: Path,
    splits: Sequence[str],
    shard_mb: float,
    track: Track = no_progress,
) -> dict[str, tuple[int, int]]:
    """Pack the folders of some splits into tar shards; return the number of images and shards of each.

    Args:
        root: folder that holds <split>/<class>/<image>.
        output: folder for the shards.
        splits: folders to pack; all must hold the classes of the first.
        shard_mb: size of a shard in MiB.
        track: shows the progress.
    """
    if shard_mb <= 0:
        raise SettingsError(f"--shard-mb must be greater than 0, got {shard_mb:g}")
    classes, sources = None, {}
    for split in splits:  # read all before anything is written
        sources[split] = read_folder(root / split, classes)
        classes = sources[split].classes
    size = int(shard_mb * 2**20)
    return {
        split: (len(source), len(write_shards(source, output, split, size, track=track)))
        for split, source in sources.items()
    }
