"""Build models whose name, options and sizes may come from a file.

The header of weights and a recipe.yaml are hostile until checked. timm's factory also has arguments that download, read
and write files. `create` passes only architecture arguments on, by an allow-list, with plain values in bounds.
`build_for` builds on the meta device first, with a limit of operations, compares the result with the shapes in the
file, and only then allocates memory.
"""

from __future__ import annotations

import inspect
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from typing import Any, TypeVar

import timm
import torch
from torch import Tensor, nn

from ..compat import dispatch_mode, tree_any, tree_map
from ..errors import SettingsError, WeightsError
from ..model.pale_transformer import VARIANTS, PaleConfig
from ..weights.compare import load_into
from ..weights.read import Weights

M = TypeVar("M", bound=nn.Module)

MAX_NUMBER = 1 << 16  # of an option
MAX_ENTRIES = 64  # of an option that is a list
COMMON = frozenset({"in_chans", "global_pool", "drop_rate", "drop_path_rate"})
OWN = COMMON | {field.name for field in fields(PaleConfig)}
# Arguments of timm classes that do not belong to the architecture, or that the task sets.
WITHHELD = frozenset({"self", "num_classes", "device", "dtype"})
# Options with a string value: looked up in tables of names, never opened as files.
WORDS = frozenset(
    {
        *("attention", "position", "backend", "global_pool", "act_layer", "norm_layer"),
        *("aa_layer", "attn_layer", "se_layer", "stem_type", "pad_type", "pos_embed"),
        *("rel_pos_type", "rope_type", "down_op", "spatial_conv", "weight_init", "encoder_pool"),
    }
)
WORD = re.compile(r"[A-Za-z0-9_]{0,32}")

# The meta device allocates nothing, so the work of building must be bounded: operations per tensor of the file (timm
# models need 2 to 8), and what a model holds in addition to its weights.
OPERATIONS = 12
MIN_OPERATIONS = 2000
MAX_COMPUTED = 1 << 28  # bytes of buffers that are computed, not stored: masks, tables of positions


def require_model(name: str) -> None:
    """Raise an error unless timm's registry, which includes the models of this package, has this name.

    Names with a prefix, such as hf-hub: and local-dir:, are not in the registry.
    """
    if name not in timm.list_models():
        near = timm.list_models(f"*{re.sub(r'[^A-Za-z0-9_]', '', name)[:8]}*")[:3]
        raise SettingsError(
            f"model.name must be one of {', '.join(VARIANTS)} or a timm model, got {name!r}"
            + (f"; did you mean {', '.join(near)}?" if near else "")
        )


def allowed_options(name: str) -> frozenset[str]:
    """Return the options of a model: arguments of its architecture."""
    if name in VARIANTS:
        return OWN
    entry = timm.model_entrypoint(name)
    made = inspect.signature(entry).return_annotation
    if isinstance(made, str):
        made = getattr(sys.modules[entry.__module__], made, None)
    if not (isinstance(made, type) and issubclass(made, nn.Module)):
        return COMMON
    taken = inspect.signature(made).parameters.values()
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return frozenset(p.name for p in taken if p.kind not in variable) - WITHHELD | COMMON


def checked_options(
    name: str, options: Mapping[str, object], also: frozenset[str] = frozenset()
) -> dict[str, object]:
    """Return the options with lists as tuples; raise an error if one is not an argument of the architecture.

    Args:
        name: name of the model, in timm's registry.
        options: from the settings.
        also: further names that are allowed.
    """
    allowed = allowed_options(name) | also
    if unknown := sorted(map(str, options.keys() - allowed)):
        raise SettingsError(
            f"model.options must be architecture arguments of {name}, got {', '.join(unknown)[:200]}; "
            "correct or remove them"
        )
    return {key: _plain(key, value, 2) for key, value in options.items()}


def _plain(key: str, value: object, depth: int) -> object:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int | float) and math.isfinite(value) and abs(value) <= MAX_NUMBER:
        return value
    if isinstance(value, str) and key in WORDS and WORD.fullmatch(value):
        return value
    if isinstance(value, list | tuple) and depth and len(value) <= MAX_ENTRIES:
        return tuple(_plain(key, each, depth - 1) for each in value)
    raise SettingsError(
        f"model.options.{key} must be a number up to {MAX_NUMBER}, a name that the model knows, or at most "
        f"{MAX_ENTRIES} of them, got {repr(value)[:80]}"
    )


def create(
    name: str,
    arguments: Mapping[str, object],
    options: Mapping[str, object],
    optional: Mapping[str, object] | None = None,
) -> Any:
    """Create a timm model with random weights; nothing is downloaded, read or written.

    Args:
        name: name of the model.
        arguments: set by the task.
        options: from the settings; they are checked, and replace arguments.
        optional: arguments that are left out if the model does not accept them.
    """
    require_model(name)
    also = frozenset({"out_indices"}) if arguments.get("features_only") else frozenset()
    given = checked_options(name, options, also)
    # These come last, so that they override all others.
    fixed = {"pretrained": False, "pretrained_cfg": None, "checkpoint_path": ""}
    try:
        return _create(name, {**arguments, **given, **fixed}, optional or {})
    except (ValueError, MemoryError):
        raise
    except Exception as error:  # timm checks little: failed assertions, indices, divisions by zero
        if not given:
            raise
        reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise SettingsError(
            f"model.options must be arguments of {name}, got {repr(dict(options))[:200]} ({reason}); "
            "correct or remove them"
        ) from error


def _create(name: str, arguments: dict[str, object], optional: Mapping[str, object]) -> Any:
    if optional:
        try:
            return timm.create_model(name, **{**optional, **arguments})
        except TypeError:
            pass
    return timm.create_model(name, **arguments)


class TooLargeError(WeightsError):
    """A model is larger than the file that claims to contain its weights."""


class _Bounded(dispatch_mode()):  # type: ignore[misc]
    """Raise an error if building takes too many operations, or an operation that needs much memory."""

    def __init__(self, operations: int) -> None:
        super().__init__()
        self.left = operations

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self.left -= 1
        if self.left < 0:
            raise TooLargeError("it takes too many operations to build")
        if _in_memory(args, kwargs):
            self._check_size(func, args, kwargs)
        return func(*args, **kwargs)

    def _check_size(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """Run an operation on the meta device first."""
        try:
            args, kwargs = tree_map(_on_meta, (args, kwargs))
            made = func(*args, **kwargs)
        except (RuntimeError, NotImplementedError):  # it needs values, so its output is small
            return
        if isinstance(made, Tensor) and made.numel() * made.element_size() > MAX_COMPUTED:
            raise TooLargeError(f"building it needs a tensor of shape {tuple(made.shape)}")


def _in_memory(args: object, kwargs: dict[str, Any]) -> bool:
    device = kwargs.get("device")
    if device is not None and torch.device(device).type != "meta":
        return True
    return tree_any(lambda x: isinstance(x, Tensor) and not x.is_meta, (args, kwargs))


def _on_meta(value: object) -> object:
    if isinstance(value, Tensor):
        return value.to("meta")
    return torch.device("meta") if isinstance(value, torch.device) else value


def build_for(weights: Weights, build: Callable[[], M], source: str | os.PathLike[str]) -> M:
    """Build the model of weights, after a build on the meta device has shown that they fit it.

    Args:
        weights: the shapes of their tensors are compared; `load_header` reads them without the rest of the file.
        build: builds the model, with random weights.
        source: where the weights come from, for messages.
    """
    shapes = {name: tensor.to("meta") for name, tensor in weights.tensors.items()}
    try:
        bound = _Bounded(MIN_OPERATIONS + OPERATIONS * len(shapes))
        with bound, torch.device("meta"):
            model = build()
    except TooLargeError as error:
        raise WeightsError(
            f"{source} does not fit its own recipe, whose model is larger than its {len(shapes)} tensors ({error}); "
            "use another file"
        ) from None
    except (ValueError, MemoryError):
        raise
    except Exception as error:  # invalid sizes of tensors, and what timm does not check
        reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise WeightsError(
            f"{source} does not fit its own recipe, whose model cannot be built ({reason}); use another file"
        ) from error
    load_into(model, Weights(shapes), source, new_head=False)
    # Position maps are resized while loading, masks and tables are computed: neither is bounded by the file.
    computed = _size(model.state_dict().values()) - _size(shapes.values())
    stored = {id(tensor) for tensor in model.state_dict(keep_vars=True).values()}
    computed += _size(tensor for tensor in model.buffers() if id(tensor) not in stored)
    if computed > MAX_COMPUTED:
        raise WeightsError(
            f"{source} does not fit its own recipe: the model would hold {computed >> 20} MiB of masks and positions "
            f"beside its weights, at most {MAX_COMPUTED >> 20} are allowed; its sizes (img_size, window_size) are wrong"
        )
    return build()


def _size(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of tensors, with floating-point ones as float32."""
    return sum(t.numel() * (4 if t.is_floating_point() else t.element_size()) for t in tensors)
