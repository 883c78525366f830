"""Read and write videos with PyAV (the extra `video`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from types import TracebackType
from typing import Any

from PIL import Image

from ..data.decoding import unreadable_file
from ..data.reading import MAX_PIXELS, UnreadableImageError, display_name, open_regular
from ..errors import UnavailableError

SUFFIXES = (".mp4", ".m4v", ".mov", ".avi", ".mkv", ".webm", ".mpg", ".mpeg")
DEFAULT_RATE = 25
MAX_RATE = 1000  # frames per second; a higher rate means a damaged header
# Only the containers of these suffixes: playlists and lists of files, such as FFmpeg's concat, open other files.
CONTAINERS = "mov,mp4,m4a,3gp,3g2,mj2,avi,matroska,webm,mpeg,mpegts,mpegvideo"


@dataclass(frozen=True)
class Frame:
    """An image of a video.

    Attributes:
        number: number of the frame, from 0.
        seconds: time since the beginning of the video.
        image: RGB.
    """

    number: int
    seconds: float
    image: Image.Image


def frames(path: Path, every: int = 1) -> Iterator[Frame]:
    """Yield every n-th frame, n = `every`; only the current frame is held in memory."""
    with _open_video(path) as file:
        for number, frame in enumerate(file.decode(video=0)):
            if number % every == 0:
                yield Frame(number, float(frame.time or 0), frame.to_image())


@contextmanager
def _open_video(path: Path) -> Iterator[Any]:
    """Open a video file with a stream of images; a damaged file raises an `UnreadableImageError`."""
    av, name = _av(), display_name(path)
    try:
        with (
            open_regular(path) as content,
            av.open(content, options={"format_whitelist": CONTAINERS}) as file,
        ):
            if not file.streams.video:
                raise UnreadableImageError(f"{name}: it has no images, only sound")
            # The sizes in the container and in the stream may differ; this bounds the allocation.
            file.streams.video[0].codec_context.options = {"max_pixels": str(MAX_PIXELS)}
            yield file
    except av.FFmpegError as error:
        raise UnreadableImageError(
            f"{name}: cannot be read as a video ({error.strerror})"
        ) from None
    except MemoryError:
        raise UnreadableImageError(f"{name}: there is not enough memory for its frames") from None
    except OSError as error:
        raise unreadable_file(name, error) from None


@dataclass(frozen=True)
class VideoInfo:
    """The header of a video: frames per second, and number of frames, 0 if not known."""

    rate: Fraction
    frames: int


def read_video_info(path: Path) -> VideoInfo:
    """Read the header of a video, without decoding a frame."""
    with _open_video(path) as file:
        stream = file.streams.video[0]
        rate = stream.average_rate or Fraction(DEFAULT_RATE)
        return VideoInfo(rate if 0 < rate <= MAX_RATE else Fraction(DEFAULT_RATE), stream.frames)


class VideoWriter:
    """Writes images as an .mp4; images of another size are resized to that of the first."""

    def __init__(self, path: Path, rate: Fraction) -> None:
        self.path, self.rate = path, rate
        self._file: Any = None
        self._stream: Any = None

    def __enter__(self) -> VideoWriter:
        return self

    def add(self, image: Image.Image) -> None:
        """Write the next frame."""
        av = _av()
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = av.open(str(self.path), "w")
            self._stream = self._file.add_stream("libx264", rate=self.rate)
            self._stream.width, self._stream.height = (n + n % 2 for n in image.size)
            self._stream.pix_fmt = "yuv420p"
        size = (self._stream.width, self._stream.height)
        if image.size != size:
            image = image.resize(size)
        for packet in self._stream.encode(av.VideoFrame.from_image(image)):
            self._file.mux(packet)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Complete the file, also after an error: it contains the frames so far."""
        if self._file is not None:
            for packet in self._stream.encode():
                self._file.mux(packet)
            self._file.close()


def _av() -> Any:
    try:
        import av
    except ImportError:
        raise UnavailableError(
            "videos need the package av, which is not installed; pip install 'pale-transformer[video]'"
        ) from None
    return av
