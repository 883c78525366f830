"""The table of all commands, in the order of `pale --help`, and the parser built from it."""

from __future__ import annotations

from .. import __version__
from . import bench, completion, data, export, features, info, predict, serve, train, view, weights
from .options import Command
from .parser import Parser, build

COMMANDS: dict[str, tuple[type[Command], ...]] = {
    "start": (view.Demo, info.Doctor, train.Recipes, *weights.COMMANDS, completion.Completion),
    "train": (*data.COMMANDS, train.Train, train.Eval, train.Report, features.MakeTokenLabels),
    "use": (
        predict.Predict,
        serve.Serve,
        serve.WarmUp,
        view.Pales,
        view.Attention,
        export.Export,
        features.Features,
        features.Probe,
    ),
    "measure": (info.Info, info.Cost, *bench.COMMANDS),
}
# Description and epilog of names that are only groups of commands.
CONTAINERS = {
    "data": ("Check and convert datasets before training.", ""),
    "token-labels": ("Make the dense labels that recipes ending in _star need.", ""),
    "view": ("Draw the attention of a model.", ""),
    "bench": (
        "Measure speed and memory of models, of the parts of a block, or of reading data.",
        "`pale bench MODEL ...` is `pale bench models MODEL ...`.",
    ),
}
EPILOG = """Examples:
  pale train quickstart                          train on generated images, minutes on a CPU
  pale train finetune --data.root photos         train on your own images: photos/<class>/*.jpg
  pale view attention photo.jpg -o look.html     see where a model attends
  pale completion --help                         complete commands and options with TAB

pale COMMAND --help describes one command."""


def build_parser() -> Parser:
    """Return the parser of the `pale` command."""
    parser = Parser(
        prog="pale",
        description="Pale Transformer: a vision backbone whose attention works on interlaced rows and columns.",
        epilog=EPILOG,
    )
    version = f"pale {__version__}"
    parser.actions.append(
        parser.add_argument(
            "--version", action="version", version=version, help="print the version and exit"
        )
    )
    build(parser, COMMANDS, CONTAINERS)
    return parser
