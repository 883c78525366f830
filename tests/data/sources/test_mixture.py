"""The joint classes of several sources, and how many samples of each an epoch takes."""

from pathlib import Path

import numpy as np
import pytest
from support.mixtures import write_mixture

from pale.data.sources.identity import identify
from pale.data.sources.images import ImageFiles, read_folder
from pale.data.sources.mixture import Member, Mixture, epoch_quotas, hold_out_tags
from pale.data.sources.shards import ShardFiles
from pale.data.sources.tags import TagShards


def files(classes: str, each: int = 2) -> ImageFiles:
    names = classes.split()
    labels = [i for i in range(len(names)) for _ in range(each)]
    return ImageFiles(Path(), [str(i) for i in range(len(labels))], labels, names)


@pytest.fixture
def members(tmp_path) -> list[Member]:
    root = write_mixture(tmp_path)
    return [
        Member("tags", TagShards(root / "tags", "train"), 2.0),
        Member("folder", read_folder(root / "folder/train")),
        Member("shards", ShardFiles(root / "shards", "train"), 0.5),
    ]


def test_equal_classes_merge_and_tags_stay_apart(members):
    found = Mixture(members)
    # Classes of an image first, then tags.
    assert found.classes == ["dog", "fox", "bee", "owl", "bee (tag)", "car", "dog (tag)"]
    assert found.tags == 3
    assert [numbers.tolist() for numbers in found.numbers] == [[4, 5, 6], [0, 1], [2, 1, 3]]


def test_each_image_keeps_its_source_and_classes(members):
    found, table = Mixture(members), Mixture(members).class_table()
    assert len(found) == 32
    assert table.shape == (32, 3)
    for index in range(len(found)):
        number = found.member_of(index)
        assert found.member_table()[index] == number
        member, own = members[number], index - found.starts[number]
        names = [member.source.classes[label] for label in member.label_rows()[own]]
        listed = [found.classes[c].removesuffix(" (tag)") for c in table[index] if c < 7]
        assert listed == names
        assert found.image(index) == member.source.image(own)
        assert found.name(index) == member.source.name(own)


def test_numbered_classes_never_merge():
    found = Mixture([Member("a", files("0 1")), Member("b", files("0 1 2"))])
    assert found.classes == ["a 0", "a 1", "b 0", "b 1", "b 2"]


def test_evaluation_uses_the_classes_of_the_weights(members):
    classes = Mixture(members).classes
    found = Mixture(members[:1], classes)
    assert found.numbers[0].tolist() == [4, 5, 6]
    with pytest.raises(ValueError, match="tags has the class 'car', which the weights"):
        Mixture(members[:1], classes[:4])
    with pytest.raises(ValueError, match="must not end with"):
        Mixture([Member("a", ImageFiles(Path(), ["0"], [0], ["dog (tag)"]))])


@pytest.mark.parametrize(
    ("weights", "epoch", "quotas"),
    [
        ((1, 1), None, (10, 40)),
        ((4, 1), None, (40, 40)),
        ((1, 0.5), None, (10, 20)),
        ((4, 1), 9, (5, 4)),
        ((1, 1), 1000, (200, 800)),
    ],
    ids=str,
)
def test_an_epoch_takes_images_in_proportion_to_their_weights(weights, epoch, quotas):
    members = [Member("a", files("x y", 5), weights[0]), Member("b", files("x y", 20), weights[1])]
    assert tuple(part.quota for part in epoch_quotas(members, epoch)) == quotas


def test_a_source_that_would_never_be_drawn_is_an_error():
    members = [Member("a", files("x"), 1e-6), Member("b", files("x", 100))]
    with pytest.raises(ValueError, match="has none of a, weight 1e-06; give a larger weight"):
        epoch_quotas(members, None)


def test_the_identity_covers_every_source_its_name_and_its_share(members):
    def digest(changed):
        found = Mixture(changed)
        return identify(found, found.classes).digest

    first = digest(members)
    assert digest(list(members)) == first
    a, b, c = members
    others = [
        [a, b],
        [b, a, c],
        [Member("other", a.source, a.weight), b, c],
        [Member("tags", a.source, 1.0), b, c],
        [a, b, Member("shards", members[1].source, 0.5)],
    ]
    assert len({first, *map(digest, others)}) == 6


def test_held_out_tagged_images_are_the_rest(members):
    source = members[0].source
    kept, held = hold_out_tags(source, 0.25, seed=3)
    assert sorted([*kept.indices, *held.indices]) == list(range(12))
    assert len(held) == 3
    assert [source.tags[i] for i in held.indices] == held.tags
    assert np.array_equal(kept.image(0), source.image(kept.indices[0]))
    with pytest.raises(ValueError, match="leaves one side empty"):
        hold_out_tags(source, 0.001, seed=3)
