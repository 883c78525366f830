"""`pale weights`: the included weights, and tools to publish others."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from ..weights.zoo import file_sha256, get_entry, index, list_entries, verify_files
from ..weights.zoo.cards import read_card, without_metadata
from .console import print_error
from .options import Reporting, argument, option

FOREIGN = "recipe of the model, for weights that were not trained with pale"


class Folder(Reporting):
    """Base of the commands that read a folder of weights."""

    folder: Path | None = option("another folder of weights, with its index.json", metavar="DIR")

    def place(self) -> Path:
        """Return the folder; by default that of the package."""
        return index.FOLDER if self.folder is None else index.require_index(self.folder)


class Weights(Folder, name="weights"):
    """List the included weights; show, verify, export or pack weights.

    A name can be used wherever weights are expected: pale eval NAME, pale predict IMAGE --weights NAME, pale export
    NAME -o model.onnx, pale train RECIPE --init NAME.
    """

    def run(self) -> None:
        """List the weights."""
        from ..weights.zoo.listing import describe_weights

        folder = self.place()
        found = list_entries(folder)
        self.report([asdict(entry) for entry in found], describe_weights(found, folder))


class List(Weights, name="weights list"):
    """List the weights, as pale weights does."""


class Show(Folder, name="weights show"):
    """Print the card of one entry: data, recipe, figures, peers and limits."""

    name: str = argument("name listed by pale weights")

    def run(self) -> None:
        """Print the card."""
        entry = get_entry(self.name, self.place())
        card = read_card(entry, self.place())
        self.report(asdict(entry) | {"text": card}, without_metadata(card).strip().splitlines())


class Verify(Folder, name="weights verify"):
    """Check every file against its SHA-256."""

    def run(self) -> int:
        """Check; return 1 if a file differs."""
        folder = self.place()
        found = verify_files(folder)
        bad = [each.name for each in found if each.problem is not None]
        lines = [f"{each.name}: {each.file} {each.problem or 'is intact'}" for each in found]
        nothing = f"{folder} holds no weights yet: there is nothing to check"
        self.report([asdict(each) for each in found], lines or nothing)
        if bad and not self.json:
            print_error(f"pale: damaged or changed: {', '.join(bad)}; install the package again")
        return 1 if bad else 0


class Export(Folder, name="weights export"):
    """Write weights as a folder that timm and the Hugging Face hub can read.

    A classifier can then be loaded, after import pale, with timm.create_model('local-dir:DIR', pretrained=True).
    timm has no segmenters and detectors; pale eval, predict and export read them from the folder.
    """

    source: Path = argument(
        "name listed by pale weights, run folder, or .safetensors file", metavar="NAME"
    )
    target: Path = argument("folder to write", metavar="DIR")
    recipe: str | None = option(FOREIGN)

    def run(self) -> None:
        """Write the folder."""
        from ..tools.publish import export

        written = export(self.source, self.target, self.recipe, self.place())
        lines = [f"{self.target} written: {', '.join(path.name for path in written)}"]
        if any(path.name == "config.json" for path in written):
            lines += [f"import pale; timm.create_model('local-dir:{self.target}', pretrained=True)"]
        self.report({"files": [str(path) for path in written]}, lines)


class Pack(Reporting, name="weights pack"):
    """Write the weights of a run in a quarter of the space.

    Matrices are stored as int8 with a scale for each output channel. The file can be used wherever weights are
    expected; measure its accuracy with pale eval.
    """

    source: Path = argument("run folder or .safetensors file", metavar="RUN")
    output: Path = option("file to write, such as small.safetensors", "-o", metavar="FILE")
    recipe: str | None = option(FOREIGN)
    words: Path | None = option(
        "list of names for classes that are WordNet ids (n01443537 goldfish); predictions show the names",
        metavar="FILE",
    )

    def run(self) -> None:
        """Write the file."""
        from ..tools.publish import pack

        size = pack(self.source, self.output, self.recipe, words=self.words)
        digest = file_sha256(self.output)
        self.report(
            {"file": str(self.output), "bytes": size, "sha256": digest},
            f"{self.output} written: {size / 1e6:.2f} MB, sha256 {digest}",
        )


COMMANDS = (Weights, List, Show, Verify, Export, Pack)
