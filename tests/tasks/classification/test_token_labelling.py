"""MixToken and token labels."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torchvision.ops import roi_align

from pale.data.seeding import seeded
from pale.data.stream import shard_positions
from pale.data.transforms.images import Augment, normalise, train_transform
from pale.data.transforms.mixing import Mix, TokenMixer
from pale.model.pale_transformer import create_model
from pale.tasks.classification.data import Data
from pale.tasks.classification.loss import TokenLabels, blocks, dense_targets
from pale.tasks.classification.model import Model
from pale.tasks.classification.task import ClassificationTask

SMALL = {"depths": [1, 1, 1, 1], "channels": [8, 16, 16, 16], "heads": [2, 2, 2, 2]}
CLASSES = 8  # of scenes
WHOLE = torch.tensor([[1.0, 0, 0], [0, 1, 0]])


def task(size=72, mix=None, seed=0):
    data = Data(kind="scenes", size=size, samples=8, val_samples=1)
    made = ClassificationTask(
        Model(name="pale_nano", options=SMALL),
        data,
        Augment(),
        mix or Mix(mixup=0, cutmix=0, tokens=1, smoothing=0),
        seed,
    )
    made.store = object()  # prepare() takes the labels from the batch
    return made, made.model().train()


def painted(b, size, grid=(4, 5)):
    """Return a batch in which sample i has class i, as its label and everywhere on its map."""
    i = torch.arange(b)
    return {
        "images": i.to(torch.uint8).view(b, 1, 1, 1).expand(b, 3, size, size) * 9,
        "labels": i,
        "token_scores": torch.ones(b, 1, *grid).half(),
        "token_classes": i.view(b, 1, 1, 1).expand(b, 1, *grid).int(),
        "places": WHOLE.expand(b, 2, 3),
    }


@pytest.mark.parametrize("size", [72, 128], ids=str)
def test_every_token_has_the_label_of_the_image_it_comes_from(size):
    made, model = task(size)
    batch = painted(8, size)
    entering = []
    model.stages[0].blocks.register_forward_hook(lambda m, args, y: entering.append(args[0]))
    merged = model.stages[0].merge(normalise(batch["images"]))
    shares = set()
    for step in range(12):
        prepared = made.prepare(batch, step)
        with torch.no_grad():
            model(prepared["images"], prepared["token_mask"])
        tokens, labels = entering.pop(), prepared["token_targets"].argmax(-1)
        assert torch.allclose(prepared["token_targets"].amax(-1), torch.ones(labels.shape))
        # The class of each token of the first map, found by what is in it.
        own = (tokens == merged).all(-1)
        other = (tokens == merged.flip(0)).all(-1)
        assert (own ^ other).all()
        i = torch.arange(8).view(8, 1, 1)
        came_from = torch.where(own, i, 7 - i)
        h, w = labels.shape[1:]
        for y in range(h):
            for x in range(w):
                cell = came_from[:, 8 * y : 8 * y + 8, 8 * x : 8 * x + 8].flatten(1)
                assert (cell == labels[:, y, x, None]).all()  # one image a cell, and its label
        # The class label is mixed by the area, exactly.
        for p in range(8):
            expected = F.one_hot(labels[p].flatten(), CLASSES).float().mean(0)
            assert torch.allclose(prepared["targets"][p], expected, atol=1e-6)
        shares.add(float((labels[0] == 7).float().mean()))
    assert len(shares) > 3


@settings(max_examples=30, deadline=None)
@given(st.integers(16, 260), st.sampled_from([1, 2, 4]))
def test_cells_of_the_last_map_are_whole_blocks_in_every_stage(size, stride):
    from dataclasses import replace

    from pale.model.pale_transformer import PALE_NANO

    maps = replace(PALE_NANO, stem_stride=stride).maps(size, size + 9)
    cells = torch.arange(maps[-1][0] * maps[-1][1]).view(maps[-1])
    for stage, grid in enumerate(maps):
        fine = blocks(cells, grid, 2 ** (3 - stage))
        assert fine.shape == grid
        # Patch merging reads around token 2 i: that token is of the same cell.
        if stage < 3:
            coarse = blocks(cells, maps[stage + 1], 2 ** (2 - stage))
            assert torch.equal(fine[::2, ::2], coarse)


def test_boxes_have_the_areas_of_cutmix_and_depend_on_the_step_alone():
    mixer = TokenMixer(Mix(mixup=0, cutmix=0, tokens=1), 2, seed=1)
    cells = [mixer.cells((7, 7), step) for step in range(2000)]
    for box in cells[:200]:
        rows, columns = box.any(1).nonzero(), box.any(0).nonzero()
        assert int(box.sum()) == len(rows) * len(columns)  # a rectangle
        if len(rows):
            assert rows[-1] - rows[0] + 1 == len(rows)
    # Uniform in [0, 1] before cutting off at the border.
    assert 0.25 < float(torch.stack(cells).float().mean()) < 0.45
    assert torch.equal(mixer.cells((7, 7), 5), cells[5])
    assert not TokenMixer(Mix(mixup=0, cutmix=0), 2, 1).cells((7, 7), 5).any()
    never = Mix(mixup=0, cutmix=0, tokens=1, probability=0)
    assert not any(TokenMixer(never, 2, 1).cells((7, 7), step).any() for step in range(20))


def test_shards_are_prepared_as_the_whole_batch():
    made, _ = task(64)
    batch = painted(8, 64) | {"places": torch.rand(8, 2, 3) * WHOLE}
    for step in range(4):
        whole = made.prepare(batch, step)
        for shard in range(2):
            at = torch.from_numpy(shard_positions(8, shard, 2))
            part = made.prepare({name: value[at] for name, value in batch.items()}, step)
            for name in ("targets", "token_targets"):
                assert torch.allclose(part[name], whole[name][at], atol=1e-6)


def test_mixing_the_labels_equals_moving_the_outputs_back():
    # LV-ViT puts tokens that were mixed back to their image and takes labels that were never mixed.
    made, model = task(64, Mix(mixup=0, cutmix=0, tokens=1))
    batch = painted(8, 64)
    batch["token_scores"] = torch.rand(8, 1, 4, 5).half()
    made.token_labels = TokenLabels(weight=0.5)
    for step in range(3):
        prepared = made.prepare(batch, step)
        cells = made.token_mixer.cells(made.maps[-1], step)
        logits, dense = model(prepared["images"], prepared["token_mask"])
        back = torch.where(cells[..., None], dense.flip(0), dense)
        n, smoothing = CLASSES, 0.1
        own = dense_targets(
            batch["token_scores"], batch["token_classes"], batch["places"], made.maps[-1], n
        )
        own = (1 - smoothing) * own + smoothing / n
        theirs = -(own * back.log_softmax(-1)).sum(-1).mean()
        expected = F.cross_entropy(logits, prepared["targets"]) + 0.5 * theirs
        assert torch.allclose(made.loss(model, prepared), expected, atol=1e-5)


@settings(max_examples=25, deadline=None)
@given(st.floats(0, 0.6), st.floats(0, 0.6), st.floats(0.1, 0.4), st.floats(0.1, 0.4))
def test_crops_of_the_map_are_roi_aligned(left, top, width, height):
    maps = torch.rand(1, 6, 9, 7).softmax(1)
    scores, classes = maps.sort(1, descending=True)
    places = torch.tensor([[[width, 0, left], [0, height, top]]])
    ours = dense_targets(scores, classes, places, (4, 5), 6)
    box = torch.tensor([[0, left * 7, top * 9, (left + width) * 7, (top + height) * 9]])
    theirs = roi_align(maps, box, (4, 5), sampling_ratio=3, aligned=True)
    assert torch.allclose(ours, theirs.permute(0, 2, 3, 1), atol=1e-5)


@pytest.mark.parametrize("auto", [None, "rand-m9-n3"], ids=["crop and flip", "RandAugment"])
def test_labels_follow_the_image(auto):
    # Left to right the image goes from class 0 to class 1, top to bottom from bright to dark blue. The map
    # says the same of the place, so the label of each token must be what the image shows there.
    grid, (h, w) = 16, (128, 160)
    red = np.linspace(0, 255, w)[None].repeat(h, 0)
    blue = np.linspace(0, 255, h)[:, None].repeat(w, 1)
    photo = Image.fromarray(np.stack([red, 0 * red + 255, blue], -1).astype(np.uint8))
    across, down = ((torch.arange(grid) + 0.5) / grid for _ in range(2))
    right, low = across.expand(grid, grid), down[:, None].expand(grid, grid)
    scores = torch.stack([1 - right, right, 1 - low, low]) / 2
    classes = torch.arange(4).view(4, 1, 1).expand(4, grid, grid)
    transform = train_transform(
        56, Augment(erase=0, auto=auto, colour_jitter=0, vertical_flip=0.5, scale=(0.3, 1))
    )
    for step in transform.colour.transforms:
        step.ops = [op for op in step.ops if hasattr(op.aug_fn, "matrices")]  # colours stay
        step.choice_weights = None
    checked = 0
    for index in range(30):
        with seeded(2, index):
            image, places = transform.with_places(photo)
        label = dense_targets(
            scores[None], classes[None], torch.from_numpy(places)[None], (7, 7), 4
        )[0]
        cells = F.avg_pool2d(image.float(), 8) / 255
        shown = cells[1] > 0.999  # whole cells that are not filled
        checked += int(shown.sum())
        if not shown.any():
            continue
        # Within half a stored cell of the border the map has no more to say.
        assert (2 * label[..., 1] - cells[0])[shown].abs().max() < 0.05
        assert (2 * label[..., 3] - cells[2])[shown].abs().max() < 0.05
        assert torch.allclose(label.sum(-1), torch.ones(7, 7), atol=1e-5)
    assert checked > 300


def test_labels_outside_the_image_are_uniform():
    places = torch.tensor([[[1.0, 0, 2], [0, 1, 0]]])
    label = dense_targets(torch.ones(1, 1, 3, 3), torch.zeros(1, 1, 3, 3), places, (2, 2), 5)
    assert torch.allclose(label, torch.full((1, 2, 2, 5), 0.2))


def test_without_a_mask_training_does_not_mix_tokens():
    model = create_model("pale_nano", num_classes=5, **SMALL)
    other = create_model("pale_nano", num_classes=5, token_outputs=True, **SMALL)
    other.load_state_dict(model.state_dict())  # the same keys
    images = torch.rand(2, 3, 64, 96)
    plain = model.train()(images)
    logits, dense = model.forward_tokens(images)
    assert torch.equal(logits, plain)
    assert dense.shape == (2, 2, 3, 5)
    assert torch.allclose(dense.mean((1, 2)), logits, atol=1e-5)
    assert torch.equal(other.train()(images), plain)
    none = torch.zeros(16, 24, dtype=torch.bool)
    assert all(map(torch.equal, other(images, none), (logits, dense)))
    assert torch.equal(other.eval()(images), plain)


def test_compiled_training_sees_each_new_box():
    model = create_model("pale_nano", num_classes=5, token_outputs=True, **SMALL).train()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    images = torch.rand(4, 3, 64, 64)
    seen = []
    for corner in range(3):
        mask = torch.zeros(16, 16, dtype=torch.bool)
        mask[: 8 * corner, :8] = True
        seen.append(compiled(images, mask)[1])
        assert torch.allclose(seen[-1], model(images, mask)[1], atol=1e-6)
    assert not torch.allclose(seen[0], seen[1])
    assert not torch.allclose(seen[1], seen[2])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.name": "resnet18"}, "MixToken and token labels need one of pale_nano"),
        (
            {"mix.tokens": 0, "mix.mixup": 0.8},
            r"token labels can be combined only with MixToken.*mixup=0\.8",
        ),
        ({"mix.mixup": 0.8}, "MixToken replaces Mixup and CutMix"),
        ({"augment.auto": "augmix-m5"}, "token labels cannot follow AugMix"),
        ({}, "there are no token labels in nowhere; make them: pale token-labels make"),
    ],
    ids=["model", "mixup", "both", "augmix", "store"],
)
def test_settings_that_exclude_token_labels_are_reported(changes, message):
    from pale.recipes import get

    mix = {"mix": {"mixup": 0, "cutmix": 0, "tokens": 1}, "token_labels.store": "nowhere"}
    with pytest.raises(ValueError, match=message):
        get("quickstart").override(mix | changes).task()


def test_odd_shards_cannot_be_mixed():
    made, _ = task(64)
    step = next(step for step in range(9) if made.token_mixer.cells((2, 2), step).any())
    batch = {name: value[:3] for name, value in painted(8, 64).items()}
    with pytest.raises(ValueError, match="even number of images on each process, got 3"):
        made.prepare(batch, step)
