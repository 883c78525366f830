"""Names of the models of a server, by which requests address them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from torch import nn

from ..errors import SettingsError
from ..predict.bundle import ModelBundle

Source = str | Path | nn.Module | ModelBundle
MAX_NAME = 100  # characters
VALID = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{MAX_NAME - 1}}}")
# The Open Inference Protocol offers each model a second time under its name and this suffix, for preprocessed tensors.
TENSOR_SUFFIX = ".tensor"


def name_models(sources: Sequence[Source]) -> dict[str, Source]:
    """Return the sources by name; raise SettingsError if two have the same name, or a name is not valid.

    A source written as NAME=SOURCE has that name. Otherwise a run folder has the name of the folder, a weights file its
    own name without suffix, and a model given by name has that name.
    """
    found: dict[str, Source] = {}
    for given in sources:
        name, source = _split(given)
        if name in found:
            raise SettingsError(
                f"two models would have the name {name!r}; name them: --weights NAME=MODEL"
            )
        found[name] = source
    return found


def _split(given: Source) -> tuple[str, Source]:
    if not isinstance(given, str) or Path(given).exists() or "=" not in given:
        return _default_name(given), given
    name, _, source = given.partition("=")
    if not VALID.fullmatch(name) or name.endswith(TENSOR_SUFFIX) or not source:
        raise SettingsError(
            f"a model is given as MODEL or NAME=MODEL; the name has at most {MAX_NAME} letters, digits, '.', '_' and "
            f"'-', starts with a letter or digit and does not end in {TENSOR_SUFFIX!r}, got {given!r}"
        )
    return name, source


def _default_name(source: Source) -> str:
    if isinstance(source, ModelBundle):
        text = source.name
    elif isinstance(source, nn.Module):
        text = type(source).__name__
    else:
        path = Path(source)
        text = path.stem if path.suffix == ".safetensors" else path.resolve().name
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", text).lstrip("._-")[:MAX_NAME]
    return plain.removesuffix(TENSOR_SUFFIX) or "model"
