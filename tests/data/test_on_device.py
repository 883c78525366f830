"""Augmentation on the device against Pillow's and timm's on one picture.

In plain PyTorch, and by kernels: on a GPU, and on the CPU in Triton's interpreter, which has to be chosen before the
kernels are defined, so `test_everything_in_the_interpreter` runs this module once more in a process of its own.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from launching import compiling, in_the_interpreter, needs_triton
from PIL import Image
from timm.data import auto_augment

from pale.data import augmenting, on_device
from pale.data.augmenting import show
from pale.data.draws import seeded
from pale.data.images import folder
from pale.data.labelled import Labelled
from pale.data.on_device import Encoded, Pictures, Planned, collate
from pale.data.plans import Plan, Planner
from pale.data.slide import place
from pale.data.transforms import Augment, TrainTransform, to_tensor
from pale.ops.kernels import INTERPRETED, launches
from pale.recipes import get
from pale.settings import vary
from pale.train.evaluate import to_device

CPU = torch.device("cpu")
FILL = (124, 116, 104)


def photo(rng: np.random.Generator, h: int, w: int) -> Image.Image:
    """Something with slopes, edges and noise, as photographs have them."""
    y, x = np.mgrid[:h, :w]
    waves = [np.sin((x * a + y * b) / 9 + c) for a, b, c in rng.uniform(0, 3, (3, 3))]
    pixels = (
        90 + 60 * np.stack(waves, 2) + 60 * (x > w / 2)[..., None] + rng.normal(0, 12, (h, w, 3))
    )
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def as_batch(*images: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.stack([np.asarray(i) for i in images])).permute(0, 3, 1, 2).float()


OPERATIONS = [
    (auto_augment.auto_contrast, ()),
    (auto_augment.equalize, ()),
    (auto_augment.invert, ()),
    *((auto_augment.posterize, (bits,)) for bits in (1, 3, 4, 8)),
    *((auto_augment.solarize, (level,)) for level in (0, 26, 128, 256)),
    *((auto_augment.solarize_add, (n,)) for n in (0, 40, 110)),
    *(
        (f, (factor,))
        for f in (
            auto_augment.brightness,
            auto_augment.contrast,
            auto_augment.color,
            auto_augment.sharpness,
        )
        for factor in (0.1, 0.55, 1.0, 1.36, 1.9)
    ),
]
NAMES = {auto_augment.color: "colour"}


@pytest.mark.parametrize(
    ("function", "amounts"), OPERATIONS, ids=lambda x: getattr(x, "__name__", str(x))
)
def test_operations_on_colours_are_pillows(function, amounts):
    rng = np.random.default_rng(0)
    flat = Image.new("RGB", (31, 31), (40, 40, 200))
    two = Image.fromarray(
        np.where(np.arange(31)[:, None, None] > 15, 250, 3)
        .repeat(31, 1)
        .repeat(3, 2)
        .astype(np.uint8)
    )
    images = [photo(rng, 31, 31), photo(rng, 31, 31), flat, two]
    ours = augmenting.OPERATIONS[NAMES.get(function, function.__name__)](
        as_batch(*images), torch.tensor([amounts or (0,)] * 4, dtype=torch.float64)
    )
    difference = (ours - as_batch(*(function(i, *amounts) for i in images))).abs()
    # Pillow's float arithmetic may end on the other side of a whole number.
    assert difference.max() <= 1
    assert (difference > 0).float().mean() < 0.01


@pytest.mark.parametrize("resample", [Image.Resampling.BILINEAR, Image.Resampling.BICUBIC])
@pytest.mark.parametrize(
    ("function", "amount"),
    [
        *((auto_augment.rotate, a) for a in (0.0, 7.3, -29.9)),
        *((auto_augment.shear_x, a) for a in (0.21, -0.3)),
        *((auto_augment.shear_y, a) for a in (0.3, -0.02)),
        *((auto_augment.translate_x_rel, a) for a in (0.4, -0.171)),
        *((auto_augment.translate_y_rel, a) for a in (0.33, -0.45)),
        (auto_augment.translate_x_abs, 11.6),
        (auto_augment.translate_y_abs, -9.0),
    ],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_operations_on_places_are_pillows(function, amount, resample):
    images = [photo(np.random.default_rng(i), 40, 40) for i in range(2)]
    numbers = [
        *place(function, amount, 40)[:2].ravel(),
        resample == Image.Resampling.BICUBIC,
        *FILL,
    ]
    ours = augmenting.affine(as_batch(*images), torch.tensor([numbers] * 2, dtype=torch.float64))
    theirs = as_batch(*(function(i, amount, resample=resample, fillcolor=FILL) for i in images))
    difference = (ours - theirs).abs()
    assert (difference > 1).float().mean() < 0.002  # a place on the very edge may fall outside
    assert difference.mean() < 0.2


@settings(max_examples=40)
@given(
    length=st.integers(1, 70),
    more=st.integers(0, 9),
    size=st.integers(1, 60),
    mode=st.sampled_from(["bilinear", "bicubic"]),
    flip=st.booleans(),
)
def test_resizing_is_torchs_with_antialiasing(length, more, size, mode, flip):
    row = torch.rand(1, 1, 1, length) * 255
    expected = torch.nn.functional.interpolate(row, (1, size), mode=mode, antialias=True)[0, 0, 0]
    w = augmenting.weights(
        torch.tensor([length]),
        length + more,
        size,
        torch.tensor([int(mode == "bicubic")]),
        torch.tensor([int(flip)]),
    )
    padded = torch.cat([row[0, 0, 0], torch.full((more,), 1e6)])
    torch.testing.assert_close(
        w[0] @ padded, expected.flip(0) if flip else expected, rtol=1e-4, atol=2e-2
    )


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Two classes of pictures of different sizes, in files without loss."""
    root = tmp_path_factory.mktemp("photos")
    rng = np.random.default_rng(3)
    for i in range(24):
        (root / f"class_{i % 2}").mkdir(exist_ok=True)
        h, w = rng.integers(20, 90, 2)
        photo(rng, int(h), int(w)).save(root / f"class_{i % 2}/{i}.png")
    return folder(root)


AUGMENTS = {
    "defaults": Augment(erase=0),
    "autoaugment": Augment(
        auto="original-mstd0.5", erase=0, interpolation="random", vertical_flip=0.5
    ),
    "jitter": Augment(auto=None, colour_jitter=0.4, erase=0, interpolation="bilinear"),
    "crop alone": Augment(auto=None, colour_jitter=0, erase=0),
}


def both(photos, augment, size=48, epochs=3):
    """The same samples made by a worker and on the device, and their places."""
    keys = [(epoch, i) for epoch in range(epochs) for i in range(len(photos))]
    known = Labelled(photos, TrainTransform(size, augment), 7)
    pictures = Pictures(photos)
    planned = Planned(photos, Planner(size, augment), 7, pictures.sizes)
    batch = to_device(collate([planned[key] for key in keys]), CPU)
    assert batch["labels"].tolist() == [known[key][1] for key in keys]
    images = torch.stack([known[key][0] for key in keys])
    return images.int(), show(pictures.on(CPU), batch["plan"], size).int(), keys


@pytest.mark.parametrize("name", AUGMENTS)
def test_a_sample_looks_the_same_from_a_worker_and_on_the_device(photos, name):
    theirs, ours, _ = both(photos, AUGMENTS[name])
    difference = (ours - theirs).abs().float()
    # A grey level that was rounded the other way may be stretched by what follows (equalize, contrast), or cross a
    # threshold (solarize); so most pixels must agree, and all images on the whole.
    assert (difference <= 2).float().mean() > 0.97
    assert difference.mean((1, 2, 3)).median() < 0.6
    assert difference.mean((1, 2, 3)).max() < 12
    # That could be told from any other augmentation of the same pictures.
    assert (ours - theirs.roll(24, 0)).abs().float().mean() > 10 * difference.mean()


def test_random_erasing_is_where_timm_puts_it_and_normal_noise(photos):
    augment = Augment(auto=None, colour_jitter=0, erase=1.0)
    theirs, ours, keys = both(photos, augment)
    plain, unerased, _ = both(photos, augment.model_copy(update={"erase": 0.0}))
    for ours_in, theirs_in in zip((ours != unerased).any(1), (theirs != plain).any(1), strict=True):
        assert (ours_in != theirs_in).float().mean() < 0.02  # noise may hit the old value
    assert (ours != unerased).float().mean() > 0.02
    first, again = (both(photos, augment)[1] for _ in range(2))
    assert torch.equal(first, again)
    other = augmenting.normal(torch.tensor([5, 6]), 200_000)
    assert other.mean(1).abs().max() < 0.01
    assert (other.std(1) - 1).abs().max() < 0.01
    assert abs(float((other[0] * other[1]).mean())) < 0.01
    assert len(keys) == len(ours)


def test_places_for_token_labels_are_the_same(photos):
    augment = Augment(erase=0.25)
    transform, planner = TrainTransform(32, augment), Planner(32, augment)
    for i in range(len(photos)):
        picture = photos.image(i)
        with seeded(1, 2, i):
            _, expected = transform.see(picture)
        with seeded(1, 2, i):
            sketch = planner.plan(i, *picture.size, key=0)
        np.testing.assert_array_equal(sketch.places, expected)


def test_what_the_device_cannot_do_is_refused_before_training():
    for augment, reason in (
        (Augment(auto="3a"), "needs|asks for"),
        (Augment(auto="augmix-m5-w4-d2"), "augmix|AugMix"),
        (Augment(interpolation="lanczos"), "must be bilinear, bicubic or random .* got 'lanczos'"),
    ):
        with pytest.raises(ValueError, match=reason):
            Planner(32, augment)


def test_more_pictures_than_memory_are_refused(photos):
    with pytest.raises(
        ValueError, match=r"at most .* GiB, and the first \d+ of 24 .* data.on_device=decoding"
    ):
        Pictures(photos, most=40_000)


def test_a_plan_is_two_tensors_and_may_be_pinned(photos):
    planned = Planned(photos, Planner(32, Augment()), 0, Pictures(photos).sizes)
    plan = collate([planned[0, i] for i in range(24)])["plan"]
    assert isinstance(plan, Plan)
    assert plan.size == 24
    assert {plan.ints.ndim, plan.floats.ndim} == {1}
    moved = plan.to(torch.device("cpu"))
    assert torch.equal(moved.ints, plan.ints)


def fails(i):
    pytest.fail(f"picture {i} was read again")


@pytest.fixture
def mixed(tmp_path):
    """Files of all kinds: plain, grey and progressive JPEG; one turned by EXIF, one CMYK, one with transparency."""
    rng = np.random.default_rng(4)
    where = tmp_path / "files/class"
    where.mkdir(parents=True)
    photo(rng, 60, 80).save(where / "a.jpg", quality=92)
    photo(rng, 51, 33).convert("L").save(where / "b.jpg")
    photo(rng, 47, 64).save(where / "c.jpg", progressive=True)
    exif = Image.Exif()
    exif[0x0112] = 6
    photo(rng, 40, 70).save(where / "d.jpg", exif=exif)
    photo(rng, 64, 64).convert("CMYK").save(where / "e.jpg")
    photo(rng, 30, 41).convert("RGBA").save(where / "f.png")
    return folder(tmp_path / "files")


def test_files_are_decoded_on_the_device_and_what_it_cannot_by_workers(mixed):
    augment = AUGMENTS["crop alone"]
    planned = Planned(mixed, Planner(40, augment), 1)
    batch = to_device(collate([planned[0, i] for i in range(6)]), CPU)
    files = batch["files"]
    assert [shape is None for _, shape in files.pieces] == [True, True, True, False, False, False]
    images = show(files.decode(CPU, fails), batch["plan"], 40)
    known = Labelled(mixed, TrainTransform(40, augment), 1)
    expected = torch.stack([known[0, i][0] for i in range(6)])
    assert (images.int() - expected.int()).abs().max() <= 3


def test_a_file_that_cannot_be_decoded_is_told_by_name(mixed):
    planned = Planned(mixed, Planner(40, AUGMENTS["crop alone"]), 1)
    whole = (mixed.root / "class/a.jpg").read_bytes()
    (mixed.root / "class/b.jpg").write_bytes(whole[: len(whole) // 3])  # its head is in order
    batch = collate([planned[0, i] for i in range(3)])
    with pytest.raises(ValueError, match=r"b\.jpg: cannot be read as an image"):
        batch["files"].decode(CPU, lambda i: to_tensor(mixed.image(i)))
    for content in (b"", b"no picture", whole[:40]):
        (mixed.root / "class/b.jpg").write_bytes(content)
        with pytest.raises(ValueError, match=r"b\.jpg: cannot be read as an image"):
            planned[0, 1]
    (mixed.root / "class/b.jpg").unlink()
    with pytest.raises(ValueError, match=r"b\.jpg: there is no such file"):
        planned[0, 1]


def test_a_batch_of_pixels_alone_needs_no_decoder(mixed):
    planned = Planned(mixed, Planner(40, Augment()), 1)
    batch = collate([planned[0, i] for i in (3, 4, 5)])
    assert isinstance(batch["files"], Encoded)
    assert show(batch["files"].decode(CPU, fails), batch["plan"], 40).shape == (3, 3, 40, 40)


def test_by_default_a_gpu_decodes_where_it_can(mixed, monkeypatch):
    def data(augment: Augment, device: str) -> object:
        recipe = get("small_data.pale_nano").override(
            {"data.root": str(mixed.root), "data.hold_out": "0.3", "data.train": "."}
        )
        return vary(recipe, augment=augment).task().train_data(torch.device(device))

    for file in mixed.root.glob("class/[def].*"):  # those that a GPU cannot decode
        file.rename(file.with_suffix(".aside"))
    assert isinstance(data(Augment(), "cpu"), Labelled)
    if not torch.cuda.is_available():  # torchvision says that it cannot
        assert isinstance(data(Augment(), "cuda"), Labelled)
    monkeypatch.setattr(on_device, "decode_all", lambda files, device: files)
    assert isinstance(data(Augment(), "cuda"), Planned)
    augmix = Augment(auto="augmix-m5-w4-d2")  # which workers alone do
    assert isinstance(data(augmix, "cuda"), Labelled)
    with monkeypatch.context() as patch:
        patch.setattr(on_device, "MODERATE", 1000)  # pixels: the pictures are too large
        assert isinstance(data(Augment(), "cuda"), Labelled)
    for file in mixed.root.glob("class/*.aside"):
        file.rename(file.with_suffix(".png" if file.stem == "f" else ".jpg"))
    assert isinstance(data(Augment(), "cuda"), Labelled)


EVERYTHING = Augment(auto="rand-m9-n4-mstd0.5-inc1", erase=0.5, vertical_flip=0.5)


@needs_triton
@pytest.mark.skipif(not INTERPRETED, reason="kernels take CPU tensors in the interpreter alone")
@pytest.mark.parametrize("size", [9, 33, 130])
def test_kernels_make_the_images_of_plain_pytorch(photos, size):
    pictures = Pictures(photos)
    planned = Planned(photos, Planner(size, EVERYTHING), 3, pictures.sizes)
    plan = collate([planned[2, i] for i in range(24)])["plan"]
    assert {name for name, *_ in plan.steps} == set(augmenting.OPERATIONS)
    launches.clear()
    ours = show(pictures.on(CPU), plan, size)
    turns = {"look_up_tables": plan.turns, "operate": plan.turns}
    assert launches == {"crop_rows": 1, "crop_columns": 1, "erase": 1} | turns
    plain = augmenting.show_plain(pictures.on(CPU), plan, size)
    difference = (ours.int() - plain.int()).abs().float()
    assert (difference > 0).float().mean() < 0.01
    assert difference.mean((1, 2, 3)).max() < 1


@needs_triton
@pytest.mark.skipif(INTERPRETED, reason="nothing is compiled in the interpreter")
@pytest.mark.parametrize("capability", [75, 90])
def test_kernels_compile(photos, monkeypatch, capability):
    compiled: list[str] = []
    monkeypatch.setattr(augmenting, "launch", compiling(capability, compiled))
    pictures = Pictures(photos)
    planned = Planned(photos, Planner(48, EVERYTHING), 3, pictures.sizes)
    plan = collate([planned[2, i] for i in range(24)])["plan"]
    augmenting.show_fused(pictures.on(CPU), plan, 48)
    assert set(compiled) == {"crop_rows", "crop_columns", "look_up_tables", "operate", "erase"}


@pytest.mark.slow
@needs_triton
@pytest.mark.skipif(INTERPRETED, reason="this is it")
def test_everything_in_the_interpreter():
    in_the_interpreter(__file__)


@pytest.mark.gpu
def test_a_gpu_makes_the_same_images_without_waiting(photos):
    device = torch.device("cuda")
    pictures = Pictures(photos)
    planned = Planned(photos, Planner(48, Augment()), 7, pictures.sizes)
    plan = collate([planned[1, i] for i in range(len(photos))])["plan"]
    expected = augmenting.show_plain(pictures.on(CPU), plan, 48).int()
    there = pictures.on(device)
    show(there, plan.to(device), 48)  # what is kept for later is made
    moved = plan.pin_memory().to(device, non_blocking=True)
    try:
        torch.cuda.set_sync_debug_mode("error")
        found = show(there, moved, 48)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    difference = (found.cpu().int() - expected).abs().float()
    assert (difference <= 2).float().mean() > 0.97
    assert torch.equal(found, show(there, moved, 48))


@pytest.mark.gpu
def test_a_gpu_decodes_files(mixed):
    planned = Planned(mixed, Planner(40, AUGMENTS["crop alone"]), 1)
    batch = collate([planned[0, i] for i in range(6)])
    expected = show(batch["files"].decode(CPU, fails), batch["plan"], 40)
    device = torch.device("cuda")
    found = show(batch["files"].decode(device, fails), batch["plan"].to(device), 40)
    # nvJPEG's inverse transform and its colours of half the resolution are not libjpeg's.
    assert (found.cpu().int() - expected.int()).abs().float().mean() < 3
