"""`pale serve`: models behind HTTP, with a page."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import Any

Run = Callable[[argparse.Namespace], int | None]
LOOPBACK = ("127.0.0.1", "localhost", "::1")


def add_serve(command: Callable[[str, Run, str], Any]) -> None:
    """Add `pale serve`."""
    serve = command(
        "serve", _serve, "show models on a web page and answer requests, on this machine"
    )
    serve.add_argument(
        "--weights",
        action="append",
        default=[],
        metavar="MODEL",
        help="a run's folder, or a .safetensors file of one; again for another task",
    )
    serve.add_argument("--host", default="127.0.0.1", help="address")
    serve.add_argument("--port", type=int, default=8000, help="0: any free one")
    serve.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="a name that requests may ask for besides this machine's, behind a proxy",
    )
    serve.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda where there is one")
    serve.add_argument("--threads", type=int, metavar="N", help="of PyTorch on the CPU")
    serve.add_argument("--batch", type=int, default=8, help="pictures through a model together")
    serve.add_argument(
        "--wait-ms",
        type=float,
        default=5,
        metavar="MS",
        help="how long the first waits for others",
    )
    serve.add_argument("--queue", type=int, default=64, help="pictures that may wait for a model")
    serve.add_argument("--timeout", type=float, default=30, metavar="S", help="for a request")
    serve.add_argument("--max-upload-mb", type=float, default=20, metavar="MB", help="of a file")
    serve.add_argument("--max-pixels", type=float, default=50e6, metavar="N", help="of a picture")
    serve.add_argument("--top", type=int, default=5, help="classifier: how many classes")
    serve.add_argument(
        "--score", type=float, default=0.5, help="detector: least score of an object"
    )
    serve.add_argument(
        "--access-log", action="store_true", help="a line for each request, on stdout"
    )
    serve.epilog = (
        "Nothing is written and nothing leaves this machine. There is no log-in: an address that others reach needs a "
        "reverse proxy in front. Ctrl-C or SIGTERM finishes what is under way."
    )


def _serve(args: argparse.Namespace) -> None:
    import torch

    try:
        from .serve import Limits, Models, create_app
        from .serve.run import bind, run, url
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] == "pale":
            raise
        raise RuntimeError(
            f"serving needs {error.name}, which is not installed; pip install 'pale-transformer[serve]'"
        ) from None
    limits = Limits(
        args.batch, args.wait_ms, args.queue, args.timeout, args.max_upload_mb, int(args.max_pixels)
    )
    if args.threads is not None:
        if args.threads < 1:
            raise ValueError(f"--threads must be at least 1, got {args.threads}")
        torch.set_num_threads(args.threads)
    with closing(bind(args.host, args.port)) as listening:
        models = Models(
            args.weights, device=args.device, batch=args.batch, top=args.top, score=args.score
        )
        for predictor in models.predictors.values():
            if not predictor.loaded.trained:
                name = predictor.loaded.name
                _note(f"{name} is untrained: what it says means nothing; give a run")
        models.warm_up()
        address, hosts = url(listening), _hosts(args.host, args.allow_host)
        app = create_app(models, limits, hosts)
        started = partial(_tell, address, models.device, models.about(), args.json)
        run(app, listening, started, args.timeout, args.access_log)
        _note("stopped")


def _hosts(host: str, allowed: list[str]) -> list[str]:
    """The names that requests may ask for; none: any."""
    if host in LOOPBACK:
        return [*LOOPBACK, *allowed]
    _note(
        f"pale: {host} can be reached by others, and there is no log-in; put a reverse proxy in front, "
        "or serve on 127.0.0.1"
    )
    return [host, *LOOPBACK, *allowed] if allowed else []


def _tell(address: str, device: str, models: dict[str, dict[str, Any]], plain: bool) -> None:
    if plain:
        about = {"url": address, "device": device, "models": models}
        sys.stdout.write(json.dumps(about) + "\n")
    else:
        for task, each in models.items():
            sys.stdout.write(f"{task}: {each['model']}, {each['classes']} classes\n")
        sys.stdout.write(f"serving on {device}; open {address} (Ctrl-C stops)\n")
    sys.stdout.flush()


def _note(text: str) -> None:
    sys.stderr.write(text + "\n")
