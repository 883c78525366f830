"""All that the golden tests import from the package. When a module moves, this file changes and no other."""

import argparse
import contextlib
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import timm
import torch
from torch import nn

import pale
from pale import recipes
from pale.__main__ import main

PACKAGE = pale
RECIPES = recipes.RECIPES


def parser() -> argparse.ArgumentParser:
    """Return the parser of the `pale` command: the first that parses when the command runs."""
    found: list[argparse.ArgumentParser] = []
    plain = argparse.ArgumentParser.parse_known_args

    def capture(self: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> Any:
        found.append(self)
        return plain(self, *args, **kwargs)

    argparse.ArgumentParser.parse_known_args = capture  # type: ignore[method-assign]
    try:
        run("--version")
    finally:
        argparse.ArgumentParser.parse_known_args = plain  # type: ignore[method-assign]
    return found[0]


def walk(
    parser: argparse.ArgumentParser, path: tuple[str, ...] = ()
) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Yield each command, "pale data check", with its parser."""
    yield " ".join(("pale", *path)), parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                yield from walk(inner, (*path, name))


def run(*words: Any) -> tuple[int, str, str]:
    """Run the `pale` command in this process; return exit code, standard output and standard error."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main([str(word) for word in words])
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
    return code, out.getvalue(), err.getvalue()


def environment() -> dict[str, str]:
    """Return the environment of a process that imports the same package, on one thread."""
    source = str(Path(pale.__file__).parent.parent)
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": source}


def model(name: str, **options: Any) -> nn.Module:
    """Return a model by its timm name."""
    return timm.create_model(name, **options)


def model_of(recipe: str, classes: int = 10) -> nn.Module:
    """Return the model that a recipe trains, with random weights, for so many classes."""
    return _settings(recipe).model.build(classes, _side(recipe))


def recipes_of(task: str) -> list[str]:
    """Return the names of a task's recipes."""
    return [name for name in RECIPES if recipes.get(name).kind == task]


def architecture(recipe: str) -> str:
    """Return a text that is the same for recipes whose models are the same."""
    return f"{_settings(recipe).model!r} {_side(recipe)}"


def _settings(recipe: str) -> Any:
    return recipes.get(recipe).override({"model.weights": None})


def _side(recipe: str) -> Any:
    settings = _settings(recipe)
    augment = settings.augment
    return getattr(augment, "crop", None) or getattr(augment, "short", None) or settings.data.size


def predict(image: Path, source: Any = None, task: Any = None, **options: Any) -> dict[str, Any]:
    """Return what `pale.Predictor` gives for an image, as JSON holds it."""
    with torch.no_grad():
        return pale.Predictor(source, task, device="cpu", **options)(image).plain()
