"""The command line as a user types it: real processes for the entry points, `main` for the rest."""

import json
import os
import pty
import signal
import subprocess
import sys

import pytest
import torch
from PIL import Image
from support.processes import heed_ctrl_c

from pale.cli.commands import build_parser
from pale.cli.main import main, parse
from pale.cli.parser import walk


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


def test_view_draws_the_image(capsys, tmp_path):
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
            "one whole number of at least 1, or 4",
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


TOKEN_LABELS = ["token-labels", "make", "--model", "pale_nano", "--output", "labels"]


@pytest.mark.parametrize(
    ("argv", "hint"),
    [
        (["cost", "--papre"], "did you mean --paper?"),
        (["doctr"], "did you mean doctor?"),
        (["data", "checkx", "x"], "did you mean check?"),
        (["token-labels", "makee"], "did you mean make?"),
        (["bench", "op", "--stage", "1", "--peices", "mlp"], "did you mean --pieces?"),
        (["train", "quickstart", "--device", "gpu"], "did you mean cuda?"),
        ([*TOKEN_LABELS, "photos"], "is a setting: --data.root photos"),
        ([*TOKEN_LABELS, "data.root=x"], "starts with two dashes: --data.root=x"),
        (["serve", "runs/mine"], "runs/mine; a model is an option: --weights runs/mine"),
    ],
    ids=[
        "option",
        "command",
        "inner",
        "labels",
        "inner option",
        "device",
        "data",
        "setting",
        "model",
    ],
)
def test_misspelt_options_and_commands_name_the_nearest(capsys, argv, hint):
    with pytest.raises(SystemExit) as exit_:
        main(argv)
    assert exit_.value.code == 2
    assert hint in capsys.readouterr().err


def test_a_missing_argument_has_no_hint(capsys):
    with pytest.raises(SystemExit):
        main(["export", "runs/a"])
    assert capsys.readouterr().err.endswith("arguments are required: -o/--output\n")


COMMANDS = {" ".join(path): parser for path, parser in walk(build_parser())}


def test_every_command_has_its_place_in_the_help():
    groups = build_parser().groups
    assert list(groups) == ["start", "train", "use", "measure"]
    assert "bench op" not in [name for names in groups.values() for name in names]
    text = build_parser().format_help()
    for names in groups.values():
        for name in names:
            assert f"\n  {name} " in text


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_and_option_is_explained(name):
    parser = COMMANDS[name]
    assert parser.description
    assert parser.description.endswith(".")
    text = " ".join(parser.format_help().split())
    for action in parser.actions:
        assert action.help, action
        default = action.default
        if action.option_strings and isinstance(default, int | float) and default is not False:
            assert f"default {default:g}" in text


def test_models_may_stand_where_a_sub_command_of_bench_does():
    assert parse(["bench"]).models == []
    assert parse(["bench", "pale_nano", "--batch", "1"]).models == ["pale_nano"]
    assert parse(["bench", "models", "pale_nano"]).models == ["pale_nano"]
    assert parse(["bench", "--mode", "compiled"]).mode == ["compiled"]
    assert parse(["bench", "op"]).model == "pale_tiny"
    args = parse(["bench", "data", "quickstart", "--data.workers", "2"])
    assert (args.recipe, args.overrides) == ("quickstart", {"data.workers": 2})
    args = parse(["token-labels", "make", "--model", "x", "--output", "y", "--data.root", "z"])
    assert args.overrides == {"data.root": "z"}


@pytest.mark.parametrize("words", [["--help"], ["train", "--help"], ["doctr"]])
def test_help_and_errors_do_not_wait_for_pytorch(words):
    command = [sys.executable, "-X", "importtime", "-m", "pale", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "pale.cli.main" in loaded
    assert not {"torch", "timm", "numpy"} & loaded


BASH = """
source /dev/stdin <<< "$SCRIPT"
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=()
"$(complete -p pale | sed 's/.*-F \\([^ ]*\\).*/\\1/')" pale "${@: -1}" "${@: -2:1}"
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def bash_script():
    # Not capsys: that is of one test.
    from contextlib import redirect_stdout
    from io import StringIO

    with redirect_stdout(StringIO()) as out:
        assert main(["completion", "bash"]) == 0
    return out.getvalue()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("tr", {"train"}),
        ("train quickstart.", {"quickstart.segmentation", "quickstart.detection"}),
        ("train --data.ro", {"--data.root"}),
        ("train --res", {"--resume"}),
        ("eval --protocol ", {"single", "multi", "both"}),
        ("bench ", {"models", "op", "data"}),
        ("bench op --pi", {"--pieces"}),
        ("data c", {"check", "coco", "convert"}),
        ("info pale_", {"pale_nano", "pale_tiny", "pale_small", "pale_base"}),
        ("completion ", {"bash", "zsh", "fish", "tcsh"}),
    ],
)
def test_bash_completes(bash_script, line, expected):
    words = ["pale", *line.split(" ")]
    done = subprocess.run(
        ["bash", "--norc", "-c", BASH, "bash", *words],
        env=os.environ | {"SCRIPT": bash_script},
        capture_output=True,
        text=True,
        check=True,
    )
    found = set(done.stdout.split())
    assert expected <= found
    if not line.endswith(" "):
        assert all(word.startswith(words[-1]) for word in found)
        assert found == expected


@pytest.mark.parametrize("shell", ["zsh", "fish", "tcsh"])
def test_other_shells_get_a_script_with_commands_and_recipes(capsys, shell):
    code, out, _ = run(capsys, "completion", shell)
    assert code == 0
    assert "token-labels" in out
    assert "small_data.pale_nano" in out


def write_images(folder, count, side):
    for split in ("train", "val"):
        for label in ("a", "b"):
            (folder / split / label).mkdir(parents=True)
            path = folder / split / label / "0.png"
            Image.effect_noise((side, side), 64).save(path, compress_level=0)
            for i in range(1, count):
                os.link(path, path.with_name(f"{i}.png"))


def read_until(terminal, text=None):
    found = b""
    while text is None or text not in found:
        try:
            found += os.read(terminal, 4096)
        except OSError:  # the other end is closed
            break
    return found


@pytest.mark.slow
def test_ctrl_c_is_one_line_and_130(tmp_path):
    write_images(tmp_path, 500, 600)
    people, terminal = pty.openpty()
    command = [sys.executable, "-m", "pale", "data", "check", tmp_path, "--workers", "2"]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=terminal,
        start_new_session=True,
        preexec_fn=heed_ctrl_c,
    ) as process:
        os.close(terminal)
        assert b"reading" in read_until(people, b"reading")  # the bar is there, so it is at work
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the workers too
        after = read_until(people)
        os.close(people)
        assert process.wait(timeout=60) == 130
        assert after.endswith(b"pale: stopped by Ctrl-C\r\n")
        assert b"Traceback" not in after
        assert process.stdout.read() == b""


def test_progress_is_for_the_terminal_and_results_for_the_file(capsys, monkeypatch, tmp_path):
    write_images(tmp_path, 2, 40)
    people, terminal = pty.openpty()
    with open(terminal, "w") as stderr:
        monkeypatch.setattr("sys.stderr", stderr)
        code, out, _ = run(capsys, "data", "pack", tmp_path, tmp_path / "out")
    shown = read_until(people)
    os.close(people)
    assert code == 0
    assert b"packing train" in shown
    assert out.splitlines()[:2] == [
        "train: 4 images in 1 shards",
        "val: 4 images in 1 shards",
    ]


@pytest.mark.parametrize("words", [["recipes", "--json"], ["completion", "tcsh"]])
def test_a_reader_that_has_enough_is_no_error(capsys, monkeypatch, words):
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as stdout:
        monkeypatch.setattr("sys.stdout", stdout)
        assert main(words) == 141
    assert capsys.readouterr().err == ""


def test_a_library_that_gives_up_shows_where_and_memory_has_a_way_out(capsys, monkeypatch):
    monkeypatch.setattr(
        "pale.tools.architecture.Architecture.config",
        lambda *_, **__: torch.zeros(2) @ torch.zeros(3),
    )
    code, _, err = run(capsys, "info", "pale_nano")
    assert code == 1
    assert "Traceback" in err
    assert err.splitlines()[-1].startswith("pale: inconsistent tensor size")

    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr("pale.tools.architecture.Architecture.config", full)
    code, _, err = run(capsys, "info", "pale_nano")
    assert code == 1
    assert err.startswith(
        "pale: out of GPU memory (CUDA out of memory); each of these needs less: a smaller --size"
    )


def test_an_error_of_ours_is_one_line(capsys, tmp_path):
    code, _, err = run(capsys, "predict", tmp_path / "none.jpg", "--weights", "no_such_weights")
    assert code == 1
    assert err.startswith("pale: ")
    assert "Traceback" not in err
