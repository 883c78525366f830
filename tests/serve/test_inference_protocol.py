"""The Open Inference Protocol over real sockets: agreement with Predictor, the binary extension, hostile requests."""

import base64
import json
import struct

import httpx
import numpy as np
import pytest
import torch
from PIL import Image
from serve.images import file_of, kinds, near
from serve.serving import running, until
from support.weights import TASKS, pixels

from pale.predict import Predictor
from pale.serve import Limits, Models

each_task = pytest.mark.parametrize("task", TASKS)
pytestmark = pytest.mark.usefixtures("one_thread")
GOOD = file_of(Image.fromarray(pixels()))
LENGTH = "inference-header-content-length"


@pytest.fixture(scope="module")
def server(made, one_thread):
    models = Models(list(made.values()), device="cpu", batch=4, score=0.0)
    limits = Limits(batch=4, wait_ms=0, max_upload_mb=0.5, max_pixels=400_000)
    with running(models, limits) as found:
        yield found


def packed(*files: bytes) -> bytes:
    return b"".join(struct.pack("<I", len(file)) + file for file in files)


def tensor(name: str, datatype: str, shape, **more) -> dict:
    return {"name": name, "datatype": datatype, "shape": shape, **more}


def in_base64(*files: bytes) -> dict:
    data = [base64.b64encode(file).decode() for file in files]
    return {"inputs": [tensor("image", "BYTES", [len(files)], data=data)]}


def post(server, model: str, head: dict | bytes, data: bytes | None = None, **headers):
    content = head if isinstance(head, bytes) else json.dumps(head).encode()
    if data is not None:
        headers = {LENGTH: str(len(content))} | headers
    path = f"/v2/models/{model}/infer"
    return server.client.post(path, content=content + (data or b""), headers=headers)


def arrays(answer: httpx.Response) -> dict[str, np.ndarray]:
    """Outputs of a response as JSON."""
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/json"
    return {o["name"]: np.array(o["data"]).reshape(o["shape"]) for o in answer.json()["outputs"]}


def rounded(values) -> list[float]:
    return np.asarray(values, float).round(3).ravel().tolist()


class TestImageFiles:
    def test_a_classification_is_that_of_the_predictor(self, server, made):
        predictor = Predictor(made["classification"], device="cpu")
        files = list(kinds().values())[:3]
        found = arrays(post(server, "classification", in_base64(*files)))
        for i, file in enumerate(files):
            best = predictor(file).plain()["classes"]
            assert found["names"][i].tolist() == [each["class"] for each in best]
            wanted = [each["probability"] for each in best]
            assert near(found["probabilities"][i].tolist(), wanted)
            names = [predictor.classes[n] for n in found["classes"][i]]
            assert names == found["names"][i].tolist()

    def test_a_mask_is_that_of_the_predictor(self, server, made):
        alone = Predictor(made["segmentation"], device="cpu")(GOOD)
        found = arrays(post(server, "segmentation", in_base64(GOOD, GOOD)))
        assert found["mask"].shape == (2, *alone.labels.shape)
        assert (found["mask"] == alone.labels).mean() > 0.999

    def test_objects_are_those_of_the_predictor_and_padded_to_the_largest_number(
        self, server, made
    ):
        predictor = Predictor(made["detection"], device="cpu", score=0.0)
        other = kinds()["odd"]
        found = arrays(post(server, "detection", in_base64(GOOD, other)))
        for i, file in enumerate((GOOD, other)):
            objects = predictor(file).plain()["objects"]
            count = int((found["scores"][i] > 0).sum())
            assert count == sum(each["score"] > 0 for each in objects)
            for n, each in enumerate(objects[:count]):
                left, top, width, height = each["bbox"]
                box = [left, top, left + width, top + height]
                assert found["boxes"][i, n].tolist() == pytest.approx(box, abs=1e-2)
                assert found["scores"][i, n] == pytest.approx(each["score"], abs=1e-3)
                assert found["names"][i, n] == each["class"]
                assert found["masks"][i, n] == each["segmentation"]["counts"]
                assert found["size"][i].tolist() == each["segmentation"]["size"]

    def test_binary_and_json_are_the_same(self, server):
        plain = arrays(post(server, "classification", in_base64(GOOD)))
        head = {
            "id": "abc",
            "inputs": [
                tensor("image", "BYTES", [1], parameters={"binary_data_size": 4 + len(GOOD)})
            ],
            "outputs": [
                {"name": "names"},
                {"name": "probabilities", "parameters": {"binary_data": True}},
            ],
        }
        answer = post(server, "classification", head, packed(GOOD))
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"] == "application/octet-stream"
        length = int(answer.headers[LENGTH])
        about = json.loads(answer.content[:length])
        assert {k: about[k] for k in ("model_name", "model_version", "id")} == {
            "model_name": "classification",
            "model_version": "1",
            "id": "abc",
        }
        names, probabilities = about["outputs"]
        assert names["data"] == plain["names"][0].tolist()
        assert probabilities["parameters"] == {"binary_data_size": 20}
        found = np.frombuffer(answer.content[length:], "<f4")
        assert rounded(found) == rounded(plain["probabilities"])


class TestTensors:
    @each_task
    def test_outputs_are_those_of_the_exported_graph(self, server, made, task):
        bundle = Predictor(made[task], device="cpu", score=0.0).loaded
        image = Image.fromarray(pixels())
        images = bundle.normalise(bundle.preprocess(image)[None])
        with torch.no_grad():
            graph = bundle.pipeline.export_graph(bundle.model)
            wanted = graph.model(images)
        wanted = [wanted] if isinstance(wanted, torch.Tensor) else wanted
        data = images.numpy().astype("<f4").tobytes()
        given = tensor(
            "images", "FP32", list(images.shape), parameters={"binary_data_size": len(data)}
        )
        found = arrays(post(server, f"{task}.tensor", {"inputs": [given]}, data))
        nested = tensor("images", "FP32", list(images.shape), data=images.tolist())
        again = arrays(post(server, f"{task}.tensor", {"inputs": [nested]}))
        assert list(found) == list(graph.outputs)
        for name, one in zip(graph.outputs, wanted, strict=True):
            scale = float(one.abs().max()) or 1.0
            assert found[name].shape == tuple(one.shape)
            assert np.abs(found[name] - one.numpy()).max() < 1e-3 * scale
            assert np.abs(again[name] - one.numpy()).max() < 1e-3 * scale

    @each_task
    @pytest.mark.parametrize("size", [(1, 1), (1, 300), (37, 2)])
    def test_unusual_sizes_have_a_result(self, server, task, size):
        h, w = size
        given = tensor("images", "FP32", [1, 3, h, w], data=[0.5] * (3 * h * w))
        assert post(server, f"{task}.tensor", {"inputs": [given]}).status_code == 200

    def test_several_images_in_one_tensor(self, server):
        images = np.random.default_rng(0).normal(size=(4, 3, 32, 32)).astype("<f4")

        def logits(part: np.ndarray) -> np.ndarray:
            parameters = {"binary_data_size": part.nbytes}
            given = tensor("images", "FP32", list(part.shape), parameters=parameters)
            answer = post(server, "classification.tensor", {"inputs": [given]}, part.tobytes())
            return arrays(answer)["logits"]

        together = logits(images)
        assert together.shape == (4, 9)
        alone = np.concatenate([logits(images[i : i + 1]) for i in range(4)])
        assert np.abs(together - alone).max() < 1e-3 * np.abs(alone).max()


class TestState:
    def test_health_and_server(self, server):
        assert server.client.get("/v2/health/live").json() == {"live": True}
        assert server.client.get("/v2/health/ready").json() == {"ready": True}
        about = server.client.get("/v2").json()
        assert about["name"] == "pale"
        assert about["extensions"] == ["binary_tensor_data"]

    def test_metadata_describes_inputs_outputs_and_classes(self, server, made):
        about = server.client.get("/v2/models/segmentation.tensor").json()
        assert about["inputs"] == [tensor("images", "FP32", [-1, 3, -1, -1])]
        assert about["outputs"] == [tensor("logits", "FP32", [-1, 9, -1, -1])]
        about = server.client.get("/v2/models/detection").json()
        assert about["versions"] == ["1"]
        assert about["inputs"] == [tensor("image", "BYTES", [-1])]
        shapes = {o["name"]: (o["datatype"], o["shape"]) for o in about["outputs"]}
        assert shapes == {
            "boxes": ("FP32", [-1, -1, 4]),
            "scores": ("FP32", [-1, -1]),
            "classes": ("INT64", [-1, -1]),
            "names": ("BYTES", [-1, -1]),
            "masks": ("BYTES", [-1, -1]),
            "size": ("INT64", [-1, 2]),
        }
        assert about["parameters"]["classes"] == [f"detection {i}" for i in range(8)]
        assert str(made["detection"].parent) not in json.dumps(about)

    def test_versions_and_unknown_models(self, server):
        for path in ("", "/ready", "/versions/1", "/versions/1/ready"):
            assert server.client.get(f"/v2/models/detection{path}").status_code == 200
        for path in ("none", "none/ready", "detection/versions/2", "detection/versions/2/ready"):
            answer = server.client.get(f"/v2/models/{path}")
            assert answer.status_code == 404
            assert "loaded: classification, classification.tensor" in answer.json()["error"]
        assert post(server, "none", in_base64(GOOD)).status_code == 404
        assert post(server, "detection/versions/2", in_base64(GOOD)).status_code == 404
        index = server.client.post("/v2/repository/index").json()
        assert {"name": "detection.tensor", "version": "1", "state": "READY"} in index

    def test_requests_are_counted_and_nothing_is_held_afterwards(self, server):
        post(server, "detection", in_base64(GOOD))
        text = server.client.get("/metrics").text
        assert 'kind="infer",model="detection",status="200",task="detection"' in text
        until(lambda: server.service.budget.used == 0)
        assert server.service.upload_budget.used == 0
        assert server.service.predicting["detection"].depth == 0

    def test_probes_need_no_token_and_the_rest_does(self, made):
        with running(Models([made["classification"]], device="cpu"), token="x" * 20) as closed:
            for path in ("/v2/health/live", "/v2/health/ready"):
                assert closed.client.get(path).status_code == 200
            for path in ("/v2", "/v2/models/classification", "/v2/models/classification/ready"):
                assert closed.client.get(path).status_code == 401
            assert post(closed, "classification", in_base64(GOOD)).status_code == 401
            key = {"authorization": "Bearer " + "x" * 20}
            assert post(closed, "classification", in_base64(GOOD), **key).status_code == 200
            closed.service.stopping = True
            assert closed.client.get("/v2/health/live").status_code == 200
            assert closed.client.get("/v2/health/ready").status_code == 400
            assert closed.client.get("/health").json()["status"] == "stopping"
            # Requests are still answered: a load balancer has not heard of it yet.
            assert post(closed, "classification", in_base64(GOOD), **key).status_code == 200


def images_of(shape, **more) -> dict:
    return {"inputs": [tensor("images", "FP32", shape, **more)]}


def binary(size, **more) -> dict:
    return {"parameters": {"binary_data_size": size} | more}


def image_of(shape, **more) -> dict:
    return {"inputs": [tensor("image", "BYTES", shape, **more)]}


ONE = {"data": [0.0] * 12}
TENSOR, FILES = "classification.tensor", "classification"
DEEP = b'{"inputs":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
NAN = np.full(12, np.nan, "<f4").tobytes()
HOSTILE = {
    # JSON
    "no JSON": (FILES, b"hello", None, 400, "not valid JSON"),
    "empty": (FILES, b"", None, 400, "not valid JSON"),
    "not UTF-8": (FILES, b'{"id": "\xff"}', None, 400, "not valid JSON"),
    "not a table": (FILES, b"[1]", None, 400, "must be a JSON object"),
    "nested deeply": (FILES, DEEP, None, 400, ""),
    "a number with too many digits": (FILES, b'{"id": %s}' % (b"9" * 9999), None, 400, ""),
    "NaN in JSON": (TENSOR, b'{"inputs": [NaN]}', None, 400, "NaN is not valid in JSON"),
    "no inputs": (FILES, {}, None, 400, "one tensor"),
    "inputs is text": (FILES, {"inputs": "image"}, None, 400, "one tensor"),
    "two inputs": (FILES, {"inputs": image_of([1])["inputs"] * 2}, None, 400, "one tensor"),
    "input is a number": (FILES, {"inputs": [3]}, None, 400, "must be a JSON object"),
    "no name": (FILES, {"inputs": [{"datatype": "BYTES"}]}, None, 400, "name of the input"),
    "another name": (TENSOR, {"inputs": [tensor("x", "FP32", [1], data=[0])]}, None, 400, "is images"),
    "another type": (TENSOR, {"inputs": [tensor("images", "FP64", [1], data=[0])]}, None, 400, "FP32"),
    "an unknown type": (TENSOR, {"inputs": [tensor("images", "X" * 999, [1], data=[0])]}, None, 400, ""),
    "a long id": (FILES, in_base64(GOOD) | {"id": "x" * 999}, None, 400, "id must be"),
    # shapes
    "no shape": (TENSOR, {"inputs": [{"name": "images", "datatype": "FP32", "data": []}]}, None, 400, ""),
    "a wrong rank": (TENSOR, images_of([12], **ONE), None, 400, "[-1, 3, -1, -1]"),
    "four channels": (TENSOR, images_of([1, 4, 1, 3], **ONE), None, 400, "[-1, 3, -1, -1]"),
    "a negative size": (TENSOR, images_of([1, 3, -2, -2], **ONE), None, 400, "integers from 1"),
    "a size of zero": (TENSOR, images_of([1, 3, 0, 2], data=[]), None, 400, "integers from 1"),
    "a size as text": (TENSOR, images_of([1, 3, "2", 2], **ONE), None, 400, "integers from 1"),
    "a fractional size": (TENSOR, images_of([1, 3, 2.0, 2], **ONE), None, 400, "integers from 1"),
    "a true size": (TENSOR, images_of([True, 3, 2, 2], **ONE), None, 400, "integers from 1"),
    "a huge size": (TENSOR, images_of([1, 3, 2**30, 2**30], **binary(12)), bytes(12), 413, "at most"),
    "a size beyond 64 bits": (TENSOR, images_of([1, 3, 2**70, 2], **ONE), None, 400, "integers from 1"),
    "a long side": (TENSOR, images_of([1, 3, 1, 9000], **binary(12)), bytes(12), 413, "at most"),
    "many images": (TENSOR, images_of([99, 3, 1, 1], **binary(12)), bytes(12), 400, "at most 4"),
    "many dimensions": (TENSOR, images_of([1] * 999, **ONE), None, 400, "1 to 8 sizes"),
    "many files": (FILES, in_base64(*[b"x"] * 5), None, 400, "at most 4 images, got 5"),
    "two images of a detector": ("detection.tensor", images_of([2, 3, 1, 2], **ONE), None, 400, "[1, 3,"),
    # data
    "too few numbers": (TENSOR, images_of([1, 3, 2, 2], data=[0.0]), None, 400, "has 12 elements"),
    "too many numbers": (TENSOR, images_of([1, 3, 1, 2], **ONE), None, 400, "has 6 elements"),
    "uneven lists": (TENSOR, images_of([1, 3, 1, 1], data=[[0, 1], 2]), None, 400, "nested"),
    "text among numbers": (TENSOR, images_of([1, 3, 1, 1], data=["x" * 9999, 1, 2]), None, 400, "numbers"),
    "true among numbers": (TENSOR, images_of([1, 3, 1, 1], data=[True, 1, 2]), None, 400, "numbers"),
    "null among numbers": (TENSOR, images_of([1, 3, 1, 1], data=[None, 1, 2]), None, 400, "numbers"),
    "a huge number": (TENSOR, images_of([1, 3, 1, 1], data=[10**400, 1, 2]), None, 400, "too large"),
    "too large for FP32": (TENSOR, images_of([1, 3, 1, 1], data=[1e300, 1, 2]), None, 400, "too large"),
    "outputs that overflow": (TENSOR, images_of([1, 3, 2, 2], data=[3e38] * 12), None, 422, "finite"),
    "no data": (TENSOR, images_of([1, 3, 2, 2]), None, 400, "must be a list"),
    "data is text": (TENSOR, images_of([1, 3, 2, 2], data="0" * 12), None, 400, "must be a list"),
    "not base64": (FILES, image_of([1], data=["///=/"]), None, 400, "base64"),
    "numbers as files": (FILES, image_of([1], data=[3]), None, 400, "base64"),
    "a file that is no image": (FILES, in_base64(b"hello"), None, 415, "not an image"),
    "an empty file": (FILES, in_base64(b""), None, 415, "not an image"),
    "a damaged image": (FILES, in_base64(GOOD[: len(GOOD) // 2]), None, 422, "damaged"),
    "masks of several sizes": ("segmentation", in_base64(GOOD, kinds()["odd"]), None, 400, "same size"),
    # binary
    "NaN": (TENSOR, images_of([1, 3, 2, 2], **binary(48)), NAN, 400, "NaN"),
    "truncated": (TENSOR, images_of([1, 3, 2, 2], **binary(48)), bytes(47), 400, "47 arrived"),
    "more than stated": (TENSOR, images_of([1, 3, 2, 2], **binary(48)), bytes(49), 400, "49 arrived"),
    "too short for the shape": (TENSOR, images_of([1, 3, 9, 9], **binary(48)), bytes(48), 400, "972"),
    "a negative length": (TENSOR, images_of([1, 3, 2, 2], **binary(-48)), bytes(48), 400, ""),
    "a length as text": (TENSOR, images_of([1, 3, 2, 2], **binary("48")), bytes(48), 400, ""),
    "a true length": (TENSOR, images_of([1, 3, 2, 2], **binary(True)), b"x", 400, ""),
    "data twice": (TENSOR, images_of([1, 3, 2, 2], **ONE, **binary(48)), bytes(48), 400, "both"),
    "bytes without a length": (TENSOR, images_of([1, 3, 2, 2], **ONE), bytes(48), 400, "48 arrived"),
    "shared memory": (
        TENSOR,
        images_of([1, 3, 2, 2], parameters={"shared_memory_region": "x"}),
        None,
        400,
        "shared memory is not supported",
    ),
    "files cut in a length": (FILES, image_of([2], **binary(7)), packed(b"a") + b"ab", 400, "ends before"),
    "a file with a huge length": (FILES, image_of([1], **binary(8)), b"\xff" * 8, 400, "more than"),
    "bytes after the files": (FILES, image_of([1], **binary(9)), packed(b"abcd") + b"e", 400, "follow"),
    # outputs
    "an unknown output": (FILES, in_base64(GOOD) | {"outputs": [{"name": "x"}]}, None, 400, "no output 'x'"),
    "an output twice": (FILES, in_base64(GOOD) | {"outputs": [{"name": "names"}] * 2}, None, 400, "own"),
    "outputs as text": (FILES, in_base64(GOOD) | {"outputs": "names"}, None, 400, "outputs must be"),
    "outputs in shared memory": (
        FILES,
        in_base64(GOOD)
        | {"outputs": [{"name": "names", "parameters": {"shared_memory_region": "x"}}]},
        None,
        400,
        "shared memory",
    ),
    "the classification extension": (
        FILES,
        in_base64(GOOD) | {"outputs": [{"name": "names", "parameters": {"classification": 2}}]},
        None,
        400,
        "classification extension",
    ),
    "a flag as text": (
        FILES,
        in_base64(GOOD) | {"parameters": {"binary_data_output": "yes"}},
        None,
        400,
        "true or false",
    ),
}  # fmt: skip


class TestHostileRequests:
    @pytest.mark.parametrize("case", HOSTILE)
    def test_the_answer_is_a_reason(self, server, case):
        model, head, data, status, words = HOSTILE[case]
        answer = post(server, model, head, data)
        assert answer.status_code == status, answer.text
        assert list(answer.json()) == ["error"]
        assert words in answer.json()["error"]
        assert len(answer.text) < 500
        until(lambda: server.service.budget.used == 0)
        until(lambda: server.service.predicting["classification"].depth == 0)

    @pytest.mark.parametrize("length", ["-1", "1e3", "99999999", "9" * 99, "", "x", "٣", "0x10"])
    def test_an_invalid_length_of_the_json(self, server, length):
        content = json.dumps(in_base64(GOOD)).encode()
        headers = {LENGTH: length.encode()}
        path = "/v2/models/classification/infer"
        answer = server.client.post(path, content=content, headers=headers)
        assert answer.status_code == 400, answer.text
        assert "Inference-Header-Content-Length" in answer.json()["error"]

    def test_too_many_bytes_and_compressed_bodies(self, server):
        assert post(server, FILES, b" " * 600_000).status_code == 413
        answer = post(server, FILES, b"x", **{"content-encoding": "gzip"})
        assert answer.status_code == 415

    def test_a_bomb_is_never_decoded(self, server):
        bomb = file_of(Image.new("1", (9_000, 9_000)))
        answer = post(server, FILES, in_base64(bomb))
        assert answer.status_code == 413
        assert "9000x9000" in answer.json()["error"]

    def test_a_full_queue_and_full_memory_refuse(self, server, monkeypatch):
        worker, budget = server.service.predicting["classification"], server.service.budget
        monkeypatch.setattr(worker, "reserved", 62)
        assert post(server, FILES, in_base64(GOOD)).status_code == 200
        assert post(server, FILES, in_base64(GOOD, GOOD, GOOD)).status_code == 429
        until(lambda: budget.used == 0)
        monkeypatch.setattr(budget, "total", 20_000_000)
        assert post(server, FILES, in_base64(GOOD)).status_code == 413
        monkeypatch.setattr(budget, "used", budget.total - 1)
        answer = post(server, FILES, in_base64(GOOD))
        assert answer.status_code in (413, 429)
