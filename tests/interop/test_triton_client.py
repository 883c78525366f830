"""NVIDIA's Triton client against `pale serve` as a process, and Triton's schema against exported repositories."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from support.weights import TASKS, pixels, weights

from pale import export
from pale.predict import Predictor

onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
for name in ("httpx", "fastapi"):
    pytest.importorskip(name, reason=f"{name} is not installed")

from serve.images import file_of, kinds, near  # noqa: E402
from serve.serving import Command, commands  # noqa: E402

GOOD = file_of(Image.fromarray(pixels()))
TOKEN = "a-token-of-enough-characters"


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> dict[str, Path]:
    return weights(tmp_path_factory.mktemp("weights"))


@pytest.fixture(scope="module")
def server(made):
    pytest.importorskip("tritonclient.http", reason="tritonclient[http] is not installed")
    words = [w for path in made.values() for w in ("--weights", path)]
    words += ["--weights", f"second={made['classification']}", "--score", 0]
    with commands(words) as (found,):
        yield found


@pytest.fixture
def client(server: Command):
    import tritonclient.http as triton

    with triton.InferenceServerClient(server.url.removeprefix("http://")) as found:
        yield found


def files(*contents: bytes, binary: bool = True):
    import tritonclient.http as triton

    found = triton.InferInput("image", [len(contents)], "BYTES")
    return [found.set_data_from_numpy(np.array(contents, object), binary_data=binary)]


def floats(images: np.ndarray, binary: bool = True):
    import tritonclient.http as triton

    found = triton.InferInput("images", list(images.shape), "FP32")
    return [found.set_data_from_numpy(images, binary_data=binary)]


@pytest.mark.slow
class TestTritonClient:
    client = "tritonclient"

    def test_state(self, client):
        """`is_server_live`, `is_server_ready`, metadata of server and models, repository index."""
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.get_server_metadata()["extensions"] == ["binary_tensor_data"]
        names = [each["name"] for each in client.get_model_repository_index()]
        assert names[:4] == ["classification", "classification.tensor", "second", "second.tensor"]
        for name in names:
            assert client.is_model_ready(name)
            assert client.is_model_ready(name, "1")
            about = client.get_model_metadata(name)
            assert about["name"] == name
            assert about["inputs"][0]["name"] == ("images" if "." in name else "image")
        assert not client.is_model_ready("none")
        assert not client.is_model_ready("second", "2")

    def test_image_files(self, client, made):
        """`infer` with encoded images (BYTES) for each task: against `Predictor`."""
        classified = Predictor(made["classification"], device="cpu")
        several = list(kinds().values())
        result = client.infer("second", files(*several), request_id="7", model_version="1")
        assert result.get_response()["id"] == "7"
        names, probabilities = result.as_numpy("names"), result.as_numpy("probabilities")
        assert probabilities.dtype == np.float32
        for i, content in enumerate(several):
            best = classified(content).plain()["classes"]
            assert [name.decode() for name in names[i]] == [each["class"] for each in best]
            assert near(probabilities[i].tolist(), [each["probability"] for each in best])
        mask = client.infer("segmentation", files(GOOD)).as_numpy("mask")
        wanted = Predictor(made["segmentation"], device="cpu")(GOOD).labels
        assert mask.dtype == np.uint8
        assert (mask[0] == wanted).mean() > 0.999
        objects = Predictor(made["detection"], device="cpu", score=0.0)(GOOD).plain()["objects"]
        result = client.infer("detection", files(GOOD))
        assert result.as_numpy("boxes").shape == (1, len(objects), 4)
        assert near(result.as_numpy("scores")[0].tolist(), [each["score"] for each in objects])

    @pytest.mark.parametrize("binary", [True, False], ids=["binary", "json"])
    @pytest.mark.parametrize("task", TASKS)
    def test_preprocessed_tensors(self, client, made, task, binary, measured):
        """`infer` with preprocessed images (FP32), as bytes and as JSON: against the exported graph."""
        import torch
        import tritonclient.http as triton

        bundle = Predictor(made[task], device="cpu", score=0.0).loaded
        images = bundle.normalise(bundle.preprocess(Image.fromarray(pixels()))[None])
        with torch.no_grad():
            graph = bundle.pipeline.export_graph(bundle.model)
            wanted = graph.model(images)
        wanted = [wanted] if isinstance(wanted, torch.Tensor) else wanted
        outputs = [triton.InferRequestedOutput(name, binary_data=binary) for name in graph.outputs]
        result = client.infer(f"{task}.tensor", floats(images.numpy(), binary), outputs=outputs)
        differences = []
        for name, one in zip(graph.outputs, wanted, strict=True):
            found = result.as_numpy(name)
            assert found.shape == tuple(one.shape)
            scale = float(one.abs().max()) or 1.0
            differences.append(float(np.abs(found - one.numpy()).max()) / scale)
        measured(max(differences), 1e-3, "of an output's largest value")

    def test_no_objects(self, client, made):
        """A detector that finds nothing returns arrays without entries, which the client reads."""
        blank = file_of(Image.new("RGB", (40, 40)))
        with commands(["--weights", made["detection"], "--score", 1]) as (strict,):
            import tritonclient.http as triton

            with triton.InferenceServerClient(strict.url.removeprefix("http://")) as other:
                result = other.infer("detection", files(blank))
        assert result.as_numpy("boxes").shape == (1, 0, 4)
        assert result.as_numpy("names").shape == (1, 0)
        assert result.as_numpy("size").tolist() == [[40, 40]]

    def test_errors(self, client):
        """Errors arrive as `InferenceServerException` with the reason; compression is refused."""
        from tritonclient.utils import InferenceServerException

        with pytest.raises(InferenceServerException, match="not an image in a supported format"):
            client.infer("classification", files(b"hello"))
        with pytest.raises(InferenceServerException, match="no such model is loaded"):
            client.infer("none", files(GOOD))
        with pytest.raises(InferenceServerException, match="the shape of images must be"):
            client.infer("classification.tensor", floats(np.zeros((1, 4, 8, 8), np.float32)))
        with pytest.raises(InferenceServerException, match="NaN or infinite"):
            client.infer("classification.tensor", floats(np.full((1, 3, 8, 8), np.inf, np.float32)))
        with pytest.raises(InferenceServerException, match="compressed bodies"):
            client.infer("classification", files(GOOD), request_compression_algorithm="gzip")
        result = client.infer("classification", files(GOOD), response_compression_algorithm="gzip")
        assert result.as_numpy("names").shape == (1, 5)

    def test_the_token(self, made):
        """Requests with a token in the header `Authorization`; readiness needs none."""
        import tritonclient.http as triton
        from tritonclient.utils import InferenceServerException

        with commands(["--weights", made["classification"], "--token", TOKEN]) as (closed,):
            with triton.InferenceServerClient(closed.url.removeprefix("http://")) as found:
                assert found.is_server_ready()
                with pytest.raises(InferenceServerException, match="needs a token"):
                    found.infer("classification", files(GOOD))
                headers = {"Authorization": f"Bearer {TOKEN}"}
                result = found.infer("classification", files(GOOD), headers=headers)
                assert result.as_numpy("names").shape == (1, 5)
            code, noted = closed.stop(signal.SIGTERM)
        assert code == os.EX_OK
        assert "Traceback" not in noted


@pytest.mark.slow
class TestTritonRepository:
    client = "tritonclient"

    @pytest.mark.parametrize("task", TASKS)
    def test_configuration(self, made, task, tmp_path):
        """`pale export --format triton`: config.pbtxt parsed with Triton's own protobuf schema."""
        pytest.importorskip("tritonclient.grpc", reason="tritonclient[grpc] is not installed")
        from google.protobuf import text_format
        from tritonclient.grpc.model_config_pb2 import ModelConfig

        folder = tmp_path / "repository" / f"my_{task}"
        export(made[task], folder, "triton", sizes=[(1, 40, 60)])
        found = text_format.Parse((folder / "config.pbtxt").read_text(), ModelConfig())
        assert found.name == folder.name
        assert found.backend == "onnxruntime"
        session = onnxruntime.InferenceSession(folder / "1" / found.default_model_filename)
        inputs, outputs = session.get_inputs(), session.get_outputs()
        assert [x.name for x in found.input] == [x.name for x in inputs]
        assert [x.name for x in found.output] == [x.name for x in outputs]
        first = 1 if found.max_batch_size else 0
        for ours, theirs in zip([*found.input, *found.output], [*inputs, *outputs], strict=True):
            sizes = [-1 if isinstance(size, str) else size for size in theirs.shape]
            assert list(ours.dims) == sizes[first:]
        assert found.HasField("dynamic_batching") == (task != "detection")
        assert found.max_batch_size == {"classification": 16, "segmentation": 4}.get(task, 0)
        (warm,) = found.model_warmup
        assert warm.inputs["images"].zero_data
        note = json.loads(found.parameters["pale"].string_value)
        assert note["task"] == task
        labels = (folder / "labels.txt").read_text().splitlines()
        assert labels == [f"{task} {i}" for i in range(8 if task == "detection" else 9)]
        named = [x.label_filename for x in found.output]
        assert named == (["labels.txt"] if task == "classification" else [""] * len(named))
