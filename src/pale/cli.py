"""The command line: parses, calls, prints. Every reporting command takes --json."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from dataclasses import asdict, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console
from rich.table import Table

from . import __version__, cli_serve, cli_train, cli_use


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
    words = sys.argv[1:] if argv is None else list(argv)
    typed = shlex.join(["pale", *words])
    # One command in two words: argparse cannot tell a list of models from a sub-command.
    if words[:2] in (["bench", "op"], ["bench", "data"], ["token-labels", "make"]):
        words = [" ".join(words[:2]), *words[2:]]
    parser = _parser()
    overrides: dict[str, Any] = {}
    try:
        if words and words[0] in cli_train.OVERRIDDEN and not {"-h", "--help"} & set(words):
            known = commands_of(parser)[words[0]]._option_string_actions
            words, overrides = cli_train.take_overrides(words, known)
        args, unknown = parser.parse_known_args(words)
        if unknown:
            args.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
        args.typed, args.overrides = typed, overrides
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
    cli_use.add_attention(views)
    cli_use.add_export(lambda name, run, help_: _command(commands, name, run, help_))
    cli_serve.add_serve(lambda name, run, help_: _command(commands, name, run, help_))
    _bench_parsers(commands)
    return parser


def _bench_parsers(commands: Any) -> None:
    bench = commands.add_parser("bench", help="measure speed and memory beside models from timm")
    bench.set_defaults(run=_bench, parser=bench)
    bench.add_argument(
        "models",
        nargs="*",
        metavar="MODEL",
        help="ours first (default pale_tiny swin_tiny_patch4_window7_224)",
    )
    bench.add_argument(
        "--task",
        nargs="+",
        default=["inference"],
        choices=["inference", "training", "latency"],
        help="latency: batch 1, as a CUDA graph on a GPU (default inference)",
    )
    bench.add_argument(
        "--mode", nargs="+", default=["eager"], choices=["eager", "compiled", "graphs"]
    )
    bench.add_argument(
        "--batch", type=int, nargs="+", default=[], help="default 256 on CUDA, 8 on a CPU"
    )
    bench.add_argument("--autocast", action="store_true", help="inference with fp32 weights")
    bench.add_argument("--features", action="store_true", help="without the classifier")
    bench.add_argument("--optimized", action="store_true", help="ours through pale.optimize")

    op = commands.add_parser(
        "bench op",
        help="measure the attention and each fused piece of a block beside plain PyTorch",
    )
    op.set_defaults(run=_bench_op, parser=op)
    op.add_argument(
        "model", nargs="?", default="pale_tiny", help="whose stages (default pale_tiny)"
    )
    op.add_argument("--batch", type=int, help="default 256 on CUDA, 2 on a CPU")
    op.add_argument("--stages", type=int, nargs="+", default=[], metavar="N", help="1 to 4")
    op.add_argument("--pieces", nargs="+", default=[], metavar="PIECE", help="attention, mlp, ...")
    op.add_argument(
        "--kernels", nargs="+", default=[], metavar="K", help="plain: flash, efficient, cudnn"
    )
    for parser in (bench, op):
        parser.add_argument(
            "--size",
            type=int,
            nargs="+",
            default=[224],
            metavar="N",
            help="side, or height and width",
        )
        parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
        parser.add_argument(
            "--dtype",
            default="auto",
            choices=["auto", "fp32", "bf16", "fp16"],
            help="default bf16 on CUDA, fp32 on a CPU",
        )
        parser.add_argument("--rounds", type=int, default=30, help="default 30")
        parser.add_argument(
            "--seconds", type=float, default=60.0, help="to measure a row at most (default 60)"
        )
        parser.add_argument("--threads", type=int, help="of PyTorch on the CPU")
        parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there too")
        parser.add_argument("--plot", type=Path, metavar="FILE", help="draw bars, in a .png")


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
        _print(table)
        _print(
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
        blocks = device["blocks"]
        fused = blocks == "fused kernels"
        _print(f"  blocks: {blocks if fused else f'plain PyTorch; not fused kernels: {blocks}'}")
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


def _bench_setting(args: argparse.Namespace, **more: bool) -> Any:
    """The setting, after what can be wrong has been looked at: minutes of measuring should not end in a typo."""
    import torch

    from .bench import Setting, check_suffix

    if len(args.size) > 2:
        raise ValueError(f"--size needs a side, or height and width, got {len(args.size)} numbers")
    if args.plot:
        check_suffix(args.plot)
    if args.threads is not None:
        if args.threads < 1:
            raise ValueError(f"--threads must be at least 1, got {args.threads}")
        torch.set_num_threads(args.threads)
    size = (args.size[0], args.size[-1])
    return Setting(size, args.device, args.dtype, args.rounds, args.seconds, **more)


def _bench_say(what: str) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"measuring: {what}\n")


def _bench(args: argparse.Namespace) -> None:
    from .bench import MODELS, bench

    setting = _bench_setting(
        args, autocast=args.autocast, features=args.features, optimized=args.optimized
    )
    models = args.models or list(MODELS)
    report = bench(
        models, setting, tasks=args.task, modes=args.mode, batches=args.batch, say=_bench_say
    )
    table = Table(
        "task",
        "mode",
        "batch",
        "model",
        "images/s",
        "ms (quartiles)",
        "ours / it",
        "peak",
        "of matrix",
    )
    for row in report["rows"]:
        if row["model"] == models[0] and table.row_count:
            table.add_section()
        cells = [row["task"], row["mode"], str(row["batch"]), row["model"]]
        if row["error"]:
            table.add_row(*cells, "failed, see below")
            continue
        low, high = row["quartiles"]
        table.add_row(
            *cells,
            f"{row['images_per_s']:.1f}",
            f"{row['ms']:.2f} ({low:.2f} to {high:.2f})",
            _or(row["ratio"], "{:.2f}"),
            _or(row["peak_bytes"] and row["peak_bytes"] / 2**20, "{:.0f} MiB"),
            _or(row["matrix_share"], "{:.1%}"),
        )
    _bench_end(args, report, table)
    for row in report["rows"]:
        if row["error"]:
            sys.stderr.write(f"{row['model']}, {row['task']}, {row['mode']}: {row['error']}\n")
    if any(row["error"] for row in report["rows"] if row["model"] == models[0]):
        raise ValueError(f"{models[0]} failed; only other models may")


def _bench_op(args: argparse.Namespace) -> None:
    from .bench_op import bench_op

    report = bench_op(
        args.model,
        _bench_setting(args),
        batch=args.batch,
        stages=args.stages,
        pieces=args.pieces,
        kernels=args.kernels,
        say=_bench_say,
    )
    table = Table("piece", "pass", "stage", "map", "ms", "plain / fused", "MB at least", "of copy")
    last = None
    for row in report["rows"]:
        group = f"{row['piece']}, {row['passes']}"
        if last not in (None, group):
            table.add_section()
        last = group
        times = [f"{name} {ms:.4f}" for name, ms in row["ms"].items()]
        table.add_row(
            row["piece"],
            row["passes"],
            str(row["stage"]),
            "x".join(map(str, row["map"])),
            ", ".join(times + [f"{name} failed" for name in row["errors"]]),
            _or(row["ratio"], "{:.2f}"),
            f"{row['bytes'] / 1e6:.1f}",
            _or(row["copy_share"], "{:.1%}"),
        )
    _bench_end(args, report, table)
    for name, mean in report["means"].items():
        _print(f"{name}: {mean:.2f} times as fast as the best plain version (geometric mean)")
    if report["note"]:
        _print(report["note"])
    for row in report["rows"]:
        for name, error in row["errors"].items():
            sys.stderr.write(f"{row['piece']}, stage {row['stage']}, {name}: {error}\n")


def _bench_end(args: argparse.Namespace, report: dict[str, Any], table: Table) -> None:
    """What both tables have above and below them, and the files."""
    from .bench import save_plot

    about, roof = report["about"], report["ceilings"]
    about["command"] = args.typed
    h, w = about["setting"]["size"]
    packages = f"torch {about['packages']['torch']}, timm {about['packages']['timm']}"
    _print(f"{about['hardware']}, {about['setting']['dtype']}, {h}x{w}, {packages}")
    _print(table)
    _print(
        f"Ceilings, measured: matrix product {roof['matrix'] / 1e12:.3g} TFLOP/s, "
        f"copy {roof['copy'] / 1e9:.3g} GB/s read and written."
    )
    if report["warning"]:
        _print(f"Warning: {report['warning']}")
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    if args.plot:
        save_plot(report, args.plot)


def _or(value: Any, form: str) -> str:
    return "-" if value is None else form.format(value)


def _print(what: Any) -> None:
    Console(width=None if sys.stdout.isatty() else 140, highlight=False).print(what)


def _json(what: Any) -> None:
    sys.stdout.write(json.dumps(what, indent=1) + "\n")
