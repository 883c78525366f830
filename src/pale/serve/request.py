"""One request: its body as it arrives, its time, its memory, its place in a queue, its response."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from time import perf_counter
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from PIL import Image
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from . import memory_cost
from .batching import Done, Worker
from .body import CROWDED, Body
from .limits import MIN_RATE, RATE_SECONDS, RefusedError, Share
from .service import Service
from .upload import decode_upload, open_upload, read_body, read_content

T = TypeVar("T")
Item = TypeVar("Item")
Result = TypeVar("Result")
DISCONNECTED = 499  # nginx's status for a client that disconnected; only the metrics see it
PART = 65536  # bytes of a response that are written at a time
# After a refusal, the rest of the body is received up to this multiple of the maximum size, and for these seconds.
LINGER_BODIES, LINGER_SECONDS = 8, 5.0
CLOSE = {"connection": "close"}
NONE = "none"  # in metrics: task and model of a request for a model that is not served


class ServedRequest:
    """One request; its resources are released by `close`, or when its response has been sent.

    Args:
        service: state that requests share.
        request: the request itself.
        kind: predict, look or infer.
        model: name of a model that is served; None if the request names no such model.
    """

    def __init__(self, service: Service, request: Request, kind: str, model: str | None) -> None:
        self.service, self.request = service, request
        self.kind, self.model, self.task = kind, model or "", NONE
        if model is not None:
            self.task = service.models.predictors[model].task
        self.start = perf_counter()
        self.complete = False  # whether the whole body has arrived
        self.timing: dict[str, float] = {}
        self.share, self._open = Share(service.budget), True

    def find_worker(self, workers: Mapping[str, Worker[Item, Result]]) -> Worker[Item, Result]:
        """Return the worker of the model; raise RefusedError if there is none or its queue is full."""
        if (worker := workers.get(self.model)) is not None:
            worker.require_room()
            return worker
        if self.model:
            raise RefusedError(404, f"the model {self.model} has no pale attention to show")
        models = self.service.models
        tasks, names = ", ".join(models.tasks), ", ".join(models.predictors)
        raise RefusedError(
            404,
            f"no such model is loaded; loaded: {tasks}; by name: {names}",
        )

    async def respond(self, handle: Callable[[ServedRequest], Awaitable[Response]]) -> Response:
        """Return the response of `handle`, or an error response with the reason."""
        status = 500
        try:
            async with asyncio.timeout(self.service.limits.timeout):
                response = await handle(self)
            status = response.status_code
        except RefusedError as refused:
            status, response = refused.status, error_response(refused.status, refused.message)
        except (ClientDisconnect, ConnectionError):
            status, response = DISCONNECTED, Response(status_code=DISCONNECTED)
        except TimeoutError:
            status = 504 if self.complete else 408
            what = "there was no result" if self.complete else "the image did not arrive"
            message = f"{what} within {self.service.limits.timeout:g} s; try again later"
            response = error_response(status, message)
        finally:
            metrics = self.service.metrics
            labels = self.kind, self.task, self.model or NONE
            metrics.requests.labels(*labels, str(status)).inc()
            if status != 200:
                self.close()
        if status == 200:
            metrics.latency.labels(*labels).observe(perf_counter() - self.start)
        return response

    def close(self) -> None:
        """Release the resources of the request, once the threads that work on it have ended."""
        if self._open:
            self._open = False
            self.leave()

    def leave(self) -> None:
        """Remove one user of the request's memory."""
        self.share.leave()
        self.service.trim_soon()

    async def in_thread(self, work: Callable[..., T], *args: Any) -> T:
        """Call `work` in a thread; the request's memory is held until it ends, even if it is no longer awaited."""
        loop = asyncio.get_running_loop()
        result: asyncio.Future[T] = loop.create_future()

        def finish(done: Future[T]) -> None:
            self.leave()
            if result.done():
                return
            if done.cancelled():
                result.cancel()
            elif (error := done.exception()) is not None:
                result.set_exception(error)
            else:
                result.set_result(done.result())

        self.share.enter()
        future = self.service.decoders.submit(work, *args)
        # One call for memory and result: each wakes the event loop, which then waits for the interpreter lock.
        future.add_done_callback(lambda done: loop.call_soon_threadsafe(finish, done))
        try:
            return await result
        except asyncio.CancelledError:
            future.cancel()
            raise

    def submit(
        self, worker: Worker[Item, Result], item: Item, pixels: int
    ) -> asyncio.Future[Done[Result]]:
        """Queue an item; the request's memory is held until the model has released it."""
        self.share.enter()
        return worker.submit(item, pixels, self.leave)

    async def body(self, held: Body) -> AsyncIterator[bytes]:
        """Yield the body as it arrives; raise RefusedError if it arrives too slowly."""
        window, count = perf_counter(), 0
        while not self.complete:
            left = window + RATE_SECONDS - perf_counter()
            try:
                async with asyncio.timeout(max(0.0, left)) as held.timeout:
                    message = await self.request.receive()
            except TimeoutError:
                message = None
            finally:
                held.timeout = None
            if held.displaced:
                raise RefusedError(429, CROWDED)
            if message is None:
                if count < MIN_RATE * RATE_SECONDS:
                    raise RefusedError(
                        408,
                        f"the body arrives too slowly: {count:,} bytes in {RATE_SECONDS:g} s; "
                        f"the minimum is {MIN_RATE:,} bytes per second",
                    )
                window, count = perf_counter(), 0
                continue
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            self.complete = not message.get("more_body", False)
            part = message.get("body", b"")
            count += len(part)
            held.received(len(part))
            yield part

    async def drain(self) -> AsyncIterator[int]:
        """Receive and drop the rest of the body; yield the sizes of its parts."""
        while not self.complete:
            message = await self.request.receive()
            if message["type"] == "http.disconnect":
                return
            self.complete = not message.get("more_body", False)
            yield len(message.get("body", b""))

    async def read_image(
        self,
        worker: Worker[Any, Any],
        plan: Callable[[int, int], tuple[int, Callable[[Image.Image], T]]],
    ) -> tuple[str, Image.Image, T]:
        """Return the name of the file, the decoded image, and the result of the planned function on it.

        A place in the queue and the memory for the image are reserved once the body has arrived, not before.

        Args:
            worker: worker whose queue will hold the image.
            plan: called in a thread with width and height; returns the bytes that processing needs at once, apart
                from decoding, and the function to call with the image.
        """
        service, limits = self.service, self.service.limits
        start = perf_counter()
        held = Body(service.upload_budget, service.bodies)
        try:
            content, name = await read_body(self.body(held), self.request.headers, limits)
            self.timing["read_ms"] = 1000 * (perf_counter() - start)
            worker.reserve()
            try:
                self.share.take(memory_cost.opening(content))
                held.close()
                start = perf_counter()
                image, made = await self.decode(content, plan)
            finally:
                worker.release()
        finally:
            held.close()
        self.timing["decode_ms"] = 1000 * (perf_counter() - start)
        return name, image, made

    async def read_content(self, needed: Callable[[bytes], int]) -> bytes:
        """Return the body as it is, and reserve the memory that `needed` returns for it."""
        held = Body(self.service.upload_budget, self.service.bodies)
        try:
            headers, limits = self.request.headers, self.service.limits
            content = await read_content(self.body(held), headers, limits)
            self.share.take(needed(content))
        finally:
            held.close()
        return content

    async def decode(
        self,
        content: bytes,
        plan: Callable[[int, int], tuple[int, Callable[[Image.Image], T]]],
    ) -> tuple[Image.Image, T]:
        """Return the image of a file, and the result of the planned function on it; `plan` as in `read_image`."""
        return await self.in_thread(self._decode, content, plan)

    def _decode(
        self,
        content: bytes,
        plan: Callable[[int, int], tuple[int, Callable[[Image.Image], T]]],
    ) -> tuple[Image.Image, T]:
        opened = open_upload(content, self.service.limits)
        needed, function = plan(opened.width, opened.height)
        self.share.take(max(memory_cost.decoding(opened), needed))
        image = decode_upload(opened)
        return image, function(image)

    async def result(self, future: asyncio.Future[Done[Result]]) -> Result:
        """Await the result of a queued item; drop the job if the client disconnects first."""
        gone: asyncio.Future[Any] = asyncio.create_task(_disconnected(self.request))
        try:
            await asyncio.wait({future, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not future.done():
                raise ClientDisconnect
            done = future.result()
        except (RefusedError, ClientDisconnect):
            raise
        except Exception as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise RefusedError(500, f"the model failed on this image: {reason}") from error
        finally:
            gone.cancel()
            future.cancel()
        self.timing |= {"queue_ms": 1000 * done.waited, "model_ms": 1000 * done.worked}
        self.timing["batch"] = done.batch_size
        return done.result

    def timing_so_far(self) -> dict[str, float]:
        """Return the milliseconds spent until now, by step."""
        total = {"total_ms": 1000 * (perf_counter() - self.start)}
        return {k: round(v, 2) for k, v in (self.timing | total).items()}


class PartedResponse(Response):
    """A response that is written in parts; it releases the memory of its request after the last one."""

    def __init__(self, content: bytes, media_type: str, close: Callable[[], None]) -> None:
        super().__init__(content, media_type=media_type)
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the parts; `send` waits while the client has not read enough of the earlier ones."""
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            content = memoryview(self.body)
            for start in range(0, len(content), PART):
                part = bytes(content[start : start + PART])
                await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        finally:
            self._close()


def error_response(status: int, message: str) -> JSONResponse:
    """Return {"error": message}."""
    headers = {"retry-after": "1"} if status in (429, 503, 504) else None
    return JSONResponse({"error": message}, status, CLOSE if status == 408 else headers)


async def respond_and_drain(
    served: ServedRequest, handle: Callable[[ServedRequest], Awaitable[Response]]
) -> Response:
    """Return the response; if it is ready before the whole body was read, drain the rest first.

    If the connection were closed while the client is still sending, the client would miss the response. A client that
    asked before sending ("Expect: 100-continue") does not need this.
    """
    response = await served.respond(handle)
    if served.request.headers.get("expect") or response.status_code in (DISCONNECTED, 408):
        return response
    left = LINGER_BODIES * served.service.limits.max_upload
    with suppress(TimeoutError):
        async with asyncio.timeout(LINGER_SECONDS):
            async for size in served.drain():
                left -= size
                if left < 0:
                    break
    return response


async def _disconnected(request: Request) -> None:
    """Return when the client has disconnected; the body has been read, so nothing else can arrive."""
    while True:
        if (await request.receive())["type"] == "http.disconnect":
            return
