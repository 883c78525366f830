"""SIGTERM to a server process: readiness goes off first, then the server stops to accept requests, then it drains."""

import signal
import time
from pathlib import Path

import httpx
import pytest
from PIL import Image
from serve.images import file_of
from serve.serving import commands, nano_weights, until
from support.weights import pixels

DELAY = 4.0  # seconds; much longer than the requests below take
CONTENT = file_of(Image.fromarray(pixels()))


@pytest.fixture(scope="module")
def nano(tmp_path_factory) -> Path:
    return nano_weights(tmp_path_factory.mktemp("nano"))


@pytest.mark.slow
def test_readiness_goes_off_before_the_server_stops_to_accept_requests(nano):
    with (
        commands(["--weights", nano, "--stop-delay", DELAY]) as (server,),
        httpx.Client(base_url=server.url, timeout=60, trust_env=False) as client,
    ):
        assert client.get("/v2/health/ready").status_code == 200
        start = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        until(lambda: client.get("/v2/health/ready").status_code == 400, DELAY / 2)
        assert client.get("/v2/models/nano/ready").status_code == 400
        assert client.get("/v2/health/live").status_code == 200
        assert client.get("/health").json()["status"] == "stopping"
        # A new connection is accepted, and its request is answered.
        path = f"{server.url}/predict/classification"
        answer = httpx.post(path, content=CONTENT, timeout=60, trust_env=False)
        assert answer.status_code == 200
        assert time.monotonic() - start < DELAY, "the machine is too slow for this test"
        assert server.process.poll() is None
        until(lambda: server.process.poll() is not None)
        assert time.monotonic() - start >= DELAY
        code, noted = server.stop()
        assert code == 0
        assert "Traceback" not in noted
        with pytest.raises(httpx.ConnectError):
            client.get("/v2/health/live")


@pytest.mark.slow
@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_does_not_wait_for_the_delay(nano, second):
    with commands(["--weights", nano, "--stop-delay", 600]) as (server,):
        server.process.send_signal(signal.SIGTERM)
        with httpx.Client(base_url=server.url, timeout=60, trust_env=False) as client:
            until(lambda: client.get("/v2/health/ready").status_code == 400)
        code, noted = server.stop(second)
    assert code == 0
    assert "stopped" in noted.splitlines()
