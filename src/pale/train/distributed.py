"""The processes of a run: one alone, or those that torchrun started."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous


class AgreedError(ValueError):
    """An error of one process that all raise at the same place: what they do together they still can."""


@dataclass(frozen=True)
class World:
    """This process among all of them."""

    device: torch.device
    rank: int = 0
    size: int = 1

    @property
    def main(self) -> bool:
        """Whether this process writes files and speaks."""
        return self.rank == 0

    def any(self, *flags: bool) -> list[bool]:
        """For each flag, whether it is set on any process."""
        if self.size == 1:
            return list(flags)
        # On the CPU, so that no process waits for its GPU.
        values = torch.tensor(flags, dtype=torch.int32)
        dist.all_reduce(values, dist.ReduceOp.MAX)
        return [bool(value) for value in values.tolist()]

    def max_(self, value: torch.Tensor) -> None:
        """Set a tensor on the device to the greatest of all processes; the host does not wait."""
        if self.size > 1:
            dist.all_reduce(value, dist.ReduceOp.MAX)

    def average_(self, tensors: Sequence[torch.Tensor]) -> None:
        """Set tensors on the device to their means over the processes, in one exchange."""
        if self.size == 1 or not tensors:
            return
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        dist.all_reduce(flat)
        flat /= self.size
        parts = flat.split([tensor.numel() for tensor in tensors])
        views = [part.view(x.shape) for part, x in zip(parts, tensors, strict=True)]
        torch._foreach_copy_(list(tensors), views)

    def mean(self, value: float) -> float:
        """The mean over the processes."""
        if self.size == 1:
            return value
        total = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(total)
        return float(total) / self.size

    def gather(self, value: Any) -> list[Any]:
        """What every process holds, in order, on every process."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def agree(self, error: Exception | None) -> None:
        """Raise on every process what one of them has met."""
        for words in self.gather(None if error is None else str(error)):
            if words is not None:
                raise AgreedError(words)

    def share(self, value: Any) -> Any:
        """What the main process holds."""
        return self.gather(value)[0]


def leave(code: int) -> NoReturn:
    """End this process of several as any exit does, but for the interpreter's own end.

    There gloo's threads abort at times (seen after FSDP), and torchrun would take a finished run for a failed one.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


@contextmanager
def join(device: str | None = None) -> Iterator[World]:
    """Join the processes that torchrun started, or be alone.

    Args:
        device: "cpu" or "cuda"; by default CUDA where there is one.
    """
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError("there is no CUDA device here; leave out --device, or take cpu")
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        yield World(torch.device(kind))
        return
    local = int(os.environ.get("LOCAL_RANK", 0))
    if kind == "cuda":
        torch.cuda.set_device(local)
    backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
    store, rank, size = next(iter(rendezvous("env://")))
    if os.environ.get("GROUP_WORLD_SIZE") == "1":
        # After a restart torchrun's store still holds the addresses of the killed processes. On several machines
        # the counts of restarts may differ: there TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 gives a new store.
        store = PrefixStore(f"restart{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    try:
        where = torch.device("cuda", local) if kind == "cuda" else torch.device("cpu")
        yield World(where, rank, size)
    finally:
        dist.destroy_process_group()
