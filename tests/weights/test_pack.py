"""Packed weights: the error is bounded, and damage is noticed."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import pale
from pale.weights import pack as packing
from pale.weights.compare import load_into
from pale.weights.read import load_weights
from pale.weights.write import save_weights
from pale.weights.zoo import file_sha256


@st.composite
def tables(draw):
    """Return tensors of all kinds that a model has, with tiny to huge values."""
    found = {}
    for i in range(draw(st.integers(1, 4))):
        shape = draw(st.lists(st.integers(0, 7), min_size=0, max_size=3))
        if draw(st.booleans()):
            shape = [*shape, draw(st.sampled_from([31, 32, 33, 64]))]
        generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
        values = torch.randn(shape, generator=generator)
        values = values * 10.0 ** draw(st.integers(-44, 37))
        if draw(st.booleans()) and values.ndim:
            values[:1] = 0
        kind = draw(st.sampled_from([torch.float32, torch.float64, torch.float16, torch.int64]))
        found[f"t{i}"] = values.nan_to_num(posinf=1.0, neginf=-1.0).to(kind)
        if found[f"t{i}"].is_floating_point():
            found[f"t{i}"] = found[f"t{i}"].nan_to_num(posinf=1.0, neginf=-1.0)
    return found


@settings(max_examples=60, deadline=None)
@given(table=tables())
def test_every_entry_is_restored_within_half_a_quantisation_step(table):
    found = packing.unpack_tensors(packing.pack_tensors(table))
    assert found.keys() == table.keys()
    for name, before in table.items():
        after = found[name]
        assert after.shape == before.shape
        if not before.is_floating_point():
            assert torch.equal(after, before)
            continue
        assert after.dtype is torch.float32
        assert after.isfinite().all()
        before = before.float()
        if before.ndim < 2 or before.numel() == 0:
            assert torch.equal(after, before)
            continue
        rows, back = before.flatten(1).double(), after.flatten(1).double()
        short = rows.shape[1] < packing.MIN_ROW
        most = rows.abs().max() / 2048 if short else rows.abs().amax(1, keepdim=True) / 254
        # Beyond that: float32's own rounding, and its smallest steps.
        assert ((back - rows).abs() <= most * 1.0001 + 2e-43).all()


def test_packed_tensors_follow_the_format():
    table = {
        "linear.weight": torch.randn(8, 32),
        "depthwise.weight": torch.randn(8, 1, 3, 3),
        "tiny.weight": torch.randn(8, 2) * 1e-6,
        "norm.weight": torch.randn(64),
        "count": torch.tensor(3),
    }
    stored = packing.pack_tensors(table)
    kinds = {name: tensor.dtype for name, tensor in stored.items()}
    assert kinds == {
        "linear.weight": torch.int8,
        "linear.weight::scale": torch.float32,
        "depthwise.weight": torch.float16,
        "tiny.weight": torch.float32,  # too small for float16
        "norm.weight": torch.float32,
        "count": torch.int64,
    }
    assert stored["linear.weight"].abs().amax(1).eq(127).all()


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"a": torch.tensor([[float("nan")]])}, "a holds NaN or Inf"),
        ({"a::scale": torch.ones(2)}, "cannot end in '::scale'"),
        ({"a": torch.ones(2, 2, dtype=torch.int8)}, "a is int8 already"),
    ],
    ids=["nan", "name", "int8"],
)
def test_what_cannot_be_packed_is_refused(table, message):
    with pytest.raises(ValueError, match=message):
        packing.pack_tensors(table)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return pale.create_model("pale_nano", num_classes=37).eval()


def test_a_packed_model_is_small_and_computes_nearly_the_same(tmp_path, model):
    about = {"classes": ["a"], "recipe": {"name": "x"}}
    for name, packed in (("float", False), ("packed", True), ("again", True)):
        save_weights(tmp_path / f"{name}.safetensors", model.state_dict(), about, packed=packed)
    size = {path.stem: path.stat().st_size for path in tmp_path.iterdir()}
    assert size["packed"] < 0.29 * size["float"]
    assert file_sha256(tmp_path / "packed.safetensors") == file_sha256(
        tmp_path / "again.safetensors"
    )
    found = load_weights(tmp_path / "packed.safetensors")
    assert found.about == about
    other = pale.create_model("pale_nano", num_classes=37).eval()
    load_into(other, found, "x", new_head=False)
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        before, after = model(images), other(images)
    # Measured with these random weights: 0.016 to 0.020.
    assert (after - before).norm() < 0.03 * before.norm()


@pytest.fixture
def packed(tmp_path):
    path = tmp_path / "small.safetensors"
    table = {"a.weight": torch.randn(4, 40), "a.bias": torch.randn(4)}
    save_weights(path, table, {"step": 1}, packed=True)
    return path


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_every_wrong_byte_is_noticed(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("packed") / "small.safetensors"
    torch.manual_seed(0)
    table = {"a.weight": torch.randn(4, 40), "a.bias": torch.randn(4)}
    save_weights(path, table, {"step": 1}, packed=True)
    content = bytearray(path.read_bytes())
    begin = 8 + int.from_bytes(content[:8], "little")
    where = data.draw(st.integers(begin, len(content) - 1))
    content[where] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"small\.safetensors is damaged \(its bytes are not"):
        load_weights(path)


def test_a_cut_file_is_damaged(packed):
    packed.write_bytes(packed.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"small\.safetensors is damaged"):
        load_weights(packed)


def test_another_format_asks_for_an_update(packed):
    packed_as = {"packed": {"format": 2, "crc32": 0}}
    save_file({"a": torch.ones(1)}, packed, metadata={"pale": json.dumps(packed_as)})
    with pytest.raises(ValueError, match=r"packed in format 2, this version reads 1; update"):
        load_weights(packed)


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        ({"a": torch.ones(2, 2, dtype=torch.int8)}, "a has no scales"),
        ({"a::scale": torch.ones(2)}, "scales without their matrix: a::scale"),
    ],
    ids=["matrix", "scales"],
)
def test_parts_that_do_not_belong_together_are_refused(packed, stored, message):
    how = {"format": 1, "crc32": packing.checksum(stored)}
    save_file(stored, packed, metadata={"pale": json.dumps({"packed": how})})
    with pytest.raises(ValueError, match=rf"damaged \({message}"):
        load_weights(packed)
