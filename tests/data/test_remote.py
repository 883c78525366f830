"""Object stores and web servers: a real S3 server on this machine, behind a proxy that drops, stalls and cuts short."""

import functools
import http.server
import io
import os
import pickle
import tarfile
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image
from support.proxy import Proxy
from support.recipes import classification_recipe
from support.weights import pixels

from pale.cli.main import main, parse
from pale.data import remote
from pale.data.remote import (
    ArchiveCache,
    RemoteError,
    RemoteOptions,
    Store,
    StoreUnavailableError,
    is_remote,
)
from pale.data.sources.items import Shard, local_items
from pale.data.sources.remote_items import remote_items
from pale.data.sources.remote_shards import RemoteShardFiles
from pale.data.sources.shards import ShardFiles
from pale.errors import DataError, SettingsError

for package in ("s3fs", "moto", "aiohttp"):
    pytest.importorskip(package, reason=f"not installed: {package}")

# botocore and moto use names that are deprecated in newer versions of other packages.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")


@pytest.fixture(scope="module")
def s3_port():
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", 0)
    server.start()
    yield server.get_host_and_port()[1]
    server.stop()


def s3_client(port: int):
    import boto3

    return boto3.client(
        "s3",
        endpoint_url=f"http://127.0.0.1:{port}",
        aws_access_key_id="test",
        aws_secret_access_key="test",
        region_name="us-east-1",
    )


@pytest.fixture
def proxy(s3_port, monkeypatch):
    found = Proxy(s3_port)
    environment = {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{found.port}",
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    yield found
    found.close()


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("photos")
    (root / "inner").mkdir()
    for i in range(8):
        where = root / ("inner" if i % 2 else "") / f"{i}.png"
        Image.fromarray(pixels(30 + i, 20)).save(where)
    (root / "all.txt").write_text("0.png\ninner/1.png\n")
    with tarfile.open(root / "two.tar", "w") as tar:
        for name in ("2.png", "4.png"):
            tar.add(root / name, name)
    return root


@pytest.fixture(scope="module")
def bucket(s3_port, photos) -> str:
    client = s3_client(s3_port)
    client.create_bucket(Bucket="photos")
    for path in photos.rglob("*.*"):
        key = f"set/{path.relative_to(photos).as_posix()}"
        client.put_object(Bucket="photos", Key=key, Body=path.read_bytes())
    client.put_object(Bucket="photos", Key="large.bin", Body=bytes(range(256)) * 40_000)
    return "s3://photos"


@pytest.fixture
def web(photos):
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

        def do_GET(self):
            if self.path == "/moved.png":
                self.send_response(302)
                self.send_header("Location", "http://169.254.169.254/0.png")
                self.end_headers()
                return
            super().do_GET()

    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Quiet, directory=photos)
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    proxy = Proxy(server.server_address[1])
    yield proxy
    proxy.close()
    server.shutdown()
    server.server_close()


@pytest.fixture
def quick(tmp_path) -> RemoteOptions:
    return RemoteOptions(
        cache=tmp_path / "cache", cache_bytes=10**8, timeout=3.0, attempts=3, pause=0.01
    )


def contents(items) -> dict[str, bytes]:
    def read(item):
        found = item.load()
        return found if isinstance(found, bytes) else Path(found).read_bytes()

    return {item.name: read(item) for item in items}


def test_a_prefix_holds_what_the_folder_holds(proxy, bucket, photos, quick):
    found = contents(remote_items([f"{bucket}/set"], options=quick))
    assert found == contents(local_items([photos]))
    assert "two.tar/2.png" in found


def test_shards_of_a_prefix_are_those_of_the_folder(proxy, bucket, photos, quick):
    for k in range(3):
        here = [i.name for i in local_items([photos], Shard(k, 3))]
        assert [i.name for i in remote_items([f"{bucket}/set/"], Shard(k, 3), quick)] == here


def test_lists_archives_and_images_of_a_store(proxy, bucket, photos, quick):
    expected = contents(local_items([photos]))
    listed = contents(remote_items([f"{bucket}/set/all.txt"], options=quick))
    assert listed == {name: expected[name] for name in ("0.png", "inner/1.png")}
    packed = contents(remote_items([f"{bucket}/set/two.tar"], options=quick))
    assert packed == {name: expected[name] for name in ("two.tar/2.png", "two.tar/4.png")}
    alone = contents(remote_items([f"{bucket}/set/0.png"], options=quick))
    assert alone == {"0.png": expected["0.png"]}


@pytest.mark.parametrize("fault", ["drop", "stall", 300])
def test_a_connection_that_fails_is_repeated(proxy, bucket, photos, quick, fault):
    items = [i for i in remote_items([f"{bucket}/set"], options=quick) if ".tar" not in i.name]
    for item in items[:2]:  # a fresh connection each: none that is kept open is used
        # More attempts than faults: on a busy machine an answer may come late.
        store = Store(bucket, replace(quick, attempts=5))
        proxy.faults = [fault, fault]
        before = proxy.connections
        assert store.read(item.address, item.size) == (photos / item.name).read_bytes()
        assert proxy.connections - before >= 3
        assert proxy.faults == []


def test_a_truncated_archive_is_repeated_in_pieces(proxy, bucket, quick, monkeypatch, tmp_path):
    monkeypatch.setattr(remote, "CHUNK", 2**20)
    store = Store(bucket, quick)
    proxy.faults = [None, 70_000, "drop"]
    path = ArchiveCache(quick).fetch(store, f"{bucket}/large.bin")
    assert path.read_bytes() == bytes(range(256)) * 40_000


@pytest.mark.parametrize("fault", ["drop", "stall", 300])
def test_a_file_that_fails_every_time_is_an_error_after_all_attempts(proxy, bucket, quick, fault):
    proxy.always = fault
    began = time.monotonic()
    with pytest.raises(
        RemoteError, match=r"0.png: could not be read in 3 attempts .* check the net"
    ):
        Store(bucket, quick).read(f"{bucket}/set/0.png", 500)
    assert time.monotonic() - began < 20


def test_pauses_grow(proxy, bucket, tmp_path, monkeypatch):
    pauses = []
    monkeypatch.setattr(remote.time, "sleep", pauses.append)
    proxy.always = "drop"
    with pytest.raises(RemoteError):
        Store(bucket, RemoteOptions(tmp_path, timeout=1, attempts=5, pause=1)).read(f"{bucket}/x")
    assert len(pauses) == 4
    for pause, expected in zip(pauses, (1, 2, 4, 8), strict=True):
        assert 0.75 * expected <= pause <= 1.25 * expected


def test_a_store_that_is_gone_ends_the_program(bucket, quick, monkeypatch, proxy):
    proxy.always = "drop"
    monkeypatch.setattr(remote, "MAX_IN_A_ROW", 3)
    store = Store(bucket, quick)
    for _ in range(2):
        with pytest.raises(RemoteError):
            store.read(f"{bucket}/set/0.png")
    with pytest.raises(StoreUnavailableError, match="3 files failed one after the other"):
        store.read(f"{bucket}/set/0.png")


def test_a_missing_file_is_an_error_at_once(proxy, bucket, quick):
    with pytest.raises(RemoteError, match=r"gone.png: .* check the address and the credentials"):
        Store(bucket, quick).read(f"{bucket}/set/gone.png")
    with pytest.raises((RemoteError, DataError), match="check the address"):
        list(remote_items([f"{bucket}/nothing"], options=quick))


def test_the_cache_is_bounded_and_used(proxy, bucket, tmp_path):
    options = RemoteOptions(tmp_path / "cache", 12_000_000, timeout=5, attempts=2, pause=0.01)
    cache, store = ArchiveCache(options), Store(bucket, options)
    first = cache.fetch(store, f"{bucket}/set/two.tar")
    before = proxy.connections
    assert cache.fetch(store, f"{bucket}/set/two.tar", first.stat().st_size) == first
    assert proxy.connections == before
    os.utime(first, (1, 1))
    second = cache.fetch(store, f"{bucket}/large.bin")
    assert first.exists()
    options = RemoteOptions(tmp_path / "cache", 10_245_000, timeout=5, attempts=2, pause=0.01)
    cache = ArchiveCache(options)
    third = cache.fetch(store, f"{bucket}/set/0.png")
    assert (first.exists(), second.exists(), third.exists()) == (False, True, True)
    assert sum(p.stat().st_size for p in (tmp_path / "cache").iterdir()) <= 10_245_000
    with pytest.raises(SettingsError, match=r"the cache holds 1,000 bytes.*--cache-mb"):
        ArchiveCache(RemoteOptions(tmp_path, 1000)).fetch(store, f"{bucket}/large.bin")


def test_a_web_server(web, photos, quick):
    base = f"http://127.0.0.1:{web.port}"
    expected = contents(local_items([photos]))
    listed = contents(remote_items([f"{base}/all.txt"], options=quick))
    assert listed == {name: expected[name] for name in ("0.png", "inner/1.png")}
    assert contents(remote_items([f"{base}/two.tar"], options=quick)).keys() == {
        "two.tar/2.png",
        "two.tar/4.png",
    }


@pytest.mark.parametrize("fault", ["drop", "stall", 300])
def test_a_web_server_that_fails_is_asked_again(web, photos, quick, fault):
    web.faults = [fault, fault]
    address = f"http://127.0.0.1:{web.port}/0.png"
    assert (
        Store(address, replace(quick, attempts=5)).read(address) == (photos / "0.png").read_bytes()
    )
    assert web.connections >= 3


def test_a_redirect_to_another_host_is_refused(web, quick):
    address = f"http://127.0.0.1:{web.port}/moved.png"
    with pytest.raises(RemoteError, match="only the host that was typed is contacted"):
        Store(address, quick).read(address)


REDIRECTS = {
    "location": ("Location", "http://{other}/x.png"),
    "relative": ("Location", "//{other}/x.png"),
    "tabs": ("Location", "\t/\t/{other}/x.png"),
    "uri": ("URI", "http://{other}/x.png"),  # aiohttp follows it, too
}


@pytest.mark.parametrize("name", REDIRECTS)
def test_no_spelling_of_a_redirect_reaches_another_host(quick, name):
    asked = []

    class Other(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_error(404)

        do_HEAD = do_GET  # noqa: N815

        def log_message(self, *_):
            pass

    class First(Other):
        def do_GET(self):
            header, target = REDIRECTS[name]
            self.send_response(302)
            self.send_header(header, target.format(other=f"127.0.0.1:{ports[0]}"))
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_HEAD = do_GET  # noqa: N815

    servers = [http.server.ThreadingHTTPServer(("127.0.0.1", 0), h) for h in (Other, First)]
    ports = [server.server_port for server in servers]
    for server in servers:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{ports[1]}/x.png"
    try:
        with pytest.raises(RemoteError, match="only the host that was typed is contacted"):
            Store(address, quick).read(address)
        with pytest.raises(RemoteError):  # fsspec gives another reason
            Store(address, quick).size(address)
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()
    assert asked == []


def test_a_file_beyond_the_limit_is_refused(web, proxy, bucket, quick):
    address = f"http://127.0.0.1:{web.port}/two.tar"
    for store, name in (
        (Store(address, quick), address),
        (Store(bucket, quick), f"{bucket}/large.bin"),
    ):
        with pytest.raises(DataError, match="at most 1,000 bytes are read of a remote file"):
            store.read(name, limit=1000)


def test_a_folder_of_a_web_server_is_refused(web, quick):
    with pytest.raises(SettingsError, match="a web server does not list its files"):
        list(Store(f"http://127.0.0.1:{web.port}", quick).find(f"http://127.0.0.1:{web.port}/"))


def test_a_list_cannot_leave_its_folder_or_name_a_host(proxy, bucket, quick, monkeypatch):
    for line in ("../secret.png", "/etc/x.png", "http://other.example/x.png"):
        monkeypatch.setattr(
            "pale.data.sources.remote_items.read_list",
            lambda store, address, line=line: io.BytesIO(line.encode()),
        )
        with pytest.raises(DataError, match=r"a remote list names files below|not addresses"):
            list(remote_items([f"{bucket}/set/all.txt"], options=quick))


@pytest.fixture(scope="module")
def packed(s3_port, tmp_path_factory) -> Path:
    """Upload shards of three classes to s3://shards/set; return the local ones."""
    root = tmp_path_factory.mktemp("tree")
    for split in ("train", "val"):
        for label in ("cat", "dog", "fox"):
            (root / split / label).mkdir(parents=True)
            for i in range(4):
                Image.fromarray(pixels(20 + i, 24)).save(root / split / label / f"{i}.png")
    folder = root / "shards"
    assert main(["data", "pack", str(root), str(folder), "--shard-mb", "0.01"]) == 0
    client = s3_client(s3_port)
    client.create_bucket(Bucket="shards")
    for path in folder.iterdir():
        client.put_object(Bucket="shards", Key=f"set/{path.name}", Body=path.read_bytes())
    return folder


class TestTrainingShards:
    @pytest.mark.parametrize("cache", [10**8, 20_000], ids=["cached", "by request"])
    def test_shards_of_a_store_are_those_of_the_folder(self, proxy, packed, tmp_path, cache):
        options = RemoteOptions(tmp_path, cache, timeout=5, attempts=3, pause=0.01)
        remote.allow("s3://shards/set")
        here = ShardFiles(packed, "train")
        there = RemoteShardFiles("s3://shards/set", "train", options=options)
        proxy.faults = [None, "drop", 200]
        assert there.labels == here.labels
        for i in range(len(here)):
            assert there.content(i) == here.content(i)
        assert there.whole == (cache > 20_000)
        again = pickle.loads(pickle.dumps(there))
        assert again.content(3) == here.content(3)
        assert sum(p.stat().st_size for p in tmp_path.iterdir()) <= cache

    def test_an_address_that_nobody_typed_is_refused(self, proxy, packed, monkeypatch):
        monkeypatch.setattr(remote, "_typed", set())
        changes = {"data.kind": "shards", "data.root": "s3://shards/set"}
        recipe = classification_recipe().changed(changes)
        before = proxy.connections
        with pytest.raises(SettingsError, match="an address is used only if it is typed"):
            recipe.data.train_source(0)
        assert proxy.connections == before
        words = ["train", "quickstart", "--data.kind", "shards", "--data.root", "s3://shards/set"]
        parse(words)
        assert len(recipe.data.train_source(0)) == 12


@pytest.mark.parametrize(
    "source", ["ftp://host/x.jpg", "file:///etc/x.jpg", "s3://", "https:///x.jpg"]
)
def test_other_schemes_are_refused(source):
    with pytest.raises(SettingsError, match="an address is s3://, gs://, http://, https://"):
        is_remote(source)


def test_paths_are_not_addresses():
    assert not is_remote("photos/a.jpg")
    assert is_remote("s3://bucket")
    assert is_remote("HTTPS://host/a.jpg")
