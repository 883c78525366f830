"""The Open Inference Protocol, version 2 (KServe, Triton): health, metadata and inference beside the JSON API.

Each model is offered twice. NAME takes encoded image files, preprocesses them as `pale.Predictor` does and returns
results. NAME.tensor takes preprocessed images, and has the input and outputs of the file that `pale export` writes, so
that a client may change between this server and Triton with that file.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from .. import __version__
from ..predict import Prediction
from ..tasks.prediction import ArraySpec
from . import memory_cost
from .batching import Done
from .graphs import MAX_SIDE, OUTPUT_COPIES, TensorGraph
from .limits import RefusedError
from .models import Prepared
from .names import TENSOR_SUFFIX
from .request import PartedResponse, ServedRequest, error_response, respond_and_drain
from .routes import ERRORS
from .service import Service
from .tensors import (
    NAMES,
    PARSED_BYTES,
    InferRequest,
    TensorSpec,
    as_files,
    as_floats,
    encode_response,
    json_length,
    parse_request,
    refuse,
)

VERSION = "1"  # of every model
LENGTH_HEADER = "inference-header-content-length"
# Bytes in a response for each byte of an array at the size of an image: as bytes, and as JSON (a list, and its text).
BINARY_BYTES, JSON_BYTES = 4, 24
BODY = {
    "requestBody": {
        "required": True,
        "description": "JSON, or JSON followed by binary tensor data; see docs/serve.md.",
        "content": {
            "application/json": {"schema": {"type": "object"}},
            "application/octet-stream": {"schema": {"type": "string", "format": "binary"}},
        },
    }
}
INFER_ERRORS = ERRORS | {
    400: ERRORS[422] | {"description": "The request does not follow the protocol."},
    404: ERRORS[404] | {"description": "No such model is loaded."},
}


@dataclass(frozen=True)
class Endpoint:
    """A model of the protocol.

    Attributes:
        name: name of the model in requests.
        model: name of the model in `Models`.
        input: its only input.
        outputs: outputs by name.
        graph: graph of preprocessed tensors; None: it takes image files.
        arrays: arrays of results; for image files.
    """

    name: str
    model: str
    input: TensorSpec
    outputs: dict[str, TensorSpec]
    graph: TensorGraph | None
    arrays: dict[str, ArraySpec]


def find_endpoints(service: Service) -> dict[str, Endpoint]:
    """Return two endpoints for each model, by name."""
    found: dict[str, Endpoint] = {}
    for name, predictor in service.models.predictors.items():
        specs = predictor.loaded.pipeline.array_specs()
        outputs = {
            key: _spec(key, spec.dtype, ("batch", *spec.dims)) for key, spec in specs.items()
        }
        files = TensorSpec("image", "BYTES", (-1,))
        found[name] = Endpoint(name, name, files, outputs, None, specs)
        graph = service.models.graphs[name]
        outputs = {key: _spec(key, *about) for key, about in graph.outputs.items()}
        images = TensorSpec("images", "FP32", graph.input_shape)
        tensor = name + TENSOR_SUFFIX
        found[tensor] = Endpoint(tensor, name, images, outputs, graph, {})
    return found


def _spec(name: str, dtype: Any, dims: tuple[int | str, ...]) -> TensorSpec:
    shape = tuple(-1 if isinstance(d, str) else d for d in dims)
    return TensorSpec(name, NAMES[np.dtype(dtype)], shape)


def add_protocol_routes(app: FastAPI, service: Service) -> None:
    """Add the routes below /v2."""
    endpoints = find_endpoints(service)
    _add_health_routes(app, service)
    _add_model_routes(app, service, endpoints)

    async def infer(request: Request, name: str) -> Response:
        """Run a model on tensors: inputs and outputs as JSON or as binary data.

        `NAME` takes encoded image files (BYTES), `NAME.tensor` preprocessed images (FP32).
        """
        endpoint = _find(endpoints, request, name)

        async def handle(served: ServedRequest) -> Response:
            return await _infer(served, endpoint or _refuse_model(endpoints))

        model = None if endpoint is None else endpoint.model
        return await respond_and_drain(ServedRequest(service, request, "infer", model), handle)

    _add(app, "/v2/models/{name}/infer", infer, "POST", openapi_extra=BODY, responses=INFER_ERRORS)


def _add(
    app: FastAPI, path: str, handler: Callable[..., Awaitable[Response]], method: str, **more: Any
) -> None:
    """Add a route of a model, and the same with a version, which OpenAPI does not list."""
    app.add_api_route(path, handler, methods=[method], tags=["inference protocol"], **more)
    versioned = path.replace("{name}", "{name}/versions/{version}")
    app.add_api_route(versioned, handler, methods=[method], include_in_schema=False)


def _add_health_routes(app: FastAPI, service: Service) -> None:
    tags: Any = ["inference protocol"]

    @app.get("/v2", tags=tags)
    async def server() -> dict[str, Any]:
        """Return name, version and extensions of the server."""
        return {"name": "pale", "version": __version__, "extensions": ["binary_tensor_data"]}

    @app.get("/v2/health/live", tags=tags)
    async def live() -> dict[str, bool]:
        """Return 200 as long as the server runs."""
        return {"live": True}

    @app.get("/v2/health/ready", tags=tags)
    async def ready() -> Response:
        """Return 200 if the server is ready, 400 after it was asked to stop."""
        return _readiness(service, {})


def _readiness(service: Service, about: dict[str, Any]) -> Response:
    # The protocol asks for a 4xx status; Triton uses 400.
    ready = not service.stopping
    return JSONResponse(about | {"ready": ready}, 200 if ready else 400)


def _add_model_routes(app: FastAPI, service: Service, endpoints: dict[str, Endpoint]) -> None:
    async def metadata(request: Request, name: str) -> Response:
        """Return the inputs and outputs of a model, its task and its classes."""
        if (endpoint := _find(endpoints, request, name)) is None:
            return error_response(404, _unknown(endpoints))
        return JSONResponse(_metadata(service, endpoint))

    async def ready(request: Request, name: str) -> Response:
        """Return 200 if a model is ready, 400 after the server was asked to stop."""
        if (endpoint := _find(endpoints, request, name)) is None:
            return error_response(404, _unknown(endpoints))
        return _readiness(service, {"name": endpoint.name})

    errors = {status: INFER_ERRORS[status] for status in (401, 404, 422)}
    _add(app, "/v2/models/{name}", metadata, "GET", responses=errors)
    _add(app, "/v2/models/{name}/ready", ready, "GET", responses=errors)

    @app.post("/v2/repository/index", tags=["inference protocol"])
    async def index() -> list[dict[str, str]]:
        """Return the names of all models."""
        state = "UNAVAILABLE" if service.stopping else "READY"
        return [{"name": name, "version": VERSION, "state": state} for name in endpoints]


def _find(endpoints: dict[str, Endpoint], request: Request, name: str) -> Endpoint | None:
    """Return the endpoint of a request; None if it names another model, or another version of it."""
    return endpoints.get(name) if request.path_params.get("version", VERSION) == VERSION else None


def _unknown(endpoints: dict[str, Endpoint]) -> str:
    return f"no such model is loaded; loaded: {', '.join(endpoints)}, each in version {VERSION}"


def _refuse_model(endpoints: dict[str, Endpoint]) -> NoReturn:
    raise RefusedError(404, _unknown(endpoints))


def _metadata(service: Service, endpoint: Endpoint) -> dict[str, Any]:
    bundle = service.models.predictors[endpoint.model].loaded
    return {
        "name": endpoint.name,
        "versions": [VERSION],
        "platform": "pale_pytorch",
        "inputs": [endpoint.input.plain()],
        "outputs": [spec.plain() for spec in endpoint.outputs.values()],
        # Beyond the protocol: what clients need to prepare tensors and to name classes.
        "parameters": bundle.about(),
    }


async def _infer(served: ServedRequest, endpoint: Endpoint) -> Response:
    served.find_worker(served.service.predicting)
    headers = served.request.headers
    if headers.get("content-encoding", "identity").lower() != "identity":
        raise RefusedError(415, "compressed bodies are not supported; send the body as it is")

    def needed(content: bytes) -> int:
        # The body, its copy in files or numbers, and the objects of its JSON.
        length = json_length(headers.get(LENGTH_HEADER), len(content))
        return memory_cost.REQUEST_BYTES + 2 * len(content) + PARSED_BYTES * length

    content = await served.read_content(needed)
    length = json_length(headers.get(LENGTH_HEADER), len(content))
    request = await served.in_thread(parse_request, content, length)
    del content
    _check_input(request, endpoint, served.service)
    requested = request.requested(list(endpoint.outputs))
    run = _run_files if endpoint.graph is None else _run_tensor
    outputs = await run(served, endpoint, request, requested)
    about = {"model_name": endpoint.name, "model_version": VERSION}
    about |= {} if request.id is None else {"id": request.id}
    body, head = await served.in_thread(encode_response, about, outputs, requested)
    media_type = "application/json" if head is None else "application/octet-stream"
    response = PartedResponse(body, media_type, served.close)
    if head is not None:
        response.headers[LENGTH_HEADER] = str(head)
    return response


def _check_input(request: InferRequest, endpoint: Endpoint, service: Service) -> None:
    """Raise RefusedError unless name, type and shape are those of the model, within its limits."""
    given, wanted, graph = request.input, endpoint.input, endpoint.graph
    if (given.name, given.datatype) != (wanted.name, wanted.datatype):
        refuse(
            f"the input of {endpoint.name} is {wanted.name} of type {wanted.datatype}, got "
            f"{given.name[:40]!r} of type {given.datatype[:40]!r}"
        )
    same = len(given.shape) == len(wanted.shape) and all(
        b in (-1, a) for a, b in zip(given.shape, wanted.shape, strict=True)
    )
    if not same:
        refuse(f"the shape of {wanted.name} must be {list(wanted.shape)}, got {list(given.shape)}")
    most = min(service.limits.batch, service.limits.queue) if graph is None else graph.batch
    if given.shape[0] > most:
        refuse(f"a request may hold at most {most} images, got {given.shape[0]:,}")
    if graph is None:
        return
    _, _, h, w = given.shape
    if max(h, w) > MAX_SIDE or given.shape[0] * h * w > graph.pixels:
        raise RefusedError(
            413,
            f"the tensor may have at most {graph.pixels:,} pixels in all and {MAX_SIDE:,} per side, got "
            f"{given.shape[0]} images of {h:,}x{w:,}; send fewer or smaller images",
        )


async def _run_tensor(
    served: ServedRequest, endpoint: Endpoint, request: InferRequest, requested: dict[str, bool]
) -> dict[str, NDArray[Any]]:
    graph = endpoint.graph
    assert graph is not None
    b, _, h, w = request.input.shape
    worker = served.find_worker(served.service.predicting)
    worker.reserve()
    try:
        copies = OUTPUT_COPIES + (0 if all(requested.values()) else JSON_BYTES)
        served.share.take(copies * graph.output_bytes((b, h, w)))
        images = await served.in_thread(as_floats, request.input)
    finally:
        worker.release()
    outputs: dict[str, NDArray[Any]] = await served.result(
        served.submit(worker, torch.from_numpy(images), b * h * w)
    )
    if not await served.in_thread(_all_finite, list(outputs.values())):
        raise RefusedError(
            422, "the outputs are not finite for this tensor; were the images normalised?"
        )
    return outputs


def _all_finite(arrays: Sequence[NDArray[Any]]) -> bool:
    return all(bool(np.isfinite(array).all()) for array in arrays)


async def _run_files(
    served: ServedRequest, endpoint: Endpoint, request: InferRequest, requested: dict[str, bool]
) -> dict[str, NDArray[Any]]:
    service = served.service
    predictor = service.models.predictors[served.model]
    pipeline = predictor.loaded.pipeline
    files = await served.in_thread(as_files, request.input)
    dense = [spec for spec in endpoint.arrays.values() if "height" in spec.dims]
    per_pixel = len(dense) * (BINARY_BYTES if all(requested.values()) else JSON_BYTES)
    pixels: list[int] = []

    def plan(width: int, height: int) -> tuple[int, Callable[[Image.Image], Tensor]]:
        limit = service.limits.pixels
        seen, resized = service.models.model_pixels(served.model, width, height, limit)
        pixels.append(seen)
        needed = pipeline.prediction_bytes((width, height), resized, "json", False, predictor.top)
        return needed + per_pixel * width * height, predictor.prepare

    worker = served.find_worker(service.predicting)
    worker.reserve(len(files))
    items: list[Prepared] = []
    try:
        for content in files:
            served.share.take(memory_cost.opening(content))
            image, tensor = await served.decode(content, plan)
            items.append(Prepared("image", image, tensor))
            if dense and len({item.image.size for item in items}) > 1:
                refuse("images of one request must have the same size here; send one image each")
    finally:
        worker.release(len(files))
    futures: list[asyncio.Future[Done[Prediction]]] = [
        served.submit(worker, item, seen) for item, seen in zip(items, pixels, strict=True)
    ]
    del items
    try:
        predictions = [await served.result(future) for future in futures]
    finally:
        for future in futures:
            future.cancel()
    return await served.in_thread(_stacked, predictions, endpoint.arrays, predictor.classes)


def _stacked(
    predictions: Sequence[Prediction], specs: dict[str, ArraySpec], classes: Sequence[str]
) -> dict[str, NDArray[Any]]:
    """Return the arrays of all results, stacked; results with fewer objects are padded with zeros or empty bytes."""
    rows = [prediction.arrays(classes) for prediction in predictions]
    found: dict[str, NDArray[Any]] = {}
    for name, spec in specs.items():
        arrays = [row[name] for row in rows]
        if "count" in spec.dims:
            most = max(len(array) for array in arrays)
            arrays = [_padded(array, most) for array in arrays]
        found[name] = np.stack(arrays)
    return found


def _padded(array: NDArray[Any], count: int) -> NDArray[Any]:
    fill: Any = b"" if array.dtype == object else 0
    padded = np.full((count, *array.shape[1:]), fill, array.dtype)
    padded[: len(array)] = array
    return padded
