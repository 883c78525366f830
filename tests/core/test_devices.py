"""Choice of the device."""

import pytest
import torch

from pale.core.devices import choose_device
from pale.errors import SettingsError, UnavailableError


def test_the_cpu_can_be_named_and_is_the_default_without_a_gpu():
    assert choose_device("cpu") == torch.device("cpu")
    assert choose_device(torch.device("cpu")) == torch.device("cpu")
    assert choose_device().type == ("cuda" if torch.cuda.is_available() else "cpu")


def test_an_unknown_device_is_an_error():
    with pytest.raises(SettingsError, match="device must be 'cpu' or 'cuda', got 'gpu'"):
        choose_device("gpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("name", ["cuda", "cuda:1"])
def test_a_missing_gpu_is_an_error(name):
    with pytest.raises(UnavailableError, match=f"no CUDA device is available, got device '{name}'"):
        choose_device(name)
