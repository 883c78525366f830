"""Several models of one task in one server, addressed by name."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from serve.images import NAME, file_of, near
from serve.serving import nano_weights, running
from support.weights import pixels

from pale.predict import Predictor
from pale.serve import Limits, Models
from pale.serve.names import name_models

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def nano(tmp_path_factory) -> Path:
    return nano_weights(tmp_path_factory.mktemp("nano"))


@pytest.fixture(scope="module")
def server(made, nano):
    sources = [made["classification"], f"second={nano}", made["segmentation"], nano]
    with running(Models(sources, device="cpu"), Limits(wait_ms=0)) as found:
        yield found


CONTENT = file_of(Image.fromarray(pixels()))


@pytest.mark.slow
class TestSeveralModelsOfOneTask:
    def test_each_is_reached_by_its_name_and_the_first_by_its_task(self, server, made, nano):
        expected = {
            "?model=classification": made["classification"],
            "?model=second": nano,
            "?model=nano": nano,
            "": made["classification"],
        }
        for query, source in expected.items():
            answer = server.client.post(f"/predict/classification{query}", content=CONTENT).json()
            alone = Predictor(source, device="cpu")(CONTENT).plain()
            assert near(answer["classes"], alone["classes"]), query
            assert answer[NAME] == "image"

    def test_attention_is_that_of_the_named_model(self, server):
        def queries(query: str) -> np.ndarray:
            answer = server.client.post(f"/look?x=3&y=3{query}", content=CONTENT)
            assert answer.status_code == 200, answer.text
            return np.array(answer.json()["stages"][0]["attention"])

        default, first, second = map(queries, ("", "&model=classification", "&model=second"))
        assert np.array_equal(default, first)
        assert default.shape != second.shape or not np.allclose(default, second)

    @pytest.mark.parametrize(
        "path",
        [
            "/predict/classification?model=third",
            "/predict/segmentation?model=second",
            "/predict/classification?model=",
            "/predict/classification?model=..%2f..%2fetc",
            "/look?model=third",
            "/look?task=segmentation&model=second",
        ],
    )
    def test_a_name_that_is_not_served_for_this_task_gets_404(self, server, path):
        answer = server.client.post(path, content=CONTENT)
        assert answer.status_code == 404
        assert "by name: classification, second, nano, segmentation" in answer.json()["error"]

    def test_health_lists_all_models_and_the_default_of_each_task(self, server):
        about = server.client.get("/health").json()
        assert list(about["models"]) == ["classification", "segmentation"]
        assert about["models"]["classification"]["classes"] == 9
        named = {each["name"]: each for each in about["served"]}
        assert list(named) == ["classification", "second", "nano", "segmentation"]
        assert named["second"] == {
            "name": "second",
            "task": "classification",
            "model": "pale_nano",
            "trained": True,
            "classes": 8,
            "look": True,
        }

    def test_metrics_and_queues_are_those_of_the_named_model(self, server):
        server.client.post("/predict/classification?model=second", content=CONTENT)
        text = server.client.get("/metrics").text
        label = '{kind="predict",model="second",status="200",task="classification"}'
        line = next(x for x in text.splitlines() if x.startswith(f"pale_requests_total{label}"))
        assert float(line.split()[-1]) >= 1
        assert 'pale_queue_pictures{kind="predict",model="second",task="classification"}' in text

    def test_memory_of_all_models_is_counted(self, made, nano):
        one = Models([made["classification"]], device="cpu").workspace()
        both = Models([made["classification"], nano], device="cpu").workspace()
        assert both > one


class TestNames:
    def test_names_come_from_folders_files_models_or_the_option(self, tmp_path):
        run = tmp_path / "my run (3)"
        run.mkdir()
        odd = tmp_path / "a=b"
        odd.mkdir()
        sources = [str(run), "weights/x.safetensors", "pale_tiny", "named=some/where", str(odd)]
        module = torch.nn.ReLU()
        assert name_models([*sources, module]) == {
            "my-run-3-": str(run),
            "x": "weights/x.safetensors",
            "pale_tiny": "pale_tiny",
            "named": "some/where",
            "a-b": str(odd),
            "ReLU": module,
        }

    def test_a_run_in_the_working_folder_has_the_name_of_the_folder(self, tmp_path, monkeypatch):
        (tmp_path / "pets").mkdir()
        monkeypatch.chdir(tmp_path / "pets")
        assert list(name_models(["."])) == ["pets"]
