"""The loop. What a step does depends on the recipe, the weights before it and the step number alone.

Samples, augmentation, mixing and drop path are drawn from (seed, epoch, sample) and (seed, step) over the
global batch. So a run goes on bit-equal from any checkpoint, and the number of processes changes float
rounding alone.
"""

from __future__ import annotations

import json
import math
import signal
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .. import weights as weight_files
from ..data.draws import number
from ..data.labelled import Ahead, batches, make_loader
from ..data.on_device import Planned
from ..data.stream import Stream, StreamSampler
from ..recipes.schema import Recipe, text
from . import checkpoint, log, report, sharded
from .distributed import AgreedError, World
from .drop_path import DropPaths
from .environment import environment, peak_memory_mb
from .evaluate import Evaluation, autocast, to_device
from .graphed import GraphedStep, record_part
from .guard import LAG, Average, Guard, Seen, Statistics
from .log import Display, Log
from .optim import optimizer, schedule
from .stop import Stopper
from .sync_batch_norm import sync_batch_norms

SKIPS_IN_A_ROW = 10
NAMED_SAMPLES = 4  # of a batch, in the message about a loss that is no number


class NonFiniteError(RuntimeError):
    """The loss or the gradient is no number; the message says where."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
        step: steps done.
        steps: steps to do.
        figures: of the last evaluation.
        signal: the signal that stopped it before the end, or None.
    """

    step: int
    steps: int
    figures: dict[str, float]
    signal: int | None = None


class Trainer:
    """A run: everything that a checkpoint holds, and how to make a step.

    Args:
        recipe: what to do.
        run: the run's folder.
        world: the processes.
        delayed: whether a step is looked at one step later (`guard.py`); by default on CUDA, where looking at once
            makes the CPU wait. fp16 and shards are always looked at at once.
    """

    def __init__(
        self, recipe: Recipe, run: Path, world: World, delayed: bool | None = None
    ) -> None:
        cuda = world.device.type == "cuda"
        self.recipe, self.run, self.world = recipe, run, world
        self.task = recipe.task()
        self.data = self.task.train_data(world.device)
        samples = len(self.data)  # type: ignore[arg-type]
        groups = getattr(self.task, "groups", None)
        self.stream = Stream(
            samples, recipe.batch, recipe.epochs, recipe.seed, recipe.steps, groups
        )
        self.sampler = StreamSampler(
            self.stream, 0, world.rank, world.size, recipe.accumulate
        )  # checks that the batch can be shared out
        recipe.require_share(world.size)
        self.dtype = _dtype(recipe.precision, world.device)
        self.scaler = torch.amp.GradScaler(world.device.type, enabled=self.dtype is torch.float16)
        self.sharded = recipe.parallel == "fsdp" and world.size > 1
        self.graphs = recipe.graphs(cuda, world.size)
        torch.manual_seed(recipe.seed)
        self.model = sync_batch_norms(self.task.model(), world).train()
        if not self.sharded:  # else it may not fit
            self.model.to(world.device)
        self.ema = Average(self.model, recipe.ema) if recipe.ema else None
        if self.sharded:
            for name, model in self.models.items():
                compiled = recipe.compile and name == "model"
                sharded.shard(model, world, self.dtype, compiled)
        piece = recipe.batch // (world.size * recipe.accumulate)
        self.drop_paths = DropPaths(self.model, recipe.batch, piece, recipe.seed)
        self.delayed = (cuda if delayed is None else delayed) and not (
            self.scaler.is_enabled() or self.sharded
        )
        limit = SKIPS_IN_A_ROW if recipe.on_nonfinite == "skip" else 1
        self.guard = Guard(world, limit) if self.delayed else None
        self.statistics = Statistics(self.model)
        self.optimizer = optimizer(self.model, recipe)
        self.schedule = schedule(self.optimizer, recipe, self.stream.steps, self.stream.samples)
        self.step, self.evaluated, self.best, self.skipped = 0, 0, -math.inf, 0
        self.figures: dict[str, float] = {}
        self.events: Log | None = None
        self.display: Display | None = None
        self.evaluation = Evaluation(
            self.task, world, max(piece, 1), recipe.workers, even=self.sharded
        )
        # What DDP hooks into a backward pass cannot be recorded: then gradients are averaged after it.
        several = world.size > 1 and not self.sharded and recipe.cuda_graph is not True
        self.ddp = DistributedDataParallel(self.model) if several else None
        if cuda:
            # With torch 2.11 a compiled model stayed at chance on cuDNN's attention.
            torch.backends.cuda.enable_cudnn_sdp(False)
        self.network: Any = self.ddp or self.model
        if recipe.compile and not self.sharded:
            # Models whose shapes vary say what of them to compile.
            parts = getattr(self.model, "compile_parts", None)
            if parts is not None:
                parts()
            else:
                self.network = torch.compile(self.network)
        self.graphed: GraphedStep | None = None
        self.recorded = False  # a part of the model

    @property
    def models(self) -> dict[str, nn.Module]:
        """What checkpoints hold."""
        return {"model": self.model} | ({"ema": self.ema.module} if self.ema else {})

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.run / "checkpoints"

    @property
    def evaluated_model(self) -> nn.Module:
        """The moving average where there is one."""
        return self.ema.module if self.ema else self.model

    def resume(self, warn: Any) -> None:
        """Go back to the newest good checkpoint, or to the start where there is none."""
        path = checkpoint.newest(self.checkpoints, warn)
        path = self.world.share(path)
        if path is None:
            return
        state = sharded.restore(path, self.models, self.optimizer, self.world.device)
        self.scaler.load_state_dict(state["scaler"])
        self.step, self.evaluated = state["step"], state["evaluated"]
        self.best, self.figures = state["best"], state["figures"]
        for name, own in {"batch": self.recipe.batch, "seed": self.recipe.seed}.items():
            if (saved := state.get(name, own)) != own:
                raise ValueError(
                    f"{name} says which samples a step sees and cannot change when a run goes on, got {own}, {path} "
                    f"has {saved}; leave it, or begin a new run with the weights of this one: pale train --config "
                    f"{self.run}/recipe.yaml --output DIR --model.weights {self.run} --model.new_head false "
                    f"--{name} {own}"
                )
        if self.step > self.stream.steps:
            raise ValueError(
                f"{path} has done {self.step} steps, the recipe asks for {self.stream.steps}; "
                "give more epochs"
            )

    def save(self) -> None:
        """Write a checkpoint, on the main process, or in shards on all."""
        self.settle()
        state = {
            "step": self.step,
            "batch": self.recipe.batch,
            "seed": self.recipe.seed,
            "evaluated": self.evaluated,
            "best": self.best,
            "figures": self.figures,
            "scaler": self.scaler.state_dict(),
        }
        folder = self.checkpoints
        if self.sharded:
            sharded.save(folder, self.step, self.models, self.optimizer, state, self.world)
        elif self.world.main:
            models = {name: model.state_dict() for name, model in self.models.items()}
            state["optimizer"] = self.optimizer.state_dict()
            checkpoint.save(folder, self.step, models, state, self._about())
        if self.world.main:
            checkpoint.prune(folder, self.recipe.saving.keep, self.step)

    def _about(self) -> dict[str, Any]:
        return {
            "recipe": self.recipe.plain(),
            "classes": list(self.task.classes),
            "step": self.step,
            "figures": self.figures,
        }

    def evaluate(self, display: Display) -> None:
        """Evaluate, tell, and write the weights for use: the newest, and the best so far."""
        self.settle()
        self.figures, metric = self.evaluation.run(self.evaluated_model, self.dtype)
        self.evaluated = self.step
        names = ["weights.safetensors"]
        if (score := self.figures[self.task.best]) > self.best:
            self.best = score
            names.append("best.safetensors")
        tensors = sharded.gathered(self.evaluated_model, self.world)
        if self.world.main:
            details = json.dumps(metric.details())
            checkpoint.write_file(self.run / "evaluation.json", lambda path: _write(path, details))
            about = self._about()
            for name in names:
                checkpoint.write_file(
                    self.run / name, lambda path: weight_files.save(path, tensors, about)
                )
        epoch = self.step * self.recipe.batch / self.stream.samples
        self.log("eval", step=self.step, epoch=self.stream.epoch(self.step), **self.figures)
        figures = ", ".join(f"{name} {value:.4g}" for name, value in self.figures.items())
        display.evaluated(f"after epoch {epoch:.2f}: {figures}")

    def make_step(self, iterator: Iterator[Any]) -> dict[str, Any]:
        """One step of the optimizer: gradients of all pieces, clipping, update, average."""
        recipe, world = self.recipe, self.world
        self.schedule.step_update(self.step)
        self.statistics.keep()
        losses, keys = [], []
        for i, positions in enumerate(self.sampler.positions):
            batch = next(iterator)
            keys.append(batch["keys"])
            torch.manual_seed(number(recipe.seed, self.step, world.rank * recipe.accumulate + i))
            self.drop_paths.draw(self.step, positions)
            batch = self.task.prepare(to_device(batch, world.device), self.step)
            last = i == recipe.accumulate - 1
            with nullcontext() if last or self.ddp is None else self.ddp.no_sync():
                losses.append(self._compute(batch))
        if self.ddp is None and not self.sharded:
            world.average_([p.grad for p in self.model.parameters() if p.grad is not None])
        self.scaler.unscale_(self.optimizer)
        clip = recipe.optim.clip or math.inf
        norm = sharded.whole(nn.utils.clip_grad_norm_(self.model.parameters(), clip))
        loss = torch.stack(losses).mean()
        self._update(loss, norm, torch.cat(keys))
        self._zero_grad()
        self.step += 1
        self.settle(LAG)
        return {"loss": loss, "grad_norm": norm}

    def _compute(self, batch: dict[str, Any]) -> Tensor:
        """The loss of a prepared batch, with its gradients added."""
        if not self.graphs:
            return self._forward_backward(batch)
        if (part := getattr(self.model, "recordable", None)) is not None:
            if not self.recorded:
                record_part(part, batch["images"], self.dtype)
                self.recorded = True
            return self._forward_backward(batch)
        if self.graphed is None:
            self.graphed = GraphedStep(self._forward_backward, self.model, batch)
        return self.graphed(batch)

    def _forward_backward(self, batch: dict[str, Any]) -> Tensor:
        with autocast(self.world.device, self.dtype):
            loss = self.task.loss(self.network, batch)
        self.scaler.scale(loss / self.recipe.accumulate).backward()
        return loss.detach()

    def _zero_grad(self) -> None:
        if self.graphed:
            self.graphed.zero_grad()
        else:
            self.optimizer.zero_grad()

    def _update(self, loss: Tensor, norm: Tensor, keys: Tensor) -> None:
        """Let the optimizer and the average go a step, but not with what is no number."""
        lr = max(group["lr"] for group in self.optimizer.param_groups)
        if self.guard:
            skip = self.guard.look(self.step, lr, keys, loss, norm)
            self.optimizer.found_inf = skip  # type: ignore[union-attr]
            self.optimizer.step()
            self.statistics.put_back(skip)
            if self.ema:
                self.ema.update_unless(skip, self.model)
            return
        mean, length = loss.item(), norm.item()
        # With fp16 an infinite gradient is ordinary: the scaler skips the step and tries a smaller scale.
        bad = not math.isfinite(mean) or not (self.scaler.is_enabled() or math.isfinite(length))
        if self.world.any(bad)[0]:
            self.statistics.put_back(torch.ones_like(loss))
            self._nonfinite(Seen(self.step, lr, keys, mean, length, True), bad)
        else:
            self.scaler.step(self.optimizer)
            if self.ema:
                self.ema.update(self.model)
            self.skipped = 0
        self.scaler.update()

    def settle(self, lag: int = 0) -> None:
        """Look at the steps that were made, but for the last `lag`."""
        for seen in self.guard.seen(lag) if self.guard else ():
            if seen.bad:
                self._nonfinite(seen, seen.own)
            else:
                self.skipped = 0

    def _nonfinite(self, seen: Seen, own: bool) -> None:
        names = [self.task.sample_name(int(index)) for _, index in seen.keys[:NAMED_SAMPLES]]
        told = self.world.gather((seen.loss, seen.norm, names) if own else None)
        loss, norm, names = next(entry for entry in told if entry is not None)
        message = (
            f"step {seen.step}: loss {loss:g}, gradient norm {norm:g} at learning rate {seen.lr:.3g}, "
            f"on a batch of {', '.join(names)} and others"
        )
        self.skipped += 1
        if self.recipe.on_nonfinite == "skip" and self.skipped < SKIPS_IN_A_ROW:
            self.log("skipped", step=seen.step, message=message)
            if self.display:
                self.display.skipped(message)
            return
        self._zero_grad()
        self.step = seen.step  # where the weights still are
        if self.guard:
            self.guard.pending.clear()
        self.save()
        raise NonFiniteError(
            f"{message}; the weights before this step are saved. Lower optim.lr, set "
            "--precision bf16 or fp32, or pass over such steps: "
            f"pale train --resume {self.run} --on_nonfinite skip"
        )

    def _require_sound(self, began: int) -> None:
        """What ends in a row of skipped steps, or all of whose steps were skipped, or without numbers, is no result."""
        self.settle()
        way_out = f"lower optim.lr or set --precision bf16 or fp32: pale train --resume {self.run} --optim.lr VALUE"
        row = self.skipped
        if row and (row > 1 or row == self.step - began):
            self.step -= row  # where the weights still are
            self.save()
            raise NonFiniteError(
                f"the run ends with skipped steps, {self.step} to {self.step + row - 1}, whose loss or gradient is no "
                f"number; the weights before them are saved, log.jsonl names samples; {way_out}"
            )
        if self.world.any(not all(sharded.is_finite(model) for model in self.models.values()))[0]:
            raise NonFiniteError(f"the last step made weights that are no numbers; {way_out}")

    def log(self, event: str, **values: Any) -> None:
        """Write an event to the run's log, on the main process."""
        if self.events:
            self.events.write(event, **values)

    def fit(self, quiet: bool = False) -> Outcome:
        """Train to the end, or until a signal."""
        recipe, world, steps = self.recipe, self.world, self.stream.steps
        self.sampler.start = self.step
        pin = world.device.type == "cuda"
        loader = make_loader(self.data, self.sampler, self.task.collate, recipe.workers, pin)
        title = f"{recipe.name} in {self.run}"
        self.display = display = Display(title, steps, self.step, quiet or not world.main)
        path = self.run / "log.jsonl"
        if world.main:
            self.events = Log(path, self.step, recipe.tensorboard)
        try:
            with Stopper() as stopper, display:
                self.log("start", step=self.step, steps=steps, **environment(world))
                display.say(self._opening())
                if recipe.cuda_graph is True and not self.graphs:
                    display.say("cuda_graph=true changes nothing here: there is no CUDA device")
                for note in getattr(self.task, "notes", ()):
                    self.log("note", step=self.step, text=note)
                    display.say(note)
                made = partial(self.task.fetched, device=world.device)
                stopped = self._loop(Ahead(batches(loader), made), stopper, display)
                if stopped:
                    self.save()
                    self.log("stop", step=self.step, signal=stopped)
                    display.say(
                        f"stopped by {signal.Signals(stopped).name} after step {self.step} of {steps}, "
                        f"all is saved; go on with: pale train --resume {self.run}"
                    )
                    return Outcome(self.step, steps, self.figures, stopped)
                self.log("end", step=self.step, **self.figures)
                display.say(f"done: {self.run / 'weights.safetensors'}")
                if world.main:
                    if skipped := [e for e in log.read(path) if e["event"] == "skipped"]:
                        display.say(
                            f"{len(skipped)} steps were skipped, as loss or gradient was no number: {path} names them"
                        )
                    display.say(f"report: {report.write(self.run)}")
                return Outcome(self.step, steps, self.figures)
        except ValueError as error:  # of the data, so between two steps
            there = checkpoint.newest(self.checkpoints) is not None
            saved = "from the last checkpoint" if there else "there is no checkpoint yet"
            # The others may be inside a step, and then cannot join in writing shards.
            if isinstance(error, AgreedError) or (world.main and not self.sharded):
                self.save()
                saved = f"step {self.step} is saved"
            raise ValueError(
                f"{error}; {saved}, go on with: pale train --resume {self.run}"
            ) from None
        finally:
            if self.events:
                self.events.close()

    def _opening(self) -> str:
        recipe, lr = self.recipe, self.recipe.peak_lr
        scaled = f" = {recipe.optim.lr:g} x {recipe.batch} / {recipe.optim.lr_batch}"
        how = (
            ", the model in shards" if self.sharded else ", as a CUDA graph" if self.graphs else ""
        )
        if isinstance(self.data, Planned):
            how += f"; pictures are {'decoded' if self.data.sizes is None else 'kept'} there"
        parts = f"{self.world.size} x {recipe.accumulate} x {recipe.batch // self.world.size // recipe.accumulate}"
        return (
            f"{recipe.name}: {self.stream.samples} images, {len(self.task.classes)} classes, "
            f"steps {self.step} to {self.stream.steps}, batch {recipe.batch} = {parts} "
            f"(processes x accumulate x images), learning rate {lr:.3g}"
            f"{scaled if recipe.optim.scale_lr else ' (not scaled)'}, "
            f"{self.dtype or torch.float32} on {self.world.device.type}{how}".replace("torch.", "")
        )

    def _agree(self, iterator: Ahead, *flags: bool) -> list[bool]:
        """For each flag, whether it is set on any process, in the one exchange of a step.

        Several processes, or pieces of a batch, have the next step's by then: where one cannot be read, all stop here.
        """
        several = self.world.size * self.recipe.accumulate > 1 and self.step < self.stream.steps
        error = iterator.fetch(self.recipe.accumulate) if several else None
        failed, *any_ = self.world.any(error is not None, *flags)
        if failed:
            self.world.agree(error)
        return any_

    def _loop(self, iterator: Ahead, stopper: Stopper, display: Display) -> int | None:
        """Steps until the end (None) or a signal (its number)."""
        recipe, steps, first = self.recipe, self.stream.steps, self.step
        saved = logged = time.monotonic()
        logged_step = self.step
        if self.step == steps and self.evaluated < steps:  # stopped between the two
            self.evaluate(display)
            self.save()
        self._agree(iterator)
        while self.step < steps:
            done = self.make_step(iterator)
            if self.step % recipe.log_every == 0 or self.step in (1, steps):
                self.settle()
                now = time.monotonic()
                values = self._figures(done, self.step - logged_step, now - logged, iterator.waited)
                logged, logged_step, iterator.waited = now, self.step, 0.0
                self.log("step", **values)
                display.step(**values)
            epoch = self.stream.epoch(self.step)
            if self.step == steps:
                self._require_sound(first)
            if self.step == steps or (
                self.stream.ends_epoch(self.step) and epoch % recipe.eval_every == 0
            ):
                self.evaluate(display)
                logged = time.monotonic()
            due = recipe.saving.every_steps and self.step % recipe.saving.every_steps == 0
            late = time.monotonic() - saved >= 60 * recipe.saving.every_minutes
            # Clocks differ, and all must write their shards at the same step.
            asked, late = self._agree(iterator, stopper.asked is not None, late)
            if self.step == steps or (not asked and (due or late)):
                self.save()
                saved = time.monotonic()
            if asked and self.step < steps:
                return stopper.asked or signal.SIGTERM
        return None

    def _figures(
        self, done: dict[str, Any], steps: int, seconds: float, waited: float
    ) -> dict[str, Any]:
        return {
            "step": self.step,
            "epoch": self.step * self.recipe.batch / self.stream.samples,
            "loss": self.world.mean(float(done["loss"])),
            "lr": max(group["lr"] for group in self.optimizer.param_groups),
            "grad_norm": float(done["grad_norm"]),
            "images_per_s": steps * self.recipe.batch / max(seconds, 1e-9),
            "data_wait": min(1.0, waited / max(seconds, 1e-9)),
            "memory_mb": peak_memory_mb(self.world.device),
        }


def _dtype(precision: str, device: torch.device) -> torch.dtype | None:
    if precision == "auto":
        return torch.bfloat16 if device.type == "cuda" else None
    return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": None}[precision]


def train(
    recipe: Recipe,
    run: Path,
    world: World,
    resume: bool = False,
    quiet: bool = False,
    delayed: bool | None = None,
) -> Outcome:
    """Train by a recipe in the folder `run`.

    Args:
        recipe: what to do.
        run: where everything is written.
        world: the processes, from `distributed.join`.
        resume: go on from the newest good checkpoint in `run`.
        quiet: show nothing.
        delayed: as for `Trainer`.
    """
    trainer = Trainer(recipe, run, world, delayed)
    warnings: list[str] = []
    if resume:
        trainer.resume(warnings.append)
    if world.main:
        run.mkdir(parents=True, exist_ok=True)
        checkpoint.write_file(run / "recipe.yaml", lambda path: _write(path, text(recipe)))
        for warning in warnings:
            Display("", 1, 0, quiet).say(warning)
    return trainer.fit(quiet)


def _write(path: Path, content: str) -> None:
    path.write_text(content)
