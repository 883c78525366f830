"""Tar shards of an object store, for training: `--data.kind shards --data.root s3://bucket/folder`.

Shards that fit into the cache together are downloaded when they are first used. Otherwise each image is read by a
separate request, so the dataset may be larger than the local disk.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ...errors import DataError, SettingsError
from ..reading import UnreadableImageError, display_name
from ..remote import DEFAULTS, ArchiveCache, RemoteError, RemoteOptions, Store, require_typed
from .shards import ShardFiles, read_index


class RemoteShardFiles(ShardFiles):
    """Images of a split in a store, by number.

    Args:
        address: address of the folder, as the user typed it.
        split: the shards are `<split>-*.tar`, and their index is `<split>.npz` (`pale data pack` writes both).
        classes: classes of the training set, for a validation set.
        options: time limits and the cache.
    """

    def __init__(
        self,
        address: str,
        split: str,
        classes: Sequence[str] | None = None,
        options: RemoteOptions = DEFAULTS,
    ) -> None:
        require_typed(address)
        self.address, self.store, self.cache = (
            address.rstrip("/"),
            Store(address, options),
            ArchiveCache(options),
        )
        if self.store.is_web:
            raise SettingsError(
                f"training reads shards of s3:// and gs://, got {display_name(address)!r}; copy them to a folder"
            )
        sizes = {
            name.rpartition("/")[2]: size
            for name, size in self.store.find(self.address)
            if name.rpartition("/")[0] == self.address
        }
        if f"{split}.npz" not in sizes:
            raise DataError(
                f"there is no {self.address}/{split}.npz; shards of a store need the index that pale data pack writes"
            )
        file = self.cache.fetch(self.store, f"{self.address}/{split}.npz", sizes[f"{split}.npz"])
        index = read_index(file)
        if any(sizes.get(tar) != size for tar, size in zip(index.tars, index.bytes, strict=True)):
            raise DataError(
                f"{self.address}/{split}.npz does not fit the shards beside it: some are missing or were changed; copy "
                "them again"
            )
        self.whole = int(index.bytes.sum()) <= options.cache_bytes
        super().__init__(Path(display_name(self.address)), split, classes, index)

    def shard_path(self, shard: int) -> Path:
        """Return the path of a local copy of a tar."""
        tar = self.index.tars[shard]
        return self.cache.fetch(self.store, f"{self.address}/{tar}", int(self.index.bytes[shard]))

    def content(self, index: int) -> bytes:
        """Return an image file as it is."""
        if self.whole:
            return super().content(index)
        shard = int(self.index.shard[index])
        size, offset = int(self.index.size[index]), int(self.index.offset[index])
        try:
            tar = self.index.tars[shard]
            return self.store.read_range(f"{self.address}/{tar}", offset, size)
        except RemoteError as error:
            raise UnreadableImageError(str(error)) from None
