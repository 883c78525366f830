"""Launch kernels as on a GPU that does not exist: Triton's own JIT, with a driver that loads and runs nothing.

    python -m support.fake_gpu FOLDER

compiles the kernels of some launches into FOLDER, launches them, and prints as JSON which of these launches found their
kernel in the folder.
"""

import json
import sys
from types import SimpleNamespace

import torch

from pale import compat
from pale.ops import compiling, launching
from pale.ops.block import conv, linear, norm
from pale.ops.pale_attention import triton_op

CAPABILITY = 90


def launches():
    """Launch kernels with different dtypes, strides, alignments, options and constants."""
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.zeros(2, 5, 7, 64, dtype=dtype)
        c = torch.zeros(64)
        taps = torch.zeros(27, 64)
        conv.launch_conv_norm(x, taps[:9], c, c, c, x, x, 1e-5)
        # Float32 weights for a map in 16 bits, and a bias at an address that is no multiple of 16.
        shifted = torch.zeros(65)[1:]
        norm.launch_add_norm(x, x, shifted, None, c, None, c, c, None, x, x, 1e-5)
    x = torch.zeros(2, 5, 7, 64, dtype=torch.bfloat16)
    *_, sums = norm.launch_norm_backward(x, None, x, torch.zeros(64), 1e-5)
    norm.add_sums(sums, torch.float32)
    w = torch.zeros(64, 64, dtype=torch.bfloat16)
    y = torch.zeros(70, 64, dtype=torch.bfloat16)
    linear.launch_linear(torch.zeros_like(y), (w,), (w[0],), (y,), gelu=True)
    q = torch.zeros(1, 20, 20, 2, 32, dtype=torch.bfloat16)
    plan = triton_op.plan_of(q.shape, q.dtype, 7, 7, "parallel", "interlaced")
    lse = torch.zeros(1, 2, 400)
    triton_op.run_forward(plan, triton_op.choose(plan, CAPABILITY), (q, q, q), q, lse)


class Driver:
    """A driver of Triton that finds a GPU, and loads and runs nothing."""

    def __init__(self, target, device):
        self.target, self.device, self.launched = target, device, 0
        properties = {"max_shared_mem": 232448}
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: properties,
            load_binary=lambda *_: (None, None, 32, 0, 1024),
        )

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return self.device

    def get_current_stream(self, device):
        return 0

    def launcher_cls(self, source, metadata):
        def run(*_, **__):
            self.launched += 1

        return run


def main():
    import triton
    from triton.runtime.driver import driver

    triton.knobs.cache.dir = sys.argv[1]
    launching.compile_for(launching.Target(CAPABILITY, dependent=True))
    with launching.recording() as recorded:
        launches()
    every = list(recorded)
    compat.compile_without_gpu(CAPABILITY)
    done = compiling.compile_kernels(every, jobs=4)

    # Triton keeps kernels in memory for each device; nothing is there yet for this one.
    fake = Driver(driver.active.get_current_target(), device=1)
    driver.set_active(fake)
    missing = [launch.name for launch in every if not compiling.is_cached(launch)]
    hits = []
    triton.knobs.compilation.listener = lambda *, cache_hit, **_: hits.append(cache_hit)
    torch.cuda.current_device = lambda: None  # the index of the device of CPU tensors
    launches()
    again = compiling.compile_kernels(every, jobs=4)
    result = {
        "kernels": done.kernels,
        "cached at first": done.cached,
        "missing": missing,
        "launched": fake.launched,
        "hits": hits,
        "cached at last": again.cached,
        "another number of warps is cached": compiling.is_cached(with_more_warps(every[0])),
    }
    print(json.dumps(result))  # noqa: T201


def with_more_warps(launch):
    """Return the launch with another number of warps."""
    options = (("num_warps", 16),)
    return launching.Launch(launch.module, launch.name, launch.kinds, options, launch.constants)


if __name__ == "__main__":
    main()
