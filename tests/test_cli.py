"""The command line as a user types it: real processes for the entry points, `main` for the rest."""

import json
import subprocess
import sys

import pytest
from PIL import Image

from pale.cli import main


def run(capsys, *argv):
    code = main([str(word) for word in argv])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_module_and_script_are_the_same_command():
    for command in (
        [sys.executable, "-m", "pale"],
        [sys.executable.replace("python3", "pale").replace("python", "pale")],
    ):
        done = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
        assert done.stdout.startswith("pale 0.")


def test_cost_paper_prints_every_row_beside_the_papers_figure(capsys):
    code, out, _ = run(capsys, "cost", "--paper")
    assert code == 0
    for text in (
        "Pale-B*",
        "15.534 [15.6]",
        "9 9 9 9",
        "Pale (vanilla)",
        "5.353 [5.4]",
        "APE",
        "no pos.",
    ):
        assert text in out


def test_cost_paper_as_json_carries_the_difference(capsys):
    _, out, _ = run(capsys, "cost", "--paper", "--json")
    rows = json.loads(out)
    assert [row["task"] for row in rows].count("ade20k") == 16
    assert len(rows) == 19 + 16 + 16
    assert all(abs(row["difference"]) < 0.02 for row in rows)


def test_cost_counts_in_three_ways(capsys):
    _, out, _ = run(capsys, "cost", "pale_tiny", "--pale-size", 9, "--json")
    macs = {way: bill["macs"] for way, bill in json.loads(out)["counting"].items()}
    assert round(macs["paper"] / 1e9, 2) == 5.43
    assert round(macs["ideal"] / 1e9, 2) == 4.25
    _, out, _ = run(capsys, "cost", "pale_tiny", "--size", 100, 173, "--json")
    macs = {way: bill["macs"] for way, bill in json.loads(out)["counting"].items()}
    assert macs["ideal"] < macs["executed"] < macs["paper"]
    assert run(capsys, "cost", "pale_tiny")[0] == 0


def test_info_shows_maps_groups_and_tokens(capsys):
    code, out, _ = run(capsys, "info", "pale_tiny", "--size", 100, 173)
    assert code == 0
    for text in ("25x44", "4 row + 7 column", "150 to 308", "21.72 M"):
        assert text in out
    stages = json.loads(run(capsys, "info", "pale_tiny", "--size", 224, 224, "--json")[1])["stages"]
    assert [stage["map"] for stage in stages] == [[56, 56], [28, 28], [14, 14], [7, 7]]
    assert stages[0]["groups"] == {"row": 8, "column": 8}
    assert stages[0]["tokens"] == [392, 392]


@pytest.mark.parametrize("attention", ["sequential", "vanilla", "axial", "cross"])
def test_info_knows_every_attention_mode(capsys, attention):
    code, out, _ = run(capsys, "info", "pale_nano", "--attention", attention, "--size", 64, 96)
    assert code == 0
    assert attention in out


def test_doctor_says_which_back_end_runs_and_why_not_another(capsys):
    code, out, _ = run(capsys, "doctor")
    assert code == 0
    assert "back-end sdpa, works" in out
    assert "not reference: sdpa comes first" in out
    assert "blocks: plain PyTorch; not fused kernels: " in out
    facts = json.loads(run(capsys, "doctor", "--json")[1])
    assert facts["devices"][0]["backend"] == "sdpa"
    assert facts["packages"]["torch"]


def test_view_draws_the_picture(capsys, tmp_path):
    path = tmp_path / "new" / "pales.png"
    code, out, _ = run(
        capsys,
        "view",
        "pales",
        "pale_tiny",
        "--size",
        224,
        320,
        "--stage",
        2,
        "--at",
        3,
        5,
        "-o",
        path,
    )
    assert code == 0
    assert "written" in out
    with Image.open(path) as image:
        assert min(image.size) > 200


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["cost", "pale_tyny"], "got 'pale_tyny'; did you mean 'pale_tiny'?"),
        (["info", "pale_tiny", "--attention", "cros"], "got 'cros'; did you mean 'cross'?"),
        (["info", "pale_tiny", "--size", "0", "5"], "at least 1, got 0 5"),
        (
            ["info", "pale_tiny", "--pale-size", "7", "7"],
            "one whole number of at least 1, or 4, one a stage",
        ),
        (["info", "pale_tiny", "--stem-stride", "3"], "stem_stride must be 4, 2 or 1, got 3"),
        (["view", "pales", "pale_tiny", "--stage", "5", "-o", "x.png"], "stage"),
        (["view", "pales", "pale_tiny", "--at", "99", "0", "-o", "x.png"], "99"),
    ],
    ids=["model", "attention", "size", "pale size", "stem stride", "stage", "token"],
)
def test_bad_values_are_one_clear_line(capsys, argv, message):
    code, out, err = run(capsys, *argv)
    assert code == 1
    assert out == ""
    assert err.startswith("pale: ")
    assert err.count("\n") == 1
    assert message in err


@pytest.mark.parametrize(
    ("argv", "hint"),
    [
        (["cost", "--papre"], "did you mean --paper?"),
        (["doctr"], "did you mean doctor?"),
        ([], "COMMAND"),
    ],
    ids=["option", "command", "nothing"],
)
def test_misspelt_options_and_commands_name_the_nearest(capsys, argv, hint):
    with pytest.raises(SystemExit) as exit_:
        main(argv)
    assert exit_.value.code == 2
    assert hint in capsys.readouterr().err
