"""Models recorded as CUDA graphs by `pale.optimize`: moved, shared between streams and threads, copied."""

from __future__ import annotations

import copy
import pickle
import threading

import pytest
import torch
from torch import nn

import pale
from pale.model.optimize import Graphed


@pytest.fixture
def recorded() -> nn.Module:
    model = pale.create_model("pale_nano", num_classes=5).cuda().eval()
    return pale.optimize(model, cuda_graph=True)


@pytest.fixture
def images() -> torch.Tensor:
    return torch.randn(3, 2, 3, 64, 64, device="cuda", dtype=torch.bfloat16)


@pytest.mark.gpu
def test_every_replay_gives_the_outputs_of_its_own_images(recorded, images):
    plain = recorded.model
    for x in (*images, images[0], images[1, :1]):
        with torch.no_grad():
            assert torch.equal(recorded(x), plain(x))


@pytest.mark.gpu
def test_a_model_that_was_moved_is_recorded_again(recorded, images):
    expected = recorded(images[0])
    recorded.cpu()
    # Take the memory of the weights, at whose addresses the old recording would read.
    tensors = [t for t in recorded.state_dict().values() if t.is_floating_point()]
    held = [torch.full_like(t, float("nan"), device="cuda") for t in tensors for _ in range(4)]
    recorded.cuda()
    assert torch.equal(recorded(images[0]), expected)
    del held


@pytest.mark.gpu
def test_calls_on_two_streams_do_not_exchange_their_images(recorded, images):
    expected = [recorded(x) for x in images[:2]]
    streams = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(streams[0]):
        torch.cuda._sleep(200_000_000)  # a tenth of a second
        first = recorded(images[0])
    with torch.cuda.stream(streams[1]):
        second = recorded(images[1])
    torch.cuda.synchronize()
    assert torch.equal(first, expected[0])
    assert torch.equal(second, expected[1])


@pytest.mark.gpu
def test_a_recording_lets_another_thread_pin_memory(recorded):
    stop, errors = threading.Event(), []

    def pin() -> None:
        size = 1 << 20
        while not stop.is_set():
            try:
                torch.empty(size, dtype=torch.uint8).pin_memory()
            except RuntimeError as error:
                errors.append(error)
            size += 1 << 20

    thread = threading.Thread(target=pin)
    thread.start()
    try:
        for side in (32, 64, 96):
            recorded(torch.randn(1, 3, side, side, device="cuda", dtype=torch.bfloat16))
    finally:
        stop.set()
        thread.join()
    assert errors == []


@pytest.mark.gpu
def test_a_shape_first_seen_in_inference_mode_also_works_outside_it(recorded, images):
    with torch.inference_mode():
        expected = recorded(images[0]).clone()
    assert torch.equal(recorded(images[0]), expected)


def test_a_copy_has_no_recordings():
    model = Graphed(nn.Linear(2, 3))
    model.graphs["recording"] = None
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert not again.graphs
        assert torch.equal(again.weight, model.weight)
        assert again.lock is not model.lock
