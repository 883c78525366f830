import numpy as np
import pytest

from pale.data.sources.holding import hold_out


def test_positions_are_drawn_once_and_for_all():
    rest, held = hold_out(10, str, 0.3, seed=1)
    drawn = np.random.default_rng(1).permutation(10)
    assert (rest, held) == (sorted(drawn[3:]), sorted(drawn[:3]))
    assert hold_out(10, str, 0.3, seed=2) != (rest, held)
    with pytest.raises(ValueError, match=r"a hold-out share of 0\.01 of 10 images leaves one side"):
        hold_out(10, str, 0.01, seed=1)


def test_the_share_is_that_of_each_class():
    groups, rng = [1, 0, 0, 1, 1, 0, 1, 1], np.random.default_rng(5)
    drawn = [rng.permutation(np.flatnonzero(np.array(groups) == group)) for group in (0, 1)]
    kept, held = hold_out(8, str, 0.4, 5, groups=groups)
    assert held == sorted([*drawn[0][:1], *drawn[1][:2]])
    assert kept == sorted([*drawn[0][1:], *drawn[1][2:]])
    with pytest.raises(ValueError, match=r"of 3 images of class 'cat' leaves one side empty"):
        hold_out(8, str, 0.1, 5, groups=groups, classes=("cat", "dog"))


def test_a_choice_by_name_depends_on_names_and_seed_alone_and_leaves_each_class_on_both_sides():
    names = [f"{i}.jpg" for i in range(20)]
    groups = [0] * 2 + [1] * 18
    kept, held = hold_out(20, names.__getitem__, 0.2, 0, "name", groups)
    assert sorted(kept + held) == list(range(20))
    assert [len([i for i in held if groups[i] == g]) for g in (0, 1)] == [1, 4]
    order = list(reversed(range(20)))
    elsewhere = [f"/moved/{names[i]}" for i in order]
    moved = [groups[i] for i in order]
    again = hold_out(20, elsewhere.__getitem__, 0.2, 0, "name", moved)[1]
    assert {elsewhere[i].rpartition("/")[2] for i in again} == {names[i] for i in held}
    assert hold_out(20, names.__getitem__, 0.2, 1, "name", groups)[1] != held
    with pytest.raises(ValueError, match="at least 2 images, one to train"):
        hold_out(3, "abc".__getitem__, 0.2, 0, "name", [0, 0, 1])
