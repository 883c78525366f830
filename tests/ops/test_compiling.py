"""Kernels compiled before their first launch: the same cache keys as a launch, threads, failures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from support.processes import needs_triton
from torch import nn

import pale
from pale.model import warm_up
from pale.ops import compiling, launching
from pale.ops.launching import Launch

ROOT = Path(__file__).parents[2]
MODULE = "pale.ops.block.triton_kernels"
KINDS = ("bfloat16", "float32", "float32 unaligned", "i32", "i64", "fp32")


def small(name: str = "gelu_forward") -> Launch:
    """Return a launch whose kernel takes little time to compile."""
    constants = {"SCALE": False, "C": 64, "BLOCK_C": 64, "BLOCK_T": 32}
    kinds = ("bfloat16", "bfloat16", "bfloat16", "i32", "i32")
    return Launch(MODULE, name, kinds, (("num_warps", 4),), tuple(constants.items()))


@needs_triton
@pytest.mark.slow
def test_a_launch_finds_what_was_compiled_before_it(tmp_path):
    """Triton's own JIT with a driver that only says it has a GPU; all launches must be cache hits."""
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join(str(ROOT / part) for part in ("src", "tests"))
    }
    env.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-m", "support.fake_gpu", str(tmp_path / "cache")],
        capture_output=True,
        text=True,
        check=False,
        env=env,
    )
    assert done.returncode == 0, done.stderr
    n = 8
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "kernels": n,
        "cached at first": 0,
        "missing": [],
        "launched": n,
        "hits": [True] * n,
        "cached at last": n,
        "another number of warps is cached": False,
    }


@pytest.mark.parametrize("kind", KINDS)
def test_an_example_of_a_kind_is_of_that_kind(kind):
    assert launching._kind(compiling.example(kind)) == kind


def test_a_launch_is_the_same_after_json():
    launch = small()
    assert Launch.from_plain(json.loads(json.dumps(launch.plain()))) == launch
    assert hash(launch) == hash(small())


def test_launches_are_recorded_and_not_run(monkeypatch):
    def refuse(*_):
        raise AssertionError("launched")

    monkeypatch.setattr(launching, "_run", refuse)
    before = launching.launches.copy()
    x = torch.zeros(4, dtype=torch.bfloat16)
    with launching.recording() as outer:
        launching.launch("m", "k", (2,), x, x[1:], 3, 1 << 31, 0.5, options={"num_warps": 2}, C=4)
        launching.launch("m", "k", (0, 3), x, options={})
        with launching.recording() as inner:
            launching.launch("m", "k", (1,), x, options={})
        launching.launch("m", "k", (9,), x, x[1:], 5, 1 << 40, 1.5, options={"num_warps": 2}, C=4)
    kinds = ("bfloat16", "bfloat16 unaligned", "i32", "i64", "fp32")
    assert list(outer) == [Launch("m", "k", kinds, (("num_warps", 2),), (("C", 4),))]
    assert list(inner) == [Launch("m", "k", ("bfloat16",), (), ())]
    assert launching.launches == before


def test_launches_of_other_threads_are_not_recorded(monkeypatch):
    run = []
    monkeypatch.setattr(launching, "_run", lambda *args: run.append(args))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    monkeypatch.setattr(launching, "INTERPRETED", False)
    arguments = ("m", "k", (1,), torch.zeros(1))
    with launching.recording() as found:
        thread = threading.Thread(target=lambda: launching.launch(*arguments, options={}))
        thread.start()
        thread.join()
    assert not found
    assert len(run) == 1


def test_the_backward_pass_is_recorded_in_the_same_thread():
    threads = []

    class Note(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            threads.append(threading.get_ident())
            return g

    with launching.recording():
        Note.apply(torch.ones(1, requires_grad=True)).backward()
    assert threads == [threading.get_ident()]


@pytest.mark.parametrize(
    ("kernels", "jobs", "cores", "local", "expected"),
    [
        pytest.param(100, None, 64, "1", compiling.MAX_THREADS, id="many cores"),
        pytest.param(100, None, 4, "1", 4, id="few cores"),
        pytest.param(100, None, 16, "4", 4, id="four ranks share the cores"),
        pytest.param(100, None, 2, "4", 1, id="more ranks than cores"),
        pytest.param(100, 20, 2, "1", 20, id="as many as were asked for"),
        pytest.param(3, 20, 2, "1", 3, id="few kernels"),
        pytest.param(0, 20, 2, "1", 1, id="no kernels"),
    ],
)
def test_the_number_of_threads_fits_the_machine(monkeypatch, kernels, jobs, cores, local, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(cores), raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    assert compiling.thread_count(kernels, jobs) == expected


@pytest.fixture
def prepared(monkeypatch):
    """Replace Triton: kernels `cached...` are in the cache, kernels `wrong...` cannot be compiled."""
    done = []

    def compile_one(launch, device):
        if launch.name.startswith("wrong"):
            raise RuntimeError(f"{launch.name} cannot be compiled")
        done.append((launch.name, threading.get_ident()))
        return launch.name != "without launcher"

    monkeypatch.setattr(compiling, "is_cached", lambda launch: launch.name.startswith("cached"))
    monkeypatch.setattr(compiling, "_compile", compile_one)
    return done


def test_only_what_the_cache_does_not_have_is_compiled(prepared):
    names = ["a", "cached b", "conv_three", "cached c", "d"]
    done = compiling.compile_kernels([small(name) for name in names], jobs=1)
    assert [name for name, _ in prepared] == ["conv_three", "a", "d"]
    assert (done.kernels, done.cached, done.launchers, done.threads) == (5, 2, True, 1)
    assert threading.get_ident() not in {thread for _, thread in prepared}


def test_missing_launch_code_is_reported(prepared):
    done = compiling.compile_kernels([small("without launcher"), small("b")])
    assert done.launchers is False


def test_nothing_to_compile_is_no_error(prepared):
    done = compiling.compile_kernels([small("cached b")])
    assert (done.kernels, done.cached, done.launchers) == (1, 1, True)


def test_an_error_is_raised_and_the_rest_is_not_compiled(prepared):
    many = [small("wrong"), *(small(str(i)) for i in range(50))]
    with pytest.raises(RuntimeError, match="wrong cannot be compiled"):
        compiling.compile_kernels(many, jobs=1)
    assert len(prepared) < 50


def test_slow_kernels_come_first():
    names = ["linear", "attention_forward", "conv_three", "add_norm", "attention_backward_kv"]
    found = sorted((small(name) for name in names), key=compiling._slow_first)
    assert [launch.name for launch in found] == [
        *("attention_backward_kv", "conv_three", "linear", "attention_forward", "add_norm"),
    ]


def test_nothing_is_compiled_ahead_for_a_cpu():
    assert not compiling.can_compile(torch.device("cpu"))


@pytest.fixture
def called(monkeypatch):
    """Run warm-ups as on a GPU, with everything that needs one replaced; return what was called."""
    calls = []
    monkeypatch.setattr(warm_up.grids, "unsupported", lambda *_: None)
    monkeypatch.setattr(warm_up, "_run_all", lambda *_: calls.append("run"))
    monkeypatch.setattr(warm_up, "record", lambda model: ["a launch"])
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(compiling, "can_compile", lambda device: True)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8), raising=False)
    monkeypatch.setattr(
        compiling, "compile_kernels", lambda found, _, jobs: calls.append(("compile", found, jobs))
    )
    return calls


@pytest.mark.parametrize(
    ("jobs", "expected"),
    [
        (None, [("compile", ["a launch"], None), "run"]),
        (3, [("compile", ["a launch"], 3), "run"]),
        (1, ["run"]),
    ],
)
@needs_triton
def test_a_warm_up_compiles_and_then_runs(called, jobs, expected):
    warm_up.warm_up(nn.Linear(1, 1), jobs)
    assert called == expected


@needs_triton
def test_a_warm_up_without_threads_compiles_as_it_runs(called, monkeypatch):
    monkeypatch.setattr(compiling, "can_compile", lambda device: False)
    warm_up.warm_up(nn.Linear(1, 1))
    assert called == ["run"]


@needs_triton
@pytest.mark.parametrize("kind", [RuntimeError, OSError, "TritonError"])
def test_a_warm_up_whose_threads_fail_warns_and_runs(called, monkeypatch, kind):
    from triton.errors import TritonError

    def fail(*_):
        raise (TritonError if kind == "TritonError" else kind)("no space\nleft")

    monkeypatch.setattr(compiling, "compile_kernels", fail)
    with pytest.warns(UserWarning, match=r"several threads \(\w+Error: no space\); they are"):
        warm_up.warm_up(nn.Linear(1, 1))
    assert called == ["run"]


def test_a_warm_up_refuses_a_wrong_number_of_threads():
    with pytest.raises(ValueError, match="jobs must be at least 1, got 0"):
        pale.warm_up(nn.Linear(1, 1), jobs=0)
