"""`pale warm-up`: which kernels are recorded, errors, and a folder that serves a second call."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.processes import needs_triton

from pale.errors import RunError, SettingsError, UnavailableError
from pale.predict import kernels
from pale.tools.kernel_settings import KernelSettings

ROOT = Path(__file__).parents[2]


def settings(*models: str, **options: object) -> KernelSettings:
    return KernelSettings(**({"weights": list(models) or ["pale_nano"]} | options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"target": "h100"},
            r"compute capability of an NVIDIA GPU, one of 70, .* 121, got 'h100'; nvidia",
        ),
        ({"target": "sm_60"}, "one of 70, .*, got 'sm_60'"),
        ({"target": "sm_999"}, "one of 70, .*, got 'sm_999'"),
        ({"target": "sm_90a"}, "got 'sm_90a'"),
        ({"jobs": 0}, "--jobs must be at least 1, got 0"),
        ({"weights": []}, "name at least one model"),
    ],
)
def test_wrong_settings_are_refused(options, message):
    with pytest.raises(SettingsError, match=message):
        settings(**options)


def test_the_target_is_a_compute_capability():
    assert [settings(target=name).capability() for name in ("sm_75", "sm_120")] == [75, 120]


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(
        SettingsError, match=r"--cache must be a folder that can be written, got .*file/in"
    ):
        kernels.prepare_folder(tmp_path / "file" / "in")


def test_the_folder_is_that_of_triton_unless_one_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "a"))
    assert kernels.prepare_folder(None) == tmp_path / "a"
    monkeypatch.delenv("TRITON_CACHE_DIR")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert kernels.prepare_folder(None) == tmp_path / ".triton" / "cache"
    monkeypatch.chdir(tmp_path)
    assert kernels.prepare_folder(Path("b")) == tmp_path / "b"
    assert (tmp_path / "b").is_dir()


def test_without_triton_the_command_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(kernels, "AVAILABLE", False)
    with pytest.raises(UnavailableError, match="needs Triton, which is not installed"):
        kernels.compile_models(settings(cache=tmp_path))


@needs_triton
def test_a_kernel_that_cannot_be_compiled_is_an_error_of_the_run(monkeypatch, tmp_path):
    def fail(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr(kernels, "compile_kernels", fail)
    monkeypatch.setattr(kernels.compat, "compile_without_gpu", lambda _: None, raising=False)
    import triton

    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    with pytest.raises(RunError, match=r"compiled for sm_90: No space left .* may be full"):
        kernels._compile([], 90, tmp_path, None, lambda items, *_: iter(items))


@pytest.mark.slow
def test_the_recorded_kernels_are_those_of_the_model_in_each_use():
    inference = set(kernels.record_launches("pale_nano", settings()))
    names = {launch.name for launch in inference}
    # `stem`, `linear_norm` and `whole_mlp` are kernels of optimized models only, "BOTH" of the others.
    assert {"stem", "linear_norm", "whole_mlp", "attention_forward", "conv_norm"} < names
    assert not any("backward" in name for name in names)
    assert any(dict(launch.constants).get("BOTH") for launch in inference)
    assert {launch.kinds[0] for launch in inference} == {"bfloat16"}

    options = {"training": True, "dtype": ["fp16", "fp32"], "target": "sm_75"}
    training = kernels.record_launches("pale_nano", settings(**options))
    assert {"attention_backward_q", "norm_backward", "gelu_backward"} < {x.name for x in training}
    add_norms = [dict(x.constants) for x in training if x.name == "add_norm"]
    assert {x["SCALE"] for x in add_norms if x["ADD"]} == {True, False}  # with drop path, without
    assert {x.kinds[0] for x in training} == {"float16", "float32"}
    # Old GPUs have little shared memory: small blocks.
    assert {dict(x.constants)["BLOCK_K"] for x in training if x.name == "linear"} <= {16, 32}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("resnet18", "resnet18 has no kernels to compile: it contains no Pale Transformer"),
        ("no_such_model", "there is no run, file or model 'no_such_model'"),
    ],
)
def test_a_model_without_kernels_is_refused(model, message):
    with pytest.raises(SettingsError, match=message):
        kernels.record_launches(model, settings(model))


@needs_triton
@pytest.mark.slow
def test_a_second_call_finds_all_kernels_in_the_folder(tmp_path):
    def call(*options: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "pale", "warm-up", "pale_nano", "--cache", str(tmp_path)]
        env = os.environ | {"PYTHONPATH": str(ROOT / "src"), "CUDA_VISIBLE_DEVICES": ""}
        return subprocess.run(
            [*command, *options], capture_output=True, text=True, check=True, env=env
        )

    first = json.loads(call("--json", "--jobs", "2").stdout)
    count = first["models"]["pale_nano"]
    assert 30 < first["kernels"] == count
    assert (first["cached"], first["threads"], first["target"]) == (0, 2, "sm_90")
    assert first["bytes"] == sum(x.stat().st_size for x in tmp_path.rglob("*") if x.is_file())
    assert len(list(tmp_path.rglob("*.cubin"))) == count
    printed = call().stdout
    assert f"pale_nano: {count} kernels\n" in printed
    assert f"{count} kernels for sm_90: {count} were compiled earlier, 0 in " in printed
    assert f"TRITON_CACHE_DIR={tmp_path}" in printed
