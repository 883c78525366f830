"""The shard and merge options of `pale predict`."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ...core.progress import Track
from ...data.remote import RemoteOptions
from ...data.sources.items import Shard
from ...data.sources.shard_settings import ShardSettings
from ...errors import SettingsError
from ..inputs import find_items
from ..predictor import Failed, Predictor
from .merge import merge_parts
from .run import predict_shard

MAX_LISTED = 5  # failures that are printed


@dataclass(frozen=True)
class Outcome:
    """Output of the command: JSON, a line of text, and the exit code."""

    plain: dict[str, Any]
    line: str
    code: int


def remote_options(settings: ShardSettings) -> RemoteOptions:
    """Return the options for reading addresses."""
    if settings.cache_mb < 1:
        raise SettingsError(f"--cache-mb must be at least 1, got {settings.cache_mb}")
    options = RemoteOptions(cache_bytes=settings.cache_mb * 2**20)
    return options if settings.cache is None else replace(options, cache=settings.cache)


def run_command(
    settings: ShardSettings,
    inputs: Sequence[str],
    output: Path | None,
    load: Callable[[], Predictor],
    log: Callable[[str], None],
    track: Track,
) -> Outcome:
    """Predict a shard, or merge all shards.

    Args:
        settings: shard or merge options.
        inputs: images, folders, lists, archives or addresses.
        output: folder of all jobs.
        load: returns the model.
        log: prints a message.
        track: shows the progress.
    """
    if settings.merge is not None:
        merged = merge_parts(settings.merge)
        line = f"{merged.predicted} images of {merged.parts} parts and {merged.shards} shards"
        line = f"{settings.merge}: {line}; {merged.failed} failed (failures.jsonl)"
        return Outcome(asdict(merged), line, 1 if merged.failed else 0)
    if output is None:
        raise SettingsError("--shard writes parts into a folder; give it: -o DIR")
    shard = Shard.parse(str(settings.shard))
    items = find_items(inputs, shard, remote_options(settings))
    # A job that its scheduler terminates still writes its current part.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        done = predict_shard(
            load(),
            items,
            output,
            shard,
            retry_failed=settings.retry_failed,
            on_part=lambda part: log(f"{part.path}: {part.predicted} images, {part.failed} failed"),
            track=track,
        )
    except KeyboardInterrupt:
        line = "interrupted; the same command predicts what is missing"
        return Outcome({"interrupted": True}, line, 130)
    finally:
        signal.signal(signal.SIGTERM, before)
    for reason in done.damaged:
        log(f"pale: {reason}; its images were predicted again")
    log_failures(done.failures, done.failed, log)
    line = f"{done.predicted} images predicted, {done.failed} failed; {done.kept} were there already, of which"
    line = f"shard {shard.index}/{shard.count}: {line} {done.kept_failed} failed"
    return Outcome(done.plain(), line, 1 if done.failed or done.kept_failed else 0)


def log_failures(failures: Sequence[Failed], count: int, log: Callable[[str], None]) -> None:
    """Print the first failures, and the number of the others."""
    for failure in failures[:MAX_LISTED]:
        log(f"pale: {failure.reason}")
    if count > MAX_LISTED:
        log(f"pale: and {count - MAX_LISTED} more that failed")
