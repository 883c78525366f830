"""Clients that send or read little by little, over real sockets: others are answered, and the slow ones are closed."""

import asyncio
import io
import resource
import socket
import time
from pathlib import Path

import httpx
import numpy as np
import pytest
from PIL import Image
from serve.serving import commands, nano_weights, running, until
from support.weights import pixels

from pale.serve import Limits, Models, protocol
from pale.serve.limits import HEADER_SECONDS, MAX_CONNECTIONS, RATE_SECONDS

PROMPT = 2.0  # seconds by which slow clients may delay a normal one
LEEWAY = 4.0  # seconds of a busy machine
HEAD = b"POST /predict/classification HTTP/1.1\r\nHost: 127.0.0.1\r\n"
BODY = HEAD + b"Content-Length: 100000\r\n\r\n"


@pytest.fixture(scope="module")
def nano(tmp_path_factory) -> Path:
    return nano_weights(tmp_path_factory.mktemp("nano"))


@pytest.fixture(scope="module")
def server(nano):
    with commands(["--weights", nano]) as (found,):
        yield found


def photo(side: int = 64) -> bytes:
    content = io.BytesIO()
    Image.fromarray(pixels(side, side)).save(content, "PNG")
    return content.getvalue()


async def dribble(url: str, first: bytes, pause: float = 0.5) -> tuple[float, bytes]:
    """Send a beginning, then a byte now and then, until the server ends it: seconds, and what it answered."""
    address, start = httpx.URL(url), time.monotonic()
    reader, writer = await asyncio.open_connection(address.host, address.port)
    writer.write(first)
    answer = asyncio.create_task(reader.read())
    try:
        while not (await asyncio.wait({answer}, timeout=pause))[0]:
            if pause < 5:
                writer.write(b"a")
        return time.monotonic() - start, answer.result()
    except ConnectionError:
        return time.monotonic() - start, b""
    finally:
        writer.close()


async def slowest_response(url: str) -> float:
    """Seconds of the slowest of five answers to a normal client."""
    taken = []
    async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as client:
        for _ in range(5):
            start = time.monotonic()
            answer = await client.post("/predict/classification", content=photo())
            taken.append(time.monotonic() - start)
            assert answer.status_code == 200, answer.text
    return max(taken)


async def beside(url: str, first: bytes, count: int, pause: float = 0.5):
    """Slow clients, and beside them one that is not: seconds and answer of each, and the delay of the normal one."""
    alone = await slowest_response(url)  # on a busy machine this is much
    slow = [asyncio.create_task(dribble(url, first, pause)) for _ in range(count)]
    await asyncio.sleep(1)
    together = await slowest_response(url)
    return await asyncio.gather(*slow, return_exceptions=True), together - alone


def refused(ends: list[tuple[float, bytes]]) -> bytes:
    """One of the answers; a byte that a client sends when the server has closed may cost it its own."""
    assert {answer[:12] for _, answer in ends} <= {b"HTTP/1.1 408", b""}
    return max(answer for _, answer in ends)


@pytest.mark.slow
@pytest.mark.parametrize("count", [64, 256])
def test_slow_bodies_hold_no_place_and_are_closed(server, count):
    ends, delay = asyncio.run(beside(server.url, BODY + b"\x89", count))
    assert delay < PROMPT
    assert max(seconds for seconds, _ in ends) < RATE_SECONDS + LEEWAY
    assert b"the body arrives too slowly" in refused(ends)


@pytest.mark.slow
@pytest.mark.parametrize("count", [64, 256])
def test_half_sent_headers_are_closed(server, count):
    ends, delay = asyncio.run(beside(server.url, HEAD + b"X-Long: ", count))
    assert delay < PROMPT
    assert max(seconds for seconds, _ in ends) < HEADER_SECONDS + LEEWAY
    assert b"did not arrive in time" in refused(ends)


@pytest.mark.slow
@pytest.mark.parametrize(
    "first",
    [b"", b"GET /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9999\r\n\r\n"],
    ids=["silent", "a body that nobody reads"],
)
def test_connections_that_ask_for_nothing_are_closed(server, first):
    pause = 60 if not first else 0.5
    seconds, _ = asyncio.run(dribble(server.url, first, pause))
    assert seconds < HEADER_SECONDS + LEEWAY


@pytest.mark.slow
def test_more_connections_than_the_bound_leave_room_for_others(server):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2 * MAX_CONNECTIONS:
        pytest.skip("too few files may be open here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2 * MAX_CONNECTIONS), hard))
    address, alone = httpx.URL(server.url), asyncio.run(slowest_response(server.url))
    opened = []
    try:
        for _ in range(MAX_CONNECTIONS + 100):
            opened.append(socket.create_connection((address.host, address.port), 30))
        assert asyncio.run(slowest_response(server.url)) - alone < PROMPT
    finally:
        for each in opened:
            each.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture(scope="module")
def models(nano):
    return Models([nano], device="cpu")


def connected(server) -> socket.socket:
    address = httpx.URL(server.url)
    return socket.create_connection((address.host, address.port), 30)


def test_bodies_that_stall_make_room_for_others(models):
    limits = Limits(max_upload_mb=0.5, memory_mb=30)
    with running(models, limits) as server:
        alone = asyncio.run(slowest_response(server.url))
        stalled = [connected(server) for _ in range(8)]
        for each in stalled:
            each.sendall(HEAD + b"Content-Length: 500000\r\n\r\n" + bytes(450_000))
        until(lambda: server.service.upload_budget.used > 0.6 * server.service.upload_budget.total)
        time.sleep(
            2.5
        )  # until then their rate, counted from the first byte, is that of a fast client
        whole = io.BytesIO()
        noise = np.random.default_rng(0).integers(0, 256, (380, 400, 3), np.uint8)
        Image.fromarray(noise).save(whole, "BMP")
        start = time.monotonic()
        answer = server.client.post("/predict/classification", content=whole.getvalue())
        assert answer.status_code == 200, answer.text
        assert time.monotonic() - start - alone < PROMPT
        assert server.service.upload_budget.used <= server.service.upload_budget.total
        for each in stalled:
            each.close()
        until(lambda: server.service.upload_budget.used == 0)
        assert server.service.budget.used == 0


@pytest.mark.slow
def test_a_response_that_is_not_taken_is_dropped_with_its_memory(models, monkeypatch):
    monkeypatch.setattr(protocol, "WRITE_SECONDS", 0.5)
    noise = np.random.default_rng(0).integers(0, 256, (4000, 4000), np.uint8)
    content = io.BytesIO()
    Image.fromarray(noise).save(content, "JPEG", quality=60)
    with running(models, Limits(memory_mb=2000)) as server, connected(server) as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        head = HEAD.replace(b"classification", b"classification?output=drawn")
        data = content.getvalue()
        raw.sendall(head + f"Content-Length: {len(data)}\r\n\r\n".encode() + data)
        until(lambda: server.service.budget.used > 0)
        until(lambda: server.service.budget.used == 0)
        found = b""
        try:
            while part := raw.recv(65536):
                found += part
        except ConnectionError:
            pass
    length = next(int(x.split(b":")[1]) for x in found.splitlines() if x[:15] == b"content-length:")
    assert 0 < len(found) < 0.8 * length  # what the system's buffers took
