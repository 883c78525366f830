"""The HTTP side: what can be asked, and in which words it is answered."""

from __future__ import annotations

import asyncio
import base64
import io
import os
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from time import perf_counter
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response
from PIL import Image
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from .. import __version__
from ..loading import Kind
from ..predict import Prediction, Segmented
from ..view_attention import Glance
from ..view_sheet import PAGES
from . import manual
from .batching import Done, Worker
from .guard import Guard
from .limits import Budget, Limits, RefusedError, Share, trimmer
from .looking import for_page, for_point
from .metrics import TYPE, Metrics
from .models import Models, Prepared
from .reading import decoded, opened, read_body

GONE = 499  # nginx's number for a client that went away; nobody reads it but the metrics
STATIC = {
    "serve.css": "text/css; charset=utf-8",
    "serve.js": "text/javascript; charset=utf-8",
    "attention.js": "text/javascript; charset=utf-8",
}
DECODERS = max(2, min(8, os.cpu_count() or 2))
QUALITY = 90  # of JPEG
TIDY_SECONDS = 0.5
LINGER_BODIES, LINGER_SECONDS = (
    8,
    5.0,
)  # largest bodies' bytes, and time, that are let pass after a refusal
Output = Literal["json", "drawn", "mask"]
BODY = {
    "requestBody": {
        "required": True,
        "description": "A picture's file: as a form's file, or as the body itself.",
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file"],
                    "properties": {"file": {"type": "string", "format": "binary"}},
                }
            },
            "image/*": {"schema": {"type": "string", "format": "binary"}},
        },
    }
}
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {
        "description": words,
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
    }
    for status, words in {
        404: "No model is loaded for this task.",
        408: "The body did not come in time.",
        413: "The file has too many bytes, or the picture too many pixels.",
        415: "The file is no picture of a known format.",
        422: "The picture is damaged, or the question is not well-formed.",
        429: "Too many wait already; Retry-After says when to come again.",
        504: "There was no result in time.",
    }.items()
}


class Service:
    """The models with their queues, and all that requests share.

    Args:
        models: what is served.
        limits: within which.
    """

    def __init__(self, models: Models, limits: Limits) -> None:
        self.models, self.limits, self.metrics = models, limits, Metrics()
        self.budget = Budget(limits.memory)
        self._trim = trimmer()
        self._tidying: asyncio.TimerHandle | None = None
        self.decoders = ThreadPoolExecutor(DECODERS, thread_name_prefix="pale-decode")
        self.predicting: dict[Kind, Worker[Prepared, Prediction]] = {}
        self.looking: dict[Kind, Worker[Image.Image, Glance]] = {}

    def start(self) -> None:
        """Start the queues, in the event loop."""
        for task in self.models.tasks:
            self._predicts(task)
            if self.models.can_look(task):
                self._looks(task)

    def _predicts(self, task: Kind) -> None:
        noted = self.metrics.watch("predict", task, lambda: self.predicting[task].depth)
        work = lambda items: self.models.predict(task, items)  # noqa: E731
        self.predicting[task] = Worker(task, work, self.limits, noted)
        self.predicting[task].start()

    def _looks(self, task: Kind) -> None:
        noted = self.metrics.watch("look", task, lambda: self.looking[task].depth)
        work = lambda items: [self.models.look(task, item) for item in items]  # noqa: E731
        one = Limits(1, 0, self.limits.queue)
        self.looking[task] = Worker(f"look-{task}", work, one, noted)
        self.looking[task].start()

    def tidy(self) -> None:
        """Give memory back after large pictures, in a thread; in a moment, when the last of them is gone."""
        if self.budget.much_was_freed() and self._tidying is None:
            self._tidying = asyncio.get_running_loop().call_later(TIDY_SECONDS, self._tidy)

    def _tidy(self) -> None:
        self._tidying = None
        self.decoders.submit(self._trim)

    async def stop(self) -> None:
        """Stop the queues and threads."""
        if self._tidying is not None:
            self._tidying.cancel()
        for predicting in self.predicting.values():
            await predicting.stop()
        for looking in self.looking.values():
            await looking.stop()
        self.decoders.shutdown(wait=True, cancel_futures=True)

    def about(self) -> dict[str, Any]:
        """The state, as /health tells it."""
        limits = self.limits
        return {
            "status": "ready",
            "version": __version__,
            "device": self.models.device,
            "models": self.models.about(),
            "least_score": self.models.score,
            "limits": {
                "max_upload_mb": limits.max_upload_mb,
                "max_pixels": limits.max_pixels,
                "batch": limits.batch,
                "queue": limits.queue,
                "timeout": limits.timeout,
            },
        }


class Asked:
    """One request on its way: its time, its memory, its place in a queue, its count in the metrics."""

    def __init__(self, service: Service, request: Request, kind: str, task: str) -> None:
        self.service, self.request = service, request
        self.kind, self.task = kind, task if task in service.models.tasks else "none"
        self.begun = perf_counter()
        self.complete = False  # whether all of the body has come
        self.timing: dict[str, float] = {}

    def known(self, queues: dict[Kind, Worker[Any, Any]]) -> Worker[Any, Any]:
        """The queue of the task that was asked for."""
        for task, worker in queues.items():
            if task == self.task:
                return worker
        if self.task != "none":
            raise RefusedError(404, f"the model for {self.task} has no pale attention to look into")
        tasks = ", ".join(self.service.models.tasks)
        raise RefusedError(404, f"no model is loaded for this task; there is one for {tasks}")

    async def answer(self, make: Any) -> Response:
        """What `make` (a coroutine function of this) returns, or the words of what went wrong."""
        status = 500
        try:
            async with asyncio.timeout(self.service.limits.timeout):
                response: Response = await make(self)
            status = response.status_code
        except RefusedError as refused:
            status, response = refused.status, refusal(refused.status, refused.words)
        except (ClientDisconnect, ConnectionError):
            status, response = GONE, Response(status_code=GONE)
        except TimeoutError:
            late = 504 if self.complete else 408
            what = "the picture did not come" if late == 408 else "there was no result"
            words = f"{what} within {self.service.limits.timeout:g} s; try again later"
            status, response = late, refusal(late, words)
        finally:
            metrics = self.service.metrics
            metrics.requests.labels(self.kind, self.task, str(status)).inc()
            self.service.tidy()
        if status == 200:
            metrics.latency.labels(self.kind, self.task).observe(perf_counter() - self.begun)
        return response

    async def body(self) -> AsyncIterator[bytes]:
        """The body as it comes."""
        while not self.complete:
            message = await self.request.receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            self.complete = not message.get("more_body", False)
            yield message.get("body", b"")

    async def picture(self, share: Share, prepare: Any) -> tuple[str, Image.Image, Any]:
        """The name, the picture, and what `prepare` makes of its size and then of itself, in a thread."""
        service, limits = self.service, self.service.limits
        loop, start = asyncio.get_running_loop(), perf_counter()
        content, name = await read_body(self.body(), self.request.headers, limits, share)
        self.timing["read_ms"] = 1000 * (perf_counter() - start)
        start = perf_counter()
        image = await loop.run_in_executor(service.decoders, opened, content, limits)
        size, after = prepare(image.width, image.height)
        share.take(4 * size)
        picture, made = await loop.run_in_executor(service.decoders, lambda: _decode(image, after))
        self.timing["decode_ms"] = 1000 * (perf_counter() - start)
        return name, picture, made

    async def result(self, future: asyncio.Future[Done[Any]]) -> Any:
        """What the queue gives, unless the client goes away first; then the job is dropped."""
        gone: asyncio.Future[Any] = asyncio.create_task(_gone(self.request))
        try:
            await asyncio.wait({future, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not future.done():
                raise ClientDisconnect
            done = future.result()
        except (RefusedError, ClientDisconnect):
            raise
        except Exception as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise RefusedError(500, f"the model failed on this picture: {reason}") from error
        finally:
            gone.cancel()
            future.cancel()
        self.timing |= {"queue_ms": 1000 * done.waited, "model_ms": 1000 * done.worked}
        self.timing["batch"] = done.together
        return done.result

    def told(self) -> dict[str, float]:
        """Milliseconds until now, by what they were spent on."""
        total = {"total_ms": 1000 * (perf_counter() - self.begun)}
        return {k: round(v, 2) for k, v in (self.timing | total).items()}


def _decode(image: Image.Image, after: Any) -> tuple[Image.Image, Any]:
    picture = decoded(image)
    return picture, after(picture)


async def _gone(request: Request) -> None:
    """Returns when the client has gone away; the body has been read, so nothing else can come."""
    while True:
        if (await request.receive())["type"] == "http.disconnect":
            return


def refusal(status: int, words: str) -> JSONResponse:
    """{"error": words}."""
    headers = {"retry-after": "1"} if status in (429, 503, 504) else None
    return JSONResponse({"error": words}, status, headers)


def create_app(models: Models, limits: Limits | None = None, hosts: Sequence[str] = ()) -> FastAPI:
    """The service as an ASGI app.

    Args:
        models: what is served.
        limits: within which bounds.
        hosts: names that requests may ask for; empty: any.
    """
    service = Service(models, limits or Limits())

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.start()
        yield
        await service.stop()

    app = FastAPI(
        title="pale",
        version=__version__,
        summary="Classes, pixels, objects and attention of pictures",
        lifespan=lifespan,
        docs_url=None,  # Swagger's page would be loaded from elsewhere
        redoc_url=None,
    )
    app.state.service = service
    app.add_middleware(Guard, hosts=hosts)
    _errors(app)
    _questions(app, service)
    _state(app, service)
    _pages(app)
    _schema(app)
    return app


def _errors(app: FastAPI) -> None:
    @app.exception_handler(HTTPException)
    async def known(request: Request, error: HTTPException) -> Response:
        words = {
            404: "there is nothing here; see /docs",
            405: "this is not asked that way; see /docs",
        }
        return refusal(error.status_code, words.get(error.status_code, str(error.detail)))

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        return refusal(422, f"{first['loc'][-1]}: {first['msg']}")

    @app.exception_handler(Exception)
    async def unknown(request: Request, error: Exception) -> Response:
        return refusal(500, f"the server failed ({type(error).__name__}); its log says more")


def _questions(app: FastAPI, service: Service) -> None:
    @app.post("/predict/{task}", openapi_extra=BODY, responses=ERRORS, tags=["pictures"])
    async def predict(
        request: Request,
        task: str,
        output: Annotated[
            Output, Query(description="JSON, the drawn picture (JPEG), or a segmenter's mask (PNG)")
        ] = "json",
        inline_mask: Annotated[
            bool, Query(description="segmentation: add the mask to the JSON, a PNG in base64")
        ] = False,
    ) -> Response:
        """What the task's model says about a picture.

        The JSON is that of `pale predict --json`, and `timing` in milliseconds. Pixels of a mask are class numbers.
        """

        async def make(asked: Asked) -> Response:
            worker = asked.known(service.predicting)
            kind: Kind = task  # type: ignore[assignment]
            if (output == "mask" or inline_mask) and kind != "segmentation":
                raise RefusedError(422, f"a mask is what segmentation gives, not {kind}")
            predictor, seen = service.models.predictors[kind], 0

            def prepare(width: int, height: int) -> tuple[int, Any]:
                nonlocal seen
                most = service.limits.max_pixels
                seen, scaled = service.models.sizes(kind, width, height, most)
                return width * height + scaled, predictor.prepare

            worker.reserve()
            with Share(service.budget) as share:
                try:
                    name, picture, ready = await asked.picture(share, prepare)
                finally:
                    worker.release()
                future = worker.submit(Prepared(name, picture, ready), seen)
                said = await asked.result(future)
                loop = asyncio.get_running_loop()
                return await loop.run_in_executor(
                    service.decoders, _answer, said, output, inline_mask, asked
                )

        return await _lingering(request, Asked(service, request, "predict", task), make)

    @app.post("/look", openapi_extra=BODY, responses=ERRORS, tags=["pictures"])
    async def look(
        request: Request,
        task: Annotated[str | None, Query(description="whose model; by default the first")] = None,
        x: Annotated[float | None, Query(description="of a point, pixels from the left")] = None,
        y: Annotated[float | None, Query(description="of a point, pixels from the top")] = None,
        photo: Annotated[bool, Query(description="add the picture as a small JPEG")] = False,
    ) -> Response:
        """What a model attends to in a picture, in the last block of each stage.

        With a point: the token that holds it, the weights of its attention (the mean of the heads, summing to one), and
        its pale. Without: queries and keys, from which a browser computes the same for any point.
        """

        async def make(asked: Asked) -> Response:
            worker = asked.known(service.looking)
            if (x is None) != (y is None):
                raise RefusedError(422, "a point has an x and a y; give both or none")
            worker.reserve()
            with Share(service.budget) as share:
                try:
                    _, picture, _ = await asked.picture(
                        share, lambda width, height: (width * height, lambda picture: None)
                    )
                finally:
                    worker.release()
                if x is not None and y is not None and not _inside(x, y, picture):
                    size = f"{picture.width}x{picture.height}"
                    raise RefusedError(
                        422, f"the point {x:g}, {y:g} lies outside the picture of {size}"
                    )
                seen = await asked.result(worker.submit(picture, 0))
                point = None if x is None or y is None else (x, y)
                loop = asyncio.get_running_loop()
                return await loop.run_in_executor(
                    service.decoders, _looked, seen, point, photo, asked
                )

        chosen = task or next(t for t in service.models.tasks)
        return await _lingering(request, Asked(service, request, "look", chosen), make)


async def _lingering(request: Request, asked: Asked, make: Any) -> Response:
    """The answer; where it is given before the body was read, the rest is let pass first.

    A connection closed on a client that still sends would take the answer with it. One that asked whether to send needs
    none of this.
    """
    response = await asked.answer(make)
    if request.headers.get("expect") or response.status_code in (GONE, 408):
        return response
    left = LINGER_BODIES * asked.service.limits.max_upload
    with suppress(TimeoutError, ClientDisconnect):
        async with asyncio.timeout(LINGER_SECONDS):
            async for part in asked.body():
                left -= len(part)
                if left < 0:
                    break
    return response


def _inside(x: float, y: float, picture: Image.Image) -> bool:
    return 0 <= x < picture.width and 0 <= y < picture.height


def _answer(said: Prediction, output: Output, inline_mask: bool, asked: Asked) -> Response:
    if output == "drawn":
        return Response(_file(said.draw(), "JPEG"), media_type="image/jpeg")
    if output == "mask":
        assert isinstance(said, Segmented)
        return Response(_file(said.mask(), "PNG"), media_type="image/png")
    content = {"task": asked.task} | said.plain()
    if inline_mask:
        assert isinstance(said, Segmented)
        content["mask"] = base64.b64encode(_file(said.mask(), "PNG")).decode()
    return JSONResponse(content | {"timing": asked.told()})


def _looked(seen: Glance, point: tuple[float, float] | None, photo: bool, asked: Asked) -> Response:
    content = for_page(seen, photo) if point is None else for_point(seen, point)
    return JSONResponse({"task": asked.task} | content | {"timing": asked.told()})


def _file(image: Image.Image, kind: str) -> bytes:
    content = io.BytesIO()
    image.save(content, kind, quality=QUALITY)
    return content.getvalue()


def _state(app: FastAPI, service: Service) -> None:
    @app.get("/health", tags=["state"])
    async def health() -> dict[str, Any]:
        """Whether it is ready, with which models, on which device, within which bounds."""
        return service.about()

    @app.get("/metrics", tags=["state"])
    async def metrics() -> Response:
        """Requests, times, batches and queues, for Prometheus."""
        return Response(service.metrics.text(), media_type=TYPE)


def _pages(app: FastAPI) -> None:
    """The page and its parts; read once, here, so that no request names a file."""
    front = (PAGES / "serve.html").read_text(encoding="utf-8")
    photo = (PAGES / "cat.jpg").read_bytes()
    fresh = {"cache-control": "no-cache"}

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return HTMLResponse(front, headers=fresh)

    for name, kind in STATIC.items():
        given = _given((PAGES / name).read_bytes(), kind, fresh)
        app.add_api_route(f"/{name}", given, include_in_schema=False)

    @app.get("/example", tags=["pictures"], response_class=Response)
    async def example() -> Response:
        """A photo to try: Chelsea the cat, by Stéfan van der Walt, CC0."""
        return Response(photo, media_type="image/jpeg", headers=fresh)

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return HTMLResponse(manual.page(app.openapi()), headers=fresh)


def _given(content: bytes, kind: str, headers: dict[str, str]) -> Any:
    async def part() -> Response:
        return Response(content, media_type=kind, headers=headers)

    return part


def _schema(app: FastAPI) -> None:
    """FastAPI's OpenAPI schema, with the one form that all errors have."""
    made = app.openapi

    def openapi() -> dict[str, Any]:
        schema = made()
        parts = schema.setdefault("components", {}).setdefault("schemas", {})
        parts.pop("HTTPValidationError", None)
        parts.pop("ValidationError", None)
        parts["Error"] = {
            "type": "object",
            "required": ["error"],
            "properties": {"error": {"type": "string", "description": "what is wrong, in words"}},
        }
        return schema

    app.openapi = openapi  # type: ignore[method-assign]
