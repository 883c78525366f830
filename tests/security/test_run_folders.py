"""Run folders of others: `report`, `eval` and `train --resume` follow no link out of them, and bound what they hold."""

import base64
import io
import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from support.hostile_images import peak_mb
from support.weights import RECIPES

from pale.cli.main import main
from pale.data.sources.scenes import CLASSES
from pale.errors import WeightsError
from pale.train import checkpoint
from pale.train.log import Log
from pale.train.report import write, write_comparison
from pale.weights.write import save_weights

NAMES = {
    "classification": list(CLASSES),
    "segmentation": ["background", *CLASSES],
    "detection": list(CLASSES),
}


def run_with(folder: Path, task: str, **details) -> Path:
    """A run of a task whose evaluation.json holds anything."""
    recipe = RECIPES[task]()
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe.plain()))
    (folder / "evaluation.json").write_text(json.dumps({"classes": NAMES[task]} | details))
    return folder


def detected(**changes) -> dict:
    box = {"bbox": [1, 1, 20, 20], "category_id": 1, "score": 0.5}
    return {"index": 0, "detections": [box | changes]}


def code(size, counts) -> dict:
    return {"segmentation": {"size": size, "counts": counts}}


def encoded(pixels: np.ndarray, cut: int | None = None) -> str:
    content = io.BytesIO()
    Image.fromarray(pixels).save(content, "PNG")
    return base64.b64encode(content.getvalue()[:cut]).decode()


GALLERIES = {
    "a code of a terabyte": ("detection", detected(**code([10**6, 10**6], [10**12]))),
    "a code of another size": ("detection", detected(**code([4096, 4096], [4096 * 4096]))),
    "runs beyond the image": ("detection", detected(**code([48, 48], [10**6, 10**6]))),
    "negative runs": ("detection", detected(**code([48, 48], [-5, 2309]))),
    "characters that are no runs": ("detection", detected(**code([48, 48], "\x01\x02"))),
    "a polygon far outside": ("detection", detected(segmentation=[[0, 0, 1e300, 0, 5, 5]])),
    "a polygon of words": ("detection", detected(segmentation=[["a"] * 6])),
    "a shape that is a word": ("detection", detected(segmentation="shape")),
    "a box of three numbers": ("detection", detected(bbox=[1, 2, 3])),
    "a box of words": ("detection", detected(bbox=["a", "b", "c", "d"])),
    "a box that is not finite": ("detection", detected(bbox=[1, 1, float("inf"), 1])),
    "another category": ("detection", detected(category_id=99)),
    "a category that is a list": ("detection", detected(category_id=[1])),
    "a score that is a word": ("detection", detected(score="high")),
    "detections that are words": ("detection", {"index": 0, "detections": ["a"]}),
    "detections that are a number": ("detection", {"index": 0, "detections": 5}),
    "no detections": ("detection", {"index": 0}),
    "an image that does not exist": ("detection", detected() | {"index": 10**9}),
    "a prediction that is no image": ("segmentation", {"index": 0, "prediction": "AAAA"}),
    "a prediction that is a number": ("segmentation", {"index": 0, "prediction": 5}),
    "a truncated prediction": (
        "segmentation",
        {
            "index": 0,
            "prediction": encoded(np.arange(1024, dtype=np.uint8).reshape(32, 32) * 7, 60),
        },
    ),
    "a prediction in colour": (
        "segmentation",
        {"index": 0, "prediction": encoded(np.zeros((32, 32, 3), np.uint8))},
    ),
    "a prediction of 16 bits": (
        "segmentation",
        {"index": 0, "prediction": encoded(np.full((32, 32), 4000, np.uint16))},
    ),
}


@pytest.mark.parametrize("name", GALLERIES)
def test_a_report_draws_nothing_that_does_not_fit_its_image(name, tmp_path, capsys):
    task, entry = GALLERIES[name]
    run = run_with(tmp_path / "run", task, gallery=[entry])

    def report():
        assert main(["report", str(run)]) == 0
        assert "Traceback" not in capsys.readouterr().err

    assert peak_mb(report, limit_gb=2) < 300
    assert "The images cannot be shown" in (run / "report.html").read_text()


def test_a_report_draws_detections_that_fit_their_image(tmp_path):
    shape = {"size": [48, 48], "counts": [0, 48 * 48]}
    run = run_with(tmp_path / "run", "detection", gallery=[detected(segmentation=shape)])
    page = write(run).read_text()
    assert "cannot be shown" not in page
    assert page.count("data:image/jpeg;base64,") == 1


@pytest.mark.parametrize("field", ["mistakes", "confident_mistakes", "confident_hits", "gallery"])
def test_a_report_embeds_no_more_images_than_an_evaluation_lists(field, tmp_path, capsys):
    entries = [detected() if field == "gallery" else [1.0, 0, 0, 1]] * 5000
    task = "detection" if field == "gallery" else "classification"
    assert main(["report", str(run_with(tmp_path / "run", task, **{field: entries}))]) == 1
    err = capsys.readouterr().err
    assert f"evaluation.json was not written by an evaluation ({field}: " in err
    assert "at most 100 items" in err


@pytest.mark.parametrize("field", ["mistakes", "confident_mistakes", "confident_hits"])
@pytest.mark.parametrize("guess", [-1, 8, 10**30])
def test_a_report_refuses_classes_that_do_not_exist(field, guess, tmp_path, capsys):
    run = run_with(tmp_path / "run", "classification", **{field: [[0.5, 0, 0, guess]]})
    assert main(["report", str(run)]) == 1
    assert "was not written by an evaluation" in capsys.readouterr().err


def test_a_report_reads_no_log_without_a_bound(tmp_path, capsys):
    run = run_with(tmp_path / "run", "classification")
    with (run / "log.jsonl").open("wb") as file:
        file.truncate(2**40)  # takes no disk space
    assert main(["report", str(run)]) == 1
    assert "1099511627776 bytes, a report reads at most 268435456" in capsys.readouterr().err


def test_a_report_bounds_metrics_texts_and_columns(tmp_path, capsys):
    run = run_with(tmp_path / "run", "classification")
    events = [
        {"event": kind, "step": step} | {f"{'m' * 5000}{i}": step + i for i in range(3000)}
        for step in (1, 2)
        for kind in ("step", "eval")
    ]
    (run / "log.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    assert write(run).stat().st_size < 8_000_000
    rows = [{"class": "a"} | {f"column {i}": 1.0 for i in range(500)}]
    run = run_with(tmp_path / "wide", "classification", per_class=rows)
    assert main(["report", str(run)]) == 1
    assert "per_class must have at most 16 columns" in capsys.readouterr().err


def test_a_list_of_words_that_a_run_names_shows_no_other_file(tmp_path):
    secret = tmp_path / "secret.txt"
    secret.write_text("alice hunter2\nn00000001 goldfish\n")
    recipe = RECIPES["classification"]().override({"data.words": str(secret)})
    run = run_with(tmp_path / "run", "classification", classes=["alice", "n00000001"])
    (run / "recipe.yaml").write_text(yaml.safe_dump(recipe.plain()))
    rows = [{"class": name, "images": 1} for name in ("alice", "n00000001")]
    about = {"classes": ["alice", "n00000001"], "per_class": rows}
    (run / "evaluation.json").write_text(json.dumps(about))
    page = write(run).read_text()
    assert "hunter2" not in page
    assert "goldfish" in page


@pytest.fixture
def outside(tmp_path) -> Path:
    path = tmp_path / "outside.txt"
    path.write_text("mine")
    return path


def test_the_log_of_a_run_is_not_written_through_a_link(outside, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / ".log.jsonl").symlink_to(outside)
    (run / "log.jsonl").symlink_to(outside)
    log = Log(run / "log.jsonl", 0)
    log.write("start", step=0)
    log.close()
    assert outside.read_text() == "mine"
    assert not (run / "log.jsonl").is_symlink()


def test_a_comparison_is_not_written_through_a_link(outside, tmp_path):
    runs = [run_with(tmp_path / name, "classification") for name in "ab"]
    (tmp_path / "page.html").symlink_to(outside)
    write_comparison(runs, tmp_path / "page.html")
    assert outside.read_text() == "mine"
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")


def test_a_file_of_a_run_is_not_written_through_a_link(outside, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint.os, "getpid", lambda: 17)
    run = run_with(tmp_path / "run", "classification")
    for name in ("report.html", ".report.html.17"):
        (run / name).symlink_to(outside)
    write(run)
    assert outside.read_text() == "mine"
    assert (run / "report.html").read_text().startswith("<!doctype html>")


@pytest.mark.parametrize("task", ["segmentation", "detection"])
def test_an_evaluation_is_not_written_through_a_link(task, outside, tmp_path):
    run = run_with(tmp_path / "run", task)
    recipe = RECIPES[task]()
    model = recipe.model.build(len(NAMES[task]), recipe.augment.crop or 48)
    about = {"recipe": recipe.plain(), "classes": NAMES[task]}
    save_weights(run / "weights.safetensors", model.state_dict(), about)
    folder = run / "evaluation"
    folder.mkdir()
    names = ["evaluation.json", "evaluation_single.json", "per_class.csv", "detections_bbox.json"]
    for name in (*names, "detections_segm.json"):
        (folder / name).symlink_to(outside)
    assert main(["eval", str(run), "--device", "cpu"]) == 0
    assert outside.read_text() == "mine"
    assert (folder / "per_class.csv").read_text().startswith("class,")


def test_a_compressed_state_of_a_checkpoint_is_not_decompressed(tmp_path):
    torch.save({"step": 1, "x": torch.zeros(30_000_000)}, tmp_path / "large.pt")
    folder = tmp_path / "step_00000001"
    folder.mkdir()
    with (
        zipfile.ZipFile(tmp_path / "large.pt") as source,
        zipfile.ZipFile(folder / "trainer.pt", "w", zipfile.ZIP_DEFLATED) as target,
    ):
        for entry in source.infolist():
            target.writestr(entry.filename, source.read(entry))
    assert (folder / "trainer.pt").stat().st_size < 1_000_000

    def load():
        with pytest.raises(WeightsError, match=r"trainer\.pt is compressed, 12\d+ bytes in"):
            checkpoint.load_trainer(folder, torch.device("cpu"))

    assert peak_mb(load, limit_gb=2) < 50
