"""Prediction on a real Ray cluster of two nodes on this machine (`make test-interop`)."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
from PIL import Image
from support.weights import TASKS, pixels, weights

IMAGES = 240
STORE = 100 * 2**20  # bytes of each node's object store
BAD = 5  # every sixth file is no image

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # of ray and what it imports


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> dict[str, Path]:
    return weights(tmp_path_factory.mktemp("weights"))


@pytest.fixture(scope="module")
def paths(tmp_path_factory) -> list[str]:
    root = tmp_path_factory.mktemp("photos")
    for i in range(BAD):
        Image.fromarray(pixels(30 + i, 20)).save(root / f"{i}.png")
    (root / f"{BAD}.png").write_bytes(b"no image")
    folder = tmp_path_factory.mktemp("images")
    for i in range(IMAGES):
        (folder / f"{i:03d}.png").symlink_to(root / f"{i % 6}.png")
    return sorted(str(path) for path in folder.iterdir())


def read_rows(folder: Path) -> list[dict]:
    import pyarrow.dataset

    return pyarrow.dataset.dataset(folder).to_table().to_pylist()


class TestRay:
    client = "ray"

    @pytest.fixture
    def cluster(self):
        """Start two nodes of two CPUs each; return the cluster and the second node."""
        ray = pytest.importorskip("ray", reason="ray is not installed")
        pytest.importorskip("pyarrow.dataset", reason="pyarrow is not installed")
        from ray.cluster_utils import Cluster

        options = {"num_cpus": 2, "object_store_memory": STORE}
        found = Cluster(initialize_head=True, head_node_args=options)
        try:
            second = found.add_node(**options)
            ray.init(address=found.address, logging_level="ERROR")
            yield found, second
        finally:
            ray.shutdown()
            found.shutdown()

    def test_a_killed_node_loses_no_image_and_repeats_none(
        self, cluster, made, paths, tmp_path, measured
    ) -> None:
        """`map_batches` on two nodes of which one is killed in the middle: each image once, bad files listed"""
        import ray

        from pale.predict.ray_data import predict_to_parquet

        nodes, second = cluster
        out = tmp_path / "out"
        done = threading.Event()
        alive_at_kill: list[bool] = []

        def kill_in_the_middle() -> None:
            while not done.is_set():
                if out.exists() and len(list(out.glob("*.parquet"))) >= 4:
                    alive_at_kill.append(not done.is_set())
                    nodes.remove_node(second, allow_graceful=False)
                    return
                time.sleep(0.05)

        killer = threading.Thread(target=kill_in_the_middle)
        killer.start()
        weights = str(made["classification"])
        predict_to_parquet(paths, weights, out, workers=2, batch_size=8, device="cpu")
        left = len([node for node in ray.nodes() if node["Alive"]])
        done.set()
        killer.join()
        assert alive_at_kill == [True]
        assert left == 1
        table = read_rows(out)
        found, wanted = Counter(row["path"] for row in table), Counter(paths)
        wrong = (found - wanted).total() + (wanted - found).total()
        measured(wrong, 0, f"images of {IMAGES} lost or repeated")
        failed = {row["path"] for row in table if row["error"]}
        assert failed == {path for i, path in enumerate(paths) if i % 6 == BAD}
        assert all("cannot be read as an image" in row["error"] for row in table if row["error"])

    def test_every_task_writes_parquet(self, cluster, made, paths, tmp_path) -> None:
        """`map_batches` for classification with embeddings, segmentation and detection: Parquet files"""
        from pale.predict.ray_data import predict_to_parquet

        for task in TASKS:
            out = tmp_path / task
            embeddings = task == "classification"
            predict_to_parquet(
                paths[:12], str(made[task]), out, batch_size=4, device="cpu", embeddings=embeddings
            )
            rows = read_rows(out)
            assert sorted(row["path"] for row in rows) == paths[:12]
            assert sum(bool(row["error"]) for row in rows) == 2
            good = [row for row in rows if not row["error"]]
            assert all(json.loads(row["result"])["picture"] == row["path"] for row in good)
            assert all(("embedding" in row) == embeddings for row in rows)
            assert all(any(row["embedding"]) for row in good if embeddings)
