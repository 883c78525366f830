"""Token labels of a teacher, written by the command."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file

from pale.cli.main import main
from pale.data.sources.images import read_folder
from pale.data.sources.token_labels import TokenLabelStore, read_manifest
from pale.model.pale_transformer import create_model
from pale.tools import teacher


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Write 14 images of noise in three classes, and the weights of a resnet18."""
    root = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    for name in ("a", "b", "c"):
        (root / "train" / name).mkdir(parents=True)
        for i in range(4 if name != "c" else 6):
            pixels = rng.integers(0, 256, (40 + i, 60, 3), np.uint8)
            Image.fromarray(pixels).save(root / "train" / name / f"{i}.png")
    torch.manual_seed(0)
    save_file(timm.create_model("resnet18", num_classes=3).state_dict(), root / "r.safetensors")
    return root


def words(root, output, *more):
    return [
        *("token-labels", "make", "--model", "resnet18", "--weights", str(root / "r.safetensors")),
        *("--data.root", str(root), "--data.workers", "0", "--output", str(output)),
        *("--size", "64", "--k", "2", "--shard", "3", "--batch-size", "2", *more),
    ]


@pytest.mark.parametrize(
    ("name", "grid"),
    [("resnet18", 2), ("swin_s3_tiny_224", 7), ("pale_nano", 2), ("vit_tiny_patch16_224", 14)],
    ids=["NCHW", "NHWC", "ours", "NLC"],
)
def test_dense_logits_are_the_classifier_at_each_position(name, grid):
    size = 64 if grid == 2 else 224
    pooled = {"global_pool": "avg", "fc_norm": False} if name.startswith("vit") else {}
    model = timm.create_model(name, num_classes=4, **pooled).eval()
    images = torch.rand(1, 3, size, size)
    with torch.no_grad():
        dense = teacher.dense_logits(model, images)
        logits = model(images)
    assert dense.shape == (1, 4, grid, grid)
    assert dense.std((2, 3)).min() > 0
    # An average and a linear layer: their order does not matter.
    assert torch.allclose(dense.mean((2, 3)), logits, atol=1e-5)


def test_a_class_token_is_skipped_and_positions_keep_their_order():
    model = timm.create_model("vit_tiny_patch16_224", num_classes=4, img_size=64, depth=1).eval()
    images = torch.rand(1, 3, 64, 64)
    with torch.no_grad():
        dense = teacher.dense_logits(model, images)
        tokens = model.head(model.forward_features(images)[:, 1:])
    assert torch.allclose(dense.flatten(2).transpose(1, 2), tokens, atol=1e-5)


class Bare(torch.nn.Module):
    pass


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: timm.create_model("pit_ti_224"), "PoolingVisionTransformer .* a single position"),
        (lambda: timm.create_model("crossvit_tiny_240"), "CrossVit .* features are not a map"),
        (
            Bare,
            "Bare cannot be a teacher of token labels: it has no forward_features and forward_head",
        ),
    ],
    ids=["pit", "crossvit", "bare"],
)
def test_models_without_a_map_are_refused(model, message):
    model = model().eval()
    size = getattr(model, "pretrained_cfg", {}).get("input_size", (3, 8, 8))[-1]
    with pytest.raises(ValueError, match=message), torch.no_grad():
        teacher.dense_logits(model, torch.zeros(1, 3, size, size))


def test_a_store_holds_the_labels_of_the_whole_image(root, tmp_path, capsys):
    assert main(words(root, tmp_path / "store")) == 0
    output = capsys.readouterr().out
    assert "shard 5 of 5 written, 0 to go" in output
    assert "14 images, 2x2 positions, 2 classes each" in output
    source = read_folder(root / "train")
    store = TokenLabelStore(tmp_path / "store", source)
    found = teacher.load_teacher("resnet18", source.classes, root / "r.safetensors", 64)
    assert store.manifest.weights == found.digest
    whole = teacher.SquareResize(64, found.interpolation)
    for index in (0, 5, 13):
        image = found.normalise(whole(source.image(index))[None])
        with torch.no_grad():
            top = teacher.dense_logits(found.model, image).softmax(1).topk(2, dim=1)
        scores, classes = store.labels(index)
        assert torch.allclose(scores.float(), top.values[0], atol=2e-3)
        assert torch.equal(classes.long(), top.indices[0])


def test_a_set_of_few_classes_keeps_all_of_them(root, tmp_path, capsys):
    given = words(root, tmp_path / "store")
    del given[(at := given.index("--k")) : at + 2]
    assert main(given) == 0
    output = capsys.readouterr().out
    assert "3 classes each" in output
    assert f"pale train RECIPE --token_labels.store {tmp_path / 'store'}" in output


@pytest.mark.slow
def test_killed_at_any_time_it_resumes_to_the_same_bytes(root, tmp_path, capsys):
    assert main(words(root, tmp_path / "whole")) == 0
    # Slow enough to be hit between shards and inside one.
    script = (
        "import sys, time, os\n"
        "from pale.cli.main import main\n"
        "fsync = os.fsync\n"
        "os.fsync = lambda fd: (time.sleep(0.3), fsync(fd))\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    output = tmp_path / "killed"
    child = subprocess.Popen(
        [sys.executable, "-c", script, *words(root, output)], stdout=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 60
    while not (output / "labels-000001.npy").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.15)
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    assert read_manifest(output).agreement is None
    written = len(list(output.glob("labels-*.npy")))
    assert 2 <= written < 5
    capsys.readouterr()
    assert main(words(root, output)) == 0
    assert capsys.readouterr().out.count("written") == 5 - written
    assert not list(output.glob(".*.part"))
    for path in (tmp_path / "whole").iterdir():
        assert (output / path.name).read_bytes() == path.read_bytes()


def test_parts_in_parallel_write_the_same_store(root, tmp_path, capsys):
    main(words(root, tmp_path / "whole"))
    assert main(words(root, tmp_path / "parts", "--part", "1/2")) == 0
    assert "other parts are not written yet" in capsys.readouterr().out
    assert main(words(root, tmp_path / "parts", "--part", "0/2", "--json")) == 0
    assert json.loads(capsys.readouterr().out)["agreement"] is not None
    for path in (tmp_path / "whole").iterdir():
        assert (tmp_path / "parts" / path.name).read_bytes() == path.read_bytes()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--k", "9"], "k must be from 1 to the 3 classes, got 9"),
        (["--part", "3"], "--part must be I/N"),
        (["--part", "2/2"], "part must be I/N with I from 0 to N - 1"),
        (["--shard", "0"], "--shard must be at least 1"),
        (["--model", "resnet1"], "--model must be a run or a timm model, got 'resnet1'"),
        (["--epochs", "3"], "--epochs is not an option of this command"),
        (["--data.train", "test"], "there is no folder"),
        (["--model", "resnet34"], "does not fit this model"),
    ],
    ids=["k", "part", "range", "shard", "model", "setting", "data", "weights"],
)
def test_mistakes_are_one_clear_line(root, tmp_path, capsys, more, message):
    assert main(words(root, tmp_path / "store", *more)) == 1
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
    assert not (tmp_path / "store").exists()


def test_a_run_with_other_classes_cannot_be_a_teacher(root, tmp_path):
    from pale.recipes import get
    from pale.weights.write import save_weights

    model = create_model("pale_nano", num_classes=3)
    recipe = get("quickstart").plain()
    for classes, name in ((["a", "b", "c"], "good"), (["a", "c", "b"], "bad")):
        path = tmp_path / f"{name}.safetensors"
        save_weights(path, model.state_dict(), {"recipe": recipe, "classes": classes})
    found = teacher.load_teacher(str(tmp_path / "good.safetensors"), ["a", "b", "c"])
    assert found.size == 40
    with pytest.raises(ValueError, match="has other classes"):
        teacher.load_teacher(str(tmp_path / "bad.safetensors"), ["a", "b", "c"])


@pytest.mark.parametrize("name", ["resnet18.nothing", "pale_small"])
def test_a_teacher_without_weights_is_an_error(name):
    with pytest.raises(ValueError, match=rf"timm cannot load {name} here .*--weights FILE"):
        teacher.load_teacher(name, [str(i) for i in range(1000)])
