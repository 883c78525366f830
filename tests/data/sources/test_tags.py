"""Images with tags, from shards and folders; whatever comes from a file is hostile."""

import json
import tarfile

import pytest
from PIL import Image
from support.mixtures import COLOURS, add_file, encode, write_tag_shard

from pale.data.sources.identity import identify
from pale.data.sources.tags import MAX_TAGS, TagFiles, TagShards, parse_labels


def shard(tmp_path, content: bytes):
    with tarfile.open(tmp_path / "train-000000.tar", "w") as tar:
        add_file(tar, "a.png", encode(Image.new("RGB", (4, 4))))
        add_file(tar, "a.json", content)
    return tmp_path


def test_shards_give_images_and_their_sorted_tags(tmp_path):
    write_tag_shard(tmp_path / "train-000000.tar", [["dog", "bee"], [], ["dog", "dog"]])
    found = TagShards(tmp_path, "train")
    assert found.classes == ["bee", "dog"]
    assert found.tags == [(0, 1), (), (1,)]
    assert found.image(1).size == (40, 36)
    assert found.name(2).endswith("train-000000.tar:0002")


def test_a_class_list_fixes_the_order_and_refuses_other_labels(tmp_path):
    write_tag_shard(tmp_path / "train-000000.tar", [["dog"], ["bee"]])
    (tmp_path / "classes.txt").write_text("owl\ndog\nbee\n")
    assert TagShards(tmp_path, "train").tags == [(1,), (2,)]
    (tmp_path / "classes.txt").write_text("owl\ndog\n")
    with pytest.raises(ValueError, match=r"neither classes\.txt nor the training set has: 'bee'"):
        TagShards(tmp_path, "train")
    with pytest.raises(ValueError, match="has: 'dog'"):
        TagShards(tmp_path, "train", classes=["bee"])


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"{", "labels are not JSON"),
        (b"[" * 100_000, "labels are not JSON"),
        (b"[]", r'labels must be \{"labels"'),
        (b'{"label": "dog"}', r'labels must be \{"labels"'),
        (b'{"labels": "dog"}', "must be a list of names, got str"),
        (b'{"labels": {"dog": 1}}', "must be a list of names, got dict"),
        (b'{"labels": [3]}', "must be a name of 1 to 200 characters, got 3"),
        (b'{"labels": [["dog"]]}', "must be a name"),
        (b'{"labels": [""]}', "must be a name"),
        (json.dumps({"labels": ["x" * 201]}).encode(), "must be a name"),
        (json.dumps({"labels": ["d"] * (MAX_TAGS + 1)}).encode(), "at most 1000 labels, got 1001"),
        (b" " * (1 << 18) + b"{}", "does not contain its labels"),
    ],
    ids=range(12),
)
def test_hostile_labels_are_named_with_their_shard(tmp_path, content, reason):
    with pytest.raises(ValueError, match=f"train-000000.tar cannot be read as a shard .*{reason}"):
        TagShards(shard(tmp_path, content), "train")


def test_names_that_are_not_unicode_are_made_printable():
    assert parse_labels(b'{"labels": ["\\ud800x"]}') == ["\\ud800x"]


def test_an_image_without_labels_and_a_missing_split_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"there are no shards .*KEY\.json"):
        TagShards(tmp_path, "train")
    write_tag_shard(tmp_path / "train-000000.tar", [[], []])
    with pytest.raises(ValueError, match="must have 1 to 65536 different labels, got 0"):
        TagShards(tmp_path, "train")


def test_folders_have_their_tags_in_json_or_csv(tmp_path):
    root = tmp_path / "train"
    root.mkdir()
    (root / "labels.json").write_text('{"a.png": ["dog", "bee"], "b.png": []}')
    first = TagFiles(root)
    assert (first.paths, first.classes, first.tags) == (
        ["a.png", "b.png"],
        ["bee", "dog"],
        [(0, 1), ()],
    )
    (root / "labels.json").unlink()
    (root / "labels.csv").write_text("image,label\na.png,dog\nb.png,\na.png,bee\n")
    second = TagFiles(root)
    assert (second.paths, second.tags) == (first.paths, first.tags)
    (root / "labels.csv").write_text("picture\na.png\n")  # kept name
    with pytest.raises(ValueError, match="expected are the columns image and label"):
        TagFiles(root)
    (root / "labels.csv").unlink()
    with pytest.raises(ValueError, match="there is neither"):
        TagFiles(root)
    (root / "labels.json").write_text('{"a.png": [1]}')
    with pytest.raises(ValueError, match=r"labels.json: 'a.png': a label must be a name"):
        TagFiles(root)


def test_the_identity_covers_the_tags(tmp_path):
    digests = set()
    for labels in ([["dog"], ["bee"]], [["bee"], ["dog"]], [["bee", "dog"], []]):
        write_tag_shard(tmp_path / "train-000000.tar", labels)
        source = TagShards(tmp_path, "train", list(COLOURS))
        digests.add(identify(source, source.classes).digest)
    assert len(digests) == 3
