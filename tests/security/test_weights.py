"""Untrusted weights and recipes: no network access, no other file read or written, and little memory used."""

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import torch
from PIL import Image
from support import hostile
from support.hostile_sizes import CASES, open_file
from support.weights import RECIPES, TASKS, pixels

from pale.cli.main import main
from pale.predict import bundle as loading


@pytest.fixture
def server():
    """Start a server that must not be contacted; yield its address and the requested paths."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_error(404)

        def log_message(self, *_):
            pass

    listening = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=listening.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{listening.server_port}", asked
    listening.shutdown()
    thread.join()
    listening.server_close()


@pytest.fixture
def place(tmp_path):
    """Create an image, a class folder, and files that must not be read."""
    (tmp_path / "in" / "train" / "a").mkdir(parents=True)
    for path in (tmp_path / "x.png", tmp_path / "in" / "train" / "a" / "x.png"):
        Image.fromarray(pixels()).save(path)
    (tmp_path / "secret.txt").write_text("a\nb\n")
    torch.save({"w": torch.zeros(1)}, tmp_path / "secret.pth")
    (tmp_path / "config.json").write_text('{"architecture": "resnet10t"}')
    return tmp_path


OPTIONS = {
    "url": lambda url, place: {"pretrained": True, "pretrained_cfg": {"url": f"{url}/x.pth"}},
    "file": lambda url, place: {
        "pretrained": True,
        "pretrained_cfg": {"file": str(place / "secret.pth")},
    },
    "hub": lambda url, place: {"pretrained": True, "pretrained_cfg": {"hf_hub_id": "evil/x"}},
    "overlay": lambda url, place: {
        "pretrained": True,
        "pretrained_cfg_overlay": {"url": f"{url}/x.pth", "hf_hub_id": None},
    },
    "checkpoint": lambda url, place: {"checkpoint_path": str(place / "secret.pth")},
    "cache": lambda url, place: {
        "pretrained": True,
        "pretrained_cfg": {"url": f"{url}/x.pth"},
        "cache_dir": str(place / "cache"),
    },
}


def model_names(place):
    return ["hf-hub:evil/x", "hf_hub:evil/x", f"local-dir:{place}", "HF-HUB:evil/x"]


def require_harmless(deeds, place, outputs=()):
    """Check that nothing used the network, read the named files or wrote outside the outputs."""
    assert deeds.network == []
    named = [p for p in deeds.read if p.startswith(str(place))]
    assert [p for p in named if "secret" in p or p.endswith("config.json")] == []
    written = [p for p in deeds.written if p != "/dev/null" and "__pycache__" not in p]
    assert [p for p in written if not p.startswith(tuple(map(str, outputs)))] == []
    assert not (place / "cache").exists()


@pytest.mark.parametrize("model", ["pale_nano", "resnet10t"])
@pytest.mark.parametrize("attack", OPTIONS)
@pytest.mark.parametrize("task", TASKS)
def test_model_options_in_a_header_reach_neither_network_nor_disk(
    server, place, task, attack, model
):
    url, asked = server
    values = hostile.recipe(
        task, model__name=model, model__options=OPTIONS[attack](url, place), model__drop_path=0
    )
    path = hostile.write(place / "a.safetensors", values)
    with hostile.recorded() as deeds, pytest.raises(ValueError, match=r"model\.options"):
        loading.load(path)
    require_harmless(deeds, place)
    assert asked == []


@pytest.mark.parametrize("task", TASKS)
def test_model_names_in_a_header_reach_neither_network_nor_disk(place, task):
    for name in model_names(place):
        values = hostile.recipe(task, model__name=name, model__drop_path=0, model__options={})
        path = hostile.write(place / "a.safetensors", values)
        with hostile.recorded() as deeds, pytest.raises(ValueError, match=r"model\.name must be"):
            loading.load(path)
        require_harmless(deeds, place)


def commands(place, path):
    """Return the commands that read weights; of these only `eval` reads the data of their recipe."""
    image, out = str(place / "x.png"), place / "out"
    return {
        "predict": ["predict", "--weights", str(path), image, "-o", str(out)],
        "export": ["export", str(path), "-o", str(out / "m.onnx")],
        "features": ["features", str(path), str(place / "in" / "train"), "-o", str(out / "f.st")],
        "view": ["view", "attention", image, "--weights", str(path), "-o", str(out / "v.png")],
        "eval": ["eval", str(path), "--device", "cpu"],
        "serve": ["serve", "--weights", str(path), "--device", "cpu", "--port", "0"],
        "init": [
            *["train", "quickstart", "--init", str(path), "--steps", "1"],
            *["--device", "cpu", "--output", str(out / "run")],
        ],
        "pack": ["weights", "pack", str(path), "-o", str(out / "small.safetensors")],
        "weights": ["weights", "export", str(path), str(out / "folder")],
        "token-labels": [
            *["token-labels", "make", "--data.root", str(place / "in"), "--model", str(path)],
            *["--output", str(out / "store")],
        ],
    }


# Packing builds no model, exporting weights only a classifier; other classes than the data's, and weights of another
# task, are refused before the model.
ANOTHER_REASON = {("weights", "segmentation"), ("weights", "detection"), ("eval", "segmentation")}
ANOTHER_REASON |= {("eval", "detection"), *(("init", task) for task in TASKS)}


@pytest.mark.parametrize(
    "command",
    [
        *("predict", "export", "features", "view", "eval", "serve", "init", "pack"),
        *("weights", "token-labels"),
    ],
)
@pytest.mark.parametrize("task", TASKS)
def test_no_command_follows_model_options_in_a_header(server, place, capsys, task, command):
    url, asked = server
    values = hostile.recipe(
        task, model__name="resnet10t", model__options=OPTIONS["cache"](url, place),
        model__drop_path=0,
    )  # fmt: skip
    path = hostile.write(place / "a.safetensors", values)
    with hostile.recorded() as deeds:
        code = main(commands(place, path)[command])
    err = capsys.readouterr().err
    if command != "pack" and (command, task) not in ANOTHER_REASON:
        assert code == 1
        assert "model.options must be" in err or "need weights of a classifier" in err
    assert "Traceback" not in err
    require_harmless(deeds, place, [place / "out"])
    assert asked == []


DATA = {
    "segmentation": {"data__kind": "folder", "data__classes": "secret.txt"},
    "detection": {
        "data__kind": "coco",
        "data__annotations": "secret.txt",
        "data__images": "",
        "data__hold_out": 0.5,
    },
    "classification": {"data__kind": "list", "data__train": "secret.txt"},
}


@pytest.mark.parametrize("task", TASKS)
def test_data_and_weights_that_a_header_names_are_not_read(place, task):
    changes = DATA[task] | {"data__root": str(place), "model__weights": str(place / "secret.pth")}
    model = RECIPES[task]().model.build(2, 32)
    values = hostile.recipe(task, **changes)
    path = hostile.write(place / "a.safetensors", values, tensors=model.state_dict())
    with hostile.recorded() as deeds:
        loaded = loading.load(path)
    assert loaded.classes == ("a", "b")
    require_harmless(deeds, place)


@pytest.mark.parametrize("name", CASES)
def test_sizes_out_of_bounds_are_rejected(tmp_path, name):
    assert open_file(CASES[name](tmp_path)).startswith("refused: ")


@pytest.mark.slow
def test_hostile_files_take_little_memory_and_time(project, tmp_path):
    """Each takes at most 64 MiB more than valid weights and 10 s of CPU time; formerly 4 GB or minutes."""
    script = project / "tests" / "support" / "hostile_sizes.py"
    done = subprocess.run(
        [sys.executable, script, tmp_path],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row[0] for row in rows] == list(CASES)
    for name, result, seconds, mebibytes in rows:
        assert result.startswith("refused: "), name
        assert seconds < 10, name
        assert mebibytes < 64, name
