"""Options of prediction in shards and from addresses. This module imports nothing heavy, for a fast `pale --help`."""

from __future__ import annotations

from pathlib import Path

from ...core.options import option, settings_class

SHARDS = ("shards", "many images, in independent jobs")
ADDRESSES = ("addresses", "s3://, gs://, http:// and https://")


@settings_class
class ShardSettings:
    """Options for predicting a part of the images, and for the cache of remote archives."""

    shard: str | None = option(
        "predict part I of N of the images (I from 0) and write it to -o; a second run computes only what is missing",
        default=None,
        metavar="I/N",
        group=SHARDS,
    )
    retry_failed: bool = option("retry images that failed before", default=False, group=SHARDS)
    merge: Path | None = option(
        "merge the parts of all shards in this folder", default=None, metavar="DIR", group=SHARDS
    )
    cache: Path | None = option(
        "folder for archives (default: ~/.cache/pale/remote)",
        "--cache-dir",
        default=None,
        metavar="DIR",
        group=ADDRESSES,
    )
    cache_mb: int = option("maximum size of that folder, MiB", default=16384, group=ADDRESSES)
