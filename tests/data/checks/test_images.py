import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pale.cli.main import main
from pale.data.checks.images import check_images, draw_contact_sheet


def random_image(seed: int, w: int = 48, h: int = 40) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (h, w, 3), np.uint8))


@pytest.fixture
def good(tmp_path) -> Path:
    seed = 0
    for split in ("train", "val"):
        for label in ("cat", "dog"):
            folder = tmp_path / split / label
            folder.mkdir(parents=True)
            for i in range(5):
                seed += 1
                random_image(seed).save(folder / f"{i}.png")
    return tmp_path


def problems(root: Path) -> dict[str, list[str]]:
    return {problem.kind: problem.items for problem in check_images(root, workers=1).problems}


def test_a_good_set_has_no_problem(good):
    report = check_images(good, workers=1)
    assert report.good
    assert report.problems == []
    assert report.counts == {"train": {"cat": 5, "dog": 5}, "val": {"cat": 5, "dog": 5}}
    assert report.sizes == {"48x40": 20}


def truncate(root):
    path = root / "train/cat/0.png"
    path.write_bytes(path.read_bytes()[:100])


def empty(root):
    (root / "train/fox").mkdir()
    (root / "val/fox").mkdir()


def looped(root):
    (root / "train/cat/loop.png").symlink_to("loop.png")


def misspelt(root):
    (root / "val/cat").rename(root / "val/cats")


def leak(root):
    # The same pixels in another file format.
    Image.open(root / "train/dog/1.png").save(root / "val/dog/copy.bmp")


def two_labels(root):
    Image.open(root / "train/dog/1.png").save(root / "train/cat/9.png")


def twice(root):
    Image.open(root / "train/dog/1.png").save(root / "train/dog/9.png")


def small(root):
    random_image(99, 20, 40).save(root / "train/cat/small.png")


def long(root):
    random_image(98, 400, 40).save(root / "train/cat/long.png")


def plain(root):
    Image.new("RGB", (40, 40), "red").save(root / "train/cat/red.png")


def loose(root):
    random_image(97).save(root / "train/loose.png")


def other(root):
    (root / "train/cat/notes.txt").write_text("x")


def few(root):
    (root / "train/dog/4.png").unlink()


def uneven(root):
    for i in range(50):
        random_image(1000 + i).save(root / f"train/cat/more{i}.png")


def single(root):
    for split in ("train", "val"):
        shutil.rmtree(root / split / "dog")


@pytest.mark.parametrize(
    ("harm", "kind", "item", "serious"),
    [
        (single, "only one class", "cat", True),
        (truncate, "unreadable", "train/cat/0.png: cannot be read", True),
        (looped, "unreadable", "train/cat/loop.png: cannot be read (Too many levels", True),
        (empty, "empty class", "train/fox", True),
        (misspelt, "class not in training", "val/cats", True),
        (misspelt, "class not in validation", "val/cat", True),
        (leak, "the same image in train and val", "train/dog/1.png = val/dog/copy.bmp", True),
        (two_labels, "the same image in two classes", "train/cat/9.png = train/dog/1.png", True),
        (twice, "the same image twice", "train/dog/1.png = train/dog/9.png", False),
        (small, "smaller than 32 pixels", "train/cat/small.png: 20x40", False),
        (long, "sides of more than 4 to 1", "train/cat/long.png: 400x40", False),
        (plain, "one colour only", "train/cat/red.png", False),
        (loose, "outside a class folder", "train/loose.png", True),
        (other, "not an image by its name", "train/cat/notes.txt", False),
        (few, "fewer than 5 images", "dog: 4 images", False),
        (uneven, "uneven classes", "cat: 55 images, dog: 5", False),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_each_problem_is_found_and_named(good, harm, kind, item, serious):
    harm(good)
    found = problems(good)
    assert any(entry.startswith(item) for entry in found[kind])
    assert check_images(good, workers=1).good is not serious


def test_the_command_prints_a_report_draws_a_sheet_and_sets_the_exit_code(good, capsys):
    words = ["data", "check", str(good), "--sheet", str(good / "sheets/a.png"), "--workers", "1"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "train: 10 images in 2 classes" in out
    assert "ready to train" in out
    with Image.open(good / "sheets/a.png") as image:
        assert np.asarray(image).std() > 10
    leak(good)
    assert main(words) == 1
    out = capsys.readouterr().out
    assert (
        "problem: the same image in train and val (1); validation results would be too good" in out
    )
    assert "not ready" in out
    assert main([*words, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["good"] is False


def test_a_sheet_skips_unreadable_images(good):
    truncate(good)
    draw_contact_sheet(good, "train", good / "a.png")
    assert (good / "a.png").is_file()


def packed(root):
    assert main(["data", "pack", str(root), str(root / "packed")]) == 0
    return root / "packed", ("train", "val"), "train-000000.tar:"


def listed(root):
    for split in ("train", "val"):
        files = sorted((root / split).rglob("*.png")) + sorted((root / split).rglob("*.bmp"))
        lines = [f"{file.relative_to(root)} {file.parent.name}\n" for file in files]
        (root / f"{split}.txt").write_text("".join(lines))
    return root, ("train.txt", "val.txt"), "train/"


@pytest.mark.parametrize("kind", [packed, listed])
def test_shards_and_list_files_are_checked_like_folders(good, kind, capsys):
    truncate(good)
    leak(good)
    root, splits, start = kind(good)
    report = check_images(root, splits, workers=1)
    found = {problem.kind: problem.items for problem in report.problems}
    assert found.keys() == {"unreadable", "the same image in train and val"}
    assert found["unreadable"][0].startswith(start)
    assert list(report.counts) == list(splits)
    assert report.counts[splits[0]] == {"cat": 5, "dog": 5}
    words = ["--splits", *splits, "--sheet", str(good / "a.png"), "--workers", "1"]
    assert main(["data", "check", str(root), *words]) == 1
    assert f"a.png written: all classes of {splits[0]}" in capsys.readouterr().out


def test_folders_have_precedence_over_shards(good):
    assert main(["data", "pack", str(good), str(good)]) == 0
    (good / "val-000000.tar").unlink()
    truncate(good)
    report = check_images(good, workers=1)
    assert list(report.counts) == ["train", "val"]
    assert [problem.kind for problem in report.problems] == ["unreadable"]
    draw_contact_sheet(good, "train", good / "a.png")


def test_a_sheet_of_many_classes_shows_the_first_ones(good):
    assert draw_contact_sheet(good, "train", good / "a.png", rows=1) == "the first 1 of 2 classes"


def test_problems_are_printed_even_if_the_sheet_cannot_be_drawn(good, capsys):
    leak(good)
    (good / "train/cat/folder.png").mkdir()
    words = ["data", "check", str(good), "--workers", "1", "--sheet"]
    assert main([*words, str(good / "a.png")]) == 1
    assert "a.png written" in capsys.readouterr().out
    assert main([*words, str(good / "a.unknown")]) == 1
    captured = capsys.readouterr()
    assert "the same image in train and val (1)" in captured.out
    assert "unknown file extension" in captured.err


@pytest.mark.parametrize(
    ("where", "message"),
    [("nowhere", "there is no folder"), ("train/cat", "holds no images in folders of classes")],
)
def test_a_wrong_folder_raises_with_the_expected_layout(good, where, message):
    with pytest.raises(ValueError, match=message):
        check_images(good / where, workers=1)


def test_a_folder_above_the_classes_names_the_right_one(good):
    shutil.rmtree(good / "val")
    (good / "train").rename(good / "photos")
    with pytest.raises(ValueError, match=r"one folder deeper: give .*photos$"):
        check_images(good, workers=1)
