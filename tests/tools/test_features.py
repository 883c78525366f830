import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import save_file
from support.processes import full_disk

import pale
from pale.cli.main import main
from pale.data.sources.images import read_folder
from pale.data.transforms.images import eval_transform, normalise
from pale.recipes import get
from pale.tools.features import Features, extract, fit, probe
from pale.weights.write import save_weights


def blobs(n: int, seed: int, classes: int = 3, width: int = 8) -> Features:
    """Return overlapping clouds of points, one per class."""
    rng = np.random.default_rng(seed)
    centres = np.random.default_rng(0).normal(0, 2, (classes, width))
    labels = rng.integers(0, classes, n)
    vectors = centres[labels] + rng.normal(0, 1, (n, width))
    names = [str(i) for i in range(n)]
    return Features(torch.tensor(vectors).float(), torch.tensor(labels), names, ["a", "b", "c"])


def test_the_fit_is_the_minimum_of_the_penalised_loss():
    data = blobs(200, 1)
    layer = fit(data.vectors, data.labels, 3, strength=0.01)
    loss = F.cross_entropy(layer(data.vectors), data.labels) + 0.005 * layer.weight.square().sum()
    for gradient in torch.autograd.grad(loss, layer.parameters()):
        assert gradient.abs().max() < 1e-4


def test_a_probe_scores_what_it_has_not_seen():
    found = probe(blobs(300, 1), blobs(300, 2))
    assert found.val > 85
    noise = blobs(300, 1)
    mixed = Features(noise.vectors, noise.labels[torch.randperm(300)], noise.names, noise.classes)
    assert probe(mixed, blobs(300, 2)).val < 60


def test_sets_of_other_classes_are_refused():
    other = blobs(10, 1)
    renamed = Features(other.vectors, other.labels, other.names, ["x", "y", "z"])
    with pytest.raises(ValueError, match="need the same classes"):
        probe(other, renamed)


@pytest.fixture
def tree(tmp_path):
    for label in ("cat", "dog"):
        (tmp_path / "tree" / label).mkdir(parents=True)
        for i in range(5):
            pixels = np.random.default_rng(i).integers(0, 256, (40, 50, 3), np.uint8)
            pixels[..., 0] //= 8 if label == "cat" else 1
            Image.fromarray(pixels).save(tmp_path / "tree" / label / f"{i}.png")
    return tmp_path / "tree"


def test_features_are_the_pooled_maps_whatever_the_batch(tree):
    model = pale.create_model("pale_nano", num_classes=2).eval()
    source = read_folder(tree)
    found = extract(model, source, 32, 1.0, batch=3)
    images = torch.stack([eval_transform(32, 1.0)(source.image(i)) for i in range(10)])
    with torch.no_grad():
        expected = model.norm(model.stages(normalise(images))).mean((2, 3))
    assert torch.allclose(found.vectors, expected, atol=1e-4)
    assert not found.vectors.requires_grad
    assert found.labels.tolist() == [0] * 5 + [1] * 5
    assert found.names[7].endswith("dog/2.png")


def test_from_weights_to_a_score_on_the_command_line(tree, tmp_path, capsys):
    weights = tmp_path / "weights.safetensors"
    recipe = get("quickstart").override({"data.size": 32})
    model = pale.create_model("pale_nano", num_classes=3)
    save_weights(
        weights, model.state_dict(), {"recipe": recipe.plain(), "classes": ["x", "y", "z"]}
    )
    out = tmp_path / "new" / "a.safetensors"
    assert main(["features", str(weights), str(tree), "-o", str(out)]) == 0
    assert "10 images, 192 features each" in capsys.readouterr().out
    assert Features.load(out).classes == ["cat", "dog"]
    assert main(["probe", str(out), str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["val"] == 100


def test_a_full_disk_is_reported_and_keeps_the_old_file(tmp_path):
    path = tmp_path / "a.safetensors"
    blobs(20, 1).save(path)
    with full_disk(10_000), pytest.raises(OSError, match=r"a\.safetensors could not be written"):
        blobs(2000, 1).save(path)
    assert len(Features.load(path).labels) == 20
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_wrong_files_are_named(tmp_path, tree, capsys):
    path = tmp_path / "a.safetensors"
    save_weights(path, pale.create_model("pale_nano").state_dict(), {})
    for words, message in (
        (["probe", path, path], "holds no features"),
        (["probe", tmp_path / "no", path], "there is no file"),
        (["features", path, tree, "-o", tmp_path / "b"], "has no recipe in its header"),
    ):
        assert main([str(word) for word in words]) == 1
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "change",
    [
        {"names": "[" * 100_000},
        {"names": '["a"]'},
        {"classes": "{}"},
        {"classes": "[]"},
        {"vectors": torch.zeros(2)},
        {"labels": torch.zeros(2)},
        {"labels": torch.tensor([0, -1])},
    ],
    ids=["nested", "few names", "no list", "no classes", "no vectors", "no labels", "negative"],
)
def test_features_that_do_not_fit_together_are_refused(tmp_path, change):
    tensors = {"vectors": torch.zeros(2, 3), "labels": torch.zeros(2, dtype=torch.int64)}
    about = {"names": '["a", "b"]', "classes": '["x"]'}
    path = tmp_path / "f.safetensors"
    save_file(
        {n: change.get(n, t) for n, t in tensors.items()},
        path,
        metadata={n: change.get(n, t) for n, t in about.items()},
    )
    with pytest.raises(ValueError, match=r"f\.safetensors holds no features"):
        Features.load(path)
