"""Convert a file of `pale export` for OpenVINO, ExecuTorch or Core ML, run it there, and compare with the original.

    pale export runs/pets -o pets.onnx
    python other_runtimes.py pets.onnx -o pets.xml          # OpenVINO: any task, every size of the file
    pale export runs/pets --fixed -o pets.pt2
    python other_runtimes.py pets.pt2 -o pets.pte           # ExecuTorch with XNNPACK: one image of one size
    python other_runtimes.py pets.pt2 -o pets.mlpackage     # Core ML: likewise; runs on macOS only

The suffix of the output chooses the runtime, which must be installed: openvino, executorch or coremltools.
"""

import argparse
import sys
from pathlib import Path

import numpy as np

MACOS = sys.platform == "darwin"
BOUND = 1e-3  # of the largest value of an output


def to_openvino(path, output, size):
    """Write the model for OpenVINO; return what it computes, what onnxruntime computes, and their input."""
    import onnxruntime
    import openvino

    model = openvino.Core().read_model(path)
    openvino.save_model(model, output, compress_to_fp16=False)
    # On some processors its own choice is bfloat16.
    compiled = openvino.compile_model(output, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    original = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    given = original.get_inputs()[0].shape[2:]
    x = random_image(size if isinstance(given[0], str) else given)
    return list(compiled(x).values()), original.run(None, {"images": x}), x


def one_size(path):
    """Return the program of a file as one for a single image of its size, what it computes, and its input."""
    import torch
    import torchvision  # noqa: F401  registers the operators of detectors

    program = torch.export.load(path)
    *_, h, w = next(node for node in program.graph.nodes if node.name == "images").meta["val"].shape
    if not (isinstance(h, int) and isinstance(w, int)):
        raise SystemExit(f"{path} is for every size; write it with pale export --fixed")
    x = torch.from_numpy(random_image((h, w)))
    program = torch.export.export(program.module(), (x,))
    with torch.no_grad():
        found = program.module()(x)
    return program, [found] if isinstance(found, torch.Tensor) else list(found), x


def to_executorch(path, output, size):
    """Write the model for ExecuTorch; return what it computes, what PyTorch computes, and their input."""
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower
    from executorch.runtime import Runtime

    program, expected, x = one_size(path)
    lowered = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()])
    Path(output).write_bytes(lowered.to_executorch().buffer)
    method = Runtime.get().load_program(Path(output)).load_method("forward")
    return list(method.execute([x])), expected, x


def to_core_ml(path, output, size):
    """Write the model for Core ML; return what it computes (outside macOS None), what PyTorch does, and their input."""
    import coremltools

    program, expected, x = one_size(path)
    model = coremltools.convert(
        program.run_decompositions({}),
        convert_to="mlprogram",
        compute_precision=coremltools.precision.FLOAT32,
        skip_model_load=not MACOS,
    )
    model.save(output)
    if not MACOS:
        return None, expected, x
    return list(model.predict({"images": x.numpy()}).values()), expected, x


def random_image(size):
    """Return a normalised image, (1, 3, h, w), float32."""
    return np.random.default_rng(0).standard_normal((1, 3, *size), dtype=np.float32)


WAYS = {".xml": to_openvino, ".pte": to_executorch, ".mlpackage": to_core_ml}


def main(words=None):
    """Convert, compare and print; return the largest difference, None if the runtime is not available here."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "file", help="of pale export: .onnx for OpenVINO, .pt2 of one size for the others"
    )
    parser.add_argument(
        "-o", "--output", required=True, help="model.xml, model.pte or model.mlpackage"
    )
    parser.add_argument(
        "--size",
        type=int,
        nargs=2,
        default=(224, 224),
        metavar=("H", "W"),
        help="size to compare at",
    )
    args = parser.parse_args(words)
    if Path(args.output).suffix not in WAYS:
        parser.error(f"the output must end in {', '.join(WAYS)}, got {args.output}")
    found, expected, x = WAYS[Path(args.output).suffix](args.file, args.output, args.size)
    if found is None:
        print(f"{args.output}: written; not compared, because Core ML runs on macOS only")
        return None
    pairs = [(np.asarray(a), np.asarray(b)) for a, b in zip(found, expected, strict=True)]
    differences = [float(np.abs(a - b).max() / np.abs(b).max()) for a, b in pairs]
    print(
        f"{args.output}: differs by {max(differences):.1e} of the largest value, at {tuple(x.shape)}"
    )
    if not max(differences) <= BOUND:
        raise SystemExit(f"the difference is larger than {BOUND}")
    return max(differences)


if __name__ == "__main__":
    main()
