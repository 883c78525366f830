"""The command line: parses, calls, prints. Every reporting command takes --json."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console
from rich.table import Table

from . import __version__, cli_train


class Parser(argparse.ArgumentParser):
    """argparse that names the nearest option or command when one is misspelt."""

    def error(self, message: str) -> NoReturn:
        """Print usage, the error and a hint, exit with 2."""
        known = [option for action in self._actions for option in action.option_strings]
        known += [str(c) for action in self._actions for c in (action.choices or ())]
        words = message.replace("'", " ").replace("=", " ").replace(":", " ").split()
        close = [
            match
            for word in words
            if word not in known
            for match in get_close_matches(word, known, n=1)
        ]
        super().error(message + (f"; did you mean {close[0]}?" if close else ""))


def main(argv: list[str] | None = None) -> int:
    """Entry point of the `pale` command; returns the exit code."""
    parser = _parser()
    argv = sys.argv[1:] if argv is None else argv
    overrides: dict[str, Any] = {}
    try:
        if argv and argv[0] in cli_train.OVERRIDDEN and not {"-h", "--help"} & set(argv):
            known = commands_of(parser)[argv[0]]._option_string_actions
            argv, overrides = cli_train.take_overrides(argv, known)
        args, unknown = parser.parse_known_args(argv)
        if unknown:
            args.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
        args.overrides = overrides
        return args.run(args) or 0
    except (ValueError, TypeError, OSError, RuntimeError) as error:
        sys.stderr.write(f"pale: {error}\n")
        return 1


def commands_of(parser: argparse.ArgumentParser) -> dict[str, Any]:
    """The parsers of a parser's commands, by name."""
    (action,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    return dict(action.choices)


def _parser() -> Parser:
    parser = Parser(
        prog="pale",
        description="Pale Transformer: a vision backbone on interlaced rows and columns.",
    )
    parser.add_argument("--version", action="version", version=f"pale {__version__}")
    parser.set_defaults(parser=parser)
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=Parser)

    cost = _command(
        commands, "cost", _cost, "count parameters and multiply-adds, ours beside the paper's"
    )
    cost.add_argument(
        "model", nargs="?", default="pale_tiny", help="pale_nano, pale_tiny, pale_small, pale_base"
    )
    cost.add_argument(
        "--paper",
        action="store_true",
        help="every Pale row of the paper's tables, with the difference",
    )
    _architecture(cost)

    info = _command(
        commands, "info", _info, "show the stages of a model: maps, groups, tokens, cost, memory"
    )
    info.add_argument("model", help="pale_nano, pale_tiny, pale_small, pale_base")
    _architecture(info)

    _command(
        commands, "doctor", _doctor, "show versions, devices, and which back-end runs where and why"
    )

    cli_train.add_commands(commands, _command)

    view = commands.add_parser("view", help="draw what the model looks at")
    views = view.add_subparsers(required=True, metavar="WHAT", parser_class=Parser)
    pales = views.add_parser(
        "pales", help="the tokens that a token sees, in all five attention modes"
    )
    pales.set_defaults(run=_view_pales, parser=pales)
    pales.add_argument("model", help="pale_nano, pale_tiny, pale_small, pale_base")
    pales.add_argument(
        "--size", type=int, nargs=2, default=(224, 224), metavar=("H", "W"), help="image size"
    )
    pales.add_argument("--stage", type=int, default=1, help="1 to 4 (default 1)")
    pales.add_argument(
        "--at", type=int, nargs=2, metavar=("ROW", "COLUMN"), help="the token, on the stage's map"
    )
    pales.add_argument(
        "--pale-size", type=int, nargs="+", metavar="S", help="one, or one a stage (default 7)"
    )
    pales.add_argument(
        "-o", "--output", type=Path, required=True, help="picture to write, for example pales.png"
    )
    return parser


def _command(commands: Any, name: str, run: Any, help_: str) -> Parser:
    parser: Parser = commands.add_parser(
        name, help=help_, description=help_[0].upper() + help_[1:] + "."
    )
    parser.set_defaults(run=run, parser=parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
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
    parser.add_argument("--num-classes", type=int, default=1000)
    parser.add_argument("--in-chans", type=int, default=3)


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
                f"{row.params:.1f} M \\[{row.params_paper:g}]",
                f"{row.macs:.3f} \\[{row.macs_paper:g}]",
                f"{row.difference:+.1%}",
                f"{row.macs_ideal:.3f}",
            )
        _print(table)
        _print(
            "Counted at 224x224 as the paper pads; 'ragged' is what our groups cost, which are never padded."
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
    _print(table)


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
    _print(table)
    _print(
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
    _print(f"pale {facts['pale']} on Python {facts['python']}, {facts['system']}\n{packages}")
    for device in facts["devices"]:
        state = "works" if device["works"] else "gives wrong numbers: please report it"
        _print(f"{device['device']} ({device['about']}): back-end {device['backend']}, {state}")
        for other, reason in device["others"].items():
            _print(f"  not {other}: {reason}")


def _view_pales(args: argparse.Namespace) -> None:
    from .view import save_pales

    save_pales(
        _config(args),
        tuple(args.size),
        args.output,
        stage=args.stage - 1,
        at=tuple(args.at) if args.at else None,
    )
    _print(f"{args.output} written")


def _print(what: Any) -> None:
    Console(width=None if sys.stdout.isatty() else 140, highlight=False).print(what)


def _json(what: Any) -> None:
    sys.stdout.write(json.dumps(what, indent=1) + "\n")
