"""Queues, batches and memory of a server whose model waits, over real sockets."""

import asyncio
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from PIL import Image
from serve.images import NAME, file_of, near
from serve.serving import running, until
from support.weights import pixels

from pale.serve import Limits, Models
from pale.serve.batching import Worker

pytestmark = pytest.mark.usefixtures("one_thread")


class Gated(Models):
    """Models that wait for `gate`; `batches` lists the names of the images in each batch."""

    def __init__(self, *sources, **options) -> None:
        super().__init__(*sources, **options)
        self.gate, self.batches = threading.Event(), []

    def predict(self, task, items):
        self.batches.append([item.name for item in items])
        assert self.gate.wait(60)
        if any(item.name == "bad" for item in items):
            raise RuntimeError("this one is too much\nand more")
        return super().predict(task, items)


@pytest.fixture
def gated(made):
    return Gated([made["classification"]], device="cpu")


def post(server, name: str = "image", **more) -> httpx.Response:
    form = {"file": (name, file_of(Image.fromarray(pixels())))}
    return httpx.post(
        f"{server.url}/predict/classification", files=form, timeout=60, trust_env=False, **more
    )


class TestWaiting:
    """A batch waits only for images that are being decoded; `--wait-ms` is far above the time of a test."""

    LIMITS = Limits(batch=4, wait_ms=60_000)

    def batches(self, scenario) -> list[list[str]]:
        """Return the batches of a worker during a scenario, which must end in time."""
        found = []

        async def run() -> None:
            def work(items):
                found.append(list(items))
                return items

            worker = Worker("test", work, self.LIMITS)
            worker.start()
            try:
                async with asyncio.timeout(30):
                    await scenario(worker)
            finally:
                await worker.stop()

        asyncio.run(run())
        return found

    def test_a_single_image_does_not_wait(self):
        async def scenario(worker):
            await worker.submit("a", 1)

        assert self.batches(scenario) == [["a"]]

    def test_a_batch_waits_for_images_that_are_being_decoded(self):
        async def scenario(worker):
            worker.reserve()
            first = worker.submit("a", 1)
            await asyncio.sleep(0.05)
            worker.release()
            await asyncio.gather(first, worker.submit("b", 1))

        assert self.batches(scenario) == [["a", "b"]]

    def test_a_batch_does_not_wait_for_an_image_that_failed_to_decode(self):
        async def scenario(worker):
            worker.reserve()
            first = worker.submit("a", 1)
            await asyncio.sleep(0.05)
            worker.release()
            await first

        assert self.batches(scenario) == [["a"]]


class TestQueue:
    def test_waiting_images_form_batches_and_a_full_queue_refuses(self, gated):
        limits = Limits(batch=4, wait_ms=0, queue=6)
        with running(gated, limits) as server, ThreadPoolExecutor(16) as pool:
            queue = server.service.predicting["classification"]
            first = pool.submit(post, server, "first")
            until(lambda: gated.batches == [["first"]])
            rest = [pool.submit(post, server, f"p{i}") for i in range(6)]
            until(lambda: queue.depth == 6 and not queue.reserved)
            refused = [post(server) for _ in range(3)]
            assert server.client.get("/health").status_code == 200
            gated.gate.set()
            answers = [first.result(), *(r.result() for r in rest)]
        for answer in refused:
            assert answer.status_code == 429
            assert answer.headers["retry-after"] == "1"
            assert (
                answer.json()["error"]
                == "the queue is full with 6 images waiting; try again in a moment"
            )
        assert [a.status_code for a in answers] == [200] * 7
        assert [len(batch) for batch in gated.batches] == [1, 4, 2]
        assert sorted(n for b in gated.batches[1:] for n in b) == [f"p{i}" for i in range(6)]
        assert {a.json()[NAME] for a in answers} == {"first", *(f"p{i}" for i in range(6))}
        assert all(near(a.json()["classes"], answers[0].json()["classes"]) for a in answers)

    @pytest.mark.slow
    def test_a_late_request_gets_504_and_its_job_is_dropped_unless_it_is_running(self, gated):
        with running(gated, Limits(batch=1, timeout=0.7)) as server:
            with ThreadPoolExecutor(3) as pool:
                answers = [f.result() for f in [pool.submit(post, server, f"{i}") for i in "123"]]
            assert [a.status_code for a in answers] == [504] * 3
            assert "within 0.7 s" in answers[0].json()["error"]
            # An answer may be read before its request has ended in the server's thread.
            until(lambda: server.service.predicting["classification"].depth == 0)
            until(lambda: server.service.budget.used == 0)
            gated.gate.set()
            assert post(server, "after").status_code == 200
        assert len(gated.batches) <= 2  # on a busy machine not even the first may have started
        assert gated.batches[-1] == ["after"]

    def test_a_disconnected_client_leaves_nothing_behind(self, gated):
        with running(gated, Limits(batch=1)) as server, ThreadPoolExecutor(1) as pool:
            queue = server.service.predicting["classification"]
            first = pool.submit(post, server, "first")
            until(lambda: gated.batches == [["first"]])
            content = file_of(Image.fromarray(pixels()))
            address = httpx.URL(server.url).host, httpx.URL(server.url).port
            with socket.create_connection(address, 30) as raw:
                head = f"POST /predict/classification HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
                raw.sendall(head.encode() + content)
                until(lambda: queue.depth == 1 and not queue.reserved)
            until(lambda: queue.depth == 0)
            gated.gate.set()
            assert first.result().status_code == 200
            text = server.client.get("/metrics").text
            assert 'status="499",task="classification"} 1.0' in text
        assert gated.batches == [["first"]]

    def test_an_incomplete_body_times_out(self, gated):
        with running(gated, Limits(timeout=0.3)) as server:
            address = httpx.URL(server.url).host, httpx.URL(server.url).port
            with socket.create_connection(address, 30) as raw:
                head = (
                    "POST /predict/classification HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n"
                )
                raw.sendall(head.encode() + b"a few bytes")
                assert raw.recv(65536).startswith(b"HTTP/1.1 408")
            assert server.service.predicting["classification"].depth == 0
            assert server.service.budget.used == 0

    def test_one_failing_image_does_not_fail_the_batch(self, gated):
        with running(gated, Limits(batch=4, wait_ms=0)) as server, ThreadPoolExecutor(8) as pool:
            queue = server.service.predicting["classification"]
            first = pool.submit(post, server, "first")
            until(lambda: gated.batches == [["first"]])
            names = ["a", "bad", "c"]
            rest = [pool.submit(post, server, n) for n in names]
            until(lambda: queue.depth == 3 and not queue.reserved)
            gated.gate.set()
            found = {n: r.result() for n, r in zip(names, rest, strict=True)}
            assert first.result().status_code == 200
        assert found["a"].status_code == found["c"].status_code == 200
        assert found["bad"].status_code == 500
        assert found["bad"].json()["error"].endswith("on this image: this one is too much")

    @pytest.mark.slow
    def test_memory_is_held_until_threads_and_model_have_ended(self, gated):
        with running(gated, Limits(batch=1, timeout=0.5)) as server, ThreadPoolExecutor(1) as pool:
            first = pool.submit(post, server, "first")
            until(lambda: gated.batches == [["first"]])
            assert first.result().status_code == 504
            assert server.service.budget.used > 0  # the model still holds the image
            gated.gate.set()
            until(lambda: server.service.budget.used == 0)

    @pytest.mark.slow
    def test_an_image_that_needs_more_memory_than_the_budget_gets_413(self, gated):
        gated.gate.set()
        with running(gated) as server:
            # Enough for the image alone, but not together with its file.
            server.service.budget.total = 66_000_000
            content = file_of(Image.new("RGB", (2000, 2000)), "WEBP", lossless=True)
            answer = server.client.post("/predict/classification", content=content)
            assert answer.status_code == 413
            assert "--memory-mb" in answer.json()["error"]
            assert post(server).status_code == 200

    @pytest.mark.slow
    def test_a_drawn_panorama_is_refused_and_its_classes_are_not(self, gated):
        gated.gate.set()
        wide = file_of(Image.new("L", (65_520, 700)))
        with running(gated) as server:
            answer = server.client.post("/predict/classification?output=drawn", content=wide)
            assert answer.status_code == 413
            assert "output=json" in answer.json()["error"]
            # The bars below it would be twelve times as high as the image.
            wide = file_of(Image.new("L", (50_000, 900)))
            answer = server.client.post("/predict/classification?output=drawn", content=wide)
            assert answer.status_code == 413
            assert server.client.post("/predict/classification", content=wide).status_code == 200

    @pytest.mark.slow
    def test_memory_for_large_images_is_limited(self, gated):
        with running(gated, Limits(batch=1)) as server, ThreadPoolExecutor(1) as pool:
            first = pool.submit(post, server, "first")
            until(lambda: gated.batches == [["first"]])
            server.service.budget.total = server.service.budget.used + 1000
            answer = post(server, "second")
            assert answer.status_code == 429
            assert "too many large images" in answer.json()["error"]
            gated.gate.set()
            assert first.result().status_code == 200
