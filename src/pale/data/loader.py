"""Datasets of (image, class), and data loaders whose batches do not depend on the number of workers."""

from __future__ import annotations

import atexit
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing.process import BaseProcess
from typing import Any, TypeAlias
from weakref import WeakSet

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from ..compat import shut_down_workers, worker_processes
from ..errors import DataError
from .seeding import seeded
from .sources.images import ImageSource
from .sources.scenes import SceneImages
from .stream import Key
from .transforms.images import TrainTransform, Transform

MAX_PIPE_BYTES = 1 << 16  # largest tensor that workers send by value; the capacity of a Linux pipe
Batch: TypeAlias = dict[str, Any]  # tensors and others by name
# Image, class and key; with token labels also their probabilities and classes, and the places of the crop.
Sample = tuple[Any, ...]


class ImageDataset(Dataset[Sample]):
    """A source with a transform. The random draws of item (epoch, index) depend on (seed, epoch, index) only.

    Args:
        source: the images.
        transform: from a Pillow image to a tensor; with token labels a `TrainTransform`.
        seed: seed of all draws.
        token_labels: returns the probabilities and classes for an image index.
    """

    def __init__(
        self,
        source: ImageSource,
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
            image, label = self.source.image_and_label(index)
        else:
            image, label = self.source.image(index), self.source.labels[index]
        with seeded(self.seed, epoch, index):
            if self.token_labels is None:
                return self.transform(image), label, key
            assert isinstance(self.transform, TrainTransform)
            pixels, places = self.transform.with_places(image)
        return pixels, label, key, *self.token_labels(index), torch.from_numpy(places)


def collate(samples: list[Sample]) -> Batch:
    """Stack samples: images uint8 (b, 3, h, w), channels last in memory, labels (b,), keys (b, 2).

    With token labels also token_scores and token_classes (b, k, h, w) and places (b, 2, 3).
    """
    images, *others = zip(*samples, strict=True)
    stacked = torch.stack([image.permute(1, 2, 0) for image in images])
    return {"images": stacked.permute(0, 3, 1, 2)} | collate_labels(*others)


def collate_labels(
    labels: Sequence[int], keys: Sequence[Key], *tokens: tuple[Tensor, ...]
) -> Batch:
    """Stack everything of a batch except the images."""
    names = ("token_scores", "token_classes", "places")
    rest = {name: torch.stack(part) for name, part in zip(names, tokens, strict=False)}
    return {"labels": torch.tensor(labels), "keys": torch.tensor(keys)} | rest


def make_loader(
    data: Dataset[Any],
    sampler: Sampler[list[Key]],
    collate_fn: Callable[[list[Any]], Batch],
    workers: int,
    pin: bool,
    persistent: bool = False,
) -> DataLoader[Batch]:
    """Build a loader over batches of keys; its batches do not depend on the number of workers.

    Args:
        data: the dataset that the keys index.
        sampler: yields lists of keys and has a length.
        collate_fn: stacks samples to a batch.
        workers: maximum number of workers, also bounded by this process's share of the cores and by the batches.
        pin: pin the memory of the batches.
        persistent: keep the workers alive between passes over the data.
    """
    count = count_workers(workers, len(sampler))  # type: ignore[arg-type]
    if count:
        collate_fn = partial(_collate_for_pipe, collate_fn)
    return DataLoader(
        data,
        batch_sampler=sampler,
        collate_fn=collate_fn,
        num_workers=count,
        pin_memory=pin,
        persistent_workers=persistent and count > 0,
        worker_init_fn=ignore_signals,
    )


def count_workers(workers: int, batches: int) -> int:
    """Return the number of workers, at most `workers`, this process's share of the cores and the number of batches."""
    local_processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # set by torchrun
    return min(workers, max(1, usable_cores() // local_processes), batches)


class PipeBatch(Batch):
    """A batch whose small tensors are pickled by value; it is unpickled as a plain dict.

    PyTorch sends each tensor as a file descriptor of shared memory. For labels and keys of a few kB, opening and
    mapping it costs the main process more than copying the bytes through the pipe of the worker.
    """

    def __reduce__(self) -> tuple[object, ...]:
        arrays = {name: value.numpy() for name, value in self.items() if _is_small(value)}
        return _join_batch, ({n: v for n, v in self.items() if n not in arrays}, arrays, [*self])


def _is_small(value: object) -> bool:
    # NumPy has neither memory formats nor bfloat16.
    return (
        type(value) is Tensor
        and value.nbytes <= MAX_PIPE_BYTES
        and value.is_contiguous()
        and value.dtype != torch.bfloat16
    )


def _join_batch(rest: Batch, arrays: dict[str, NDArray[np.generic]], names: list[str]) -> Batch:
    return {
        name: torch.from_numpy(arrays[name]) if name in arrays else rest[name] for name in names
    }


def _collate_for_pipe(collate_fn: Callable[[list[Any]], Batch], samples: list[Any]) -> Batch:
    batch = collate_fn(samples)
    return PipeBatch(batch) if type(batch) is dict else batch


def usable_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def ignore_signals(worker: int) -> None:
    """Ignore SIGINT and SIGTERM in a worker: they reach the whole process group, but the batch must be finished."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


_iterators: WeakSet[Any] = WeakSet()
_workers: WeakSet[BaseProcess] = WeakSet()


def _stop_workers() -> None:
    # At exit Python sends SIGTERM to its child processes and waits for them. The workers ignore SIGTERM, so they are
    # stopped here.
    for iterator in list(_iterators):
        shut_down_workers(iterator)
    for worker in list(_workers):  # after an error in the main process a worker may still run
        if worker.is_alive():
            worker.kill()


class Prefetcher(Iterator[Batch]):
    """Iterate over prepared batches; `fetch` prepares some in advance and reports their errors.

    Args:
        batches: the raw batches.
        prepare: called with each batch; may raise, too.
    """

    def __init__(self, batches: Iterator[Batch], prepare: Callable[[Batch], Batch]) -> None:
        self.batches, self.prepare, self.ready = batches, prepare, deque[Batch]()
        self.waited = 0.0  # seconds spent waiting for `batches`

    def __next__(self) -> Batch:
        return self.ready.popleft() if self.ready else self._next_prepared()

    def _next_prepared(self) -> Batch:
        start = time.perf_counter()
        try:
            batch = next(self.batches)
        finally:
            self.waited += time.perf_counter() - start
        return self.prepare(batch)

    def fetch(self, count: int) -> ValueError | None:
        """Prepare batches until `count` are ready; return the error that prevents it, or None."""
        try:
            while len(self.ready) < count:
                self.ready.append(self._next_prepared())
        except ValueError as error:
            return error
        return None


def iterate_batches(loader: DataLoader[Any]) -> Iterator[Batch]:
    """Yield the batches of a loader; an error in a worker becomes a `DataError` of one line, without a traceback."""
    try:
        iterator: Any = iter(loader)
        if loader.num_workers:
            _iterators.add(iterator)
            # The last registered handler runs first: before PyTorch's, which on CUDA waits five seconds per worker.
            atexit.unregister(_stop_workers)
            atexit.register(_stop_workers)
            _workers.update(worker_processes(iterator))
        yield from iterator
    except (ValueError, OSError) as error:
        last = (str(error).strip() or type(error).__name__).splitlines()[-1]
        raise DataError(last.rpartition("UnreadableImageError: ")[2]) from None
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        reason = str(error).strip().splitlines()[0].rstrip(". ")
        raise DataError(
            f"a process that reads images has died ({reason}); if memory was short, lower data.workers (now "
            f"{loader.num_workers}) or batch, or use smaller images; a bus error in a container means too little "
            "shared memory: docker run --shm-size"
        ) from None
