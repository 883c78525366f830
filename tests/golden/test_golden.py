"""Behaviour is what it was when the golden files were written, but for the renames of renames.py.

Numbers may differ by 1e-5 of the largest of their list on another processor or PyTorch; where both are those that the
files were written on, they are bit-equal.
"""

import difflib
import json
import subprocess
import sys
from typing import Any

import pytest
import torch
import yaml
from golden import cases, collect, renames, surface
from safetensors.torch import load_file

TOLERANCE = 1e-5  # relative to the largest number of a list
METRIC_TOLERANCE = 0.02  # processors differed by 0.004
STEP_VALUES = 9  # loss, gradient norm and learning rate of three steps, before the metrics
# Ten steps of an optimizer with a high learning rate amplify rounding; the weights themselves are about 0.1 to 1.
WEIGHTS_TOLERANCE = 1e-4


def golden(name: str) -> Any:
    return json.loads((collect.FILES / name).read_text())


def same(now: Any, then: Any) -> None:
    """Compare what JSON holds; the message shows the lines that differ."""
    texts = [json.dumps(each, indent=1, sort_keys=True).splitlines() for each in (then, now)]
    found = list(difflib.unified_diff(*texts, "golden", "now", lineterm="", n=4))
    assert not found, "\n" + "\n".join(found)


NUMBERS = golden("numbers.json")


@pytest.fixture(autouse=True)
def _one_thread():
    with collect.one_thread():
        yield


def test_public_names_and_their_parameters_are_the_same():
    then = golden("public.json")
    same(collect.made_compatible(collect.public_names(), then), then)


@pytest.mark.parametrize(
    ("now", "breaks"),
    [
        (["a", "b=1", "* c"], False),
        (["a", "b=1", "* d=2", "* c=3"], False),
        (["a", "b=1", "e=4", "* c"], False),
        (["a", "e=4", "b=1", "* c"], True),
        (["a", "b=1", "* c", "* d"], True),
        (["a", "b=2", "* c"], True),
        (["a", "* c"], True),
        (["b=1", "a", "* c"], True),
    ],
)
def test_a_change_of_parameters_is_found_where_it_breaks_a_call(now, breaks):
    then = ["a", "b=1", "* c"]
    assert (collect.compatible(now, then) != then) == breaks


def test_commands_have_the_same_arguments():
    same(collect.options(), golden("options.json"))


def test_recipes_have_the_same_settings():
    then = collect.whole(yaml.safe_load((collect.FILES / "recipes.yaml").read_text()))
    same(collect.settings(), then)


STATE_DICTS = golden("state_dicts.json")


@pytest.mark.parametrize("name", STATE_DICTS["models"])
def test_registered_models_have_the_same_state_dict_keys(name):
    same(collect.registered_keys(name), STATE_DICTS["models"][name])


@pytest.mark.parametrize("task", cases.TASKS)
def test_models_of_recipes_have_the_same_state_dict_keys(task):
    same(collect.recipe_summaries(task), STATE_DICTS["recipes"][task])


@pytest.mark.parametrize("name", collect.LISTED)
def test_small_models_have_the_same_state_dict_line_by_line(name):
    same(collect.listed_keys(name), STATE_DICTS["listed"][name])


def marked(case: cases.Case) -> Any:
    marks = [pytest.mark.slow] if case.slow else []
    return pytest.param(case, id=case.name, marks=marks)


@pytest.mark.parametrize("case", [marked(case) for case in cases.CASES.values()])
def test_calls_have_the_same_exit_code_json_keys_and_files(case, tmp_path):
    same(collect.call(case, tmp_path), golden("commands.json")[case.name])


def test_every_call_is_kept_once():
    assert list(golden("commands.json")) == list(cases.CASES)
    assert len(cases.CASES) == len(cases.REPORTS) + len(cases.ERRORS)


def test_every_command_with_json_is_among_the_calls():
    with_json = {
        command
        for command, parser in surface.walk(surface.parser())
        if "--json" in parser._option_string_actions
    }
    called = {" ".join(["pale", *map(str, case.words)]) for case in cases.REPORTS} | {"pale serve"}
    called |= {"pale warm-up"}  # tests/predict/test_kernels.py
    called |= {call.replace("pale bench pale_nano", "pale bench models") for call in called}
    missing = {c for c in with_json if not any(call.startswith(c) for call in called)}
    assert missing == set()


def compare(now: Any, then: Any, where: str) -> None:
    """Compare numbers within the tolerance, everything but `bits` exactly, and bits on the same machine."""
    now = json.loads(json.dumps(now))
    if "values" not in then:
        assert now.keys() == then.keys()
        for name in then:
            compare(now[name], then[name], f"{where}, {name}")
        return
    rest = [{k: v for k, v in d.items() if k not in ("values", "bits")} for d in (now, then)]
    assert rest[0] == rest[1], where
    assert len(now["values"]) == len(then["values"]), where
    # Metrics count pixels or objects, some of which rounding can move to another class.
    split = STEP_VALUES if where.startswith("steps of") else len(then["values"])
    largest = max(map(abs, then["values"][:split]), default=0)
    values, metrics = now["values"][:split], now["values"][split:]
    assert values == pytest.approx(then["values"][:split], rel=0, abs=TOLERANCE * largest), where
    assert metrics == pytest.approx(then["values"][split:], rel=METRIC_TOLERANCE, abs=0), where
    if NUMBERS["machine"] == collect.machine():
        assert now["bits"] == then["bits"], f"{where}: equal within the tolerance, not bit by bit"


# PyTorch before 2.15 draws other initial weights, so that no number of a new model is the same.
DRAWN = [-0.022516796365380287, -0.023047203198075294, -0.005011571571230888]


def draws_the_same_weights() -> bool:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        drawn = torch.nn.init.trunc_normal_(torch.empty(40), std=0.02)
    return drawn[:3].tolist() == pytest.approx(DRAWN)


@pytest.mark.skipif(not draws_the_same_weights(), reason="PyTorch draws other initial weights")
@pytest.mark.parametrize("name", collect.NUMBERS)
def test_numbers_are_the_same(name):
    compare(collect.NUMBERS[name](), NUMBERS["numbers"][name], name)


@pytest.mark.parametrize("task", cases.TASKS)
def test_files_of_an_earlier_version_predict_the_same(task):
    compare(collect.kept_predictions(task), NUMBERS["numbers"][f"kept {task}"], task)


@pytest.mark.parametrize("name", ["run", "final.safetensors", "packed.safetensors"])
@pytest.mark.parametrize("task", cases.TASKS)
def test_the_command_predicts_with_files_of_an_earlier_version(task, name, tmp_path):
    weights = collect.unpack(task, tmp_path) / name
    code, out, err = surface.run(
        "predict", collect.CAT, "--weights", weights, "--device", "cpu", "--json"
    )
    assert (code, err) == (0, "")
    assert json.loads(out)["width"] > 0


@pytest.mark.parametrize("task", cases.TASKS)
def test_a_stopped_run_of_an_earlier_version_ends_where_it_would_have_ended(task, tmp_path):
    kept = collect.unpack(task, tmp_path)
    code, out, err = surface.run("train", "--resume", kept / "run", "--device", "cpu", "--json")
    assert code == 0, err
    assert json.loads(out)["step"] == json.loads(out)["steps"] == 11
    then, now = load_file(kept / "final.safetensors"), load_file(kept / "run/weights.safetensors")
    assert now.keys() == then.keys()
    for key, tensor in then.items():
        torch.testing.assert_close(now[key], tensor, rtol=0, atol=WEIGHTS_TOLERANCE, msg=key)
        if NUMBERS["machine"] == collect.machine():
            assert torch.equal(now[key], tensor), key


def test_the_stopped_run_is_not_already_where_it_would_end(tmp_path):
    kept = collect.unpack("classification", tmp_path)
    then, now = load_file(kept / "final.safetensors"), load_file(kept / "run/weights.safetensors")
    assert max(float((now[k] - then[k]).abs().max()) for k in then) > 30 * WEIGHTS_TOLERANCE


def test_a_line_of_the_table_translates_a_new_name_back():
    table = (("pale eval --batch-size", "pale eval --batch"), ("picture", "image"))
    assert renames.old("--batch", table, "pale eval") == "--batch-size"
    assert renames.old("--batch", table, "pale serve") == "--batch"
    assert renames.old("image", table, "pale eval") == "picture"
    assert renames.old_dotted("head.image.fc", table) == "head.picture.fc"
    assert renames.old_dotted("head.images.fc", table) == "head.images.fc"
    paths = (("classes[].share", "classes[].percent"), ("size", "shape"))
    assert renames.old_path("classes[].percent", paths) == "classes[].share"
    assert renames.old_path("shape[]", paths) == "size[]"
    assert renames.old_path("shapes", paths) == "shapes"
    commands = (("pale data coco", "pale data convert"),)
    assert renames.old_words("pale data convert", commands) == "pale data coco"


def test_renamed_options_and_keys_are_compared_under_their_old_names(monkeypatch, tmp_path):
    # As if they had been renamed: what is called --stage today was --level.
    monkeypatch.setattr(
        renames, "OPTIONS", (("pale view pales --level", "pale view pales --stage"),)
    )
    monkeypatch.setattr(renames, "JSON_KEYS", (("architecture", "config"),))
    assert "--level" in collect.options()["pale view pales"]
    keys = collect.call(cases.CASES["cost"], tmp_path)["keys"]
    assert "architecture.depths" in keys
    assert "config.depths" not in keys


@pytest.mark.slow
def test_serving_announces_itself_and_answers_with_the_same_keys():
    same(collect.served(), golden("serve.json"))


@pytest.mark.slow
@pytest.mark.parametrize(("words", "code"), [("cost", 0), ("cost pale_nanno", 1), ("cots", 2)])
def test_the_process_ends_with_the_exit_code(words, code, tmp_path):
    call = [sys.executable, "-m", "pale", *words.split()]
    done = subprocess.run(
        call, cwd=tmp_path, env=surface.environment(), capture_output=True, check=False
    )
    assert done.returncode == code
