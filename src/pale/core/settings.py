"""Typed, frozen settings; the error for a wrong key, type or value names the field and the nearest valid name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Self, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from .plain_json import Json
from .plain_yaml import load_yaml

S = TypeVar("S", bound="Settings")

# Bounds of settings that decide how much memory a model and its images take: recipes may come from untrusted files.
MAX_SIZE = 2048  # pixels of the short side of a model's input image
MAX_LONG = 4096  # of its long side
MAX_WIDTH = 1 << 14  # channels
# Of messages about wrong settings.
MAX_LINES = 20
MAX_SHOWN = 200  # characters of a value
MAX_FILE = 1 << 19  # bytes of a file with a value


# Names of settings in other projects that are not similar to the names here.
COMMON_NAMES = {
    "learning_rate": "lr",
    "min_learning_rate": "min_lr",
    "wd": "weight_decay",
    "batch_size": "batch",
    "num_workers": "workers",
    "num_epochs": "epochs",
    "grad_clip": "clip",
    "img_size": "size",
    "image_size": "size",
    "drop_path_rate": "drop_path",
}
# The setting that is most likely meant by a value for a whole group of settings.
MEANT = {"data": "data.root", "model": "model.name", "optim": "optim.name"}


class Settings(BaseModel):
    """Base of every recipe and of its parts."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @classmethod
    def parse(cls, values: Mapping[str, object]) -> Self:
        """Return settings from plain values, such as those of a YAML file."""
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise ValueError(_explain(cls, error)) from None

    def plain(self) -> Json:
        """Return the values as YAML and JSON store them."""
        return self.model_dump(mode="json")

    def override(self, changes: Mapping[str, object]) -> Self:
        """Return a copy with values changed by dotted name: {"optim.lr": 1e-3}."""
        values = self.plain()
        for name, value in changes.items():
            *path, last = name.split(".")
            inner = values
            for i, part in enumerate(path):
                if part not in inner:
                    raise ValueError(_unknown(type(self), name))
                if not isinstance(inner[part], dict):
                    where = ".".join(path[: i + 1])
                    raise ValueError(
                        f"{where} is {inner[part]!r} and has no part {name.removeprefix(where + '.')!r}; "
                        f"set {where} itself"
                    )
                inner = inner[part]
            if last not in inner:
                raise ValueError(_unknown(type(self), name))
            inner[last] = value
        return self.parse(values)


def vary(base: S, **changes: object) -> S:
    """Return a copy of `base` with some fields replaced and checked; a dict changes fields of a part."""
    values = {name: getattr(base, name) for name in type(base).model_fields}
    for name, value in changes.items():
        part = values.get(name)
        if isinstance(part, Settings) and isinstance(value, dict):
            value = vary(part, **value)
        values[name] = value
    return base.parse(values)


def find_value(settings: Settings, name: str) -> object:
    """Return the value of a dotted name; None if there is no such setting."""
    value: object = settings
    for part in name.split("."):
        value = getattr(value, part, None)
    return value


def read_value(text: str) -> object:
    """Return the value of a setting that was typed, parsed as YAML; invalid YAML is returned as text.

    "@FILE" stands for the content of a YAML file.
    """
    if text.startswith("@"):
        return _read_value_file(Path(text[1:]))
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    # "{split}" is a placeholder, not a mapping without values.
    is_placeholder = (
        isinstance(value, dict) and value and not any(inner is not None for inner in value.values())
    )
    return text if is_placeholder else value


def _read_value_file(path: Path) -> object:
    if path.exists() and not path.is_file():  # reading a FIFO would wait
        raise ValueError(f"@{path} is not a regular file; give a YAML file with the value")
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE + 1)
    except OSError as error:
        raise ValueError(
            f"@{path} cannot be read ({error.strerror or error}); give a YAML file with the value"
        ) from None
    if len(content) > MAX_FILE:
        raise ValueError(f"@{path} has more than {MAX_FILE} bytes; give a YAML file with the value")
    try:
        return load_yaml(content)
    except ValueError as error:
        raise ValueError(f"@{path} is not YAML: {error}") from None


def dotted_names(cls: type[Settings], prefix: str = "") -> Iterator[str]:
    """Yield every dotted name of a settings class."""
    for name, field in cls.model_fields.items():
        yield prefix + name
        for kind in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if isinstance(kind, type) and issubclass(kind, Settings):
                yield from dotted_names(kind, f"{prefix}{name}.")


def _unknown(cls: type[Settings], name: str) -> str:
    known = list(dotted_names(cls))
    path, dot, last = name.rpartition(".")
    near = [k for k in known if k.rpartition(".")[2] == COMMON_NAMES.get(last)]
    near = [k for k in near if k == f"{path}{dot}{COMMON_NAMES[last]}"] or near
    near = near or get_close_matches(name, known, n=1)
    if not near:  # "lr" for "optim.lr"
        near = [k for k in known if k.rpartition(".")[2] == name.rpartition(".")[2]]
    hint = f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(cls.model_fields)}"
    return f"there is no setting {name!r}{hint}"


def _explain(cls: type[Settings], error: ValidationError) -> str:
    lines = []
    for problem in error.errors(include_url=False):
        name = ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "extra_forbidden":
            lines.append(_unknown(cls, name))
        elif problem["type"] == "value_error":
            prefix = f"{name}: " if name else ""
            lines.append(prefix + problem["msg"].removeprefix("Value error, "))
        elif problem["type"] == "model_type":
            meant = MEANT.get(name, "")
            hint = f"; did you mean {meant!r}?" if meant in dotted_names(cls) else ""
            given = repr(problem["input"])[:MAX_SHOWN]
            lines.append(f"{name} is a group of settings, not a setting, got {given}{hint}")
        else:
            rule = problem["msg"].removeprefix("Input should be ")
            rule = rule.partition(", unable to parse")[0]
            lines.append(f"{name} must be {rule}, got {repr(problem['input'])[:MAX_SHOWN]}")
    return "; ".join(lines[:MAX_LINES])
