"""Advice after a prediction ran out of memory."""

from __future__ import annotations

from collections.abc import Sequence

from ..core.memory import Memory, short_reason
from ..errors import MemoryShortageError


def prediction_shortage(
    memory: Memory, error: BaseException, sizes: Sequence[tuple[int, int]], batch: int
) -> MemoryShortageError:
    """Return an error that lists ways to use less memory.

    Args:
        memory: which memory ran out.
        error: the allocator's error.
        sizes: width and height of the images of the call.
        batch: batch size.
    """
    w, h = max(sizes, key=lambda size: size[0] * size[1])
    ways = [f"a smaller batch (now {batch})"] * (min(batch, len(sizes)) > 1)
    ways += ["smaller images", "the CPU (device)"] if memory == "GPU" else ["smaller images"]
    return MemoryShortageError(
        f"out of {memory} memory ({short_reason(error)}) with {len(sizes)} images of up to {w}x{h}; each of these "
        f"needs less: {', '.join(ways)}, or a smaller model"
    )
