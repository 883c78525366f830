"""What weights are worth on data that pre-training never saw: neighbours, linear probe, fine-tuning; resumable.

    python benchmarks/transfer.py prepare DATA --mirrors MIRRORS          # eight sets; absent repositories are listed
    python benchmarks/transfer.py run DATA OUT --models pale_nano=RUN pale_tiny=FILE swin_tiny_patch4_window7_224=RUN
    python benchmarks/transfer.py tables RESULTS [RESULTS ...] -o transfer.md --compare pale_tiny swin

A model is [LABEL:]ARCHITECTURE[=WEIGHTS]; without weights it is only trained from scratch, and labels distinguish
models of one architecture. Steps of `run`, in this order: `trials` choose settings on held-out training images,
`frozen` scores 20 nearest neighbours and a linear classifier on features of the backbone as it is (from scratch: with
random weights), `finetune` trains from scratch and from the weights. transfer_plan.py has the recipes. OUT/results gets
one file per run, with hardware, versions, commit and command; what is done is skipped. To run several processes side
by side give each its own runs by --shard i/n, after the step trials.

DATA and OUT hold images and must not be committed or published; result files hold none.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from planned_runs import (
    add_run_options,
    add_table_options,
    choose_folder,
    describe_machine,
    execute_all,
    half_width,
    interval,
    load,
    mark,
    show,
    show_rehearsal,
    write_result,
)
from pretraining_sources import Mirrors
from transfer_data import NAMES, prepare_all
from transfer_plan import PHOTO_SETS, SETTINGS, Contender, Start, photos, runs, trials

from pale.core.escaping import escape_line
from pale.data.sources.images import read_folder
from pale.errors import PaleError
from pale.tools.features import extract, probe
from pale.tools.neighbours import score_neighbours
from pale.train.distributed import join
from pale.weights import zoo
from pale.weights.read import load_weights

NEIGHBOURS = 20
STEPS = ("trials", "frozen", "finetune")
Row = dict[str, Any]


def prepare(args: argparse.Namespace) -> None:
    """Prepare the sets."""
    mirrors = Mirrors(args.mirrors, args.shared)
    prepare_all(mirrors, args.data, args.sets, args.size, args.jobs)


def parse_model(text: str) -> Contender:
    """Return the model of [LABEL:]ARCHITECTURE[=WEIGHTS]."""
    head, _, path = text.partition("=")
    label, _, name = head.rpartition(":")
    label = label or name
    if not all(c.isalnum() or c in "._+" for c in label):
        raise argparse.ArgumentTypeError(f"a label of letters, digits, . _ and +, got {label!r}")
    return Contender(label, name, Path(path) if path else None)


def parse_setting(text: str) -> tuple[Start, str]:
    """Return start and setting of START=SETTING."""
    start, _, name = text.partition("=")
    for known, settings in SETTINGS.items():
        if start == known and name in settings:
            return known, name
    choices = [f"{known}={name}" for known, settings in SETTINGS.items() for name in settings]
    raise argparse.ArgumentTypeError(f"one of {', '.join(choices)}, got {text!r}")


def with_digest(model: Contender) -> Contender:
    """Return a model with the SHA-256 of its weights, by which results of other weights are recognised."""
    if model.weights is None:
        return model
    path = model.weights
    if not path.exists():  # a name that `pale weights` lists
        path = zoo.find_file(str(path)) or path
    digest = hashlib.sha256()
    for name, tensor in sorted(load_weights(path).tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return Contender(model.label, model.name, path, digest.hexdigest())


def run(args: argparse.Namespace) -> None:
    """Execute the chosen steps in their order."""
    models = [with_digest(model) for model in args.models]
    if len({model.label for model in models}) < len(models):
        raise SystemExit("models need different labels; write LABEL:ARCHITECTURE=WEIGHTS")
    results = choose_folder(args) / "results"
    missing = [name for name in args.sets if not (args.data / name / "manifest.json").is_file()]
    if missing:
        raise SystemExit(f"{args.data} lacks {', '.join(missing)}; run prepare, or name --sets")
    require_same(results, models, args.size)
    for step in STEPS:
        if step not in args.steps:
            continue
        if step == "trials":
            execute_all(trials(args.data, args.sets, models, args.size), args)
        elif step == "frozen":
            jobs = frozen(args.sets, models, args.seeds)
            for job in jobs[args.shard[0] :: args.shard[1]]:
                score_frozen(*job, args)
        else:
            fixed = dict(args.settings)
            planned = runs(args.data, results, args.sets, models, args.seeds, args.size, fixed)
            execute_all(planned, args)
    show_rehearsal(args, _tables)


def require_same(results: Path, models: Sequence[Contender], size: int) -> None:
    """Raise if a result under the label of a model was made with other weights, or at another image size."""
    known = {model.label: model for model in models}
    for path in sorted(results.glob("*.json")):
        row = json.loads(path.read_text())
        model = known.get(row["model"])
        if model is None:
            continue
        now = (model.name, model.digest if row["start"] == "weights" else None)
        if (row["architecture"], row["weights"]) != now:
            raise SystemExit(
                f"{path} is of other weights or another architecture than {model.label} has now; give the model "
                "another label, or remove its results and runs"
            )
        if row.get("size", size) != size:
            raise SystemExit(
                f"{path} is of image size {row['size']}, not {size}; use another folder for the results"
            )


def frozen(
    sets: Sequence[str], models: Sequence[Contender], seeds: int
) -> list[tuple[str, Contender, Start, int]]:
    """Return the sets, models, starts and seeds to score; features of weights do not depend on a seed."""
    return [
        (part, model, start, seed)
        for part in sets
        if part in PHOTO_SETS
        for model in models
        for start in model.starts
        for seed in range(seeds if start == "scratch" else 1)
    ]


def score_frozen(
    part: str, model: Contender, start: Start, seed: int, args: argparse.Namespace
) -> None:
    """Score nearest neighbours and a linear classifier on features of a backbone, and write the result file."""
    label = f"{model.label}-frozen-{start}"
    result = args.out / "results" / f"{part}-{label}-{seed}.json"
    if result.exists() or (args.labels and label not in args.labels):
        return
    setting = next(iter(SETTINGS[start]))  # has no effect on features
    recipe = photos(args.data, part, model.name, start, setting, seed, args.size)
    if model.weights is not None and start == "weights":
        recipe = recipe.started_from(model.weights)
    sources = [read_folder(args.data / part / split) for split in ("train", "test")]
    torch.manual_seed(seed)
    network = recipe.model.build(len(sources[0].classes), args.size)
    with join() as world:
        device, facts = world.device.type, describe_machine(world)
    train, test = (
        extract(network, source, args.size, recipe.data.crop, workers=args.workers, device=device)
        for source in sources
    )
    linear, nearest = probe(train, test), score_neighbours(train, test, NEIGHBOURS)
    row = {
        "part": part,
        "label": label,
        "seed": seed,
        "metric": "linear",
        "last": linear.val,
        "figures": {"linear": linear.val, "neighbours": nearest.val},
        "settings": {
            "penalty": linear.strength,
            "k": nearest.k,
            "temperature": nearest.temperature,
        },
        "images": {"train": len(train.labels), "test": len(test.labels)},
        "size": args.size,
        "side_by_side": args.shard[1],
        **mark(args),
        **facts,
        **model.about(part, start, "frozen", None),
    }
    write_result(result, row)
    print(f"{result.stem}: linear {linear.val:.2f}, neighbours {nearest.val:.2f}", flush=True)


def tables(args: argparse.Namespace) -> None:
    """Print a table per set, and the comparison of two models."""
    show(_tables(load(args.results), args.compare), args.output)


def _tables(rows: Sequence[Row], compare: Sequence[str] | None = None) -> str:
    rows = [row for row in rows if row["method"] != "trial"]
    parts = [name for name in NAMES if any(row["set"] == name for row in rows)]
    texts = [_table(part, [row for row in rows if row["set"] == part]) for part in parts]
    if compare:
        texts.append(comparison(rows, parts, *compare))
    return "\n\n".join(texts)


def _figures(row: Row) -> dict[str, float]:
    """Return the figures of a result file that tables show, by their names there."""
    found = row["figures"]
    if row["method"] == "frozen":
        names = {f"{NEIGHBOURS} nearest neighbours": "neighbours", "linear probe": "linear"}
    else:
        shown = ("top1", "miou", "box_ap", "mask_ap")
        names = {f"fine-tuned, {key}": key for key in shown if key in found}
    return {name: found[key] for name, key in names.items()}


def _collect(rows: Sequence[Row]) -> dict[tuple[str, str], dict[str, dict[int, float]]]:
    """Return the figures by (method, model), start and seed."""
    found: dict[tuple[str, str], dict[str, dict[int, float]]] = {}
    for row in rows:
        for method, value in _figures(row).items():
            starts = found.setdefault((method, row["model"]), {"scratch": {}, "weights": {}})
            starts[row["start"]][row["seed"]] = value
    return found


def _table(part: str, rows: Sequence[Row]) -> str:
    facts = sorted(
        {f"{r['environment']['device']}, torch {r['environment']['torch']}" for r in rows}
    )
    commits = sorted({str(r["environment"]["commit"])[:9] for r in rows})
    lines = [f"### {part}", "", f"{'; '.join(facts)}; commit {', '.join(commits)}."]
    lines += _describe_settings(rows)
    lines += ["", "| model | method | from scratch | from weights | difference | seeds |"]
    lines += ["| --- | --- | --- | --- | --- | --- |"]
    for (method, model), starts in sorted(_collect(rows).items()):
        scratch, weights = starts["scratch"], starts["weights"]
        cells = [interval([*each.values()]) if each else "" for each in (scratch, weights)]
        counts = f"{len(scratch)}, {len(weights)}"
        lines.append(
            f"| {model} | {method} | {' | '.join(cells)} | {difference(weights, scratch)} | {counts} |"
        )
    return "\n".join(lines)


def _describe_settings(rows: Sequence[Row]) -> list[str]:
    """Return the settings of fine-tuning and how they were chosen, a line for each way."""
    ways = {False: "chosen on held-out training images", True: "fixed beforehand"}
    lines = []
    for fixed, way in ways.items():
        tuned = [r for r in rows if r["setting"] and r.get("fixed", False) == fixed]
        if names := sorted({f"{r['start']} {r['setting']}" for r in tuned}):
            lines.append(f"Settings, {way}: {', '.join(names)}.")
    return lines


def difference(first: dict[int, float], second: dict[int, float]) -> str:
    """Return the difference of means: with its 95 % interval, paired by seed, where both have the same seeds."""
    if not first or not second:
        return ""
    pairs = [first[seed] - second[seed] for seed in sorted(first.keys() & second.keys())]
    if len(pairs) < 2 or first.keys() != second.keys():
        return f"{statistics.mean(first.values()) - statistics.mean(second.values()):+.2f}"
    return f"{statistics.mean(pairs):+.2f} ± {half_width(pairs):.2f}"


def comparison(rows: Sequence[Row], parts: Sequence[str], first: str, second: str) -> str:
    """Return a table of two models, fine-tuned from their weights."""
    lines = [f"### {first} and {second}, fine-tuned from weights", ""]
    lines += [f"| set | {first} | {second} | difference |", "| --- | --- | --- | --- |"]
    ahead = total = 0
    for part in parts:
        own: dict[str, dict[int, float]] = {first: {}, second: {}}
        for row in rows:
            wanted = (row["set"], row["start"], row["method"]) == (part, "weights", "fine-tuned")
            if wanted and row["model"] in own:
                own[row["model"]][row["seed"]] = row["last"]
        a, b = own[first], own[second]
        if not a or not b:
            continue
        total += 1
        ahead += statistics.mean(a.values()) > statistics.mean(b.values())
        cells = [part, interval([*a.values()]), interval([*b.values()]), difference(a, b)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", f"{first} has the higher mean on {ahead} of {total} sets."])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    make = commands.add_parser("prepare", help="prepare the sets")
    make.add_argument("data", type=Path)
    make.add_argument("--mirrors", type=Path, required=True, help="folder of the repositories")
    shared = os.environ.get("PALE_DATA", Path(__file__).parents[2] / "shared/data")
    text = "folder with oxford-pets-160.tar, camvid-240.tar and coco-mini.tar (default: PALE_DATA)"
    make.add_argument("--shared", type=Path, default=Path(shared), help=text)
    make.add_argument("--size", type=int, default=256, help="largest shorter side of photos")
    make.add_argument("--jobs", type=int, default=2, help="processes")
    work = commands.add_parser("run", help="score and fine-tune models")
    work.add_argument("data", type=Path)
    work.add_argument("out", type=Path)
    work.add_argument("--models", type=parse_model, nargs="+", required=True)
    work.add_argument("--steps", nargs="+", choices=STEPS, default=STEPS)
    work.add_argument("--seeds", type=int, default=3, choices=range(1, 11), metavar="N")
    work.add_argument("--size", type=int, default=192, help="image size of classifiers")
    text = "settings fixed beforehand, which need no trials, such as weights=adamw"
    work.add_argument(
        "--settings", type=parse_setting, nargs="+", default=(), metavar="START=SETTING", help=text
    )
    add_run_options(work)
    merge = commands.add_parser("tables", help="print the tables of result folders")
    add_table_options(merge)
    merge.add_argument("--compare", nargs=2, metavar="LABEL", help="two models over all sets")
    actions: tuple[tuple[argparse.ArgumentParser, Callable[[argparse.Namespace], None]], ...]
    actions = ((make, prepare), (work, run), (merge, tables))
    for command, action in actions:
        command.set_defaults(run=action)
        if command is not merge:
            command.add_argument("--sets", nargs="+", choices=NAMES, default=NAMES, metavar="SET")
    args = parser.parse_args()
    try:
        args.run(args)
    except PaleError as error:
        raise SystemExit(escape_line(error)) from None


if __name__ == "__main__":
    main()
