"""Text from hostile files is escaped before it reaches terminals, pages and spreadsheets."""

from __future__ import annotations

import ast
import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from support.datasets import write_image_folders
from support.recipes import classification_recipe
from support.weights import weights

import pale
from pale.cli.main import format_warning, main
from pale.core.escaping import content_policy, csv_cell, escape_html, escape_line, escape_message
from pale.train.log import Display, Log, read
from pale.weights.read import PickleWarning
from pale.weights.write import save_weights

ESCAPE = "\x1b]0;owned\x07\x1b[2J"
HOSTILE = f"cat\n{ESCAPE}\r\u202egpj.exe\x9b31m"
MARKUP = "[bold red]x[/bold red] [link=file:///etc/passwd]y[/link] :smile:"
CONTROLS = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\u2028\u2029\ud800-\udfff]"
)


def clean(text: str) -> bool:
    return not CONTROLS.search(text)


class TestTerminal:
    @given(st.text(st.characters(codec=None)))
    def test_any_text_becomes_one_line_without_controls(self, text: str) -> None:
        assert clean(escape_line(text))
        assert "\n" not in escape_line(text)
        escape_line(text).encode()

    def test_plain_text_of_any_language_is_unchanged(self) -> None:
        for text in ("Küche, 台所, キッチン", "a\\n", "👩‍🍳", "مطبخ"):
            assert escape_line(text) == text

    def test_control_characters_are_shown_as_escapes(self) -> None:
        assert escape_line("a\x1b[2J\nb\udc80") == "a\\x1b[2J\\nb\\udc80"

    def test_a_newline_in_a_name_does_not_start_a_message(self) -> None:
        assert escape_message("pale: no cat\npale: done") == "pale: no cat\n  pale: done"


class TestCsv:
    @pytest.mark.parametrize("name", ["=1+1", "+a", "-a", "@SUM(A1)", "\tx", "\rx", "\nx", "＝1"])  # noqa: RUF001
    def test_a_formula_is_escaped(self, name: str) -> None:
        assert csv_cell(name) == f"'{name}"

    @pytest.mark.parametrize("value", ["cat", "", "-1.50", "+2", "1e-5", -1.5, 7, None])
    def test_names_and_numbers_are_unchanged(self, value: Any) -> None:
        assert csv_cell(value) == value

    @pytest.mark.parametrize("value", ["-1+cmd|' /C calc'!A0", "-1\n=1", "+1e5x", "-٣"])
    def test_text_that_only_starts_like_a_number_is_escaped(self, value: str) -> None:
        assert csv_cell(value).startswith("'")


class TestHtml:
    def test_text_cannot_close_attributes_and_elements(self) -> None:
        assert escape_html("'\"<&>") == "&#x27;&quot;&lt;&amp;&gt;"
        escape_html("\ud800\x00").encode()

    def test_the_policy_allows_only_the_hashed_scripts(self) -> None:
        assert "script-src 'none'" in content_policy()
        # echo -n 'alert(1)' | openssl dgst -sha256 -binary | base64
        assert "script-src 'sha256-bhHHL3z2vDgxUt0W3dWQOrprscmda2Y5pLsLg4GF+pI='" in content_policy(
            ["alert(1)"]
        )


def hostile_weights(folder: Path, name: str) -> Path:
    """Write a classifier whose classes have this name."""
    recipe = classification_recipe()
    model = recipe.model.build(2, recipe.data.size)
    about = {"recipe": recipe.plain(), "classes": [f"{name} 0", f"{name} 1"]}
    path = folder / "hostile.safetensors"
    save_weights(path, model.state_dict(), about)
    return path


def photo(path: Path) -> Path:
    Image.new("RGB", (40, 30), (90, 60, 30)).save(path, "PNG")
    return path


class TestCommands:
    def test_names_of_files_and_classes_in_predictions(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        image = photo(tmp_path / f"{HOSTILE}.png".replace("/", ""))
        made = hostile_weights(tmp_path, f"={HOSTILE}")
        words = ["predict", str(image), "--weights", str(made), "-o", str(tmp_path / "out")]
        assert main(words) == 0
        out, err = capsys.readouterr()
        assert clean(out)
        assert clean(err)
        assert len(out.splitlines()) == 1
        assert "owned" in out
        with (tmp_path / "out/predictions.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert {row["class"][:2] for row in rows} == {"'="}

    def test_names_in_errors_and_warnings(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        broken = tmp_path / f"{HOSTILE}.jpg"
        broken.write_bytes(b"no image")
        made = hostile_weights(tmp_path, "cat")
        assert main(["predict", str(broken), "--weights", str(made)]) == 1
        assert main(["predict", str(tmp_path / f"none{HOSTILE}"), "--weights", str(made)]) == 1
        assert main(["report", str(tmp_path / f"none{HOSTILE}")]) == 1
        with pytest.raises(SystemExit):
            main(["cost", "pale_tiny", f"--{HOSTILE}"])
        err = capsys.readouterr().err
        assert clean(err)
        forged = [line for line in err.splitlines() if not line.startswith(("pale", "usage", " "))]
        assert forged == []

    @pytest.mark.parametrize("category", [UserWarning, PickleWarning])
    def test_warnings(self, category: type[Warning]) -> None:
        text = format_warning(HOSTILE, category, "file.py", 3)
        assert "owned" in text
        assert clean(text)
        assert all(line.startswith("  ") for line in text.splitlines()[1:])

    def test_a_traceback_of_a_library(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from pale.cli import train as cli_train

        def outside(args: Any) -> None:
            exec("raise RuntimeError(text)", {"text": HOSTILE})

        monkeypatch.setattr(cli_train.Recipes, "run", outside)
        assert main(["recipes"]) == 1
        err = capsys.readouterr().err
        assert "Traceback" in err
        assert clean(err)

    def test_classes_and_files_in_a_check_of_data(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        write_image_folders(tmp_path)
        for split in ("train", "val"):
            (tmp_path / split / "a").rename(
                tmp_path / split / f"{HOSTILE}{MARKUP}".replace("/", "")
            )
        (tmp_path / "train" / "b" / f"{HOSTILE}.jpg").write_bytes(b"no image")
        assert main(["data", "check", str(tmp_path)]) == 1
        out = capsys.readouterr().out
        assert "owned" in out
        assert clean(out)

    def test_classes_in_tables_of_masks(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        for split in ("train", "val"):
            for kind in ("images", "masks"):
                (tmp_path / kind / split).mkdir(parents=True)
            photo(tmp_path / "images" / split / "a.png")
            Image.new("L", (40, 30), 1).save(tmp_path / "masks" / split / "a.png")
        classes = f"0 ground 0 0 0\n1 {MARKUP.replace(' ', '_')}{ESCAPE} 255 0 0\n"
        (tmp_path / "classes.txt").write_text(classes)
        words = ["--images", "images", "--masks", "masks", "--classes", "classes.txt"]
        main(["data", "check", str(tmp_path), *words])
        out = capsys.readouterr().out
        assert "[bold_red]x" in out  # no markup
        assert clean(out)

    def test_classes_in_the_attention_command(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        made, image = hostile_weights(tmp_path, HOSTILE), photo(tmp_path / "photo.png")
        words = ["view", "attention", str(image), "--weights", str(made), "--size", "32"]
        assert main([*words, "-o", str(tmp_path / "a.png")]) == 0
        out = capsys.readouterr().out
        assert clean(out)
        assert len(out.splitlines()) == 2


class TestTraining:
    def test_the_display_shows_names_as_text(self, capsys: pytest.CaptureFixture[str]) -> None:
        display = Display(f"{HOSTILE}{MARKUP}", 10, 0)
        display.print(f"{HOSTILE}{MARKUP}")
        display.skipped(HOSTILE)
        display.evaluated(HOSTILE)
        display.step(
            step=10, loss=1.0, epoch=1.0, lr=0.1, images_per_s=5.0, data_wait=0.1, memory_mb=None
        )
        display.console.print(display._panel())
        out = capsys.readouterr().out
        assert clean(out)
        assert "[bold red]x[/bold red]" in out

    def test_a_damaged_log_yields_its_valid_lines(self, tmp_path: Path) -> None:
        path = tmp_path / "log.jsonl"
        bad = [b"\xff\xfe", b"[1]", b'"text"', b"{", b"null", b'{"step": 1}', b"[" * 100_000]
        good = b'{"event": "step", "step": 1}'
        path.write_bytes(b"\n".join([*bad, good, b'{"event": "step", "step": "x"}']) + b"\n")
        assert [entry["step"] for entry in read(path)] == [1, "x"]
        log = Log(path, 5)
        log.write("step", step=6)
        log.close()
        assert [entry["step"] for entry in read(path)] == [1, "x", 6]


EVALUATION = {
    "classes": ["a", "b"],
    "confusion": [[3, 1], [2, 4]],
    "mistakes": [[1.5, 0, 0, 1]],
    "per_class": [{"class": "a", "iou": 3.5}],
}


def run_folder(folder: Path, evaluation: Any, events: list[Any]) -> Path:
    """Create a run folder as received from someone else."""
    folder.mkdir()
    (folder / "recipe.yaml").write_text(yaml.safe_dump(classification_recipe().plain()))
    (folder / "log.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    content = evaluation if isinstance(evaluation, str) else json.dumps(evaluation)
    (folder / "evaluation.json").write_text(content)
    return folder


WRONG: list[Any] = [None, True, "x", [], {}, 10**400, float("nan"), float("inf"), -1e308, [[1]]]


class TestReport:
    @pytest.mark.parametrize("name", ["step", "steps", "loss", "lr", "top1", "data_wait", "epoch"])
    @pytest.mark.parametrize("value", WRONG, ids=[repr(v)[:12] for v in WRONG])
    def test_a_wrong_value_in_the_log_still_yields_a_page(
        self, name: str, value: Any, tmp_path: Path
    ) -> None:
        good = {"step": 1, "loss": 1.0, "lr": 1.0, "images_per_s": 1.0, "data_wait": 0.1}
        events = [
            {"event": "start", "steps": 9},
            {"event": "step"} | good,
            {"event": "step"} | good | {name: value},
            {"event": "eval", "step": 1, "top1": 3.0} | {name: value},
            {"event": "start", name: value},
        ]
        assert main(["report", str(run_folder(tmp_path / "run", EVALUATION, events))]) == 0

    @pytest.mark.parametrize("name", [*EVALUATION, "gallery"])
    @pytest.mark.parametrize("value", WRONG, ids=[repr(v)[:12] for v in WRONG])
    def test_a_wrong_value_in_the_evaluation_yields_a_page_or_an_error(
        self, name: str, value: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        run = run_folder(tmp_path / "run", EVALUATION | {name: value}, [])
        if main(["report", str(run)]):
            err = capsys.readouterr().err
            assert "evaluation.json was not written by an evaluation" in err
            assert "Traceback" not in err

    @pytest.mark.parametrize(
        "content",
        ["", "[]", "{", "[" * 100_000, '{"classes": ["a"], "confusion": [[1, 2]]}', "\x00"],
        ids=["empty", "list", "cut", "nested", "shape", "nul"],
    )
    def test_a_damaged_evaluation_is_an_error(
        self, content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["report", str(run_folder(tmp_path / "run", content, []))]) == 1
        assert "evaluation.json was not written by an evaluation" in capsys.readouterr().err

    @pytest.mark.parametrize("index", [-1000, 10**6, 10**30])
    def test_a_mistake_with_an_invalid_image_index_omits_the_images(
        self, index: int, tmp_path: Path
    ) -> None:
        about = EVALUATION | {"classes": [f"kind {i}" for i in range(8)], "confusion": None}
        about |= {"mistakes": [[1.0, index, 0, 1]]}
        run = run_folder(tmp_path / "run", about, [])
        assert main(["report", str(run)]) == 0


def test_weights_of_all_tasks_write_tables_without_formulas(tmp_path: Path) -> None:
    image = photo(tmp_path / "=1+1.png")
    for task, path in weights(tmp_path).items():
        out = tmp_path / f"out_{task}"
        words = ["predict", str(image), "--weights", str(path), "--score", "0.01"]
        assert main([*words, "-o", str(out)]) == 0
        with (out / "predictions.csv").open(newline="") as file:
            cells = [cell for row in csv.reader(file) for cell in row]
        assert cells
        assert not [c for c in cells if c.startswith(("=", "+", "@", "\t"))]


def direct(path: Path) -> int:
    """Count direct uses of the terminal in a module: sys.stdout, sys.stderr, print, or rich's console."""
    found = 0
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            found += ast.unparse(node.func) in ("print", "sys.stdout.write", "sys.stderr.write")
        elif isinstance(node, ast.ImportFrom) and node.module in ("rich.console", "rich.table"):
            found += any(name.name in ("Console", "Table") for name in node.names)
    return found


def test_every_command_writes_through_the_functions_that_escape() -> None:
    folder = Path(pale.__file__).parent
    counts = {p.relative_to(folder).as_posix(): direct(p) for p in folder.rglob("*.py")}
    assert {name: count for name, count in counts.items() if count} == {
        "cli/console.py": 3,  # defines these functions
        "cli/completion.py": 1,  # a script for the shell
    }
