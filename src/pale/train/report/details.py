"""Read and check the evaluation.json of a run, which may come from anyone."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ...core.plain_json import Json, parse_json
from ...errors import RunError

MAX_IMAGES = 100  # of each list of images; an evaluation lists at most 24
MAX_CLASSES = 1 << 15
MAX_COLUMNS = 16  # of the table of classes
MAX_BYTES = 2**28  # of an evaluation.json; with 1000 classes it has 4 MB

Guess = tuple[float, int, int, int]  # score, sample, label, prediction
Row = dict[str, int | float | str | None]


class Details(BaseModel):
    """Content of an evaluation.json."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    classes: list[str] = Field(default=[], max_length=MAX_CLASSES)
    confusion: list[list[float]] | None = None  # [label][prediction]
    # Loss, sample, label, prediction.
    mistakes: list[Guess] = Field(default=[], max_length=MAX_IMAGES)
    # Probability of the prediction, sample, label, prediction.
    confident_mistakes: list[Guess] = Field(default=[], max_length=MAX_IMAGES)
    confident_hits: list[Guess] = Field(default=[], max_length=MAX_IMAGES)
    per_class: list[Row] = Field(default=[], max_length=MAX_CLASSES)
    gallery: list[Json] = Field(default=[], max_length=MAX_IMAGES)

    @model_validator(mode="after")
    def _fits(self) -> Details:
        n = len(self.classes)
        if self.confusion is not None and [len(row) for row in self.confusion] != [n] * n:
            raise ValueError(f"confusion must have {n} rows of {n} numbers, as there are classes")
        for name in ("mistakes", "confident_mistakes", "confident_hits"):
            for _, _, label, guess in getattr(self, name):
                if not (0 <= label < n and 0 <= guess < n):
                    raise ValueError(f"{name} name classes {label} and {guess}, there are {n}")
        columns = self.per_class[0].keys() if self.per_class else ()
        if len(columns) > MAX_COLUMNS:
            raise ValueError(f"per_class must have at most {MAX_COLUMNS} columns")
        for row in self.per_class:
            if row.keys() != columns or "class" not in row:
                raise ValueError("per_class must have the same columns in each row, and a class")
        if any(type(entry.get("index")) is not int for entry in self.gallery):
            raise ValueError("gallery must have the index of an image in each entry")
        return self


def read_details(path: Path) -> Details:
    """Read an evaluation.json; return empty details if there is none yet."""
    if not path.is_file():
        return Details()
    try:
        if (size := path.stat().st_size) > MAX_BYTES:
            raise ValueError(f"it has {size} bytes, more than {MAX_BYTES}")
        return Details.model_validate(parse_json(path.read_bytes()))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        reason = ".".join(str(part) for part in first["loc"]) + f": {first['msg']}"
    except ValueError as error:
        reason = str(error)
    raise RunError(
        f"{path} was not written by an evaluation ({reason.removeprefix(': ')}); "
        "delete it for a report without it, or evaluate again"
    )
