import numpy as np
from PIL import Image

from pale.tasks.gallery import best_and_worst, side_by_side


def test_the_best_and_worst_images_are_kept():
    scores = [{"index": i, "f1": float(i)} for i in range(40)]
    kept = [s["index"] for s in best_and_worst(scores, "f1")]
    assert kept == [39, 38, 37, 36, 35, 34, 5, 4, 3, 2, 1, 0]


def test_few_images_are_all_kept():
    entries = [{"index": i, "miou": float(i)} for i in range(3)]
    assert [entry["index"] for entry in best_and_worst(entries, "miou")] == [2, 1, 0]


def test_images_are_joined_with_a_white_gap():
    joined = np.asarray(side_by_side([Image.new("RGB", (2, 3), c) for c in ("red", "blue")]))
    assert joined.shape == (3, 8, 3)
    assert (joined[:, 2:6] == 255).all()
    assert (joined[:, :2] == (255, 0, 0)).all()
    assert (joined[:, 6:] == (0, 0, 255)).all()
