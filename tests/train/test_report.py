import shutil
from html.parser import HTMLParser

import pytest
import torch

from pale.cli import main
from pale.train.distributed import World
from pale.train.loop import train
from pale.train.report import curve, write

from .tiny import tiny


class Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self.tags: list[str] = []
        self.pictures = 0
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.pictures += tag == "img" and dict(attrs)["src"].startswith("data:image/jpeg;base64,")

    def handle_data(self, data):
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def test_a_figure_that_an_earlier_evaluation_lacks_is_shown(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    with (tmp_path / "run/log.jsonl").open("a") as file:
        file.write('{"event": "eval", "step": 9, "epoch": 3, "top1": 50.0, "ap_small": 4.25}\n')
    assert "ap_small 4.25" in Page(write(tmp_path / "run").read_text()).text


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report") / "run"
    recipe = tiny(reported={"top1": 83.4}, about="Less < more.")
    train(recipe, folder, World(torch.device("cpu")), quiet=True)
    return folder


def test_a_run_ends_with_a_report_that_holds_everything(run):
    page = Page((run / "report.html").read_text())
    for text in (
        "Less < more.",
        "9 of 9 steps",
        "the paper 83.4",
        "training loss:",
        "validation top-1",
        "learning rate:",
        "taken for",
        torch.__version__,
        "weight_decay: 0.05",
    ):
        assert text in page.text, text
    assert page.tags.count("polyline") == 5
    assert page.tags.count("rect") == 64
    wrong = round(12 * (1 - _top1(run) / 100))
    assert page.pictures == wrong > 0
    assert "http" not in (run / "report.html").read_text()


def _top1(run):
    from pale.train.log import read

    return [e["top1"] for e in read(run / "log.jsonl") if e["event"] == "eval"][-1]


def test_a_report_can_be_had_of_a_run_that_has_only_begun(run, tmp_path, capsys):
    shutil.copy(run / "recipe.yaml", tmp_path)
    assert main(["report", str(tmp_path)]) == 0
    assert "report.html written" in capsys.readouterr().out
    assert "not evaluated yet" in Page((tmp_path / "report.html").read_text()).text
    assert main(["report", str(tmp_path / "nowhere")]) == 1
    assert "is no run" in capsys.readouterr().err


def test_the_steps_to_do_are_those_of_the_last_start(tmp_path):
    world = World(torch.device("cpu"))
    train(tiny(epochs=1), tmp_path, world, quiet=True)
    train(tiny(epochs=2), tmp_path, world, resume=True, quiet=True)
    assert "6 of 6 steps" in Page((tmp_path / "report.html").read_text()).text


def test_data_that_has_moved_leaves_out_the_pictures_alone(run, tmp_path):
    for name in ("log.jsonl", "evaluation.json"):
        shutil.copy(run / name, tmp_path)
    recipe = (run / "recipe.yaml").read_text().replace("kind: scenes", "kind: folder")
    (tmp_path / "recipe.yaml").write_text(recipe)
    page = Page(write(tmp_path).read_text())
    assert "The pictures cannot be shown: data.root is not set" in page.text
    assert "training loss:" in page.text


def test_a_curve_passes_through_its_corners():
    figure = curve("x", [(0, 0), (10, 5)], w=112, h=62)
    assert "points='6.0,56.0 106.0,6.0 106.0,6.0'" in figure
    assert "0 to 5, last 5; steps 0 to 10" in figure
    assert "nan" not in curve("x", [(3, 1)])
