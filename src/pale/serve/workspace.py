"""Memory that the models need for their work, measured when a server starts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from ..predict.bundle import ModelBundle
from .graphs import OUTPUT_COPIES, TensorGraph
from .limits import MAX_MODEL_PIXELS, memory_trimmer

PROBE_SIDE = 256  # pixels
DEFAULT_BYTES = 2048  # per pixel, if the system does not report its peak
MARGIN = 1.25  # factor by which the first measurement may be too low
LOGITS_MB = 128  # of a segmenter's logits at the size of the image, which are computed in blocks


def measure(bundle: ModelBundle, device: torch.device, batch: int) -> int:
    """Return the maximum host memory of a model in bytes, without results at the size of images.

    Args:
        bundle: the model.
        device: its device; on a GPU it needs almost no host memory.
        batch: maximum batch size.
    """
    pipeline, logits = bundle.pipeline, bundle.pipeline.logits_bytes
    if device.type != "cpu":
        return logits
    side = pipeline.probe_side(PROBE_SIDE)
    count = max(1, PROBE_SIDE**2 // side**2)
    images = torch.full((count, 3, side, side), 128, dtype=torch.uint8)

    @torch.no_grad()
    def run() -> None:
        pipeline.forward(bundle.model, list(images))

    peak = peak_memory(run)
    pixels = count * side**2
    per_pixel = DEFAULT_BYTES if peak is None else MARGIN * peak / pixels
    return logits + int(per_pixel * pipeline.max_seen(batch, MAX_MODEL_PIXELS))


def measure_graph(graph: TensorGraph) -> int:
    """Return the maximum host memory of a model on preprocessed tensors in bytes, without its outputs."""
    if graph.device.type != "cpu":
        return 0
    # A part does not grow with the image, such as that of the regions of a detector: measure at two sizes.
    sides = [graph.side or side for side in (PROBE_SIDE // 2, PROBE_SIDE)]
    peaks = []
    for side in sides:
        image = torch.zeros(1, 3, side, side)
        peak = peak_memory(lambda image=image: graph([image]))  # type: ignore[misc]
        if peak is None:
            return DEFAULT_BYTES * graph.pixels
        peaks.append(max(0, peak - OUTPUT_COPIES * graph.output_bytes((1, side, side))))
    small, large = (side**2 for side in sides)
    if small == large:
        return int(MARGIN * max(peaks) * graph.pixels / large)
    per_pixel = max(0.0, (peaks[1] - peaks[0]) / (large - small))
    return int(MARGIN * (max(0.0, peaks[1] - per_pixel * large) + per_pixel * graph.pixels))


def peak_memory(work: Callable[[], object]) -> int | None:
    """Return the growth of this process in bytes during `work`; None if the system does not report it."""
    work()  # what is allocated only once is not part of it
    memory_trimmer()()
    try:
        Path("/proc/self/clear_refs").write_text("5")  # reset the peak
        before = _process_status("VmRSS")
        work()
        return max(0, _process_status("VmHWM") - before)
    except (OSError, LookupError):
        return None


def _process_status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return 1024 * int(line.split()[1])
    raise LookupError(name)
