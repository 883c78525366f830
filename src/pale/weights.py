"""Weights in files: safetensors with all that is needed to use them; foreign files are read without unpickling."""

from __future__ import annotations

import json
import os
import pickle
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from . import packing, zoo


@dataclass(frozen=True)
class Weights:
    """Tensors by name, and what the file says about them.

    Attributes:
        tensors: by name.
        about: for files of our own: "recipe" (plain values), "classes" (names), "step"; else empty.
    """

    tensors: dict[str, Tensor]
    about: dict[str, Any] = field(default_factory=dict)


def save(
    path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, Any], packed: bool = False
) -> None:
    """Write a safetensors file with `about` in its header.

    Args:
        path: the file.
        tensors: by name.
        about: see `Weights`.
        packed: in a quarter of the space, rounded (`packing`); `load` reads both.
    """
    header = dict(about)
    if packed:
        stored = packing.pack(tensors)
        header["packed"] = {"format": packing.FORMAT, "crc32": packing.checksum(stored)}
    else:
        stored = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(stored, path, metadata={"pale": json.dumps(header)})


def load(path: Path) -> Weights:
    """Read a run's folder, a safetensors file, or a foreign .pth or .pt as far as it holds tensors alone.

    What is no path on this machine may be the name of weights that come with the package (`zoo`).
    """
    if not path.exists() and (known := zoo.find(str(path))) is not None:
        path = known
    if path.is_dir():
        found = [path / name for name in ("weights.safetensors", "model.safetensors")]
        found = [file for file in found if file.is_file()]
        if not found:
            raise ValueError(
                f"{path} holds no weights.safetensors; a run writes it at each evaluation: "
                f"go on with pale train --resume {path}, or give a .safetensors file"
            )
        path = found[0]
    if not path.is_file():
        raise ValueError(
            f"there are no weights at {path}; give a .safetensors file, a run, or a name that pale weights lists"
        )
    if path.suffix == ".safetensors":
        try:
            with safe_open(path, "pt") as file:
                about = json.loads((file.metadata() or {}).get("pale", "{}"))
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, json.JSONDecodeError) as error:
            raise _damaged(path, error) from None
        return _unpacked(path, tensors, about)
    return _foreign(path)


def _unpacked(path: Path, tensors: dict[str, Tensor], about: dict[str, Any]) -> Weights:
    how = about.pop("packed", None)
    if how is None:
        return Weights(tensors, about)
    number = how.get("format") if isinstance(how, dict) else None
    if number != packing.FORMAT:
        raise ValueError(
            f"{path} is packed in format {number}, this version reads {packing.FORMAT}; "
            "update: pip install -U pale-transformer"
        )
    if how.get("crc32") != packing.checksum(tensors):
        raise _damaged(path, "its bytes are not those that were written")
    try:
        return Weights(packing.unpack(tensors), about)
    except ValueError as error:
        raise _damaged(path, error) from None


def _damaged(path: Path, reason: object) -> ValueError:
    return ValueError(
        f"{path} is damaged ({reason}); take another file, or an earlier checkpoint of the run"
    )


class PickleWarning(UserWarning):
    """About a file in a format that could hold code."""


def _reason(error: Exception) -> str:
    """Why PyTorch refuses a file, without its advice on how to unpickle it all the same."""
    if found := re.search(r"GLOBAL ([\w.]+)", str(error)):
        return f"it asks for {found[1]}"
    if isinstance(error, pickle.UnpicklingError):
        return "it is damaged, or holds more than tensors"
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def _foreign(path: Path) -> Weights:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about how to read more of it
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(
            f"{path} cannot be read as tensors alone ({_reason(error)}); nothing else is ever unpickled: "
            "convert it to safetensors where you trust it"
        ) from None
    warnings.warn(f"{path.name} is a pickle, read as tensors alone", PickleWarning, stacklevel=3)
    for key in ("state_dict", "model", "state_dict_ema", "model_ema"):
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
            break
    if not isinstance(content, dict) or not all(isinstance(v, Tensor) for v in content.values()):
        raise ValueError(f"{path} holds no table of tensors by name, as a state_dict is")
    return Weights({str(name).removeprefix("module."): v for name, v in content.items()})


def put(model: nn.Module, weights: Weights, source: str | os.PathLike[str], new_head: bool) -> None:
    """Load weights into a model, all of them.

    Args:
        model: a model of timm's interface.
        weights: what to load.
        source: where they come from, for messages.
        new_head: leave the classifier as it is, for other classes.
    """
    own, tensors = model.state_dict(), dict(weights.tensors)
    config = getattr(model, "pretrained_cfg", {})
    classifier = config.get("classifier", "head.fc")
    ground = config.get("background", 0)  # outputs of the classifier that are no class
    several = classifier if isinstance(classifier, list | tuple) else (classifier,)
    head = [name for name in own if name.startswith(tuple(f"{each}." for each in several))]
    if new_head:
        tensors |= {name: own[name] for name in head}
    for name in head:
        if name in tensors and tensors[name].shape != own[name].shape:
            raise ValueError(
                f"{source} holds weights for {len(tensors[name]) - ground} classes, the data has "
                f"{len(own[name]) - ground}; set model.new_head=true to keep the backbone alone"
            )
    missing, extra = sorted(own.keys() - tensors.keys()), sorted(tensors.keys() - own.keys())
    if missing or extra:
        raise ValueError(
            f"{source} does not fit this model: {_few('missing', missing)}{_few('unknown', extra)}"
            "was it trained with another model, attention or position?"
        )
    # APE resizes its maps itself while loading.
    odd = [n for n in own if tensors[n].shape != own[n].shape and not n.endswith("ape.map")]
    if odd:
        name = odd[0]
        raise ValueError(
            f"{source} does not fit this model: {name} is {tuple(tensors[name].shape)}, "
            f"expected {tuple(own[name].shape)}; was it trained with another model?"
        )
    model.load_state_dict(tensors)


def _few(what: str, names: list[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{what} {', '.join(names[:3])}{more}; "
