import json
import pickle
import subprocess
import sys
import zipfile

import pytest
import torch
from safetensors.torch import save_file

import pale
from pale.errors import WeightsError
from pale.weights.compare import load_into
from pale.weights.read import PickleWarning, Weights, load_header, load_rest, load_weights
from pale.weights.write import save_weights


@pytest.fixture
def model():
    return pale.create_model("pale_nano", num_classes=5)


def test_safetensors_keep_weights_and_header(tmp_path, model):
    path = tmp_path / "a.safetensors"
    save_weights(path, model.state_dict(), {"classes": ["x"], "step": 3})
    found = load_weights(path)
    assert found.about == {"classes": ["x"], "step": 3}
    other = pale.create_model("pale_nano", num_classes=5)
    load_into(other, found, path, new_head=False)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name])


@pytest.mark.parametrize(
    "wrap", [lambda s: s, lambda s: {"model": {"module." + k: v for k, v in s.items()}}]
)
def test_a_pth_file_of_another_project_is_read_with_a_warning(tmp_path, model, wrap):
    path = tmp_path / "a.pth"
    torch.save(wrap(model.state_dict()), path)
    with pytest.warns(UserWarning, match=r"a\.pth is a pickle"):
        found = load_weights(path)
    load_into(pale.create_model("pale_nano", num_classes=5), found, path, new_head=False)


class Evil:
    ran = False

    def __reduce__(self):
        return setattr, (Evil, "ran", True)


@pytest.mark.parametrize("writer", [torch.save, lambda x, p: p.write_bytes(pickle.dumps(x))])
def test_only_tensors_are_unpickled(tmp_path, writer):
    path = tmp_path / "evil.pth"
    writer({"w": Evil()}, path)
    with pytest.raises(ValueError, match="nothing else is ever unpickled") as error:
        load_weights(path)
    assert not Evil.ran
    assert "weights_only" not in str(error.value)  # PyTorch's advice is how to run it
    reason = "it asks for " if writer is torch.save else "it is damaged, or holds more"
    assert reason in str(error.value)


def test_the_command_line_warns_of_a_pickle_in_one_line(tmp_path, model):
    path = tmp_path / "a.pth"
    torch.save(model.state_dict(), path)
    command = [sys.executable, "-m", "pale", "eval", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stderr.startswith("pale: a.pth is a pickle, read as tensors alone\npale: ")


def test_other_classes_need_a_new_head(tmp_path, model):
    found = Weights(model.state_dict())
    other = pale.create_model("pale_nano", num_classes=7)
    with pytest.raises(
        ValueError, match=r"for 5 classes, the data has 7; set model\.new_head=true"
    ):
        load_into(other, found, "a.safetensors", new_head=False)
    head = other.head.fc.weight.detach().clone()
    load_into(other, found, "a.safetensors", new_head=True)
    assert torch.equal(other.head.fc.weight, head)
    assert torch.equal(other.stages[0].merge.conv.weight, model.stages[0].merge.conv.weight)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["head.fc.weight", "stages.0.merge.norm.bias"])
def test_weights_with_nan_or_inf_are_refused(model, name, value):
    """They predicted the last class with a probability of NaN, which is not valid JSON, without an error."""
    tensors = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    tensors[name].view(-1)[3] = value
    other = pale.create_model("pale_nano", num_classes=5)
    with pytest.raises(WeightsError, match=rf"a\.safetensors has NaN or Inf in {name}"):
        load_into(other, Weights(tensors), "a.safetensors", new_head=False)
    assert all(parameter.isfinite().all() for parameter in other.parameters())


def test_buffers_may_be_infinite_and_integers_are_finite():
    model = torch.nn.BatchNorm2d(3)
    model.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
    load_into(model, Weights(model.state_dict()), "a.safetensors", new_head=False)
    wrong = model.state_dict() | {"running_mean": torch.full((3,), torch.nan)}
    with pytest.raises(WeightsError, match="NaN or Inf in running_mean"):
        load_into(model, Weights(wrong), "a.safetensors", new_head=False)


def test_a_classifier_without_dimensions_is_refused(model):
    tensors = model.state_dict() | {"head.fc.bias": torch.tensor(1.0)}
    with pytest.raises(WeightsError, match="holds weights for 1 classes, the data has 5"):
        load_into(model, Weights(tensors), "a.safetensors", new_head=False)


def test_position_maps_fit_another_size(model):
    small = pale.create_model("pale_nano", num_classes=5, position="ape", img_size=64)
    large = pale.create_model("pale_nano", num_classes=5, position="ape", img_size=96)
    load_into(large, Weights(small.state_dict()), "x", new_head=False)
    assert large.stages[0].ape.map.shape == (1, 24, 24, 32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"position": "none"}, "unknown stages.0.blocks.0.cpe.bias"),
        ({"depths": (2, 2, 4, 3)}, "missing stages.3.blocks.2"),
        ({"channels": (32, 64, 128, 204)}, r"is \(.*\), expected \("),
    ],
    ids=["unknown", "missing", "shape"],
)
def test_weights_of_another_model_name_what_differs(model, change, message):
    other = pale.create_model("pale_nano", num_classes=5, **change)
    with pytest.raises(ValueError, match=message):
        load_into(other, Weights(model.state_dict()), "x", new_head=True)


def test_damaged_missing_and_empty_places_are_named(tmp_path, model):
    path = tmp_path / "a.safetensors"
    with pytest.raises(ValueError, match="there are no weights at"):
        load_weights(path)
    with pytest.raises(ValueError, match=r"holds no weights\.safetensors"):
        load_weights(tmp_path)
    save_weights(path, model.state_dict(), {})
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(ValueError, match=r"a\.safetensors is damaged"):
        load_weights(path)
    torch.save([1, 2], tmp_path / "list.pt")
    with (
        pytest.warns(UserWarning, match="pickle"),
        pytest.raises(ValueError, match="no table of tensors"),
    ):
        load_weights(tmp_path / "list.pt")


def written(path, packed):
    tensors = {"a": torch.randn(3, 40), "b": torch.randn(7), "n": torch.tensor(3)}
    about = {"classes": ["x", "y"], "step": 3, "figures": {"top1": 1 / 3, "loss": float("nan")}}
    save_weights(path, tensors, about, packed)


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
def test_every_flipped_bit_is_noticed_or_changes_nothing(tmp_path, packed):
    path = tmp_path / "weights.safetensors"
    written(path, packed)
    right, content = load_weights(path), bytearray(path.read_bytes())
    header = 8 + int.from_bytes(content[:8], "little")
    noticed = 0
    for place in range(len(content)):
        content[place] ^= 1 << place % 8
        path.write_bytes(content)
        content[place] ^= 1 << place % 8
        try:
            found = load_weights(path)
        except ValueError as error:
            noticed += "damaged" in str(error) or "is packed in format" in str(error)
            continue
        assert place < header
        assert found.tensors.keys() == right.tensors.keys()
        assert all(torch.equal(found.tensors[n], t) for n, t in right.tensors.items())
    # The rest are bits of keys: of "__metadata__", "pale" and "crc32", without which it is an earlier version's file.
    assert len(content) - 32 < noticed < len(content)


def test_a_flipped_bit_in_the_weights_of_a_run_is_noticed(tmp_path, model):
    path = tmp_path / "weights.safetensors"
    save_weights(path, model.state_dict(), {"recipe": {}, "classes": list("abcde")})
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"damaged \(its bytes are not those that were written"):
        load_weights(tmp_path)


def test_files_without_a_checksum_are_read(tmp_path, model):
    about = {"classes": ["x"], "step": 3}
    path = tmp_path / "a.safetensors"
    save_file(model.state_dict(), path, metadata={"pale": json.dumps(about)})
    assert load_weights(path).about == about
    save_file(model.state_dict(), path)
    assert load_weights(path).about == {}


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
def test_a_header_holds_names_and_shapes(tmp_path, packed):
    path = tmp_path / "a.safetensors"
    written(path, packed)
    whole, header = load_weights(path), load_header(path)
    assert not header.whole
    assert {n: t.shape for n, t in header.tensors.items()} == {
        n: t.shape for n, t in whole.tensors.items()
    }
    assert all(t.is_meta for t in header.tensors.values())
    assert header.about["classes"] == ["x", "y"]
    assert header.about.keys() == whole.about.keys()
    assert load_rest(header, path).tensors.keys() == whole.tensors.keys()
    assert load_rest(whole, path) is whole


def test_classes_that_could_not_be_read_again_are_not_written(tmp_path):
    path = tmp_path / "a.safetensors"
    with pytest.raises(ValueError, match=r"70000 classes .* at most 65536 and 1000 are allowed"):
        save_weights(path, {"w": torch.zeros(1)}, {"classes": ["x"] * 70_000})
    assert not path.exists()


def test_compressed_archives_are_refused_before_they_are_unpacked(tmp_path):
    """A megabyte of zeros in a kilobyte, which PyTorch would decompress."""
    plain, packed = tmp_path / "a.pth", tmp_path / "b.pth"
    torch.save({"w": torch.zeros(1 << 18)}, plain)
    with zipfile.ZipFile(plain) as source, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as to:
        for entry in source.infolist():
            to.writestr(entry.filename, source.read(entry))
    with pytest.raises(ValueError, match=r"b\.pth is compressed, \d+ bytes in \d+; write it with"):
        load_weights(packed)


@pytest.mark.parametrize(
    "odd",
    [
        lambda x: x.to_sparse(),
        lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
        lambda x: x.to("meta"),
    ],
    ids=["sparse", "quantised", "meta"],
)
@pytest.mark.filterwarnings("ignore:.*:UserWarning")
@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")
def test_tensors_that_no_model_accepts_are_refused(tmp_path, odd):
    path = tmp_path / "a.pth"
    torch.save({"w": odd(torch.zeros(3, 4))}, path)
    with pytest.raises(ValueError, match="holds no table of tensors"):
        load_weights(path)


@pytest.mark.parametrize("shape", [(5,), (0, 2, 2, 32), (1, 2, 2, 31), (1, 0, 2, 32)])
def test_position_maps_of_strange_shapes_are_refused(shape):
    model = pale.create_model("pale_nano", num_classes=5, position="ape", img_size=64)
    tensors = model.state_dict() | {"stages.0.ape.map": torch.zeros(shape)}
    with pytest.raises(ValueError, match=r"stages\.0\.ape\.map is \(.*\), expected"):
        load_into(model, Weights(tensors), "x", new_head=False)


def test_tensors_that_repeat_their_bytes_are_refused_and_tied_ones_are_read(tmp_path):
    one = torch.zeros(1)
    torch.save({"w": one.expand(10**6, 10**5)}, tmp_path / "a.pth")
    with (
        pytest.warns(PickleWarning),
        pytest.raises(ValueError, match="which repeat each other"),
    ):
        load_weights(tmp_path / "a.pth")
    tied = torch.zeros(1000, 10)
    torch.save({"a": tied, "b": tied}, tmp_path / "b.pth")
    with pytest.warns(PickleWarning):
        assert load_weights(tmp_path / "b.pth").tensors.keys() == {"a", "b"}
