"""Published tables and the paper's ablations on Tiny-ImageNet-200, dense tasks on Cityscapes; resumable.

    python benchmarks/evidence.py tiny200 DATA OUT --parts calibration protocol   # train; what is done is skipped
    python benchmarks/evidence.py cityscapes DATA OUT                             # after: --parts pretraining
    python benchmarks/evidence.py tables RESULTS [RESULTS ...] -o evidence.md     # merge folders of several machines

DATA is the folder tiny-imagenet-200 as Stanford's archive unpacks it (train/<wnid>/images, val/images,
val/val_annotations.txt). OUT gets the images as `pale train` reads them, one run folder per run and one file per
finished run under OUT/results, with hardware, versions, commit, command, curve and result. `evidence_plan.py` has the
runs, the recipes with their sources, and the predictions. To run several processes side by side give each its own runs
by --shard i/n. For Cityscapes DATA is the folder with leftImg8bit/ and gtFine/, and OUT holds the runs of the part
pretraining, whose backbones are used. With --rehearse STEPS each run has so many steps, on a few of the images, and the
tables are printed at the end.
"""

from __future__ import annotations

import argparse
import statistics
from collections import Counter, defaultdict
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import evidence_cityscapes
import evidence_models  # noqa: F401 (registers them with timm)
from evidence_plan import MODES, PADDED, PARTS, PREDICTIONS, cityscapes
from PIL import Image
from planned_runs import (
    add_run_options,
    add_table_options,
    alone,
    choose_folder,
    execute_all,
    half_width,
    interval,
    load,
    show,
    show_rehearsal,
)

from pale.recipes import get

PUBLISHED = {  # Tiny-ImageNet column of the README of aanna0701/SPT_LSA_ViT at 54bd796
    "ViT": 57.07,
    "PiT": 60.25,
    "T2T": 60.57,
    "Swin": 60.87,
    "CaiT": 64.37,
    "SL-ViT": 61.07,
    "SL-T2T": 61.83,
    "SL-PiT": 62.91,
    "SL-Swin": 64.95,
    "SL-CaiT": 67.18,
}
REHEARSED = {
    "train": 10,
    "val": 1,
}  # images of each class in a rehearsal; of ten, one can be held out
REHEARSED_SCENES = {"train": 24, "val": 8}  # images of Cityscapes in a rehearsal


@dataclass(frozen=True)
class Claims:
    """Rows of an ablation table of the paper, by the label of our run: the paper's choice and the others."""

    chosen: str
    recipe: str  # of the choice, in pale.recipes.ablations
    others: dict[str, str]


CLAIMS = {
    "modes": Claims(
        "parallel",
        "attention_parallel",
        {mode: f"attention_{mode}" for mode in MODES if mode != "parallel"},
    ),
    "sizes": Claims(
        "parallel",
        "pale_size_7",
        {f"pale-size-{size}": f"pale_size_{size}" for size in (1, 3, 5, 9)},
    ),
    "positions": Claims(
        "parallel", "position_cpe", {"none": "position_none", "ape": "position_ape"}
    ),
}


def prepare(data: Path, out: Path, most: dict[str, int] | None = None) -> Path:
    """Write train, train_padded and val as class folders; return their root.

    Args:
        data: the folder tiny-imagenet-200.
        out: the root is a folder in it.
        most: images of each class, by split; None: all.
    """
    root = out / "tiny200"
    if (root / "complete").exists():
        return root
    jobs = []
    for folder in sorted((data / "train").iterdir()):
        for path in sorted((folder / "images").glob("*.JPEG"))[: most and most["train"]]:
            jobs.append((path, root / "train" / folder.name / path.name, 0))
            padded = root / "train_padded" / folder.name / f"{path.stem}.png"
            jobs.append((path, padded, (PADDED - 64) // 2))
    counts = most or {"train": 500, "val": 50}
    seen: Counter[str] = Counter()
    for line in (data / "val" / "val_annotations.txt").read_text().splitlines():
        name, wnid = line.split("\t")[:2]
        seen[wnid] += 1
        if seen[wnid] <= counts["val"]:
            jobs.append((data / "val" / "images" / name, root / "val" / wnid / name, 0))
    if len(jobs) != 200 * (2 * counts["train"] + counts["val"]):
        raise SystemExit(
            f"{data} must hold 100,000 + 10,000 images, found {len(jobs)} files to write"
        )
    for parent in {target.parent for _, target, _ in jobs}:
        parent.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor() as pool:
        list(pool.map(_convert, jobs, chunksize=500))
    (root / "complete").touch()
    return root


def _convert(job: tuple[Path, Path, int]) -> None:
    source, target, border = job
    if not border:
        target.write_bytes(source.read_bytes())
        return
    with Image.open(source, formats=["JPEG"]) as image:
        padded = Image.new("RGB", (image.width + 2 * border, image.height + 2 * border))
        padded.paste(image.convert("RGB"), (border, border))
    padded.save(target, compress_level=1)


def tiny200(args: argparse.Namespace) -> None:
    """Run the chosen parts in their order."""
    out = choose_folder(args)
    with alone(out):
        root = prepare(args.data, out, REHEARSED if args.rehearse else None)
    results = out / "results"
    for part in args.parts:
        execute_all(PARTS[part](root, results), args)
    show_rehearsal(args, _tables)


def dense(args: argparse.Namespace) -> None:
    """Train UperNet and Mask R-CNN on Cityscapes."""
    out = choose_folder(args)
    most = REHEARSED_SCENES if args.rehearse else None
    with alone(out):
        evidence_cityscapes.prepare(args.data, out / "cityscapes", most=most)
    execute_all(cityscapes(out / "tiny200", out / "results"), args)
    show_rehearsal(args, _tables)


def tables(args: argparse.Namespace) -> None:
    """Print one table per part, and write it where asked."""
    show(_tables(load(args.results)), args.output)


def _tables(rows: list[dict]) -> str:
    return "\n\n".join(_table(part, rows) for part in PARTS if any(r["part"] == part for r in rows))


def _table(part: str, rows: list[dict]) -> str:
    chosen: dict[str, list[dict]] = defaultdict(list)
    for row in rows:
        own = row["part"] == part
        if own or (
            part in ("sizes", "positions") and (row["part"], row["label"]) == ("modes", "parallel")
        ):
            chosen[row["label"]].append(row)
    lines = [f"### {part}", ""]
    if part in PREDICTIONS:
        lines += [f"Prediction: {PREDICTIONS[part]}", ""]
    if part in ("calibration", "protocol"):
        known = ", ".join(f"{name} {top1}" for name, top1 in PUBLISHED.items())
        lines += [f"Published (arXiv 2112.13492): {known}.", ""]
    if part == "trials":
        lines += [
            "Accuracy on held-out training images; the best setting of each model is used in `models`.",
            "",
        ]
    named = " or ".join(sorted({row["metric"] for group in chosen.values() for row in group}))
    lines += [f"| run | seeds | {named}, last | best | images/s | hardware | commit |"]
    lines += ["| --- | --- | --- | --- | --- | --- | --- |"]
    for label, group in chosen.items():
        facts = group[0]["environment"]
        commits = sorted({str(r["environment"]["commit"])[:9] for r in group})
        cells = [label, len(group), *(interval([r[k] for r in group]) for k in ("last", "best"))]
        cells += [f"{statistics.median(r['images_per_s'] for r in group):.0f}"]
        cells += [f"{facts['device']}, torch {facts['torch']}", ", ".join(commits)]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    if part in CLAIMS:
        lines += ["", *verdicts(CLAIMS[part], chosen)]
    return "\n".join(lines)


def verdicts(claims: Claims, chosen: dict[str, list[dict]]) -> list[str]:
    """Return a table that compares the differences to the paper's choice, paired by seed, with the paper's."""
    lines = [
        "| compared with | paper | here, paired by seed | verdict |",
        "| --- | --- | --- | --- |",
    ]
    ours = {row["seed"]: row["last"] for row in chosen.get(claims.chosen, [])}
    for label, recipe in claims.others.items():
        theirs = {row["seed"]: row["last"] for row in chosen.get(label, [])}
        pairs = [ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())]
        if not pairs:
            continue
        paper = (
            get(f"ablations.{claims.recipe}").reported.top1
            - get(f"ablations.{recipe}").reported.top1
        )
        lines.append(
            f"| {label} | {paper:+.1f} | {interval(pairs)} ({len(pairs)} seeds) | {verdict(paper, pairs)} |"
        )
    return [
        f"Difference of {claims.chosen} to the others, points of top-1 after the last epoch:",
        "",
        *lines,
    ]


def verdict(paper: float, pairs: list[float]) -> str:
    """Return whether differences of paired runs confirm a difference in the paper, by a 95 % interval."""
    if len(pairs) < 2:
        return "one seed: no verdict"
    mean, half = statistics.mean(pairs), half_width(pairs)
    if abs(paper) < 0.05:  # the paper has equal figures
        return "consistent" if abs(mean) <= half else "not confirmed"
    if mean * paper > 0 and abs(mean) > half:
        return "confirmed"
    return "too close to call" if abs(mean) <= half else "not confirmed"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    run = commands.add_parser("tiny200", help="train on Tiny-ImageNet-200")
    parts = [part for part in PARTS if part != "cityscapes"]
    run.add_argument("--parts", nargs="+", choices=parts, default=parts)
    run.set_defaults(run=tiny200)
    masks = commands.add_parser("cityscapes", help="train UperNet and Mask R-CNN on Cityscapes")
    masks.set_defaults(run=dense)
    for each in (run, masks):
        each.add_argument("data", type=Path)
        each.add_argument("out", type=Path)
        add_run_options(each)
    merge = commands.add_parser("tables", help="print the tables of result folders")
    add_table_options(merge)
    merge.set_defaults(run=tables)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
