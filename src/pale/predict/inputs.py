"""Predict images and videos, given as paths or addresses, and write the results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..core.progress import Track, no_progress
from ..data.reading import display_name
from ..data.remote import DEFAULTS, RemoteOptions, is_remote
from ..data.sources.items import ARCHIVE, LIST, WHOLE, ImageItem, Shard, local_items
from ..data.sources.paths import find_images, output_names, output_stem
from ..data.sources.remote_items import remote_items
from ..errors import SettingsError
from ..tasks.prediction import Prediction
from .files import Folder
from .predictor import Failed, Predictor
from .video import SUFFIXES, VideoWriter, frames, read_video_info

# A prediction or a failure, and for a frame of a video its number and time.
Result = tuple[Prediction | Failed, dict[str, Any] | None]


def find_items(
    sources: Sequence[str], shard: Shard = WHOLE, remote: RemoteOptions = DEFAULTS
) -> Iterator[ImageItem]:
    """Yield the images of a shard of the sources.

    Args:
        sources: images, folders, list files and tar archives: paths, or addresses that a user typed.
        shard: shard of their images.
        remote: how addresses are read.
    """
    if videos := [name for name in sources if name.lower().endswith(SUFFIXES)]:
        raise SettingsError(
            f"expected are images, folders, lists or archives, got the video {display_name(videos[0])}; predict it "
            "separately, from a local file"
        )
    addresses = [source for source in sources if is_remote(source)]
    if not addresses:
        return local_items([Path(source) for source in sources], shard)
    if len(addresses) < len(sources):
        raise SettingsError(
            f"sources are either paths or addresses, got {display_name(addresses[0])} among paths; predict one after "
            "the other"
        )
    return remote_items(addresses, shard, remote)


class Inputs:
    """Images and videos to predict.

    Args:
        sources: images, folders of images, list files, tar archives, videos, or addresses.
        remote: how addresses are read.

    Attributes:
        images: each with the name of its output files.
        videos: the same.
    """

    def __init__(self, sources: Sequence[str | Path], remote: RemoteOptions = DEFAULTS) -> None:
        paths = [Path(source) for source in sources if not _is_collection(source)]
        videos = [path for path in paths if path.suffix.lower() in SUFFIXES and not path.is_dir()]
        others = [path for path in paths if path not in videos]
        self.images: list[tuple[Path | ImageItem, str]] = list(
            find_images(others) if others else []
        )
        if collections := [str(source) for source in sources if _is_collection(source)]:
            items = list(find_items(collections, remote=remote))
            names = output_names([Path(output_stem(item.name)) for item in items])
            self.images += zip(items, names, strict=True)
        stems = output_names([Path(path.name) for path in videos])
        self.videos = list(zip(videos, stems, strict=True))

    def predict(
        self,
        predictor: Predictor,
        folder: Folder | None,
        every: int = 1,
        track: Track = no_progress,
    ) -> Iterator[Result]:
        """Yield the results one by one; each is written to the folder first.

        Args:
            predictor: model.
            folder: folder for the results; None: nothing is written.
            every: use every N-th frame of a video.
            track: shows the progress.
        """
        stream = predictor.stream(path for path, _ in self.images)
        predicted = track(stream, "predicting", len(self.images))
        for prediction, (_, stem) in zip(predicted, self.images, strict=True):
            if folder is not None and not isinstance(prediction, Failed):
                folder.add(prediction, stem)
            yield prediction, None
        for path, stem in self.videos:
            yield from _predict_video(predictor, path, stem, folder, every, track)


def _is_collection(source: str | Path) -> bool:
    """Return whether the images of a source are read by `find_items`: a list, an archive or an address."""
    if isinstance(source, str) and is_remote(source):
        return True
    return str(source).lower().endswith((ARCHIVE, LIST)) and not Path(source).is_dir()


def _predict_video(
    predictor: Predictor, path: Path, stem: str, folder: Folder | None, every: int, track: Track
) -> Iterator[Result]:
    """Yield the prediction of each frame; write a video of the drawn frames beside the other results."""
    name = display_name(path)
    try:
        about = read_video_info(path)
        target = (folder.path if folder else Path()) / f"{display_name(stem)}_predicted.mp4"
        with VideoWriter(target, about.rate / every) as film:
            total = about.frames // every
            for frame in track(frames(path, every), display_name(path.name), total):
                prediction = predictor(frame.image, name)
                where = {"frame": frame.number, "seconds": round(frame.seconds, 3)}
                if folder is not None:
                    folder.add(prediction, None, where)
                    if folder.drawn:
                        film.add(prediction.draw())
                yield prediction, where
    except (ValueError, MemoryError, ArithmeticError) as error:
        reason = str(error) or "there is not enough memory"
        yield Failed(name, reason if reason.startswith(name) else f"{name}: {reason}"), None
