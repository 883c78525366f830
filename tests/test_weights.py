import pickle
import subprocess
import sys

import pytest
import torch

import pale
from pale import weights


@pytest.fixture
def model():
    return pale.create_model("pale_nano", num_classes=5)


def test_safetensors_keep_weights_and_what_is_said_about_them(tmp_path, model):
    path = tmp_path / "a.safetensors"
    weights.save(path, model.state_dict(), {"classes": ["x"], "step": 3})
    found = weights.load(path)
    assert found.about == {"classes": ["x"], "step": 3}
    other = pale.create_model("pale_nano", num_classes=5)
    weights.put(other, found, path, new_head=False)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name])


@pytest.mark.parametrize(
    "wrap", [lambda s: s, lambda s: {"model": {"module." + k: v for k, v in s.items()}}]
)
def test_foreign_pth_is_read_with_a_warning(tmp_path, model, wrap):
    path = tmp_path / "a.pth"
    torch.save(wrap(model.state_dict()), path)
    with pytest.warns(UserWarning, match=r"a\.pth is a pickle"):
        found = weights.load(path)
    weights.put(pale.create_model("pale_nano", num_classes=5), found, path, new_head=False)


class Evil:
    ran = False

    def __reduce__(self):
        return setattr, (Evil, "ran", True)


@pytest.mark.parametrize("writer", [torch.save, lambda x, p: p.write_bytes(pickle.dumps(x))])
def test_nothing_but_tensors_is_ever_unpickled(tmp_path, writer):
    path = tmp_path / "evil.pth"
    writer({"w": Evil()}, path)
    with pytest.raises(ValueError, match="nothing else is ever unpickled") as error:
        weights.load(path)
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
    found = weights.Weights(model.state_dict())
    other = pale.create_model("pale_nano", num_classes=7)
    with pytest.raises(
        ValueError, match=r"for 5 classes, the data has 7; set model\.new_head=true"
    ):
        weights.put(other, found, "a.safetensors", new_head=False)
    head = other.head.fc.weight.detach().clone()
    weights.put(other, found, "a.safetensors", new_head=True)
    assert torch.equal(other.head.fc.weight, head)
    assert torch.equal(other.stages[0].merge.conv.weight, model.stages[0].merge.conv.weight)


def test_position_maps_fit_another_size(model):
    small = pale.create_model("pale_nano", num_classes=5, position="ape", img_size=64)
    large = pale.create_model("pale_nano", num_classes=5, position="ape", img_size=96)
    weights.put(large, weights.Weights(small.state_dict()), "x", new_head=False)
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
        weights.put(other, weights.Weights(model.state_dict()), "x", new_head=True)


def test_damaged_missing_and_empty_places_are_named(tmp_path, model):
    path = tmp_path / "a.safetensors"
    with pytest.raises(ValueError, match="there are no weights at"):
        weights.load(path)
    with pytest.raises(ValueError, match=r"holds no weights\.safetensors"):
        weights.load(tmp_path)
    weights.save(path, model.state_dict(), {})
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(ValueError, match=r"a\.safetensors is damaged"):
        weights.load(path)
    torch.save([1, 2], tmp_path / "list.pt")
    with (
        pytest.warns(UserWarning, match="pickle"),
        pytest.raises(ValueError, match="no table of tensors"),
    ):
        weights.load(tmp_path / "list.pt")
