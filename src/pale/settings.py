"""Typed, frozen settings: a wrong key, type or value is one line that names the field and the nearest valid name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

S = TypeVar("S", bound="Settings")


# What others call our settings, where the spelling does not tell.
USUAL = {
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


class Settings(BaseModel):
    """Base of every recipe and of its parts."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> Self:
        """Settings from plain values, such as a YAML file holds."""
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise ValueError(_explain(cls, error)) from None

    def plain(self) -> dict[str, Any]:
        """The values as YAML and JSON hold them."""
        return self.model_dump(mode="json")

    def override(self, changes: Mapping[str, Any]) -> Self:
        """A copy with values changed under dotted names, {"optim.lr": 1e-3}."""
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


def vary(base: S, **changes: Any) -> S:
    """A copy of `base` with some fields replaced, checked again; a dict changes fields of a part."""
    values = {name: getattr(base, name) for name in type(base).model_fields}
    for name, value in changes.items():
        part = values.get(name)
        if isinstance(part, Settings) and isinstance(value, dict):
            value = vary(part, **value)
        values[name] = value
    return base.parse(values)


def names(cls: type[Settings], prefix: str = "") -> Iterator[str]:
    """Every dotted name of a settings class."""
    for name, field in cls.model_fields.items():
        yield prefix + name
        for kind in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if isinstance(kind, type) and issubclass(kind, Settings):
                yield from names(kind, f"{prefix}{name}.")


def _unknown(cls: type[Settings], name: str) -> str:
    known = list(names(cls))
    path, dot, last = name.rpartition(".")
    near = [k for k in known if k.rpartition(".")[2] == USUAL.get(last)]
    near = [k for k in near if k == f"{path}{dot}{USUAL[last]}"] or near
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
        else:
            rule = problem["msg"].removeprefix("Input should be ")
            lines.append(f"{name} must be {rule}, got {problem['input']!r}")
    return "; ".join(lines)
