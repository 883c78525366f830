"""Training on several datasets: loss and metric against plain PyTorch, and whole runs."""

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file
from support.mixtures import COLOURS, mixture_recipe, write_mixture
from support.processes import torchrun

from pale.cli.main import main
from pale.data.transforms.images import normalise
from pale.errors import WeightsError
from pale.predict.predictor import Predictor
from pale.recipes.files import recipe_to_yaml
from pale.tasks.classification.inference import ClassificationPipeline
from pale.tasks.classification.loss import SourceClasses, mixture_loss, smooth_targets
from pale.tasks.classification.metric import average_precision, mean_average_precision
from pale.tools.publish import without_paths
from pale.train.distributed import World
from pale.train.log import read
from pale.train.loop import build_trainer, train
from pale.train.step import TrainStep

CPU = torch.device("cpu")
ALONE = World(CPU)
# Of seven classes: four of one source, three of another that overlap, three tags.
KNOWN = SourceClasses(
    torch.tensor([[1, 1, 1, 1, 0, 0, 0], [0, 0, 1, 1, 1, 0, 0], [0, 0, 0, 0, 1, 1, 1]]).bool(),
    torch.tensor([False, False, True]),
    torch.tensor([1.0, 1.0, 0.4]),
)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write_mixture(tmp_path_factory.mktemp("mixture"))


def one_by_one(logits, labels, sources, smoothing):
    """Return the loss of each image with PyTorch's losses, on the classes of its source alone."""
    found = []
    for row, own, source in zip(logits, labels, sources.tolist(), strict=True):
        classes = KNOWN.masks[source].nonzero()[:, 0]
        part, truth = row[classes], own[classes]
        if KNOWN.multi[source]:
            loss = F.binary_cross_entropy_with_logits(part, truth, reduction="sum")
            found.append(loss * KNOWN.scale[source])
        else:
            found.append(
                F.cross_entropy(part[None], truth.argmax()[None], label_smoothing=smoothing)
            )
    return torch.stack(found)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_loss_and_gradient_are_those_of_each_source_alone(smoothing):
    torch.manual_seed(0)
    sources = torch.tensor([0, 1, 2, 2, 0, 1])
    labels = torch.zeros(6, 7)
    for i, c in enumerate((3, 4, None, None, 0, 2)):
        if c is not None:
            labels[i, c] = 1
    labels[2, [4, 6]] = 1
    logits = (3 * torch.randn(6, 7)).requires_grad_()
    targets = smooth_targets(labels, sources, KNOWN, smoothing)
    ours = mixture_loss(logits, targets, sources, KNOWN)
    theirs = one_by_one(logits, labels, sources, smoothing)
    torch.testing.assert_close(ours, theirs)
    gradients = [torch.autograd.grad(x.sum(), logits, retain_graph=True)[0] for x in (ours, theirs)]
    torch.testing.assert_close(*gradients)
    assert (gradients[0][~KNOWN.masks[sources]] == 0).all()


def test_a_mixed_image_has_the_losses_of_both_images_in_proportion(root):
    task = mixture_recipe(root, mix={"mixup": 1.0, "cutmix": 0.0, "smoothing": 0.1}).task()
    tables = task.train_tables
    rows = torch.tensor([0, 13, 25, 3, 18, 30])  # two of each source
    images = torch.randint(0, 256, (6, 3, 32, 32), dtype=torch.uint8)
    plain = normalise(images)
    batch = task.prepare({"images": images, "labels": rows}, 7)
    share = float(batch["share"])
    assert 0 < share < 1
    torch.testing.assert_close(batch["images"], share * plain + (1 - share) * plain.flip(0))
    logits = torch.randn(6, len(task.classes))
    each = []
    for part in (rows, rows.flip(0)):
        labels, sources = tables.targets(part)
        targets = smooth_targets(labels, sources, tables.known, 0.1)
        each.append(mixture_loss(logits, targets, sources, tables.known).mean())
    expected = share * each[0] + (1 - share) * each[1]
    torch.testing.assert_close(task.loss(lambda _: logits, batch), expected)


def test_average_precision_is_that_of_torchmetrics():
    classification = pytest.importorskip("torchmetrics.classification")
    rng = np.random.default_rng(3)
    scores = torch.from_numpy(rng.integers(0, 12, (60, 5)).astype(np.float32) / 12)  # with ties
    truth = torch.from_numpy(rng.random((60, 5)) < 0.3)
    theirs = classification.MultilabelAveragePrecision(5, average="none")(scores, truth.long())
    ours = [average_precision(scores[:, c].numpy(), truth[:, c].numpy()) for c in range(5)]
    assert ours == pytest.approx(theirs.tolist())
    halves = [(scores[:20], truth[:20]), (scores[20:], truth[20:])]
    assert mean_average_precision(halves) == pytest.approx(100 * float(theirs.mean()))


def curve(run):
    return [(e["step"], e["loss"]) for e in read(run / "log.jsonl") if e["event"] == "step"]


def test_a_mixture_learns_and_is_evaluated_by_source(root, tmp_path, capsys):
    plain = {"mix": {"mixup": 0, "cutmix": 0}, "augment": {"auto": None, "scale": [0.5, 1.0]}}
    recipe = mixture_recipe(root, batch=8, epochs=14, eval_every=14, model__drop_path=0, **plain)
    recipe = recipe.override({"optim.lr": 0.02, "optim.lr_batch": 8})
    found = train(recipe, tmp_path / "run", ALONE, quiet=True).figures
    assert found["images"] == 16
    # By chance top-1 would be 50 and 33 %.
    assert found["folder.top1"] == 100
    assert found["shards.top1"] > 60
    mean = (found["tags.map"] + found["folder.top1"] + found["shards.top1"]) / 3
    assert found["score"] == pytest.approx(mean)
    notes = [e["text"] for e in read(tmp_path / "run/log.jsonl") if e["event"] == "note"]
    assert any("tags 12 images, 3 tags, 63.2 %" in note for note in notes)
    assert main(["eval", str(tmp_path / "run"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == pytest.approx(found)
    assert main(["eval", str(tmp_path / "run")]) == 0
    assert "mAP" in capsys.readouterr().out
    # A model of classes and tags predicts the classes.
    predictor = Predictor(tmp_path / "run", device="cpu", top=9)
    result = predictor(Image.new("RGB", (40, 40), COLOURS["fox"]))
    assert set(result.scores) == {"dog", "fox", "bee", "owl"}
    assert sum(result.scores.values()) == pytest.approx(1)


@pytest.mark.parametrize("on_device", ["nothing", "pictures"])  # kept name
def test_a_run_resumed_before_and_after_a_size_change_is_bit_equal(
    root, tmp_path, monkeypatch, on_device
):
    recipe = mixture_recipe(
        root,
        data__sizes=[[0, 24], [0.5, 32]],
        data__on_device=on_device,
        saving__every_steps=1,
        saving__keep=20,
    )
    shapes, compute = [], TrainStep._compute

    def recorded(self, batch):
        shapes.append(batch["images"].shape[-1])
        return compute(self, batch)

    monkeypatch.setattr(TrainStep, "_compute", recorded)
    steps = train(recipe, tmp_path, ALONE, quiet=True).steps
    change = round(0.5 * steps)
    assert shapes == [24] * change + [32] * (steps - change)
    whole = curve(tmp_path), load_file(tmp_path / "weights.safetensors")
    for kept in (change - 1, change + 1):
        for path in (tmp_path / "checkpoints").glob("step_*"):
            if int(path.name[5:]) > kept:
                for file in path.iterdir():
                    file.unlink()
                path.rmdir()
        train(recipe, tmp_path, ALONE, resume=True, quiet=True)
        assert curve(tmp_path) == whole[0]
        for name, tensor in load_file(tmp_path / "weights.safetensors").items():
            assert torch.equal(tensor, whole[1][name]), name


def test_kept_images_are_augmented_as_by_workers(root):
    changes = {"mix": {}, "augment": {"auto": None, "erase": 0}}
    for size in (24, 32):
        found = []
        for mode in ("nothing", "pictures"):  # kept name
            sizes = [[0, size]]
            recipe = mixture_recipe(root, data__on_device=mode, data__sizes=sizes, **changes)
            task = recipe.task()
            data = task.phase_data(task.train_data(CPU), 0, 10)
            batch = task.collate([data[2, i] for i in (0, 5, 14, 31)])
            found.append(task.prepare(batch, 3))
        one, two = found
        assert one["images"].shape == (4, 3, size, size)
        assert torch.equal(one["targets"], two["targets"])
        # A pixel may differ by a grey level or two: 1 / 255 / 0.225 each.
        assert (one["images"] - two["images"]).abs().max() < 0.05


def test_a_recorded_step_is_dropped_where_the_size_changes_and_nowhere_else(root, tmp_path):
    trainer = build_trainer(mixture_recipe(root, data__sizes=[[0, 24], [0.5, 32]]), tmp_path, ALONE)
    dropped = []
    trainer.stepper.run = lambda _: dropped.append(trainer.stepper.graphed is None)
    for step in range(trainer.stream.steps):
        trainer.state.step, trainer.stepper.graphed = step, object()
        trainer.make_step(iter(()))
    assert [step for step, is_dropped in enumerate(dropped) if is_dropped] == [0, 6]


@pytest.mark.slow
def test_two_processes_are_one_process(root, tmp_path):
    recipe = mixture_recipe(root, batch=8, data__sizes=[[0, 24], [0.5, 32]])
    train(recipe, tmp_path / "alone", ALONE, quiet=True)
    (tmp_path / "recipe.yaml").write_text(recipe_to_yaml(recipe))
    torchrun("train", "--config", tmp_path / "recipe.yaml", "--output", tmp_path / "run")
    for one, two in zip(curve(tmp_path / "run"), curve(tmp_path / "alone"), strict=True):
        assert one == pytest.approx(two, rel=2e-3)
    ours, theirs = (
        [e for e in read(tmp_path / run / "log.jsonl") if e["event"] == "eval"][-1]
        for run in ("run", "alone")
    )
    assert ours["images"] == theirs["images"] == 16
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=2e-3)


def test_tags_alone_are_a_dataset_and_predictions_have_a_threshold(root, tmp_path):
    recipe = mixture_recipe(
        root / "tags", data__mix=None, data__kind="shards", data__labels="multi", epochs=1
    )
    found = train(recipe, tmp_path, ALONE, quiet=True).figures
    assert 0 < found["data.map"] == found["score"] <= 100
    image = Image.new("RGB", (40, 40), COLOURS["dog"])
    every = Predictor(tmp_path, device="cpu", score=0.0)(image).scores
    assert set(every) == {"bee", "car", "dog"}
    least = sorted(every.values())[1]
    some = Predictor(tmp_path, device="cpu", score=least)(image).scores
    assert some == {name: p for name, p in every.items() if p >= least}
    assert len(Predictor(tmp_path, device="cpu", score=1.0)(image).scores) == 1


@pytest.mark.parametrize("tags", [-1, 4, "1", True, None, 1.0], ids=repr)
def test_a_wrong_number_of_tags_in_a_header_is_an_error(root, tags):
    about = {"classes": ["a", "b", "c"], "tags": tags}
    with pytest.raises(WeightsError, match="tags in the header must be a number from 0 to 3"):
        ClassificationPipeline.from_recipe(mixture_recipe(root), about, "x", trusted=False)


def test_classes_have_a_softmax_and_tags_a_sigmoid_each():
    pipeline = ClassificationPipeline(classes=("a", "b", "c", "d"), tags=2)
    logits = torch.randn(3, 4)
    found = pipeline.probabilities(logits)
    torch.testing.assert_close(found[:, :2], logits[:, :2].softmax(1))
    torch.testing.assert_close(found[:, 2:], logits[:, 2:].sigmoid())
    assert pipeline.listed == 2


def test_published_recipes_do_not_show_where_the_sources_were(root):
    sources = [{"name": "a", "root": "/private/a"}, {"name": "b"}]
    found = without_paths(mixture_recipe(root, data__mix=sources)).data
    assert [(source.name, source.root) for source in found.mix] == [("a", None), ("b", None)]
    assert found.root is None


def test_a_run_refuses_to_resume_with_other_weights_of_its_sources(root, tmp_path):
    recipe = mixture_recipe(root, epochs=1)
    train(recipe, tmp_path, ALONE, quiet=True)
    changed = [dict(source, weight=1.0) for source in recipe.plain()["data"]["mix"]]
    other = recipe.override({"data.mix": changed, "data.epoch": 38})
    with pytest.raises(ValueError, match="the training set is not that of"):
        train(other, tmp_path, ALONE, resume=True, quiet=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data.mix": []}, "data.mix must"),
        ({"data.mix": [{"name": "a"}, {"name": "a"}]}, "need different names, got a, a"),
        ({"data.mix": [{"name": "a b"}]}, "data.mix.0.name must"),
        ({"data.mix": [{"name": "a", "weight": 0}]}, "data.mix.0.weight must be greater than 0"),
        ({"data.mix": [{"name": "a", "weight": 1e308}]}, "data.mix.0.weight must be less than"),
        (
            {"data.mix": [{"name": "a", "kind": "list", "labels": "multi"}]},
            "labels=multi needs kind folder",
        ),
        ({"data.sizes": [[0.1, 96]]}, "shares rising from 0 to below 1"),
        ({"data.sizes": [[0, 96], [0.5, 8]]}, "sizes from 16 to 2048"),
        ({"data.sizes": [[0, 96], [0.5, 128], [0.5, 160]]}, "shares rising"),
    ],
    ids=range(9),
)
def test_wrong_settings_are_named(root, changes, message):
    with pytest.raises(ValueError, match=message):
        mixture_recipe(root).override(changes)


def test_settings_that_cannot_go_together_are_errors(root):
    tokens = {"mixup": 0, "cutmix": 0, "tokens": 1.0}
    with pytest.raises(ValueError, match="MixToken and token labels need one dataset"):
        mixture_recipe(root, mix=tokens).task()
    with pytest.raises(ValueError, match=r"no source in data\.mix is evaluated"):
        mixture_recipe(root, data__mix=[{"name": "shards", "val": None}]).task()
    with pytest.raises(ValueError, match=r"relative to data\.root, which is not set"):
        mixture_recipe(root, data__root=None).task()
    with pytest.raises(ValueError, match=r"data\.train has no effect while data\.mix"):
        mixture_recipe(root).changed({"data.train": "x"})
