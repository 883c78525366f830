"""Training lowers the loss, on every back-end, eager and compiled."""

import math

import pytest
import torch
import torch.nn.functional as F

import pale

CLASSES = 8


def gratings(
    batch: int, size: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return noisy stripes in one of eight directions, of random phase and width: a few pixels are not enough."""
    label = torch.randint(CLASSES, (batch,), generator=generator)
    angle = label * math.pi / CLASSES
    width = 4 + 4 * torch.rand(batch, generator=generator)
    phase = 2 * math.pi * torch.rand(batch, generator=generator)
    i, j = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    along = i * angle.cos()[:, None, None] + j * angle.sin()[:, None, None]
    wave = torch.sin(2 * math.pi * along / width[:, None, None] + phase[:, None, None])
    noise = torch.randn(batch, 3, size, size, generator=generator)
    return wave[:, None] + noise, label


def final_loss(
    device: str, mode: str, *, steps: int, size: int, dtype: torch.dtype, **arguments
) -> float:
    """Return the mean training loss over the last fifth of the steps."""
    torch.manual_seed(0)
    model = pale.create_model("pale_nano", num_classes=CLASSES, stem_stride=2, **arguments).to(
        device
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
    network = torch.compile(model) if mode == "compiled" else model
    generator = torch.Generator().manual_seed(1)
    losses = []
    for step in range(steps):
        for group in optimizer.param_groups:
            # Down to 0: at a constant rate the loss of single steps jumps, and the mean of a few is noise.
            group["lr"] = 2e-3 * min(1, (step + 1) / 10) * (1 - step / steps)
        x, label = (t.to(device) for t in gratings(32, size, generator))
        with torch.autocast(device, dtype, enabled=dtype != torch.float32):
            loss = F.cross_entropy(network(x).float(), label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(math.log(CLASSES), rel=0.1)
    last = losses[-steps // 5 :]
    return sum(last) / len(last)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_small_model_learns_on_cpu(mode):
    # Stage maps of 16, 8, 4 and 2: groups of one, of several, and ragged ones.
    loss = final_loss(
        "cpu", mode, steps=60, size=32, dtype=torch.float32, depths=(1, 1, 1, 1), pale_size=3
    )
    assert loss < 0.5 * math.log(CLASSES)


ON_GPU = {"steps": 150, "size": 56, "dtype": torch.bfloat16}


@pytest.fixture(scope="module")
def expected() -> float:
    """Return the loss that the reference back-end reaches."""
    return final_loss("cuda", "eager", backend="reference", **ON_GPU)


@pytest.mark.slow
@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["auto", "sdpa"])
@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_model_learns_on_gpu_as_well_as_the_reference_does(backend, mode, expected):
    loss = final_loss("cuda", mode, backend=backend, **ON_GPU)
    assert expected < 0.3 * math.log(CLASSES)
    assert loss == pytest.approx(expected, abs=0.05 * math.log(CLASSES))
