"""Private names of other packages: all exist here, each fallback works, and no other file uses one."""

from __future__ import annotations

import ast
import copy
import importlib.util
import inspect
import json
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from pale import compat

ROOT = Path(__file__).parents[1]
Pair = namedtuple("Pair", "a b")


@pytest.fixture(scope="module")
def house() -> ModuleType:
    spec = importlib.util.spec_from_file_location("house", ROOT / "tools" / "house.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


INSTALLED = [name for name, entry in compat.NAMES.items() if entry.installed()]


@pytest.mark.parametrize("name", INSTALLED)
def test_the_installed_versions_have_every_name(name: str) -> None:
    assert compat.NAMES[name].available(), compat.NAMES[name].paths
    assert getattr(compat, name) is not compat.NAMES[name].fallback


def test_nothing_is_missing() -> None:
    assert compat.missing() == {}


@pytest.mark.parametrize("name", compat.NAMES)
def test_every_name_has_a_reason_and_a_described_fallback(name: str) -> None:
    entry = compat.NAMES[name]
    assert entry.reason.endswith(".")
    assert "\n" not in entry.reason
    assert (entry.fallback.__doc__ or "").strip().partition("\n")[0].endswith(".")


def removed(entry: compat.Private, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return what `entry` resolves to when its first private name does not exist."""
    path = entry.paths[0]
    owner, _, name = path.partition(":")[2].rpartition(".")
    module = path.partition(":")[0]
    parent = compat._find(f"{module}:{owner}") if owner else importlib.import_module(module)
    if inspect.ismodule(parent) or inspect.isclass(parent):
        monkeypatch.delattr(parent, name)
    else:  # an attribute of an instance, or an operator
        find = compat._find

        def without(wanted: str) -> Any:
            if wanted == path:
                raise AttributeError(path)
            return find(wanted)

        monkeypatch.setattr(compat, "_find", without)
    assert not entry.available()
    result = entry.resolve()
    monkeypatch.undo()
    return result


def check_constant(expected: object) -> Callable[..., None]:
    def check(fallback: Callable[..., Any], _: Any) -> None:
        arguments = [nn.Linear(1, 1)] * len(inspect.signature(fallback).parameters)
        assert fallback(*arguments) == expected

    return check


def check_foreach(*others: Any) -> Callable[..., None]:
    def check(fallback: Callable[..., Any], original: Callable[..., Any]) -> None:
        one, two = ([torch.arange(3.0), torch.ones(2, 2)] for _ in range(2))
        first, second = fallback(one, *others), original(two, *others)
        for a, b in zip(first or one, second or two, strict=True):
            assert torch.equal(a, b)
        assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))

    return check


TREE = {"a": [1, (2, 3)], "b": Pair(4, [5])}


def check_tree_map(fallback: Callable[..., Any], original: Callable[..., Any]) -> None:
    doubled = fallback(lambda x: 2 * x, TREE)
    assert doubled == original(lambda x: 2 * x, TREE) == {"a": [2, (4, 6)], "b": Pair(8, [10])}
    assert isinstance(doubled["b"], Pair)


def check_tree_leaves(fallback: Callable[..., Any], original: Callable[..., Any]) -> None:
    assert fallback(TREE) == original(TREE) == [1, 2, 3, 4, 5]


def check_tree_any(fallback: Callable[..., Any], original: Callable[..., Any]) -> None:
    for value in (5, 6):
        assert fallback(value.__eq__, TREE) == original(value.__eq__, TREE) == (value == 5)


def check_module_state(fallback: Callable[..., Any], _: Any) -> None:
    with pytest.raises(KeyError):
        fallback(vars(nn.Linear(1, 1)))


def check_parameters_of(fallback: Callable[..., Any], original: Callable[..., Any]) -> None:
    layer = nn.Sequential(nn.Linear(2, 3))[0]
    assert list(fallback(layer)) == list(original(layer)) == ["weight", "bias"]


def check_module_call(fallback: Callable[..., Any], original: Callable[..., Any]) -> None:
    assert fallback() is original() is nn.Module.__call__


def check_false_outside(fallback: Callable[..., Any], original: Callable[..., Any]) -> None:
    assert fallback() is original() is False


def check_dispatch_mode(fallback: Callable[..., Any], _: Any) -> None:
    class Mode(fallback()):
        pass

    with pytest.raises(compat.UnsupportedVersionError, match="TorchDispatchMode; install torch"):
        Mode()


def check_include_autograd(fallback: Callable[..., Any], _: Any) -> None:
    with fallback():
        assert torch.is_grad_enabled()


def check_fact(fallback: Callable[..., Any], original: Callable[..., Any]) -> None:
    for check in (fallback, original):
        check(True)
        with pytest.raises(RuntimeError):
            check(False)


def check_stride_order(fallback: Callable[..., Any], _: Any) -> None:
    x = torch.ones(2, 3)
    assert fallback(x, x.stride()) is x


def check_onednn(fallback: Callable[..., Any], original: Callable[..., Any]) -> None:
    x, weight, bias = torch.randn(4, 8), torch.randn(16, 8), torch.randn(16)
    for how in (("gelu", [], "none"), ("none", [], "")):
        expected = original(x, weight, bias, *how)
        assert torch.allclose(fallback(x, weight, bias, *how), expected, atol=1e-5)


def check_raises(fallback: Callable[..., Any], _: Any) -> None:
    given = (
        {"package_path": "x"} if "package_path" in inspect.signature(fallback).parameters else {}
    )
    with pytest.raises(compat.UnsupportedVersionError, match="export another format"):
        fallback("x", **given)


def check_shut_down(fallback: Callable[..., Any], _: Any) -> None:
    assert fallback(object()) is None


def check_processes(fallback: Callable[..., Any], original: Callable[..., Any]) -> None:
    loader = torch.utils.data.DataLoader([1, 2], num_workers=1)
    iterator = iter(loader)
    try:
        (worker,) = original(iterator)
        assert worker in fallback(iterator)
    finally:
        list(iterator)


def check_stages(fallback: Callable[..., Any], original: Callable[..., Any]) -> None:
    for indices in (None, 2, [0, -1], [1]):
        assert fallback(4, indices) == original(4, indices)
    for indices in (5, [4], [-5]):
        for function in (fallback, original):
            with pytest.raises(AssertionError):
                function(4, indices)


def check_config(fallback: Callable[..., Any], original: Callable[..., Any], folder: Path) -> None:
    import pale

    model = pale.create_model("pale_nano", num_classes=2)
    options = {"model_config": {"label_names": ["a", "b"]}, "model_args": {"num_classes": 2}}
    fallback(model, folder / "a.json", **copy.deepcopy(options))
    original(model, folder / "b.json", **options)  # timm 1.0.29 changes what it is given
    found, expected = (json.loads((folder / name).read_text()) for name in ("a.json", "b.json"))
    assert found == expected


def check_erase(fallback: Callable[..., Any], original: Callable[..., Any]) -> None:
    import random

    from timm.data.random_erasing import RandomErasing

    images = []
    for function in (fallback, original):
        random.seed(1)
        torch.manual_seed(1)
        images.append(torch.zeros(3, 20, 30))
        erasing = RandomErasing(1, mode="pixel", device="cpu")
        function(erasing, images[-1], 3, 20, 30, torch.float32)
    assert images[0].count_nonzero()
    assert torch.equal(*images)


def check_top_anchors(fallback: Callable[..., Any], original: Callable[..., Any]) -> None:
    class Rpn:
        def pre_nms_top_n(self) -> int:
            return 3

    scores = torch.randn(2, 9)
    assert torch.equal(fallback(Rpn(), scores, [7, 2]), original(Rpn(), scores, [7, 2]))


def check_compile_without_gpu(fallback: Callable[..., Any], original: Callable[..., Any]) -> None:
    from triton.runtime.driver import driver

    with pytest.raises(compat.UnsupportedVersionError, match="on a machine with the GPU"):
        fallback(90)
    before = driver._active
    try:
        original(86)
        target = driver.active.get_current_target()
        device = driver.active.get_current_device()
        driver.active.get_current_stream(device)
    finally:
        driver._active = before
    assert (target.backend, target.arch, target.warp_size) == ("cuda", 86, 32)


def check_kernel_in_cache(fallback: Callable[..., Any], original: Callable[..., Any]) -> None:
    # That the original finds what was compiled is tested in tests/ops/test_compiling.py.
    assert fallback("kernel", 1, num_warps=4) is False
    assert original is not fallback


def check_build_launcher(fallback: Callable[..., Any], original: Callable[..., Any]) -> None:
    from triton.backends.nvidia import driver

    compiled = SimpleNamespace(src="source", metadata="metadata")
    assert fallback(compiled) is False
    built = []

    def launcher(source: str, metadata: str) -> None:
        built.append((source, metadata))
        if len(built) == 2:
            raise AssertionError("libcuda.so cannot found!")

    launcher.__module__ = driver.__name__
    build = compat.NAMES["build_launcher"].adapt
    assert build is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(driver, "make_launcher", raising=False)
        assert build(launcher)(compiled) is True
        assert built == []
        patch.setattr(driver, "make_launcher", None, raising=False)
        assert build(launcher)(compiled) is True
        assert built == [("source", "metadata")]
        assert build(launcher)(compiled) is False


def check_exit_functions(fallback: Callable[..., Any], _: Any) -> None:
    # In its own process: it closes the handlers of the logging.
    code = (
        "import logging.handlers, pale.compat as c\n"
        "h = logging.handlers.MemoryHandler(9, target=logging.StreamHandler())\n"
        "logging.getLogger().addHandler(h); logging.error('kept')\n"
        f"c.NAMES[{fallback.__name__!r}].fallback(); import os; os._exit(0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "kept\n"


CHECKS: dict[str, Callable[..., None]] = {
    "has_global_hooks": check_constant(True),
    "has_hooks": check_constant(True),
    "module_state": check_module_state,
    "parameters_of": check_parameters_of,
    "compiled_call_name": check_constant(""),
    "module_call": check_module_call,
    "is_tracing": check_false_outside,
    "is_func_transform": check_constant(True),
    "count_dispatch_modes": check_constant(1),
    "is_exporting": check_false_outside,
    "dispatch_mode": check_dispatch_mode,
    "include_autograd": check_include_autograd,
    "check_fact": check_fact,
    "force_stride_order": check_stride_order,
    "onednn_linear_pointwise": check_onednn,
    "foreach_zero_": check_foreach(),
    "foreach_copy_": check_foreach([torch.full((3,), 2.0), torch.zeros(2, 2)]),
    "foreach_add_": check_foreach([torch.full((3,), 2.0), torch.ones(2, 2)]),
    "foreach_sub": check_foreach([torch.full((3,), 2.0), torch.ones(2, 2)]),
    "foreach_mul_": check_foreach(torch.tensor(3.0)),
    "tree_map": check_tree_map,
    "tree_leaves": check_tree_leaves,
    "tree_any": check_tree_any,
    "aoti_compile_and_package": check_raises,
    "aoti_load_package": check_raises,
    "shut_down_workers": check_shut_down,
    "worker_processes": check_processes,
    "feature_take_indices": check_stages,
    "save_config_for_hf": check_config,
    "erase": check_erase,
    "top_anchors": check_top_anchors,
    "compile_without_gpu": check_compile_without_gpu,
    "kernel_in_cache": check_kernel_in_cache,
    "build_launcher": check_build_launcher,
    "run_exit_functions": check_exit_functions,
}


@pytest.mark.parametrize("name", INSTALLED)
def test_the_fallback_works_where_the_name_is_missing(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    entry, original = compat.NAMES[name], getattr(compat, name)
    fallback = removed(entry, monkeypatch)
    assert fallback is entry.fallback
    check = CHECKS[name]
    given = (tmp_path,) if "folder" in inspect.signature(check).parameters else ()
    check(fallback, original, *given)


def test_importing_compat_imports_no_other_package() -> None:
    code = "import sys, pale.compat; print(*{'torch', 'timm', 'torchvision'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'no_such_name'"):
        compat.no_such_name  # noqa: B018


def test_no_other_file_uses_private_names(house: ModuleType) -> None:
    trees = {path: ast.parse(text) for path, text in house.sources(None).items()}
    assert len(trees) > 100
    own = frozenset().union(*map(house.defined_attributes, trees.values()))
    found = [
        f"{path}:{line}: {name}"
        for path, tree in trees.items()
        if path != "src/pale/compat.py"
        for line, name in house.private_uses(tree, own)
    ]
    assert found == []


@pytest.mark.parametrize(
    "code",
    [
        "import torch._inductor",
        "from torch.utils._pytree import tree_map",
        "import torch\ntorch._C.x",
        "def f(parser):\n    return parser._actions",
        "def f(module):\n    return getattr(module, '_forward_hooks')",
        "def f(module):\n    return module.__dict__['_parameters']",
        "import importlib\nimportlib.import_module('torch._inductor.config')",
        "class A(B):\n    def _load(self):\n        super()._load()",
    ],
)
def test_private_uses_are_found(house: ModuleType, code: str) -> None:
    assert house.private_names(ast.parse(code)) == 1


@pytest.mark.parametrize(
    "code",
    [
        "class A:\n    def f(self):\n        self._x = 1\n        return self._x",
        "from . import sibling\nsibling._x",
        "import os\nos._exit(0)",
        "x = {'_mask.png': 1}\n'_ap' in x",
    ],
)
def test_names_of_the_package_are_not_private_uses(house: ModuleType, code: str) -> None:
    assert house.private_names(ast.parse(code)) == 0
