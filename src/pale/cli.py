"""The command line: parses, calls, prints. Every reporting command takes --json."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import traceback
import warnings
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from . import (
    __version__,
    cli_bench,
    cli_completion,
    cli_demo,
    cli_serve,
    cli_train,
    cli_use,
    cli_weights,
)
from .cli_parser import Parser, Root, add_command, add_group, descend
from .cli_say import console

INTERRUPTED = 130  # 128 + SIGINT, as shells count
BROKEN_PIPE = 141  # 128 + SIGPIPE
NO_MEMORY = (
    "\nTake less at once (--batch; in training also --accumulate 2, or --model.checkpointing true), smaller images, "
    "or a smaller model."
)
MODELS = "pale_nano, pale_tiny, pale_small, pale_base"
BENCHES = ("models", "op", "data")
EPILOG = """examples:
  pale train quickstart                          train on generated pictures, minutes on a CPU
  pale train small_data.pale_t --data.root DIR   train on your own pictures
  pale view attention photo.jpg -o look.html     see what a model looks at
  pale completion --help                         complete commands and options with TAB

pale COMMAND --help tells about one command."""


def main(argv: list[str] | None = None) -> int:
    """Entry point of the `pale` command; returns the exit code."""
    words = sys.argv[1:] if argv is None else list(argv)
    plain, warnings.formatwarning = warnings.formatwarning, _warning
    try:
        args = parse(words)
        # Registers our models with timm; importing PyTorch takes seconds, so it waits until here.
        from . import pale_transformer  # noqa: F401

        code: int = args.run(args) or 0
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        sys.stderr.write("pale: stopped by Ctrl-C\n")
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has enough of it, as `pale recipes | head`; nothing more can be said there.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except (ValueError, TypeError, OSError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not _ours(error):
            traceback.print_exc()  # a library gave up: where it did is all there is to go on
        way_out = NO_MEMORY if type(error).__name__ == "OutOfMemoryError" else ""
        sys.stderr.write(f"pale: {error}{way_out}\n")
        return 1
    finally:
        warnings.formatwarning = plain


def _warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    line: str | None = None,
) -> str:
    """Our own in a line, without the place in the source; those of libraries as ever."""
    if category.__module__.partition(".")[0] == __package__:
        return f"pale: {message}\n"
    return f"{filename}:{lineno}: {category.__name__}: {message}\n"


def _ours(error: BaseException) -> bool:
    """Whether it was raised in this package, with a message that says all."""
    frames = list(traceback.walk_tb(error.__traceback__))
    return Path(frames[-1][0].f_code.co_filename).is_relative_to(Path(__file__).parent)


def parse(words: list[str]) -> argparse.Namespace:
    """What was typed after `pale`, understood but not run.

    Besides the options of the command: `run` (call it with this), `typed`, and `overrides`, the settings of a recipe.
    """
    typed, parser = shlex.join(["pale", *words]), _parser()
    # A list of models may stand where a sub-command does: `pale bench pale_tiny`.
    if words[:1] == ["bench"] and (words[1:2] or [""])[0] not in (*BENCHES, "-h", "--help"):
        words = ["bench", "models", *words[1:]]
    overrides: dict[str, Any] = {}
    path, leaf = descend(parser, words)
    if " ".join(path) in cli_train.OVERRIDDEN and not {"-h", "--help"} & set(words):
        words, overrides = cli_train.take_overrides(words, leaf._option_string_actions)
    args, unknown = parser.parse_known_args(words)
    if unknown:
        args.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    args.typed, args.overrides = typed, overrides
    return args


def _parser() -> Root:
    parser = Root(
        prog="pale",
        description="Pale Transformer: a vision backbone on interlaced rows and columns.",
        epilog=EPILOG,
    )
    parser.add_argument("--version", action="version", version=f"pale {__version__}")
    parser.set_defaults(parser=parser)
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=Parser)

    cost = add_command(
        commands, "cost", _cost, "count parameters and multiply-adds, ours beside the paper's"
    )
    cost.add_argument("model", nargs="?", default="pale_tiny", help=f"{MODELS} (default pale_tiny)")
    cost.add_argument(
        "--paper",
        action="store_true",
        help="every Pale row of the paper's tables, with the difference",
    )
    _architecture(cost)

    info = add_command(
        commands, "info", _info, "show the stages of a model: maps, groups, tokens, cost, memory"
    )
    info.add_argument("model", help=MODELS)
    _architecture(info)

    add_command(
        commands, "doctor", _doctor, "show versions, devices, and which back-end runs where and why"
    )

    bench = add_group(
        commands,
        "bench",
        "measure speed and memory: of models, of a block's pieces, of reading data",
        "`pale bench MODEL ...` is `pale bench models MODEL ...`.",
    )
    cli_bench.add_commands(bench)
    cli_train.add_commands(commands, bench, add_command)

    views = add_group(commands, "view", "draw what the model looks at")
    pales = add_command(
        views,
        "pales",
        _view_pales,
        "draw the tokens that a token sees, in all five attention modes",
        json=False,
    )
    pales.add_argument("model", help=MODELS)
    pales.add_argument(
        "--size", type=int, nargs=2, default=(224, 224), metavar=("H", "W"), help="image size"
    )
    pales.add_argument("--stage", type=int, default=1, help="1 to 4")
    pales.add_argument(
        "--at",
        type=int,
        nargs=2,
        metavar=("ROW", "COLUMN"),
        help="the token, on the stage's map (default: the middle)",
    )
    pales.add_argument(
        "--pale-size", type=int, nargs="+", metavar="S", help="one, or one a stage (default 7)"
    )
    pales.add_argument(
        "-o",
        "--output",
        type=Path,
        required=True,
        metavar="FILE",
        help="picture to write, for example pales.png",
    )
    cli_use.add_attention(views)
    cli_use.add_export(lambda name, run, help_: add_command(commands, name, run, help_))
    cli_serve.add_serve(lambda name, run, help_: add_command(commands, name, run, help_))
    cli_demo.add_demo(commands)
    cli_weights.add_weights(commands, add_command)
    cli_completion.add_command(commands)
    return parser


def _architecture(parser: Parser) -> None:
    parser.add_argument(
        "--size", type=int, nargs=2, default=(224, 224), metavar=("H", "W"), help="image size"
    )
    parser.add_argument("--attention", help="parallel (default), sequential, vanilla, axial, cross")
    parser.add_argument("--position", help="cpe (default), ape, none")
    parser.add_argument(
        "--pale-size", type=int, nargs="+", metavar="S", help="one, or one a stage (default 7)"
    )
    parser.add_argument("--stem-stride", type=int, help="4 (default), 2 or 1")
    parser.add_argument("--num-classes", type=int, default=1000, help="of the classifier")
    parser.add_argument("--in-chans", type=int, default=3, help="channels of the image")


def _config(args: argparse.Namespace) -> Any:
    from .pale_transformer import variant

    given = {
        name: getattr(args, name)
        for name in ("attention", "position", "stem_stride", "pale_size")
        if getattr(args, name, None) is not None
    }
    if len(given.get("pale_size", ())) == 1:
        given["pale_size"] = given["pale_size"][0]
    if min(args.size) < 1:
        raise ValueError(
            f"--size needs a height and a width of at least 1, got {args.size[0]} {args.size[1]}"
        )
    return replace(variant(args.model), img_size=tuple(args.size), **given)


def _cost(args: argparse.Namespace) -> None:
    from . import cost

    if args.paper:
        rows = cost.reproduce()
        if args.json:
            _json([asdict(row) | {"difference": row.difference} for row in rows])
            return
        table = Table(
            "",
            "row",
            "columns",
            "params [paper]",
            "G multiply-adds [paper]",
            "difference",
            "ragged",
            title="Pale rows",
        )
        for before, row in zip([None, *rows], rows, strict=False):
            if before is not None and before.table != row.table:
                table.add_section()
            table.add_row(
                row.table if before is None or before.table != row.table else "",
                row.setting,
                row.task,
                f"{row.params:.1f} M \\[{row.params_paper:g}]",
                f"{row.macs:.3f} \\[{row.macs_paper:g}]",
                f"{row.difference:+.1%}",
                f"{row.macs_ideal:.3f}",
            )
        console().print(table)
        console().print(
            "Counted as the paper pads, imagenet at 224x224, ade20k with UperNet at 512x2048, coco with "
            "Mask R-CNN at 800x1280; "
            "'ragged' is what our groups cost, which are never padded."
        )
        return
    config, size = _config(args), tuple(args.size)
    ways = {
        way: cost.count(
            config, size, counting=way, in_chans=args.in_chans, num_classes=args.num_classes
        )
        for way in ("paper", "ideal", "executed")
    }
    prefixes = [f"stages.{i}." for i in range(len(config.depths))] + ["norm", "head"]
    if args.json:
        bill = {
            way: asdict(total) | {"params": total.params, "macs": total.macs}
            for way, total in ways.items()
        }
        _json({"model": args.model, "config": asdict(config), "size": size, "counting": bill})
        return
    title = f"{args.model}, {size[0]}x{size[1]}"
    table = Table(
        "", "params", "G, as the paper pads", "G, ideal", "G, executed (sdpa)", title=title
    )
    for prefix in prefixes:
        part = ways["ideal"].under(prefix)
        macs = [f"{ways[way].under(prefix).macs / 1e9:.3f}" for way in ways]
        table.add_row(prefix.strip("."), f"{part.params:,}", *macs)
    table.add_section()
    table.add_row(
        "total",
        f"{ways['ideal'].params:,}",
        *(f"{total.macs / 1e9:.3f}" for total in ways.values()),
    )
    console().print(table)


def _info(args: argparse.Namespace) -> None:
    from .info import describe

    about = describe(args.model, _config(args), tuple(args.size), args.in_chans, args.num_classes)
    if args.json:
        _json(about)
        return
    h, w = args.size
    title = f"{args.model}, {h}x{w}, attention {about['attention']}, position {about['position']}"
    table = Table(
        "stage",
        "map",
        "blocks",
        "channels",
        "heads",
        "pale",
        "groups",
        "tokens a group",
        "params",
        "G multiply-adds",
        "padding",
        "kept (bf16)",
        title=title,
    )
    for stage in about["stages"]:
        groups = " + ".join(f"{n} {kind}" for kind, n in stage["groups"].items())
        table.add_row(
            str(stage["stage"]),
            "x".join(map(str, stage["map"])),
            str(stage["blocks"]),
            str(stage["channels"]),
            str(stage["heads"]),
            str(stage["pale_size"]),
            groups,
            _range(stage["tokens"]),
            f"{stage['params'] / 1e6:.2f} M",
            f"{stage['macs'] / 1e9:.3f}",
            f"{stage['padding']:.1%}",
            f"{stage['kept_bytes'] / 2**20:.1f} MiB",
        )
    table.add_section()
    total = about["total"]
    table.add_row(
        "all",
        *[""] * 7,
        f"{total['params'] / 1e6:.2f} M",
        f"{total['macs'] / 1e9:.3f}",
        f"{total['padding']:.1%}",
        f"{total['kept_bytes'] / 2**20:.1f} MiB",
    )
    console().print(table)
    console().print(
        "Multiply-adds: ideal, for one image; norm and classifier in the last line only. "
        "Padding: what the sdpa back-end computes beyond that. "
        "Kept: activations that training holds for the backward pass of one image."
    )


def _range(numbers: list[int]) -> str:
    low, high = numbers
    return str(low) if low == high else f"{low} to {high}"


def _doctor(args: argparse.Namespace) -> None:
    from .doctor import examine

    facts = examine()
    if args.json:
        _json(facts)
        return
    packages = ", ".join(
        f"{name} {version or 'not installed'}" for name, version in facts["packages"].items()
    )
    console().print(
        f"pale {facts['pale']} on Python {facts['python']}, {facts['system']}\n{packages}"
    )
    for device in facts["devices"]:
        state = "works" if device["works"] else "gives wrong numbers: please report it"
        console().print(
            f"{device['device']} ({device['about']}): back-end {device['backend']}, {state}"
        )
        blocks = device["blocks"]
        fused = blocks == "fused kernels"
        console().print(
            f"  blocks: {blocks if fused else f'plain PyTorch; not fused kernels: {blocks}'}"
        )
        for other, reason in device["others"].items():
            console().print(f"  not {other}: {reason}")


def _view_pales(args: argparse.Namespace) -> None:
    from .view import save_pales

    save_pales(
        _config(args),
        tuple(args.size),
        args.output,
        stage=args.stage - 1,
        at=tuple(args.at) if args.at else None,
    )
    console().print(f"{args.output} written")


def _json(what: Any) -> None:
    sys.stdout.write(json.dumps(what, indent=1) + "\n")
