import gc
import pickle
import tarfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from support.processes import full_disk
from support.recipes import classification_recipe
from torch.utils.data import DataLoader

from pale.cli.main import main
from pale.data.loader import ImageDataset, collate, iterate_batches
from pale.data.reading import UnreadableImageError
from pale.data.sources.images import read_folder
from pale.data.sources.shards import ShardFiles, build_index, write_shards
from pale.data.stream import Stream, StreamSampler
from pale.data.transforms.images import eval_transform
from pale.train.distributed import World
from pale.train.loop import train


@pytest.fixture
def tree(tmp_path) -> Path:
    seed = 0
    for split, n in (("train", 7), ("val", 2)):
        for label in ("cat", "dog", "fox"):
            where = tmp_path / "tree" / split / label
            where.mkdir(parents=True)
            for i in range(n):
                seed += 1
                pixels = np.random.default_rng(seed).integers(0, 256, (24, 20, 3), np.uint8)
                Image.fromarray(pixels).save(where / f"{i}.png")
    return tmp_path / "tree"


@pytest.fixture
def packed(tree, tmp_path) -> Path:
    words = ["data", "pack", str(tree), str(tmp_path / "shards"), "--shard-mb", "0.01"]
    assert main(words) == 0
    return tmp_path / "shards"


def contents(source) -> Counter:
    return Counter(
        (source.classes[source.labels[i]], source.image(i).tobytes()) for i in range(len(source))
    )


def test_shards_hold_exactly_what_the_folders_hold(tree, packed, capsys):
    assert len(list(packed.glob("train-*.tar"))) > 2
    for split in ("train", "val"):
        assert contents(ShardFiles(packed, split)) == contents(read_folder(tree / split))


def test_the_same_folder_gives_the_same_bytes(tree, packed, tmp_path):
    again = write_shards(
        read_folder(tree / "train"), tmp_path / "again", "train", int(0.01 * 2**20)
    )
    for path in again:
        assert path.read_bytes() == (packed / path.name).read_bytes()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_webdataset_reads_our_shards(packed):
    webdataset = pytest.importorskip("webdataset")
    urls = [str(path) for path in sorted(packed.glob("train-*.tar"))]
    data = webdataset.WebDataset(urls, shardshuffle=False).decode("rgb8").to_tuple("png", "cls")
    ours = ShardFiles(packed, "train")
    rows = list(data)
    assert len(rows) == len(ours) == 21
    for i, (pixels, label) in enumerate(rows):
        assert np.array_equal(pixels, ours.image(i))
        assert label == ours.labels[i]
    del data
    gc.collect()  # webdataset leaves its files to the collector, with a warning


def test_shards_without_an_index_are_read(packed):
    indexed = contents(ShardFiles(packed, "train"))
    (packed / "train.npz").unlink()
    found = ShardFiles(packed, "train")
    assert found.classes == ["0", "1", "2"]
    assert sorted(indexed.values()) == sorted(contents(found).values())


@pytest.mark.parametrize("world", [1, 2, 3])
def test_each_image_occurs_once_per_epoch_even_if_counts_do_not_divide(packed, world):
    data = ImageDataset(ShardFiles(packed, "train"), eval_transform(16, 1.0), seed=0)
    stream = Stream(len(data), 6, epochs=2, seed=0)
    seen: Counter = Counter()
    for rank in range(world):
        sampler = StreamSampler(stream, 0, rank, world)
        loader = DataLoader(data, batch_sampler=sampler, num_workers=2, collate_fn=collate)
        for batch in iterate_batches(loader):
            seen.update((epoch, index) for epoch, index in batch["keys"].tolist())
    assert len(data) % 6
    for epoch in (0, 1):
        assert [seen[epoch, i] for i in range(len(data))] == [1] * len(data)


def test_shards_can_be_pickled(packed):
    data = ShardFiles(packed, "train")
    first = data.image(0)
    assert pickle.loads(pickle.dumps(data)).image(0) == first


def test_training_reads_shards(packed, tmp_path):
    recipe = classification_recipe(
        data__kind="shards", data__root=str(packed), batch=6, epochs=1, mix={}
    )
    outcome = train(recipe, tmp_path / "run", World(torch.device("cpu")), quiet=True)
    assert outcome.steps == 4
    assert outcome.figures["images"] == 6


def test_bad_shards_are_named(packed, tree):
    path = sorted(packed.glob("train-*.tar"))[0]
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=r"train\.npz does not fit the shards beside it"):
        ShardFiles(packed, "train")
    path.write_bytes(content)
    path.rename(packed / "away")
    with pytest.raises(ValueError, match="some are missing"):
        ShardFiles(packed, "train")
    with pytest.raises(ValueError, match=r"no shards .*test-\*\.tar; pale data pack makes them"):
        ShardFiles(packed, "test")
    with pytest.raises(ValueError, match="are not those of the training set"):
        ShardFiles(packed, "val", classes=["a", "b", "c"])
    with pytest.raises(ValueError, match="contains shards of val already"):
        write_shards(read_folder(tree / "val"), packed, "val", 10**6)


@pytest.mark.parametrize("flag", [1, 32, 64], ids=["encrypted", "patched", "strongly encrypted"])
def test_an_index_that_states_to_be_encrypted_or_patched_is_named(packed, flag):
    file, entry = packed / "train.npz", b"PK\1\2"
    content = bytearray(file.read_bytes())
    at = content.find(entry)
    while at >= 0:
        content[at + 8 : at + 10] = flag.to_bytes(2, "little")
        at = content.find(entry, at + 4)
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"train\.npz is damaged"):
        ShardFiles(packed, "train")


def test_an_image_without_class_and_a_broken_image_are_named(tmp_path):
    path = tmp_path / "train-000000.tar"
    (tmp_path / "a.jpg").write_text("x")
    with tarfile.open(path, "w") as tar:
        tar.add(tmp_path / "a.jpg", "a.jpg")
    with pytest.raises(ValueError, match=r"a needs both an image and a \.cls file"):
        build_index([path])
    (tmp_path / "a.cls").write_text("0")
    with tarfile.open(path, "w") as tar:
        tar.add(tmp_path / "a.jpg", "a.jpg")
        tar.add(tmp_path / "a.cls", "a.cls")
    with pytest.raises(UnreadableImageError, match=r"train-000000\.tar:a: cannot be read"):
        ShardFiles(tmp_path, "train").image(0)
    path.write_text("not a tar")
    with pytest.raises(ValueError, match="cannot be read as a shard"):
        build_index([path])


def test_a_full_disk_raises_with_the_shard_and_leaves_no_files(tree, tmp_path):
    source = read_folder(tree / "train")
    where = tmp_path / "shards"
    with full_disk(20_000), pytest.raises(OSError, match=r"train-000000\.tar could not be written"):
        write_shards(source, where, "train", 2**20)
    assert list(where.iterdir()) == []
    assert len(write_shards(source, where, "train", 2**20)) == 1


def test_an_image_that_cannot_be_packed_is_named(tree, tmp_path):
    source = read_folder(tree / "train")
    (tree / "train/cat/3.png").unlink()
    with pytest.raises(UnreadableImageError, match=r"cat/3\.png: cannot be read"):
        write_shards(source, tmp_path / "shards", "train", 4096)
    assert list((tmp_path / "shards").iterdir()) == []
