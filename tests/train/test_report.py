import json
import re
import shutil
import signal
from html.parser import HTMLParser

import pytest
import torch
from support.datasets import write_image_folders
from support.recipes import classification_recipe, segmentation_recipe

from pale.cli.main import main
from pale.errors import RunError
from pale.train import report
from pale.train.distributed import World
from pale.train.log import read
from pale.train.loop import Trainer, train
from pale.train.report import write, write_comparison

ALONE = World(torch.device("cpu"))


class Page(HTMLParser):
    """Text, tags and tables of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self.tags: list[str] = []
        self.tables: list[list[list[str]]] = []
        self.cell: list[str] | None = None
        self.images = 0
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.images += tag == "img" and dict(attrs)["src"].startswith("data:image/jpeg;base64,")
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.cell = []
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag):
        if tag == "table":
            self.cell = None

    def handle_data(self, data):
        self.words.append(data)
        if self.cell is not None:
            self.cell.append(data)
            self.tables[-1][-1][-1] = " ".join("".join(self.cell).split())

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def table(self, *head: str) -> list[list[str]]:
        """Rows of the table with these columns first."""
        return next(t[1:] for t in self.tables if tuple(t[0][: len(head)]) == head)


def page_of(path) -> Page:
    return Page(path.read_text())


def events(run, kind):
    return [entry for entry in read(run / "log.jsonl") if entry["event"] == kind]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report") / "run"
    recipe = classification_recipe(reported={"top1": 83.4}, about="Less < more.")
    train(recipe, folder, ALONE, quiet=True)
    return folder


@pytest.fixture
def copied(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    return tmp_path / "run"


def test_a_run_ends_with_a_report_that_holds_everything(run):
    page = page_of(run / "report.html")
    for text in (
        "Less < more.",
        "finished, 9 of 9 steps",
        "reported 83.4",
        "validation top-1",
        "training loss",
        "learning rate",
        "images/s",
        "One epoch has 2.75 steps",
        "Most frequent confusions",
        torch.__version__,
        "weight_decay: 0.05",
    ):
        assert text in page.text, text
    last = events(run, "eval")[-1]
    wrong = round(12 * (1 - last["top1"] / 100))
    assert page.images == 12
    assert wrong > 0
    assert page.text.count("predicted ") == wrong
    assert "://" not in (run / "report.html").read_text()
    assert "None" not in page.text


def test_the_figures_on_the_page_are_those_of_the_log(run):
    page, found = page_of(run / "report.html"), events(run, "eval")
    rows = {row[0]: row[1:] for row in page.table("validation", "last", "best")}
    for name, title in (("top1", "top-1 %"), ("top5", "top-5 %")):
        best = max(event[name] for event in found)
        first = next(event["step"] for event in found if event[name] == best)
        reported = "83.4" if name == "top1" else ""
        expected = [f"{found[-1][name]:.2f}", f"{best:.2f}", str(first), reported]
        assert rows[title] == expected
    assert rows["images"][0] == "12"
    assert float(rows["loss"][0]) == pytest.approx(found[-1]["loss"], rel=1e-3)
    losses = [event["loss"] for event in events(run, "step")]
    assert f"last {losses[-1]:.4g}, {min(losses):.4g} to {max(losses):.4g}" in page.text


def test_the_tables_of_classes_and_confusions_are_those_of_the_matrix(run):
    page, details = page_of(run / "report.html"), json.loads((run / "evaluation.json").read_text())
    matrix, classes = torch.tensor(details["confusion"]), details["classes"]
    rows = page.table("", *classes)
    for i, row in enumerate(rows):
        assert row == [classes[i], *(str(n) if n else "" for n in matrix[i].tolist())]
    by_accuracy = page.table("class", "images", "accuracy, % ▲")
    shown = [float(row[2]) for row in by_accuracy if row[2] != "-"]
    assert shown == sorted(shown)
    assert len(by_accuracy) == len(classes)
    for name, images, accuracy, precision in by_accuracy:
        i = classes.index(name)
        assert int(images) == matrix[i].sum()
        for cell, total in ((accuracy, matrix[i].sum()), (precision, matrix[:, i].sum())):
            assert cell == (f"{100 * matrix[i, i] / total:.1f}" if total else "-")
    counts = [int(row[1]) for row in page.table("class", "images ▼")]
    assert counts == sorted(counts, reverse=True)
    names = [row[0] for row in page.table("class ▲")]
    assert names == sorted(names)


def test_a_metric_that_no_task_knows_has_a_row_and_a_curve(copied):
    with (copied / "log.jsonl").open("a") as file:
        for step in (10, 11):
            sources = {"pets": {"top1": 40.0 + step}, "flowers": {"spread": 0.5 * step}}
            event = {"event": "eval", "step": step, "top1": 50.0, "ap_small": 4.25, "per": sources}
            file.write(json.dumps(event) + "\n")
    page = page_of(write(copied))
    rows = {row[0]: row[1] for row in page.table("validation", "last")}
    assert rows["ap_small"] == "4.25"
    assert rows["per.pets: top-1 %"] == "51.00"
    assert rows["per.flowers.spread"] == "5.5"
    assert "validation per.pets: top-1" in page.text
    assert "validation per.flowers.spread" in page.text
    assert "validation ap_small" not in page.text  # it never changes


def test_counts_are_written_in_full_and_unknown_facts_left_out(copied):
    with (copied / "log.jsonl").open("a") as file:
        start = {"event": "start", "steps": 400_000, "commit": None, "device": "cpu"}
        file.write(json.dumps(start) + "\n")
        file.write(json.dumps({"event": "eval", "step": 123_456, "images": 10_000.0}) + "\n")
    page = page_of(write(copied))
    assert "123,456 of 400,000 steps" in page.text
    assert ["images", "10,000"] in [row[:2] for row in page.table("validation", "last")]
    assert not re.search(r"\de\+", page.text)
    assert "commit" not in [row[0] for table in page.tables for row in table]
    assert "None" not in page.text


def test_a_run_that_has_just_started_has_a_report(run, tmp_path, capsys):
    shutil.copy(run / "recipe.yaml", tmp_path)
    assert main(["report", str(tmp_path)]) == 0
    assert "report.html written" in capsys.readouterr().out
    assert "not evaluated yet" in page_of(tmp_path / "report.html").text
    assert main(["report", str(tmp_path / "nowhere")]) == 1
    assert "is not a run" in capsys.readouterr().err


def test_the_steps_to_do_are_those_of_the_last_start(tmp_path):
    train(classification_recipe(epochs=1), tmp_path, ALONE, quiet=True)
    train(classification_recipe(epochs=2), tmp_path, ALONE, resume=True, quiet=True)
    page = page_of(tmp_path / "report.html")
    assert "6 of 6 steps" in page.text
    assert "started 2 times" in page.text


@pytest.mark.parametrize("which", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("step", [2, 5], ids=["before the first evaluation", "after it"])
def test_a_run_that_is_stopped_leaves_a_report(which, step, tmp_path, monkeypatch):
    make_step = Trainer.make_step

    def interrupted(trainer, iterator):
        if trainer.state.step == step - 1:
            signal.raise_signal(which)
        return make_step(trainer, iterator)

    monkeypatch.setattr(Trainer, "make_step", interrupted)
    outcome = train(classification_recipe(), tmp_path, ALONE, quiet=True)
    assert (outcome.signal, outcome.step) == (which, step)
    page = page_of(tmp_path / "report.html")
    assert f"stopped by {which.name}, {step} of 9 steps" in page.text
    assert ("not evaluated yet" in page.text) == (step == 2)
    assert (page.images == 12) == (step == 5)


def test_a_report_that_cannot_be_written_does_not_fail_the_run(tmp_path, monkeypatch, capsys):
    def fail(run, task):
        raise RunError("the log is too long")

    monkeypatch.setattr(report, "write", fail)
    assert train(classification_recipe(), tmp_path, ALONE).exit_code == 0
    assert "no report: the log is too long; write it later with" in capsys.readouterr().out


def test_a_report_without_the_dataset_leaves_out_only_the_images(run, tmp_path):
    for name in ("log.jsonl", "evaluation.json"):
        shutil.copy(run / name, tmp_path)
    recipe = (run / "recipe.yaml").read_text().replace("kind: scenes", "kind: folder")
    (tmp_path / "recipe.yaml").write_text(recipe)
    page = page_of(write(tmp_path))
    assert "The images cannot be shown: data.root is not set" in page.text
    assert "training loss" in page.text


def test_what_differs_from_the_recipe_comes_before_all_settings(run):
    page = page_of(run / "report.html")
    rows = {row[0]: row[1:] for row in page.table("setting", "recipe", "this run")}
    assert rows["epochs"] == ["2", "3"]
    assert rows["ema"] == ["null", "0.9"]
    assert "seed" not in rows
    assert page.text.index("Settings that differ") < page.text.index("All settings as YAML")
    text = (run / "report.html").read_text()
    assert "<details><summary>All settings as YAML</summary><pre>" in text


def test_a_recipe_of_another_name_has_no_settings_that_differ(copied):
    path = copied / "recipe.yaml"
    path.write_text(path.read_text().replace("name: quickstart", "name: mine"))
    assert "mine is not a recipe of this package" in page_of(write(copied)).text


def test_wordnet_ids_are_shown_by_their_names(tmp_path):
    write_image_folders(tmp_path / "data", "n01443537", "n02012849", "n03126707", "other")
    words = "n01443537\tgoldfish, Carassius auratus\nn02012849\tcrane\nn03126707\tcrane\n"
    (tmp_path / "data/words.txt").write_text(words)
    changes = {"data__kind": "folder", "data__root": str(tmp_path / "data"), "batch": 2}
    recipe = classification_recipe(**changes, epochs=1, warmup_epochs=0, data__workers=0)
    train(recipe, tmp_path / "run", ALONE, quiet=True)
    page = page_of(tmp_path / "run/report.html")
    names = {"goldfish", "crane (n02012849)", "crane (n03126707)", "other"}
    assert {row[0] for row in page.table("class ▲")} == names
    assert "n01443537" not in page.text.partition("Environment")[0]
    evaluation = json.loads((tmp_path / "run/evaluation.json").read_text())
    assert "n01443537" in evaluation["classes"]


def test_masks_have_the_worst_images_before_the_best(tmp_path):
    train(segmentation_recipe(), tmp_path, ALONE, quiet=True)
    page = page_of(tmp_path / "report.html")
    assert page.images == 5
    assert page.text.index("Worst images") < page.text.index("Best images")
    scores = [float(word) for word in _after(page.text, "mIoU ", " %")]
    assert scores[:2] == sorted(scores[:2])
    assert max(scores[:2]) <= min(scores[2:])
    assert "per cent of the pixels" in page.text or "number of pixels" in page.text


def _after(text, start, end):
    part = text[text.index("Worst images") : text.index("Environment")]
    return [piece.partition(end)[0] for piece in part.split(start)[1:]]


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    folder = tmp_path_factory.mktemp("other") / "lower"
    recipe = classification_recipe(optim__lr=0.001, epochs=2)
    train(recipe, folder, ALONE, quiet=True)
    return folder


def test_a_comparison_shows_what_differs_and_the_curves_together(run, other, tmp_path, capsys):
    path = tmp_path / "both.html"
    assert main(["report", str(run), str(other), "-o", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"report": str(path)}
    page = page_of(path)
    settings = {row[0]: row[1:] for row in page.table("setting", "run", "lower")}
    assert settings == {"epochs": ["3", "2"], "optim.lr": ["0.01", "0.001"]}
    results = {row[0]: row[1:] for row in page.table("", "run", "lower")}
    assert results["recipe"] == ["quickstart", "quickstart"]
    best = [max(e["top1"] for e in events(each, "eval")) for each in (run, other)]
    assert results["top-1 % best"] == [f"{best[0]:.2f} reported 83.4", f"{best[1]:.2f}"]
    assert results["state"] == ["finished, 9 of 9 steps", "finished, 6 of 6 steps"]
    text = path.read_text()
    charts = text.split("<figure class=chart>")[1:]
    loss = next(chart for chart in charts if "<b>training loss</b>" in chart)
    assert loss.count("<polyline") == 4  # two curves, two in the legend
    last = [events(each, "step")[-1]["loss"] for each in (run, other)]
    assert [f"last {value:.4g}" in loss for value in last] == [True, True]
    assert "Classes that differ most" in page.text


def test_runs_of_one_name_are_told_apart_by_their_paths(run, copied, tmp_path):
    page = page_of(write_comparison([run, copied], tmp_path / "page.html"))
    assert "None: all settings are equal." in page.text
    assert [str(run), str(copied)] in [table[0][1:] for table in page.tables]


def test_runs_with_other_batches_are_compared_over_epochs(run, copied, tmp_path):
    path = copied / "recipe.yaml"
    path.write_text(path.read_text().replace("\nbatch: 8\n", "\nbatch: 4\n"))
    text = write_comparison([run, copied], tmp_path / "page.html").read_text()
    assert "training loss, loss over epoch" in text
    assert "over step" not in text


def test_an_output_for_one_run_and_too_many_runs_are_errors(run, capsys):
    assert main(["report", str(run), "-o", "page.html"]) == 1
    assert "--output names the page that compares several runs" in capsys.readouterr().err
    assert main(["report", *[str(run)] * 17]) == 1
    assert "at most 16 runs, got 17" in capsys.readouterr().err
