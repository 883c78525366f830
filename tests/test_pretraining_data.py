"""Preparation of pre-training data: read from git, checked, split, without duplicates, packed, resumable."""

from __future__ import annotations

import argparse
import io
import json
import re
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.repositories import InlineExecutor, commit, photo
from support.scripts import import_scripts

from pale.data.sources.shards import ShardFiles
from pale.errors import DataError

NAMES = ("pretraining_sources", "pretraining_images", "pretraining_data")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return import_scripts(monkeypatch, *NAMES)["pretraining_data"]


@pytest.fixture
def sources(script: ModuleType) -> ModuleType:
    return sys.modules["pretraining_sources"]


@pytest.fixture
def images(script: ModuleType) -> ModuleType:
    return sys.modules["pretraining_images"]


Run = Callable[..., Path]


@pytest.fixture
def run(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return a function that prepares sets of given files; values of `sets` are (files, options of the source)."""
    made: dict[str, Any] = {}

    def prepare(
        sets: dict[str, tuple[dict[str, bytes], dict[str, Any]]], only: list[str] | None = None
    ) -> Path:
        found = []
        for name, (files, options) in sets.items():
            if name not in made:
                made[name] = commit(tmp_path / f"mirrors/owner+{name}/repo", dict(files))
            found.append(script.Source(name, f"owner/{name}", made[name], **options))
        monkeypatch.setattr(script, "SOURCES", tuple(found))
        out = tmp_path / "out"
        args = argparse.Namespace(
            mirrors=tmp_path / "mirrors",
            shared=tmp_path / "shared",
            out=out,
            only=only,
            jobs=1,
            size=48,
        )
        script.run(args)
        return out

    monkeypatch.setattr(script, "ProcessPoolExecutor", InlineExecutor)
    return prepare


SPLIT = {
    "pattern": r"(?P<split>train|val)/(?P<label>[^/]+)/.+",
    "splits": {"train": "train", "val": "val"},
}


def folders(
    classes: str = "ab", train: int = 3, seed: int = 0, size: tuple[int, int] = (64, 64)
) -> dict[str, bytes]:
    files = {}
    for number, name in enumerate(classes):
        for i in range(train + 1):
            split = "train" if i < train else "val"
            files[f"{split}/{name}/{i}.jpg"] = photo(seed + 100 * number + i, size)
    return files


def manifest(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "manifest.json").read_text())


def test_packed_sets_are_read_by_the_trainer_and_repeat_bit_for_bit(
    run: Run, script: ModuleType
) -> None:
    sets = {"one": (folders(), SPLIT)}
    out = run(sets)
    train = ShardFiles(out / "one", "train")
    assert train.classes == ["a", "b"]
    assert sorted(train.labels) == [0, 0, 0, 1, 1, 1]
    assert train.image(0).size == (48, 48)
    assert len(ShardFiles(out / "one", "val", train.classes)) == 2
    first = manifest(out / "one")
    assert first["source"]["found"] == first["source"]["packed"] == {"train": 6, "val": 2}
    assert (out / "looks/one.jpg").is_file()
    (out / "one/manifest.json").unlink()
    for path in (out / "staged").rglob("*.npz"):
        path.unlink()
    run(sets)
    assert manifest(out / "one") == first


def test_small_plain_jpegs_keep_their_bytes(images: ModuleType) -> None:
    small = photo(1, (40, 44))
    assert images.prepare(small, "a", 48).content == small
    rotated = photo(1, (40, 44), exif=exif(6))
    for content, size in ((photo(1, (40, 44), "PNG"), (40, 44)), (rotated, (44, 40))):
        done = images.prepare(content, "a", 48)
        with Image.open(io.BytesIO(done.content)) as image:
            assert (image.format, image.size) == ("JPEG", size)


@pytest.mark.parametrize("size", [(96, 192), (97, 131), (800, 600)])
def test_scaled_images_have_the_shorter_side_and_the_aspect_ratio(
    images: ModuleType, size: tuple[int, int]
) -> None:
    with Image.open(io.BytesIO(images.prepare(photo(1, size), "a", 48).content)) as image:
        assert min(image.size) == 48
        assert max(image.size) == pytest.approx(48 * max(size) / min(size), abs=1)


def exif(orientation: int) -> Image.Exif:
    found = Image.Exif()
    found[0x0112] = orientation
    return found


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"not an image", "unreadable"),
        (photo(1)[:400], "unreadable"),
        (b"", "unreadable"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "unreadable"),
        (photo(1, (20, 64)), "too small"),
        (photo(1, (40, 200)), "extreme aspect ratio"),
    ],
)
def test_hostile_files_are_dropped_with_a_reason(run: Run, content: bytes, reason: str) -> None:
    out = run(
        {
            "one": (
                folders() | {"train/a/bad.jpg": content, "train/a/link.jpg": b"/etc/passwd"},
                SPLIT,
            )
        }
    )
    source = manifest(out / "one")["source"]
    assert source["dropped"] == {reason: 1}
    assert source["found"] == {"train": 7, "val": 2}  # a link is no file


def test_an_image_with_too_many_pixels_is_dropped_before_it_is_decoded(
    images: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(images, "MAX_PIXELS", 64 * 64 - 1)
    monkeypatch.setattr(images, "load_upright", None)
    with pytest.raises(images.DroppedError, match="too many pixels"):
        images.prepare(photo(1), "a", 48)


def test_training_images_equal_to_evaluation_images_are_dropped_in_any_set_and_size(
    run: Run,
) -> None:
    seen, pet = photo(900, (128, 128)), photo(901, (150, 100))
    out = run(
        {
            "one": (
                folders()
                | {
                    "train/a/seen.jpg": photo(900, (56, 56)),
                    "train/b/pet.jpg": photo(901, (75, 50)),
                },
                SPLIT,
            ),
            "two": (
                folders("cd", seed=1000)
                | {"val/c/seen.jpg": seen, "train/c/own.jpg": photo(900, (70, 70))},
                SPLIT,
            ),
            "pets": ({"x/pet.jpg": pet}, {"transfer": True}),
        }
    )
    assert manifest(out / "one")["source"]["dropped"] == {
        "equal to val of two": 1,
        "equal to transfer of pets": 1,
    }
    assert manifest(out / "two")["source"]["dropped"] == {"equal to val of two": 1}
    assert manifest(out / "two")["source"]["packed"] == {"train": 6, "val": 3}
    assert not (out / "pets").exists()
    assert set(manifest(out / "one")["compared_with"]) == {"two", "pets"}


def test_a_central_crop_of_an_evaluation_image_is_found(run: Run) -> None:
    wide = photo(950, (120, 80))
    with Image.open(io.BytesIO(wide)) as image:
        buffer = io.BytesIO()
        image.crop((20, 0, 100, 80)).resize((64, 64)).save(buffer, "JPEG", quality=90)
    out = run(
        {
            "one": (
                folders() | {"val/a/wide.jpg": wide, "train/a/crop.jpg": buffer.getvalue()},
                SPLIT,
            )
        }
    )
    assert manifest(out / "one")["source"]["dropped"] == {"equal to val of one": 1}


def test_of_equal_training_images_the_largest_is_kept(run: Run) -> None:
    small, large = (photo(902, (n, n), quality=95) for n in (40, 48))
    out = run(
        {
            "one": (folders() | {"train/a/x.jpg": small}, SPLIT),
            "two": (
                folders("cd", seed=1000) | {"train/c/x.jpg": large, "train/d/y.jpg": large},
                SPLIT,
            ),
        }
    )
    assert manifest(out / "one")["source"]["dropped"] == {"equal to train of two": 1}
    assert manifest(out / "two")["source"]["dropped"] == {"equal to train of two": 1}


def test_the_banded_search_finds_the_pairs_of_a_full_comparison(images: ModuleType) -> None:
    rng = np.random.default_rng(0)
    queries = rng.integers(0, 2**63, 300, np.uint64)
    references = queries[rng.permutation(300)].copy()
    for i in range(300):  # 0 to 5 bits
        for bit in rng.choice(64, i % 6, replace=False):
            references[i] ^= np.uint64(1) << np.uint64(bit)
    bits = np.array([[bin(int(a ^ b)).count("1") for b in references] for a in queries])
    found = {
        (int(a), int(b))
        for q, r in images.close_pairs(queries, references, 2)
        for a, b in zip(q, r, strict=True)
    }
    assert found == set(map(tuple, np.argwhere(bits <= 2).tolist()))
    assert len(found) >= 150
    with pytest.raises(ValueError, match="less than 4, got 4"):
        next(images.close_pairs(queries, references, 4))


def test_plain_images_with_equal_hashes_and_other_brightness_are_not_equal(
    images: ModuleType,
) -> None:
    prints = [images.fingerprint(Image.new("RGB", (64, 64), (n, n, n))) for n in (10, 200, 12)]
    joined = images.Fingerprints(np.stack([p[0] for p in prints]), np.stack([p[1] for p in prints]))
    assert images.repeated_images(joined, np.arange(3), 5.0).tolist() == [-1, -1, 0]
    first, rest = joined[np.array([0])], joined[np.array([1, 2])]
    assert images.find_matches(rest, first, 2, 5.0).tolist() == [-1, 0]


def test_sets_without_a_split_hold_out_the_same_images_and_one_per_class(
    sources: ModuleType,
) -> None:
    def samples(folder: str) -> list[Any]:
        names = [(f"{folder}/{c}/{i}.jpg", c) for c in "ab" for i in range(1000)] + [
            (f"{folder}/rare/z.jpg", "rare")
        ]
        return [sources.Sample(sources.Entry(path, "0", 1), "", (label,)) for path, label in names]

    first, again = sources.hold_out(samples("x")), sources.hold_out(samples("y"))
    held = [s.split == "val" for s in first]
    assert held == [s.split == "val" for s in again]  # by the file name alone
    assert 60 < sum(held) < 150
    assert held[-1]
    assert sources.hold_out([first[0]._replace(split="train")])[0].split == "train"


def test_multi_label_sets_have_the_names_of_their_labels(
    run: Run, sources: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def line(number: int, *names: str) -> str:
        flags = " ".join(str(int(name in names)) for name in sources.COCO_CLASSES)
        return f"./data/coco/train2014/COCO_train2014_{number:012d}.jpg {flags}\n"

    rows = [line(i, "person", "dog" if i % 2 else "cat") for i in range(12)] + [line(13)]
    lists = {
        f"caffe/data/coco/test/{k}{i}.txt": b"" for k in ("database", "test") for i in range(8)
    }
    tags = commit(
        tmp_path / "mirrors/thuml+HashNet/repo",
        {**lists, "caffe/data/coco/train.txt": "".join(rows).encode()},
    )
    (tmp_path / "shared").mkdir()
    with tarfile.open(tmp_path / "shared/coco-mini.tar", "w") as tar:
        tar.addfile(tarfile.TarInfo("coco-mini/train2017/000000000003.jpg"))
    files = {f"train2017/{i:012d}.jpg": photo(i) for i in range(14)}
    monkeypatch.setattr(sources, "HASHNET", ("thuml/HashNet", tags))
    out = run({"coco": (files, {"pattern": r"train2017/\d+\.jpg", "samples": sources.coco_tags})})
    about = manifest(out / "coco")
    assert about["labels"] == "multi"
    assert about["source"]["dropped"] == {"no tags": 2, "in coco-mini": 1}
    assert about["compared_with"]["dyuan459/Efficient-Robust-Object-Detection-1"] == "absent"
    assert (out / "coco/classes.txt").read_text().splitlines() == sources.COCO_CLASSES
    labels = {}
    for path in sorted((out / "coco").glob("*.tar")):
        with tarfile.open(path) as tar:
            for member in tar:
                if member.name.endswith(".json"):
                    labels[int(member.name[-12:-5])] = json.load(tar.extractfile(member))["labels"]
    expected = {i: ["dog" if i % 2 else "cat", "person"] for i in range(12) if i != 3}
    assert labels == expected


def test_shards_have_at_most_the_given_size(
    run: Run, script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "SHARD_BYTES", 30_000)
    out = run({"one": (folders(train=12), SPLIT)})
    sizes = [path.stat().st_size for path in (out / "one").glob("train-*.tar")]
    assert len(sizes) > 2
    assert max(sizes) <= 30_000
    assert len(ShardFiles(out / "one", "train")) == 24


def test_an_interrupted_run_repeats_only_the_part_and_the_shard_it_lost(
    run: Run, script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(script, "PART", 4)
    monkeypatch.setattr(script, "SHARD_BYTES", 30_000)
    sets = {"one": (folders(train=12), SPLIT)}
    prepare, prepared, out = script.prepare, [], tmp_path / "out"

    def interrupt_after(images: int) -> None:
        def counted(*words: Any) -> Any:
            if len(prepared) == images:
                raise KeyboardInterrupt
            prepared.append(words)
            return prepare(*words)

        monkeypatch.setattr(script, "prepare", counted)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    interrupt_after(10)
    with pytest.raises(KeyboardInterrupt):
        run(sets)
    prepared.clear()
    interrupt_after(1000)
    with monkeypatch.context() as patch:
        patch.setattr(script, "save_index", interrupted)  # after the training shards
        with pytest.raises(KeyboardInterrupt):
            run(sets)
    assert len(prepared) == 26 - 8  # two parts were complete
    shards = sorted((out / ".one").glob("train-*.tar"))
    assert len(shards) > 2
    lost = shards[-1].read_bytes()
    shards[-1].rename(
        out / ".one" / f".{shards[-1].name}"
    )  # as a kill during its writing leaves it
    times = [path.stat().st_mtime_ns for path in shards[:-1]]
    shards = [out / "one" / path.name for path in shards]
    prepared.clear()
    run(sets)
    assert not prepared
    assert [path.stat().st_mtime_ns for path in shards[:-1]] == times
    assert shards[-1].read_bytes() == lost
    assert {path.name for path in (out / "one").iterdir() if path.suffix == ".tar"} == set(
        manifest(out / "one")["shards"]
    )
    before = (out / "one/manifest.json").stat().st_mtime_ns
    run(sets)
    assert (out / "one/manifest.json").stat().st_mtime_ns == before


def test_a_set_is_packed_again_when_a_new_set_shares_its_images(run: Run) -> None:
    one = (folders() | {"train/a/x.jpg": photo(900)}, SPLIT)
    out = run({"one": one})
    assert manifest(out / "one")["source"]["packed"]["train"] == 7
    run({"one": one, "pets": ({"x.jpg": photo(900, (80, 80))}, {"transfer": True})})
    assert manifest(out / "one")["source"]["packed"]["train"] == 6
    assert len(ShardFiles(out / "one", "train")) == 6


def test_published_files_are_packed_unchanged_with_their_duplicates(run: Run) -> None:
    files = folders(size=(48, 48)) | {"train/a/twin.jpg": photo(0, (48, 48))}
    out = run({"one": (files, SPLIT | {"published": "evidence/one"})})
    train = ShardFiles(out / "evidence/one", "train")
    packed = sorted(train.content(i) for i in range(len(train)))
    assert packed == sorted(content for path, content in files.items() if path.startswith("train"))
    assert manifest(out / "one")["source"]["dropped"] == {"equal to train of one": 1}


def test_published_files_that_need_scaling_are_refused(run: Run) -> None:
    with pytest.raises(
        DataError, match=r"'train/a/0.jpg' was dropped or scaled; choose a larger --size"
    ):
        run({"one": (folders(size=(64, 64)), SPLIT | {"published": "evidence/one"})})


def test_absent_repositories_and_commits_are_reported(
    run: Run,
    script: ModuleType,
    sources: ModuleType,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run({"one": (folders(), SPLIT)})
    assert (
        script.Source("two", "owner/two", "0" * 40).find(
            script.Mirrors(tmp_path / "mirrors", tmp_path)
        )
        is None
    )
    with pytest.raises(DataError, match="has no commit 1111; fetch the repository again"):
        sources.Repository(tmp_path / "mirrors/owner+one/repo", "1111")
    assert "absent or not staged: none" in capsys.readouterr().out


def test_every_source_names_a_full_commit_and_a_valid_pattern(script: ModuleType) -> None:
    names = [source.name for source in script.SOURCES]
    assert len(set(names)) == len(names)
    for source in script.SOURCES:
        assert source.repository.endswith(".tar") or len(source.commit) == 40
        groups = re.compile(source.pattern).groupindex
        assert ("split" in groups) == bool(source.splits)
