"""The folder of a Triton model repository: its files, and the answers of its ONNX file.

`tests/interop/test_triton_client.py` parses the configuration with Triton's schema.
"""

import numpy as np
import pytest
import torch
from PIL import Image
from support.weights import TASKS, pixels, weights

from pale import export
from pale.cli.main import main
from pale.errors import SettingsError
from pale.exporting import read_about
from pale.exporting.triton_repository import configuration, new_model_folder, quote
from pale.predict import Predictor

IMAGE = Image.fromarray(pixels(60, 40))  # a size that the tests' models do not change


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return weights(tmp_path_factory.mktemp("weights"))


def outputs(folder, predictor) -> dict[str, np.ndarray]:
    onnxruntime = pytest.importorskip("onnxruntime")
    session = onnxruntime.InferenceSession(folder / "1" / "model.onnx")
    bundle = predictor.loaded
    images = bundle.normalise(bundle.preprocess(IMAGE)[None]).numpy()
    names = [each.name for each in session.get_outputs()]
    return dict(zip(names, session.run(names, {"images": images}), strict=True))


@pytest.fixture(scope="module", params=TASKS)
def task(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(made, task, tmp_path_factory):
    """The exported model of a task, made once for all tests of it."""
    folder = tmp_path_factory.mktemp("repository") / task
    words = ["export", made[task], "--format", "triton", "-o", folder, "--sizes", "1x40x60"]
    assert main([*map(str, words), "--opset", "20"]) == 0
    return folder


@pytest.mark.slow
@pytest.mark.timeout(1800)
class TestRepository:
    def test_the_folder_has_the_layout_of_triton_and_nothing_else(self, folder, task):
        files = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*"))
        assert files == ["1", "1/model.onnx", "config.pbtxt", "labels.txt"]
        assert read_about(folder / "1" / "model.onnx")["task"] == task
        assert folder.stat().st_mode & 0o755 == 0o755
        assert [p.name for p in folder.parent.iterdir()] == [task]

    def test_the_file_answers_like_the_predictor(self, folder, task, made):
        labels = (folder / "labels.txt").read_text().splitlines()
        {"classification": classified, "segmentation": segmented, "detection": detected}[task](
            folder, made[task], labels
        )


def classified(folder, source, labels) -> None:
    predictor = Predictor(source, device="cpu", top=9)
    logits = torch.from_numpy(outputs(folder, predictor)["logits"])
    found = dict(zip(labels, logits.softmax(1)[0].tolist(), strict=True))
    assert found == pytest.approx(dict(predictor(IMAGE).scores), abs=1e-4)


def segmented(folder, source, labels) -> None:
    predictor = Predictor(source, device="cpu")
    mask = outputs(folder, predictor)["logits"].argmax(1)[0]
    assert (mask == predictor(IMAGE).labels).mean() > 0.999


def detected(folder, source, labels) -> None:
    predictor = Predictor(source, device="cpu", score=0.05)
    objects = predictor(IMAGE).plain()["objects"]
    found = outputs(folder, predictor)
    count = int((found["scores"] > 0.05).sum())
    assert objects
    assert count == len(objects)
    names = [labels[label - 1] for label in found["labels"][:count]]
    theirs = sorted(zip(found["scores"][:count].round(2).tolist(), names, strict=True))
    ours = sorted((round(each["score"], 2), each["class"]) for each in objects)
    pairs = list(zip(ours, theirs, strict=True))
    same = sum(a[1] == b[1] and abs(a[0] - b[0]) < 0.02 for a, b in pairs)
    assert same >= 0.95 * len(
        ours
    )  # the bound of exports: of two equal scores either may come first


class TestErrors:
    def test_an_existing_folder_is_kept(self, made, tmp_path):
        (tmp_path / "mine").mkdir()
        with pytest.raises(SettingsError, match="exists; choose another name, or remove it first"):
            export(made["classification"], tmp_path / "mine", "triton")
        assert list((tmp_path / "mine").iterdir()) == []

    @pytest.mark.parametrize("name", ["my model", "-x", 'a"b', "x" * 101])
    def test_an_invalid_name_is_an_error(self, tmp_path, name):
        with (
            pytest.raises(SettingsError, match="REPOSITORY/NAME"),
            new_model_folder(tmp_path / name),
        ):
            pass

    def test_a_failed_export_leaves_nothing(self, made, tmp_path):
        with pytest.raises(SettingsError, match="opset must be at least 20"):
            export(made["classification"], tmp_path / "mine", "triton", opset=3)
        assert list(tmp_path.iterdir()) == []


def test_text_is_escaped_in_the_configuration():
    assert quote("a\"b\\c\nd'ä") == '"a\\042b\\134c\\012d\\047\\303\\244"'
    hostile = {"classes": ["x"], "model": 'x" } } max_batch_size: 99\n'}
    inputs = [("images", "TYPE_FP32", (-1, 3, -1, -1))]
    text = configuration("m", inputs, [("logits", "TYPE_FP32", (-1, 1))], 4, 64, 1, hostile)
    assert text.count("max_batch_size: 4\n") == 1
    last = text.splitlines()[-1]
    assert last.startswith('parameters { key: "pale"')
    assert '"x' not in last.removeprefix('parameters { key: "pale"')
    assert "dims: [ 3, 64, 64 ] zero_data: true" in text
