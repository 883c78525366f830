"""The routes that take an image: predictions and attention."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Query, Request
from fastapi import Path as PathParameter
from fastapi.responses import JSONResponse, Response
from PIL import Image
from torch import Tensor

from ..predict import Prediction
from ..view.attention import BackboneTrace
from . import memory_cost
from .attention import attention_at, attention_for_page
from .limits import Limits, RefusedError
from .models import Prepared
from .request import PartedResponse, ServedRequest, respond_and_drain
from .service import Service

JPEG_QUALITY = 90
Output = Literal["json", "drawn", "mask"]
BODY = {
    "requestBody": {
        "required": True,
        "description": "An image file, as a file of a form or as the body itself.",
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
        "description": description,
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
    }
    for status, description in {
        401: "The server needs a token, and the request does not carry it.",
        404: "No model is loaded for this task, or by this name.",
        408: "The body did not arrive in time.",
        413: "The file has too many bytes, or the image too many pixels.",
        415: "The file is not an image in a supported format.",
        422: "The image is damaged, or a parameter is invalid.",
        429: "Too many requests are waiting; the header Retry-After gives the seconds to wait.",
        504: "There was no result in time.",
    }.items()
}


def add_image_routes(app: FastAPI, service: Service) -> None:
    """Add the routes that take an image."""

    @app.post("/predict/{task}", openapi_extra=BODY, responses=ERRORS, tags=["images"])
    async def predict(
        request: Request,
        task: Annotated[
            str, PathParameter(description="classification, segmentation or detection")
        ],
        output: Annotated[
            Output,
            Query(description="JSON, the drawn result (JPEG), or the mask of a segmentation (PNG)"),
        ] = "json",
        model: Annotated[
            str | None, Query(description="name of the model (default: the first one of the task)")
        ] = None,
        inline_mask: Annotated[
            bool, Query(description="segmentation: add the mask to the JSON, as a PNG in base64")
        ] = False,
        score: Annotated[
            float | None,
            Query(
                ge=0,
                le=1,
                description="detection: score threshold (default: that of the server, see /health)",
            ),
        ] = None,
    ) -> Response:
        """Run the model of a task on an image.

        Returns the JSON of `pale predict --json`, and `timing` in milliseconds. The pixels of a mask are class indices.
        """

        async def handle(served: ServedRequest) -> Response:
            return await _predict(served, output, inline_mask, score)

        found = service.models.find(task, model)
        return await respond_and_drain(ServedRequest(service, request, "predict", found), handle)

    @app.post("/look", openapi_extra=BODY, responses=ERRORS, tags=["images"])
    async def look(
        request: Request,
        task: Annotated[
            str | None, Query(description="task of the model (default: the first one loaded)")
        ] = None,
        model: Annotated[
            str | None, Query(description="name of the model (default: the first one of the task)")
        ] = None,
        x: Annotated[
            float | None, Query(description="x of a point, in pixels from the left")
        ] = None,
        y: Annotated[
            float | None, Query(description="y of a point, in pixels from the top")
        ] = None,
        photo: Annotated[bool, Query(description="add the image as a small JPEG")] = False,
    ) -> Response:
        """Return the attention of a model on an image, for the last block of each stage.

        With a point: the token at the point, its attention weights (mean over the heads, with a sum of one), and its
        pale. Without a point: queries and keys, from which a browser computes the same for any point.
        """

        async def handle(served: ServedRequest) -> Response:
            return await _look(served, x, y, photo)

        found = service.models.find(task or None, model)
        return await respond_and_drain(ServedRequest(service, request, "look", found), handle)


async def _predict(
    served: ServedRequest, output: Output, inline_mask: bool, score: float | None
) -> Response:
    service = served.service
    worker = served.find_worker(service.predicting)
    if (output == "mask" or inline_mask) and not service.models.has_mask(served.model):
        raise RefusedError(422, f"{served.task} has no mask; only segmentation has one")
    predictor, pixels = service.models.predictors[served.model], 0
    pipeline = predictor.loaded.pipeline
    if score is not None and not pipeline.has_score:
        raise RefusedError(422, f"{served.task} has no score threshold; only detection has one")

    def plan(width: int, height: int) -> tuple[int, Callable[[Image.Image], Tensor]]:
        nonlocal pixels
        size, top = (width, height), predictor.top
        max_pixels = service.limits.pixels
        pixels, resized = service.models.model_pixels(served.model, width, height, max_pixels)
        if output == "drawn":
            _require_drawable(pipeline.drawn_size(size, top), service.limits)
        needed = pipeline.prediction_bytes(size, resized, output, inline_mask, top)
        return needed, predictor.prepare

    name, image, tensor = await served.read_image(worker, plan)
    future = served.submit(worker, Prepared(name, image, tensor, score), pixels)
    # From here on only the queue holds them: they are free before the result is drawn.
    del image, tensor
    prediction = await served.result(future)
    return await served.in_thread(_prediction_response, prediction, output, inline_mask, served)


async def _look(served: ServedRequest, x: float | None, y: float | None, photo: bool) -> Response:
    models = served.service.models
    worker = served.find_worker(served.service.tracing)
    if (x is None) != (y is None):
        raise RefusedError(422, "a point needs x and y; give both or none")
    trace_bytes = models.trace_bytes(served.model)
    _, image, _ = await served.read_image(
        worker, lambda w, h: (memory_cost.tracing((w, h), trace_bytes), lambda image: None)
    )
    point = None if x is None or y is None else (x, y)
    if point is not None and not _is_inside(point, image.size):
        raise RefusedError(
            422,
            f"the point {point[0]:g}, {point[1]:g} is outside the image of {image.width}x{image.height}",
        )
    trace = await served.result(served.submit(worker, image, 0))
    return await served.in_thread(_trace_response, trace, point, photo, served)


def _is_inside(point: tuple[float, float], size: tuple[int, int]) -> bool:
    return 0 <= point[0] < size[0] and 0 <= point[1] < size[1]


def _prediction_response(
    prediction: Prediction, output: Output, inline_mask: bool, served: ServedRequest
) -> Response:
    if output == "drawn":
        return PartedResponse(_encode(prediction.draw(), "JPEG"), "image/jpeg", served.close)
    if output == "mask":
        return PartedResponse(_encode(_mask(prediction), "PNG"), "image/png", served.close)
    content = {"task": served.task} | prediction.plain()
    if inline_mask:
        content["mask"] = base64.b64encode(_encode(_mask(prediction), "PNG")).decode()
    return _json_response(content, served)


def _mask(prediction: Prediction) -> Image.Image:
    mask = prediction.mask()
    assert mask is not None
    return mask


def _trace_response(
    trace: BackboneTrace, point: tuple[float, float] | None, photo: bool, served: ServedRequest
) -> Response:
    content = attention_for_page(trace, photo) if point is None else attention_at(trace, point)
    return _json_response({"task": served.task} | content, served)


def _json_response(content: dict[str, Any], served: ServedRequest) -> Response:
    encoded = JSONResponse(content | {"timing": served.timing_so_far()}).body
    return PartedResponse(bytes(encoded), "application/json", served.close)


def _require_drawable(size: tuple[int, int], limits: Limits) -> None:
    """Raise RefusedError for an image that can be classified, but whose drawn result would be too large."""
    w, h = size
    max_pixels = 2 * limits.pixels
    if max(w, h) > memory_cost.MAX_JPEG_SIDE or w * h > max_pixels:
        raise RefusedError(
            413,
            f"the drawn image would have {w}x{h} pixels, but at most {memory_cost.MAX_JPEG_SIDE:,} per side and "
            f"{max_pixels:,} in total are possible; use output=json, or make the image smaller",
        )


def _encode(image: Image.Image, file_format: str) -> bytes:
    content = io.BytesIO()
    image.save(content, file_format, quality=JPEG_QUALITY)
    return content.getvalue()
