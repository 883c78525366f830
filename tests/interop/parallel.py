"""One training step in two processes, and in one; started by `test_libraries.py` with torchrun.

Prints the largest difference of any parameter from that of a single process on the whole batch.
"""

from __future__ import annotations

import copy
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from interop.models import build, difference, images
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel


def stepped(model: nn.Module, whole: nn.Module, x: Tensor, labels: Tensor) -> None:
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(model(x), labels).backward()
        optimizer.step()


def main(way: str, name: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    plain, x, labels = build(name), images(4), torch.arange(4)
    model = copy.deepcopy(plain)
    stepped(plain, plain, x, labels)
    own = slice(2 * rank, 2 * rank + 2)
    if way == "ddp":
        stepped(DistributedDataParallel(model), model, x[own], labels[own])
        found = dict(model.named_parameters())
    else:
        for block in [m for m in model.modules() if type(m).__name__.endswith("Block")]:
            fully_shard(block)
        fully_shard(model)
        stepped(model, model, x[own], labels[own])
        found = {n: p.full_tensor() for n, p in model.named_parameters()}
    gap = max(difference(found[n], p) for n, p in plain.named_parameters())
    if rank == 0:
        sys.stdout.write(f"difference {gap:.3e}\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
