"""Public image sets for pre-training and for transfer: repositories, commits, classes and splits.

A repository is a git directory without a work tree. Nothing is checked out: names come from `git ls-tree`, files from
`git cat-file`. Every name and every byte of it is hostile until checked; links and submodules are ignored.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import tarfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from pale.data.reading import SUFFIXES, open_regular
from pale.errors import DataError

MAX_FILE_BYTES = 2**25  # of an image
MAX_LIST_BYTES = 2**26  # of a list of labels
HELD_OUT = 20  # one of so many images is for validation where a set has no official split
# The repository itself must not name other places to read objects from.
ENVIRONMENT = {"GIT_NO_LAZY_FETCH": "1", "GIT_TERMINAL_PROMPT": "0", "GIT_CONFIG_NOSYSTEM": "1"}
HASHNET = ("thuml/HashNet", "85387b814fcf95daff887bd325cbaa0e8def7323")
COCO_BOXES = (
    "dyuan459/Efficient-Robust-Object-Detection-1",
    "b09aa3115fd5051364abe6ef3c7df87ece642933",
)
# Alphabetical, the order of the tags of HashNet.
# fmt: off
COCO_CLASSES = [
    "airplane", "apple", "backpack", "banana", "baseball bat", "baseball glove", "bear", "bed",
    "bench", "bicycle", "bird", "boat", "book", "bottle", "bowl", "broccoli", "bus", "cake", "car",
    "carrot", "cat", "cell phone", "chair", "clock", "couch", "cow", "cup", "dining table", "dog",
    "donut", "elephant", "fire hydrant", "fork", "frisbee", "giraffe", "hair drier", "handbag",
    "horse", "hot dog", "keyboard", "kite", "knife", "laptop", "microwave", "motorcycle", "mouse",
    "orange", "oven", "parking meter", "person", "pizza", "potted plant", "refrigerator", "remote",
    "sandwich", "scissors", "sheep", "sink", "skateboard", "skis", "snowboard", "spoon",
    "sports ball", "stop sign", "suitcase", "surfboard", "teddy bear", "tennis racket", "tie",
    "toaster", "toilet", "toothbrush", "traffic light", "train", "truck", "tv", "umbrella", "vase",
    "wine glass", "zebra",
]
# fmt: on


class Entry(NamedTuple):
    """A regular file of a commit; size is -1 if its content is not in the repository."""

    path: str
    oid: str
    size: int


class Sample(NamedTuple):
    """An image of a set: its file, its split ("train" or "val"), its class names, and why it is left out, if it is."""

    entry: Entry
    split: str
    labels: tuple[str, ...]
    drop: str = ""


class Repository:
    """A commit of a git directory without a work tree."""

    def __init__(self, folder: Path, commit: str) -> None:
        self.folder = folder
        try:
            self.commit = (
                self._run("rev-parse", "--verify", f"{commit}^{{commit}}").decode().strip()
            )
        except subprocess.CalledProcessError:
            raise DataError(
                f"{folder} has no commit {commit}; fetch the repository again"
            ) from None

    def _command(self, *words: str) -> list[str]:
        return ["git", f"--git-dir={self.folder}", *words]

    def _run(self, *words: str, content: bytes = b"") -> bytes:
        return subprocess.run(
            self._command(*words),
            input=content,
            env=os.environ | ENVIRONMENT,
            capture_output=True,
            check=True,
        ).stdout

    def entries(self) -> list[Entry]:
        """Return the regular files of the commit, sorted by path."""
        found = []
        for line in self._run("ls-tree", "-r", "-l", "-z", "--full-tree", self.commit).split(b"\0"):
            about, _, path = line.partition(b"\t")
            if about.startswith(b"100"):  # not a link (120000) or a submodule (160000)
                _, kind, oid, size = about.decode().split()
                if kind == "blob":
                    name = path.decode("utf-8", "surrogateescape")
                    found.append(Entry(name, oid, int(size) if size.isdecimal() else -1))
        return sorted(found)

    def past_entries(self, pattern: str) -> list[Entry]:
        """Return the files of the commit and all before it whose path fits; of several versions the newest."""
        newest: dict[str, str] = {}
        words = ("rev-list", "--objects", "--missing=allow-any", self.commit)
        for line in self._run(*words).splitlines():
            oid, _, path = line.decode("utf-8", "surrogateescape").partition(" ")
            if re.fullmatch(pattern, path):
                newest.setdefault(path, oid)
        given = "".join(f"{oid}\n" for oid in newest.values()).encode()
        answers = self._run("cat-file", "--batch-check", content=given).splitlines()
        found = []
        for (path, oid), answer in zip(newest.items(), answers, strict=True):
            kind, _, size = answer.decode().partition(" ")[2].partition(" ")
            if kind != "tree":
                found.append(Entry(path, oid, int(size) if kind == "blob" else -1))
        return sorted(found)

    def contents(
        self, entries: Sequence[Entry], limit: int = MAX_FILE_BYTES
    ) -> Iterator[bytes | str]:
        """Yield the content of each file, or the reason why there is none, from one git process."""
        process = subprocess.Popen(
            self._command("cat-file", "--batch"),
            env=os.environ | ENVIRONMENT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        with process:
            for entry in entries:
                if not 0 <= entry.size <= limit:
                    yield "missing" if entry.size < 0 else "too many bytes"
                    continue
                process.stdin.write(f"{entry.oid}\n".encode())
                process.stdin.flush()
                answer = process.stdout.readline().split()
                if len(answer) != 3 or answer[1] != b"blob" or int(answer[2]) != entry.size:
                    if not answer:
                        raise DataError(f"git stopped reading {self.folder}; check the repository")
                    yield "missing"
                    continue
                content = process.stdout.read(entry.size)
                process.stdout.read(1)
                yield content
            process.stdin.close()

    def lines(self, path: str) -> list[str]:
        """Return the lines of a text file of the commit."""
        return read_file(self, path).decode("utf-8", "surrogateescape").splitlines()


class Archive:
    """The regular files of an uncompressed tar, read in the same way as those of a repository."""

    def __init__(self, path: Path) -> None:
        self.folder = path
        with open_regular(path) as file:
            self.commit = hashlib.file_digest(file, "sha256").hexdigest()

    def entries(self) -> list[Entry]:
        """Return the regular files, sorted by path; "oid" is the offset of the content."""
        with open_regular(self.folder) as file, tarfile.open(fileobj=file, mode="r:") as tar:
            return sorted(Entry(m.name, str(m.offset_data), m.size) for m in tar if m.isreg())

    def contents(
        self, entries: Sequence[Entry], limit: int = MAX_FILE_BYTES
    ) -> Iterator[bytes | str]:
        """Yield the content of each file, or the reason why there is none."""
        with open_regular(self.folder) as file:
            for entry in entries:
                file.seek(int(entry.oid))
                yield "too many bytes" if entry.size > limit else file.read(entry.size)


def read_file(repository: Repository | Archive, path: str) -> bytes:
    """Return the content of a file, such as a list of labels."""
    entry = next((entry for entry in repository.entries() if entry.path == path), None)
    content: bytes | str = "missing"
    if entry is not None:
        content = next(iter(repository.contents([entry], MAX_LIST_BYTES)))
    if isinstance(content, str):
        raise DataError(f"{path} of {repository.folder}: {content}; fetch the repository again")
    return content


@dataclass(frozen=True)
class Mirrors:
    """Folders of repositories.

    Attributes:
        folder: holds the repositories as OWNER+NAME/repo or OWNER/NAME, bare or with a work tree.
        shared: holds oxford-pets-160.tar and coco-mini.tar.
    """

    folder: Path
    shared: Path

    def open(self, repository: str, commit: str) -> Repository | None:
        """Return a commit of a repository; None if there is no such repository."""
        for name in (f"{repository.replace('/', '+')}/repo", repository):
            for folder in (self.folder / name, self.folder / name / ".git"):
                if (folder / "HEAD").is_file() and (folder / "objects").is_dir():
                    return Repository(folder, commit)
        return None


Samples = Callable[["Source", Mirrors, Repository | Archive], Iterator[Sample]]


@dataclass(frozen=True)
class Source:
    """A set of images in a repository.

    Attributes:
        name: of the set.
        repository: "OWNER/NAME" on GitHub, or the name of a shared tar.
        commit: of the images; none for a tar.
        pattern: of the paths of images; the groups "label" and "split" are parts of the path.
        splits: split of each value of the group "split"; without the group, images are held out by the hash of their
            name.
        samples: yields the samples, by default by the pattern alone.
        published: folder of a second output with all files as published, duplicates included.
        transfer: for transfer only: no image of it may be in the data for pre-training.
        terms: under which the images may be used.
    """

    name: str
    repository: str
    commit: str
    pattern: str = r".*"
    splits: Mapping[str, str] = field(default_factory=dict)
    samples: Samples | None = None
    published: str = ""
    transfer: bool = False
    terms: str = "non-commercial research, no redistribution"

    @property
    def is_multi(self) -> bool:
        """Return whether an image has any number of labels."""
        return self.samples is coco_tags

    def find(self, mirrors: Mirrors) -> tuple[Repository | Archive, list[Sample]] | None:
        """Return the repository and the samples in the order of their paths; None if it is not there."""
        repository: Repository | Archive | None
        if self.repository.endswith(".tar"):
            tar = mirrors.shared / self.repository
            repository = Archive(tar) if tar.is_file() else None
        else:
            repository = mirrors.open(self.repository, self.commit)
        if repository is None:
            return None
        found = list((self.samples or by_path)(self, mirrors, repository))
        if not found:
            raise DataError(f"{self.name}: no image of {repository.folder} fits {self.pattern!r}")
        return repository, hold_out(found)


def by_path(source: Source, mirrors: Mirrors, repository: Repository | Archive) -> Iterator[Sample]:
    """Yield samples with the labels and splits that the paths state."""
    pattern = re.compile(source.pattern)
    for entry in repository.entries():
        match = pattern.fullmatch(entry.path)
        if match is None or PurePosixPath(entry.path).suffix.lower() not in SUFFIXES:
            continue
        parts = match.groupdict()
        label = parts.get("label")
        split = source.splits[parts["split"]] if "split" in parts else ""
        yield Sample(entry, split, (label,) if label else ())


def hold_out(samples: Sequence[Sample]) -> list[Sample]:
    """Hold out one image in `HELD_OUT` by the hash of its name, and at least one per class, where there is no split."""

    def digest(sample: Sample) -> int:
        name = PurePosixPath(sample.entry.path).stem.encode("utf-8", "surrogateescape")
        return int.from_bytes(hashlib.sha256(name).digest()[:8], "big")

    open_samples = [sample for sample in samples if not sample.split]
    lowest: dict[str, int] = {}
    for sample in open_samples:
        if not sample.drop:
            for label in sample.labels:
                lowest[label] = min(digest(sample), lowest.get(label, 2**64))
    first = set(lowest.values())

    def chosen(sample: Sample) -> str:
        number = digest(sample)
        return "val" if number % HELD_OUT == 0 or number in first else "train"

    return [s if s.split else s._replace(split=chosen(s)) for s in samples]


def tiny_imagenet(source: Source, mirrors: Mirrors, repository: Repository) -> Iterator[Sample]:
    """Yield samples of Tiny-ImageNet-200; a list has the classes of the validation images."""
    rows = repository.lines("tiny-imagenet-200/val/val_annotations.txt")
    labels = dict(line.split("\t")[:2] for line in rows)
    for sample in by_path(source, mirrors, repository):
        if sample.split == "val":
            sample = sample._replace(labels=(labels[PurePosixPath(sample.entry.path).name],))
        yield sample


def mini_places(source: Source, mirrors: Mirrors, repository: Repository) -> Iterator[Sample]:
    """Yield samples of MiniPlaces by its lists; the paths of the training images have the names of the classes."""
    labels: dict[str, str] = {}
    names: dict[str, str] = {}
    for line in repository.lines("data/train.txt") + repository.lines("data/val.txt"):
        path, number = line.rsplit(" ", 1)
        if path.startswith("train/"):
            names.setdefault(number, "/".join(path.split("/")[2:-1]))
        labels[f"data/images/{path}"] = names[number]
    for sample in by_path(source, mirrors, repository):
        if sample.entry.path in labels:
            yield sample._replace(labels=(labels[sample.entry.path],))


def coco_tags(source: Source, mirrors: Mirrors, repository: Repository) -> Iterator[Sample]:
    """Yield images of COCO with all their tags, without those that detection is evaluated on."""
    tags: dict[str, tuple[str, ...]] = {}
    hashnet = mirrors.open(*HASHNET)
    if hashnet is None:
        raise DataError("the tags of COCO are in thuml/HashNet; fetch it beside the images")
    lists = [f"test/{kind}{i}" for kind in ("database", "test") for i in range(8)] + ["train"]
    for name in lists:
        for line in hashnet.lines(f"caffe/data/coco/{name}.txt"):
            path, *flags = line.split()
            if len(flags) != len(COCO_CLASSES) or not set(flags) <= {"0", "1"}:
                raise DataError(f"{name}.txt of thuml/HashNet has a line without 80 flags: {path}")
            labels = tuple(c for c, flag in zip(COCO_CLASSES, flags, strict=True) if flag == "1")
            tags[path[-16:-4]] = labels
    drops = defaultdict(str)
    boxes = mirrors.open(*COCO_BOXES)
    if boxes is not None:
        for entry in boxes.entries():
            if match := re.fullmatch(r".*/(\d{12})\.(?:txt|jpg)", entry.path):
                drops[match[1]] = "in COCO boxes 10k"
    with suppress(FileNotFoundError), tarfile.open(mirrors.shared / "coco-mini.tar") as tar:
        for member in tar:
            if match := re.fullmatch(r".*/(\d{12})\.jpg", member.name):
                drops[match[1]] = "in coco-mini"
    for sample in by_path(source, mirrors, repository):
        number = PurePosixPath(sample.entry.path).stem
        labels = tags.get(number, ())
        yield sample._replace(labels=labels, drop=drops[number] or ("" if labels else "no tags"))


def left_out_data(source: Source, mirrors: Mirrors) -> dict[str, bool]:
    """Return which data that COCO must not share an image with is present."""
    if not source.is_multi:
        return {}
    return {
        "coco-mini.tar": (mirrors.shared / "coco-mini.tar").is_file(),
        COCO_BOXES[0]: mirrors.open(*COCO_BOXES) is not None,
    }


TRAIN_VAL = {"train": "train", "val": "val"}
TRAIN_TEST = {"train": "train", "test": "val"}
WNID = r"(?P<label>n\d{8})"
# In the order of preparation, which is also the order in which one of two equal images is preferred.
SOURCES = (
    Source(
        "tiny-imagenet-200",
        "Sachitbansal/DLA",
        "44579204a3d8506f5aa76fb6695aa3b81eefe66a",
        rf"tiny-imagenet-200/(?P<split>train|val)/(?:{WNID}/)?images/[^/]+\.JPEG",
        TRAIN_VAL,
        tiny_imagenet,
        published="evidence/tiny-imagenet-200",
    ),
    Source(
        "coco",
        "hai4h/cnn-edge-detection",
        "a2978a7048f2cde061a0d0d66ce2dcc576647857",
        r"train2017/\d{12}\.jpg",
        samples=coco_tags,
        terms="tags CC BY 4.0; images: a Flickr licence each",
    ),
    Source(
        "miniplaces",
        "rathull/CTFs",
        "f35c219885f163ca00a045236dd44be489598837",
        r"data/images/(?P<split>train|val)/.+\.jpg",
        TRAIN_VAL,
        mini_places,
    ),
    Source(
        "mini-imagenet",
        "Deo0330/split_minidataset",
        "557ebcae0db23651f9370f54a5f31b1f0fd4064d",
        rf"(?P<split>train|val)/{WNID}/[^/]+\.jpg",
        TRAIN_VAL,
    ),
    Source(
        "stanford-dogs",
        "ksara28/dog-breed-classification",
        "ce81acc11b2c81fcec84d9de8c767211a72380c3",
        rf"(?:images/Images|removed_images)/{WNID}-[^/]+/[^/]+\.jpg",
    ),
    Source(
        "imagenette",
        "thunderInfy/imagenette",
        "b850f030ff0701c36a4adc8b928ea9483a46915b",
        rf"(?P<split>train|val)/{WNID}/[^/]+\.JPEG",
        TRAIN_VAL,
    ),
    Source(
        "imagewoof",
        "q878787/imagewoof2-320",
        "874e58f0c1acebb0d90e40f48460d65322f09f85",
        rf"(?P<split>train|val)/{WNID}/[^/]+\.JPEG",
        TRAIN_VAL,
    ),
    Source(
        "cars",
        "cyizhuo/Stanford-Cars-dataset",
        "60e19d3521b11128c6f840c3055de436ce09c038",
        r"(?P<split>train|test)/(?P<label>[^/]+)/[^/]+\.jpg",
        TRAIN_TEST,
    ),
    Source(
        "cats-and-dogs",
        "laxmimerit/dog-cat-full-dataset",
        "b2d738611a3daada177ea755c11b4be14726d38c",
        r"data/(?P<split>train|test)/(?P<label>cats|dogs)/[^/]+\.jpg",
        TRAIN_TEST,
    ),
    Source(
        "intel-scenes",
        "keshav1245/Image-Classification-using-AlexNet-CNN-Model",
        "f1387f35b305effe6cafb90d37f2741a7f356dd1",
        r"seg_(?P<split>train|test)/seg_(?:train|test)/(?P<label>[^/]+)/[^/]+\.jpg",
        TRAIN_TEST,
    ),
    Source(
        "grocery",
        "marcusklasson/GroceryStoreDataset",
        "fc80ba90f803d79d0383df52c5a4ac5de99ff6fc",
        r"dataset/(?P<split>train|val|test)/(?:[^/]+/)+(?P<label>[^/]+)/[^/]+\.jpg",
        TRAIN_VAL | TRAIN_TEST,
        terms="MIT",
    ),
    Source("oxford-pets", "oxford-pets-160.tar", "", r"[^/]+/images/[^/]+\.jpg", transfer=True),
    Source(
        "flowers-102",
        "3ba2ii/Flower-Classifier",
        "e0447ae3a8e54baaa61061833afa4679e8a7f786",
        r"flowers/.+\.jpg",
        transfer=True,
    ),
    Source(
        "cub-200",
        "cyizhuo/CUB-200-2011-dataset",
        "fa5c1b77aebf834bb8de46a3015f8215cc25ed29",
        r"(?:train|test)/.+\.jpg",
        transfer=True,
    ),
    Source(
        "caltech-101",
        "alfinnurhalim/VGG19-TF",
        "230b1e06180eb6a2827ac0c0b35abd93a1e5b62f",
        r"101_ObjectCategories/.+\.jpg",
        transfer=True,
    ),
)
