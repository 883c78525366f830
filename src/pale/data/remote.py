"""Images and archives in object stores and on web servers: `s3://`, `gs://`, `http://` and `https://`, through fsspec.

An address is used only if a user typed it: none is taken from lists, recipes or weights, and a redirect to another host
is refused. Each read has a timeout, is retried with exponential backoff, and the number of bytes is checked. If a
store fails repeatedly, the program stops instead of recording every image as failed.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import os
import random
import re
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any, TypeVar

from ..errors import DataError, PaleError, SettingsError, UnavailableError
from .reading import MAX_TEXT_BYTES, display_name

T = TypeVar("T")
SCHEMES = ("s3", "gs", "http", "https")
PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "http": "aiohttp", "https": "aiohttp"}
ADDRESS = re.compile(rf"({'|'.join(SCHEMES)})://[^/]+(/.*)?", re.IGNORECASE | re.DOTALL)
MAX_REMOTE_BYTES = 2**28  # of an image
CHUNK = 2**24  # bytes of an archive that are requested together
MIN_RATE = 100_000  # bytes per second; a slower response counts as stalled
MAX_IN_A_ROW = 20  # files that fail one after the other before the store counts as unavailable


class RemoteError(PaleError, OSError):
    """A file of a store could not be read, after all attempts."""


class _OtherHostError(Exception):
    """A server redirects to another host; not an `OSError`, which aiohttp would replace by its own."""


class StoreUnavailableError(UnavailableError):
    """A store fails repeatedly."""


@dataclass(frozen=True)
class RemoteOptions:
    """Options for reading stores.

    Attributes:
        cache: folder for archives; by default in the user's cache folder (XDG_CACHE_HOME).
        cache_bytes: maximum total size of the files in it.
        timeout: seconds until a response starts; the time for its content depends on the size.
        attempts: maximum number of attempts of each read.
        pause: seconds before the second attempt; doubled before each further one, at most 30.
    """

    cache: Path = field(
        default_factory=lambda: (
            Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pale" / "remote"
        )
    )
    cache_bytes: int = 2**34
    timeout: float = 30.0
    attempts: int = 5
    pause: float = 0.5


DEFAULTS = RemoteOptions()


def is_remote(source: str) -> bool:
    """Return whether a source is an address rather than a path; other schemes are refused."""
    scheme, separator, _ = source.partition("://")
    if not separator or os.path.exists(source):
        return False
    if ADDRESS.fullmatch(source) is None:
        raise SettingsError(
            f"an address is {', '.join(f'{s}://' for s in SCHEMES)} and a host or bucket, got {display_name(source)!r}"
            + (
                ""
                if scheme.lower() in SCHEMES
                else "; copy the images to one of these, or to a folder"
            )
        )
    return True


_typed: set[str] = set()  # addresses that the user typed in this process


def allow(address: str) -> None:
    """Allow an address in settings, because the user typed it or the user's own program contains it."""
    _typed.add(address.rstrip("/"))


def require_typed(address: str) -> None:
    """Refuse an address from a recipe or a header of weights that the user has not typed."""
    if address.rstrip("/") not in _typed:
        raise SettingsError(
            f"an address is used only if it is typed, and this one comes from a file: {display_name(address)}; if you "
            f"trust it, add --data.root {display_name(address)}"
        )


def address_of(path: Path | None) -> str | None:
    """Return the address in a setting of type Path (`s3:/bucket/folder`); None if it is a path."""
    found = re.fullmatch(r"(s3|gs|https?):/+([^/].*)", str(path), re.DOTALL)
    return None if found is None else f"{found[1]}://{found[2]}"


class Store:
    """A host or bucket.

    Args:
        address: address of any file in it; only scheme and host are used.
        options: options for reading it.
    """

    def __init__(self, address: str, options: RemoteOptions = DEFAULTS) -> None:
        if not is_remote(address):
            raise SettingsError(f"{display_name(address)!r} is not an address; give a path instead")
        self.scheme = address.partition("://")[0].lower()
        self.host = re.split(r"[/?#]", address.partition("://")[2], maxsplit=1)[0]
        self.options = options
        self._system: Any = None
        self._process = 0
        self._failed = 0
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {"address": f"{self.scheme}://{self.host}", "options": self.options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["address"], state["options"])  # type: ignore[misc]

    @property
    def is_web(self) -> bool:
        """Whether it is a web server, which cannot list its files."""
        return self.scheme.startswith("http")

    def read(self, address: str, size: int | None = None, limit: int = MAX_REMOTE_BYTES) -> bytes:
        """Return the content of a file.

        Args:
            address: whole address.
            size: number of bytes, if a listing of the store states it; another length is a failed attempt.
            limit: a larger file is an error.
        """
        return self._repeat(address, lambda: self._read(address, size, limit))

    def read_range(self, address: str, start: int, size: int) -> bytes:
        """Return `size` bytes of a file from an offset."""
        return self._repeat(address, lambda: self._read(address, size, size, start))

    def size(self, address: str) -> int | None:
        """Return the size of a file in bytes; None if a web server does not state it."""
        path, seconds = self._path(address), self.options.timeout
        found = self._repeat(address, lambda: self._files().info(path, timeout=seconds))
        return None if found["size"] is None else int(found["size"])

    def find(self, address: str) -> Iterator[tuple[str, int]]:
        """Yield the address and the size of each file below a prefix, folder by folder."""
        if self.is_web:
            raise SettingsError(
                f"a web server does not list its files, got {display_name(address)!r}; give an image, a list "
                "(.txt) or a tar archive"
            )
        folders = [self._path(address).rstrip("/")]
        while folders:
            folder = folders.pop()
            entries = self._repeat(f"{self.scheme}://{folder}", partial(self._list, folder))
            for entry in sorted(entries, key=lambda entry: str(entry["name"])):
                if entry["type"] == "directory":
                    folders.append(entry["name"])
                elif entry["name"].rstrip("/") != folder or len(entries) == 1:
                    yield f"{self.scheme}://{entry['name']}", int(entry["size"])

    def _list(self, folder: str) -> Any:
        return self._files().ls(folder, detail=True, timeout=10 * self.options.timeout)

    def download(self, address: str, target: Path, size: int | None) -> None:
        """Write a file to disk; parts of a file of an object store are retried separately."""
        with target.open("wb") as file:
            if self.is_web:  # few web servers return parts of files
                self._repeat(address, lambda: self._get(address, self.options.cache_bytes, file))
                return
            for start in range(0, size or 0, CHUNK):
                file.write(self.read_range(address, start, min(CHUNK, (size or 0) - start)))

    def _path(self, address: str) -> str:
        return address if self.is_web else address.partition("://")[2]

    def _read(self, address: str, size: int | None, limit: int, start: int | None = None) -> bytes:
        if self.is_web:
            file = io.BytesIO()
            self._get(address, limit, file, start)
            content = file.getvalue()
        else:
            path = self._path(address)
            if size is None:
                size = int(self._files().info(path, timeout=self.options.timeout)["size"])
            if size > limit:
                raise _too_large(address, size, limit)
            ends = {} if start is None else {"start": start, "end": start + size}
            seconds = self.options.timeout + size / MIN_RATE
            content = self._files().cat_file(path, timeout=seconds, **ends)
        if size is not None and len(content) != size:
            raise OSError(f"{len(content):,} of {size:,} bytes arrived")
        return bytes(content)

    def _get(self, address: str, limit: int, file: IO[bytes], start: int | None = None) -> None:
        """Write the response of a web server to a file, and overwrite what an earlier attempt wrote."""
        from fsspec.asyn import sync

        file.seek(0)
        file.truncate()
        system = self._files()
        sync(system.loop, _receive, system, address, limit, start, self.options.timeout, file)

    def _files(self) -> Any:
        """Return fsspec's file system, which each process opens anew: connections do not survive a fork."""
        with self._lock:
            if self._system is None or self._process != os.getpid():
                self._system = _open_system(self.scheme, self.host, self.options)
                self._process = os.getpid()
            return self._system

    def _repeat(self, address: str, call: Callable[[], T]) -> T:
        """Call a function until it succeeds; permanent errors are raised immediately."""
        name = display_name(address)
        for attempt in range(self.options.attempts):
            try:
                found = call()
            except PaleError:
                raise
            except _OtherHostError as error:
                raise RemoteError(
                    f"{name}: the server redirects to {display_name(str(error))!r}, and only the host that was typed "
                    "is contacted; give that address instead if you trust it"
                ) from None
            except (FileNotFoundError, PermissionError) as error:
                raise RemoteError(
                    f"{name}: {_reason(error)}; check the address and the credentials"
                ) from None
            except _failures(self.scheme) as error:
                status = getattr(error, "status", None)
                if (
                    isinstance(status, int)
                    and 400 <= status < 500
                    and status not in (408, 425, 429)
                ):
                    raise RemoteError(
                        f"{name}: the server returns status {status} ({_reason(error)}); "
                        "check the address and the credentials"
                    ) from None
                last = error
                if attempt + 1 < self.options.attempts:
                    pause = min(30.0, self.options.pause * 2**attempt)
                    # Random, so that readers do not retry at the same time.
                    time.sleep(pause * random.uniform(0.75, 1.25))
            else:
                self._failed = 0
                return found
        self._failed += 1
        if self._failed >= MAX_IN_A_ROW:
            raise StoreUnavailableError(
                f"{self.scheme}://{self.host} is not available: {self._failed} files failed one after the other, the "
                f"last with {_reason(last)}; check the network, and repeat the command"
            )
        raise RemoteError(
            f"{name}: could not be read in {self.options.attempts} attempts ({_reason(last)}); check the network, and "
            "repeat the command"
        ) from None


def _open_system(scheme: str, host: str, options: RemoteOptions) -> Any:
    try:
        import fsspec

        __import__(PACKAGES[scheme])
    except ImportError as error:
        extra = "gcsfs" if scheme == "gs" else "'pale-transformer[remote]'"
        raise UnavailableError(
            f"{scheme}:// needs the package {error.name}, which is not installed; pip install {extra}"
        ) from None
    common = {"skip_instance_cache": True, "use_listings_cache": False}
    if scheme == "s3":
        config = {
            "connect_timeout": options.timeout,
            "read_timeout": options.timeout,
            "retries": {"max_attempts": 0},
        }
        system = fsspec.filesystem("s3", config_kwargs=config, **common)
        system.retries = 1  # `_repeat` retries
        return system
    if scheme == "gs":
        return fsspec.filesystem("gs", **common)
    return fsspec.filesystem(scheme, get_client=_web_client(host, options.timeout), **common)


def _web_client(host: str, timeout: float) -> Callable[..., Awaitable[Any]]:
    """Return a function that opens a session which connects to one host, whatever a redirect names."""

    async def client(**options: Any) -> Any:
        import aiohttp
        from yarl import URL

        typed = URL(f"http://{host}")

        class OneHost(aiohttp.TCPConnector):  # type: ignore[misc]
            """Connects to the host that was typed: redirects have more than one spelling, connections only one."""

            async def connect(self, req: Any, *args: Any, **more: Any) -> Any:
                if (req.url.host, req.url.explicit_port) != (typed.host, typed.explicit_port):
                    raise _OtherHostError(str(req.url))
                return await super().connect(req, *args, **more)

        limits = aiohttp.ClientTimeout(total=None, sock_connect=timeout, sock_read=timeout)
        return aiohttp.ClientSession(timeout=limits, connector=OneHost(), **options)

    return client


async def _receive(
    system: Any, address: str, limit: int, start: int | None, timeout: float, file: IO[bytes]
) -> None:
    """Write the response to a request for an address to a file, from byte `start` on, at most `limit` bytes."""
    session = await system.set_session()
    headers = {} if start is None else {"Range": f"bytes={start}-{start + limit - 1}"}
    async with (
        asyncio.timeout(timeout) as deadline,
        session.get(address, headers=headers) as answer,
    ):
        answer.raise_for_status()
        length = answer.content_length
        if start is not None and answer.status != 206:
            raise RemoteError(
                f"{display_name(address)}: the server does not return parts of a file; copy it to a folder"
            )
        if length is not None and length > limit:
            raise _too_large(address, length, limit)
        expected = (CHUNK if length is None else length) / MIN_RATE
        deadline.reschedule(asyncio.get_running_loop().time() + timeout + expected)
        arrived = 0
        async for piece in answer.content.iter_chunked(2**18):
            arrived += len(piece)
            if arrived > limit:
                raise _too_large(address, arrived, limit)
            file.write(piece)


def _failures(scheme: str) -> tuple[type[BaseException], ...]:
    """Return the exception classes of temporary failures."""
    import aiohttp

    found: list[type[BaseException]] = [OSError, TimeoutError, aiohttp.ClientError]
    if scheme == "s3":
        import botocore.exceptions

        found += [botocore.exceptions.BotoCoreError, botocore.exceptions.ClientError]
    return tuple(found)


def _too_large(address: str, size: int, limit: int) -> DataError:
    return DataError(
        f"{display_name(address)}: at most {limit:,} bytes are read of a remote file, it has {size:,} or more; shrink "
        "it, or copy it to a folder"
    )


def _reason(error: BaseException) -> str:
    if isinstance(error, TimeoutError) and not str(error):
        return "no answer in time"
    return (str(error) or type(error).__name__).splitlines()[0]


class ArchiveCache:
    """Cache of archives on the local disk, at most `options.cache_bytes` in total; the least recently used are removed.

    Args:
        options: folder and size.
    """

    def __init__(self, options: RemoteOptions = DEFAULTS) -> None:
        self.folder, self.limit = options.cache, options.cache_bytes

    def fetch(self, store: Store, address: str, size: int | None = None) -> Path:
        """Return the path of a local copy; download it if there is none.

        Args:
            store: store of the archive.
            address: address of the archive.
            size: its size in bytes, if known; a cached file of another size is downloaded again.
        """
        size = store.size(address) if size is None else size
        if (size or 0) > self.limit:
            raise SettingsError(
                f"the cache holds {self.limit:,} bytes, and {display_name(address)} has {size:,}; make it larger "
                "(--cache-mb)"
            )
        key = hashlib.blake2b(f"{address}\n{size}".encode(), digest_size=16).hexdigest()
        path = self.folder / f"{key}.tar"
        if path.is_file() and (size is None or path.stat().st_size == size):
            os.utime(path)
            return path
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._make_room(size or 0)
        temporary = self.folder / f".{key}.{os.getpid()}.{threading.get_ident()}"
        try:
            store.download(address, temporary, size)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        self._make_room(0, keep=path)
        return path

    def _make_room(self, size: int, keep: Path | None = None) -> None:
        found = []
        for path in self.folder.glob("*.tar"):
            try:
                found.append((path.stat().st_mtime, path.stat().st_size, path))
            except FileNotFoundError:  # another job removed it
                continue
        total = sum(bytes_ for _, bytes_, _ in found) + size
        for _, bytes_, path in sorted(found):
            if total <= self.limit:
                return
            if path != keep:
                path.unlink(missing_ok=True)
                total -= bytes_


@dataclass(frozen=True, slots=True)
class RemoteItem:
    """An image of a store; `size` is None if it is not known."""

    name: str
    address: str
    store: Store
    size: int | None = None

    def load(self) -> bytes:
        """Return the content."""
        return self.store.read(self.address, self.size)


def read_list(store: Store, address: str) -> io.BytesIO:
    """Return a list file of a store."""
    return io.BytesIO(store.read(address, limit=min(MAX_TEXT_BYTES, 2**31)))


def common_stores(addresses: Sequence[str], options: RemoteOptions) -> list[Store]:
    """Return the store of each address; addresses with the same scheme and host share one."""
    known: dict[tuple[str, str], Store] = {}
    found = []
    for address in addresses:
        store = Store(address, options)
        found.append(known.setdefault((store.scheme, store.host), store))
    return found
