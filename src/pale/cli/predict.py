"""`pale predict`: images, folders and videos, for every task."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.progress import select_progress
from ..data.sources.shard_settings import ShardSettings
from ..errors import SettingsError
from ..tasks.inference_settings import InferenceSettings, OutputSettings
from .console import print_error, print_json, print_line
from .options import Reporting, argument, option
from .weights import FOREIGN

if TYPE_CHECKING:
    from ..data.remote import RemoteOptions
    from ..predict import Prediction, Predictor


class Predict(Reporting, InferenceSettings, OutputSettings, ShardSettings, name="predict"):
    """Run inference on images, folders or videos.

    Files that cannot be read are listed at the end, and the exit code is then 1; the others are still predicted. Ctrl-C
    keeps the results so far.
    """

    inputs: list[str] = argument(
        "image, folder, list (.txt), tar archive, video or address", default=(), metavar="IMAGE"
    )
    recipe: str | None = option(FOREIGN)

    def run(self) -> int:
        """Predict; return 1 if an input failed."""
        from ..predict.bulk.command import remote_options, run_command

        if self.merge is not None or self.shard is not None:
            self.check_shard()
            track = select_progress(self.json)
            done = run_command(self, self.inputs, self.output, self._load, print_error, track)
            self.report(done.plain, done.line)
            return done.code
        if not self.inputs:
            raise SettingsError("there is nothing to predict; give images, folders or videos")
        return self._predict(remote_options(self))

    def _load(self) -> Predictor:
        from ..predict.predictor import load_predictor

        return load_predictor(self, self.recipe, print_error)

    def _predict(self, remote: RemoteOptions) -> int:
        from ..predict import Failed
        from ..predict.annotations import annotation_writer
        from ..predict.bulk.command import log_failures
        from ..predict.files import Folder
        from ..predict.inputs import Inputs

        inputs = Inputs(self.inputs, remote)
        self.check_output(inputs.videos[0][0] if inputs.videos else None)
        predictor = self._load()
        failed: list[Failed] = []
        folder = Folder(self.output, not self.no_drawing) if self.output else None
        if folder is not None and self.format is not None:
            folder.annotations = annotation_writer(
                self.format,
                folder.path,
                predictor.loaded,
                [Path(each) for each in self.inputs],
                self.image_url,
            )
        done = 0
        with folder or nullcontext():
            try:
                results = inputs.predict(predictor, folder, self.every, select_progress(self.json))
                for prediction, where in results:
                    if isinstance(prediction, Failed):
                        failed.append(prediction)
                        continue
                    done += 1
                    self._print(prediction, where)
            except KeyboardInterrupt:
                kept = f"; {self.output} holds their results" if self.output else ""
                print_error(f"interrupted after {done} of {len(inputs.images)} images{kept}")
                return 130
        log_failures(failed, len(failed), print_error)
        if self.output and not self.json:
            print_error(f"{self.output} written: {done} of {done + len(failed)} images")
        return 1 if failed else 0

    def _print(self, prediction: Prediction, where: dict[str, Any] | None) -> None:
        if self.json:
            print_json(prediction.plain() | (where or {}), None)
            return
        at = f", {where['seconds']:.2f} s" if where else ""
        print_line(f"{prediction.name}{at}: {prediction.words()}")
