"""Images of object stores and web servers as one sequence, as `items.py` does for local files."""

from __future__ import annotations

import posixpath
from collections.abc import Iterator, Sequence
from urllib.parse import quote

from ...errors import DataError
from ..reading import display_name
from ..remote import (
    DEFAULTS,
    ArchiveCache,
    RemoteError,
    RemoteItem,
    RemoteOptions,
    Store,
    common_stores,
    read_list,
)
from .items import (
    LIST,
    WHOLE,
    BadItem,
    ImageItem,
    Shard,
    distinct,
    is_archive,
    is_file_name,
    list_names,
    own_archives,
    source_prefixes,
    tar_items,
)
from .paths import is_hidden


def remote_items(
    addresses: Sequence[str], shard: Shard = WHOLE, options: RemoteOptions = DEFAULTS
) -> Iterator[ImageItem]:
    """Yield the images of a shard: first files, sorted by name, then those of the archives.

    Args:
        addresses: addresses of images, prefixes (`s3://bucket/folder`), list files (.txt: paths below the folder of the
            list) and tar archives, as a user typed them.
        shard: shard to return.
        options: time limits and the cache of archives.
    """
    files: list[RemoteItem] = []
    archives: list[RemoteItem] = []
    names = [posixpath.basename(address.rstrip("/")) for address in addresses]
    sources = zip(addresses, common_stores(addresses, options), source_prefixes(names), strict=True)
    for address, store, prefix in sources:
        for name, found, size in _entries(store, address):
            name = display_name(prefix + name)
            item = RemoteItem(name, found, store, size)
            if is_archive(name):
                archives.append(item)
            elif shard.owns(name):
                files.append(item)
    yield from distinct(files)
    cache = ArchiveCache(options)
    for archive in own_archives(archives, shard):
        try:
            path = cache.fetch(archive.store, archive.address, archive.size)
        except RemoteError as error:
            yield BadItem(archive.name, str(error))
        else:
            yield from tar_items(str(path), archive.name)


def _entries(store: Store, address: str) -> Iterator[tuple[str, str, int | None]]:
    """Yield the relative name, the address and the size, if known, of each file of a source."""
    name = posixpath.basename(address)
    if address.lower().endswith(LIST):
        folder = address.rpartition("/")[0]
        for name in list_names(read_list(store, address), display_name(address)):
            if name.startswith("/") or ".." in name.split("/"):
                raise DataError(
                    f"{display_name(address)}: a remote list names files below its own folder, got "
                    f"{display_name(name)!r}"
                )
            yield name, f"{folder}/{quote(name) if store.is_web else name}", None
    elif is_file_name(name) or store.is_web:
        yield name, address, None
    else:
        root = address.rstrip("/") + "/"
        found = False
        for each, size in store.find(address):
            inside = each.removeprefix(root)
            if is_file_name(inside) and not is_hidden(inside):
                found = True
                yield inside, each, size
        if not found:
            raise DataError(f"there are no images below {display_name(address)}; check the address")
