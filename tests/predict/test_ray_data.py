"""Prediction with Ray Data: the columns. tests/interop/test_ray.py runs a cluster of which a node is killed."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from support.weights import TASKS, pixels, weights

from pale.errors import SettingsError
from pale.predict.ray_data import BatchPredictor


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> dict[str, Path]:
    return weights(tmp_path_factory.mktemp("weights"))


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> list[Path]:
    root = tmp_path_factory.mktemp("photos")
    for i in range(5):
        Image.fromarray(pixels(30 + i, 20)).save(root / f"{i}.png")
    (root / "5.png").write_bytes(b"no image")
    return sorted(root.iterdir())


@pytest.mark.parametrize("task", TASKS)
def test_a_batch_gives_a_row_for_each_image(made, photos, task):
    chosen = BatchPredictor(made[task], device="cpu")
    names = np.array([str(path) for path in photos], object)
    contents = np.array([path.read_bytes() for path in photos], object)
    for batch in ({"path": names}, {"path": names, "bytes": contents}):
        found = chosen(batch)
        assert list(found["path"]) == list(names)
        assert [bool(error) for error in found["error"]] == [False] * 5 + [True]
        assert found["result"][5] == ""
        for name, text in zip(names[:5], found["result"][:5], strict=True):
            assert json.loads(text)["picture"] == name


def test_embeddings_are_those_of_the_model(made, photos):
    chosen = BatchPredictor(made["classification"], device="cpu", embeddings=True, batch=2)
    found = chosen({"path": np.array([str(path) for path in photos], object)})["embedding"]
    assert found.shape == (6, chosen.predictor.loaded.model.num_features)
    assert (found[5] == 0).all()
    alone = chosen({"path": np.array([str(photos[3])], object)})["embedding"]
    assert found[3] == pytest.approx(alone[0], abs=1e-4)
    assert np.abs(found[:5]).max() > 0
    with pytest.raises(SettingsError, match="embeddings need a classifier"):
        BatchPredictor(made["segmentation"], device="cpu", embeddings=True)
