"""Prepare the sets for transfer as `pale train` reads them; used by transfer.py.

Photos become class folders, DATA/SET/{train,val,test}/CLASS/*.jpg, with a shorter side of at most `size`; CamVid and
COCO-mini are unpacked; the boxes of COCO become annotation files. Files are read out of git repositories without a work
tree and out of tar files, and every one of them is hostile until checked. Each set has manifest.json: origin, number of
images, and what was dropped. A set is complete or hidden (a name with a dot), and an interrupt loses one part of it.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from pretraining_data import exit_with_parent, show, write_text
from pretraining_images import DroppedError, decode, scale
from pretraining_sources import COCO_BOXES, Archive, Entry, Mirrors, Repository, read_file
from transfer_sets import SETS, Photo, PhotoSet

from pale.data.reading import open_regular
from pale.errors import DataError

VERSION = 1  # of what is written
PART = 500  # images that an interrupt can lose
TARS = {"camvid": "camvid-240.tar", "coco-mini": "coco-mini.tar"}
BOXES = "coco-10k"
BOX_SIDE = 320  # largest shorter side of images with boxes
BOX_SPLITS = ("train2017", "val2017")  # one image in ten is for validation
IMAGE_FILE, LABEL_FILE = r".*/\d{12}\.jpg", r".*/(\d{12})\.txt"
MAX_CATEGORY = 79  # the labels lack the categories above
NAMES = (*(each.name for each in SETS), *TARS, BOXES)

Record = dict[str, Any]  # of a part: its images and why others were dropped


def prepare_all(mirrors: Mirrors, data: Path, names: Sequence[str], size: int, jobs: int) -> None:
    """Prepare the sets whose files are there, as far as they are not; list the others."""
    absent = []
    for name in names:
        if name in TARS:
            done = unpack(name, mirrors.shared / TARS[name], data)
        elif name == BOXES:
            done = prepare_boxes(mirrors, data, jobs)
        else:
            (chosen,) = (each for each in SETS if each.name == name)
            done = prepare_photos(chosen, mirrors, data, size, jobs)
        if not done:
            absent.append(name)
    show(f"absent: {', '.join(absent) or 'none'}")


def prepare_photos(chosen: PhotoSet, mirrors: Mirrors, data: Path, size: int, jobs: int) -> bool:
    """Write the class folders of a set; return False if its repository is absent."""
    found = chosen.find(mirrors)
    if found is None:
        return False
    repository, photos = found
    plan = _digest([VERSION, size, repository.commit, photos])
    if is_complete(data / chosen.name, plan):
        show(f"{chosen.name}: complete")
        return True
    work = _open_work(data, chosen.name, plan)
    records = _run_parts(
        work,
        photos,
        lambda part, start, record: (write_photos, repository, part, start, size, work, record),
        jobs,
        chosen.name,
    )
    images = [tuple(each) for record in records for each in record["images"]]
    labels = {split: {label for s, label in images if s == split} for split in ("train", "test")}
    if labels["train"] != labels["test"] or not labels["train"]:
        odd = sorted(labels["train"] ^ labels["test"])
        raise DataError(
            f"{chosen.name}: {len(odd)} classes lack images for training or the test: {', '.join(odd[:5])}"
        )
    counts = dict(Counter(split for split, _ in images))
    facts = {"classes": len(labels["train"]), "images": counts}
    _finish(work, data / chosen.name, plan, repository, records, facts)
    return True


def write_photos(
    repository: Repository | Archive,
    photos: Sequence[Photo],
    start: int,
    size: int,
    work: Path,
    record: Path,
) -> None:
    """Write the images of a part, then its record."""
    images, dropped = [], []
    contents = repository.contents([photo.entry for photo in photos])
    for number, (photo, content) in enumerate(zip(photos, contents, strict=True), start):
        try:
            _, small = read_scaled(content, photo.entry, size)
        except DroppedError as error:
            dropped.append([photo.split, str(error)])
            continue
        folder = work / photo.split / photo.label
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number:05d}.jpg").write_bytes(small)
        images.append([photo.split, photo.label])
    write_text(record, json.dumps({"images": images, "dropped": dropped}))


def read_scaled(content: bytes | str, entry: Entry, size: int) -> tuple[tuple[int, int], bytes]:
    """Return width, height and JPEG file of an image with a shorter side of at most `size`; raise `DroppedError`."""
    if isinstance(content, str):
        raise DroppedError(content)
    full, plain = decode(content, entry.path, size)
    small, made = scale(full, size, content if plain else None)
    return small.size, made


def unpack(name: str, tar: Path, data: Path) -> bool:
    """Unpack a tar whose files are in one folder; return False if there is none."""
    if not tar.is_file():
        return False
    archive = Archive(tar)
    plan = _digest([VERSION, archive.commit])
    if is_complete(data / name, plan):
        show(f"{name}: complete")
        return True
    shutil.rmtree(data / f".{name}", ignore_errors=True)
    work = _open_work(data, name, plan)
    with open_regular(tar) as file, tarfile.open(fileobj=file, mode="r:") as members:
        for member in members:
            _, _, member.name = member.name.partition("/")
            if member.isreg():
                members.extract(member, work, filter="data")
    _finish(work, data / name, plan, archive, [], {})
    return True


def prepare_boxes(mirrors: Mirrors, data: Path, jobs: int) -> bool:
    """Write images and annotation files of the boxes of COCO; return False if the repository is absent."""
    repository = mirrors.open(*COCO_BOXES)
    mini = mirrors.shared / TARS["coco-mini"]
    if repository is None or not mini.is_file():
        return False
    names = json.loads(read_file(Archive(mini), "coco-mini/annotations/instances_train2017.json"))[
        "categories"
    ]
    categories = [
        {"id": each["id"], "name": each["name"]} for each in names if each["id"] <= MAX_CATEGORY
    ]
    labels = {
        match[1]: entry
        for entry in repository.entries()
        if (match := re.fullmatch(LABEL_FILE, entry.path))
    }
    images = {
        Path(entry.path).stem: entry
        for entry in repository.past_entries(IMAGE_FILE)
        if entry.size >= 0
    }
    pairs = [(images[key], labels[key]) for key in sorted(images.keys() & labels.keys())]
    if not pairs:
        raise DataError(f"{repository.folder} has no image with boxes; fetch it with its history")
    plan = _digest([VERSION, BOX_SIDE, repository.commit, pairs, categories])
    if is_complete(data / BOXES, plan):
        show(f"{BOXES}: complete")
        return True
    work = _open_work(data, BOXES, plan)
    known = {each["id"] for each in categories}
    records = _run_parts(
        work,
        pairs,
        lambda part, start, record: (write_boxes, repository, part, known, work, record),
        jobs,
        BOXES,
    )
    objects = [each for record in records for each in record["images"]]
    counts = {}
    for split in BOX_SPLITS:
        own = [each for each in objects if each["split"] == split]
        content = annotation_file(own, categories)
        counts[split] = {"images": len(own), "boxes": len(content["annotations"])}
        (work / "annotations").mkdir(exist_ok=True)
        write_text(work / "annotations" / f"instances_{split}.json", json.dumps(content))
    facts = {"classes": len(categories), "images": counts}
    facts["without image"] = len(labels.keys() - images.keys())
    _finish(work, data / BOXES, plan, repository, records, facts)
    return True


def write_boxes(
    repository: Repository,
    pairs: Sequence[tuple[Entry, Entry]],
    known: set[int],
    work: Path,
    record: Path,
) -> None:
    """Write the images of a part, then a record with their boxes."""
    images, dropped = [], []
    files = repository.contents([image for image, _ in pairs])
    texts = list(repository.contents([text for _, text in pairs]))
    for (entry, _), content, text in zip(pairs, files, texts, strict=True):
        key = Path(entry.path).stem
        rank = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big")
        split = BOX_SPLITS[rank % 10 == 0]
        try:
            if isinstance(text, str):
                raise DroppedError(f"labels: {text}")
            boxes = parse_boxes(text, int(key), known)
            size, small = read_scaled(content, entry, BOX_SIDE)
        except DroppedError as error:
            dropped.append([split, str(error)])
            continue
        (work / split).mkdir(exist_ok=True)
        (work / split / f"{key}.jpg").write_bytes(small)
        images.append({"id": int(key), "split": split, "size": size, "boxes": boxes})
    write_text(record, json.dumps({"images": images, "dropped": dropped}))


def parse_boxes(text: bytes, image: int, known: set[int]) -> list[tuple[int, list[float]]]:
    """Return category and relative left, top, width and height of each line "image category cx cy w h"."""
    found = []
    try:
        for line in text.decode("ascii").splitlines():
            number, category, *numbers = line.split()
            cx, cy, w, h = map(float, numbers)
            left, top = max(0.0, cx - w / 2), max(0.0, cy - h / 2)
            right, bottom = min(1.0, cx + w / 2), min(1.0, cy + h / 2)
            if int(number) != image or not (left < right and top < bottom):
                raise ValueError
            if int(category) not in known:
                raise DroppedError("labels of an unknown category")
            found.append((int(category), [left, top, right - left, bottom - top]))
    except DroppedError:
        raise
    except ValueError:
        raise DroppedError("labels of another format") from None
    return found


def annotation_file(images: Sequence[Record], categories: list[Record]) -> Record:
    """Return the content of an annotation file in COCO's format."""
    annotations = []
    for each in images:
        width, height = each["size"]
        for category, (left, top, w, h) in each["boxes"]:
            box = [left * width, top * height, w * width, h * height]
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": each["id"],
                    "category_id": category,
                    "bbox": box,
                    "area": box[2] * box[3],
                    "iscrowd": 0,
                }
            )
    listed = [
        {"id": i["id"], "file_name": f"{i['id']:012d}.jpg", "width": w, "height": h}
        for i in images
        for w, h in [i["size"]]
    ]
    return {"images": listed, "annotations": annotations, "categories": categories}


def is_complete(folder: Path, plan: str) -> bool:
    """Return whether a set is there and is what is planned."""
    try:
        return bool(json.loads((folder / "manifest.json").read_text())["plan"] == plan)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _digest(facts: object) -> str:
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _open_work(data: Path, name: str, plan: str) -> Path:
    """Return the hidden folder of an unfinished set, emptied if it was of another plan."""
    work = data / f".{name}"
    marker = work / "plan"
    if not marker.is_file() or marker.read_text() != plan:
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        write_text(marker, plan)
    return work


def _run_parts(
    work: Path,
    entries: Sequence[Any],
    job: Callable[[Sequence[Any], int, Path], tuple[Any, ...]],
    jobs: int,
    name: str,
) -> list[Record]:
    """Write the parts of a set that have no record yet, in several processes; return all records in order."""
    (work / "parts").mkdir(exist_ok=True)
    starts = range(0, len(entries), PART)
    records = [work / "parts" / f"{start:06d}.json" for start in starts]
    todo = [(s, r) for s, r in zip(starts, records, strict=True) if not r.exists()]
    with ProcessPoolExecutor(jobs, initializer=exit_with_parent) as pool:
        try:
            futures = [pool.submit(*job(entries[s : s + PART], s, r)) for s, r in todo]
            for done, future in enumerate(as_completed(futures), 1):
                future.result()
                show(f"{name}: part {done} of {len(todo)}")
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [json.loads(record.read_text()) for record in records]


def _finish(
    work: Path,
    folder: Path,
    plan: str,
    repository: Repository | Archive,
    records: Sequence[Record],
    facts: Record,
) -> None:
    """Write the manifest and show the set under its name."""
    dropped = Counter(f"{split}: {reason}" for split, reason in _dropped(records))
    facts = {"plan": plan, "commit": repository.commit, **facts, "dropped": dict(dropped)}
    write_text(work / "manifest.json", json.dumps(facts, indent=1) + "\n")
    shutil.rmtree(work / "parts", ignore_errors=True)
    (work / "plan").unlink()
    shutil.rmtree(folder, ignore_errors=True)
    work.rename(folder)
    show(f"{folder.name}: {facts.get('images', 'unpacked')}, dropped {dict(dropped) or 'none'}")


def _dropped(records: Sequence[Record]) -> Iterator[tuple[str, str]]:
    for record in records:
        yield from record["dropped"]
