"""Augmentation on the device, compared with Pillow and timm on single images.

It runs in PyTorch and as kernels: on a GPU, and on the CPU in Triton's interpreter, which must be selected before the
kernels are defined, so `test_everything_in_the_interpreter` runs this module again in a separate process.
"""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from support.processes import compiling, in_the_interpreter, needs_triton
from timm.data import auto_augment

from pale.core.settings import vary
from pale.data.gpu import augment as augmenting
from pale.data.gpu import decode as on_device
from pale.data.gpu.augment import augment_batch
from pale.data.gpu.decode import DecodedImages, EncodedBatch, PlannedDataset, collate
from pale.data.gpu.plans import BatchPlan, Planner
from pale.data.loader import ImageDataset
from pale.data.seeding import seeded
from pale.data.sources.images import read_folder
from pale.data.transforms.images import Augment, TrainTransform, to_tensor
from pale.data.transforms.slide import source_matrix
from pale.ops.launching import INTERPRETED, launches
from pale.recipes import get
from pale.train.evaluate import to_device

CPU = torch.device("cpu")
FILL = (124, 116, 104)


def photo(rng: np.random.Generator, h: int, w: int) -> Image.Image:
    """Return an image with gradients, edges and noise, as in photographs."""
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
def test_colour_operations_equal_pillows(function, amounts):
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
    # Pillow's float arithmetic may round to the neighbouring integer.
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
def test_geometric_operations_equal_pillows(function, amount, resample):
    images = [photo(np.random.default_rng(i), 40, 40) for i in range(2)]
    numbers = [
        *source_matrix(function, amount, 40)[:2].ravel(),
        resample == Image.Resampling.BICUBIC,
        *FILL,
    ]
    ours = augmenting.affine(as_batch(*images), torch.tensor([numbers] * 2, dtype=torch.float64))
    theirs = as_batch(*(function(i, amount, resample=resample, fillcolor=FILL) for i in images))
    difference = (ours - theirs).abs()
    assert (
        difference > 1
    ).float().mean() < 0.002  # a point on the edge may be outside because of rounding
    assert difference.mean() < 0.2


@settings(max_examples=40)
@given(
    length=st.integers(1, 70),
    more=st.integers(0, 9),
    size=st.integers(1, 60),
    mode=st.sampled_from(["bilinear", "bicubic"]),
    flip=st.booleans(),
)
def test_resizing_equals_torchs_with_antialiasing(length, more, size, mode, flip):
    row = torch.rand(1, 1, 1, length) * 255
    expected = torch.nn.functional.interpolate(row, (1, size), mode=mode, antialias=True)[0, 0, 0]
    w = augmenting.resize_weights(
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
    """Two classes of images of different sizes, in lossless files."""
    root = tmp_path_factory.mktemp("photos")
    rng = np.random.default_rng(3)
    for i in range(24):
        (root / f"class_{i % 2}").mkdir(exist_ok=True)
        h, w = rng.integers(20, 90, 2)
        photo(rng, int(h), int(w)).save(root / f"class_{i % 2}/{i}.png")
    return read_folder(root)


AUGMENTS = {
    "defaults": Augment(erase=0),
    "autoaugment": Augment(
        auto="original-mstd0.5", erase=0, interpolation="random", vertical_flip=0.5
    ),
    "jitter": Augment(auto=None, colour_jitter=0.4, erase=0, interpolation="bilinear"),
    "crop alone": Augment(auto=None, colour_jitter=0, erase=0),
}


def augment_both_ways(photos, augment, size=48, epochs=3):
    """Return the same samples augmented by a worker and on the device, and their keys."""
    keys = [(epoch, i) for epoch in range(epochs) for i in range(len(photos))]
    known = ImageDataset(photos, TrainTransform(size, augment), 7)
    decoded = DecodedImages(photos)
    planned = PlannedDataset(photos, Planner(size, augment), 7, decoded.sizes)
    batch = to_device(collate([planned[key] for key in keys]), CPU)
    assert batch["labels"].tolist() == [known[key][1] for key in keys]
    images = torch.stack([known[key][0] for key in keys])
    return images.int(), augment_batch(decoded.to(CPU), batch["plan"], size).int(), keys


@pytest.mark.parametrize("name", AUGMENTS)
def test_a_sample_looks_the_same_from_a_worker_and_on_the_device(photos, name):
    theirs, ours, _ = augment_both_ways(photos, AUGMENTS[name])
    difference = (ours - theirs).abs().float()
    # A rounding difference may be amplified by later operations (equalize, contrast) or cross a threshold (solarize);
    # therefore most pixels must agree, and all images on average.
    assert (difference <= 2).float().mean() > 0.97
    assert difference.mean((1, 2, 3)).median() < 0.6
    assert difference.mean((1, 2, 3)).max() < 12
    # Other augmentations of the same images differ far more.
    assert (ours - theirs.roll(24, 0)).abs().float().mean() > 10 * difference.mean()


def test_random_erasing_uses_timms_boxes_and_normal_noise(photos):
    augment = Augment(auto=None, colour_jitter=0, erase=1.0)
    theirs, ours, keys = augment_both_ways(photos, augment)
    plain, unerased, _ = augment_both_ways(photos, augment.model_copy(update={"erase": 0.0}))
    for ours_in, theirs_in in zip((ours != unerased).any(1), (theirs != plain).any(1), strict=True):
        assert (ours_in != theirs_in).float().mean() < 0.02  # noise may equal the old value
    assert (ours != unerased).float().mean() > 0.02
    first, again = (augment_both_ways(photos, augment)[1] for _ in range(2))
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
        image = photos.image(i)
        with seeded(1, 2, i):
            _, expected = transform.with_places(image)
        with seeded(1, 2, i):
            plan = planner.plan(i, *image.size, key=0)
        np.testing.assert_array_equal(plan.places, expected)


def test_operations_without_device_implementation_are_rejected_before_training():
    for augment, reason in (
        (Augment(auto="3a"), "needs|uses"),
        (Augment(auto="augmix-m5-w4-d2"), "augmix|AugMix"),
        (Augment(interpolation="lanczos"), "must be bilinear, bicubic or random .* got 'lanczos'"),
    ):
        with pytest.raises(ValueError, match=reason):
            Planner(32, augment)


def test_datasets_larger_than_the_memory_limit_are_rejected(photos):
    with pytest.raises(
        ValueError, match=r"at most .* GiB, and the first \d+ of 24 .* data.on_device=decoding"
    ):
        DecodedImages(photos, max_bytes=40_000)


def test_a_plan_is_two_tensors_and_may_be_pinned(photos):
    planned = PlannedDataset(photos, Planner(32, Augment()), 0, DecodedImages(photos).sizes)
    plan = collate([planned[0, i] for i in range(24)])["plan"]
    assert isinstance(plan, BatchPlan)
    assert plan.size == 24
    assert {plan.ints.ndim, plan.floats.ndim} == {1}
    moved = plan.to(torch.device("cpu"))
    assert torch.equal(moved.ints, plan.ints)


def fail_on_read(i):
    pytest.fail(f"image {i} was read on the CPU")


@pytest.fixture
def mixed(tmp_path):
    """Plain, grey and progressive JPEG files; one rotated by EXIF, one CMYK, one with transparency."""
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
    return read_folder(tmp_path / "files")


def test_files_that_the_device_cannot_decode_are_decoded_by_workers(mixed):
    augment = AUGMENTS["crop alone"]
    planned = PlannedDataset(mixed, Planner(40, augment), 1)
    batch = to_device(collate([planned[0, i] for i in range(6)]), CPU)
    files = batch["files"]
    assert [shape is None for _, shape in files.pieces] == [True, True, True, False, False, False]
    images = augment_batch(files.decode(CPU, fail_on_read), batch["plan"], 40)
    known = ImageDataset(mixed, TrainTransform(40, augment), 1)
    expected = torch.stack([known[0, i][0] for i in range(6)])
    assert (images.int() - expected.int()).abs().max() <= 3


def test_a_file_that_cannot_be_decoded_is_named(mixed):
    planned = PlannedDataset(mixed, Planner(40, AUGMENTS["crop alone"]), 1)
    whole = (mixed.root / "class/a.jpg").read_bytes()
    # Its header and its end are valid, and a marker that does not exist is between them.
    damaged = whole[: len(whole) // 3] + b"\xff\x02\xff\xc3" + whole[-2:]
    (mixed.root / "class/b.jpg").write_bytes(damaged)
    batch = collate([planned[0, i] for i in range(3)])
    with pytest.raises(ValueError, match=r"b\.jpg: cannot be read as an image"):
        batch["files"].decode(CPU, lambda i: to_tensor(mixed.image(i)))
    # A truncated file is not sent to the device, which may not notice.
    for content in (b"", b"not an image", whole[:40], whole[: len(whole) // 3]):
        (mixed.root / "class/b.jpg").write_bytes(content)
        with pytest.raises(ValueError, match=r"b\.jpg: cannot be read as an image"):
            planned[0, 1]
    (mixed.root / "class/b.jpg").unlink()
    with pytest.raises(ValueError, match=r"b\.jpg: there is no such file"):
        planned[0, 1]


def test_a_batch_of_pixels_alone_needs_no_decoder(mixed):
    planned = PlannedDataset(mixed, Planner(40, Augment()), 1)
    batch = collate([planned[0, i] for i in (3, 4, 5)])
    assert isinstance(batch["files"], EncodedBatch)
    assert augment_batch(batch["files"].decode(CPU, fail_on_read), batch["plan"], 40).shape == (
        3,
        3,
        40,
        40,
    )


def test_by_default_a_gpu_decodes_if_it_can(mixed, monkeypatch):
    (mixed.root / "other").mkdir()  # a classifier needs two classes
    for name in ("a.jpg", "b.jpg", "c.jpg"):
        shutil.copy(mixed.root / "class" / name, mixed.root / "other" / name)

    def data(augment: Augment, device: str) -> object:
        recipe = get("small_data.pale_nano").override(
            {"data.root": str(mixed.root), "data.hold_out": "0.3", "data.train": "."}
        )
        return vary(recipe, augment=augment).task().train_data(torch.device(device))

    for file in mixed.root.glob("class/[def].*"):  # those that a GPU cannot decode
        file.rename(file.with_suffix(".aside"))
    assert isinstance(data(Augment(), "cpu"), ImageDataset)
    if not torch.cuda.is_available():  # torchvision raises
        assert isinstance(data(Augment(), "cuda"), ImageDataset)
    monkeypatch.setattr(on_device, "decode_jpegs", lambda files, device: files)
    assert isinstance(data(Augment(), "cuda"), PlannedDataset)
    augmix = Augment(auto="augmix-m5-w4-d2")  # only in workers
    assert isinstance(data(augmix, "cuda"), ImageDataset)
    with monkeypatch.context() as patch:
        patch.setattr(on_device, "MAX_MEAN_PIXELS", 1000)  # the images are too large
        assert isinstance(data(Augment(), "cuda"), ImageDataset)
    for file in mixed.root.glob("class/*.aside"):
        file.rename(file.with_suffix(".png" if file.stem == "f" else ".jpg"))
    assert isinstance(data(Augment(), "cuda"), ImageDataset)


EVERYTHING = Augment(auto="rand-m9-n4-mstd0.5-inc1", erase=0.5, vertical_flip=0.5)


@needs_triton
@pytest.mark.skipif(not INTERPRETED, reason="kernels take CPU tensors only in the interpreter")
@pytest.mark.parametrize("size", [9, 33, 130])
def test_kernels_compute_the_same_images_as_pytorch(photos, size):
    decoded = DecodedImages(photos)
    planned = PlannedDataset(photos, Planner(size, EVERYTHING), 3, decoded.sizes)
    plan = collate([planned[2, i] for i in range(24)])["plan"]
    assert {name for name, *_ in plan.steps} == set(augmenting.OPERATIONS)
    launches.clear()
    ours = augment_batch(decoded.to(CPU), plan, size)
    turns = {"look_up_tables": plan.turns, "operate": plan.turns}
    assert launches == {"crop_rows": 1, "crop_columns": 1, "erase": 1} | turns
    plain = augmenting.augment_eager(decoded.to(CPU), plan, size)
    difference = (ours.int() - plain.int()).abs().float()
    assert (difference > 0).float().mean() < 0.01
    assert difference.mean((1, 2, 3)).max() < 1


@needs_triton
@pytest.mark.skipif(INTERPRETED, reason="nothing is compiled in the interpreter")
@pytest.mark.parametrize("capability", [75, 90])
def test_kernels_compile(photos, monkeypatch, capability):
    compiled: list[str] = []
    monkeypatch.setattr(augmenting, "launch", compiling(capability, compiled))
    decoded = DecodedImages(photos)
    planned = PlannedDataset(photos, Planner(48, EVERYTHING), 3, decoded.sizes)
    plan = collate([planned[2, i] for i in range(24)])["plan"]
    augmenting.augment_fused(decoded.to(CPU), plan, 48)
    assert set(compiled) == {"crop_rows", "crop_columns", "look_up_tables", "operate", "erase"}


@pytest.mark.slow
@needs_triton
@pytest.mark.skipif(INTERPRETED, reason="already in the interpreter")
def test_everything_in_the_interpreter():
    in_the_interpreter(__file__)


@pytest.mark.gpu
def test_a_gpu_computes_the_same_images_without_synchronising(photos):
    device = torch.device("cuda")
    decoded = DecodedImages(photos)
    planned = PlannedDataset(photos, Planner(48, Augment()), 7, decoded.sizes)
    plan = collate([planned[1, i] for i in range(len(photos))])["plan"]
    expected = augmenting.augment_eager(decoded.to(CPU), plan, 48).int()
    on_gpu = decoded.to(device)
    augment_batch(on_gpu, plan.to(device), 48)  # creates cached tensors
    moved = plan.pin_memory().to(device, non_blocking=True)
    try:
        torch.cuda.set_sync_debug_mode("error")
        found = augment_batch(on_gpu, moved, 48)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    difference = (found.cpu().int() - expected).abs().float()
    assert (difference <= 2).float().mean() > 0.97
    assert torch.equal(found, augment_batch(on_gpu, moved, 48))


@pytest.mark.gpu
def test_decoding_does_not_write_to_memory_that_queued_work_still_reads(tmp_path):
    # decode_jpeg itself fails this test: it wrote into activations, and training got NaN.
    device = torch.device("cuda")
    photo(np.random.default_rng(0), 256, 256).save(tmp_path / "a.jpg", quality=92)
    file = torch.frombuffer(bytearray((tmp_path / "a.jpg").read_bytes()), dtype=torch.uint8)
    on_device.decode_jpegs([file], device)  # sets up the decoder
    for _ in range(3):
        held = [torch.full((3, 256, 256), 7, dtype=torch.uint8, device=device) for _ in range(16)]
        torch.cuda.synchronize()
        torch.cuda._sleep(200_000_000)  # a tenth of a second
        sums = [x.sum() for x in held]
        del held  # the allocator may use their memory again, although it has not been read yet
        images = on_device.decode_jpegs([file] * 16, device)
        assert [int(x) for x in sums] == [7 * 3 * 256 * 256] * 16
    assert all(torch.equal(image, images[0]) for image in images)


@pytest.mark.gpu
def test_a_gpu_decodes_files(mixed):
    planned = PlannedDataset(mixed, Planner(40, AUGMENTS["crop alone"]), 1)
    batch = collate([planned[0, i] for i in range(6)])
    expected = augment_batch(batch["files"].decode(CPU, fail_on_read), batch["plan"], 40)
    device = torch.device("cuda")
    found = augment_batch(batch["files"].decode(device, fail_on_read), batch["plan"].to(device), 40)
    # nvJPEG's inverse DCT and chroma upsampling differ from libjpeg's.
    assert (found.cpu().int() - expected.int()).abs().float().mean() < 3
