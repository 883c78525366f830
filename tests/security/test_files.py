"""Commands on folders with hostile files: no program starts, nothing blocks, memory is bounded."""

import csv
import json
import os
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from support.datasets import (
    recipe_on_coco,
    recipe_on_masks,
    write_coco,
    write_image_folders,
    write_masks,
)
from support.hostile_images import EPS, peak_mb, png, scans_bomb
from support.recipes import classification_recipe
from support.weights import TASKS, pixels, weights

from pale.cli.main import main
from pale.data import rle
from pale.data.decoding import read_stored_image
from pale.data.gpu.decode import read_encoded
from pale.data.sources.images import ImageFiles
from pale.data.transforms.images import eval_transform
from pale.predict import Failed, Predictor
from pale.recipes.files import recipe_to_yaml
from pale.weights.read import load_weights
from pale.weights.write import save_weights

each_task = pytest.mark.parametrize("task", TASKS)


@pytest.fixture(scope="module")
def weight_files(tmp_path_factory) -> dict[str, Path]:
    return weights(tmp_path_factory.mktemp("weights"))


def run(capsys, *words) -> tuple[int, str, str]:
    code = main([str(word) for word in words])
    return code, *capsys.readouterr()


def photos(root: Path) -> Path:
    root.mkdir()
    Image.fromarray(pixels()).save(root / "a.png")
    Image.fromarray(pixels(33, 80)).save(root / "z.jpg")
    return root


def replace_images(root: Path, *patterns: str, content: bytes | None = EPS) -> Path:
    """Replace images by PostScript, or by FIFOs if there is no content."""
    found = [path for pattern in patterns for path in root.glob(pattern)]
    assert found
    for path in found:
        path.unlink()
        if content is None:
            os.mkfifo(path)
        else:
            path.write_bytes(content)
    return root


def config(root: Path, recipe) -> list[object]:
    """Return a `pale train` command for a recipe."""
    (root / "recipe.yaml").write_text(recipe_to_yaml(recipe))
    return ["train", "--config", root / "recipe.yaml", "--output", root / "run", "--device", "cpu"]


def folders(root: Path) -> Path:
    write_image_folders(root)
    return root


def command_for(
    case: str, root: Path, weight_files: dict[str, Path], content: bytes | None
) -> list[object]:
    """Return a command that reads images, of which all of one class or split are replaced."""
    own = {"data__kind": "folder", "data__root": str(root), "data__workers": 0}
    if case.startswith("predict"):
        replace_images(photos(root / "photos"), "*.png", content=content)
        task = case.partition(" ")[2]
        return ["predict", root / "photos", "--weights", weight_files[task], "--device", "cpu"]
    if case == "features":
        replace_images(folders(root), "train/a/*", content=content)
        return [
            "features",
            weight_files["classification"],
            root / "train",
            "-o",
            root / "f.safetensors",
        ]
    if case == "view":
        replace_images(folders(root), "train/a/0.png", content=content)
        photo = root / "train/a/0.png"
        return ["view", "attention", photo, "--weights", "pale_nano", "-o", root / "o.html"]
    if case == "train folder":
        replace_images(folders(root), "*/a/*", content=content)
        return config(root, classification_recipe(**own))
    if case in ("train list", "check list"):
        replace_images(folders(root), "*/a/*", content=content)
        for split in ("train", "val"):
            files = sorted((root / split).rglob("*.png"))
            lines = [f"{f.relative_to(root)} {f.parent.name}\n" for f in files]
            (root / f"{split}.txt").write_text("".join(lines))
        if case == "check list":
            return ["data", "check", root, "--splits", "train.txt", "val.txt", "--workers", "1"]
        lists = {"data__kind": "list", "data__train": "train.txt", "data__val": "val.txt"}
        return config(root, classification_recipe(**own | lists))
    if case in ("train shards", "check shards"):
        replace_images(folders(root / "tree"), "*/a/*", content=content)
        assert main(["data", "pack", str(root / "tree"), str(root / "packed")]) == 0
        if case == "check shards":
            return ["data", "check", root / "packed", "--workers", "1"]
        packed = {"data__kind": "shards", "data__root": str(root / "packed")}
        return config(root, classification_recipe(**own | packed))
    if case == "check folder":
        replace_images(folders(root), "*/a/*", content=content)
        return ["data", "check", root, "--workers", "1", "--sheet", root / "sheet.png"]
    if "masks" in case:
        replace_images(write_masks(root), "*/val/0.png", content=content)
        if case == "check masks":
            options = ["--images", "images", "--masks", "masks", "--classes", "classes.txt"]
            return ["data", "check", root, *options, "--workers", "1"]
        if case == "convert masks":
            return ["data", "coco", root / "images/val", root / "masks/val", "-o", root / "o.json"]
        return config(root, recipe_on_masks(root, data__check=case == "train checked masks"))
    replace_images(write_coco(root), "*/*.png", content=content)
    if case == "check coco":
        named = "annotations/{split}.json"
        return ["data", "check", root, "--annotations", named, "--workers", "1"]
    return config(root, recipe_on_coco(root, data__check=case == "train checked coco"))


READ = [
    *(f"predict {task}" for task in TASKS),
    *("features", "view", "train folder", "train list", "check folder", "check list"),
    *("train masks", "train checked masks", "check masks", "convert masks"),
    *("train coco", "train checked coco", "check coco"),
]
PACKED = ["train shards", "check shards"]


@pytest.mark.parametrize("case", READ + PACKED)
def test_postscript_named_as_an_image_starts_no_program(
    case, weight_files, ghostscript, tmp_path, capsys
):
    (tmp_path / "data").mkdir()
    code, out, err = run(capsys, *command_for(case, tmp_path / "data", weight_files, EPS))
    assert not ghostscript.exists()
    assert code == 1
    assert "cannot be read as" in out + err
    assert "Traceback" not in err


@pytest.mark.timeout(60)
@pytest.mark.parametrize("case", READ)
def test_fifos_among_the_images_are_reported_and_do_not_block(case, weight_files, tmp_path, capsys):
    (tmp_path / "data").mkdir()
    code, out, err = run(capsys, *command_for(case, tmp_path / "data", weight_files, None))
    assert code == 1
    assert "a FIFO, not a regular file" in out + err
    assert "Traceback" not in err


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["train", "--config", "{}"], "recipe.yaml"),
        (["data", "check", ".", "--splits", "{}"], "list.txt"),
        (["predict", "{}"], "a.jpg"),
        (["predict", "{}"], "a.mp4"),
        (["predict", "a.jpg", "--weights", "{}"], "w.safetensors"),
        (["probe", "{}", "{}"], "f.safetensors"),
        (["data", "check", ".", "--annotations", "{}"], "a.json"),
        (["data", "pack", ".", "out"], "train/a/0.jpg"),
        (["data", "check", "."], "train-000000.tar"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value,
)
def test_a_fifo_instead_of_any_file_is_an_error_at_once(words, name, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / "val/a").mkdir(parents=True)
    os.mkfifo(tmp_path / name)
    code, _, err = run(capsys, *(word.format(name) for word in words))
    assert code == 1
    assert "Traceback" not in err


@pytest.mark.timeout(60)
def test_a_video_that_is_a_fifo_or_a_list_of_other_files_is_not_opened(
    weight_files, tmp_path, capsys
):
    pytest.importorskip("av", reason="videos need the extra video")
    from fractions import Fraction

    from pale.predict.video import VideoWriter

    with VideoWriter(tmp_path / "secret.mp4", Fraction(10)) as film:
        for i in range(3):
            film.add(Image.fromarray(np.roll(pixels(64, 48), 5 * i, 1)))
    (tmp_path / "list.mp4").write_text("ffconcat version 1.0\nfile secret.mp4\n")
    os.mkfifo(tmp_path / "pipe.mp4")
    videos = [tmp_path / f"{name}.mp4" for name in ("list", "pipe", "secret")]
    words = [*videos, "--weights", weight_files["classification"], "--device", "cpu", "--json"]
    code, out, err = run(capsys, "predict", *words)
    assert code == 1
    names = [json.loads(line)["picture"] for line in out.splitlines()]  # kept name
    assert names == [str(videos[2])] * 3
    assert "list.mp4: cannot be read as a video" in err
    assert "pipe.mp4: cannot be read (a FIFO" in err


def test_frames_above_the_size_limit_are_not_decoded(weight_files, tmp_path, capsys, monkeypatch):
    pytest.importorskip("av", reason="videos need the extra video")
    from fractions import Fraction

    from pale.predict import video

    with video.VideoWriter(tmp_path / "large.mp4", Fraction(10)) as film:
        film.add(Image.fromarray(pixels(640, 480)))
    monkeypatch.setattr(video, "MAX_PIXELS", 640 * 480 - 1)
    words = [tmp_path / "large.mp4", "--weights", weight_files["classification"], "--device", "cpu"]
    code, _, err = run(capsys, "predict", *words)
    assert code == 1
    assert "large.mp4: cannot be read as a video" in err


@each_task
def test_videos_of_equal_stem_get_separate_outputs(weight_files, task, tmp_path, capsys):
    pytest.importorskip("av", reason="videos need the extra video")
    from fractions import Fraction

    from pale.predict.video import VideoWriter

    for suffix in ("mp4", "mov"):
        with VideoWriter(tmp_path / f"clip.{suffix}", Fraction(10)) as film:
            film.add(Image.fromarray(pixels(64, 48)))
    words = [tmp_path / "clip.mp4", tmp_path / "clip.mov", "--weights", weight_files[task]]
    code, *_ = run(capsys, "predict", *words, "-o", tmp_path / "out", "--device", "cpu")
    assert code == 0
    films = sorted(path.name for path in (tmp_path / "out").glob("*.mp4"))
    assert films == ["clip.mov_predicted.mp4", "clip.mp4_predicted.mp4"]


@each_task
def test_a_jpeg_of_thousands_of_scans_is_refused_before_it_is_decoded(
    weight_files, task, tmp_path, capsys
):
    scans_bomb(photos(tmp_path / "photos") / "scans.jpg")  # 40 s to decode, from 0.2 MB
    words = [tmp_path / "photos", "--weights", weight_files[task], "--device", "cpu", "--json"]
    began = time.process_time()
    code, out, err = run(capsys, "predict", *words)
    assert time.process_time() - began < 15
    assert code == 1
    assert "scans.jpg: more than 200 scans, which take minutes to decode" in err
    assert [Path(json.loads(line)["picture"]).name for line in out.splitlines()] == [
        "a.png",
        "z.jpg",
    ]


def test_a_jpeg_of_thousands_of_scans_is_refused_as_a_mask_and_for_a_gpu(tmp_path):
    bomb = scans_bomb(tmp_path / "scans.jpg", side=64)
    with pytest.raises(ValueError, match="more than 200 scans"):
        read_stored_image(bomb)
    source = ImageFiles(tmp_path, ["scans.jpg"], [0], ["a"])
    with pytest.raises(ValueError, match="more than 200 scans"):
        read_encoded(source, 0)
    good = tmp_path / "good.jpg"
    Image.fromarray(pixels()).save(good, progressive=True)
    assert read_stored_image(good).size == (90, 61)


@each_task
@pytest.mark.parametrize("size", [(12_000, 1), (1, 60_000), (2_000_000, 1)])
def test_very_long_images_do_not_stop_a_folder(weight_files, task, size, tmp_path, capsys):
    png(photos(tmp_path / "photos") / "strip.png", *size)
    folder = tmp_path / "out"
    words = [tmp_path / "photos", "--weights", weight_files[task], "-o", folder, "--device", "cpu"]

    def predict():
        code, _, err = run(capsys, "predict", *words)
        assert "Traceback" not in err
        assert code == (1 if max(size) > 65_535 else 0)

    assert peak_mb(predict, limit_gb=3) < 700
    lines = [json.loads(line) for line in (folder / "predictions.jsonl").read_text().splitlines()]
    names = [Path(line["picture"]).name for line in lines]  # kept name
    assert names == (["a.png", "z.jpg"] if max(size) > 65_535 else ["a.png", "strip.png", "z.jpg"])


def test_the_centre_of_a_long_image_equals_resizing_all_of_it():
    for size in ((2000, 90), (90, 2000), (1441, 90)):
        strip = Image.fromarray(pixels(*size))
        ours = eval_transform(64, 0.875)(strip).int()
        short = 73  # 64 / 0.875
        whole = [int(short * side / min(size)) for side in size]
        left, top = (round((side - 64) / 2) for side in whole)
        resized = strip.resize(whole, Image.Resampling.BICUBIC)
        cut = np.asarray(resized.crop((left, top, left + 64, top + 64))).astype(int)
        assert np.abs(ours.permute(1, 2, 0).numpy() - cut).max() <= 1


@each_task
def test_running_out_of_memory_with_one_image_does_not_stop_a_stream(
    weight_files, task, monkeypatch
):
    chosen = Predictor(weight_files[task], device="cpu", batch=2)
    prepare = chosen.prepare

    def fail_for_one_size(image):
        if image.size == (21, 20):
            raise MemoryError
        return prepare(image)

    monkeypatch.setattr(chosen, "prepare", fail_for_one_size)
    found = list(chosen.stream([pixels(20, 20), pixels(21, 20), pixels(20, 20)]))
    assert [isinstance(each, Failed) for each in found] == [False, True, False]
    assert found[1].reason.startswith("image 1: out of host memory")


def test_large_images_are_not_read_ahead_all_at_once(weight_files, monkeypatch):
    from pale.predict import images, predictor

    alive, peak = 0, 0
    chosen = Predictor(weight_files["classification"], device="cpu", batch=8)
    monkeypatch.setattr(predictor, "MAX_HELD", 5000)
    read = images.as_image

    def count_and_read(image, name):
        nonlocal alive, peak
        alive += 1
        peak = max(peak, alive)
        return read(image, name)

    monkeypatch.setattr(images, "as_image", count_and_read)
    for _ in chosen.stream([pixels(50, 40)] * 9):
        alive -= 1
    assert peak == 2  # of 2000 pixels each


@pytest.mark.parametrize("task", ["segmentation", "detection"])
def test_an_image_too_large_for_one_forward_pass_is_reported(weight_files, task, tmp_path, capsys):
    Image.new("RGB", (6000, 3000)).save(photos(tmp_path / "photos") / "large.png")
    words = [tmp_path / "photos", "--weights", weight_files[task], "--device", "cpu", "--own-size"]
    code, out, err = run(capsys, "predict", *words)
    assert code == 1
    assert "large.png: the model would see this image of 6000x3000 at 6000x3000" in err
    assert len(out.splitlines()) == 2


def write_images_with_odd_names(folder: Path) -> list[bytes]:
    names = [b"a.jpg", b"\xff\xfe.jpg", b"b\xe4r.png"]
    folder.mkdir(parents=True)
    for name in names:
        kind = "JPEG" if name.endswith(b"jpg") else "PNG"
        with open(os.fsencode(folder) + b"/" + name, "wb") as file:
            Image.fromarray(pixels()).save(file, kind)
    with open(os.fsencode(folder) + b"/\xfd.png", "wb") as file:
        file.write(b"no image")
    return names


@each_task
def test_names_that_are_not_utf8_do_not_stop_a_folder(weight_files, task, tmp_path, capsys):
    names = write_images_with_odd_names(tmp_path / "photos")
    folder = tmp_path / "out"
    words = [tmp_path / "photos", "--weights", weight_files[task], "-o", folder, "--device", "cpu"]
    for option in ([], ["--json"]):
        # The captured output is strict UTF-8, as on a terminal.
        code, out, err = run(capsys, "predict", *words, "--score", "0", *option)
        assert code == 1
        assert "\\xfd.png: cannot be read as an image" in err
        assert len(out.splitlines()) == 3
    shown = [str(tmp_path / "photos" / n) for n in ("a.jpg", "b\\xe4r.png", "\\xff\\xfe.jpg")]
    printed = [json.loads(line)["picture"] for line in out.splitlines()]  # kept name
    assert sorted(printed) == sorted(shown)
    for file in ("predictions.jsonl", "predictions.csv"):
        content = (folder / file).read_bytes().decode("utf-8")
        assert "\\ud" not in content
    rows = list(csv.DictReader((folder / "predictions.csv").read_text().splitlines()))
    assert {row["picture"] for row in rows} <= set(shown)  # kept name
    for name in names:
        assert os.path.exists(
            os.fsencode(folder) + b"/" + os.path.splitext(name)[0] + b"_predicted.jpg"
        )


def test_a_dataset_with_names_that_are_not_utf8_is_checked_trained_and_embedded(
    weight_files, tmp_path, capsys
):
    for split in ("train", "val"):
        for label in (b"cat", b"d\xf6g"):
            folder = os.fsencode(tmp_path / "data" / split) + b"/" + label
            os.makedirs(folder)
            for i in range(4):
                with open(folder + b"/%d\xff.png" % i, "wb") as file:
                    noise = np.random.default_rng((*split.encode(), *label, i))
                    Image.fromarray(noise.integers(0, 256, (40, 40, 3), np.uint8)).save(file, "PNG")
    root = tmp_path / "data"
    recipe = classification_recipe(
        data__kind="folder", data__root=str(root), data__workers=0, epochs=1
    )
    for words in (
        ["data", "check", root, "--workers", "1"],
        ["data", "check", root, "--workers", "1", "--json"],
        config(tmp_path, recipe),
        [
            "features",
            weight_files["classification"],
            root / "train",
            "-o",
            tmp_path / "f.safetensors",
        ],
        ["data", "pack", root, tmp_path / "packed"],
        ["data", "check", tmp_path / "packed", "--workers", "1"],
    ):
        code, out, err = run(capsys, *words)
        assert code == 0, err
        assert "\\udc" not in out + err
    classes = load_weights(tmp_path / "run").about["classes"]
    assert classes == ["cat", "d\\xf6g"]


@each_task
def test_images_of_equal_stem_get_separate_results(weight_files, task, tmp_path, capsys):
    Image.fromarray(pixels(50, 40)).save(photos(tmp_path / "photos") / "a.jpg")
    folder = tmp_path / "out"
    words = [tmp_path / "photos", "--weights", weight_files[task], "-o", folder, "--device", "cpu"]
    code, out, _ = run(capsys, "predict", *words)
    assert code == 0
    assert len(out.splitlines()) == 3
    drawn = sorted(path.name for path in folder.glob("*_predicted.jpg"))
    assert drawn == ["a.jpg_predicted.jpg", "a.png_predicted.jpg", "z_predicted.jpg"]


@each_task
def test_equal_class_names_remain_separate_classes(task, tmp_path):
    path = weights(tmp_path)[task]
    stored = load_weights(path)
    stored.about["classes"] = ["crane"] * len(stored.about["classes"])
    save_weights(path, stored.tensors, stored.about)
    chosen = Predictor(path, device="cpu", top=9, score=0.0)
    count = len(stored.about["classes"])
    assert chosen.classes == [f"crane (class {i})" for i in range(count)]
    prediction = chosen(pixels())
    if task == "classification":
        assert len(prediction.scores) == count
        assert sum(prediction.scores.values()) == pytest.approx(1, abs=1e-5)
    elif task == "segmentation":
        assert len(prediction.shares) == np.unique(prediction.labels).size
    else:
        assert len(prediction.counts) == len({o["category_id"] for o in prediction.objects})


def zigzag(side: float, turns: int, size: int = 64) -> list[float]:
    """Return a zigzag polygon."""
    points: list[float] = []
    for i in range(turns):
        points += [-side if i % 2 else side, size * i / turns]
    return points


@pytest.mark.parametrize(
    "polygon", [zigzag(9e6, 40), zigzag(64, 60_000), [-9e6, -9e6, 9e6, -9e6, 9e6, 9e6, -9e6, 9e6]]
)
@pytest.mark.parametrize("area", [True, False], ids=["area given", "area computed"])
def test_polygons_far_outside_or_very_long_take_little_memory(polygon, area, tmp_path, capsys):
    def change(split, content):
        content["annotations"][0]["segmentation"] = [polygon]
        if not area:
            content["annotations"][0].pop("area")

    root = write_coco(tmp_path, change=change)

    def check_and_draw():
        named = "annotations/{split}.json"
        main(["data", "check", str(root), "--annotations", named, "--workers", "1"])
        source = recipe_on_coco(root).data.train_source(0)
        for index in range(len(source)):
            source.instances(index).masks((256, 256))

    assert peak_mb(check_and_draw) < 150


def test_clipping_a_polygon_does_not_change_it_inside_the_image():
    for far in (200.0, 5000.0):
        polygon = [[-far, -far, far, 20.0, 30.0, far]]
        near = rle.codec()
        plain = near.decode(near.merge(near.frPyObjects(polygon, 64, 48)))
        assert np.array_equal(rle.draw(polygon, (64, 48)), plain)
    whole = rle.draw([[-9e6, -9e6, 9e6, -9e6, 9e6, 9e6, -9e6, 9e6]], (20, 30))
    assert whole.all()
    assert not rle.draw([[1e6, 1e6, 2e6, 1e6, 2e6, 2e6]], (20, 30)).any()


def test_annotated_sizes_out_of_bounds_are_rejected(tmp_path):
    for size in ({"width": 10**6}, {"width": 60_000, "height": 60_000}):
        root = write_coco(tmp_path, change=lambda s, c, size=size: c["images"][0].update(size))
        with pytest.raises(ValueError, match="entry 0 of images has"):
            recipe_on_coco(root).data.train_source(0)


@pytest.mark.parametrize("depth", [100_000])
def test_deeply_nested_json_is_an_error(tmp_path, capsys, depth):
    (tmp_path / "a.json").write_text("[" * depth)
    (tmp_path / "val").mkdir()
    words = ["data", "check", tmp_path, "--annotations", "a.json"]
    code, _, err = run(capsys, *words)
    assert code == 1
    assert "a.json is not JSON" in err
    assert "Traceback" not in err


def test_class_numbers_without_images_take_no_memory(tmp_path, capsys):
    write_image_folders(tmp_path)
    (tmp_path / "list.txt").write_text("train/a/0.png 0\ntrain/a/1.png 999999999\n")

    def check():
        code, _, err = run(capsys, "data", "check", tmp_path, "--splits", "list.txt")
        assert code == 1
        assert "numbers up to 999999999" in err
        assert "there is none for '1'" in err

    assert peak_mb(check) < 50


def test_categories_of_equal_name_are_rejected_and_reported(tmp_path, capsys):
    def change(split, content):
        content["categories"][1]["name"] = content["categories"][0]["name"]

    root = write_coco(tmp_path, change=change)
    with pytest.raises(ValueError, match=r"train\.json has the name '.*' twice"):
        recipe_on_coco(root).data.train_source(0)
    named = "annotations/{split}.json"
    code, out, _ = run(capsys, "data", "check", root, "--annotations", named, "--workers", "1")
    assert code == 1
    assert "names of categories that occur twice" in out


def test_masks_of_very_many_objects_are_rejected_before_allocation():
    from pale.data.sources.instances import Instances

    count = 5000
    zeros = np.zeros(count)
    found = Instances((800, 1333), np.zeros((count, 4)), zeros, zeros > 0, zeros, (None,) * count)
    with pytest.raises(ValueError, match="1333x800 with 5000 objects"):
        found.masks()


def write_damaged_files(folder: Path, count: int) -> None:
    """Write images of every format with bytes changed, removed or repeated; FIFOs, long images, bombs, PostScript."""
    rng = np.random.default_rng(0)
    folder.mkdir()
    good = []
    for kind, suffix in (*(("JPEG", "jpg"), ("PNG", "png"), ("WEBP", "webp")), ("GIF", "gif")):
        good.append((kind, suffix, {}))
    good += [("BMP", "bmp", {}), ("TIFF", "tif", {}), ("TIFF", "tiff", {"compression": "tiff_lzw"})]
    for number in range(count):
        kind, suffix, options = good[number % len(good)]
        path = folder / f"{number:04}.{suffix}"
        Image.fromarray(pixels(48, 40)).save(path, kind, **options)
        content = bytearray(path.read_bytes())
        how = number % 5
        if how < 3:  # mostly in the header, where sizes are
            places = rng.integers(0, 60 if how else len(content), 1 + 3 * how)
            for place in places:
                content[place] = rng.integers(256)
        elif how == 3:
            del content[int(rng.integers(len(content))) :]
        else:
            at = int(rng.integers(len(content)))
            content[at:at] = content[: int(rng.integers(len(content)))]
        path.write_bytes(content)
    for number, size in enumerate([(65_000, 1), (1, 65_000), (70_000, 1), (9_000, 9_000)]):
        png(folder / f"size{number}.png", *size, pixels=number < 3)
    (folder / "script.jpg").write_bytes(EPS)
    os.mkfifo(folder / "pipe.jpg")


@pytest.mark.slow
@each_task
@pytest.mark.filterwarnings("default")
def test_two_thousand_hostile_files_are_predicted_or_reported(weight_files, task, tmp_path, capsys):
    write_damaged_files(tmp_path / "files", 2000)
    words = [tmp_path / "files", "--weights", weight_files[task], "--device", "cpu", "--json"]
    log = tmp_path / "log.txt"

    def predict():
        code, out, err = run(capsys, "predict", *words)
        log.write_text(out + "\n---\n" + err)
        assert code == 1

    # 1060 MB were seen: one batch is predicted while the next is decoded and prepared.
    assert peak_mb(predict) < 1250
    out, err = log.read_text().split("\n---\n")
    assert "Traceback" not in err
    done = len(out.splitlines())
    more = int(err.rpartition("pale: and ")[2].split()[0])
    assert done + more + 5 == 2006  # five are named
