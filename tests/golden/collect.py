"""Compute today's state of everything that the golden files hold, under the old names (renames.py)."""

import argparse
import contextlib
import dataclasses
import hashlib
import inspect
import json
import platform
import signal
import subprocess
import sys
import tarfile
import tempfile
import types
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path, PurePath
from typing import Any

import timm
import torch
from golden import cases, renames, surface
from torch import Tensor, nn

HERE = Path(__file__).parent
FILES = HERE / "files"
CAT = FILES / "cat.jpg"  # the example photo


def plain(value: Any) -> Any:
    """Return a default as JSON holds it."""
    if isinstance(value, PurePath):
        return value.as_posix()
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(each) for each in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return f"<{type(value).__name__}>"


# Public names.


def signature(function: Any) -> list[str]:
    """Return parameters as "name", "name=default", "*" before those that are named; without types."""
    found = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name == "self":
            continue
        mark = {"VAR_POSITIONAL": "*", "VAR_KEYWORD": "**", "KEYWORD_ONLY": "* "}
        text = mark.get(parameter.kind.name, "") + renames.old(parameter.name, renames.PUBLIC)
        if parameter.default is not inspect.Parameter.empty:
            text += f"={json.dumps(plain(parameter.default))}"
        found.append(text)
    return found


def compatible(now: list[str], then: list[str]) -> list[str]:
    """Return today's parameters without what breaks no call: new optional ones, and defaults that are new.

    Of parameters that are given by name alone the order does not matter.
    """
    before = {text.partition("=")[0]: text for text in then}
    places = [name for name in before if not name.startswith("*")]
    found: list[str] = []
    for text in now:
        name, default, _ = text.partition("=")
        if name in before:
            found.append(text if "=" in before[name] else before[name])
        elif not default or (places and not name.startswith("*")):
            found.append(text)  # required, or in front of an old one
        places = [place for place in places if place != name]
    order = [before[name] for name in before if name.startswith("*")]
    named = [text for text in found if text.startswith("*")]
    named.sort(key=lambda text: order.index(text) if text in order else len(order))
    return [text for text in found if not text.startswith("*")] + named


def made_compatible(now: Any, then: Any) -> Any:
    """Return today's public names with each list of parameters made `compatible`."""
    if isinstance(now, dict) and isinstance(then, dict):
        lists = ("parameters", "methods", "functions")
        return {
            key: _compatible_each(value, then[key])
            if key in lists and key in then
            else made_compatible(value, then.get(key))
            for key, value in now.items()
        }
    return now


def _compatible_each(now: Any, then: Any) -> Any:
    if isinstance(now, list):
        return compatible(now, then)
    # A method that is new breaks no call.
    return {key: compatible(now[key], then[key]) for key in now if key in then}


def public_names() -> dict[str, Any]:
    """Return what `import pale` promises: names, what each is, and how it is called."""
    package, found = surface.PACKAGE, {}
    for name in sorted(package.__all__):
        value = getattr(package, name)
        entry: dict[str, Any] = {"kind": type(value).__name__}
        if inspect.isclass(value):
            entry = {"kind": "class", "parameters": signature(value)}
            if dataclasses.is_dataclass(value):
                entry["fields"] = [f.name for f in dataclasses.fields(value)]
            if not issubclass(value, nn.Module):
                entry["methods"] = {
                    renames.old(key, renames.PUBLIC): signature(each)
                    for key, each in sorted(vars(value).items())
                    if inspect.isfunction(each) and not key.startswith("_")
                }
        elif isinstance(value, types.ModuleType):
            entry["names"] = sorted(value.__all__)
            entry["functions"] = {
                key: signature(getattr(value, key))
                for key in sorted(value.__all__)
                if inspect.isfunction(getattr(value, key))
            }
        else:
            entry["parameters"] = signature(value)
        found[renames.old(name, renames.PUBLIC)] = entry
    return {
        "names": found,
        "has a version": isinstance(package.__version__, str),
        "models": sorted(timm.list_models("pale_*")),
    }


# The command line.


def options() -> dict[str, Any]:
    """Return every command's arguments, without their help."""
    found = {}
    for name, parser in surface.walk(surface.parser()):
        command = renames.old_words(name, renames.COMMANDS)
        arguments = [
            _argument(action, command)
            for action in parser._actions
            if not isinstance(action, argparse._HelpAction)
        ]
        found[command] = {"/".join(a.get("strings", ())) or a["dest"]: a for a in arguments}
    return found


def _argument(action: argparse.Action, command: str) -> dict[str, Any]:
    facts = {
        "strings": [renames.old(s, renames.OPTIONS, command) for s in action.option_strings],
        "dest": renames.old(action.dest, renames.OPTIONS, command),
        "default": plain(action.default),
        "choices": None if action.choices is None else sorted(map(str, action.choices)),
        "nargs": action.nargs,
        "required": action.required,
    }
    # What is usual is left out. A default of 0 or False is not, nor is nargs of 0, which a flag has.
    usual = {"strings": [], "default": None, "choices": None, "nargs": None, "required": False}
    return {
        key: value
        for key, value in facts.items()
        if key not in usual or repr(value) != repr(usual[key])
    }


def key_paths(value: Any, path: str = "") -> set[str]:
    """Return the keys of a JSON value, "classes[].score"; entries of lists are taken together."""
    if isinstance(value, list):
        return {key for each in value for key in key_paths(each, f"{path}[]")}
    if not isinstance(value, dict):
        return {path} if path.endswith("]") else set()
    found = set()
    for name, inner in value.items():
        key = f"{path}.{renames.old(name, renames.JSON_KEYS)}".removeprefix(".")
        found |= {key} | key_paths(inner, key)
    return found


def printed_json(text: str) -> Any:
    """Return what a command printed: one JSON value, or a list of one for each line."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return [json.loads(line) for line in text.splitlines()]


# Recipes.


def flat(values: Any, path: str = "") -> dict[str, Any]:
    """Return the leaves of nested settings by dotted name; an empty part is a leaf."""
    if not isinstance(values, dict) or not values:
        return {path: values}
    found: dict[str, Any] = {}
    for name, inner in values.items():
        found |= flat(inner, f"{path}.{name}".removeprefix("."))
    return found


def settings() -> dict[str, dict[str, Any]]:
    """Return every recipe's settings by dotted name, without its description."""
    found = {}
    for name in surface.RECIPES:
        code, out, _ = surface.run("recipes", "show", name, "--json")
        assert code == 0
        values = flat(json.loads(out))
        del values["about"]
        found[renames.old(name, renames.RECIPES)] = {
            renames.old_dotted(key, renames.SETTINGS): value for key, value in values.items()
        }
        assert found[renames.old(name, renames.RECIPES)]["name"] == name
    return found


def differences(recipes: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the first recipe of each task whole, the others as what is different and absent from it."""
    bases: dict[str, str] = {}
    found: dict[str, Any] = {}
    for name, values in recipes.items():
        base = bases.setdefault(values["kind"], name)
        if base == name:
            found[name] = {"settings": dict(sorted(values.items()))}
            continue
        whole = recipes[base]
        entry = {
            "base": base,
            "settings": {
                k: v for k, v in sorted(values.items()) if k not in whole or whole[k] != v
            },
            "without": sorted(whole.keys() - values.keys()),
        }
        found[name] = {key: value for key, value in entry.items() if value}
    return found


def whole(stored: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return every recipe's settings from `differences`."""
    found: dict[str, dict[str, Any]] = {}
    for name, entry in stored.items():
        base = dict(found[entry["base"]]) if "base" in entry else {}
        for key in entry.get("without", ()):
            del base[key]
        found[name] = base | entry["settings"]
    return found


# State dicts.

VARIANTS = {
    "default": {},
    "position=ape": {"position": "ape"},
    "position=none": {"position": "none"},
    "attention=sequential": {"attention": "sequential"},
    "attention=vanilla": {"attention": "vanilla"},
    "attention=axial": {"attention": "axial"},
    "attention=cross": {"attention": "cross"},
    "stem_stride=1": {"stem_stride": 1},
    "num_classes=0": {"num_classes": 0},
}
# Listed in full, so that a difference can be read; of the others a digest is kept.
LISTED = ("pale_nano", "quickstart.segmentation", "quickstart.detection")


def keys(model: nn.Module) -> list[str]:
    """Return "key shape dtype" of a model's state dict, in its order."""
    return [
        f"{renames.old_dotted(name, renames.STATE_DICT)} "
        f"{'x'.join(map(str, tensor.shape)) or 'scalar'} {str(tensor.dtype).removeprefix('torch.')}"
        for name, tensor in model.state_dict().items()
    ]


def digest(lines: list[str]) -> str:
    """Return a short digest of sorted lines."""
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()[:16]


def summary(lines: list[str]) -> str:
    """Return the number of tensors and their digest."""
    return f"{len(lines)} {digest(lines)}"


def registered_keys(name: str) -> dict[str, str]:
    """Return the digests of one `pale_*` model in each variant."""
    found = {}
    for variant, options_ in VARIANTS.items():
        with torch.device("meta"):
            found[variant] = summary(keys(surface.model(name, **options_)))
    return found


def recipe_keys(name: str) -> list[str]:
    """Return the state-dict keys of the model that a recipe trains."""
    with torch.device("meta"):
        return keys(surface.model_of(name))


# Calls of the command line.


def unpack(task: str, root: Path) -> Path:
    """Unpack the kept files of a task into a folder of its name; return that folder."""
    with tarfile.open(FILES / f"{task}.tar.xz") as archive:
        archive.extractall(root / task, filter="data")
    return root / task


def call(case: cases.Case, root: Path) -> dict[str, Any]:
    """Run a case in an empty folder; return its exit code, JSON keys, and the files it wrote with their keys.

    `traceback` is there where standard error shows one, which a user's mistake must never cause.
    """
    cases.write_data(root, CAT)
    for task in cases.TASKS:
        if any(
            str(word).startswith(f"{task}/")
            for words in (case.words, *case.before)
            for word in words
        ):
            unpack(task, root)
    with contextlib.chdir(root):
        for words in case.before:
            assert surface.run(*words)[0] == 0
        there = set(root.rglob("*"))
        code, out, err = surface.run(*case.words)
        files = sorted(path for path in root.rglob("*") if path.is_file() and path not in there)
        found: dict[str, Any] = {"exit": code}
        if "Traceback" in err:
            found["traceback"] = True
        if case.json:
            found["keys"] = _kept(key_paths(printed_json(out)), case.ignored)
        else:
            found["prints"] = bool(out)
        for path in files:
            content = cases.formats(path)
            keys_ = None if content is None else _kept(key_paths(content), case.ignored)
            found.setdefault("files", {})[path.relative_to(root).as_posix()] = keys_
    return found


def _kept(paths: set[str], ignored: tuple[str, ...]) -> list[str]:
    paths = {renames.old_path(path, renames.JSON_KEYS) for path in paths}
    below = tuple(f"{path}." for path in ignored)
    return sorted(path for path in paths if path not in ignored and not path.startswith(below))


def served() -> dict[str, Any]:
    """Return the JSON keys that `pale serve` prints and answers with, and its exit code after SIGTERM."""
    words = [sys.executable, "-m", "pale", "serve", "--port", "0", "--device", "cpu", "--json"]
    with subprocess.Popen(
        words, env=surface.environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdout is not None
        try:
            about = json.loads(process.stdout.readline())
            found = {"printed": _kept(key_paths(about), ())}
            for path in ("/health", "/openapi.json"):
                with urllib.request.urlopen(about["url"].rstrip("/") + path) as answer:
                    content = json.load(answer)
                found[path] = (
                    sorted(content["paths"])
                    if path == "/openapi.json"
                    else _kept(key_paths(content), ())
                )
            for task in cases.TASKS:
                url = f"{about['url'].rstrip('/')}/predict/{task}"
                kind = {"Content-Type": "image/jpeg"}
                request = urllib.request.Request(url, CAT.read_bytes(), kind)
                with urllib.request.urlopen(request) as answer:
                    found[f"/predict/{task}"] = _kept(key_paths(json.load(answer)), ())
        finally:
            process.send_signal(signal.SIGTERM)
            found["exit"] = process.wait()
    return found


# Numbers.

DIGITS = 9


def values(tensor: Tensor, most: int = 12) -> list[float]:
    """Return mean, standard deviation and some entries of a tensor."""
    flat_ = tensor.detach().double().flatten()
    places = torch.linspace(0, len(flat_) - 1, min(most, len(flat_))).long()
    picked = [flat_.mean(), flat_.std(correction=0), *flat_[places]]
    return [float(f"{float(value):.{DIGITS}g}") for value in picked]


def bits(*tensors: Tensor) -> str:
    """Return a digest of tensors, bit by bit."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def image(h: int, w: int, b: int = 1) -> Tensor:
    """Return images without a random generator: waves of several lengths, about -1.5 to 1.5."""
    rows, columns = torch.arange(h)[:, None] / 7, torch.arange(w)[None] / 11
    waves = [
        torch.sin(rows * (c + 1) + i) + torch.cos(columns * (c + 2) - i) / 2
        for i in range(b)
        for c in range(3)
    ]
    return torch.stack(waves).view(b, 3, h, w)


def _logits(name: str, size: tuple[int, int], **options_: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    model = surface.model(name, **options_)
    out = model.eval()(image(*size, b=2))
    model.train()
    (model(image(*size, b=2)).square().mean()).backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = torch.stack([g.double().norm() for g in gradients]).norm()
    return {
        "values": values(out) + values(norm[None], 1)[:1],
        "bits": bits(out, *gradients),
    }


SMALL = {
    "depths": (1, 2, 1, 1),
    "channels": (8, 16, 16, 32),
    "heads": (2, 2, 2, 4),
    "num_classes": 7,
    "img_size": (50, 70),
}


def _segmenter() -> dict[str, Any]:
    torch.manual_seed(0)
    model = surface.model_of("quickstart.segmentation", 9)
    with torch.no_grad():
        out = model.eval()(image(50, 70))
        both = model.train()(image(64, 48, b=2))
    return {
        "values": values(out) + values(both[0]) + values(both[1]),
        "bits": bits(out, *both),
    }


def _detector() -> dict[str, Any]:
    torch.manual_seed(0)
    model = surface.model_of("quickstart.detection", 3)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(3)  # or all scores would be equal
    pixels = (image(64, 80)[0] * 60 + 128).clamp(0, 255).to(torch.uint8)
    with torch.no_grad():
        (found,) = model.eval()([pixels])
    parts = [found[key] for key in sorted(found) if isinstance(found[key], Tensor)]
    numbers = [number for part in parts for number in values(part)]
    return {"keys": sorted(found), "values": numbers, "bits": bits(*parts)}


STEPS: dict[str, cases.Words] = {
    "quickstart": ("--data.samples", 64, "--data.val_samples", 4, "--batch", 16),
    "quickstart.segmentation": ("--data.samples", 32, "--data.val_samples", 4, "--batch", 8),
    "quickstart.detection": ("--data.samples", 32, "--data.val_samples", 4, "--batch", 8),
}


def _steps(recipe: str) -> dict[str, Any]:
    """Return loss and gradient norm of the first three steps of a recipe, as its log holds them."""
    with tempfile.TemporaryDirectory() as folder:
        words = (*STEPS[recipe], "--steps", 3, "--warmup_steps", 1, "--log_every", 1)
        run = Path(folder) / "run"
        where = ("--device", "cpu", "--output", run, "--json")
        code, _, err = surface.run("train", recipe, *words, *where)
        assert code == 0, err
        events = cases.formats(run / "log.jsonl")
    steps = [e for e in events if e["event"] == "step"]
    (last,) = [e for e in events if e["event"] == "eval"]
    figures = [v for k, v in sorted(last.items()) if isinstance(v, float)]
    exact = [number for e in steps for number in (e["loss"], e["grad_norm"], e["lr"])] + figures
    rounded = [float(f"{number:.{DIGITS}g}") for number in exact]
    return {"values": rounded, "bits": bits(torch.tensor(exact, dtype=torch.float64))}


def numbers_in(value: Any) -> list[float]:
    """Return all numbers of a JSON value, in order."""
    if isinstance(value, dict):
        return [n for inner in value.values() for n in numbers_in(inner)]
    if isinstance(value, list):
        return [n for inner in value for n in numbers_in(inner)]
    plain_number = isinstance(value, int | float) and not isinstance(value, bool)
    return [float(f"{value:.{DIGITS}g}")] if plain_number else []


def predicted(source: Any, task: Any = None, **options_: Any) -> dict[str, Any]:
    """Return what a predictor gives for the example photo: the numbers, and a digest of everything."""
    said = surface.predict(CAT, source, task, **options_)
    exact = json.dumps({k: v for k, v in said.items() if isinstance(v, list)}, sort_keys=True)
    names = [each["class"] for v in said.values() if isinstance(v, list) for each in v]
    return {
        "classes": names,
        "values": numbers_in(said),
        "bits": hashlib.sha256(exact.encode()).hexdigest()[:16],
    }


NUMBERS: dict[str, Any] = {
    "pale_nano": partial(_logits, "pale_nano", (64, 80)),
    "pale_tiny": partial(_logits, "pale_tiny", (96, 64)),
    **{
        f"{attention}, {position}": partial(
            _logits, "pale_nano", (50, 70), attention=attention, position=position, **SMALL
        )
        for attention in ("parallel", "sequential", "vanilla", "axial", "cross")
        for position in ("cpe", "ape", "none")
    },
    **{
        f"backend {backend}": partial(_logits, "pale_nano", (50, 70), backend=backend, **SMALL)
        for backend in ("reference", "sdpa")
    },
    "stem stride 2, pale sizes": partial(
        _logits, "pale_nano", (50, 70), stem_stride=2, pale_size=(3, 5, 7, 2), **SMALL
    ),
    "UperNet": _segmenter,
    "Mask R-CNN": _detector,
    **{f"steps of {recipe}": partial(_steps, recipe) for recipe in STEPS},
    # The weights that had this name then.
    "predict classify_pets": partial(predicted, "pets_scratch", None),
    "predict segment_pets": partial(predicted, None, "segmentation"),
    "predict segment_pets, multi": partial(predicted, None, "segmentation", multi=True),
    "predict detect_pets": partial(predicted, None, "detection", score=0.1),
}


def machine() -> str:
    """Return what bit-equality depends on beside the code: processor and version of PyTorch."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor = next(line.split(":", 1)[1].strip() for line in lines if "model name" in line)
    except (OSError, StopIteration):
        processor = platform.processor()
    words = f"{processor} {torch.backends.cpu.get_cpu_capability()} {torch.__version__}"
    return hashlib.sha256(words.encode()).hexdigest()[:16]


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one thread: sums are then made in one order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def recipe_summaries(task: str) -> dict[str, str]:
    """Return the digest of the model of every recipe of a task; equal models are built once."""
    built: dict[str, str] = {}
    found = {}
    for name in surface.recipes_of(task):
        architecture = surface.architecture(name)
        if architecture not in built:
            built[architecture] = summary(recipe_keys(name))
        found[renames.old(name, renames.RECIPES)] = built[architecture]
    return found


def listed_keys(name: str) -> list[str]:
    """Return the state-dict keys of a model by its timm name, or of a recipe."""
    if name in surface.RECIPES:
        return recipe_keys(name)
    with torch.device("meta"):
        return keys(surface.model(name))


# Files of an earlier version.


def kept_predictions(task: str) -> dict[str, Any]:
    """Return what the kept run, weights and packed weights of a task predict."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        root = unpack(task, Path(folder))
        for name in ("run", "final.safetensors", "packed.safetensors"):
            one = predicted(root / name, task, **({"score": 0.05} if task == "detection" else {}))
            found[name] = one
    return found
