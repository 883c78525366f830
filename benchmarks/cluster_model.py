"""Model the time of a training step of Pale-T on 1 to 256 GPUs.

    python benchmarks/cluster_model.py -o benchmarks/results/cluster_model.md

Measured inputs come from files in benchmarks/results: the training step on one H200 as a CUDA graph, what decoding on
the GPU adds to it and the work of a loader process (reading_h200.json), the wait for a checkpoint (saving_cpu.json).
The bandwidth and latency of the network are assumptions, listed in the table. Nothing here has been run on more than
one GPU.
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

import pale

RESULTS = Path(__file__).parent / "results"
PER_MACHINE = 8  # GPUs
NVLINK = 300e9  # bytes/s of one GPU to the others of its machine: two thirds of the 450 GB/s of the data sheet
LATENCY = 20e-6  # seconds of one stage of an exchange between machines
CORES = 24  # of a machine, for each of its GPUs
NETWORKS = {
    "400 Gbit/s per GPU": 400e9 / 8 * 0.8,
    "100 Gbit/s per machine": 100e9 / 8 * 0.8 / PER_MACHINE,
}
SAVE_EVERY = 600.0  # seconds, the default of saving.every_minutes


@dataclass(frozen=True)
class Inputs:
    """Measured values.

    Attributes:
        image_s: seconds of a step for each image that is in the memory of the GPU, on one GPU.
        decode_s: seconds that decoding on the GPU adds to that.
        gradient: bytes of all gradients.
        worker_s: seconds of a core for each image if the GPU decodes JPEG files.
        checkpoint_s: seconds for which training waits for a checkpoint.
    """

    image_s: float
    decode_s: float
    gradient: int
    worker_s: float
    checkpoint_s: float


@dataclass(frozen=True)
class Step:
    """Seconds of the parts of a step."""

    compute: float
    decode: float
    exchange: float
    loader: float
    checkpoint: float

    @property
    def total(self) -> float:
        """The loader works during the rest; as one graph, the exchange starts after the backward pass."""
        rest = self.compute + self.decode + self.exchange
        return max(rest, self.loader) * (1 + self.checkpoint / SAVE_EVERY)

    @property
    def limit(self) -> str:
        """The part that takes longest."""
        parts = {name: getattr(self, name) for name in ("compute", "decode", "exchange", "loader")}
        return max(parts, key=lambda name: parts[name])


def read_inputs() -> Inputs:
    """Return the inputs from the results of other benchmarks."""
    rows = json.loads((RESULTS / "reading_h200.json").read_text())["rows"]
    ways = {row["model"]: row for row in rows}
    memory, decoding = (1 / ways[way]["images_per_s"] for way in ("in memory", "decoding"))
    rows = json.loads((RESULTS / "saving_cpu.json").read_text())["rows"]
    saving = next(r for r in rows if r["background"] and not r["fsync_delay_s"])
    parameters = sum(p.numel() for p in pale.create_model("pale_tiny").parameters())
    worker = ways["decoding"]["loader"]["worker_ms"] / 1e3
    return Inputs(memory, decoding - memory, 4 * parameters, worker, saving["wait_s"])


def model_step(inputs: Inputs, gpus: int, images: float, network: float) -> Step:
    """Return the step of `gpus` GPUs with `images` images each.

    Gradients are summed inside each machine, then between machines by eight rings, one for each GPU, of an eighth
    of the gradients, and distributed inside each machine.
    """
    local, machines = min(gpus, PER_MACHINE), max(1, gpus // PER_MACHINE)
    inside = 2 * (local - 1) / local * inputs.gradient / NVLINK
    between = 2 * (machines - 1) / machines * inputs.gradient / PER_MACHINE / network
    exchange = inside + between + 2 * (machines - 1) * LATENCY
    loader = images * inputs.worker_s / CORES
    decode = images * inputs.decode_s
    return Step(images * inputs.image_s, decode, exchange, loader, inputs.checkpoint_s)


def table(inputs: Inputs, images_of: dict[int, float]) -> list[str]:
    """Return rows of a Markdown table for numbers of GPUs and images per GPU."""
    names = [f"{name}: images/s, efficiency, limit" for name in NETWORKS]
    lines = ["| GPUs | images per GPU | compute | decode | loader | " + " | ".join(names) + " |"]
    lines.append("| " + "--- | " * (5 + len(names)))
    for gpus, images in images_of.items():
        cells = []
        for network in NETWORKS.values():
            step = model_step(inputs, gpus, images, network)
            rate = gpus * images / step.total
            share = rate * (inputs.image_s + inputs.decode_s) / gpus
            cells.append(
                f"{rate:,.0f}, {share:.0%}, {step.limit} (exchange {1e3 * step.exchange:.1f} ms)"
            )
        first = f"| {gpus} | {images:g} | "
        for part in (step.compute, step.decode, step.loader):
            first += f"{1e3 * part:.1f} ms | "
        lines.append(first + " | ".join(cells) + " |")
    return lines


def main() -> None:
    """Write the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args()
    inputs = read_inputs()
    counts = (1, 8, 16, 32, 64, 128, 256)
    rows = [
        (
            "training step",
            f"{1e3 * inputs.image_s:.3f} ms per image",
            "reading_h200.json, batch 256 in memory; proportional",
        ),
        (
            "decoding on the GPU",
            f"{1e3 * inputs.decode_s:.3f} ms per image",
            "reading_h200.json, the difference",
        ),
        ("gradients", f"{inputs.gradient / 1e6:.0f} MB in float32", "counted"),
        ("loader", f"{1e3 * inputs.worker_s:.2f} ms of a core per image", "reading_h200.json"),
        ("cores", f"{CORES} per GPU", "assumed"),
        (
            "checkpoint",
            f"{inputs.checkpoint_s:.2f} s every {SAVE_EVERY / 60:.0f} min",
            "saving_cpu.json",
        ),
        ("inside a machine", f"{NVLINK / 1e9:.0f} GB/s per GPU, {PER_MACHINE} GPUs", "assumed"),
        ("between machines", "80 % of the nominal rate", "assumed"),
        ("a stage of a ring", f"{1e6 * LATENCY:.0f} microseconds", "assumed"),
    ]
    lines = [
        "# Model of a training step on many GPUs",
        "",
        "Pale-T at 224 px, H200, CUDA graph, JPEG files decoded by the GPU. A model, not a measurement: nothing here",
        "has been run on more than one GPU. Efficiency is relative to one GPU without waiting for anything. The loader",
        "works during the other parts; the limit is the longest part.",
        "",
        "| input | value | source |",
        "| --- | --- | --- |",
        *(f"| {name} | {value} | {source} |" for name, value, source in rows),
        "",
        "## 128 images per GPU",
        "",
        *table(inputs, dict.fromkeys(counts, 128.0)),
        "",
        "## The paper's batch of 1024 divided among all GPUs",
        "",
        *table(inputs, {n: 1024 / n for n in counts[1:]}),
    ]
    options.output.write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
