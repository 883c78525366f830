"""The command as a process, under load and attack: all is answered or refused, nothing grows, it ends when asked."""

import asyncio
import io
import itertools
import json
import random
import signal
import struct
import sys
import time
import zlib
from collections import Counter
from pathlib import Path

import httpx
import pytest
import torch
from PIL import Image
from serve.serving import Command, commands
from small_weights import pixels

from pale import weights as weight_files
from pale.recipes import get

CLIENTS = 64
ROUND = 1.5  # seconds of load, each time
HOSTILE = 1000
SETTLED = 2.0  # seconds, after which memory of large pictures has gone back to the system
MOST_GROWN = 60_000_000  # bytes; a picture of the largest kind has 200


@pytest.fixture(scope="module")
def nano(tmp_path_factory) -> Path:
    """The classifier of `pale train quickstart`, pale_nano at 40 px, untrained."""
    recipe = get("quickstart")
    torch.manual_seed(0)
    model = recipe.model.build(8, recipe.data.size)
    path = tmp_path_factory.mktemp("nano") / "nano.safetensors"
    about = {"recipe": recipe.plain(), "classes": [f"class {i}" for i in range(8)]}
    weight_files.save(path, model.state_dict(), about)
    return path


def photo(side: int = 64, kind: str = "PNG", **options) -> bytes:
    content = io.BytesIO()
    Image.fromarray(pixels(side, side)).save(content, kind, **options)
    return content.getvalue()


def request(content: bytes, path: str = "/predict/classification", head: str = "") -> bytes:
    lines = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(content)}\r\n{head}"
    return f"{lines}\r\n".encode() + content


async def response(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(
        int(line.split(b":")[1])
        for line in head.lower().splitlines()
        if line.startswith(b"content-length")
    )
    return int(head.split()[1]), await reader.readexactly(length)


async def load(url: str, content: bytes, clients: int, seconds: float) -> Counter[int]:
    """Answers by status, of clients that each ask again as soon as they are answered."""
    address, end, found = httpx.URL(url), time.monotonic() + seconds, Counter()

    async def client() -> None:
        reader, writer = await asyncio.open_connection(address.host, address.port)
        while time.monotonic() < end:
            writer.write(request(content))
            status, _ = await asyncio.wait_for(response(reader), 60)
            found[status] += 1
        writer.close()

    await asyncio.gather(*(client() for _ in range(clients)))
    return found


@pytest.mark.slow
def test_batches_answer_more_and_every_one_of_64_clients_is_answered_or_refused(nano):
    content, answered = photo(), Counter()
    batches = ["--weights", nano, "--batch", 16, "--queue", 16]
    singles = ["--weights", nano, "--batch", 1, "--wait-ms", 0]
    with commands(batches, singles) as (many, one):
        for server in (many, one):
            asyncio.run(load(server.url, content, 8, 0.3))  # warm
        seconds = Counter()
        for name, server in [("many", many), ("one", one), ("one", one), ("many", many)]:
            # Sixteen do not overfill the queue: what is compared is work, not refusals.
            start = time.monotonic()
            found = asyncio.run(load(server.url, content, 16, ROUND))
            assert set(found) == {200}
            answered[name] += found[200]
            seconds[name] += time.monotonic() - start
        rate = {name: answered[name] / seconds[name] for name in answered}
        ratio = rate["many"] / rate["one"]
        sys.stdout.write(
            f"{rate['many']:.0f} a second in batches, {rate['one']:.0f} one by one: {ratio:.2f}"
            + "\n"
        )
        found = asyncio.run(load(many.url, content, CLIENTS, ROUND))
        sys.stdout.write(f"{CLIENTS} clients: {dict(found)}" + "\n")
        assert set(found) <= {200, 429}
        assert found[200] > 0
        assert found[429] > 0  # 16 in work and 16 waiting are fewer than 64
        about = httpx.get(f"{many.url}/metrics", trust_env=False).text
        first = 'pale_batch_pictures_bucket{kind="predict",le="1.0",task="classification"}'
        alone = next(line for line in about.splitlines() if line.startswith(first))
        total = 'pale_batch_pictures_count{kind="predict",task="classification"}'
        count = next(line for line in about.splitlines() if line.startswith(total))
        assert float(alone.split()[-1]) < 0.5 * float(count.split()[-1])
        for server, number in ((many, signal.SIGTERM), (one, signal.SIGINT)):
            code, noted = server.stop(number)
            assert code == 0
            assert noted.splitlines()[-1] == "stopped"
            assert "Traceback" not in noted
    assert ratio >= 1.5


def png(width: int, height: int, data: bytes = b"") -> bytes:
    """A PNG that says to be this large."""
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = [(b"IHDR", head), (b"IDAT", data or zlib.compress(bytes(1000))), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(d)) + t + d + struct.pack(">I", zlib.crc32(t + d)) for t, d in parts
    )


def hostile(count: int):
    """Requests that deserve no result: (what, bytes on the wire)."""
    draw = random.Random(0)
    good = {kind: photo(48, kind) for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")}
    # Two hundred million pixels of nothing in 200 kB, and text that unpacks to 64 MB.
    flat = zlib.compress(bytes(4_000_000), 9)
    text = b"zTXtk\x00\x00" + zlib.compress(bytes(64_000_000), 1)
    text_bomb = png(8, 8)[:33] + struct.pack(">I", len(text) - 4) + text
    text_bomb += struct.pack(">I", zlib.crc32(text)) + png(8, 8)[33:]
    names = ["../../../etc/passwd", "..\\..\\boot.ini", "/dev/zero", "a\x00b", "%2e%2e%2f", ";id"]

    def form(name: str, content: bytes, end: bytes = b"\r\n--b--\r\n") -> bytes:
        head = f'--b\r\nContent-Disposition: form-data; name="file"; filename="{name}"\r\n\r\n'
        body = head.encode() + content + end
        return request(body, head="Content-Type: multipart/form-data; boundary=b\r\n")

    def cut(kind: str) -> bytes:
        content = good[kind]
        return content[: draw.randrange(1, max(2, len(content) // 2))]

    makers = [
        lambda: request(cut(draw.choice(list(good)))),
        lambda: request(png(draw.randrange(9_000, 60_000), 60_000)),
        lambda: request(png(7_000, 7_000, flat)),  # just within the bound, and cut short
        lambda: request(text_bomb),
        lambda: request(draw.randbytes(draw.randrange(1, 3000))),
        lambda: request(b"%!PS-Adobe-3.0 EPSF-3.0\n(/etc/passwd) (r) file\n"),
        lambda: request(b"<svg xmlns='http://www.w3.org/2000/svg'/>"),
        lambda: request(b"/etc/passwd"),
        lambda: request(b""),
        lambda: form(draw.choice(names), b"no picture"),
        lambda: form("x.png", cut("PNG"), b""),
        lambda: request(good["PNG"], f"/predict/{draw.choice(['..%2f..', 'x' * 2000, '%00'])}"),
        lambda: request(good["PNG"], "/predict/classification?output=../../etc/passwd"),
        lambda: request(good["PNG"], "/look?x=1e309&y=0"),
        lambda: request(photo(20_000 // 100, "PNG")[:60] + draw.randbytes(400)),
    ]
    for maker in itertools.islice(itertools.cycle(makers), count):
        yield maker()


async def asked_to_stop(server: Command) -> list[int]:
    """Answers to six requests that wait for a batch to fill while the server is asked to stop."""
    address = httpx.URL(server.url)
    pairs = [await asyncio.open_connection(address.host, address.port) for _ in range(6)]
    for _, writer in pairs:
        writer.write(request(photo()))
        await writer.drain()
    await asyncio.sleep(0.2)
    server.process.send_signal(signal.SIGTERM)
    found = [(await asyncio.wait_for(response(reader), 60))[0] for reader, _ in pairs]
    for _, writer in pairs:
        writer.close()
    return found


@pytest.mark.slow
def test_a_thousand_hostile_uploads_are_refused_and_memory_stays(nano):
    # A batch that waits for long leaves time to stop the server while it waits.
    with commands(["--weights", nano, "--batch", 64, "--wait-ms", 900]) as (server,):
        address = httpx.URL(server.url)

        async def one(content: bytes) -> int:
            reader, writer = await asyncio.open_connection(address.host, address.port)
            try:
                writer.write(content)
                status, body = await asyncio.wait_for(response(reader), 60)
                assert list(json.loads(body)) == ["error"]
                return status
            finally:
                writer.close()

        async def all_of(count: int) -> Counter[int]:
            found: Counter[int] = Counter()
            waiting = hostile(count)
            while part := list(itertools.islice(waiting, 8)):
                found.update(await asyncio.gather(*map(one, part)))
            return found

        async def endless(megabytes: int) -> int:
            """So many bytes, told beforehand or not."""
            reader, writer = await asyncio.open_connection(address.host, address.port)
            head = "POST /predict/classification HTTP/1.1\r\nHost: localhost\r\n"
            writer.write(f"{head}Content-Length: {megabytes * 10**6}\r\n\r\n".encode())
            for _ in range(megabytes):
                writer.write(bytes(10**6))
                await writer.drain()
            status, _ = await asyncio.wait_for(response(reader), 60)
            writer.close()
            return status

        asyncio.run(all_of(75))
        time.sleep(SETTLED)
        before = server.rss()
        start = time.monotonic()
        found = asyncio.run(all_of(HOSTILE))
        assert [asyncio.run(endless(100)) for _ in range(2)] == [413, 413]
        seconds = time.monotonic() - start
        time.sleep(SETTLED)
        grown = (server.rss() - before) / 1e6
        sys.stdout.write(f"{dict(found)} in {seconds:.1f} s, memory grew by {grown:.0f} MB" + "\n")
        assert sum(found.values()) == HOSTILE
        assert set(found) <= {404, 413, 415, 422}
        assert grown < MOST_GROWN / 1e6
        good = httpx.post(
            f"{server.url}/predict/classification", content=photo(), timeout=60, trust_env=False
        )
        assert good.status_code == 200
        # What is under way is finished.
        assert asyncio.run(asked_to_stop(server)) == [200] * 6
        start = time.monotonic()
        code, noted = server.stop()
        assert time.monotonic() - start < 15
        assert code == 0
        assert "Traceback" not in noted
