"""The page of the demo: with weights and without, linked to the files beside it."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from PIL import Image
from support.recipes import classification_recipe
from support.weights import weights

from pale.cli.main import main
from pale.predict import Predictor
from pale.train.distributed import World
from pale.train.loop import train
from pale.view.demo import PHOTO, predictions, write
from pale.weights import zoo


class Links(HTMLParser):
    """Links of a page and the number of its images."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.images = 0
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        if tag == "a":
            self.links.append(given["href"])
        if tag == "img":
            assert given["src"].startswith("data:")
            self.images += 1


FIGURES = {
    "classification": {"top1": 51.5},
    "segmentation": {"miou": 61.5},
    "detection": {"box_ap": 31.5, "mask_ap": 21.5},
}


@pytest.fixture
def box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Weights of the three tasks in place of the packaged ones."""
    folder = tmp_path / "zoo"
    folder.mkdir()
    listed = []
    for task, path in weights(folder).items():
        named = {"name": f"small_{task}", "task": task, "model": "pale_nano", "file": path.name}
        numbers = {"bytes": path.stat().st_size, "sha256": zoo.file_sha256(path), "params": 12_345}
        figures = FIGURES[task] | {"images": 100.0}
        listed.append(
            zoo.ZooEntry(
                **named, card="none.md", **numbers, classes=9, figures=figures, data="scenes"
            )
        )
    zoo.write_index(listed, folder)
    monkeypatch.setattr(zoo.index, "FOLDER", folder)
    return folder


def test_weights_of_three_tasks_and_a_run_are_shown(box, tmp_path):
    output = tmp_path / "demo"
    train(classification_recipe(), output / "quickstart", World(torch.device("cpu")), quiet=True)
    text = write(output, run=output / "quickstart").read_text()
    found = Links(text)
    assert found.images == 5  # three predictions, the sheet, the pales
    assert found.links == ["attention.html", "quickstart/report.html"]
    assert all((output / link).is_file() for link in found.links)
    assert "top-1 51.5 on scenes" in text
    assert "mIoU 61.5" in text
    assert "box AP 31.5, mask AP 21.5" in text
    assert "accuracy on new images" in text


def test_the_page_opens_with_right_predictions_and_shows_a_failure(tmp_path):
    found = {each.entry.task: each for each in predictions(PHOTO)}
    assert found["detection"].prediction.words() == "1 cat"
    right = {task: each.is_right for task, each in found.items()}
    assert right == {"classification": False, "segmentation": True, "detection": True}
    text = write(tmp_path).read_text()
    opening, limits, rest = re.split("<h2>Limits|<h2>Attention of one token", text)
    assert opening.index("1 cat") < opening.index("pet 66.1 %")
    breeds = found["classification"].prediction.words()
    assert breeds not in opening
    assert breeds in limits
    (entry,) = (each for each in zoo.list_entries() if each.name == "classify_pets")
    assert f"top-1 {entry.figures['top1']:.1f}" in limits
    # The attention is that of a model whose prediction is right, and no class has two scores on the page.
    assert "detect_pets, trained weights" in rest
    assert breeds == Predictor("classify_pets", device="cpu")(PHOTO).words()


def test_another_photo_keeps_all_predictions_and_the_failure_of_the_example(box, tmp_path):
    Image.new("RGB", (60, 40), "green").save(tmp_path / "green.png")
    text = write(tmp_path / "out", tmp_path / "green.png").read_text()
    opening, limits, _ = re.split("<h2>Limits|<h2>Attention of one token", text)
    assert opening.count("<figure>") == 3
    assert ("the example photo shows a cat" in limits) == ("<figure>" in limits)
    assert "the photo above" not in limits


def test_without_weights_the_page_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(zoo.index, "FOLDER", tmp_path)
    Image.new("RGB", (60, 40), "green").save(tmp_path / "green.png")
    words = ["demo", "-o", str(tmp_path / "out"), "--photo", str(tmp_path / "green.png")]
    assert main([*words, "--no-training", "--json"]) == 0
    path = Path(json.loads(capsys.readouterr().out)["page"])
    text = path.read_text()
    assert "This installation contains no weights" in text
    assert "untrained" in text
    assert Links(text).images == 2
    assert "scikit-image" not in text  # another photo has another author


def test_a_photo_that_is_not_there(tmp_path, capsys):
    assert main(["demo", "-o", str(tmp_path), "--photo", "gone.jpg"]) == 1
    assert "there is no photo gone.jpg" in capsys.readouterr().err
