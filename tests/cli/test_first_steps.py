"""What a new user meets first: help, the list of recipes, hints of errors, and files made on the way."""

import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from support.recipes import CLASSIFICATION

import pale
from pale.cli.main import main
from pale.data.checks.images import check_images
from pale.data.reading import display_name
from pale.data.sources.items import local_items
from pale.recipes import FIRST, RECIPES, get
from pale.tasks.backbones import init_backbone
from pale.tasks.segmentation.draw import add_legend
from pale.tools.features import Features, extract, load_backbone
from pale.weights.read import load_weights
from pale.weights.write import save_weights


def test_the_command_alone_prints_the_help(capsys):
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert "pale COMMAND --help describes one command." in out
    assert re.search("pale train finetune --data.root photos +train on your own images", out)


def test_recipes_lists_what_a_new_user_needs_and_all_on_request(capsys):
    assert set(FIRST) < set(RECIPES)
    assert main(["recipes"]) == 0
    short = capsys.readouterr().out
    assert "finetune" in short
    assert "ablations." not in short
    assert "pale recipes --all" in short
    assert main(["recipes", "--all"]) == 0
    assert "ablations.position_ape" in capsys.readouterr().out


def test_pretrained_weights_are_refused_with_the_ways_to_get_some():
    with pytest.raises(RuntimeError, match=r"pale weights.*local-dir:DIR.*pale train finetune"):
        pale.create_model("pale_small", pretrained=True)


def test_init_names_the_model_of_weights_that_do_not_fit(tmp_path):
    model = get("quickstart.segmentation").override({"model.name": "pale_tiny"}).model.build(3, 64)
    with pytest.raises(
        ValueError, match=r"it holds weights of pale_nano: set --model\.name pale_nano"
    ):
        init_backbone(model, Path("classify_pets"))


def write_classes(root):
    rng = np.random.default_rng(0)
    for number, name in enumerate(("red", "green")):
        (root / name).mkdir(parents=True)
        for i in range(6):
            pixels = rng.integers(0, 60, (36, 36, 3), dtype=np.uint8)
            pixels[..., number] += 150
            Image.fromarray(pixels).save(root / name / f"{i}.png")
    return root


def test_a_probe_is_written_as_a_model_that_predict_takes(capsys, tmp_path):
    root = write_classes(tmp_path / "photos")
    recipe = get("quickstart").override({**CLASSIFICATION, "data.size": 32})
    weights = tmp_path / "backbone.safetensors"
    torch.manual_seed(0)
    model = recipe.model.build(8, 32)
    about = {"recipe": recipe.plain(), "classes": [str(i) for i in range(8)]}
    save_weights(weights, model.state_dict(), about)
    features = tmp_path / "features.safetensors"
    assert main(["features", str(weights), str(root), "-o", str(features)]) == 0
    out = tmp_path / "probe.safetensors"
    words = ["probe", str(features), str(features), "-o", str(out)]
    assert main(words) == 1
    assert "must be given together" in capsys.readouterr().err
    assert main([*words, "--weights", str(weights)]) == 0
    assert f"{out} written" in capsys.readouterr().out
    assert load_weights(out).about["classes"] == ["green", "red"]
    predictor = pale.Predictor(out, device="cpu")
    for name in ("red", "green"):
        assert predictor(root / name / "0.png").words().startswith(name)
    # The classifier takes features as they are, not standardised ones.
    probed, pipeline = load_backbone(out)
    again = extract(probed, pale.data.sources.images.read_folder(root), 32, pipeline.crop)
    assert torch.allclose(again.vectors, Features.load(features).vectors, atol=1e-5)


def test_data_check_counts_classes_of_plain_folders(capsys, tmp_path):
    root = write_classes(tmp_path / "photos")
    for path in sorted((root / "red").iterdir())[3:]:
        path.unlink()
    found = check_images(root, workers=1)
    assert found.counts == {".": {"green": 6, "red": 3}}
    assert [p.items for p in found.problems if p.kind == "fewer than 5 images"] == [
        ["red: 3 images"]
    ]
    assert main(["data", "check", str(root), "--workers", "1"]) == 0
    out = capsys.readouterr().out
    assert "green" in out
    assert "\n9 images in 2 classes" in out


def test_photos_in_unsupported_formats_are_listed_by_check_and_predict(capsys, tmp_path):
    root = write_classes(tmp_path / "photos")
    (root / "red" / "phone.HEIC").write_bytes(b"x")
    Image.new("RGB", (36, 36)).save(root / "red" / "web.avif")
    (root / "red" / "notes.txt").write_text("x")
    (root / "red" / "._phone.jpg").write_text("x")  # macOS writes such files
    found = {p.kind: p for p in check_images(root, workers=1).problems}
    assert found["format not supported"].items == ["red/phone.HEIC", "red/web.avif"]
    assert found["format not supported"].serious
    assert "--data.unreadable skip" in found["format not supported"].advice
    assert found["not an image by its name"].items == ["red/notes.txt"]
    words = ["predict", str(root), "--weights", "classify_pets", "--device", "cpu"]
    out = tmp_path / "out"
    assert main([*words, "-o", str(out)]) == 1
    printed = capsys.readouterr().err
    for name in ("phone.HEIC", "web.avif"):
        assert f"{name}: cannot be read as an image (unknown format; supported are JPEG" in printed
    assert "12 of 14 images" in printed.replace("\n", " ")
    assert "notes" not in printed
    assert "._phone" not in printed
    names = [display_name(item.name) for item in local_items([root])]
    assert {"photos/red/phone.HEIC", "photos/red/web.avif"} <= {
        f"photos/{n.rpartition('photos/')[2]}" for n in names
    }


def test_a_legend_names_the_colours_and_keeps_the_size():
    image = Image.new("RGB", (320, 240), "black")
    drawn = add_legend(image.copy(), {"cat": (255, 0, 0), "dog": (0, 0, 255)})
    assert drawn.size == image.size
    pixels = set(map(tuple, np.asarray(drawn).reshape(-1, 3).tolist()))
    assert {(255, 0, 0), (0, 0, 255)} <= pixels
    small = Image.new("RGB", (16, 16), "black")
    assert not np.asarray(add_legend(small, {"a very long name": (255, 0, 0)})).any()


def test_export_prints_its_phases_unless_quiet(capsys, monkeypatch):
    def export(*args, say, **options):
        for phase in ("tracing", "checking"):
            say(phase)
        return SimpleNamespace(plain=dict)

    monkeypatch.setattr("pale.exporting.export", export)
    monkeypatch.setattr("pale.exporting.tables.describe_exported", lambda done: [])
    words = ["export", "pale_nano", "-o", "a.pt2"]
    assert main(words) == 0
    assert capsys.readouterr().err.splitlines() == ["loading", "tracing", "checking"]
    for option in ("--quiet", "--json"):
        assert main([*words, option]) == 0
        assert capsys.readouterr().err == ""
