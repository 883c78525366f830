"""Record which families of GPU code have run; with `--every-family` a session fails if one has not."""

import importlib
from collections import Counter
from typing import Any

import pytest
import torch

# The Triton kernels of each family, by module.
KERNELS = {
    "attention": ("pale.ops.pale_attention.triton_kernels",),
    "block": ("pale.ops.block.triton_kernels", "pale.ops.block.conv_kernels"),
    "suppression": ("pale.tasks.detection.suppression_kernels",),
    "loss": ("pale.tasks.segmentation.loss_kernels",),
    "augmentation": ("pale.data.gpu.augment_kernels",),
}
CALLS = ("decoding", "graphs")  # not our kernels: calls are counted

calls: Counter[str] = Counter()
of_others: list[list[str]] = []  # module and name of kernels that other processes have run


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--every-family", action="store_true", help="fail unless every family of GPU code has run"
    )


def pytest_configure(config: pytest.Config) -> None:
    if not torch.cuda.is_available():
        return
    from pale.data.gpu import decode as on_device

    decode, replay = on_device.decode_jpeg, torch.cuda.CUDAGraph.replay

    def counted_decode(*args, **kwargs):
        found = decode(*args, **kwargs)
        calls["decoding"] += found[0].is_cuda
        return found

    def counted_replay(graph):
        calls["graphs"] += 1
        return replay(graph)

    on_device.decode_jpeg = counted_decode
    torch.cuda.CUDAGraph.replay = counted_replay


def programs(module: str) -> list[Any]:
    """Return the kernels of a module without the functions that they call."""
    found = vars(importlib.import_module(module)).values()
    functions = [k for k in found if getattr(k, "params", None)]
    functions = [k for k in functions if "begin()" in k.src or "tl.program_id" in k.src]
    return [k for k in functions if k.params[0].name.startswith("p_")]


def ran() -> dict[str, set[str]]:
    """Return the kernels that ran, in this process or in those of pytest-xdist, by module."""
    from pale.ops import launching as kernels

    found: dict[str, set[str]] = {}
    for module, name, *_ in (*kernels._compiled, *of_others):
        found.setdefault(module, set()).add(name)
    return found


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node) -> None:
    """Add the kernels that a process of pytest-xdist has run."""
    found = getattr(node, "workeroutput", {}).get("families", {"kernels": [], "calls": {}})
    of_others.extend(found["kernels"])
    calls.update(found["calls"])


def missing() -> dict[str, str]:
    """Return the families that have not run, with the reason."""
    reasons = {name: "was not called" for name in CALLS if not calls[name]}
    found = ran()
    for family, modules in KERNELS.items():
        if not any(found.get(module) for module in modules):
            reasons[family] = "no kernel has run"
            continue
        names = {(m, kernel.__name__) for m in modules for kernel in programs(m)}
        left = sorted(name for m, name in names if name not in found.get(m, set()))
        if left:
            reasons[family] = f"these kernels have not run: {', '.join(left)}"
    return reasons


def pytest_sessionfinish(session: pytest.Session) -> None:
    wanted = session.config.getoption("--every-family")
    if hasattr(session.config, "workeroutput"):  # one of several processes: the first one judges
        kernels = [[module, name] for module, names in ran().items() for name in names]
        session.config.workeroutput["families"] = {"kernels": kernels, "calls": dict(calls)}
        return
    if wanted and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED if missing() else session.exitstatus


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not terminalreporter.config.getoption("--every-family"):
        return
    reasons = missing()
    terminalreporter.section("families of GPU code")
    for family in (*KERNELS, *CALLS):
        terminalreporter.write_line(f"{family}: {reasons.get(family, 'ran')}")
