"""Predict one shard of the images; a job that is repeated predicts only what is missing."""

from __future__ import annotations

import hashlib
import io
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import current_thread, main_thread
from typing import Any, TypeVar

import torch

from ...core.progress import Track, no_progress
from ...data.sources.items import ImageItem, Shard
from ...data.sources.paths import output_stem
from ...errors import RunError
from ...tasks.prediction import Prediction
from ..predictor import Failed, Predictor
from .parts import (
    FAILURES,
    Part,
    PartError,
    PartWriter,
    join_output,
    list_parts,
    remove_unfinished,
    set_aside,
    shard_folder,
    verify_part,
    write_json,
)

T = TypeVar("T")
PART_IMAGES = 4096  # images of a part
PART_SECONDS = 300.0  # maximum duration of a part, which an interrupted job may lose


@dataclass
class ShardResult:
    """Result of a job.

    Attributes:
        predicted: images predicted in this call.
        failed: images that could not be read or predicted, in this call.
        kept: images in parts of earlier calls.
        kept_failed: images among them that failed.
        damaged: parts of earlier calls that were damaged, and why; their images were predicted again.
        failures: the first failures of this call.
    """

    predicted: int = 0
    failed: int = 0
    kept: int = 0
    kept_failed: int = 0
    damaged: list[str] = field(default_factory=list)
    failures: list[Failed] = field(default_factory=list)

    def plain(self) -> dict[str, Any]:
        """Return the result as a JSON object."""
        return asdict(self)


MAX_FAILURES = 20  # maximum number in a result; all are in failures.jsonl


def predict_shard(
    predictor: Predictor,
    items: Iterable[ImageItem],
    output: Path,
    shard: Shard,
    *,
    retry_failed: bool = False,
    part_images: int = PART_IMAGES,
    part_seconds: float = PART_SECONDS,
    on_part: Callable[[Part], None] = lambda part: None,
    track: Track = no_progress,
) -> ShardResult:
    """Predict the images of a shard that no complete part has, and write parts.

    Args:
        predictor: model; model, weights and options must be those of the other jobs.
        items: images of the shard.
        output: folder of all jobs.
        shard: the shard.
        retry_failed: retry images that failed in an earlier call.
        part_images: images of a part.
        part_seconds: maximum duration of a part.
        on_part: called after each part.
        track: shows the progress.
    """
    join_output(output, shard.count, describe(predictor))
    folder = shard_folder(output, shard)
    folder.mkdir(parents=True, exist_ok=True)
    remove_unfinished(folder)
    result = ShardResult()
    done, number = _read_parts(folder, result, retry_failed)
    (folder / "done.json").unlink(missing_ok=True)
    missing = (item for item in items if item.name not in done)
    writer: PartWriter | None = None
    started = 0.0

    def commit() -> None:
        nonlocal writer, number
        if writer is not None:
            part, writer = _write(writer, writer.commit), None
            number = int(part.path.name.rpartition("-")[2]) + 1
            on_part(part)

    try:
        for each in track(predictor.stream(missing), "predicting", 0):
            with _uninterrupted():
                if writer is None:
                    writer, started = _guarded(lambda: PartWriter(folder, number)), time.monotonic()
                _write(writer, lambda: _add(writer, each, output))  # noqa: B023
                if isinstance(each, Failed):
                    result.failed += 1
                    result.failures += [each] * (len(result.failures) < MAX_FAILURES)
                else:
                    result.predicted += 1
                if writer.images >= part_images or time.monotonic() - started >= part_seconds:
                    commit()
    except BaseException:  # an interrupted job keeps its results so far
        if writer is not None and not writer.discarded:
            with _uninterrupted():
                commit()
        raise
    with _uninterrupted():
        commit()
    images = result.predicted + result.failed + result.kept
    write_json(temporary := folder / ".done.json", {"images": images})
    os.replace(temporary, folder / "done.json")
    return result


def describe(predictor: Predictor) -> dict[str, Any]:
    """Return the values that all jobs of an output folder must share."""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in predictor.loaded.model.state_dict().items():
        content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        digest.update(content.numpy().data)
    return {
        "task": predictor.task,
        "model": predictor.loaded.name,
        "weights": digest.hexdigest(),
        **asdict(predictor.options),
    }


def _read_parts(folder: Path, result: ShardResult, retry_failed: bool) -> tuple[set[str], int]:
    """Return the names of the images in complete parts, and the number of the next part; set damaged parts aside."""
    done: set[str] = set()
    failed: set[str] = set()
    number = 0
    for path in list_parts(folder):
        number = int(path.name.rpartition("-")[2]) + 1
        try:
            part = verify_part(path)
            names, names_failed = set(part.names()), set(part.names(FAILURES))
        except RunError as error:
            set_aside(path)
            result.damaged.append(str(error))
            continue
        done |= names
        failed |= names_failed
    failed -= done
    result.kept, result.kept_failed = len(done), 0
    if not retry_failed:
        done |= failed
        result.kept, result.kept_failed = len(done), len(failed)
    return done, number


def _add(writer: PartWriter, result: Prediction | Failed, output: Path) -> None:
    if isinstance(result, Prediction):
        for end, image in result.extra_images().items():
            target = output / f"{output_stem(result.name)}{end}"
            target.parent.mkdir(parents=True, exist_ok=True)
            content = io.BytesIO()
            image.save(content, target.suffix.removeprefix(".").upper())
            temporary = target.with_name(f".{target.name}.{os.getpid()}")
            with temporary.open("wb") as file:
                file.write(content.getvalue())
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, target)
    writer.add(result)


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Hold back SIGINT and SIGTERM until the end of the block: an image half written would be lost or repeated."""
    held: list[int] = []
    try:
        with (
            ExitStack() as restored
        ):  # a handler that raises does not keep the other from being restored
            if current_thread() is main_thread():  # Python runs no handlers in others
                for number in (signal.SIGINT, signal.SIGTERM):
                    if (handler := signal.getsignal(number)) is not None:
                        restored.callback(signal.signal, number, handler)
                        signal.signal(number, lambda number, frame: held.append(number))
            yield
    finally:
        for received in held:
            signal.raise_signal(received)


def _write(writer: PartWriter, write: Callable[[], T]) -> T:
    """Call a function that writes into a part; if it fails, the part is inconsistent and is discarded."""
    try:
        return _guarded(write)
    except BaseException:
        writer.discard()
        raise


def _guarded(write: Callable[[], T]) -> T:
    """Call a function that writes; a full disk or a similar failure stops the job with advice."""
    try:
        return write()
    except PartError:
        raise
    except OSError as error:
        raise PartError(
            f"a part could not be written ({error.strerror or error}); make room or repair the disk, and repeat the "
            "command: complete parts are kept"
        ) from error
