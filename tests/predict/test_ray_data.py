"""Prediction with Ray Data: the columns, and a cluster of two nodes of which one is killed."""

import json
import threading
import time
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


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of ray and what it imports
def test_a_killed_node_loses_no_image_and_repeats_none(made, photos, tmp_path):
    ray = pytest.importorskip("ray", reason="not installed: ray")
    pyarrow_dataset = pytest.importorskip("pyarrow.dataset", reason="not installed: pyarrow")
    from ray.cluster_utils import Cluster

    from pale.predict.ray_data import predict_to_parquet

    images = tmp_path / "images"
    images.mkdir()
    for i in range(240):
        (images / f"{i:03d}.png").symlink_to(photos[i % 6])
    paths = sorted(str(path) for path in images.iterdir())
    store = 100 * 2**20
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 2, "object_store_memory": store}
    )
    try:
        second = cluster.add_node(num_cpus=2, object_store_memory=store)
        ray.init(address=cluster.address, logging_level="ERROR")
        done = threading.Event()
        alive_at_kill: list[bool] = []

        def kill_when_half_is_written() -> None:
            out = tmp_path / "out"
            while not done.is_set():
                if out.exists() and len(list(out.glob("*.parquet"))) >= 4:
                    alive_at_kill.append(not done.is_set())
                    cluster.remove_node(second, allow_graceful=False)
                    return
                time.sleep(0.05)

        killer = threading.Thread(target=kill_when_half_is_written)
        killer.start()
        predict_to_parquet(
            paths,
            str(made["classification"]),
            tmp_path / "out",
            workers=2,
            batch_size=8,
            device="cpu",
        )
        written_after = len([node for node in ray.nodes() if node["Alive"]])
        done.set()
        killer.join()
    finally:
        ray.shutdown()
        cluster.shutdown()
    assert alive_at_kill == [True]
    assert written_after == 1
    table = pyarrow_dataset.dataset(tmp_path / "out").to_table().to_pylist()
    assert sorted(row["path"] for row in table) == paths
    failed = {row["path"] for row in table if row["error"]}
    assert failed == {path for i, path in enumerate(paths) if i % 6 == 5}
    assert all("cannot be read as an image" in row["error"] for row in table if row["error"])
