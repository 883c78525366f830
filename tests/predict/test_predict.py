"""Predictions: every kind of image, every task, folders with bad files, videos, and what is written."""

import csv
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from support.processes import heed_ctrl_c
from support.weights import TASKS, pixels

import pale
from pale.cli.main import main
from pale.data.reading import UnreadableImageError
from pale.predict import Classified, Detected, Failed, Predictor, Segmented, as_image

each_task = pytest.mark.parametrize("task", TASKS)


def predictor(made: dict[str, Path], task: str, **options) -> Predictor:
    if task == "detection":
        options = {"score": 0.0, "most": 4} | options
    return Predictor(made[task], device="cpu", **options)


def rounded(value):
    """Numbers of JSON to three digits: an image alone and in a batch differ by float rounding."""
    if isinstance(value, dict):
        return {k: rounded(v) for k, v in value.items()}
    if isinstance(value, list):
        return [rounded(v) for v in value]
    return round(value, 3) if isinstance(value, float) else value


def same(one, two, task: str) -> None:
    if task == "classification":
        assert list(one.scores) == list(two.scores)
        assert list(one.scores.values()) == pytest.approx(list(two.scores.values()), abs=1e-5)
    elif task == "segmentation":
        assert (one.labels == two.labels).mean() > 0.999
    else:
        assert [o["category_id"] for o in one.objects] == [o["category_id"] for o in two.objects]
        for a, b in zip(one.objects, two.objects, strict=True):
            assert a["bbox"] == pytest.approx(b["bbox"], abs=1e-2)
            assert a["score"] == pytest.approx(b["score"], abs=1e-4)


class TestImages:
    def test_every_form_of_an_image_gives_the_same_image(self, tmp_path):
        array = pixels()
        image = Image.fromarray(array)
        image.save(tmp_path / "p.png")
        content = (tmp_path / "p.png").read_bytes()
        tensor = torch.from_numpy(array.copy()).permute(2, 0, 1)
        forms = [tmp_path / "p.png", str(tmp_path / "p.png"), content, memoryview(content), image]
        forms += [array, array / 255, tensor, tensor.double() / 255]
        for form in forms:
            assert np.array_equal(np.asarray(as_image(form)), array), type(form)

    def test_grey_transparent_turned_and_four_colour_images_become_rgb(self):
        array = pixels(40, 30)
        grey = Image.fromarray(array).convert("L")
        assert as_image(np.asarray(grey)).mode == "RGB"
        assert as_image(torch.from_numpy(np.array(grey))[None]).size == (40, 30)
        clear = np.dstack([array, np.zeros((30, 40), np.uint8)])
        assert np.asarray(as_image(clear)).min() == 255  # nothing but the white ground
        turned = Image.fromarray(array)
        exif = turned.getexif()
        exif[274] = 6
        file = io.BytesIO()
        turned.save(file, "JPEG", exif=exif, quality=95)
        assert as_image(file.getvalue()).size == (30, 40)
        assert as_image(Image.open(io.BytesIO(file.getvalue()))).size == (30, 40)
        file = io.BytesIO()
        turned.convert("CMYK").save(file, "JPEG")
        assert as_image(file.getvalue()).mode == "RGB"

    @pytest.mark.parametrize(
        ("what", "words"),
        [
            (np.zeros((2, 3, 4, 3), np.uint8), "an array must be"),
            (np.zeros((5, 6, 2), np.uint8), "an array must be"),
            (np.zeros((0, 6, 3), np.uint8), "an array must be"),
            (np.full((5, 6), 1.5), "floats must be from 0 to 1"),
            (np.full((5, 6), np.nan), "floats must be from 0 to 1"),
            (np.zeros((5, 6), np.int32), "must be uint8"),
            (torch.zeros(2, 3, 8, 8), "several images to Predictor.batch"),
            (b"no image", "cannot be read as an image"),
            ("gone.jpg", "there is no such file"),
            (7, "an image must be a path"),
            (["a.jpg"], "got list; give several images to Predictor.batch"),
        ],
    )
    def test_an_unusable_image_is_an_error(self, what, words):
        with pytest.raises(UnreadableImageError, match=words):
            as_image(what)


class TestPredictor:
    @each_task
    @settings(max_examples=4, deadline=None)
    @given(width=st.integers(1, 300), height=st.integers(1, 300))
    def test_any_size(self, made, task, width, height):
        found = predictor(made, task)(pixels(width, height))
        assert found.image.size == (width, height)
        json.dumps(found.plain())
        assert found.words()
        drawn = found.draw()
        if task == "classification":
            assert isinstance(found, Classified)
            assert sum(found.scores.values()) <= 1 + 1e-6
            assert list(found.scores.values()) == sorted(found.scores.values(), reverse=True)
            assert drawn.height > height
        else:
            assert drawn.size == (width, height)
        if task == "segmentation":
            assert isinstance(found, Segmented)
            assert found.labels.shape == (height, width)
            assert sum(found.shares.values()) == pytest.approx(100)
        if task == "detection":
            assert isinstance(found, Detected)
            assert len(found.objects) <= 4
            for entry in found.objects:
                left, top, w, h = entry["bbox"]
                assert left >= -0.01
                assert top >= -0.01
                assert left + w <= width + 0.01
                assert top + h <= height + 0.01

    @each_task
    def test_a_batch_of_mixed_sizes_says_what_each_alone_says(self, made, task):
        chosen = predictor(made, task, batch=2)
        images = [pixels(90, 61), pixels(61, 90), pixels(90, 61), pixels(30, 30), pixels(90, 61)]
        together = chosen.batch(images)
        for image, prediction in zip(images, together, strict=True):
            same(chosen(image), prediction, task)

    @each_task
    def test_a_stream_keeps_order_and_tells_what_fails(self, made, task, tmp_path):
        Image.fromarray(pixels()).save(tmp_path / "good.png")
        (tmp_path / "bad.jpg").write_bytes(b"\xff\xd8 cut short")
        given_ = [
            tmp_path / "good.png",
            tmp_path / "bad.jpg",
            pixels(20, 50),
            tmp_path / "gone.png",
        ]
        given_ += [tmp_path / "good.png"] * 5
        found = list(predictor(made, task, batch=3).stream(iter(given_)))
        assert [isinstance(f, Failed) for f in found] == [False, True, False, True] + [False] * 5
        assert [f.name for f in found[:2]] == [
            str(tmp_path / "good.png"),
            str(tmp_path / "bad.jpg"),
        ]
        assert "cannot be read" in found[1].reason
        assert "no such file" in found[3].reason
        same(found[0], found[-1], task)

    def test_nothing_is_read_far_ahead(self, made):
        taken = 0

        def endless():
            nonlocal taken
            while True:
                taken += 1
                yield pixels(20, 20)

        stream = predictor(made, "classification", batch=2).stream(endless())
        for _ in range(6):
            next(stream)
        stream.close()
        assert taken <= 12

    def test_a_model_and_a_name_can_be_used_too(self):
        model = pale.create_model("pale_nano", num_classes=3)
        found = Predictor(model, device="cpu", top=2)(pixels())
        assert set(found.scores) <= {"class 0", "class 1", "class 2"}
        assert len(found.scores) == 2
        assert not Predictor("pale_nano", device="cpu").loaded.trained

    def test_wishes_that_do_not_fit_are_told(self, made):
        with pytest.raises(ValueError, match="is for classification, not segmentation"):
            Predictor(made["classification"], "segmentation")
        with pytest.raises(ValueError, match="task must be one of"):
            Predictor(made["classification"], "regression")
        with pytest.raises(ValueError, match="slide is an option of segmentation"):
            Predictor(made["detection"], slide=True)
        with pytest.raises(ValueError, match="own_size is an option of segmentation and detection"):
            Predictor(made["classification"], own_size=True)
        with pytest.raises(ValueError, match="top must be at least 1, got 0"):
            Predictor(made["classification"], top=0)

    def test_own_size_and_windows_change_how_a_segmenter_looks(self, made):
        plain, own = (predictor(made, "detection", own_size=o) for o in (False, True))
        assert own.loaded.pipeline.test.short is None
        assert plain.loaded.pipeline.test.short is not None
        test = predictor(made, "segmentation", slide=True, multi=True).loaded.pipeline.test
        assert (test.mode, test.flip, len(test.scales)) == ("slide", True, 5)


class TestCommand:
    def run(self, capsys, *words) -> tuple[int, str, str]:
        code = main(["predict", *(str(w) for w in words), "--device", "cpu"])
        return code, *capsys.readouterr()

    @each_task
    def test_a_folder_with_bad_files_is_done_to_its_end(self, made, task, tmp_path, capsys):
        photos = tmp_path / "photos"
        (photos / "sub").mkdir(parents=True)
        Image.fromarray(pixels()).save(photos / "a.png")
        Image.fromarray(pixels(33, 80)).save(photos / "sub/b.jpg")
        (photos / "c.jpg").write_text("not an image")
        out = tmp_path / "out"
        words = [photos, "--weights", made[task], "-o", out, "--score", "0", "--task", task]
        code, printed, noted = self.run(capsys, *words)
        assert code == 1
        assert "c.jpg: cannot be read as an image" in noted
        assert "written: 2 of 3 images" in noted
        assert len(printed.splitlines()) == 2
        lines = [json.loads(line) for line in (out / "predictions.jsonl").read_text().splitlines()]
        assert [line["picture"] for line in lines] == [
            str(photos / "a.png"),
            str(photos / "sub/b.jpg"),
        ]
        rows = list(csv.DictReader((out / "predictions.csv").read_text().splitlines()))
        assert {row["picture"] for row in rows} <= {line["picture"] for line in lines}
        assert (out / "a_predicted.jpg").is_file()
        assert (out / "sub/b_predicted.jpg").is_file()
        assert (out / "sub/b_mask.png").is_file() == (task == "segmentation")
        if task == "detection":
            content = json.loads((out / "objects.json").read_text())
            assert [i["id"] for i in content["images"]] == [1, 2]
            assert len(content["annotations"]) == len(rows)
        api = predictor(made, task, most=None)(photos / "a.png").plain()
        assert rounded(lines[0]) == rounded(json.loads(json.dumps(api)))

    def test_json_has_one_line_per_image(self, made, tmp_path, capsys):
        Image.fromarray(pixels()).save(tmp_path / "a.png")
        words = [tmp_path / "a.png", "--weights", made["classification"], "--json", "--top", "2"]
        code, printed, _ = self.run(capsys, *words)
        assert code == 0
        assert [c["class"] for c in json.loads(printed)["classes"]] == list(
            predictor(made, "classification", top=2)(pixels()).scores
        )
        assert sorted(p.name for p in tmp_path.iterdir()) == ["a.png"]

    def test_a_video_becomes_lines_and_a_film(self, made, tmp_path, capsys):
        av = pytest.importorskip("av", reason="videos need the extra video")
        from pale.predict.video import VideoWriter, frames

        clip = tmp_path / "clip.mp4"
        from fractions import Fraction

        with VideoWriter(clip, Fraction(10)) as film:
            for i in range(7):
                film.add(Image.fromarray(np.roll(pixels(64, 48), 5 * i, 1)))
        assert [f.number for f in frames(clip, 3)] == [0, 3, 6]
        out = tmp_path / "out"
        words = [clip, "--weights", made["segmentation"], "-o", out, "--every", "3"]
        code, printed, _ = self.run(capsys, *words)
        assert code == 0
        assert printed.count("clip.mp4, ") == 3
        lines = [json.loads(line) for line in (out / "predictions.jsonl").read_text().splitlines()]
        assert [line["frame"] for line in lines] == [0, 3, 6]
        assert [line["seconds"] for line in lines] == pytest.approx([0, 0.3, 0.6])
        with av.open(str(out / "clip_predicted.mp4")) as film:
            assert len(list(film.decode(video=0))) == 3
        clip.write_bytes(clip.read_bytes()[:300])
        code, _, noted = self.run(capsys, *words)
        assert code == 1
        assert "cannot be read as a video" in noted

    @pytest.mark.slow
    def test_ctrl_c_keeps_what_is_done(self, made, tmp_path):
        photos = tmp_path / "photos"
        photos.mkdir()
        for i in range(400):
            Image.fromarray(pixels(300, 300)).save(photos / f"{i:04}.png")
        out = tmp_path / "out"
        words = [photos, "--weights", made["segmentation"], "-o", out, "--device", "cpu"]
        command = [sys.executable, "-m", "pale", "predict", *map(str, words)]
        with subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=heed_ctrl_c,
        ) as process:
            lines = out / "predictions.jsonl"
            for _ in range(600):
                if lines.is_file() and lines.stat().st_size > 0:
                    break
                time.sleep(0.1)
            os.kill(process.pid, signal.SIGINT)
            _, noted = process.communicate(timeout=60)
        assert process.returncode == 130
        assert "interrupted after" in noted
        assert "Traceback" not in noted
        done = [json.loads(line) for line in lines.read_text().splitlines()]
        assert 0 < len(done) < 400


@pytest.mark.parametrize("ahead", [True, False], ids=["ahead", "between batches"])
def test_a_stream_keeps_the_order_and_decodes_ahead_only_beside_the_model(
    made, tmp_path, monkeypatch, ahead
):
    paths = [tmp_path / f"{i}.png" for i in range(13)]
    for i, path in enumerate(paths):
        Image.new("RGB", (40 + i, 30)).save(path)
        if i % 5 == 4:
            path.write_bytes(b"no image")
    chosen = predictor(made, "classification", batch=4)
    monkeypatch.setattr("pale.predict.predictor._cores", lambda: 64 if ahead else 1)
    predict, read = chosen._predict, chosen.prepare
    working, overlaps = threading.Event(), []

    def slow(*args):
        working.set()
        time.sleep(0.05)
        working.clear()
        return predict(*args)

    def prepare(image):
        time.sleep(0.01)
        overlaps.append(working.is_set())
        return read(image)

    monkeypatch.setattr(chosen, "_predict", slow)
    monkeypatch.setattr(chosen, "prepare", prepare)
    found = list(chosen.stream(paths))
    assert [each.name for each in found] == [str(path) for path in paths]
    assert [isinstance(each, Failed) for each in found] == [i % 5 == 4 for i in range(13)]
    assert any(overlaps) or not ahead
    assert ahead or not any(overlaps)
