"""Detection in the training loop, its commands, and what is refused."""

import csv
import json
import os
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from support.datasets import recipe_on_coco, write_coco
from support.processes import torchrun
from support.recipes import detection_recipe

from pale.cli.main import main
from pale.data.stream import Stream, group_batches
from pale.predict import Predictor
from pale.recipes import RECIPES, get
from pale.recipes.files import recipe_to_yaml
from pale.train.distributed import World
from pale.train.log import read
from pale.train.loop import build_trainer, train
from pale.train.optim import make_schedule
from pale.weights.read import load_weights

CPU = World(torch.device("cpu"))


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_weights(run / "weights.safetensors").tensors


def test_a_run_repeats_and_resumes_bit_equal(tmp_path):
    recipe = detection_recipe(augment__scale=[0.7, 1.3], augment__distort=1.0)
    whole = train(recipe, tmp_path / "a", CPU, quiet=True)
    assert whole.step == 6
    trainer = build_trainer(recipe.override({"saving.every_steps": 2}), tmp_path / "b", CPU)
    trainer.run.mkdir()
    from pale.data.loader import iterate_batches, make_loader

    iterator = iterate_batches(
        make_loader(trainer.data, trainer.sampler, trainer.task.collate, 0, False)
    )
    for _ in range(4):
        trainer.make_step(iterator)
    trainer.save()
    (tmp_path / "b/recipe.yaml").write_text("")
    again = train(recipe, tmp_path / "b", CPU, resume=True, quiet=True)
    assert again.figures == whole.figures
    one, two = weights(tmp_path / "a"), weights(tmp_path / "b")
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_parts_of_a_batch_sample_the_same_as_the_whole_batch(tmp_path):
    """Sampling of anchors and regions depends on the image: only the means over masks depend on the parts."""
    losses = []
    for accumulate in (1, 2):
        recipe = detection_recipe(
            accumulate=accumulate, model__heads__masks=False, batch=8, steps=1, warmup_steps=0
        )
        trainer = build_trainer(recipe, tmp_path / str(accumulate), CPU)
        from pale.data.loader import iterate_batches, make_loader

        loader = make_loader(trainer.data, trainer.sampler, trainer.task.collate, 0, False)
        losses.append(float(trainer.make_step(iterate_batches(loader)).loss))
    assert losses[0] == pytest.approx(losses[1], rel=2e-3)


@pytest.mark.slow
def test_torchrun_evaluates_as_one_process_on_a_set_that_does_not_divide(tmp_path, capsys):
    """One large object per image and one class: even the first boxes, the whole image, are sometimes right."""
    recipe = detection_recipe(data__objects=[1, 1], data__shapes=["disc"], test__score=0.0, steps=3)
    run = tmp_path / "run"
    train(recipe, run, CPU, quiet=True)
    words = ["eval", run, "--data.val_samples", "7", "--json", "--device", "cpu"]
    assert main([*map(str, words), "-o", str(tmp_path / "one")]) == 0
    alone = json.loads(capsys.readouterr().out)
    both = json.loads(torchrun(*words, "-o", tmp_path / "two"))
    assert alone["images"] == 7
    assert alone["box_ap50"] > 5
    for name, value in alone.items():
        assert both[name] == (pytest.approx(value, abs=1e-4) if "_ap" in name else value), name
    # Also in the files for COCO's servers: each image once, whichever process evaluated it.
    one, two = (
        json.loads((tmp_path / folder / "detections_bbox.json").read_text())
        for folder in ("one", "two")
    )
    assert {entry["image_id"] for entry in one} == set(range(1, 8))
    assert len(one) == len(two)
    for a, b in zip(*(sorted(r, key=_place) for r in (one, two)), strict=True):
        assert (a["image_id"], a["category_id"]) == (b["image_id"], b["category_id"])
        assert b["bbox"] == pytest.approx(a["bbox"], abs=1e-2)


def _place(entry: dict) -> tuple:
    return entry["image_id"], -entry["score"]


@pytest.mark.slow
def test_two_processes_train_together(tmp_path):
    """Every parameter gets a gradient in every step, as DDP expects, and both processes stay equal."""
    (tmp_path / "recipe.yaml").write_text(recipe_to_yaml(detection_recipe(data__keep_empty=True)))
    words = ["train", "--config", tmp_path / "recipe.yaml", "--output", tmp_path / "two"]
    torchrun(*words, "--device", "cpu")
    alone = train(detection_recipe(data__keep_empty=True), tmp_path / "one", CPU, quiet=True)
    assert alone.step == 6
    one, two = (
        [e["loss"] for e in read(tmp_path / run / "log.jsonl") if e["event"] == "step"]
        for run in ("one", "two")
    )
    # The means over masks are taken on each process.
    assert two == pytest.approx(one, rel=0.05)
    assert (tmp_path / "two/report.html").is_file()


@pytest.mark.slow
def test_train_eval_predict_report_on_coco_files(tmp_path, capsys):
    root = write_coco(tmp_path / "data")
    run = tmp_path / "run"
    words = ["train", "small_boxes.mask_rcnn_nano", "--data.root", str(root), "--output", str(run)]
    words += ["--data.images", "{split}/", "--data.annotations", "annotations/{split}.json"]
    changes = recipe_on_coco(root).override({"test.score": 0.0, "test.most": 5})
    for name in ("model.options", "model.heads", "test"):
        value = changes
        for part in name.split("."):
            value = getattr(value, part)
        plain = value if isinstance(value, dict) else value.plain()
        words += [f"--{name}", json.dumps(plain)]
    words += [
        "--augment.short",
        "48",
        "--augment.long",
        "80",
        "--steps",
        "3",
        "--warmup_steps",
        "1",
    ]
    words += ["--batch", "2", "--data.workers", "0", "--device", "cpu"]
    assert main(words) == 0
    output = capsys.readouterr().out
    assert "6 images, 8 classes" in output
    report = (run / "report.html").read_text()
    assert "box AP50" in report
    assert "Worst images" in report
    assert report.count("data:image/jpeg") == 3
    assert "<td>disc" in report

    assert main(["eval", str(run), "--device", "cpu"]) == 0
    output = capsys.readouterr().out
    assert "AP50" in output
    assert "at most 5 objects per image" in output
    results = json.loads((run / "evaluation/detections_bbox.json").read_text())
    assert {r["image_id"] for r in results} <= {100, 101, 102}
    assert {r["category_id"] for r in results} <= {2, 5, 8, 11, 14, 17, 20, 23}
    assert all("segmentation" not in r for r in results)
    shapes = json.loads((run / "evaluation/detections_segm.json").read_text())
    assert all(r["segmentation"]["size"] == [48, 48] for r in shapes)
    with (run / "evaluation/per_class.csv").open() as file:
        assert [row["class"] for row in csv.DictReader(file)][:2] == ["disc", "ring"]

    assert main(["eval", str(run), "--device", "cpu", "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    logged = [e for e in read(run / "log.jsonl") if e["event"] == "eval"][-1]
    assert plain["box_ap"] == pytest.approx(logged["box_ap"], abs=1e-3)

    out = tmp_path / "out"
    Image.new("RGB", (90, 61), "red").save(tmp_path / "p.png")
    words = ["predict", str(tmp_path / "p.png"), str(root / "val"), "--weights", str(run)]
    words += ["-o", str(out)]
    assert main([*words, "--score", "0", "--device", "cpu"]) == 0
    assert f"{out} written: 4 of 4 images" in capsys.readouterr().err
    with Image.open(out / "p_predicted.jpg") as drawn:
        assert drawn.size == (90, 61)
    content = json.loads((out / "objects.json").read_text())
    assert len(content["images"]) == 4
    mine = [a for a in content["annotations"] if a["image_id"] == 1]
    assert 0 < len(mine) <= 5
    assert mine[0]["segmentation"]["size"] == [61, 90]
    capsys.readouterr()
    assert main([*words, "--slide"]) == 1
    assert "slide is an option of segmentation" in capsys.readouterr().err


def test_a_predictor_accepts_images_of_any_size(tmp_path):
    run = tmp_path / "run"
    train(detection_recipe(steps=1, warmup_steps=0, test__score=0.0), run, CPU, quiet=True)
    predictor = Predictor(run, score=0.0, most=3)
    Image.new("RGB", (300, 40), "red").save(tmp_path / "p.png")
    found = predictor(tmp_path / "p.png")
    assert len(found.objects) <= 3
    assert sum(found.counts.values()) == len(found.objects)
    assert found.draw().size == (300, 40)


def test_with_a_crop_all_batches_have_one_size_and_padding_is_zero(tmp_path):
    recipe = detection_recipe(augment__short=48, augment__long=96, augment__scale=[0.5, 1.5])
    recipe = recipe.override({"augment.crop": (56, 64)})
    task = recipe.task()
    data = task.train_data(torch.device("cpu"))
    sizes = set()
    for first in (0, 4):
        batch = task.collate([data[0, i] for i in range(first, first + 4)])
        images = task.prepare(batch, 0)["images"]
        assert images.shape == (4, 3, 56, 64)
        for image, (h, w) in zip(images, batch["sizes"], strict=True):
            sizes.add((h, w))
            assert image[:, :h, :w].abs().mean() > 0.1
            assert not image[:, h:].any()
            assert not image[:, :, w:].any()
    assert len(sizes) > 2


@pytest.mark.slow
@pytest.mark.gpu
@pytest.mark.parametrize("model", ["pale_nano", "resnet10t"])
def test_a_recorded_backbone_trains_as_an_eager_one(tmp_path, model):
    """Sums over regions are rounded differently in every run, so the following steps are only close."""
    world, losses = World(torch.device("cuda")), {}
    for graph in (False, True):
        recipe = detection_recipe(augment__crop=64, precision="fp32", steps=8, log_every=1)
        recipe = recipe.override({"cuda_graph": graph, "model.name": model})
        if model != "pale_nano":
            recipe = recipe.override({"model.options": {}, "model.drop_path": 0.0})
        run = tmp_path / f"{model}_{graph}"
        train(recipe, run, world, quiet=True)
        steps = [e for e in read(run / "log.jsonl") if e["event"] == "step"]
        losses[graph] = [e["loss"] for e in steps]
    assert len(losses[True]) == 8
    assert losses[True][0] == pytest.approx(losses[False][0], rel=1e-3)
    assert losses[True] == pytest.approx(losses[False], rel=0.05)


def test_by_default_only_detectors_with_a_crop_use_cuda_graphs():
    assert not detection_recipe(augment__crop=None).uses_cuda_graph(cuda=True, processes=1)
    assert detection_recipe(augment__crop=64).uses_cuda_graph(cuda=True, processes=1)
    assert not detection_recipe(augment__crop=64, accumulate=2).uses_cuda_graph(
        cuda=True, processes=1
    )


def test_omitted_samples_are_logged_at_the_start(tmp_path):
    def change(split, content):
        content["annotations"].append(content["annotations"][0] | {"id": 999, "bbox": [1, 1, 0, 4]})

    root = write_coco(tmp_path / "data", change=change)
    train(recipe_on_coco(root, steps=1, warmup_steps=0), tmp_path / "run", CPU, quiet=True)
    notes = [e["text"] for e in read(tmp_path / "run/log.jsonl") if e["event"] == "note"]
    assert "train.json: 1 boxes thinner than 1 pixel left out" in notes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cuda_graph": True}, r"images of one size; set augment\.crop"),
        (
            {"cuda_graph": True, "augment.crop": 64, "accumulate": 2},
            "in one part, got accumulate=2",
        ),
        ({"cuda_graph": True, "augment.crop": 64, "compile": True}, "remove one of them"),
        ({"cuda_graph": "maybe"}, "cuda_graph: true, false or auto, got 'maybe'"),
        ({"parallel": "fsdp"}, "parallel=ddp only"),
        ({"epochs": 11}, r"optim\.steps_at up to 11 and 11 epochs"),
        (
            {"data.annotations": None, "data.root": "x"},
            r"--data\.images DIR --data\.annotations FILE",
        ),
        ({}, r"data\.root is not set"),
        ({"model.heads.width": 0}, r"model\.heads\.width must be greater"),
    ],
    ids=["graph", "pieces", "compiled", "maybe", "fsdp", "steps", "annotations", "root", "width"],
)
def test_impossible_recipes_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        get("coco.mask_rcnn_pale_t").override(changes).task()


def test_coco_holds_every_value_of_the_papers_appendix():
    tiny, small, base = (get(f"coco.mask_rcnn_pale_{size}") for size in "tsb")
    for recipe in (tiny, small, base):
        assert (recipe.epochs, recipe.batch, recipe.warmup_steps) == (12, 16, 500)
        assert (recipe.peak_lr, recipe.optim.clip) == (1e-4, None)
        assert (recipe.optim.schedule, recipe.optim.steps_at) == ("steps", (8, 11))
        assert recipe.optim.step_factor == 0.1
        assert (recipe.augment.short, recipe.augment.long, recipe.augment.flip) == (800, 1333, 0.5)
        assert (recipe.test.short, recipe.test.long) == (800, 1333)
        assert not recipe.data.keep_empty
    assert [r.model.drop_path for r in (tiny, small, base)] == [0.2, 0.3, 0.5]
    assert [r.optim.weight_decay for r in (tiny, small, base)] == [0.001, 0.001, 0.05]
    assert [r.reported.box_ap for r in (tiny, small, base)] == [47.4, 48.4, 49.3]
    assert [r.reported.mask_ap for r in (tiny, small, base)] == [42.7, 43.7, 44.2]


def test_ablations_of_coco_differ_in_the_model_alone():
    base = get("coco.mask_rcnn_pale_t")
    rows = [
        n for n in RECIPES if n.startswith(("coco.pale_size", "coco.attention", "coco.position"))
    ]
    assert len(rows) == 13
    for name in rows:
        row = get(name)
        same = {"model": base.model, "reported": base.reported, "name": "", "about": ""}
        assert row.model_copy(update=same) == base.model_copy(update={"name": "", "about": ""})


def test_the_rate_goes_down_by_steps_after_its_warm_up():
    recipe = get("coco.mask_rcnn_pale_t").override({"warmup_steps": 10})
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], recipe.peak_lr)
    samples, steps = 320, 240  # 20 steps an epoch
    plan = make_schedule(optimizer, recipe, steps, samples)
    rates = []
    for step in range(steps):
        plan.step_update(step)
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates[0] == pytest.approx(1e-7)
    assert rates[5] == pytest.approx(1e-7 + (1e-4 - 1e-7) / 2)
    assert rates[10:160] == pytest.approx([1e-4] * 150)
    assert rates[160:220] == pytest.approx([1e-5] * 60)
    assert rates[220:] == pytest.approx([1e-6] * 20)


@pytest.mark.parametrize(
    ("samples", "batch", "tall"), [(103, 8, 30), (64, 16, 5), (50, 8, 25), (9, 4, 9)]
)
def test_grouped_batches_see_one_group_and_every_sample_once_an_epoch(samples, batch, tall):
    groups = np.zeros(samples, np.int64)
    groups[np.random.default_rng(0).permutation(samples)[:tall]] = 1
    stream = Stream(samples, batch, 5, 3, groups=groups)
    positions = np.arange(batch)
    keys = [key for step in range(stream.steps) for key in stream.keys(step, positions)]
    for epoch in range(4):
        seen = sorted(index for e, index in keys if e == epoch)
        assert seen == list(range(samples))
    mixed = 0
    for step in range(stream.steps):
        kinds = {int(groups[index]) for _, index in stream.keys(step, positions)}
        mixed += len(kinds) > 1
    assert mixed <= 2 * 5
    assert mixed < stream.steps / 2 or samples < 20
    fresh = Stream(samples, batch, 5, 3, groups=groups)
    assert fresh.keys(7 % fresh.steps, positions) == stream.keys(7 % stream.steps, positions)
    other = Stream(samples, batch, 5, 4, groups=groups)
    assert [other.keys(s, positions) for s in range(2)] != [
        stream.keys(s, positions) for s in range(2)
    ]


def test_grouping_only_reorders():
    rng = np.random.default_rng(0)
    order, groups = rng.permutation(97), rng.integers(0, 3, 97)
    found = group_batches(order, groups, 10, 4, rng)
    assert sorted(found) == list(range(97))
    same = group_batches(order, np.zeros(97, np.int64), 10, 0, rng)
    assert sorted(same) == list(range(97))


def test_wide_and_tall_images_are_in_different_groups(tmp_path):
    root = write_coco(tmp_path, counts=(4, 2))
    content = json.loads((root / "annotations/train.json").read_text())
    Image.new("RGB", (30, 48)).save(root / "train/1.png")
    content["images"][1]["width"] = 30
    (root / "annotations/train.json").write_text(json.dumps(content))
    task = recipe_on_coco(root, data__keep_empty=True).task()
    assert task.groups.tolist() == [1, 0, 1, 1]


@pytest.mark.data
@pytest.mark.slow
def test_a_step_on_real_images_with_crowds_and_an_evaluation(project, tmp_path):
    path = Path(os.environ.get("PALE_DATA", project.parent / "shared/data")) / "coco-mini.tar"
    if not path.is_file():
        pytest.skip(f"{path} is not there; PALE_DATA names the folder")
    with tarfile.open(path) as tar:
        tar.extractall(tmp_path, filter="data")
    recipe = detection_recipe(data__kind="coco", data__root=str(tmp_path / "coco-mini")).override(
        {
            "augment.short": 96,
            "augment.long": 160,
            "test.short": 96,
            "test.long": 160,
            "data.limit": 8,
            "steps": 2,
            "batch": 4,
            "warmup_steps": 0,
        }
    )
    outcome = train(recipe, tmp_path / "run", CPU, quiet=True)
    assert np.isfinite(outcome.figures["box_ap"])
    assert outcome.figures["images"] == 8
