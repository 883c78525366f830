"""Preparation of the sets for transfer: read from git and tar, official splits, checked, scaled, resumable."""

from __future__ import annotations

import io
import json
import struct
import tarfile
import zlib
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support.repositories import InlineExecutor, commit, photo
from support.scripts import TRANSFER, import_scripts

from pale.data.sources.coco import CocoFiles
from pale.data.sources.images import read_folder
from pale.errors import DataError


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    found = import_scripts(monkeypatch, *TRANSFER)
    monkeypatch.setattr(found["transfer_data"], "ProcessPoolExecutor", InlineExecutor)
    return found


class Mirrored:
    """Writes repositories, and the names and commits of the sets become theirs."""

    def __init__(self, scripts: dict[str, ModuleType], root: Path, patch: pytest.MonkeyPatch):
        self.scripts, self.root, self.patch = scripts, root, patch
        self.sets = scripts["transfer_sets"]
        self.mirrors = self.sets.Mirrors(root / "mirrors", root / "shared")

    def add(self, name: str, *trees: dict[str, bytes]) -> str:
        made = commit(self.root / f"mirrors/owner+{name}/repo", *trees)
        changed = tuple(
            replace(each, repository=f"owner/{name}", commit=made) if each.name == name else each
            for each in self.sets.SOURCES
        )
        self.patch.setattr(self.sets, "SOURCES", changed)
        return made

    def set(self, name: str, **changes: Any) -> Any:
        (chosen,) = (each for each in self.sets.SETS if each.name == name)
        return replace(chosen, **changes)

    def prepare(self, name: str, size: int = 48, **changes: Any) -> Path:
        data = self.root / "data"
        write = self.scripts["transfer_data"].prepare_photos
        assert write(self.set(name, **changes), self.mirrors, data, size, 1)
        return data / name


@pytest.fixture
def mirrored(
    scripts: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Mirrored:
    return Mirrored(scripts, tmp_path, monkeypatch)


def element(kind: int, data: bytes) -> bytes:
    if 0 < len(data) <= 4:
        return struct.pack("<HH", kind, len(data)) + data.ljust(4, b"\0")
    return struct.pack("<II", kind, len(data)) + data + b"\0" * (-len(data) % 8)


def matlab(compressed: bool = True, **matrices: list[int]) -> bytes:
    """Return a MATLAB file of level 5 with matrices of 16 bits."""
    out = b"MATLAB 5.0 MAT-file".ljust(124) + b"\x00\x01IM"
    for name, numbers in matrices.items():
        parts = element(6, struct.pack("<II", 11, 0))  # flags: class uint16
        parts += element(5, struct.pack("<ii", 1, len(numbers))) + element(1, name.encode())
        matrix = element(14, parts + element(4, struct.pack(f"<{len(numbers)}H", *numbers)))
        packed = zlib.compress(matrix)
        out += struct.pack("<II", 15, len(packed)) + packed if compressed else matrix
    return out


@pytest.mark.parametrize("compressed", [True, False])
def test_matrices_of_matlab_files_are_read(scripts, compressed):
    given = {"labels": [3, 1, 65535], "one": [7], "named_at_length": list(range(300))}
    found = scripts["transfer_sets"].read_matrices(matlab(compressed, **given))
    assert {name: list(numbers) for name, numbers in found.items()} == given


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a MATLAB file"),
        (matlab(a=[1])[:-3], "cut short"),
        (matlab(False, a=list(range(50)))[:-60], "cut short"),
        (matlab(a=[1])[:136] + b"x" * 40, "damaged MATLAB file|cut short"),
    ],
)
def test_damaged_matlab_files_are_refused(scripts, content, message):
    with pytest.raises(DataError, match=message):
        scripts["transfer_sets"].read_matrices(content)


def test_a_matlab_file_that_unpacks_to_too_much_is_refused(scripts, monkeypatch):
    monkeypatch.setattr(scripts["transfer_sets"], "MAX_MATRIX_BYTES", 1000)
    with pytest.raises(DataError, match="over 1000 bytes"):
        scripts["transfer_sets"].read_matrices(matlab(a=[0] * 5000))


def add_flowers(mirrored: Mirrored, patch: pytest.MonkeyPatch, wrong: bool = False) -> None:
    labels = [1, 1, 1, 2, 2, 2]
    places = ("train", "test", "valid")  # of the copy, which are not the official split
    files = {
        f"flowers/{places[i % 3]}/{label}/image_{i + 1:05d}.jpg": photo(i)
        for i, label in enumerate(labels)
    }
    mirrored.add("flowers-102", files)
    labels[5] = 1 if wrong else 2
    lists = {
        "imagelabels.mat": matlab(labels=labels),
        "setid.mat": matlab(trnid=[2, 4], valid=[1, 5], tstid=[3, 6]),
    }
    made = commit(mirrored.root / "mirrors/owner+lists/repo", lists)
    patch.setattr(mirrored.sets, "FLOWER_LISTS", ("owner/lists", made))


def test_flowers_have_the_official_split(mirrored, monkeypatch):
    add_flowers(mirrored, monkeypatch)
    _, found = mirrored.set("flowers-102", counts=None).find(mirrored.mirrors)
    split = {int(p.entry.path[-9:-4]): (p.split, p.label) for p in found}
    assert split == {
        1: ("val", "001"),
        2: ("train", "001"),
        3: ("test", "001"),
        4: ("train", "002"),
        5: ("val", "002"),
        6: ("test", "002"),
    }
    with pytest.raises(DataError, match=r"must have .*1020.* found .*'train': 2"):
        mirrored.set("flowers-102").find(mirrored.mirrors)


def test_flowers_whose_lists_disagree_or_are_missing_are_refused(mirrored, monkeypatch):
    add_flowers(mirrored, monkeypatch, wrong=True)
    with pytest.raises(DataError, match=r"image_00006.jpg has the class 1 in the official list"):
        mirrored.set("flowers-102").find(mirrored.mirrors)
    monkeypatch.setattr(mirrored.sets, "FLOWER_LISTS", ("owner/none", "0" * 40))
    with pytest.raises(DataError, match=r"owner/none; fetch it beside the images"):
        mirrored.set("flowers-102").find(mirrored.mirrors)


def caltech_files(mirrored: Mirrored, each: int) -> dict[str, bytes]:
    names = ["BACKGROUND_Google", "anchor", *mirrored.sets.PHOTO_CLASSES]
    return {
        f"101_ObjectCategories/{name}/image_{i:04d}.jpg": f"{name} {i}".encode()
        for name in names
        for i in range(31 if name == "anchor" else each)
    }


def test_caltech_has_30_training_images_of_each_class_and_others_for_the_test(mirrored):
    mirrored.add("caltech-101", caltech_files(mirrored, 90))
    _, found = mirrored.set("caltech-101").find(mirrored.mirrors)
    counts = Counter((p.label, p.split) for p in found)
    assert counts["crab", "train"] == counts["anchor", "train"] == 30
    assert counts["crab", "test"] == 50
    assert counts["anchor", "test"] == 1
    assert len(counts) == 22  # 11 classes; the background is none
    assert len({p.entry.path for p in found}) == len(found)
    paths = sorted(p.entry.path for p in found if (p.label, p.split) == ("crab", "train"))
    assert paths[:2] != [f"101_ObjectCategories/crab/image_{i:04d}.jpg" for i in range(2)]


def test_200_photos_of_ten_classes_have_300_fresh_ones(mirrored):
    mirrored.add("caltech-101", caltech_files(mirrored, 55))
    _, found = mirrored.set("photos-200").find(mirrored.mirrors)
    assert Counter(p.split for p in found) == {"train": 200, "test": 300}
    assert len({p.label for p in found}) == 10
    assert len({p.entry.path for p in found}) == 500


def test_photos_without_a_class_are_refused(mirrored):
    files = caltech_files(mirrored, 55)
    mirrored.add("caltech-101", {k: v for k, v in files.items() if "/crab/" not in k})
    with pytest.raises(DataError, match="lacks crab"):
        mirrored.set("photos-200").find(mirrored.mirrors)


def cub_files(size: tuple[int, int] = (64, 64)) -> dict[str, bytes]:
    return {
        f"{split}/{label}/bird_{i}.jpg": photo(10 * seed + i, size)
        for seed, label in enumerate(("001.Albatross", "002.Auklet"))
        for split, numbers in (("train", range(3)), ("test", range(3, 5)))
        for i in numbers
    }


def test_prepared_folders_have_small_images_that_are_read_by_the_trainer(mirrored):
    extra = {
        "train/001.Albatross/long.jpg": photo(99, (30, 300)),
        "test/002.Auklet/broken.jpg": b"not an image",
        "test/002.Auklet/link.jpg": b"/etc/passwd",
    }
    mirrored.add("cub-200", cub_files((120, 60)) | extra)
    folder = mirrored.prepare("cub-200", counts=None)
    train, test = (read_folder(folder / split) for split in ("train", "test"))
    assert train.classes == test.classes == ["001.Albatross", "002.Auklet"]
    assert (len(train), len(test)) == (7, 4)
    sizes = Counter(train.image(i).size for i in range(7))
    assert sizes == {(96, 48): 6, (30, 300): 1}  # of an official split no shape is left out
    about = json.loads((folder / "manifest.json").read_text())
    assert about["images"] == {"train": 7, "test": 4}
    assert about["dropped"] == {"test: unreadable": 1}


def test_an_interrupted_preparation_repeats_only_the_part_it_lost(mirrored, monkeypatch):
    data = mirrored.scripts["transfer_data"]
    monkeypatch.setattr(data, "PART", 2)
    mirrored.add("cub-200", cub_files())
    read, done = data.read_scaled, []

    def counted(*words: Any) -> Any:
        if len(done) == 5:
            raise KeyboardInterrupt
        done.append(words)
        return read(*words)

    monkeypatch.setattr(data, "read_scaled", counted)
    with pytest.raises(KeyboardInterrupt):
        mirrored.prepare("cub-200", counts=None)
    assert not (mirrored.root / "data/cub-200").exists()
    monkeypatch.setattr(data, "read_scaled", lambda *words: (done.append(words), read(*words))[1])
    done.clear()
    folder = mirrored.prepare("cub-200", counts=None)
    assert len(done) == 10 - 4
    assert len(read_folder(folder / "train")) == 6
    done.clear()
    before = (folder / "manifest.json").stat().st_mtime_ns
    mirrored.prepare("cub-200", counts=None)
    assert not done
    assert (folder / "manifest.json").stat().st_mtime_ns == before
    mirrored.prepare("cub-200", size=32, counts=None)
    assert len(done) == 10
    assert read_folder(folder / "train").image(0).size == (32, 32)


def test_classes_without_test_images_and_odd_class_names_are_refused(mirrored):
    mirrored.add("cub-200", cub_files() | {"train/003.Crow/a.jpg": photo(1)})
    with pytest.raises(
        DataError, match=r"1 classes lack images for training or the test: 003.Crow"
    ):
        mirrored.prepare("cub-200", counts=None)
    odd = {path.replace("001", "\x1b"): content for path, content in cub_files().items()}
    commit(mirrored.root / "mirrors/owner+odd/repo", odd)
    mirrored.add("caltech-101", {"x.jpg": b""})
    repository = mirrored.sets.Repository(mirrored.root / "mirrors/owner+odd/repo", "main")
    chosen = mirrored.set("cub-200", counts=None)
    mirrored.patch.setattr(type(mirrored.mirrors), "open", lambda *_: repository)
    with pytest.raises(DataError, match="no usable class name"):
        chosen.find(mirrored.mirrors)


def write_tar(path: Path, files: dict[str, bytes]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, content in files.items():
            about = tarfile.TarInfo(name)
            about.size = len(content)
            tar.addfile(about, io.BytesIO(content))


def test_pets_have_the_split_of_their_lists(mirrored):
    names = ("Abyssinian_1", "Abyssinian_2", "saint_bernard_3", "saint_bernard_4")
    files = {f"oxford-iiit-pet/images/{name}.jpg": photo(i) for i, name in enumerate(names)}
    for split, start in (("trainval", 0), ("test", 1)):
        rows = "".join(f"{name} 1 1 1\n" for name in names[start::2])
        files[f"oxford-iiit-pet/annotations/{split}.txt"] = rows.encode()
    write_tar(mirrored.root / "shared/oxford-pets-160.tar", files)
    folder = mirrored.prepare("oxford-pets")
    for split in ("train", "test"):
        source = read_folder(folder / split)
        assert source.classes == ["Abyssinian", "saint_bernard"]
        assert len(source) == 2


def test_tars_are_unpacked_once_without_their_first_folder(mirrored):
    data = mirrored.scripts["transfer_data"]
    tar = mirrored.root / "shared/camvid-240.tar"
    assert not data.unpack("camvid", tar, mirrored.root / "data")
    write_tar(tar, {"camvid/classes.txt": b"0 sky", "camvid/train/a.jpg": b"a"})
    assert data.unpack("camvid", tar, mirrored.root / "data")
    folder = mirrored.root / "data/camvid"
    assert (folder / "train/a.jpg").read_bytes() == b"a"
    before = (folder / "manifest.json").stat().st_mtime_ns
    assert data.unpack("camvid", tar, mirrored.root / "data")
    assert (folder / "manifest.json").stat().st_mtime_ns == before
    write_tar(tar, {"camvid/../../outside.txt": b"a"})
    with pytest.raises(tarfile.OutsideDestinationError):
        data.unpack("camvid", tar, mirrored.root / "data")
    assert not (mirrored.root / "outside.txt").exists()


def test_boxes_of_coco_are_joined_with_images_of_the_history(mirrored, monkeypatch):
    data = mirrored.scripts["transfer_data"]
    categories = [
        {"id": 1, "name": "person"},
        {"id": 18, "name": "dog"},
        {"id": 90, "name": "brush"},
    ]
    annotations = json.dumps({"categories": categories}).encode()
    mini = {"coco-mini/annotations/instances_train2017.json": annotations}
    write_tar(mirrored.root / "shared/coco-mini.tar", mini)
    first = {f"images/train/{i:012d}.jpg": photo(i, (640, 480)) for i in range(1, 40)}
    texts = {f"labels/train/{i:012d}.txt": b"%d 18 0.5 0.5 0.5 1.2\n" % i for i in range(1, 42)}
    texts["labels/train/000000000002.txt"] = b"18 0.5 0.5 0.5 0.5\n"  # without the image id
    texts["labels/train/000000000003.txt"] = b"3 90 0.5 0.5 0.5 0.5\n"
    made = commit(mirrored.root / "mirrors/owner+boxes/repo", first, texts)
    monkeypatch.setattr(data, "COCO_BOXES", ("owner/boxes", made))
    assert data.prepare_boxes(mirrored.mirrors, mirrored.root / "data", 1)
    folder = mirrored.root / "data/coco-10k"
    about = json.loads((folder / "manifest.json").read_text())
    reasons = {key.partition(": ")[2]: count for key, count in about["dropped"].items()}
    assert reasons == {"labels of another format": 1, "labels of an unknown category": 1}
    assert about["without image"] == 2
    counts = []
    for split in ("train2017", "val2017"):
        source = CocoFiles(folder / f"annotations/instances_{split}.json", folder / split)
        assert source.classes == ["person", "dog"]
        assert source.image(0).size == (427, 320)
        counts.append(len(source))
        box = source.instances(0).boxes[0].tolist()
        assert box == pytest.approx([106.75, 0, 320.25, 320], abs=1)  # clipped to the image
    assert sum(counts) == 37
    assert counts[1] > 0
