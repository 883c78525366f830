"""`pale export`: files that run without this package."""

from __future__ import annotations

from pathlib import Path

from .console import print_error
from .options import Reporting, Threaded, argument, option
from .weights import FOREIGN


class Export(Reporting, Threaded, name="export"):
    """Export a model to a file that runs without this package.

    One file serves every batch size and image size. It is compared with PyTorch before it is written.
    examples/onnx_predict.py runs an ONNX file without PyTorch.

    Examples:
        pale export runs/mine -o model.onnx
        pale export runs/mine --format int8 -o small.onnx --data DIR/val
        pale export runs/mine --format triton -o repository/mine
    """

    source: str = argument("run folder, .safetensors file, or model name", metavar="MODEL")
    output: Path = option(
        "file to write: model.pt2 or model.onnx; for triton the folder REPOSITORY/NAME",
        "-o",
        metavar="FILE",
    )
    format: str | None = option(
        "pt2 (torch.export), aoti (AOTInductor), onnx, int8 (quantised ONNX) or triton (folder of a model repository); "
        "the default depends on the suffix, .pt2 or .onnx"
    )
    recipe: str | None = option(FOREIGN)
    device: str = option("device that an aoti file runs on: cpu or cuda", default="cpu")
    opset: int = option("ONNX opset, at least 20", default=20)
    sizes: list[str] | None = option(
        "sizes for the check, such as 1x224x224 2x180x257 (default: three around the size of the model)",
        metavar="BxHxW",
    )
    fixed: bool = option(
        "fix the image size to the first of --sizes, which Swin requires; any batch size"
    )
    data: Path | None = option(
        "folder of images for the comparison; if its folders are named like the classes, the accuracy is compared too",
        metavar="DIR",
    )

    quiet: bool = option("do not print the progress of the export")

    def run(self) -> None:
        """Export, check and print."""
        from ..exporting import export
        from ..exporting.checks import parse_size
        from ..exporting.tables import describe_exported

        self.set_threads()
        say = (lambda phase: None) if self.quiet or self.json else print_error
        say("loading")
        done = export(
            self.source,
            self.output,
            self.format,  # type: ignore[arg-type]  # export checks it
            recipe=self.recipe,
            device=self.device,
            fixed=self.fixed,
            opset=self.opset,
            sizes=[parse_size(word) for word in self.sizes] if self.sizes else None,
            data=self.data,
            say=say,
        )
        self.report(done.plain(), describe_exported(done))
