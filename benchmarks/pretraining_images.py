"""Check, scale and fingerprint images, and find those that show the same photo.

A fingerprint is a difference hash of 64 bits (is a pixel of an 8x9 thumbnail brighter than its neighbour?) and a grey
thumbnail of 16x16, each of the whole image and of its central square, because some sets crop and others stretch. Images
are equal if their hashes differ in few bits and their thumbnails by few grey levels; flat images with similar hashes
are distinguished by the thumbnails.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from pale.data.decoding import EXIF_ORIENTATION, load_upright, undecodable_content
from pale.data.reading import TooLargeError, open_image

MAX_PIXELS = 50_000_000
MIN_SIDE = 32
MAX_ASPECT = 4.0
QUALITY = 85
THUMBNAIL = 16
BANDS = 4  # hashes that differ in fewer bits than this agree in a band
CHUNK = 1 << 22  # pairs compared at a time
BIT_COUNTS = np.array([bin(i).count("1") for i in range(256)], np.uint8)

Hashes = NDArray[np.uint64]


class DroppedError(ValueError):
    """An image is not used; the message is the reason, one of a few."""


@dataclass(frozen=True)
class Prepared:
    """An image as it is packed, with its fingerprint.

    Attributes:
        content: of a JPEG file.
        hashes: of the image and of its central square, (2,).
        thumbnails: of both, (2, THUMBNAIL ** 2).
        side: length of the shorter side.
    """

    content: bytes
    hashes: Hashes
    thumbnails: NDArray[np.uint8]
    side: int


def prepare(content: bytes, name: str, size: int) -> Prepared:
    """Check an image and scale it so that its shorter side is at most `size`; raise `DroppedError`."""
    full, plain = decode(content, name, size)
    short, long = sorted(full.size)
    if short < MIN_SIDE:
        raise DroppedError("too small")
    if long > MAX_ASPECT * short:
        raise DroppedError("extreme aspect ratio")
    small, content = scale(full, size, content if plain else None)
    hashes, thumbnails = fingerprint(small)
    return Prepared(content, hashes, thumbnails, min(small.size))


def decode(content: bytes, name: str, size: int) -> tuple[Image.Image, bool]:
    """Return an image upright, and whether its file is a JPEG that needs no scaling, rotation or conversion."""
    try:
        with open_image(io.BytesIO(content), MAX_PIXELS) as image:
            plain = image.format == "JPEG" and image.mode in ("RGB", "L")
            plain &= image.getexif().get(EXIF_ORIENTATION, 1) == 1 and min(image.size) <= size
            # Decodes large JPEGs at a half, a quarter or an eighth of their size, but at no less than `size`.
            image.draft("RGB", (size, size))
            full = load_upright(image)
    except TooLargeError:
        raise DroppedError("too many pixels") from None
    except Exception as error:
        raise DroppedError("unreadable") from undecodable_content(name, error)
    return full, plain


def scale(full: Image.Image, size: int, content: bytes | None = None) -> tuple[Image.Image, bytes]:
    """Return an image with a shorter side of at most `size`, and its JPEG file: `content`, if it is given."""
    short = min(full.size)
    small = full
    if short > size:
        small = full.resize(
            tuple(max(1, round(n * size / short)) for n in full.size), Image.Resampling.LANCZOS
        )
    if content is None:
        buffer = io.BytesIO()
        small.save(buffer, "JPEG", quality=QUALITY, optimize=True)
        content = buffer.getvalue()
    return small, content


def fingerprint(image: Image.Image) -> tuple[Hashes, NDArray[np.uint8]]:
    """Return the hashes (2,) and thumbnails (2, THUMBNAIL ** 2) of an image and of its central square."""
    grey = image.convert("L")
    short = min(grey.size)
    left, top = (grey.width - short) // 2, (grey.height - short) // 2
    views = [grey]
    if short < max(grey.size):
        views.append(grey.crop((left, top, left + short, top + short)))
    hashes, thumbnails = [], []
    for view in views:
        pixels = np.asarray(view.resize((9, 8), Image.Resampling.BILINEAR))
        bits = np.packbits(pixels[:, 1:] > pixels[:, :-1])
        hashes.append(int.from_bytes(bits.tobytes(), "big"))
        small = view.resize((THUMBNAIL, THUMBNAIL), Image.Resampling.BILINEAR)
        thumbnails.append(np.asarray(small).ravel())
    return np.array([hashes[0], hashes[-1]], np.uint64), np.stack([thumbnails[0], thumbnails[-1]])


@dataclass(frozen=True)
class Fingerprints:
    """Fingerprints of n images: hashes (n, 2) and thumbnails (n, 2, THUMBNAIL ** 2)."""

    hashes: Hashes
    thumbnails: NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.hashes)

    def __getitem__(self, index: NDArray[np.generic]) -> Fingerprints:
        return Fingerprints(self.hashes[index], self.thumbnails[index])

    @classmethod
    def join(cls, parts: list[Fingerprints]) -> Fingerprints:
        """Return all images of the parts."""
        empty = cls(np.empty((0, 2), np.uint64), np.empty((0, 2, THUMBNAIL**2), np.uint8))
        parts = [empty, *parts]
        return cls(
            np.concatenate([part.hashes for part in parts]),
            np.concatenate([part.thumbnails for part in parts]),
        )


def count_bits(values: Hashes) -> NDArray[np.uint8]:
    """Return the number of set bits of each value."""
    parts = np.ascontiguousarray(values).view(np.uint8).reshape(len(values), 8)
    return BIT_COUNTS[parts].sum(1, dtype=np.uint8)


def close_pairs(
    queries: Hashes, references: Hashes, distance: int
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Yield the indices of pairs that differ in at most `distance` bits, some pairs several times.

    Two hashes that differ in fewer bits than there are bands are equal in one of them: only those are compared. A band
    has every fourth bit, so that a plain part of an image does not make it equal for many.
    """
    if distance >= BANDS:
        raise ValueError(f"the distance must be less than {BANDS}, got {distance}")
    for band in range(BANDS):
        mask = np.uint64(sum(1 << bit for bit in range(band, 64, BANDS)))
        order = np.argsort(references & mask, kind="stable")
        keys = (references & mask)[order]
        low, high = (np.searchsorted(keys, queries & mask, side) for side in ("left", "right"))
        ends = np.cumsum(high - low)
        start = 0
        while start < len(queries):
            before = ends[start - 1] if start else 0
            stop = max(start + 1, int(np.searchsorted(ends, before + CHUNK, "right")))
            counts = (high - low)[start:stop]
            query = np.repeat(np.arange(start, stop), counts)
            within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
            reference = order[np.repeat(low[start:stop], counts) + within]
            near = count_bits(queries[query] ^ references[reference]) <= distance
            yield query[near], reference[near]
            start = stop


def find_matches(
    queries: Fingerprints, references: Fingerprints, distance: int, difference: float
) -> NDArray[np.int64]:
    """Return for each image the index of an equal reference image, -1 if there is none.

    Args:
        queries: images that are looked for.
        references: images among which they are looked for.
        distance: largest number of different bits of equal images.
        difference: largest mean difference of their thumbnails, of 255 grey levels.
    """
    found = np.full(len(queries), -1, np.int64)
    if not len(references):
        return found
    pairs = close_pairs(queries.hashes.ravel(), references.hashes.ravel(), distance)
    pixels = queries.thumbnails.reshape(-1, THUMBNAIL**2)
    others = references.thumbnails.reshape(-1, THUMBNAIL**2)
    for query, reference in pairs:
        for part in range(0, len(query), 1 << 16):
            q, r = query[part : part + (1 << 16)], reference[part : part + (1 << 16)]
            error = np.abs(pixels[q].astype(np.int16) - others[r]).mean(1)
            same = error <= difference
            found[q[same] // 2] = r[same] // 2
    return found


def repeated_images(
    images: Fingerprints, preference: NDArray[np.int64], difference: float
) -> NDArray[np.int64]:
    """Return for each image the index of the equal image that is kept in its place, -1 if it is kept itself.

    Equal are images with the same hash and thumbnails that differ by at most `difference`; the one with the lowest
    preference is kept.
    """
    found = np.full(len(images), -1, np.int64)
    order = np.lexsort((preference, images.hashes[:, 0]))
    hashes = images.hashes[order, 0]
    edges = np.flatnonzero(np.r_[True, hashes[1:] != hashes[:-1], True])
    pixels = images.thumbnails[:, 0]
    for start, stop in pairwise(edges.tolist()):
        kept: list[int] = []
        for index in order[start:stop] if stop - start > 1 else ():
            if kept:
                errors = np.abs(pixels[kept].astype(np.int16) - pixels[index]).mean(1)
                if errors.min() <= difference:
                    found[index] = kept[int(errors.argmin())]
                    continue
            kept.append(int(index))
    return found
