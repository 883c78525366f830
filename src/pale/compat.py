"""Private names of other packages: each is used in this file only, with a reason, a probe and a fallback.

A function with the decorator `private` is a fallback, and its name is the one that the package imports:

    from ..compat import tree_map  # torch.utils._pytree.tree_map, or the fallback below if torch has none

The lookup happens at that import (PEP 562); importing this module imports no other package. A fallback computes the
same with public names, is safe but slower, or raises `UnsupportedVersionError` if there is no other way. `missing`
lists the names that the installed versions lack.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import logging
import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import get_ident
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

Function = TypeVar("Function", bound=Callable[..., Any])


class UnsupportedVersionError(ImportError):
    """The installed version of a package lacks a name for which there is no replacement."""


@dataclass(frozen=True)
class Private:
    """A private name, or several that are used together.

    Attributes:
        paths: where the names are, `package.module:attribute`; `Class()` is an instance.
        reason: why no public name is used.
        fallback: replacement if one of the names is missing.
        adapt: makes a function like `fallback` from the objects found; by default the single object is that function.
    """

    paths: tuple[str, ...]
    reason: str
    fallback: Callable[..., Any]
    adapt: Callable[..., Any] | None

    def find(self) -> list[Any]:
        """Return the private objects; raise ImportError or AttributeError if one is missing."""
        return [_find(path) for path in self.paths]

    def available(self) -> bool:
        """Return whether the installed versions have all names."""
        try:
            self.find()
        except (ImportError, AttributeError):
            return False
        return True

    def installed(self) -> bool:
        """Return whether the packages are installed; Triton, for example, is not needed on a CPU."""
        packages = {path.partition(":")[0].partition(".")[0] for path in self.paths}
        return all(importlib.util.find_spec(package) is not None for package in packages)

    def resolve(self) -> Any:
        """Return a function based on the private names, or the fallback."""
        if not self.available():
            return self.fallback
        found = self.find()
        return found[0] if self.adapt is None else self.adapt(*found)


def _find(path: str) -> Any:
    module, _, attributes = path.partition(":")
    found: Any = importlib.import_module(module)
    for name in attributes.split("."):
        found = getattr(found, name.removesuffix("()"))
        if name.endswith("()"):
            found = found()
    return found


NAMES: dict[str, Private] = {}


def private(
    *paths: str, reason: str, adapt: Callable[..., Any] | None = None
) -> Callable[[Function], Function]:
    """Register the decorated function as the fallback of private names; the arguments are those of `Private`."""

    def register(fallback: Function) -> Function:
        NAMES[fallback.__name__] = Private(paths, reason, fallback, adapt)
        return fallback

    return register


def missing() -> dict[str, Private]:
    """Return the names of this module that use their fallbacks with the installed versions."""
    return {
        name: entry for name, entry in NAMES.items() if entry.installed() and not entry.available()
    }


def _raise(path: str, way_out: str) -> Any:
    package = path.partition(".")[0]
    version = importlib.import_module(package).__version__
    raise UnsupportedVersionError(f"{package} {version} has no {path}; {way_out}")


@private(
    "torch.nn.modules.module:_global_forward_hooks",
    "torch.nn.modules.module:_global_forward_pre_hooks",
    "torch.nn.modules.module:_global_backward_hooks",
    "torch.nn.modules.module:_global_backward_pre_hooks",
    reason="No public function returns the hooks of all modules.",
    adapt=lambda *hooks: lambda: any(hooks),
)
def has_global_hooks() -> bool:
    """Assume hooks: every module is called."""
    return True


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_HOOK_PATHS = [f"torch.nn:Module().{name}" for name in _HOOKS]
_STATE = ("_parameters", "_modules")


@private(
    *_HOOK_PATHS,
    reason="No public function returns the hooks of a module.",
    adapt=lambda *_: lambda module: any(getattr(module, name) for name in _HOOKS),
)
def has_hooks(module: nn.Module) -> bool:
    """Assume hooks: the module is called."""
    return True


@private(
    *(f"torch.nn:Module().{name}" for name in _STATE),
    *_HOOK_PATHS,
    reason="`named_parameters` and `named_children` take ten times as long, for every layer at every call.",
    adapt=lambda *_: itemgetter(*_STATE, *_HOOKS),
)
def module_state(attributes: dict[str, Any]) -> tuple[Any, ...]:
    """Raise, so that each layer is checked separately.

    With the private names: parameters, submodules and four kinds of hooks of the module with this `__dict__`.
    """
    raise KeyError("the parameters, submodules and hooks of a module")


@private(
    "torch.nn:Module()._parameters",
    reason="As `module_state`, in a form that `torch.compile` can trace.",
    adapt=lambda _: lambda module: getattr(module, _STATE[0]),
)
def parameters_of(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters of a module, without those of its submodules."""
    return dict(module.named_parameters(recurse=False))


@private(
    "torch.nn:Module()._compiled_call_impl",
    reason="`Module.compile` replaces a module's call; nothing public shows it.",
    adapt=lambda _: lambda: "_compiled_call_impl",
)
def compiled_call_name() -> str:
    """Return an attribute name that no module has: layers count as not compiled, with the same results."""
    return ""


@private(
    "torch.nn:Module._wrapped_call_impl",
    reason="A replaced `Module.__call__` (torch.fx, profilers) must be detected even if it was replaced earlier.",
    adapt=lambda original: lambda: original,
)
def module_call() -> Callable[..., Any]:
    """Return the current `Module.__call__`: an earlier replacement is not detected."""
    from torch import nn

    return nn.Module.__call__


@private(
    "torch:_C._get_tracing_state",
    reason="`torch.jit.is_tracing` takes three times as long, for every block at every call.",
    adapt=lambda state: lambda: state() is not None,
)
def is_tracing() -> bool:
    """Return whether `torch.jit.trace` is tracing."""
    import torch

    return bool(torch.jit.is_tracing())  # type: ignore[attr-defined, no-untyped-call]


@private(
    "torch:_C._functorch.peek_interpreter_stack",
    reason="Nothing public shows that a transform of `torch.func` (vmap, grad) is active.",
    adapt=lambda peek: lambda: peek() is not None,
)
def is_func_transform() -> bool:
    """Assume a transform: only operators of PyTorch run."""
    return True


@private(
    "torch:_C._len_torch_dispatch_stack",
    reason="Nothing public shows that a dispatch mode is active.",
)
def count_dispatch_modes() -> int:
    """Assume one: only operators of PyTorch run."""
    return 1


@private(
    "torch.compiler:_is_exporting_flag",
    reason="`torch.compiler.is_exporting` of torch 2.11 is also true under `torch.compile`.",
    adapt=lambda _: _exporting_flag(),
)
def is_exporting() -> bool:
    """Return whether `torch.export` is tracing; in torch 2.11, or `torch.compile`."""
    import torch

    return torch.compiler.is_exporting()


def _exporting_flag() -> Callable[[], bool]:
    import torch

    return lambda: torch.compiler._is_exporting_flag


@private(
    "torch.utils._python_dispatch:TorchDispatchMode",
    reason="The only way to check each operation while a model is built; no public alias.",
    adapt=lambda mode: lambda: mode,
)
def dispatch_mode() -> type[Any]:
    """Return a class that raises when used: the operations of a hostile configuration cannot be limited without it."""

    class Unavailable:
        def __init__(self) -> None:
            path = "torch.utils._python_dispatch.TorchDispatchMode"
            _raise(path, "install torch 2.11 to 2.15")

    return Unavailable


@private(
    "torch:_C._SetExcludeDispatchKeyGuard",
    "torch:_C.DispatchKey.AutogradFunctionality",
    reason="An operator called by a dispatch mode runs without autograd; no public function turns it on again.",
    adapt=lambda guard, autograd: lambda: guard(autograd, False),
)
def include_autograd() -> AbstractContextManager[Any]:
    """Change nothing: gradients under a dispatch mode raise an error, all others are correct."""
    return nullcontext()


@private(
    "torch:_check",
    reason="The documented way to state a fact about a size to `torch.export`; there is no public alias.",
)
def check_fact(condition: bool) -> None:
    """Raise if a fact about sizes is false."""
    if not condition:
        raise RuntimeError("a size of an exported program must be at least 1")


@private(
    "torch._inductor.inductor_prims:force_stride_order",
    reason="Makes the compiler store a tensor instead of computing it again for each use; no public name.",
)
def force_stride_order(x: Tensor, stride: Sequence[int]) -> Tensor:
    """Return `x` unchanged: the compiled program is slower."""
    return x


@private(
    "torch:ops.mkldnn._linear_pointwise.default",
    reason="oneDNN's linear layer with GELU in one pass; it has no public operator in PyTorch.",
)
def onednn_linear_pointwise(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    scalars: list[Any],
    algorithm: str,
) -> Tensor:
    """Compute the linear layer, then the activation."""
    import torch.nn.functional as F

    y = F.linear(x, weight, bias)
    return F.gelu(y, approximate=algorithm) if activation == "gelu" else y


_LAUNCHES = "Processes all tensors of a model with few kernel launches; no public name."


@private("torch:_foreach_zero_", reason=_LAUNCHES)
def foreach_zero_(tensors: Sequence[Tensor]) -> None:
    """Set each tensor to zero."""
    for x in tensors:
        x.zero_()


@private("torch:_foreach_copy_", reason=_LAUNCHES)
def foreach_copy_(tensors: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source to its tensor."""
    for x, source in zip(tensors, sources, strict=True):
        x.copy_(source)


@private("torch:_foreach_add_", reason=_LAUNCHES)
def foreach_add_(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> None:
    """Add each of `others` to its tensor, in place."""
    for x, other in zip(tensors, others, strict=True):
        x.add_(other)


@private("torch:_foreach_sub", reason=_LAUNCHES)
def foreach_sub(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the difference of each pair."""
    return [x - other for x, other in zip(tensors, others, strict=True)]


@private("torch:_foreach_mul_", reason=_LAUNCHES)
def foreach_mul_(tensors: Sequence[Tensor], factor: Tensor | float) -> None:
    """Multiply each tensor, in place."""
    for x in tensors:
        x.mul_(factor)


@private(
    "torch.utils._pytree:tree_map",
    reason="The containers that PyTorch itself accepts as inputs and outputs; `torch.utils` has no public alias.",
)
def tree_map(function: Callable[[Any], Any], tree: Any) -> Any:
    """Apply `function` to the leaves of nested lists, tuples and dictionaries."""
    if isinstance(tree, dict):
        return type(tree)((key, tree_map_(function, value)) for key, value in tree.items())
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(tree_map_(function, value) for value in tree))
    if isinstance(tree, list | tuple):
        return type(tree)(tree_map_(function, value) for value in tree)
    return function(tree)


@private("torch.utils._pytree:tree_leaves", reason="As `tree_map`.")
def tree_leaves(tree: Any) -> list[Any]:
    """Return the leaves of nested lists, tuples and dictionaries."""
    return list(_leaves(tree))


@private("torch.utils._pytree:tree_any", reason="As `tree_map`.")
def tree_any(predicate: Callable[[Any], bool], tree: Any) -> bool:
    """Return whether `predicate` holds for a leaf of nested lists, tuples and dictionaries."""
    return any(map(predicate, _leaves(tree)))


tree_map_ = tree_map  # the fallback calls itself; `tree_map` is looked up at import


def _leaves(tree: Any) -> Iterator[Any]:
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, list | tuple):
        yield tree
        return
    for value in tree:
        yield from _leaves(value)


@private(
    "torch._inductor:aoti_compile_and_package",
    reason="The documented entry point of AOTInductor; there is no public alias.",
)
def aoti_compile_and_package(
    program: torch.export.ExportedProgram,
    *,
    package_path: str,
    inductor_configs: dict[str, Any] | None = None,
) -> str:
    """Raise: nothing else writes AOTInductor packages."""
    name = "torch._inductor.aoti_compile_and_package"
    return _raise(name, "export another format, or install torch 2.11 to 2.15")


@private(
    "torch._inductor:aoti_load_package",
    reason="The documented way to load an AOTInductor package; there is no public alias.",
)
def aoti_load_package(path: str) -> Callable[..., Any]:
    """Raise: nothing else reads AOTInductor packages."""
    name = "torch._inductor.aoti_load_package"
    return _raise(name, "export another format, or install torch 2.11 to 2.15")


@private(
    "torch.utils.data.dataloader:_MultiProcessingDataLoaderIter._shutdown_workers",
    reason="Ends the workers before the interpreter; DataLoader has no public method for it.",
)
def shut_down_workers(iterator: Any) -> None:
    """Do nothing: the caller ends the processes."""


@private(
    "torch.utils.data.dataloader:_MultiProcessingDataLoaderIter",
    reason="The processes of a DataLoader; it has no public list of them.",
    adapt=lambda _: lambda iterator: vars(iterator)["_workers"],
)
def worker_processes(iterator: Any) -> Iterable[Any]:
    """Return all child processes of this one, which include the workers."""
    return multiprocessing.active_children()


@private(
    "timm.models._features:feature_take_indices",
    reason="timm models select stages with it; `timm.models` does not export it.",
)
def feature_take_indices(
    num_features: int, indices: int | list[int] | None = None
) -> tuple[list[int], int]:
    """Return the selected stages, and the last of them."""
    chosen = num_features if indices is None else indices
    if isinstance(chosen, int):
        chosen = list(range(-chosen, 0))
    taken = [num_features + i if i < 0 else i for i in chosen]
    if not taken or not all(0 <= i < num_features for i in taken):
        raise AssertionError(f"stages must be in 0..{num_features - 1}, got {indices}")
    return taken, max(taken)


@private(
    "timm.models._hub:save_config_for_hf",
    reason="Writes a model's config.json alone; the public `save_for_hf` writes the weights too.",
)
def save_config_for_hf(model: nn.Module, config_path: str | Path, **options: Any) -> None:
    """Write weights and config.json to a temporary folder, and keep the latter."""
    from timm.models import save_for_hf

    with TemporaryDirectory() as folder:
        save_for_hf(model, folder, **options)
        Path(config_path).write_bytes((Path(folder) / "config.json").read_bytes())


@private(
    "timm.data.random_erasing:RandomErasing._erase",
    reason="Draws the boxes of one image of a given size; the public call needs the image.",
)
def erase(erasing: Any, image: Any, *size_and_dtype: Any) -> None:
    """Call `erasing` with an object that has the size of the image and passes on assignments."""
    *size, dtype = size_and_dtype  # channels, height, width

    class Sized:
        def __init__(self) -> None:
            self.dtype = dtype

        def size(self) -> list[int]:
            return size

        def __setitem__(self, where: Any, pixels: Any) -> None:
            image[where] = pixels

    erasing(Sized())


@private(
    "torchvision.models.detection.rpn:RegionProposalNetwork._get_top_n_idx",
    reason="torchvision's choice of anchors, which is exportable; no public method.",
)
def top_anchors(rpn: Any, objectness: Tensor, num_anchors_per_level: list[int]) -> Tensor:
    """Return the indices of the best anchors of each level, (b, n)."""
    import torch

    found, start = [], 0
    for level in objectness.split(num_anchors_per_level, 1):
        _, indices = level.topk(min(rpn.pre_nms_top_n(), level.shape[1]), dim=1)
        found.append(indices + start)
        start += level.shape[1]
    return torch.cat(found, dim=1)


@private(
    "triton.runtime.driver:driver.set_active",
    "triton.backends.compiler:GPUTarget",
    reason="Triton compiles for the GPU that its driver finds; no public function chooses another.",
    adapt=lambda activate, target: (
        lambda capability: activate(
            SimpleNamespace(
                get_current_target=lambda: target("cuda", capability, 32),
                get_current_device=lambda: 0,
                get_current_stream=lambda device: 0,
            )
        )
    ),
)
def compile_without_gpu(capability: int) -> None:
    """Raise: kernels are compiled at their first launch, on a machine with the GPU."""
    _raise("triton.runtime.driver.driver.set_active", "run the model on a machine with the GPU")


@private(
    "triton.compiler.compiler:make_backend",
    "triton.compiler.compiler:ASTSource",
    "triton:knobs.runtime",
    "triton.runtime.driver:driver",
    "triton.runtime.cache:get_cache_key",
    "triton.runtime.cache:get_cache_manager",
    "triton._C.libtriton:get_cache_invalidating_env_vars",
    reason="Nothing public shows whether Triton's cache has a kernel; compiling it would take as long as a launch.",
    adapt=lambda *found: partial(_kernel_in_cache, found),
)
def kernel_in_cache(kernel: Any, *args: Any, **keywords: Any) -> bool:
    """Assume not: a compilation finds out."""
    return False


def _kernel_in_cache(found: Sequence[Any], kernel: Any, *args: Any, **keywords: Any) -> bool:
    """Let Triton prepare a compilation, which a hook stops, and look for the files of the result."""
    make_backend, source_class, knobs, driver, cache_key, cache_manager, environment = found
    # Triton does not call the hook for a kernel that this process has already compiled.
    present, thread, before = True, get_ident(), knobs.jit_cache_hook

    def look(*, compile: Any, **rest: Any) -> Any:
        nonlocal present
        if get_ident() != thread:  # a launch, which must not be stopped
            return before and before(compile=compile, **rest)
        backend = make_backend(driver.active.get_current_target())
        values = json.loads(compile["specialization_data"])["options"].items()
        options = backend.parse_options(
            {name: tuple(x) if isinstance(x, list) else x for name, x in values}
        )
        (attributes,) = compile["configs"]
        source = source_class(kernel, compile["signature"], compile["constants"], attributes)
        key = cache_key(source, backend, options, environment())
        manager = cache_manager(hashlib.sha256(key.encode()).hexdigest())
        name = f"{source.name[:150]}.json"
        present = name in (manager.get_group(name) or {})
        return True

    knobs.jit_cache_hook = look
    try:
        kernel.warmup(*args, grid=(1,), **keywords)
    finally:
        knobs.jit_cache_hook = before
    return present


@private(
    "triton.backends.nvidia.driver:CudaLauncher",
    reason="Triton 3.6 runs a C compiler for the code that launches a kernel; nothing public does it before a launch.",
    adapt=lambda launcher: partial(_build_launcher, launcher),
)
def build_launcher(compiled: Any) -> bool:
    """Build nothing: it is built at the first launch. Return whether it exists."""
    return False


def _build_launcher(launcher: Callable[..., Any], compiled: Any) -> bool:
    """Build it if this Triton has one for each kernel; that needs the library of the GPU driver, but no GPU."""
    if hasattr(importlib.import_module(launcher.__module__), "make_launcher"):
        try:
            launcher(compiled.src, compiled.metadata)
        except AssertionError:  # there is no libcuda.so.1
            return False
    return True


@private(
    "atexit:_run_exitfuncs",
    reason="A process that ends with `os._exit` skips the `atexit` callbacks; no public function runs them.",
)
def run_exit_functions() -> None:
    """Shut down logging, the only callback whose absence loses output."""
    logging.shutdown()


# Functions are kept in `NAMES` and removed from the module, so that `__getattr__` looks up the private name.
for _name in NAMES:
    del globals()[_name]


def __getattr__(name: str) -> Any:
    if name not in NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = NAMES[name].resolve()
    return globals()[name]
