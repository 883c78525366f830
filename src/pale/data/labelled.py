"""Data sets of (image, class), and the loaders over them."""

from __future__ import annotations

import atexit
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from weakref import WeakSet

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from .draws import seeded
from .scenes import Scenes
from .stream import Key
from .transforms import TrainTransform, Transform

# Image or `Sketch`, class and key; with token labels also their probabilities and classes, and the image's places.
Sample = tuple[Any, ...]


class SceneImages:
    """Scenes as a source of pictures with a class each."""

    def __init__(self, scenes: Scenes) -> None:
        self.scenes, self.classes = scenes, scenes.classes

    def __len__(self) -> int:
        return len(self.scenes)

    @property
    def labels(self) -> Sequence[int]:
        """The class of every scene; draws all of them."""
        return [self.scenes[i].label for i in range(len(self.scenes))]

    def pair(self, index: int) -> tuple[Image.Image, int]:
        """Picture and class."""
        scene = self.scenes[index]
        return Image.fromarray(scene.image), scene.label

    def image(self, index: int) -> Image.Image:
        """The picture alone."""
        return self.pair(index)[0]

    def content(self, index: int) -> bytes:
        """Nothing: a scene is drawn, there is no file."""
        return b""

    def name(self, index: int) -> str:
        """For messages."""
        return f"scene {index} of seed {self.scenes.seed}"


class Labelled(Dataset[Sample]):
    """A source under a transform. The item (epoch, index) is drawn from (seed, epoch, index) alone.

    Args:
        source: the pictures.
        transform: from a picture to an image; with token labels a `TrainTransform`.
        seed: of every draw.
        token_labels: gives the probabilities and classes of a picture by its number.
    """

    def __init__(
        self,
        source: Any,
        transform: Transform,
        seed: int,
        token_labels: Callable[[int], tuple[Tensor, Tensor]] | None = None,
    ) -> None:
        self.source, self.transform, self.seed = source, transform, seed
        self.token_labels = token_labels

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, key: Key) -> Sample:
        epoch, index = key
        if isinstance(self.source, SceneImages):
            image, label = self.source.pair(index)
        else:
            image, label = self.source.image(index), self.source.labels[index]
        with seeded(self.seed, epoch, index):
            if self.token_labels is None:
                return self.transform(image), label, key
            assert isinstance(self.transform, TrainTransform)
            pixels, places = self.transform.see(image)
        return pixels, label, key, *self.token_labels(index), torch.from_numpy(places)


def collate(samples: list[Sample]) -> dict[str, Any]:
    """Stack samples: images uint8 (b, 3, h, w), channels last in memory, labels (b,), keys (b, 2).

    With token labels also token_scores and token_classes (b, k, h, w) and places (b, 2, 3).
    """
    images, *others = zip(*samples, strict=True)
    stacked = torch.stack([image.permute(1, 2, 0) for image in images])
    return {"images": stacked.permute(0, 3, 1, 2)} | stack(*others)


def stack(labels: Any, keys: Any, *tokens: Any) -> dict[str, Any]:
    """All of a batch but its images."""
    names = ("token_scores", "token_classes", "places")
    rest = {name: torch.stack(part) for name, part in zip(names, tokens, strict=False)}
    return {"labels": torch.tensor(labels), "keys": torch.tensor(keys)} | rest


def make_loader(
    data: Dataset[Any],
    sampler: Sampler[list[Key]],
    collate_fn: Callable[[list[Any]], Any],
    workers: int,
    pin: bool,
    persistent: bool = False,
) -> DataLoader[Any]:
    """A loader over batches of keys; what it gives does not depend on how many workers there are.

    Args:
        data: what the keys mean.
        sampler: lists of keys, with a length.
        collate_fn: makes a batch of samples.
        workers: at most; never more than this process's share of the cores, or batches.
        pin: put batches where a GPU can fetch them while it computes.
        persistent: keep the workers from one pass over the data to the next.
    """
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # processes on this machine, by torchrun
    count = min(workers, max(1, cores() // here), len(sampler))  # type: ignore[arg-type]
    return DataLoader(
        data,
        batch_sampler=sampler,
        collate_fn=collate_fn,
        num_workers=count,
        pin_memory=pin,
        persistent_workers=persistent and count > 0,
        worker_init_fn=leave_signals_to_the_main_process,
    )


def cores() -> int:
    """How many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def leave_signals_to_the_main_process(worker: int) -> None:
    """For workers: Ctrl-C, and SIGTERM of a cluster, reach the whole group, but the batch must still be finished."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


_open: WeakSet[Any] = WeakSet()
_workers: WeakSet[Any] = WeakSet()


def _end_workers() -> None:
    # Python ends with a SIGTERM to its child processes and waits for them; those that pass over it must be told.
    for iterator in list(_open):
        iterator._shutdown_workers()
    for worker in list(_workers):  # a worker that read for what failed may not have been told
        if worker.is_alive():
            worker.kill()


class Ahead(Iterator[Any]):
    """Batches, some of which may be fetched before they are asked for; then an error of them is known before.

    Args:
        batches: as they come.
        made: what is made of one, which may fail too.
    """

    def __init__(self, batches: Iterator[Any], made: Callable[[Any], Any]) -> None:
        self.batches, self.made, self.ready = batches, made, deque[Any]()
        self.waited = 0.0  # seconds, for `batches`

    def __next__(self) -> Any:
        return self.ready.popleft() if self.ready else self._one()

    def _one(self) -> Any:
        began = time.perf_counter()
        try:
            batch = next(self.batches)
        finally:
            self.waited += time.perf_counter() - began
        return self.made(batch)

    def fetch(self, count: int) -> ValueError | None:
        """Have `count` batches ready, or give the error that is in the way."""
        try:
            while len(self.ready) < count:
                self.ready.append(self._one())
        except ValueError as error:
            return error
        return None


def batches(loader: DataLoader[Any]) -> Iterator[Any]:
    """The loader's batches; an error of a worker is its own last line, not a trace."""
    try:
        iterator: Any = iter(loader)
        if loader.num_workers:
            _open.add(iterator)
            # Before PyTorch's own, which on CUDA waits five seconds for each worker: the last registered runs first.
            atexit.unregister(_end_workers)
            atexit.register(_end_workers)
            _workers.update(iterator._workers)
        yield from iterator
    except (ValueError, OSError) as error:
        last = (str(error).strip() or type(error).__name__).splitlines()[-1]
        raise ValueError(last.rpartition("UnreadableImageError: ")[2]) from None
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        reason = str(error).strip().splitlines()[0].rstrip(". ")
        raise ValueError(
            f"a process that reads pictures has died ({reason}); if memory was short, lower data.workers"
        ) from None
