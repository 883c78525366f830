"""Included weights through timm: tagged names, adaptation, preprocessing, refusals."""

from __future__ import annotations

import copy
import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from golden.collect import CAT
from PIL import Image
from support.recipes import detection_recipe, segmentation_recipe
from timm.data import create_transform, resolve_data_config
from timm.models import generate_default_cfgs
from torch.testing import assert_close

import pale
from pale.cli.main import main
from pale.errors import WeightsError
from pale.model.pale_transformer import VARIANTS
from pale.model.pretrained import default_tag, tagged_configs
from pale.predict.bundle import load
from pale.tasks.backbones import init_backbone, inner_model
from pale.weights import zoo
from pale.weights.read import load_weights
from pale.weights.write import save_weights

NAME, SCRATCH = "pale_nano.pets", "pale_nano.pets_scratch"
CONV = "stages.0.merge.conv.weight"
TAGGED = [entry for entry in zoo.list_entries() if entry.timm]


@pytest.fixture(scope="module")
def tensors() -> dict[str, torch.Tensor]:
    """Return the unpacked weights."""
    return load_weights(Path("classify_pets")).tensors


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use a copy of the zoo, which a test may change, as that of the package."""
    copied = Path(shutil.copytree(zoo.index.FOLDER, tmp_path / "zoo"))
    monkeypatch.setattr(zoo.index, "FOLDER", copied)
    return copied


@pytest.fixture(scope="module")
def model() -> pale.PaleTransformer:
    """Return the tagged model; a test may not change it."""
    return timm.create_model(NAME, pretrained=True).eval()


@pytest.fixture(scope="module")
def predictors(model: pale.PaleTransformer) -> list[pale.Predictor]:
    """Return the predictors of both names and of the model."""
    return [pale.Predictor(each, device="cpu") for each in ("classify_pets", NAME, model)]


def test_timm_lists_the_tagged_names_as_pretrained() -> None:
    expected = sorted(entry.timm_name for entry in TAGGED)
    assert NAME in expected
    assert timm.list_pretrained("pale*") == expected
    assert timm.list_models("pale*", pretrained=True) == expected
    assert timm.list_models("pale*") == sorted(VARIANTS)


def test_a_tagged_name_loads_offline_and_unpickles_nothing(
    tensors: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object, **others: object) -> None:
        raise AssertionError("connected or unpickled")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(torch, "load", refuse)
    model = timm.create_model(NAME, pretrained=True)
    assert model.num_classes == 37
    assert model.state_dict().keys() == tensors.keys()
    assert all(torch.equal(value, tensors[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("classes", [10, 0])
def test_another_number_of_classes_keeps_only_the_backbone(tensors: dict, classes: int) -> None:
    model = pale.create_model(NAME, pretrained=True, num_classes=classes).eval()
    found = model.state_dict()
    assert [n for n in tensors if n not in found or found[n].shape != tensors[n].shape] == [
        "head.fc.bias",
        "head.fc.weight",
    ]
    assert all(torch.equal(found[n], t) for n, t in tensors.items() if not n.startswith("head"))
    with torch.no_grad():
        assert model(torch.zeros(1, 3, 32, 48)).shape == (1, classes or 192)


def test_the_first_convolution_is_adapted_as_in_timm(tensors: dict) -> None:
    found = timm.create_model(NAME, pretrained=True, in_chans=1).state_dict()
    assert_close(found[CONV], tensors[CONV].sum(1, keepdim=True))
    assert all(torch.equal(found[n], t) for n, t in tensors.items() if n != CONV)


def test_features_only_gives_the_maps_of_the_classifier(model: pale.PaleTransformer) -> None:
    backbone = timm.create_model(NAME, pretrained=True, features_only=True).eval()
    x = torch.randn(1, 3, 64, 80)
    with torch.no_grad():
        maps = model.forward_intermediates(x, intermediates_only=True)
        for ours, theirs in zip(backbone(x), maps, strict=True):
            assert_close(ours, theirs)


@pytest.mark.parametrize("entry", TAGGED, ids=lambda entry: entry.timm_name)
def test_the_configuration_is_that_of_the_file(entry: zoo.ZooEntry) -> None:
    bundle = load(entry.name)
    with torch.device("meta"):
        cfg = timm.create_model(entry.timm_name).pretrained_cfg
    size = bundle.pipeline.size
    assert cfg["num_classes"] == len(bundle.classes) == entry.classes
    assert cfg["label_names"] == bundle.classes
    assert cfg["input_size"] == (3, size, size)
    assert cfg["pool_size"] == (-(-size // 32),) * 2
    assert cfg["crop_pct"] == bundle.pipeline.crop
    assert cfg["interpolation"] == bundle.pipeline.interpolation
    assert cfg["mean"] == pytest.approx(bundle.pipeline.mean)
    assert cfg["std"] == pytest.approx(bundle.pipeline.std)
    assert cfg["license"] == entry.license
    assert (cfg["architecture"], cfg["tag"]) == (entry.model, entry.timm["tag"])


@pytest.mark.parametrize("size", [None, (61, 143), (400, 170)], ids=["cat", "wide", "tall"])
def test_inference_as_in_timm_gives_the_answer_of_the_predictor(
    model: pale.PaleTransformer,
    predictors: list[pale.Predictor],
    size: tuple[int, int] | None,
    tmp_path: Path,
) -> None:
    image = Image.open(CAT).convert("RGB")
    image = image if size is None else image.resize((size[1], size[0]))
    image.save(tmp_path / "a.png")
    transform = create_transform(**resolve_data_config({}, model=model), is_training=False)
    with torch.no_grad():
        scores = model(transform(image)[None]).softmax(1)[0]
    best = scores.topk(5)
    names = [model.pretrained_cfg["label_names"][i] for i in best.indices]
    for predictor in predictors:
        found = predictor(tmp_path / "a.png")
        assert list(found.scores) == names
        assert list(found.scores.values()) == pytest.approx(best.values.tolist(), abs=1e-5)


def test_class_names_of_another_classifier_are_not_used(model: pale.PaleTransformer) -> None:
    changed = copy.deepcopy(model)
    changed.reset_classifier(5)
    assert load(model).classes == model.pretrained_cfg["label_names"]
    assert load(changed).classes == ()


def test_without_a_tag_a_model_has_1000_classes_and_random_weights(tensors: dict) -> None:
    model = timm.create_model("pale_nano")
    assert model.num_classes == 1000
    assert model.pretrained_cfg["tag"] == "untrained"
    assert model.pretrained_cfg["input_size"] == (3, 224, 224)
    assert "file" not in model.pretrained_cfg
    assert not torch.equal(model.state_dict()[CONV], tensors[CONV])


@pytest.fixture
def only_pets(folder: Path) -> Path:
    """Use a zoo without general-purpose weights."""
    zoo.write_index([e for e in zoo.list_entries(folder) if not e.timm.get("default")], folder)
    return folder


@pytest.mark.parametrize("name", ["pale_nano", "pale_nano.untrained"])
def test_the_error_without_weights_names_the_tagged_route(only_pets: Path, name: str) -> None:
    with pytest.raises(RuntimeError, match=r'No pretrained .*create_model\("pale_nano\.pets"'):
        timm.create_model(name, pretrained=True)


@pytest.mark.parametrize("plain", [False, True], ids=["object", "dict"])
def test_the_configuration_of_the_untagged_name_names_no_weights(
    only_pets: Path, plain: bool
) -> None:
    """timm's scripts resolve the configuration of a name and pass it on."""
    cfg = timm.get_pretrained_cfg("pale_nano")
    cfg = cfg.to_dict() if plain else cfg
    with pytest.raises(RuntimeError, match=r'create_model\("pale_nano\.pets"'):
        timm.create_model("pale_nano", pretrained=True, pretrained_cfg=cfg)


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        ("pale_nano", "general_nano"),
        ("pale_nano.general", "general_nano"),
        ("pale_nano.untrained", "general_nano"),
        ("pale_tiny", "general_tiny"),
    ],
)
def test_pretrained_alone_loads_the_general_weights(name: str, weights: str) -> None:
    expected = load_weights(Path(weights))
    model = timm.create_model(name, pretrained=True)
    assert all(torch.equal(model.state_dict()[k], t) for k, t in expected.tensors.items())
    assert list(model.pretrained_cfg["label_names"]) == expected.about["label_names"]
    assert model.pretrained_cfg["license"] == "cc-by-nc-4.0"
    assert {"goldfish", "bathroom"} <= set(model.pretrained_cfg["label_names"])


def test_the_error_of_a_model_without_tagged_weights_names_none() -> None:
    with pytest.raises(RuntimeError, match=r"No pretrained weights exist for pale_small") as caught:
        timm.create_model("pale_small", pretrained=True, device="meta")
    assert "pets" not in str(caught.value)
    assert 'create_model("local-dir:DIR"' in str(caught.value)


def test_a_changed_file_is_refused(model: pale.PaleTransformer, folder: Path) -> None:
    path = folder / "classify_pets.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(WeightsError, match=r"has sha256 .*, expected .*; install the package"):
        model.load_pretrained(str(path))
    (folder / "other.safetensors").write_bytes(content)
    with pytest.raises(WeightsError, match=r"other\.safetensors is not in index\.json"):
        model.load_pretrained(str(folder / "other.safetensors"))


def test_a_pickle_is_refused(model: pale.PaleTransformer, tensors: dict, tmp_path: Path) -> None:
    torch.save(tensors, tmp_path / "a.pth")
    with pytest.raises(WeightsError, match=r"must be a \.safetensors file"):
        model.load_pretrained(str(tmp_path / "a.pth"))


def test_another_architecture_is_refused_also_with_a_new_head() -> None:
    with pytest.raises(WeightsError, match=r"does not fit this model: missing .*ape\.map"):
        timm.create_model(NAME, pretrained=True, position="ape", num_classes=10)


def test_own_packed_files_load_in_the_same_way(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    own = pale.create_model("pale_nano", num_classes=7)
    save_weights(path, own.state_dict(), {}, packed=True)
    overlay = {"file": str(path), "custom_load": True, "num_classes": 7}
    model = timm.create_model("pale_nano", pretrained=True, pretrained_cfg_overlay=overlay)
    expected = load_weights(path).tensors
    assert all(torch.equal(model.state_dict()[name], t) for name, t in expected.items())


def test_a_saved_folder_of_the_tagged_model_loads_again(
    model: pale.PaleTransformer, tensors: dict, tmp_path: Path
) -> None:
    timm.models.save_for_hf(model, tmp_path, safe_serialization=True)
    assert str(zoo.index.FOLDER) not in (tmp_path / "config.json").read_text()
    again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True)
    assert all(torch.equal(again.state_dict()[name], t) for name, t in tensors.items())
    assert again.pretrained_cfg["license"] == "cc-by-nc-4.0"


@pytest.mark.parametrize("make", [segmentation_recipe, detection_recipe], ids=["upernet", "rcnn"])
def test_dense_models_start_from_both_names(tensors: dict, make: Callable[..., Any]) -> None:
    recipe = make(model__options={})
    model = recipe.model.network(3, 64)
    for name in (NAME, "classify_pets"):
        for parameter in model.parameters():
            parameter.data.zero_()
        init_backbone(model, recipe.started_from(Path(name)).model.init)
        found = inner_model(model).state_dict()
        stages = [name for name in tensors if name.startswith("stages")]
        assert [name for name in stages if not torch.equal(found[name], tensors[name])] == []


def test_the_name_is_accepted_by_the_commands(
    predictors: list[pale.Predictor], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["weights", "show", NAME]) == 0
    assert "# classify_pets" in capsys.readouterr().out
    assert main(["predict", str(CAT), "--weights", NAME, "--device", "cpu"]) == 0
    assert predictors[0](CAT).words() in capsys.readouterr().out


def test_an_invalid_index_does_not_prevent_importing_timm(folder: Path) -> None:
    (folder / "index.json").write_text("[]")
    with pytest.warns(UserWarning, match=r"no names for the included weights.*not a valid index"):
        assert tagged_configs({}, VARIANTS) == {}


def add_general(folder: Path) -> zoo.ZooEntry:
    """Add general-purpose weights of pale_nano to a folder: a file and an entry."""
    entry = zoo.get_entry("classify_pets", folder)
    shutil.copy(folder / entry.file, folder / "general.safetensors")
    shutil.copy(folder / entry.card, folder / "general.md")
    part = entry.timm | {"tag": "general", "default": True}
    made = replace(entry, name="general", file="general.safetensors", card="general.md", timm=part)
    kept = [each for each in zoo.list_entries(folder) if each.timm_name != "pale_nano.general"]
    zoo.write_index([*kept, made], folder)
    return made


def test_general_weights_become_the_default_of_pretrained_alone(folder: Path) -> None:
    add_general(folder)
    assert default_tag("pale_nano") == "general"
    base = {"num_classes": 1000, "input_size": (3, 224, 224)}
    configs = tagged_configs(base, VARIANTS)
    assert configs.keys() == {NAME, SCRATCH, "pale_nano.general", "pale_tiny.general"}
    chosen = generate_default_cfgs(configs | {"pale_nano.untrained*": base})["pale_nano"]
    assert chosen.tags[0] == "untrained"
    with pytest.raises(RuntimeError, match="No pretrained weights exist for pale_small"):
        default_tag("pale_small")


@pytest.mark.slow
def test_a_file_and_an_entry_are_all_that_general_weights_need(folder: Path) -> None:
    made = add_general(folder)
    code = f"""if True:
        from pathlib import Path
        from pale.weights import zoo
        zoo.index.FOLDER = Path({str(folder)!r})
        import timm
        names = ["pale_nano.general", {NAME!r}, {SCRATCH!r}, "pale_tiny.general"]
        assert timm.list_pretrained("pale*") == names
        assert timm.create_model("pale_nano").num_classes == 1000
        model = timm.create_model("pale_nano", pretrained=True)
        assert model.num_classes == {made.classes}
        assert model.pretrained_cfg["tag"] == "general"
        assert timm.create_model("pale_nano", pretrained=True, num_classes=5).num_classes == 5
        cfg = timm.get_pretrained_cfg("pale_nano").to_dict()  # as timm's scripts
        model = timm.create_model("pale_nano", pretrained=True, pretrained_cfg=cfg)
        assert model.pretrained_cfg["tag"] == "general"
    """
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_licence_is_stated_everywhere(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["weights"]) == 0
    listed = capsys.readouterr().out
    assert NAME in listed
    for entry in zoo.list_entries():
        assert entry.license in listed
        card = (zoo.index.FOLDER / entry.card).read_text()
        assert f"\nlicense: {entry.license}\n" in card
        assert "## Licence" in card
    assert main(["weights", "export", NAME, str(tmp_path / "out")]) == 0
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["pretrained_cfg"]["license"] == "cc-by-nc-4.0"
    assert load_weights(tmp_path / "out").about["license"] == "cc-by-nc-4.0"
    # Nothing is stated about weights whose header does not state it.
    plain = tmp_path / "a.safetensors"
    about = dict(load_weights(Path("classify_pets")).about)
    del about["license"]
    save_weights(plain, load_weights(Path("classify_pets")).tensors, about)
    assert main(["weights", "export", str(plain), str(tmp_path / "own")]) == 0
    assert "license" not in json.loads((tmp_path / "own/config.json").read_text())["pretrained_cfg"]
