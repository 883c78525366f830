import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from pale.data.sources.images import hold_out, read_folder
from pale.data.sources.scenes import SceneImages, Scenes
from pale.data.sources.shards import ShardFiles
from pale.data.sources.shards import write_shards as pack_shards
from pale.data.sources.token_labels import (
    TokenLabelManifest,
    TokenLabelStore,
    TokenLabelWriter,
    hash_names,
    pack_labels,
    read_manifest,
    sample_names,
    unpack_labels,
)


@pytest.fixture
def source(tmp_path):
    for name in ("a", "b"):
        (tmp_path / "train" / name).mkdir(parents=True)
        for i in range(5):
            Image.new("RGB", (9, 7), (i, 0, 0)).save(tmp_path / "train" / name / f"{i}.png")
    return read_folder(tmp_path / "train")


def manifest(source, **changes):
    known = TokenLabelManifest(
        "t",
        "0",
        32,
        (2, 3),
        2,
        tuple(source.classes),
        len(source),
        hash_names(sample_names(source)),
        4,
    )
    return replace(known, **changes)


def fill(path, source):
    writer = TokenLabelWriter(path, manifest(source), sample_names(source))
    maps = torch.rand(len(source), len(source.classes), 2, 3).softmax(1)
    for shard in writer.missing():
        writer.write(shard, pack_labels(maps[list(writer.manifest.rows(shard))], 2))
    return maps, writer.finish(source.labels)


def test_written_labels_are_read_by_image(tmp_path, source):
    maps, done = fill(tmp_path / "store", source)
    store = TokenLabelStore(tmp_path / "store", source)
    assert len(store) == 10
    for index in range(10):
        scores, classes = store.labels(index)
        dense = torch.zeros(2, 2, 3).scatter_(0, classes.long(), scores.float())
        assert torch.allclose(dense, maps[index], atol=1e-3)
    own = maps.sum((2, 3)).argmax(1) == torch.tensor(source.labels)
    assert done.agreement == pytest.approx(100 * own.float().mean().item(), abs=0.01)
    assert read_manifest(tmp_path / "store") == done


def test_records_keep_the_largest_probabilities_in_half_precision():
    maps = torch.rand(3, 40000, 1, 2).softmax(1)
    scores, classes = unpack_labels(pack_labels(maps, 4))
    top = maps.topk(4, dim=1)
    assert torch.equal(scores, top.values.half())
    assert torch.equal(classes.long(), top.indices)  # also above 32767
    assert scores.shape == (3, 4, 1, 2)


def test_a_subset_of_the_images_finds_its_labels(tmp_path, source):
    fill(tmp_path / "store", source)
    kept, held = hold_out(source, 0.4, seed=3)
    whole = TokenLabelStore(tmp_path / "store", source)
    for part in (kept, held):
        store = TokenLabelStore(tmp_path / "store", part)
        assert len(store) == len(part)
        for index, where in enumerate(part.indices):
            assert torch.equal(store.labels(index)[0], whole.labels(where)[0])


def test_names_do_not_change_if_the_dataset_is_moved(tmp_path, source):
    assert sample_names(source)[:2] == ["a/0.png", "a/1.png"]
    (tmp_path / "train").rename(tmp_path / "moved")
    assert sample_names(read_folder(tmp_path / "moved")) == sample_names(source)
    pack_shards(read_folder(tmp_path / "moved"), tmp_path / "tars", "train", 10**6)
    names = sample_names(ShardFiles(tmp_path / "tars", "train"))
    assert len(set(names)) == 10
    assert names[0].startswith("train-000000.tar:0")
    scenes = [
        sample_names(SceneImages(Scenes(2, size, seed)))
        for size, seed in ((16, 0), (17, 0), (16, 1))
    ]
    assert len({name for names in scenes for name in names}) == 6


def test_a_store_that_does_not_fit_is_refused(tmp_path, source):
    store = tmp_path / "store"
    with pytest.raises(ValueError, match=r"no token labels in .*pale token-labels make --model"):
        TokenLabelStore(store, source)
    writer = TokenLabelWriter(store, manifest(source), sample_names(source))
    with pytest.raises(ValueError, match=r"not complete; run the same .* again"):
        TokenLabelStore(store, source)
    assert writer.missing() == [0, 1, 2]
    fill(store, source)
    Image.new("RGB", (9, 7)).save(tmp_path / "train" / "a" / "new.png")
    with pytest.raises(ValueError, match=r"no labels for 1 of the 11 images \('a/new\.png'\)"):
        TokenLabelStore(store, read_folder(tmp_path / "train"))
    (tmp_path / "train" / "b").rename(tmp_path / "train" / "c")
    with pytest.raises(ValueError, match=r"2 classes \('a', 'b'\), the data has 2 \('a', 'c'\)"):
        TokenLabelStore(store, read_folder(tmp_path / "train"))


def test_damaged_files_are_named(tmp_path, source):
    store = tmp_path / "store"
    fill(store, source)
    shard = store / "labels-000001.npy"
    content = shard.read_bytes()
    shard.write_bytes(content[:-8])
    with pytest.raises(ValueError, match=r"labels-000001\.npy cannot be read .* delete it and run"):
        TokenLabelStore(store, source)
    np.save(shard, np.zeros((4, 2, 2, 2, 2), np.uint16))
    with pytest.raises(ValueError, match=r"expected uint16 \(4, 2, 2, 2, 3\)"):
        TokenLabelStore(store, source)
    shard.unlink()
    with pytest.raises(ValueError, match="it is missing"):
        TokenLabelStore(store, source)
    shard.write_bytes(content)
    TokenLabelStore(store, source)
    (store / "names.txt").write_text("x\n")
    with pytest.raises(ValueError, match=r"names\.txt was changed"):
        TokenLabelStore(store, source)
    values = json.loads((store / "manifest.json").read_text())
    (store / "manifest.json").write_text(json.dumps(values | {"format": 2}))
    with pytest.raises(ValueError, match="format 2, expected 1"):
        TokenLabelStore(store, source)


def test_a_store_is_not_continued_with_another_teacher_or_over_other_files(tmp_path, source):
    store = tmp_path / "store"
    TokenLabelWriter(store, manifest(source), sample_names(source))
    with pytest.raises(
        ValueError, match=r"started with another teacher \(t, now u\), k \(2, now 1\)"
    ):
        TokenLabelWriter(store, manifest(source, teacher="u", k=1), sample_names(source))
    with pytest.raises(ValueError, match="contains other files"):
        TokenLabelWriter(tmp_path / "train", manifest(source), sample_names(source))
    # Interrupted before the manifest was written.
    (store / "manifest.json").unlink()
    TokenLabelWriter(store, manifest(source), sample_names(source))
    assert read_manifest(store) == manifest(source)


@pytest.mark.parametrize(
    "change",
    [
        {"k": "2"},
        {"grid": [2]},
        {"grid": [2, -1]},
        {"pictures": 1 << 40},  # kept name
        {"classes": [1, 2]},
    ],
    ids=["string", "one side", "negative", "many", "numbers"],
)
def test_manifests_out_of_bounds_are_rejected(tmp_path, source, change):
    store = tmp_path / "store"
    fill(store, source)
    path = store / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=r"manifest\.json cannot be read .* make the labels again"):
        read_manifest(store)
