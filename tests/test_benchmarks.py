"""The scripts that compare speeds treat every model in the same way."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from support.scripts import FOLDER, import_scripts

SIZE = (64, 64)


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    names = "common", "speeds", "segmentation_speed", "detection_speed"
    return import_scripts(monkeypatch, *names)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[torch.nn.Module]:
    """What was compiled; graphs are traced and run as they are, which takes seconds and not minutes."""
    found: list[torch.nn.Module] = []
    true = torch.compile

    def traced(module: torch.nn.Module, **_: Any) -> Any:
        found.append(module)
        return true(module, backend="eager", dynamic=False)

    monkeypatch.setattr(torch, "compile", traced)
    return found


def arguments(**others: Any) -> argparse.Namespace:
    given = {"compile_peers_only": False} | others
    return argparse.Namespace(device="cpu", batch=2, size=SIZE, crop=64, width=16, **given)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pale_nano", "swin_tiny_patch4_window7_224"])
@pytest.mark.parametrize("task", ["training", "inference"])
def test_segmenters_of_both_sides_are_compiled_before_they_are_recorded(
    name: str, task: str, scripts: dict[str, ModuleType], compiled: list[torch.nn.Module]
) -> None:
    script = scripts["segmentation_speed"]
    make = script.train_step if task == "training" else script.infer_step
    make(name, "compiled-graphs", arguments())()
    assert len(compiled) == 1  # the whole model, once
    make(name, "graphs", arguments())()
    assert len(compiled) == 1


@pytest.mark.slow
@pytest.mark.parametrize("label", ["pale_t", "swin_t", "resnet50"])
@pytest.mark.parametrize("task", ["training", "inference"])
def test_detectors_of_all_sides_are_compiled_before_they_are_recorded(
    label: str,
    task: str,
    scripts: dict[str, ModuleType],
    compiled: list[torch.nn.Module],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script = scripts["detection_speed"]
    if label == "pale_t":
        monkeypatch.setitem(script.MODELS, label, "pale_nano")
    script.step_of(label, task, arguments(), "compiled-graphs")()
    assert len(compiled) == 1
    script.step_of(label, task, arguments(), "graphs")()
    assert len(compiled) == 1


def test_a_model_that_fails_has_a_row_with_its_error_and_the_table_compares_the_fastest_modes(
    scripts: dict[str, ModuleType], tmp_path: Path
) -> None:
    speeds = scripts["speeds"]
    path = tmp_path / "speed.json"
    args = arguments(mode=["eager", "compiled-graphs"], rounds=3, json=path)

    def make(label: str, task: str, mode: str) -> Any:
        if (label, mode) == ("peer", "eager"):
            raise RuntimeError("no kernel")
        return lambda: None

    rows = speeds.compare_speeds(args, ["ours", "peer"], make)
    failed = [row for row in rows if "error" in row]
    assert [(r["task"], r["mode"], r["model"]) for r in failed] == [
        ("training", "eager", "peer"),
        ("inference", "eager", "peer"),
    ]
    assert failed[0]["error"] == "RuntimeError: no kernel"
    assert json.loads(path.read_text())["rows"] == json.loads(json.dumps(rows))
    known = [
        {"task": "training", "mode": mode, "model": model, "ms": ms}
        for mode, model, ms in [
            ("graphs", "ours", 10.0),
            ("graphs", "peer", 15.0),
            ("compiled-graphs", "ours", 11.0),
            ("compiled-graphs", "peer", 12.0),
        ]
    ]
    last = speeds.table(known).splitlines()[-1]
    assert last == (
        "| training, each in its fastest mode | 10.00 ms (graphs) | 12.00 ms (1.20, compiled-graphs) |"
    )
    assert path.with_suffix(".md").read_text().count("failed") == 2


@pytest.mark.slow
def test_hostile_files_end_every_command_with_a_message(tmp_path: Path) -> None:
    """Twenty cases of the thousand of benchmarks/hostile.py; each runs a command on files made to attack it."""
    words = ["--cases", "20", "--uploads", "0", "--work", tmp_path / "work", "-o", tmp_path / "out"]
    done = subprocess.run(
        [sys.executable, FOLDER / "hostile.py", *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads((tmp_path / "out.json").read_text())["files"]
    assert (found["cases"], found["tracebacks"], found["hangs"], found["signals"]) == (20, 0, 0, 0)
    assert set(found["exit_codes"]) <= {"0", "1", "2"}
    assert "| tracebacks | 0 |" in (tmp_path / "out.md").read_text()


def test_the_page_of_whole_models_has_the_ceilings_of_its_file() -> None:
    report = json.loads((FOLDER / "results/h200.json").read_text())
    page = " ".join((FOLDER / "results/h200.md").read_text().split())
    matrix, copy = (
        [part["ceilings"][name] / 1e12 for part in report.values()] for name in ("matrix", "copy")
    )
    assert f"matrix product {min(matrix):.0f} to {max(matrix):.0f} TFLOP/s" in page
    assert f"copy {min(copy):.2f} to {max(copy):.2f} TB/s" in page


def load_script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_the_wait_for_checkpoints_is_shorter_in_the_background(tmp_path, monkeypatch) -> None:
    saving = load_script("saving")
    weights = {"w": torch.zeros(1000)}
    monkeypatch.setattr(saving, "make_state", lambda: ({"model": weights, "ema": weights}, {}))
    words = ["saving", "-o", str(tmp_path / "out"), "--saves", "2", "--seconds", "0.1"]
    monkeypatch.setattr(sys, "argv", [*words, "--delay", "0.15", "--folder", str(tmp_path)])
    before = os.fsync
    saving.main()
    assert os.fsync is before
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    _, _, at_once, background = rows
    assert (
        at_once["wait_s"] > 3 * 0.15
    )  # three files and the folder at least, each synced with the delay
    assert background["wait_s"] < at_once["wait_s"] / 3
    assert "in the background" in (tmp_path / "out.md").read_text()


def test_the_model_of_a_step_agrees_with_the_measured_run_on_one_gpu() -> None:
    model = load_script("cluster_model")
    rows = json.loads((FOLDER / "results/reading_h200.json").read_text())["rows"]
    measured = next(row["images_per_s"] for row in rows if row["model"] == "decoding")
    inputs = model.read_inputs()
    step = model.model_step(inputs, 1, 256, 1e9)
    assert step.exchange == 0
    assert 256 / step.total == pytest.approx(measured, rel=0.01)
    # By hand: a ring of two machines moves the gradients once, an eighth of them through each GPU.
    two = model.model_step(inputs, 16, 256, 1e9)
    inside = 2 * 7 / 8 * inputs.gradient / model.NVLINK
    assert two.exchange == pytest.approx(inside + inputs.gradient / 8 / 1e9 + 2 * model.LATENCY)
    assert two.limit == "compute"
    assert model.model_step(inputs, 256, 1, 1e9).limit == "exchange"


def test_the_page_of_the_model_is_what_the_program_writes(tmp_path, monkeypatch, capsys) -> None:
    model = load_script("cluster_model")
    monkeypatch.setattr(sys, "argv", ["cluster_model", "-o", str(tmp_path / "out.md")])
    model.main()
    assert (tmp_path / "out.md").read_text() == (FOLDER / "results/cluster_model.md").read_text()


def test_rounds_of_the_cpu_comparison_count_only_without_other_load(monkeypatch) -> None:
    cpu = load_script("cpu")
    steps = {name: lambda: None for name in cpu.MODELS}
    settings = cpu.BenchSettings((32, 32), "cpu", "fp32", 5, 0.2)
    monkeypatch.setattr(cpu, "BLOCK_SECONDS", 0.02)
    monkeypatch.setattr(cpu, "busy_seconds", cpu.time.process_time)  # no other process
    times, discarded = cpu.time_undisturbed(steps, settings)
    assert discarded == 0
    assert {len(measured) >= 5 for measured in times.values()} == {True}
    monkeypatch.setattr(cpu, "busy_seconds", lambda: cpu.time.process_time() + cpu.time.monotonic())
    times, discarded = cpu.time_undisturbed(steps, settings)
    assert discarded > 0
    assert not any(times.values())


@pytest.mark.parametrize("mode", ["eager", "onnxruntime"])
def test_modes_of_the_cpu_comparison_run_the_model(mode: str, monkeypatch) -> None:
    cpu = import_scripts(monkeypatch, "cpu")["cpu"]
    step = cpu.prepare(mode, "pale_nano", torch.randn(2, 3, 64, 64))
    for _ in range(2):
        found = step()
        assert getattr(found, "shape", found) == (2, 1000)
    before = cpu.own_seconds()
    step()
    assert cpu.own_seconds() > before
    for child in cpu.active_children():
        child.kill()


def test_a_training_step_of_the_cpu_comparison_has_a_backward_pass() -> None:
    cpu = load_script("cpu")
    for low, dtype in [(True, torch.bfloat16), (False, torch.float32)]:
        model = torch.nn.Linear(4, 3)
        calls: list[object] = []
        model.register_forward_hook(
            lambda module, given, output, calls=calls: calls.append(output.dtype)
        )
        model.weight.register_hook(lambda grad, calls=calls: calls.append("backward"))
        cpu.train(model, torch.randn(2, 4), low)
        assert calls == [dtype, "backward"]
        assert [parameter.grad for parameter in model.parameters()] == [None, None]


def test_the_page_of_the_cpu_comparison_has_the_medians_of_its_runs() -> None:
    cpu = load_script("cpu")
    about = {
        "processor": "P (family 1, model 2)",
        "threads": 2,
        "commit": "0123456789",
        "setting": {"size": [32, 32]},
        "packages": {"torch": "2", "timm": "1"},
    }
    runs = []
    for ours, peer in [(10.0, 12.0), (20.0, 30.0), (10.0, 11.0)]:
        pairs = zip(cpu.MODELS, (ours, peer), strict=True)
        common = {
            "mode": "eager",
            "batch": 8,
            "quartiles": (9.0, 40.0),
            "rounds": 7,
            "discarded": 3,
        }
        rows = [common | {"model": name, "ms": ms, "ratio": ms / ours} for name, ms in pairs]
        other = {
            "linear": {"pytorch": 1e11, "onednn": 2e11},
            "attention": 5e10,
            "isa": "all",
            "runtimes": {},
        }
        operators = {"8": {"aten::mm": 30.0, "all": 40.0}}
        runs.append(other | {"time": "today", "about": about, "operators": operators, "rows": rows})
    page = cpu.page(runs)
    assert f"| eager | 8 | {cpu.MODELS[0]} | 800.0 | 1 |" in page
    assert f"| eager | 8 | {cpu.MODELS[1]} | 666.7 | 1.20 (runs: 1.20, 1.50, 1.10) |" in page
    assert f"| {cpu.MODELS[1]} | 30.0 (9.0 to 40.0) | 7 | 3 |" in page
    assert "100 by `F.linear`, 200 by oneDNN; 50 in" in page
    assert "`mm` 30.0 (75%)" in page
    limited = [runs[0], runs[1] | {"isa": "AVX2"}]
    assert cpu.page(limited).count("\n## ") == 2
    assert "oneDNN limited to AVX2" in cpu.page(limited)


def test_commits_are_compared_by_their_ratios_to_the_control() -> None:
    script = load_script("compare_commits")
    case = script.CASES["training graph"]
    old = [{"pale": 10.0, "control": 14.0}] * 4
    # Twice as slow altogether, as on a busy machine, and Pale 3 % more.
    new = [{"pale": 20.6, "control": 28.0}] * 4
    row = script.summarize(case, {"old": old, "new": new}, {})
    assert row["new_over_old"] == pytest.approx(1 / 1.03)
    assert (row["within_limit"], row["limit"]) == (False, 0.02)
    eager = script.summarize(script.CASES["training eager"], {"old": old, "new": new}, {})
    assert (eager["within_limit"], eager["limit"]) == (True, 0.05)


@pytest.mark.slow
def test_two_trees_are_compared_and_a_tree_that_fails_is_a_row_with_its_error(tmp_path) -> None:
    broken = tmp_path / "broken"
    (broken / "pale").mkdir(parents=True)
    (broken / "pale" / "__init__.py").write_text("raise ImportError('no kernels here')")
    source = FOLDER.parent / "src"
    words = [
        "--device",
        "cpu",
        "--batch",
        "1",
        "--rounds",
        "2",
        "--size",
        "32",
        "--model",
        "pale_nano",
        "--cases",
    ]
    command = [sys.executable, FOLDER / "compare_commits.py"]
    outcomes = []
    for old, name in ((source, "both.json"), (broken, "one.json")):
        path = tmp_path / name
        given = [*command, old, source, "--json", path, *words, "inference eager"]
        done = subprocess.run(given, capture_output=True, text=True, check=False, timeout=300)
        page = path.with_suffix(".md").read_text()
        assert page in done.stdout
        outcomes.append((done.returncode, page, *json.loads(path.read_text())["rows"]))
    (code, page, row), (failed_code, failed_page, failed) = outcomes
    assert (code, failed_code) == (0, 1)
    assert row["rounds"] == 2
    assert row["new_over_old"] == pytest.approx(row["new"]["ratio"] / row["old"]["ratio"])
    assert f"**{row['new_over_old']:.3f}**" in page
    assert failed["errors"] == {"old": "ImportError: no kernels here"}
    assert "failed: old: ImportError: no kernels here" in failed_page
