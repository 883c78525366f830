"""Frames of a video, and a video of frames, by PyAV (the extra `video`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from types import TracebackType
from typing import Any

from PIL import Image

from ..data.images import UnreadableImageError

SUFFIXES = (".mp4", ".m4v", ".mov", ".avi", ".mkv", ".webm", ".mpg", ".mpeg")
DEFAULT_RATE = 25


@dataclass(frozen=True)
class Frame:
    """A picture of a video.

    Attributes:
        number: from 0.
        seconds: since the beginning.
        picture: RGB.
    """

    number: int
    seconds: float
    picture: Image.Image


def frames(path: Path, every: int = 1) -> Iterator[Frame]:
    """Every so-manyth frame, one after the other; nothing but the present one is held."""
    av = _av()
    try:
        with av.open(str(path)) as file:
            if not file.streams.video:
                raise UnreadableImageError(f"{path}: there is no picture in it, only sound")
            for number, frame in enumerate(file.decode(video=0)):
                if number % every == 0:
                    yield Frame(number, float(frame.time or 0), frame.to_image())
    except av.FFmpegError as error:
        raise UnreadableImageError(
            f"{path}: cannot be read as a video ({error.strerror})"
        ) from None


def rate(path: Path) -> Fraction:
    """Frames a second."""
    av = _av()
    try:
        with av.open(str(path)) as file:
            found = file.streams.video[0].average_rate if file.streams.video else None
    except av.FFmpegError as error:
        raise UnreadableImageError(
            f"{path}: cannot be read as a video ({error.strerror})"
        ) from None
    return found or Fraction(DEFAULT_RATE)


class Film:
    """Writes pictures of one size as an .mp4; later ones of another size are scaled to the first's."""

    def __init__(self, path: Path, rate: Fraction) -> None:
        self.path, self.rate = path, rate
        self._file: Any = None
        self._stream: Any = None

    def __enter__(self) -> Film:
        return self

    def add(self, picture: Image.Image) -> None:
        """The next frame."""
        av = _av()
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = av.open(str(self.path), "w")
            self._stream = self._file.add_stream("libx264", rate=self.rate)
            self._stream.width, self._stream.height = (n + n % 2 for n in picture.size)
            self._stream.pix_fmt = "yuv420p"
        size = (self._stream.width, self._stream.height)
        if picture.size != size:
            picture = picture.resize(size)
        for packet in self._stream.encode(av.VideoFrame.from_image(picture)):
            self._file.mux(packet)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Finish the file, whatever happened: what was added can be seen."""
        if self._file is not None:
            for packet in self._stream.encode():
                self._file.mux(packet)
            self._file.close()


def _av() -> Any:
    try:
        import av
    except ImportError:
        raise RuntimeError(
            "videos need the package av, which is not installed; pip install 'pale-transformer[video]'"
        ) from None
    return av
