"""Commands that draw: `pale view pales`, `pale view attention`, `pale demo`."""

from __future__ import annotations

from pathlib import Path

from ..core.console import Console
from ..tools.architecture import ImageAndPales
from ..view.settings import AttentionSettings
from .console import print_line
from .info import MODELS
from .options import Command, Reporting, argument, option


class Pales(Command, ImageAndPales, name="view pales"):
    """Draw the tokens that a token attends to, in all five attention modes."""

    model: str = argument(MODELS)
    stage: int = option("stage, 1 to 4", default=1)
    at: tuple[int, int] | None = option(
        "token on the map of the stage (default: the centre)", metavar=("ROW", "COLUMN")
    )
    output: Path = option("image to write, such as pales.png", "-o", metavar="FILE")

    def run(self) -> None:
        """Draw and write."""
        from ..view.figures import save_pales

        config = self.config(self.model)
        save_pales(config, self.size, self.output, stage=self.stage - 1, at=self.at)
        print_line(f"{self.output} written")


class Attention(Reporting, AttentionSettings, name="view attention"):
    """Draw which tokens a model attends to in a photo, with rollout and Grad-CAM.

    Attention: the weights of a token in each stage. Rollout: which tokens of the first stage contribute to a token.
    Grad-CAM: the regions that support a class.

    A page (.html) is interactive and needs no server: move the pointer over the photo.

    Examples:
        pale view attention photo.jpg -o look.html
        pale view attention photo.jpg --weights runs/mine --point 310 180 -o look.png
    """

    def run(self) -> None:
        """Trace the attention, draw and write it."""
        from ..view.page import draw_attention

        trace, point = draw_attention(self)
        self.report(
            {"output": str(self.output)} | trace.plain(point),
            trace.words(),
            f"{self.output} written, {self.output.stat().st_size / 1e6:.1f} MB",
        )


class Demo(Reporting, name="demo"):
    """Write one page with everything: predictions and attention for a photo, limits, and a short training.

    The training takes about two minutes on two cores, the rest about half a minute (--no-training).
    """

    output: Path = option("folder of the page", "-o", default=Path("runs/demo"), metavar="DIR")
    photo: Path | None = option("another photo (default: a cat)", metavar="FILE")
    no_training: bool = option("leave out the training")

    def run(self) -> int:
        """Train, draw and write the page."""
        from ..view.demo import PHOTO, require_photo, train_quickstart, write

        photo = require_photo(self.photo or PHOTO)
        run = None if self.no_training else self.output / "quickstart"
        if run is not None and (code := train_quickstart(run, quiet=self.json).exit_code):
            return code
        with Console(stderr=True).status("starting") as status:
            path = write(self.output, photo, run, status.update)
        self.report({"page": str(path)}, f"{path} written: open it in a browser")
        return 0
