"""Prepare public image sets for pre-training: checked, scaled, without duplicates of evaluation data, in tar shards.

    python benchmarks/pretraining_data.py --mirrors MIRRORS --out OUT               # all sets; absent ones are listed
    python benchmarks/pretraining_data.py --mirrors MIRRORS --out OUT --only coco cars --jobs 2 --size 128

MIRRORS holds the repositories of pretraining_sources.py as OWNER+NAME/repo or OWNER/NAME, without a work tree. Files
are read out of git, checked, and scaled to a shorter side of at most --size; OUT/staged gets the results in parts. Then
training images that equal a validation image of any set or an image of a transfer set are dropped, of equal training
images one is kept, and OUT/SET gets shards that `--data.kind shards` reads, with manifest.json: sources, counts, what
was dropped, classes and checksums. Images of multi-label sets have KEY.json, {"labels": [NAMES]}, in place of KEY.cls.
Classes of ImageNet's subsets are WordNet ids, by which readers merge them. OUT/evidence/tiny-imagenet-200 is
Tiny-ImageNet-200 as published. OUT/looks has samples of each set, and pairs that were found equal.

Repeated, the script does only what is missing; an interrupt loses one part or one shard. The same input gives the same
bytes. OUT/staged may be deleted at the end. Nothing in OUT may be committed or published. Shards have at most 48 MB,
and tar pads small files: before sending, gzip makes shards of 64 px images 2.7 times smaller.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import shutil
import tarfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw
from pretraining_images import (
    DroppedError,
    Fingerprints,
    find_matches,
    prepare,
    repeated_images,
)
from pretraining_sources import (
    COCO_CLASSES,
    SOURCES,
    Archive,
    Entry,
    Mirrors,
    Repository,
    Sample,
    Source,
    left_out_data,
)

from pale.core.escaping import escape_line
from pale.data.reading import MAX_SIDE
from pale.data.sources.shards import build_index, save_index
from pale.errors import DataError, PaleError

VERSION = 2  # of the content of staged parts
PART = 2000  # images of a staged part
SHARD_BYTES = 48_000_000
BLOCK, RECORD = 512, 10_240  # of tar
DISTANCE = 3  # bits of the hashes of equal images
DIFFERENCE = (
    6.0  # grey levels of their thumbnails; copies differ by 0 to 3, other images by 7 or more
)


@dataclass(frozen=True)
class Staged:
    """A set whose images are checked and scaled.

    Attributes:
        source: the set.
        commit: of its repository.
        samples: in the order of the parts.
        parts: files with `PART` images each.
        reasons: why an image is not used, "" if it is.
        prints: fingerprints of the images.
        sides: length of the shorter side of each image.
    """

    source: Source
    commit: str
    samples: list[Sample]
    parts: list[Path]
    reasons: NDArray[np.str_]
    prints: Fingerprints
    sides: NDArray[np.int16]

    def contents(self) -> dict[int, bytes]:
        """Return the JPEG files by index."""
        found = {}
        for number, path in enumerate(self.parts):
            with np.load(path, allow_pickle=False) as part:
                data, ends = part["data"].tobytes(), part["ends"]
            starts = np.r_[0, ends[:-1]]
            for i, (start, end) in enumerate(zip(starts, ends, strict=True)):
                if end > start:
                    found[number * PART + i] = data[start:end]
        return found


def exit_with_parent() -> None:
    """End this worker when the script is killed; otherwise it would wait for work for ever."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def stage_part(
    repository: Repository | Archive,
    entries: Sequence[Entry],
    size: int,
    source: Source,
    path: Path,
) -> Path:
    """Check and scale the images of a part and write them to `path`."""
    contents, ends, reasons, hashes, thumbnails, sides = [], [], [], [], [], []
    blank = np.zeros(2, np.uint64), np.zeros((2, 256), np.uint8)
    total = 0
    for entry, content in zip(entries, repository.contents(entries), strict=True):
        reason, prints, side = "", blank, 0
        try:
            if isinstance(content, str):
                raise DroppedError(content)
            done = prepare(content, entry.path, size)
            prints, side = (done.hashes, done.thumbnails), done.side
            if not source.transfer:
                contents.append(done.content)
                total += len(done.content)
        except DroppedError as error:
            reason = str(error)
        ends.append(total)
        reasons.append(reason)
        hashes.append(prints[0])
        thumbnails.append(prints[1])
        sides.append(side)
    temporary = path.with_name(f".{os.getpid()}.{path.name}")
    np.savez(
        temporary,
        data=np.frombuffer(b"".join(contents), np.uint8),
        ends=np.array(ends, np.int64),
        reasons=np.array(reasons, np.str_),
        hashes=np.stack(hashes),
        thumbnails=np.stack(thumbnails),
        sides=np.array(sides, np.int16),
    )
    temporary.replace(path)
    return path


def stage(source: Source, mirrors: Mirrors, args: argparse.Namespace, work: bool) -> Staged | None:
    """Stage a set, as far as it is not; None if its repository is absent, or it is incomplete and `work` is false."""
    found = source.find(mirrors)
    if found is None:
        return None
    repository, samples = found
    entries = [sample.entry for sample in samples]
    facts = [VERSION, args.size, source.transfer, repository.commit, entries]
    digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
    folder = args.out / "staged" / f"{source.name}-{digest}"
    parts = [folder / f"part-{i:05d}.npz" for i in range(-(-len(entries) // PART))]
    todo = [i for i, path in enumerate(parts) if not path.exists()]
    if todo and not work:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    began, done = time.monotonic(), 0
    with ProcessPoolExecutor(args.jobs, initializer=exit_with_parent) as pool:
        futures = {
            pool.submit(
                stage_part,
                repository,
                entries[i * PART : (i + 1) * PART],
                args.size,
                source,
                parts[i],
            ): i
            for i in todo
        }
        try:
            for future in as_completed(futures):
                future.result()
                done += 1
                speed = done * PART / (time.monotonic() - began)
                show(f"{source.name}: part {done} of {len(todo)}, {speed:.0f} images/s")
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    for leftover in folder.glob(".*"):
        leftover.unlink(missing_ok=True)
    return load_staged(source, repository.commit, samples, parts)


def load_staged(source: Source, commit: str, samples: list[Sample], parts: list[Path]) -> Staged:
    """Load all but the images of a staged set."""
    columns = defaultdict(list)
    for path in parts:
        with np.load(path, allow_pickle=False) as part:
            for name in ("reasons", "hashes", "thumbnails", "sides"):
                columns[name].append(part[name])
    joined = {name: np.concatenate(values) for name, values in columns.items()}
    reasons = joined["reasons"].astype("U40")
    for i, sample in enumerate(samples):
        if sample.drop:
            reasons[i] = sample.drop
    prints = Fingerprints(joined["hashes"], joined["thumbnails"])
    return Staged(source, commit, samples, parts, reasons, prints, joined["sides"])


def drop_duplicates(sets: Sequence[Staged]) -> dict[str, list[tuple[int, str, int]]]:
    """Mark training images that equal other images; return for each set some (image, set, image) that are equal.

    Training images equal to a validation image or to an image for transfer are dropped, then of equal training images
    all but the largest, of equally large ones the one of the first set.
    """
    place = [(k, i) for k, s in enumerate(sets) for i in range(len(s.samples))]
    prints = Fingerprints.join([s.prints for s in sets])
    usable = np.concatenate([s.reasons == "" for s in sets])
    train = np.array(
        [x.split == "train" and not s.source.transfer for s in sets for x in s.samples]
    )
    sides = np.concatenate([s.sides for s in sets]).astype(np.int64)
    reference = np.flatnonzero(usable & ~train)
    query = np.flatnonzero(usable & train)
    show(f"comparing {len(query)} training images with {len(reference)} others")
    matches = find_matches(prints[query], prints[reference], DISTANCE, DIFFERENCE)
    pairs = [(int(query[i]), int(reference[matches[i]])) for i in np.flatnonzero(matches >= 0)]
    rest = query[matches < 0]
    preference = (1 << 40) * (MAX_SIDE - sides[rest]) + rest
    kept = repeated_images(prints[rest], preference, DIFFERENCE)
    repeats = [(int(rest[i]), int(rest[kept[i]])) for i in np.flatnonzero(kept >= 0)]
    equal = defaultdict(list)
    for a, b in [*pairs, *repeats]:
        (k, i), (m, j) = place[a], place[b]
        other = sets[m].source
        kind = "transfer" if other.transfer else sets[m].samples[j].split
        sets[k].reasons[i] = f"equal to {kind} of {other.name}"
        equal[sets[k].source.name].append((i, other.name, j))
    return equal


def pack(staged: Staged, used: dict[str, str], args: argparse.Namespace, target: str = "") -> None:
    """Pack a set, unless that is done; with a target, all its files as published."""
    folder = args.out / (target or staged.source.name)
    prefix = (target or staged.source.name).replace("/", "-")
    classes = choose_classes(staged)
    samples = staged.samples
    kept = np.flatnonzero(staged.reasons == "").tolist()
    facts = [VERSION, SHARD_BYTES, prefix, staged.parts[0].parent.name, classes]
    facts += [[i, samples[i].split, samples[i].labels] for i in kept]
    plan = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
    if is_packed(folder, plan):
        show(f"{folder}: complete")
        return
    work = folder.with_name(
        f".{folder.name}"
    )  # an older version is used until this one is complete
    marker = work / "plan"
    if not marker.is_file() or marker.read_text() != plan:
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        write_text(marker, plan)
    contents = staged.contents()
    if target:
        require_published(staged, contents)
    shards = {}
    for split in ("train", "val"):
        members = [
            (f"{prefix}-{i:07d}", contents[i], *label_file(samples[i], classes, staged.source))
            for i in kept
            if samples[i].split == split
        ]
        members.sort(key=lambda member: hashlib.sha256(member[0].encode()).digest())
        done = write_split(work, split, members)
        if not staged.source.is_multi:
            save_index(work, split, build_index([work / name for name in done], classes))
        shards |= done
    write_text(work / "classes.txt", "".join(f"{escape_line(name)}\n" for name in classes))
    manifest = {
        "plan": plan,
        "size": None if target else args.size,
        "labels": "multi" if staged.source.is_multi else "single",
        "source": describe(staged),
        "compared_with": used,
        "distance_bits": DISTANCE,
        "difference_levels": DIFFERENCE,
        "classes": classes,
        "shards": shards,
    }
    write_text(work / "manifest.json", json.dumps(manifest, indent=1) + "\n")
    shutil.rmtree(folder, ignore_errors=True)
    work.rename(folder)
    (folder / "plan").unlink()
    show(f"{folder}: {len(kept)} images, {len(classes)} classes, {len(shards)} shards")


def choose_classes(staged: Staged) -> list[str]:
    """Return the classes with images in both splits; images of others are dropped."""
    if staged.source.is_multi:
        return list(COCO_CLASSES)
    seen: dict[str, set[str]] = {"train": set(), "val": set()}
    usable = np.flatnonzero(staged.reasons == "").tolist()
    for i in usable:
        seen[staged.samples[i].split].add(staged.samples[i].labels[0])
    classes = sorted(seen["train"] & seen["val"])
    for i in usable:
        if staged.samples[i].labels[0] not in classes:
            staged.reasons[i] = "class without images in a split"
    if not classes:
        raise DataError(f"{staged.source.name}: no class has images for training and validation")
    return classes


def require_published(staged: Staged, contents: dict[int, bytes]) -> None:
    """Raise unless all files of a set are there, byte for byte, by their object ids in git."""
    for i, sample in enumerate(staged.samples):
        content = contents.get(i, b"")
        head = f"blob {len(content)}\0".encode()
        if hashlib.sha1(head + content, usedforsecurity=False).hexdigest() != sample.entry.oid:
            raise DataError(
                f"{staged.source.name}: {sample.entry.path!r} was dropped or scaled; choose a larger --size"
            )


def is_packed(folder: Path, plan: str) -> bool:
    """Return whether the folder is complete and holds what is planned."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        sizes = {name: (folder / name).stat().st_size for name in manifest["shards"]}
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return manifest["plan"] == plan and all(
        about["bytes"] == sizes[name] for name, about in manifest["shards"].items()
    )


def label_file(sample: Sample, classes: Sequence[str], source: Source) -> tuple[str, bytes]:
    """Return suffix and content of the file with the labels of an image."""
    if source.is_multi:
        return "json", json.dumps({"labels": sorted(sample.labels)}).encode()
    return "cls", str(classes.index(sample.labels[0])).encode()


def write_split(
    folder: Path, split: str, members: Sequence[tuple[str, bytes, str, bytes]]
) -> dict[str, Any]:
    """Write the shards of a split that are not there yet; return size, checksum and number of images of each."""
    shards = {}
    for number, part in enumerate(cut(members)):
        path = folder / f"{split}-{number:06d}.tar"
        if not path.exists():
            temporary = path.with_name(f".{path.name}")
            with tarfile.open(temporary, "w", format=tarfile.PAX_FORMAT) as tar:
                for key, image, suffix, label in part:
                    for name, content in ((f"{key}.jpg", image), (f"{key}.{suffix}", label)):
                        about = tarfile.TarInfo(name)
                        about.size = len(content)
                        tar.addfile(about, io.BytesIO(content))
            temporary.replace(path)
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        shards[path.name] = {"sha256": digest, "bytes": path.stat().st_size, "images": len(part)}
    return shards


def cut(
    members: Sequence[tuple[str, bytes, str, bytes]],
) -> Iterator[list[tuple[str, bytes, str, bytes]]]:
    """Yield runs of members whose tar has at most `SHARD_BYTES`."""
    part: list[tuple[str, bytes, str, bytes]] = []
    size = 0
    for entry in members:
        more = sum(BLOCK + -(-len(content) // BLOCK) * BLOCK for content in (entry[1], entry[3]))
        if part and size + more + 2 * BLOCK + RECORD > SHARD_BYTES:
            yield part
            part, size = [], 0
        part.append(entry)
        size += more
    if part:
        yield part


def describe(staged: Staged) -> dict[str, Any]:
    """Return the origin of a set and the number of its images, for the manifest."""
    usable = staged.reasons == ""
    splits = Counter(x.split for x, ok in zip(staged.samples, usable, strict=True) if ok)
    return {
        "name": staged.source.name,
        "repository": staged.source.repository,
        "commit": staged.commit,
        "terms": staged.source.terms,
        "found": dict(Counter(x.split for x in staged.samples)),
        "packed": dict(splits),
        "dropped": dict(sorted(Counter(staged.reasons[~usable].tolist()).items())),
        "classes": len({label for x in staged.samples for label in x.labels}),
    }


def write_text(path: Path, text: str) -> None:
    """Write a file completely or not at all."""
    temporary = path.with_name(f".{path.name}")
    temporary.write_text(text)
    temporary.replace(path)


def draw_sheet(cells: Sequence[tuple[bytes, str]], columns: int, path: Path) -> None:
    """Save images in rows, each with a caption."""
    wide, high = 176, 160
    canvas = Image.new("RGB", (wide * columns, high * -(-len(cells) // columns)), "white")
    pen = ImageDraw.Draw(canvas)
    for number, (content, caption) in enumerate(cells):
        left, top = wide * (number % columns), high * (number // columns)
        with Image.open(io.BytesIO(content)) as image:
            scale = min((wide - 6) / image.width, (high - 22) / image.height)
            shown = image.convert("RGB").resize(
                (int(image.width * scale), int(image.height * scale))
            )
        canvas.paste(shown, (left, top))
        pen.text(
            (left + 2, top + high - 16),
            escape_line(caption)[:29].encode("latin-1", "replace").decode("latin-1"),
            fill="black",
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    canvas.save(path, quality=85)


def draw_samples(staged: Staged, args: argparse.Namespace) -> None:
    """Save 5 rows of 8 images of a set with their classes and sizes."""
    usable = np.flatnonzero(staged.reasons == "")
    chosen = np.random.default_rng(0).choice(usable, min(40, len(usable)), replace=False)
    contents = staged.contents()
    cells = []
    for i in sorted(chosen.tolist()):
        sample = staged.samples[i]
        cells.append((contents[i], f"{sample.split} {', '.join(sample.labels)}"))
    draw_sheet(cells, 8, args.out / "looks" / f"{staged.source.name}.jpg")


def draw_pairs(
    sets: Sequence[Staged], equal: dict[str, list[tuple[int, str, int]]], args: argparse.Namespace
) -> None:
    """Save pairs of equal images of each set beside each other, where both are packed data."""
    contents = {s.source.name: s.contents() for s in sets if not s.source.transfer}
    for name, pairs in equal.items():
        shown = [(i, other, j) for i, other, j in pairs if other in contents]
        order = np.random.default_rng(0).permutation(len(shown))[:20]
        cells = []
        for i, other, j in (shown[k] for k in order):
            cells += [(contents[name][i], f"{name} {i}"), (contents[other][j], f"{other} {j}")]
        if cells:
            draw_sheet(cells, 8, args.out / "looks" / f"equal-{name}.jpg")


def show(text: str) -> None:
    """Print a line of progress."""
    print(time.strftime("%H:%M:%S"), escape_line(text), flush=True)


def run(args: argparse.Namespace) -> None:
    """Stage all chosen sets, then drop duplicates and pack."""
    mirrors = Mirrors(args.mirrors, args.shared)
    sets: list[Staged] = []
    absent = []
    for source in SOURCES:
        chosen = not args.only or source.name in args.only
        staged = stage(source, mirrors, args, chosen or source.transfer)
        if staged is None:
            absent.append(source.name)
            continue
        sets.append(staged)
        if not source.transfer and not (args.out / "looks" / f"{source.name}.jpg").exists():
            draw_samples(staged, args)
        if source.published and chosen:
            pack(staged, {}, args, source.published)
    show(f"absent or not staged: {', '.join(absent) or 'none'}")
    equal = drop_duplicates(sets)
    draw_pairs(sets, equal, args)
    for staged in sets:
        source = staged.source
        if source.transfer or (args.only and source.name not in args.only):
            continue
        used = {s.source.name: s.commit for s in sets if s is not staged}
        for name, present in left_out_data(source, mirrors).items():
            used[name] = "present" if present else "absent"
        pack(staged, used | dict.fromkeys(absent, "absent"), args)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mirrors", type=Path, required=True, help="folder of the repositories")
    parser.add_argument("--out", type=Path, required=True, help="folder for the packed data")
    shared = os.environ.get("PALE_DATA", Path(__file__).parents[2] / "shared/data")
    text = "folder with oxford-pets-160.tar and coco-mini.tar (default: PALE_DATA)"
    parser.add_argument("--shared", type=Path, default=shared, help=text)
    names = [source.name for source in SOURCES if not source.transfer]
    parser.add_argument("--only", nargs="+", choices=names, metavar="SET", help=", ".join(names))
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--size", type=int, default=128, help="largest shorter side, pixels")
    args = parser.parse_args()
    try:
        run(args)
    except (PaleError, OSError) as error:
        raise SystemExit(escape_line(error)) from None


if __name__ == "__main__":
    main()
