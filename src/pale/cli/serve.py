"""`pale serve`: models behind HTTP, with a web page. `pale warm-up`: their kernels, compiled beforehand."""

from __future__ import annotations

import sys
from typing import Any

from ..core.progress import select_progress
from ..errors import UnavailableError
from ..serve.settings import ServeSettings
from ..tools.kernel_settings import KernelSettings
from .console import print_error, print_json, print_line
from .options import Reporting, Threaded


class Serve(Reporting, Threaded, ServeSettings, name="serve"):
    """Serve models on a web page and over HTTP.

    The server writes no files and sends nothing to other machines. An address that other machines can reach needs a
    token and, because there is no TLS, a reverse proxy in front. A client must send its headers within 10 s and the
    body with at least 4 kB per second. Ctrl-C or SIGTERM stops the server after the running requests.
    """

    def run(self) -> None:
        """Load the models and serve them until Ctrl-C."""
        try:
            from ..serve.run import serve
        except ModuleNotFoundError as error:
            if (error.name or "").split(".")[0] == "pale":
                raise
            raise UnavailableError(
                f"serving needs {error.name}, which is not installed; pip install 'pale-transformer[serve]'"
            ) from None
        self.set_threads()
        serve(self, self.print_started, print_error)
        print_error("stopped")

    def print_started(self, address: str, device: str, models: dict[str, dict[str, Any]]) -> None:
        """Print the address of the server and its models."""
        if self.json:
            print_json({"url": address, "device": device, "models": models}, None)
        else:
            for task, each in models.items():
                print_line(f"{task}: {each['model']}, {each['classes']} classes")
            print_line(f"serving on {device}; open {address} (Ctrl-C stops)")
        sys.stdout.flush()


class WarmUp(Reporting, KernelSettings, name="warm-up"):
    """Compile the GPU kernels of models, also on a machine without a GPU.

    Where the models run, TRITON_CACHE_DIR must be DIR, at the same path, with the same versions of Triton and pale.

    Example:
        pale warm-up runs/mine pale_tiny --cache DIR --target sm_90 --dtype bf16 fp32 --training
    """

    def run(self) -> None:
        """Compile and print."""
        from ..predict.kernels import compile_models

        done = compile_models(self, print_error, select_progress(self.json))
        self.report(done.plain(), done.words())
