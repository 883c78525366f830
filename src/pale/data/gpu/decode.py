"""Images that are decoded by the training device or kept in its memory, and datasets of augmentation plans for them.

`augment.augment_batch` applies the plans to the images of a batch.
"""

from __future__ import annotations

import io
import struct
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import ExifTags
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision.io import ImageReadMode, decode_jpeg

from ...core.progress import Track, no_progress
from ...ops.launching import AVAILABLE
from ..loader import (
    Batch,
    Sample,
    collate_labels,
    count_workers,
    ignore_signals,
    iterate_batches,
)
from ..reading import open_image, require_few_scans
from ..seeding import derive_seed, seeded
from ..sources.images import ImageSource
from ..stream import Key
from ..transforms.images import to_tensor
from .plans import ImagePlan, Planner, batch_plans

SAMPLED_FILES = 50  # files that are inspected before the device is chosen as decoder
# Mean pixels per image: decoding takes 6 MB, a training step about 50 MB per image.
MAX_MEAN_PIXELS = 2**20
END_OF_JPEG = b"\xff\xd9"
CHUNK = 64  # images that a process decodes and sends at once
MAX_BYTES = 32 * 2**30  # of decoded images; small datasets have less, large GPUs have more memory


@dataclass
class PackedImages:
    """Images of different sizes in one tensor.

    Attributes:
        flat: uint8, (3, pixels of all images).
        starts: index of the first pixel of each image.
        widths: width of each image.
    """

    flat: Tensor
    starts: Tensor
    widths: Tensor

    def to(self, device: torch.device) -> PackedImages:
        """Return the images on a device."""
        return PackedImages(*(x.to(device) for x in (self.flat, self.starts, self.widths)))


def pack_images(images: Sequence[Tensor]) -> PackedImages:
    """Pack images (3, h, w) without synchronising with the device."""
    flat = torch.cat([image.flatten(1) for image in images], 1)
    return _lay_out(flat, [(image.shape[1], image.shape[2]) for image in images])


def _lay_out(flat: Tensor, sizes: Sequence[tuple[int, int]]) -> PackedImages:
    """Return the images of given heights and widths in `flat`."""
    starts = torch.tensor([0, *accumulate(height * width for height, width in sizes[:-1])])
    widths = torch.tensor([width for _, width in sizes])
    return PackedImages(flat, *(x.to(flat.device, non_blocking=True) for x in (starts, widths)))


class _DecodedChunks(Dataset[dict[str, Tensor]]):
    """The decoded images of a source, several in one tensor: far fewer objects to send between processes."""

    def __init__(self, source: ImageSource) -> None:
        self.source = source

    def __len__(self) -> int:
        return -(-len(self.source) // CHUNK)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        chosen = range(index * CHUNK, min((index + 1) * CHUNK, len(self.source)))
        images = [np.asarray(self.source.image(i)) for i in chosen]
        return {
            "sizes": torch.tensor([image.shape[:2] for image in images]),
            "pixels": torch.from_numpy(
                np.concatenate([image.reshape(-1, 3).T for image in images], 1)
            ),
        }


class DecodedImages:
    """All images of a source, decoded.

    Args:
        source: the images.
        workers: maximum number of processes that decode.
        max_bytes: memory limit of the decoded images.
        track: shows progress.
    """

    def __init__(
        self,
        source: ImageSource,
        workers: int = 0,
        max_bytes: int = MAX_BYTES,
        track: Track = no_progress,
    ) -> None:
        chunks = _DecodedChunks(source)
        loader = DataLoader(
            chunks,
            batch_size=None,
            num_workers=count_workers(workers, len(chunks)),
            worker_init_fn=ignore_signals,
        )
        parts: list[Tensor] = []

        def read_sizes() -> Iterator[tuple[int, int]]:
            for chunk in iterate_batches(loader):
                # A copy, because memory shared with a worker holds an open file.
                parts.append(chunk["pixels"].clone() if loader.num_workers else chunk["pixels"])
                yield from chunk["sizes"].tolist()

        sizes: list[tuple[int, int]] = []
        total = 0
        for height, width in track(read_sizes(), "reading images", len(source)):
            total += 3 * height * width
            if total > max_bytes:
                raise ValueError(
                    f"data.on_device=pictures keeps all images in memory, at most {max_bytes / 2**30:.3g} GiB, and "
                    f"the first {len(sizes)} of {len(source)} take that much; set data.on_device=decoding, or "
                    "shrink the images"
                )
            sizes.append((height, width))
        self.sizes = np.array(sizes)
        self.pixels = _lay_out(torch.cat(parts, 1), sizes)

    def to(self, device: torch.device) -> PackedImages:
        """Move the images to a device, where they stay, and return them."""
        self.pixels = self.pixels.to(device)
        return self.pixels


@dataclass
class EncodedBatch:
    """The files of a batch in one tensor; those that a GPU cannot decode are stored as pixels.

    Attributes:
        buffer: uint8, the files one after the other.
        pieces: per image the number of bytes, and the shape (3, h, w) if they are pixels.
    """

    buffer: Tensor
    pieces: list[tuple[int, tuple[int, ...] | None]]

    def decode(self, device: torch.device, read_on_cpu: Callable[[int], Tensor]) -> PackedImages:
        """Decode the images on a device.

        Args:
            device: a GPU decodes with nvJPEG.
            read_on_cpu: reads image i of the batch on the CPU, or raises an error that names the file.
        """
        parts = self.buffer.split([size for size, _ in self.pieces])
        files = [i for i, (_, shape) in enumerate(self.pieces) if shape is None]
        found = [
            part.view(shape) if shape else part
            for part, (_, shape) in zip(parts, self.pieces, strict=True)
        ]
        try:
            decoded = decode_jpegs([found[i] for i in files], device) if files else []
        except RuntimeError:  # does not name the file
            decoded = [read_on_cpu(i) for i in files]
        for i, image in zip(files, decoded, strict=True):
            found[i] = image
        return pack_images([image.to(device, non_blocking=True) for image in found])


@cache
def _decoding_stream(device: torch.device) -> torch.cuda.Stream:
    # PyTorch hands out streams of the usual priority again and again; no one else asks for this one.
    return torch.cuda.Stream(device, priority=-1)


def decode_jpegs(files: list[Tensor], device: torch.device) -> list[Tensor]:
    """Decode JPEG files to RGB on a device, (3, h, w) each.

    nvJPEG writes its outputs at once, not after the work that is queued on the current stream, so it would overwrite
    memory that was freed but is still being read (pytorch/vision#9606). On a GPU the outputs therefore come from the
    memory of a stream that does nothing else, and are kept until the current stream has used them.
    """
    if device.type != "cuda":
        return _decode(files, device)
    if not torch.cuda.is_available():
        raise RuntimeError("nvJPEG needs a GPU")
    stream, current = _decoding_stream(device), torch.cuda.current_stream(device)
    stream.synchronize()
    with torch.cuda.stream(stream):
        images = _decode(files, device)
    current.wait_stream(stream)
    for image in images:
        image.record_stream(current)
    return images


def _decode(files: list[Tensor], device: torch.device) -> list[Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchvision announces a move to TorchCodec
        images: list[Tensor] = decode_jpeg(files, ImageReadMode.RGB, device)
    return images


def can_decode(source: ImageSource, device: torch.device) -> bool:
    """Return whether the device should decode the files of a source.

    Required are a GPU with nvJPEG and Triton. In a sample of files, nearly all must be plain JPEGs of moderate size: a
    GPU decodes whole images, whereas a worker sends a small crop.
    """
    if device.type != "cuda" or not AVAILABLE:
        return False
    sampled = sorted({i * len(source) // SAMPLED_FILES for i in range(SAMPLED_FILES)})
    files, pixels = [], 0
    for i in sampled:
        try:
            content, (height, width) = read_encoded(source, i)
        except (OSError, ValueError):  # reported when training reads the file
            continue
        pixels += height * width
        files += [content] if content.ndim == 1 else []
    if len(files) < 0.9 * len(sampled) or pixels > MAX_MEAN_PIXELS * len(sampled):
        return False
    try:
        return len(decode_jpegs(files[:1], device)) == 1
    except RuntimeError:
        return False


class PlannedDataset(Dataset[Sample]):
    """Augmentation plans; the random draws of item (epoch, index) depend on (seed, epoch, index) only.

    Args:
        source: the images.
        planner: draws the plans.
        seed: seed of all draws.
        sizes: height and width of each image; if None, every item contains its encoded file.
        token_labels: returns the probabilities and classes for an image index.
    """

    def __init__(
        self,
        source: ImageSource,
        planner: Planner,
        seed: int,
        sizes: NDArray[np.int64] | None = None,
        token_labels: Callable[[int], tuple[Tensor, Tensor]] | None = None,
    ) -> None:
        self.source, self.planner, self.seed, self.sizes = source, planner, seed, sizes
        self.labels, self.token_labels = list(source.labels), token_labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, key: Key) -> Sample:
        epoch, index = key
        content = None
        if self.sizes is None:
            content, (height, width) = read_encoded(self.source, index)
        else:
            height, width = self.sizes[index].tolist()
        with seeded(self.seed, epoch, index):
            plan = self.planner.plan(index, width, height, derive_seed(self.seed, epoch, index))
        plan.content = content
        sample = plan, self.labels[index], key
        if self.token_labels is None:
            return sample
        return *sample, *self.token_labels(index), torch.from_numpy(plan.places)


def read_encoded(source: ImageSource, index: int) -> tuple[Tensor, tuple[int, int]]:
    """Return the bytes of a file if a GPU can decode it, otherwise its pixels; and height and width."""
    content = source.content(index)
    try:
        with open_image(io.BytesIO(content)) as image:
            plain = image.format == "JPEG" and image.mode in ("RGB", "L")
            rotated = plain and image.getexif().get(ExifTags.Base.Orientation, 1) != 1
            # nvJPEG may end a truncated image without an error; the rest would be pixels of other images.
            whole = content.rstrip(b"\0").endswith(END_OF_JPEG)
            if plain and not rotated and whole:
                require_few_scans(image)
                file = torch.frombuffer(bytearray(content), dtype=torch.uint8)
                return file, (image.height, image.width)
    except (
        OSError,
        SyntaxError,
        ValueError,
        TypeError,
        LookupError,
        ArithmeticError,
        struct.error,
    ):
        pass  # reading it below raises the error with the name of the file
    pixels = to_tensor(source.image(index)).contiguous()
    return pixels, (pixels.shape[1], pixels.shape[2])


def join_contents(plans: list[ImagePlan]) -> EncodedBatch:
    """Concatenate the files of a batch; `sample` of each plan becomes the index in the batch."""
    pieces: list[tuple[int, tuple[int, ...] | None]] = []
    for i, plan in enumerate(plans):
        assert plan.content is not None
        shape = tuple(plan.content.shape) if plan.content.ndim == 3 else None
        pieces.append((plan.content.numel(), shape))
        plan.sample = i
    contents = [plan.content.flatten() for plan in plans if plan.content is not None]
    return EncodedBatch(torch.cat(contents), pieces)


def collate(samples: list[Sample]) -> Batch:
    """Build a batch like `loader.collate`, with a "plan" instead of images, and "files" if the plans contain them."""
    plans, *others = zip(*samples, strict=True)
    batch = collate_labels(*others)
    if plans[0].content is not None:
        batch["files"] = join_contents(list(plans))
    return batch | {"plan": batch_plans(list(plans))}
