import time

import numpy as np
import pytest

from pale.data.sources import scenes
from pale.data.sources.scenes import CLASSES, Scenes, draw_scene


def test_a_scene_depends_on_seed_and_index_alone():
    one, again = draw_scene(3, 7, 48, (1, 4)), draw_scene(3, 7, 48, (1, 4))
    assert np.array_equal(one.image, again.image)
    assert np.array_equal(one.instances, again.instances)
    assert not np.array_equal(one.image, draw_scene(3, 8, 48, (1, 4)).image)
    assert not np.array_equal(one.image, draw_scene(4, 7, 48, (1, 4)).image)


@pytest.mark.parametrize("objects", [(1, 1), (2, 6)], ids=["single", "crowded"])
def test_class_mask_instances_and_boxes_agree(objects):
    hidden = 0
    for index in range(60):
        scene = draw_scene(0, index, 40, objects)
        areas = []
        for k, (label, box) in enumerate(zip(scene.labels, scene.boxes, strict=True), start=1):
            inside = scene.instances == k
            assert set(scene.mask[inside]) == {label + 1}
            rows, columns = np.nonzero(inside)
            assert box.tolist() == [
                columns.min(),
                rows.min(),
                columns.max() + 1,
                rows.max() + 1,
            ]
            areas.append(inside.sum())
        shown = scene.instances > 0
        assert scene.label == scene.labels[int(np.argmax(areas))]
        assert set(np.unique(scene.instances)) <= set(range(len(scene.labels) + 1))
        assert (scene.mask[~shown] == 0).all()
        hidden += len(scene.labels) < objects[0]
    assert hidden < 60


def test_every_class_is_about_as_frequent_and_covers_a_fair_share():
    labels = [draw_scene(0, i, 32).label for i in range(800)]
    assert np.bincount(labels, minlength=len(CLASSES)).min() > 60
    for shape in CLASSES:
        axis = np.linspace(-1, 1, 101, dtype=np.float32)
        share = scenes.SHAPES[shape](*np.meshgrid(axis, axis)).mean()
        assert 0.1 < share < 0.8, shape


def test_the_mean_colour_does_not_give_the_class_away():
    x = np.array([draw_scene(0, i, 32).image.mean((0, 1)) for i in range(400)])
    label = np.array([draw_scene(0, i, 32).label for i in range(400)])
    centre = np.array([x[:200][label[:200] == c].mean(0) for c in range(len(CLASSES))])
    guess = np.argmin(np.linalg.norm(x[200:, None] - centre, axis=-1), axis=1)
    assert (guess == label[200:]).mean() < 0.3


def test_drawing_is_fast_enough_to_train_on_a_cpu():
    draw_scene(0, 0)
    start = time.process_time()
    for index in range(100):
        draw_scene(0, index)
    assert (time.process_time() - start) / 100 < 0.005


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"length": 0}, "at least 1, got 0"),
        ({"length": 1, "size": 8}, "at least 16 pixels, got 8"),
        ({"length": 1, "objects": (3, 2)}, r"minimum first, got \(3, 2\)"),
    ],
    ids=["length", "size", "objects"],
)
def test_impossible_sets_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Scenes(**arguments)


def test_set_ends_where_it_should():
    data = Scenes(3, 16)
    assert len(list(data)) == len(data) == 3
