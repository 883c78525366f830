"""Read weights from safetensors files and, restricted to tensors, from pickles."""

from __future__ import annotations

import pickle
import warnings
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint

from ..core.plain_json import Json
from ..errors import WeightsError
from . import zoo
from .header import CHECKSUM, damaged, file_checksum, read_header
from .pack import FORMAT, SCALE, checksum, unpack_tensors

# Keys under which training scripts keep a state dict.
STATE_KEYS = ("state_dict", "model", "state_dict_ema", "model_ema")
MAX_REPEATED = (
    4  # times the size of a file that its tensors may have; tied weights are listed twice
)


@dataclass(frozen=True)
class Weights:
    """Tensors by name, and what the file states about them.

    Attributes:
        tensors: by name.
        about: in files of this package: "recipe" (plain values), "classes" (names), "step"; else empty.
        whole: False if the tensors are on the meta device, shapes without values (`load_header`).
    """

    tensors: dict[str, Tensor]
    about: Json = field(default_factory=dict)
    whole: bool = True


class PickleWarning(UserWarning):
    """A file is in a format that could hold code."""


def load_weights(path: Path) -> Weights:
    """Read a run folder, a safetensors file, or the tensors of a .pth or .pt file.

    If `path` does not exist, it may be the name of weights in the package (`zoo`).
    """
    path = _find_file(path)
    if path.suffix != ".safetensors":
        return _load_pickle(path)
    about, _ = read_header(path)
    try:
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise damaged(path, error) from None
    except (RuntimeError, MemoryError):  # mmap failed
        size = path.stat().st_size
        raise WeightsError(
            f"{path} has {size} bytes, more than this process can map; use a smaller file"
        ) from None
    # Files of earlier versions have no checksum.
    given = about.pop(CHECKSUM, None)
    if given is not None and given != file_checksum(about, tensors):
        raise damaged(path, "its bytes are not those that were written")
    return _unpack(path, tensors, about)


def load_header(path: Path) -> Weights:
    """Read only shapes and header of a safetensors file; read files of other formats completely."""
    path = _find_file(path)
    if path.suffix != ".safetensors":
        return _load_pickle(path)
    about, shapes = read_header(path)
    about.pop(CHECKSUM, None)
    if about.pop("packed", None) is not None:
        shapes = {name: s for name, s in shapes.items() if not name.endswith(SCALE)}
    tensors = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    return Weights(tensors, about, whole=False)


def load_rest(weights: Weights, path: Path) -> Weights:
    """Return complete weights: read the tensors that `load_header` left out."""
    return weights if weights.whole else load_weights(path)


def _find_file(path: Path) -> Path:
    """Return the weights file for a path, a run folder or a name in the zoo."""
    if not path.exists() and (known := zoo.find_file(str(path))) is not None:
        path = known
    if path.is_dir():
        found = [path / name for name in ("weights.safetensors", "model.safetensors")]
        found = [file for file in found if file.is_file()]
        if not found and not (path / "recipe.yaml").is_file():
            raise WeightsError(
                f"{path} is neither a run nor an exported model: it holds no weights.safetensors; give a run folder, "
                "a .safetensors file, or a name that pale weights lists"
            )
        if not found:
            raise WeightsError(
                f"{path} holds no weights.safetensors, which a run writes at each evaluation; "
                f"continue it with pale train --resume {path}, or give a .safetensors file"
            )
        path = found[0]
    if not path.is_file():
        raise WeightsError(
            f"there are no weights at {path}; give a .safetensors file, a run folder, or a name that pale weights "
            "lists"
        )
    return path


def _unpack(path: Path, tensors: dict[str, Tensor], about: Json) -> Weights:
    """Return the weights of a file, unpacked if its header states that they are packed."""
    packing = about.pop("packed", None)
    if packing is None:
        if scales := [name for name in tensors if name.endswith(SCALE)]:
            raise damaged(path, f"it holds {scales[0]}, but its header does not mention packing")
        return Weights(tensors, about)
    version = packing.get("format") if isinstance(packing, dict) else None
    if version != FORMAT:
        raise WeightsError(
            f"{path} is packed in format {version}, this version reads {FORMAT}; "
            "update: pip install -U pale-transformer"
        )
    if packing.get("crc32") != checksum(tensors):
        raise damaged(path, "its bytes are not those that were written")
    try:
        return Weights(unpack_tensors(tensors), about)
    except WeightsError as error:
        raise damaged(path, error) from None


def require_uncompressed(path: Path) -> None:
    """Raise `WeightsError` if a file of PyTorch is a compressed archive, whose content may be of any size."""
    if not zipfile.is_zipfile(path):
        return
    try:
        with zipfile.ZipFile(path) as archive:
            size = sum(entry.file_size for entry in archive.infolist())
    except (zipfile.BadZipFile, ValueError, NotImplementedError) as error:
        raise damaged(path, error) from None
    if size > path.stat().st_size:  # PyTorch never compresses, but would decompress
        raise WeightsError(
            f"{path} is compressed, {size} bytes in {path.stat().st_size}; write it with torch.save, which does "
            "not compress"
        )


def _load_pickle(path: Path) -> Weights:
    """Read the tensors of a file that PyTorch wrote; nothing else in it is unpickled."""
    require_uncompressed(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # advice on how to unpickle more
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise WeightsError(
            f"{path} cannot be read as tensors alone ({_refusal(path, error)}); nothing else is ever unpickled: "
            "convert it to safetensors on a machine where you trust it"
        ) from None
    warnings.warn(f"{path.name} is a pickle, read as tensors alone", PickleWarning, stacklevel=3)
    for key in STATE_KEYS:
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
            break
    if not isinstance(content, dict) or not all(map(_is_plain, content.values())):
        raise WeightsError(f"{path} holds no table of tensors by name; save model.state_dict()")
    held = sum(tensor.numel() * tensor.element_size() for tensor in content.values())
    if held > MAX_REPEATED * path.stat().st_size:  # an expanded tensor has any size in a few bytes
        raise WeightsError(
            f"{path} holds tensors of {held} bytes in {path.stat().st_size}, which repeat each other; save copies of "
            "them (tensor.clone())"
        )
    return Weights({str(name).removeprefix("module."): v for name, v in content.items()})


def _refusal(path: Path, error: Exception) -> str:
    """Return why PyTorch refuses a file, without its advice on how to unpickle it anyway."""
    if not isinstance(error, pickle.UnpicklingError):
        lines = str(error).strip().splitlines()
        return lines[0] if lines else type(error).__name__
    names: list[str] = []
    if zipfile.is_zipfile(path):
        try:
            names = get_unsafe_globals_in_checkpoint(path)
        except (pickle.UnpicklingError, RuntimeError, ValueError, LookupError, EOFError, TypeError):
            names = []  # damaged
    return f"it asks for {names[0]}" if names else "it is damaged, or holds more than tensors"


def _is_plain(value: object) -> bool:
    """Return whether a value is a tensor in memory, neither sparse nor quantised."""
    return (
        isinstance(value, Tensor)
        and value.layout is torch.strided
        and not value.is_quantized
        and value.device.type == "cpu"
    )
