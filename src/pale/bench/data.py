"""Throughput of the training data of a recipe: reading and augmentation without a model."""

from __future__ import annotations

import time
from typing import Any

import torch

from ..data.loader import iterate_batches, make_loader
from ..data.stream import Stream, StreamSampler
from ..errors import SettingsError
from ..recipes.schema import Recipe
from ..train.evaluate import to_device


def measure(recipe: Recipe, seconds: float) -> dict[str, Any]:
    """Return images per second of the training loader, over about `seconds` after all workers have started."""
    if seconds <= 0:
        raise SettingsError(f"--seconds must be greater than 0, got {seconds:g}")
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    task = recipe.task()
    data = task.train_data(device)
    samples = len(data)  # type: ignore[arg-type]
    sampler = StreamSampler(Stream(samples, recipe.batch, 10**6, recipe.seed))
    loader = make_loader(data, sampler, task.collate, recipe.workers, cuda)
    workers = loader.num_workers
    began, images, warmup = time.perf_counter(), 0, 2 * workers + 1
    for count, batch in enumerate(iterate_batches(loader), start=1):
        if (
            "plan" in batch
        ):  # the files are on the device, and images are decoded and augmented there
            task.prepare(to_device(task.fetched(batch, device), device), count)
            if cuda:
                torch.cuda.synchronize()
        now = time.perf_counter()
        if count == warmup:  # later batches were not prefetched before the measurement
            start = now
        elif count > warmup:
            images += len(batch["keys"])
            if now - start >= seconds:
                break
    return {
        "recipe": recipe.name,
        "pictures": samples,  # kept name
        "batch": recipe.batch,
        "workers": workers,
        "images": images,
        "seconds": now - start,
        "images_per_s": images / (now - start),
        "worker_ms": 1000 * max(workers, 1) * (now - start) / images,
        "warmup_s": start - began,
    }
