"""The training loop: load batches, make steps, log, evaluate, save, and react to signals and errors.

A run resumes from any checkpoint as if it had not stopped, and the number of processes changes only float rounding
(see `step.py`). docs/training.md lists where results are bit-equal; `determinism.py` makes them bit-equal on a GPU.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from ..core.memory import exhausted_memory
from ..core.numbers import format_number
from ..data.gpu.decode import PlannedDataset
from ..data.loader import Batch, Prefetcher, iterate_batches, make_loader
from ..data.sources.identity import DataIdentity
from ..data.stream import Stream, StreamSampler
from ..errors import DataError, NonFiniteError, PaleError
from ..recipes.files import recipe_to_yaml
from ..recipes.schema import Recipe
from ..tasks.base import Task
from ..weights.write import save_weights
from . import checkpoint, log, report, sharded
from .background import BackgroundWriter, copy_to_cpu
from .determinism import deterministic, keep_random_state, without_cudnn_attention
from .distributed import AllRanksError, World
from .environment import environment, peak_memory_mb
from .evaluate import Evaluation
from .guard import LAG, StepRecord
from .log import Display, Log, next_steps
from .memory import training_shortage
from .preflight import estimate_memory, find_warnings, require_memory
from .resuming import (
    check_length,
    check_progress_kept,
    check_same_data,
    check_same_order,
    check_state,
    job,
)
from .run_lock import run_lock
from .state import TrainState, build_state
from .step import MAX_CONSECUTIVE_SKIPS, StepResult, TrainStep, build_step
from .step_clock import StepClock
from .stop import StopSignals

NAMED_SAMPLES = 4  # samples of a batch in messages about NaN and Inf


@dataclass(frozen=True)
class Outcome:
    """Result of a run.

    Attributes:
        step: steps done.
        steps: length of the run in steps.
        figures: results of the last evaluation.
        signal: number of the signal that stopped the run, or None.
        late_signal: number of a signal that came when the last step was done, so that the run ended; None if none did.
            Callers with more to do should stop.
    """

    step: int
    steps: int
    figures: dict[str, float]
    signal: int | None = None
    late_signal: int | None = None

    @property
    def exit_code(self) -> int:
        """Exit code of the process: 0, or 128 + the number of the signal, as in shells."""
        return 0 if self.signal is None else 128 + self.signal


class Trainer:
    """A run in a folder. `build_trainer` creates one from a recipe.

    Args:
        recipe: settings of the run.
        run: folder of the run.
        world: the processes.
        task: data, loss and metric.
        data: training samples.
        state: models, optimizer and progress.
        stepper: makes steps.
        evaluation: evaluates on the validation set.
    """

    def __init__(
        self,
        recipe: Recipe,
        run: Path,
        world: World,
        task: Task,
        data: Dataset[Any],
        state: TrainState,
        stepper: TrainStep,
        evaluation: Evaluation,
    ) -> None:
        self.recipe, self.run, self.world, self.task, self.data = recipe, run, world, task, data
        self.state, self.stepper, self.evaluation = state, stepper, evaluation
        self.sampler = stepper.sampler
        self.stream = stepper.sampler.stream
        self.consecutive_skips = 0
        self.notes: list[str] = []  # notes about settings, logged at the start
        self.events: Log | None = None
        self.writer = BackgroundWriter(60 * recipe.saving.patience_minutes)
        self.display = Display(f"{recipe.name} in {run}", self.stream.steps, 0, quiet=True)

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.run / "checkpoints"

    @cached_property
    def data_identity(self) -> DataIdentity:
        """Digest of the training set."""
        return self.task.data_identity()

    @cached_property
    def phases(self) -> Sequence[int]:
        """Steps at which the shapes of batches change, the first of them 0."""
        return self.task.phases(self.stream.steps)

    def resume(self, warn: Callable[[str], None], allow_changed_data: bool = False) -> None:
        """Load the newest good checkpoint, or start at step 0 if none was written.

        Args:
            warn: called with each warning for the user.
            allow_changed_data: accept other training samples than those of the checkpoint.
        """
        path = self.world.broadcast(checkpoint.newest(self.checkpoints, warn))
        if path is None:
            self.world.on_main(lambda: check_progress_kept(self.run))
            warn(f"{self.run} has no checkpoint yet; the run starts at step 0")
            return

        def check(saved: dict[str, Any]) -> None:
            check_state(path, saved)
            check_same_order(path, saved, {"batch": self.recipe.batch, "seed": self.recipe.seed})
            warning = check_same_data(
                path, saved.get("data"), self.data_identity, allow_changed_data
            )
            if warning is not None:
                warn(warning)
            check_length(path, saved, self.stream.steps)

        self.state.restore(path, self.world.device, check)

    def save(self, wait: bool = True) -> None:
        """Write a checkpoint and delete old ones.

        Args:
            wait: return when it is on disk; otherwise it is written while training continues, except in shards.
        """
        self.settle()
        identity = {
            "batch": self.recipe.batch,
            "seed": self.recipe.seed,
            "data": self.data_identity.plain(),
        }
        folder, step, keep = self.checkpoints, self.state.step, self.recipe.saving.keep
        wait = wait or not self.recipe.saving.background
        if self.state.sharded:
            self.state.save_shards(folder, self.world, identity)
        if not self.world.main:
            return
        write = None
        if not self.state.sharded:
            write = self.state.checkpoint_writer(folder, identity, self._about(), copy=not wait)

        def save_and_prune() -> None:
            if write is not None:
                write()
            checkpoint.prune(folder, keep, step)

        self._write("the checkpoint", save_and_prune, wait, lambda: self.log("saved", step=step))

    def _write(
        self, name: str, write: Callable[[], None], wait: bool, done: Callable[[], None]
    ) -> None:
        """Write files in the background; with `wait`, return when this and everything before it is on disk."""
        self.writer.submit(name, write, done)
        self._check_writes(wait)

    def _check_writes(self, wait: bool = False) -> None:
        """Report files that could not be written yet; raise if writing has failed for too long."""
        try:
            messages = self.writer.wait() if wait else self.writer.check()
        except checkpoint.WriteError as error:
            hint = f"free disk space and resume with: pale train --resume {self.run}"
            if hint in str(error):
                raise
            raise checkpoint.WriteError(f"{error}; {hint}") from error
        for message in messages:
            self.log("write_failed", step=self.state.step, message=message)
            self.display.print(message)

    def _about(self) -> dict[str, object]:
        """Return the header of the weights."""
        return {
            "recipe": self.recipe.plain(),
            "classes": list(self.task.classes),
            **self.task.described(),
            "step": self.state.step,
            "figures": self.state.figures,
        }

    def evaluate(self) -> None:
        """Evaluate, log the result, and write the weights: the newest, and the best so far."""
        self.settle()
        state = self.state
        state.figures, metric = self.evaluation.run(state.evaluated_model, self.stepper.dtype)
        state.evaluated = state.step
        names = ["weights.safetensors"]
        if (score := state.figures[self.task.best]) > state.best:
            state.best = score
            names.append("best.safetensors")
        tensors = sharded.gather_state(state.evaluated_model, self.world)
        if self.world.main:
            self._write_evaluation(tensors, names, json.dumps(metric.details()))
        self.log("eval", step=state.step, epoch=self.stream.epoch(state.step), **state.figures)
        epoch = state.step * self.recipe.batch / self.stream.samples
        figures = ", ".join(f"{name} {format_number(v)}" for name, v in state.figures.items())
        self.display.evaluated(f"after epoch {epoch:.2f}: {figures}")

    def _write_evaluation(self, tensors: dict[str, Tensor], names: list[str], details: str) -> None:
        """Write the evaluated weights under each name, and the details of the evaluation."""
        about, background = self._about(), self.recipe.saving.background
        copied = copy_to_cpu(tensors) if background else tensors

        def write() -> None:
            checkpoint.write_text(self.run / "evaluation.json", details)
            for name in names:
                checkpoint.write_file(
                    self.run / name, lambda path: save_weights(path, copied, about)
                )

        self._write(" and ".join(names), write, not background, lambda: None)

    def make_step(self, iterator: Iterator[Batch]) -> StepResult:
        """Make a step and check the steps before it."""
        if self.state.step in self.phases:
            self.stepper.forget_shapes()
        result = self.stepper.run(iterator)
        self.settle(LAG)
        return result

    def settle(self, lag: int = 0) -> None:
        """Check the steps made so far, except the last `lag` of those that the device checks."""
        for record in self.stepper.completed(lag):
            if record.bad:
                self._handle_bad_step(record)
            else:
                self.consecutive_skips = 0

    def _handle_bad_step(self, record: StepRecord) -> None:
        """Log a step that was skipped because of NaN or Inf, or stop."""
        names = [self.task.sample_name(int(index)) for _, index in record.keys[:NAMED_SAMPLES]]
        own = (record.loss, record.norm, names) if record.bad_here else None
        loss, norm, names = next(entry for entry in self.world.gather(own) if entry is not None)
        message = (
            f"step {record.step}: loss {loss:g}, gradient norm {norm:g} at learning rate {record.lr:.3g}, "
            f"on a batch of {', '.join(names)} and others"
        )
        self.consecutive_skips += 1
        if self.recipe.on_nonfinite == "skip" and self.consecutive_skips < MAX_CONSECUTIVE_SKIPS:
            self.state.scaler.update()
            self.log("skipped", step=record.step, message=message)
            self.display.skipped(message)
            return
        self.stepper.rewind(record.step)
        self.save()
        raise NonFiniteError(
            f"{message}; the weights before this step are saved. Lower optim.lr, set --precision bf16 or fp32, or "
            f"skip such steps: pale train --resume {self.run} --on_nonfinite skip"
        )

    def _check_result(self, first: int) -> None:
        """Raise if the run since step `first` ends with skipped steps or has weights that are NaN or Inf."""
        self.settle()
        way_out = f"lower optim.lr or set --precision bf16 or fp32: pale train --resume {self.run} --optim.lr VALUE"
        count = self.consecutive_skips
        if count and (count > 1 or count == self.state.step - first):
            last = self.state.step - 1
            self.stepper.rewind(self.state.step - count)
            self.save()
            raise NonFiniteError(
                f"the run ends with skipped steps, {self.state.step} to {last}, whose loss or gradient is NaN or Inf; "
                f"the weights before them are saved, log.jsonl lists their samples; {way_out}"
            )
        if self.world.any(not self.state.is_finite())[0]:
            raise NonFiniteError(f"the last step made weights that are NaN or Inf; {way_out}")

    def log(self, event: str, **values: object) -> None:
        """Write an event to the log of the run, on the main process."""
        if self.events:
            self.events.write(event, **values)

    def fit(self, quiet: bool = False) -> Outcome:
        """Train until the end or a signal."""
        recipe, world, state = self.recipe, self.world, self.state
        fetched = partial(self.task.fetched, device=world.device)
        self.display = Display(
            f"{recipe.name} in {self.run}",
            self.stream.steps,
            state.step,
            quiet or not world.main,
        )
        if world.main:
            self.events = Log(self.run / "log.jsonl", state.step, recipe.tensorboard)
        try:
            with StopSignals() as signals, self.display:
                self._log_start()
                stopped = self._run_steps(Prefetcher(self._batches(), fetched), signals)
                self._finish(stopped)
                late = None if stopped is not None else signals.received
                return Outcome(state.step, self.stream.steps, state.figures, stopped, late)
        except ValueError as error:  # an error of the data, which occurs between two steps
            saved = self._save_after(error)
            hint = f"{saved}; resume with: pale train --resume {self.run}"
            if not isinstance(error, PaleError):
                error.add_note(hint)
                raise
            raise DataError(f"{error}; {hint}") from error
        except Exception:
            self.writer.drain()
            raise
        finally:
            if self.events:
                self.events.close()

    def _batches(self) -> Iterator[Batch]:
        """Yield the batches from the current step on, with a new loader for each phase of the training data."""
        begin, steps = self.state.step, self.stream.steps
        pin = self.world.device.type == "cuda"
        for first, last in pairwise([*self.phases, steps]):
            if last > begin:
                self.sampler.start, self.sampler.stop = max(first, begin), last
                data = self.task.phase_data(self.data, first, steps)
                workers = self.recipe.workers
                loader = make_loader(data, self.sampler, self.task.collate, workers, pin)
                yield from iterate_batches(loader)

    def _log_start(self) -> None:
        step = self.state.step
        facts = environment(self.world) | {"data_sha256": self.data_identity.digest}
        if (name := job()) is not None:
            facts["job"] = name
        self.log("start", step=step, steps=self.stream.steps, **facts)
        self.display.print(self._summary())
        if self.recipe.cuda_graph is True and not self.stepper.uses_cuda_graph:
            self.display.print("cuda_graph=true has no effect: there is no CUDA device")
        for note in [*self.notes, *self.task.notes]:
            self.log("note", step=step, text=note)
            self.display.print(note)

    def _finish(self, stopped: int | None) -> None:
        """Save after a signal; write the report."""
        state, path = self.state, self.run / "log.jsonl"
        if stopped:
            self.save()
            self.log("stop", step=state.step, signal=stopped)
            self.display.print(
                f"stopped by {signal.Signals(stopped).name} after step {state.step} of {self.stream.steps}, the state "
                f"is saved; resume with: pale train --resume {self.run}"
            )
            self._write_report()
            return
        self._check_writes(wait=True)
        self.log("end", step=state.step, **state.figures)
        self.display.print(f"done: {self.run / 'weights.safetensors'}")
        if self.events:
            self.events.flush()
            if skipped := [e for e in log.read(path) if e["event"] == "skipped"]:
                self.display.print(
                    f"{len(skipped)} steps were skipped because loss or gradient was NaN or Inf; {path} lists them"
                )
        self._write_report()
        if self.world.main:
            for line in next_steps(self.run, self.task, state.best):
                self.display.print(line, wrap=False)

    def _write_report(self) -> None:
        """Write report.html, or print why it cannot be written: the run itself is complete."""
        if not self.world.main:
            return
        try:
            self.display.print(f"report: {report.write(self.run, self.task)}")
        except (PaleError, OSError) as error:
            self.display.print(f"no report: {error}; write it later with: pale report {self.run}")

    def _save_after(self, error: ValueError) -> str:
        """Save after an error of the data if all processes can; return what was saved."""
        # If the error is not on all ranks, the others may be inside a step and cannot write their shards.
        if isinstance(error, AllRanksError) or (self.world.main and not self.state.sharded):
            self.save()
            return f"step {self.state.step} is saved"
        if checkpoint.newest(self.checkpoints) is not None:
            return "the last checkpoint is kept"
        return "there is no checkpoint yet"

    def _summary(self) -> str:
        """Return a line about the run."""
        recipe, world, state = self.recipe, self.world, self.state
        if recipe.optim.scale_lr:
            scaled = f" = {recipe.optim.lr:g} x {recipe.batch} / {recipe.optim.lr_batch}"
        else:
            scaled = " (not scaled)"
        dtype = str(self.stepper.dtype or torch.float32).removeprefix("torch.")
        how = ", model in shards" if state.sharded else ""
        how += ", as a CUDA graph" if self.stepper.uses_cuda_graph and not state.sharded else ""
        if isinstance(self.data, PlannedDataset):
            work = "decoded and augmented" if self.data.sizes is None else "kept and augmented"
            how += f"; images are {work} there"
        images = recipe.batch // world.size // recipe.accumulate
        count = len(self.task.classes)
        classes = f"{count} class{'es' * (count != 1)}"
        return (
            f"{recipe.name}: {self.stream.samples} images, {classes}, steps {state.step} to "
            f"{self.stream.steps}, batch {recipe.batch} = {world.size} x {recipe.accumulate} x {images} (processes x "
            f"accumulate x images), learning rate {recipe.peak_lr:.3g}{scaled}, {dtype} on {world.device.type}{how}"
        )

    def _agree(self, iterator: Prefetcher, *flags: bool) -> list[bool]:
        """Return for each flag whether it is set on any process, in the one exchange of a step.

        Several processes, or parts of a batch, fetch the data of the next step first: if one cannot be read, all
        processes stop here, between two steps.
        """
        several = self.world.size * self.recipe.accumulate > 1
        several &= self.state.step < self.stream.steps
        error = iterator.fetch(self.recipe.accumulate) if several else None
        failed, *set_anywhere = self.world.any(error is not None, *flags)
        if failed:
            self.world.raise_on_all(error)
        return set_anywhere

    def _run_steps(self, iterator: Prefetcher, signals: StopSignals) -> int | None:
        """Make steps until the end (return None) or a signal (return its number)."""
        state, steps, first = self.state, self.stream.steps, self.state.step
        saved, clock = time.monotonic(), StepClock(state.step)
        if state.step == steps and state.evaluated < steps:  # a run that was killed between the two
            self.evaluate()
            self.save()
        self._agree(iterator)
        while state.step < steps:
            result = self.make_step(iterator)
            if self._logging_due():
                self._log_step(result, clock, iterator)
            if state.step == steps:
                self._check_result(first)
            if self._evaluation_due():
                self.settle()  # waits for the device, so that the time of its steps is included
                with clock.paused():
                    self.evaluate()
            overdue = time.monotonic() - saved >= 60 * self.recipe.saving.every_minutes
            # Clocks differ, and all processes must write their shards at the same step.
            stop, overdue = self._agree(iterator, signals.received is not None, overdue)
            self._check_writes()
            if state.step == steps or (not stop and (overdue or self._saving_due())):
                self.settle()
                with clock.paused():
                    self.save(wait=state.step == steps)
                saved = time.monotonic()
            if stop and state.step < steps:
                return signals.received or signal.SIGTERM
        return None

    def _logging_due(self) -> bool:
        step = self.state.step
        return step % self.recipe.log_every == 0 or step in (1, self.stream.steps)

    def _saving_due(self) -> bool:
        """Return whether the recipe saves after this step, apart from the time limit."""
        steps = self.recipe.saving.every_steps
        return steps is not None and self.state.step % steps == 0

    def _evaluation_due(self) -> bool:
        step = self.state.step
        ends_epoch = self.stream.ends_epoch(step)
        return step == self.stream.steps or (
            ends_epoch and self.stream.epoch(step) % self.recipe.eval_every == 0
        )

    def _log_step(self, result: StepResult, clock: StepClock, iterator: Prefetcher) -> None:
        """Log loss, learning rate and throughput since the last log entry."""
        self.settle()
        step = self.state.step
        steps, seconds = clock.lap(step)
        values = {
            "step": step,
            "epoch": step * self.recipe.batch / self.stream.samples,
            "loss": self.world.mean(float(result.loss)),
            "lr": self.state.lr,
            "grad_norm": float(result.grad_norm),
            "images_per_s": steps * self.recipe.batch / seconds,
            "data_wait": min(1.0, iterator.waited / seconds),
            "memory_mb": peak_memory_mb(self.world.device),
        }
        iterator.waited = 0.0
        self.log("step", **values)
        self.display.step(**values)


def build_trainer(recipe: Recipe, run: Path, world: World, delayed: bool | None = None) -> Trainer:
    """Build a run from a recipe.

    Args:
        recipe: settings of the run.
        run: folder of the run.
        world: the processes.
        delayed: see `build_step`.
    """
    task = recipe.task()
    data = task.train_data(world.device)
    groups, parts = task.groups, task.parts
    samples = sum(p.quota for p in parts) if parts else len(data)  # type: ignore[arg-type]
    recipe, fitting = recipe.fitted(samples, world.size * recipe.accumulate)
    stream = Stream(samples, recipe.batch, recipe.epochs, recipe.seed, recipe.steps, groups, parts)
    # Also checks that the batch can be split.
    sampler = StreamSampler(stream, 0, world.rank, world.size, recipe.accumulate)
    recipe.check_batch_split(world.size)
    state = build_state(recipe, task, world)
    arguments = recipe, world, task, data, stream, state
    require_memory(recipe, world, partial(estimate_memory, *arguments))
    stepper = build_step(recipe, world, task, state, sampler, delayed)
    part = max(recipe.batch // (world.size * recipe.accumulate), 1)
    evaluation = Evaluation(task, world, part, recipe.workers, even=state.sharded)
    trainer = Trainer(recipe, run, world, task, data, state, stepper, evaluation)
    trainer.notes = fitting + find_warnings(recipe, stream, task)
    return trainer


def train(
    recipe: Recipe,
    run: Path,
    world: World,
    resume: bool = False,
    quiet: bool = False,
    delayed: bool | None = None,
    allow_changed_data: bool = False,
    notes: Sequence[str] = (),
) -> Outcome:
    """Train a recipe in the folder `run`; flags and random generators of PyTorch are restored at the end.

    Args:
        recipe: settings of the run.
        run: folder for everything that is written.
        world: the processes, from `distributed.join`.
        resume: continue from the newest good checkpoint in `run`.
        quiet: print nothing.
        delayed: see `build_step`.
        allow_changed_data: see `Trainer.resume`.
        notes: lines to log at the start, about settings that were chosen for the user.
    """
    with (
        run_lock(run, world),
        without_cudnn_attention(world.device),
        deterministic(recipe.deterministic, world.device),
        keep_random_state(world.device),
    ):
        trainer = None
        try:
            trainer = build_trainer(recipe, run, world, delayed)
            trainer.notes = [*notes, *trainer.notes]
            _start(trainer, resume, quiet, allow_changed_data)
            return trainer.fit(quiet)
        except (RuntimeError, MemoryError) as error:
            if (memory := exhausted_memory(error)) is None:
                raise
            step = None if trainer is None else trainer.state.step
            raise training_shortage(memory, error, recipe, world, run, step) from error


def _start(trainer: Trainer, resume: bool, quiet: bool, allow_changed_data: bool) -> None:
    """Resume if requested, and write the recipe."""
    warnings: list[str] = []
    if resume:
        trainer.resume(warnings.append, allow_changed_data)
    if trainer.world.main:
        checkpoint.write_text(trainer.run / "recipe.yaml", recipe_to_yaml(trainer.recipe))
        for warning in warnings:
            Display("", 1, 0, quiet).print(warning)
