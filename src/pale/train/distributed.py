"""The processes of a run: a single one, or those that torchrun started."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from ..compat import foreach_copy_, run_exit_functions
from ..core.devices import choose_device
from ..errors import PaleError, SettingsError

T = TypeVar("T")
TIMEOUT = 600.0  # seconds


class AllRanksError(PaleError, ValueError):
    """An error of one process that all processes raise at the same point, so that they stay synchronised."""


@dataclass(frozen=True)
class World:
    """The rank of this process and the number of processes.

    Attributes:
        device: where this process computes.
        rank: number of this process.
        size: number of processes.
    """

    device: torch.device
    rank: int = 0
    size: int = 1

    @property
    def main(self) -> bool:
        """Whether this process writes files and prints."""
        return self.rank == 0

    def any(self, *flags: bool) -> list[bool]:
        """Return for each flag whether it is set on any process."""
        if self.size == 1:
            return list(flags)
        # On the CPU, so that no process waits for its GPU.
        values = torch.tensor(flags, dtype=torch.int32)
        dist.all_reduce(values, dist.ReduceOp.MAX)
        return [bool(value) for value in values.tolist()]

    def max_(self, value: torch.Tensor) -> None:
        """Set a tensor on the device to its maximum over the processes; the host does not wait."""
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
        foreach_copy_(list(tensors), views)

    def mean(self, value: float) -> float:
        """Return the mean over the processes."""
        if self.size == 1:
            return value
        total = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(total)
        return float(total) / self.size

    def gather(self, value: T) -> list[T]:
        """Return the values of all processes, by rank, on every process."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def raise_on_all(self, error: Exception | None) -> None:
        """Raise the error of any process on every process."""
        for text in self.gather(None if error is None else str(error)):
            if text is not None:
                raise AllRanksError(text) from error

    def on_main(self, action: Callable[[], T]) -> T:
        """Run `action` on the main process and return its result, or raise its error, on every process."""
        result, error = None, None
        if self.main:
            try:
                result = action()
            except (ValueError, OSError) as caught:
                error = caught
        if self.size > 1:
            self.raise_on_all(error)
        elif error is not None:
            raise error
        return cast("T", self.broadcast(result))

    def broadcast(self, value: T) -> T:
        """Return the value of the main process."""
        return self.gather(value)[0]


def exit_process(code: int) -> NoReturn:
    """End one of several processes without finalising the interpreter.

    Threads of gloo sometimes abort there (seen after FSDP), and torchrun would report a finished run as failed.
    """
    run_exit_functions()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


@contextmanager
def join(device: str | None = None, timeout: float = TIMEOUT) -> Iterator[World]:
    """Join the process group that torchrun started, if any.

    Args:
        device: "cpu" or "cuda"; None: CUDA if available.
        timeout: seconds that a process waits for the others before it fails, so that torchrun restarts the run.
    """
    if not timeout > 0:
        raise SettingsError(
            f"the timeout of the processes must be above 0 seconds, got {timeout:g}"
        )
    kind = choose_device(device).type
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
    patience = timedelta(seconds=timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=patience)
    try:
        where = torch.device("cuda", local) if kind == "cuda" else torch.device("cpu")
        yield World(where, rank, size)
    finally:
        dist.destroy_process_group()
