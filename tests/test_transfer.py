"""The transfer scripts: sets read from git and tar, official splits, planned runs, results and tables."""

from __future__ import annotations

import argparse
import io
import json
import struct
import sys
import tarfile
import zlib
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from PIL import Image
from support.repositories import InlineExecutor, commit, photo

import pale
from pale.core.settings import vary
from pale.data.sources.coco import CocoFiles
from pale.data.sources.images import read_folder
from pale.errors import DataError
from pale.train.optim import make_optimizer
from pale.weights.write import save_weights

FOLDER = Path(__file__).parents[1] / "benchmarks"
NAMES = (
    *("pretraining_sources", "pretraining_images", "pretraining_data", "planned_runs"),
    *("transfer_sets", "transfer_data", "transfer_plan", "transfer"),
)


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    monkeypatch.syspath_prepend(str(FOLDER))
    for name in NAMES:
        sys.modules.pop(name, None)
    found = {name: __import__(name) for name in NAMES}
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


def contenders(scripts: dict[str, ModuleType]) -> list[Any]:
    make = scripts["transfer_plan"].Contender
    names = ("pale_nano", "pale_tiny", "swin_tiny_patch4_window7_224")
    return [make(name, name, Path(f"{name}.safetensors"), "0" * 64) for name in names]


def write_trials(plan: ModuleType, folder: Path, scores: dict[str, list[float]]) -> None:
    """Write results of all trials of some models, with the given scores for the settings of each start."""
    folder.mkdir(exist_ok=True)
    for part in plan.PHOTO_SETS:
        for start, settings in plan.SETTINGS.items():
            for model, values in scores.items():
                for setting, last in zip(settings, values, strict=True):
                    row = {"set": part, "start": start, "model": model, "setting": setting}
                    name = f"trials-{part}-{model}-{start}-{setting}-0.json"
                    (folder / name).write_text(json.dumps(row | {"last": last, "method": "trial"}))


def test_every_planned_run_has_a_name_of_its_own_and_a_model_that_can_be_built(scripts, tmp_path):
    plan, names = scripts["transfer_plan"], scripts["transfer_data"].NAMES
    write_trials(plan, tmp_path, {"pale_nano": [1, 2, 3]})
    models = contenders(scripts)
    runs = plan.trials(Path("data"), names, models, 192)
    assert len(runs) == 5 * 3 * 2 * 3
    runs += plan.runs(Path("data"), tmp_path, names, models, 3, 192)
    assert len({run.name for run in runs}) == len(runs) == 90 + 8 * 3 * 2 * 3
    built: dict[str, Any] = {}
    for run in runs:
        recipe = run.recipe
        key = json.dumps([recipe.kind, recipe.model.plain()])
        if key not in built:
            size = recipe.data.size if recipe.kind == "classification" else 64
            with torch.device("meta"):
                built[key] = recipe.model.build(9, size)
        assert (run.init is not None) == (run.about["start"] == "weights")
    assert len(built) == 3 * 4
    for run in runs[:90]:
        key = json.dumps([run.recipe.kind, run.recipe.model.plain()])
        assert make_optimizer(built[key], run.recipe).param_groups


def test_settings_are_the_same_for_every_model_and_chosen_without_test_images(scripts, tmp_path):
    plan, names = scripts["transfer_plan"], scripts["transfer_data"].NAMES
    models = contenders(scripts)
    for run in plan.trials(Path("data"), names, models, 192):
        assert (run.recipe.data.hold_out, run.recipe.data.train) == (0.2, "train")
    scores = {"pale_nano": [50, 60, 40], "pale_tiny": [90, 70, 40]}  # the mean prefers the first
    write_trials(plan, tmp_path, scores)
    runs = plan.runs(Path("data"), tmp_path, plan.PHOTO_SETS, models, 2, 192)
    assert {(run.about["start"], run.about["setting"]) for run in runs} == {
        ("scratch", "muon"),
        ("weights", "adamw"),
    }
    assert all(run.recipe.data.hold_out == 0 for run in runs)
    same = {"name": "pale_nano", "options": {}, "drop_path": 0.0}
    plain = [vary(run.recipe, model=same, seed=0).plain() for run in runs]
    assert len({json.dumps(each, default=str) for each in plain}) == 5 * 2  # sets and starts


def test_a_chosen_setting_stays_and_incomplete_trials_are_refused(scripts, tmp_path):
    plan = scripts["transfer_plan"]
    with pytest.raises(SystemExit, match="no model with all trials of cub-200 from weights"):
        plan.chosen_setting(tmp_path, "cub-200", "weights")
    write_trials(plan, tmp_path, {"pale_nano": [1, 2, 3]})
    assert plan.chosen_setting(tmp_path, "cub-200", "weights") == "muon"
    row = {"set": "cub-200", "start": "weights", "method": "fine-tuned", "setting": "adamw-low"}
    (tmp_path / "cub-200-pale_nano-weights-0.json").write_text(json.dumps(row))
    assert plan.chosen_setting(tmp_path, "cub-200", "weights") == "adamw-low"
    assert plan.chosen_setting(tmp_path, "cub-200", "scratch") == "adamw"


def test_dense_sets_are_tested_on_images_that_were_not_trained_on(scripts):
    plan = scripts["transfer_plan"]
    splits = {"camvid": ("train", "test"), "coco-mini": ("train2017", "val2017")}
    splits["coco-10k"] = splits["coco-mini"]
    for part, expected in splits.items():
        for name in ("pale_nano", "pale_tiny", "swin_tiny_patch4_window7_224"):
            recipe = plan.dense(Path("data"), part, name)
            assert (recipe.data.train, recipe.data.val) == expected
            assert recipe.model.name == name
    assert not recipe.model.heads.masks
    assert plan.dense(Path("data"), "coco-mini", "pale_tiny").model.heads.masks


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("pale_nano", ("pale_nano", "pale_nano", None)),
        ("pale_nano=runs/a=b", ("pale_nano", "pale_nano", Path("runs/a=b"))),
        ("no_dogs:pale_nano=runs/a", ("no_dogs", "pale_nano", Path("runs/a"))),
    ],
)
def test_models_are_given_by_label_architecture_and_weights(scripts, text, expected):
    found = scripts["transfer"].parse_model(text)
    assert (found.label, found.name, found.weights) == expected
    assert found.starts == (("scratch",) if found.weights is None else ("scratch", "weights"))
    with pytest.raises(argparse.ArgumentTypeError, match="a label of letters"):
        scripts["transfer"].parse_model("a/b:pale_nano")


def write_result(folder: Path, model: str, start: str, seed: int, last: float, **more: Any) -> None:
    row = {
        "part": "cub-200",
        "label": f"{model}-{start}-{more.get('method', '')}",
        "seed": seed,
        "set": "cub-200",
        "model": model,
        "architecture": model,
        "start": start,
        "method": "fine-tuned",
        "setting": "muon",
        "weights": "0" * 64 if start == "weights" else None,
        "size": 192,
        "metric": "top1",
        "last": last,
        "figures": {"top1": last},
        "environment": {"device": "cpu", "torch": "2", "commit": "abcdef0123456"},
    }
    folder.mkdir(exist_ok=True)
    row |= more
    name = f"{row['part']}-{row['label']}-{seed}.json"
    (folder / name).write_text(json.dumps(row))


def test_tables_merge_folders_and_show_intervals_and_differences(scripts, tmp_path, capsys):
    a, b = tmp_path / "a", tmp_path / "b"
    for seed, (scratch, weights) in enumerate([(50, 80), (52, 81), (54, 82)]):
        write_result(a, "pale_tiny", "scratch", seed, scratch)
        write_result(b, "pale_tiny", "weights", seed, weights)
        write_result(b, "swin", "weights", seed, 70 + seed)
    figures = {"linear": 60.0, "neighbours": 40.0}
    write_result(a, "swin", "weights", 0, 60, method="frozen", figures=figures, setting=None)
    write_result(a, "swin", "weights", 1, 99, method="trial")
    args = argparse.Namespace(
        results=[a, b], output=tmp_path / "out.md", compare=["pale_tiny", "swin"]
    )
    scripts["transfer"].tables(args)
    text = (tmp_path / "out.md").read_text()
    assert text == capsys.readouterr().out
    # 4.303 * 2 / sqrt(3), 4.303 * 1 / sqrt(3); differences 30, 29, 28
    line = "| pale_tiny | fine-tuned, top1 | 52.00 ± 4.97 | 81.00 ± 2.48 | +29.00 ± 2.48 | 3, 3 |"
    assert line in text
    assert "| swin | 20 nearest neighbours |  | 40.00 |  | 0, 1 |" in text
    assert "| swin | linear probe |  | 60.00 |  | 0, 1 |" in text
    assert "| cub-200 | 81.00 ± 2.48 | 71.00 ± 2.48 | +10.00 ± 0.00 |" in text
    assert "pale_tiny has the higher mean on 1 of 1 sets." in text
    assert "99" not in text


def test_a_difference_has_an_interval_only_over_the_same_seeds(scripts):
    difference = scripts["transfer"].difference
    assert difference({0: 60.0}, {0: 50.0, 1: 52.0}) == "+9.00"
    assert difference({0: 60.0, 1: 61.0}, {0: 50.0, 1: 52.0}) == "+9.50 ± 6.35"
    assert difference({0: 60.0}, {}) == ""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"digest": "1" * 64}, "of other weights"),
        ({"name": "pale_tiny"}, "another architecture"),
        ({}, "of image size 192, not 160"),
    ],
)
def test_results_of_other_weights_or_sizes_are_not_mixed(scripts, tmp_path, change, message):
    transfer, plan = scripts["transfer"], scripts["transfer_plan"]
    write_result(tmp_path, "pale_nano", "weights", 0, 60)
    model = plan.Contender("pale_nano", "pale_nano", Path("a"), "0" * 64)
    transfer.require_same(tmp_path, [model], 192)
    with pytest.raises(SystemExit, match=message):
        transfer.require_same(tmp_path, [replace(model, **change)], 192 if change else 160)


def test_frozen_features_are_scored_for_photos_and_repeated_only_from_scratch(scripts):
    models = contenders(scripts)[:1]
    jobs = scripts["transfer"].frozen(scripts["transfer_data"].NAMES, models, 3)
    assert Counter(start for _, _, start, _ in jobs) == {"scratch": 5 * 3, "weights": 5}


TINY = {"depths": [1, 1, 1, 1], "channels": [8, 8, 16, 16], "heads": [2, 2, 2, 2]}


@pytest.mark.slow
def test_from_weights_to_tables_on_a_cpu(scripts, tmp_path, monkeypatch, capsys):
    transfer, plan = scripts["transfer"], scripts["transfer_plan"]
    photos = plan.photos

    def small(*words: Any) -> Any:
        changes = {"batch": 4, "epochs": 1, "min_steps": 2, "warmup_steps": 0, "log_every": 1}
        return vary(photos(*words), model={"options": TINY}, **changes)

    for module in (transfer, plan):
        monkeypatch.setattr(module, "photos", small)
    monkeypatch.setattr(transfer, "NEIGHBOURS", 3)
    monkeypatch.setattr(plan, "TRIAL_LENGTH", {"epochs": 1, "min_steps": 2})
    for settings in plan.SETTINGS.values():  # one trial for each start
        for name in list(settings)[1:]:
            monkeypatch.delitem(settings, name)
    root = tmp_path / "data/cub-200"
    for split in ("train", "test"):
        for colour, label in ((40, "dark"), (200, "bright")):
            (root / split / label).mkdir(parents=True)
            for i in range(6):
                image = Image.new("RGB", (40, 40), (colour + i, colour, colour))
                image.save(root / split / label / f"{i}.jpg")
    (root / "manifest.json").write_text("{}")
    weights = tmp_path / "w.safetensors"
    made = pale.create_model("pale_nano", num_classes=7, **TINY)
    save_weights(weights, made.state_dict(), {})
    words = ["run", str(tmp_path / "data"), str(tmp_path / "out"), "--sets", "cub-200"]
    words += ["--models", f"tiny:pale_nano={weights}", "--seeds", "1", "--size", "32"]
    words += ["--workers", "0", "--graph", "false"]
    monkeypatch.setattr(sys, "argv", ["transfer.py", *words])
    transfer.main()
    results = tmp_path / "out/results"
    names = sorted(path.stem for path in results.glob("cub-*.json"))
    starts = ("scratch", "weights")
    assert names == [
        *(f"cub-200-tiny-frozen-{start}-0" for start in starts),
        *(f"cub-200-tiny-{start}-0" for start in starts),
    ]
    assert len(list(results.glob("trials-*.json"))) == 2
    row = json.loads((results / "cub-200-tiny-weights-0.json").read_text())
    assert row["recipe"]["model"]["weights"] == str(weights)
    assert row["recipe"]["model"]["new_head"] is True
    assert len(row["weights"]) == 64
    assert {"torch", "commit", "device"} <= row["environment"].keys()
    assert "--models" in row["command"]
    frozen = json.loads((results / "cub-200-tiny-frozen-weights-0.json").read_text())
    assert frozen["images"] == {"train": 12, "test": 12}
    assert frozen["figures"]["linear"] == 100  # dark and bright
    assert frozen["command"] == row["command"]
    # What is done is not repeated.
    times = {path: path.stat().st_mtime_ns for path in results.iterdir()}
    transfer.main()
    assert {path: path.stat().st_mtime_ns for path in results.iterdir()} == times
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["transfer.py", "tables", str(results)])
    transfer.main()
    text = capsys.readouterr().out
    assert "| tiny | linear probe | " in text
    assert "| tiny | fine-tuned, top1 | " in text
    assert "| 1, 1 |" in text


def test_sets_that_are_not_prepared_are_named(scripts, tmp_path, monkeypatch):
    words = ["run", str(tmp_path), str(tmp_path), "--models", "pale_nano", "--sets", "camvid"]
    monkeypatch.setattr(sys, "argv", ["transfer.py", *words])
    with pytest.raises(SystemExit, match="lacks camvid; run prepare, or name --sets"):
        scripts["transfer"].main()
