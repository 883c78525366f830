"""The fused operators of a block against plain PyTorch in float64: on a GPU, and on the CPU in Triton's interpreter.

As in `test_triton`, the interpreter has to be chosen before the kernels are defined, so
`test_everything_in_the_interpreter` runs this module once more in a process of its own.
"""

from __future__ import annotations

import pytest
import torch
import torch.utils.checkpoint
from support.gpu_families import KERNELS, programs
from support.processes import DEVICE, in_the_interpreter, kernels, needs_triton
from timm.layers import DropPath
from torch import Tensor

import pale
from pale.bench import op as bench_op
from pale.bench.timing import BenchSettings
from pale.model.pale_transformer import PaleBlock
from pale.ops import launching as all_kernels
from pale.ops.block import grids, inference, reference, triton_op
from pale.ops.pale_attention import triton_op as attention_op

INTERPRETED = triton_op.INTERPRETED

# Floor in addition to twice the error of plain PyTorch: units in the last place of the largest result.
FLOOR = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
SMALL = {"one token": (1, 1, 1, 16), "ragged": (2, 5, 9, 48), "wide": (3, 2, 19, 32)}
LARGE = {
    "stage 1": (8, 56, 56, 64),
    "stage 2 of Pale-S": (4, 28, 28, 192),
    "stage 3": (5, 14, 14, 256),
    "stage 4": (9, 7, 7, 512),
    "stage 4 of Pale-B": (2, 7, 7, 1024),
    "long": (1, 3, 700, 96),
}
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * (not INTERPRETED)
PIECES = ("conv_norm", "conv_three", "linear_three", "finish", "norm")
SIZE = (12, 20) if INTERPRETED else (100, 76)
TEN_SIZES = [
    *((224, 224), (192, 256), (160, 160), (256, 320), (384, 384)),
    *((200, 312), (512, 512), (97, 131), (640, 480), (800, 1280)),
]
INFERENCE = ("separable_three", "linear_norm", "mlp_residual")


def arguments(piece: str, shape: tuple[int, ...]) -> list[Tensor | float | None]:
    """Arguments of a piece for a map of this shape, in float64."""
    b, _, _, c = shape

    def draw(*size: int, scale: float = 1.0) -> Tensor:
        return scale * torch.randn(size, dtype=torch.float64)

    x = 2 * draw(*shape) + 0.5
    affine = [1 + 0.1 * draw(c), draw(c), 1e-5]
    taps = [draw(c, 1, 3, 3, scale=0.3) for _ in range(3)]
    h = 4 * c
    scales = [torch.rand(b).double() + 0.5 for _ in range(2)]
    square = [draw(c, c, scale=c**-0.5) for _ in range(3)]
    w_1, w_2 = draw(h, c, scale=c**-0.5), draw(c, h, scale=h**-0.5)
    return {
        "conv_norm": [x, taps[0], draw(c), *affine],
        "conv_three": [x, *taps],
        "finish": [
            x,
            draw(*shape),
            draw(c),
            scales[0],
            *affine,
            w_1,
            draw(h),
            w_2,
            draw(c),
            scales[1],
        ],
        "norm": [x, draw(c), *affine],
        "linear_three": [draw(3, *shape), *square, *(draw(c) for _ in range(3))],
        "separable_three": [
            x,
            draw(27, c, scale=0.3),
            *square,
            *(draw(c) for _ in range(3)),
        ],
        "linear_norm": [x, square[0], draw(c), draw(*shape), draw(c), *affine],
        "mlp_residual": [x, w_1, draw(h), w_2, draw(*shape)],
    }[piece]


def results(
    function, values: list[Tensor | float | None], dtype: torch.dtype, gradients: bool
) -> list[Tensor]:
    """All outputs and all gradients, for output gradients that are the same in every dtype."""
    values = [
        x.to(DEVICE, dtype).detach().requires_grad_() if isinstance(x, Tensor) else x
        for x in values
    ]
    with torch.set_grad_enabled(gradients):
        outputs = function(*values)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    if not gradients:
        return list(outputs)
    generator = torch.Generator().manual_seed(1)
    g = [
        torch.randn(y.shape, generator=generator, dtype=torch.float64).to(DEVICE, dtype)
        for y in outputs
    ]
    leaves = [x for x in values if isinstance(x, Tensor)]
    return [*(y.detach() for y in outputs), *torch.autograd.grad(outputs, leaves, g)]


def check(piece: str, values: list[Tensor | float | None], dtype: torch.dtype) -> None:
    """At most twice the error of plain PyTorch in the same dtype, plus the floor."""
    gradients = piece not in INFERENCE
    exact = [x.to(dtype).double() if isinstance(x, Tensor) else x for x in values]
    torch.use_deterministic_algorithms(True, warn_only=True)  # memory starts as NaN
    try:
        triton_op.launches.clear()
        module = triton_op if gradients else inference
        ours = results(call(module, piece, exact), drop(piece, exact), dtype, gradients)
        assert triton_op.launches, "no kernel ran"
    finally:
        torch.use_deterministic_algorithms(False)
    plain, expected = (
        results(call(reference, piece, exact), drop(piece, exact), x, gradients)
        for x in (dtype, torch.float64)
    )
    for i, (a, b, c) in enumerate(zip(ours, plain, expected, strict=True)):
        assert a.dtype == dtype
        assert a.shape == c.shape
        error, bound = (a - c).abs().max().item(), (b - c).abs().max().item()
        limit = 2 * bound + FLOOR[dtype] * max(1, c.abs().max().item())
        assert error <= limit, f"result {i} errs by {error:.2g}, plain PyTorch by {bound:.2g}"


# Drop path's factors, which have no gradients, and arguments that may be absent, by position.
SCALES = {"finish": (3, 11)}
OPTIONAL = {"finish": (3, 11), "norm": (1,)}


def drop(piece: str, values: list) -> list:
    """The arguments that have gradients: all but drop path's scales, and what is absent."""
    return [x for i, x in enumerate(values) if i not in SCALES.get(piece, ()) and x is not None]


def call(module, piece: str, values: list):
    """The piece with drop path's scales and what is absent put back."""
    function = getattr(module, piece)

    def complete(*given):
        rest = iter(given)
        dtype = given[0].dtype
        scales = SCALES.get(piece, ())
        return function(
            *(
                None if x is None else x.to(DEVICE, dtype) if i in scales else next(rest)
                for i, x in enumerate(values)
            )
        )

    return complete


@kernels
@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("piece", PIECES + INFERENCE)
@pytest.mark.parametrize("shape", SMALL if INTERPRETED else SMALL | LARGE)
def test_outputs_and_gradients_err_at_most_twice_as_much_as_plain(shape, piece, dtype):
    check(piece, arguments(piece, (SMALL | LARGE)[shape]), dtype)


@kernels
@needs_triton
@pytest.mark.parametrize("piece", ["linear_three", *INFERENCE])
def test_few_tokens_through_the_kernels_for_many(piece, monkeypatch):
    monkeypatch.setattr(grids, "FEW", 0)
    check(piece, arguments(piece, SMALL["ragged"]), DTYPES[-1])


@kernels
@needs_triton
@pytest.mark.parametrize("piece", OPTIONAL)
def test_without_what_is_optional(piece):
    values = arguments(piece, SMALL["ragged"])
    for i in OPTIONAL[piece]:
        values[i] = None
    check(piece, values, torch.float32)


@kernels
@needs_triton
@pytest.mark.parametrize(
    ("channels", "kernel", "stride"), [(3, 7, 4), (1, 7, 2), (4, 3, 1), (3, 7, 1)]
)
@pytest.mark.parametrize("channels_last", [False, True])
def test_stem(channels, kernel, stride, channels_last):
    images = torch.randn(2, channels, 13, 18, dtype=torch.float64, device=DEVICE)
    weight = torch.randn(48, channels, kernel, kernel, dtype=torch.float64, device=DEVICE)
    bias, gamma, beta = (torch.randn(48, dtype=torch.float64, device=DEVICE) for _ in range(3))

    def plain(images, weight, bias, gamma, beta):
        y = torch.nn.functional.conv2d(images, weight, bias, stride, kernel // 2)
        return reference.norm(y.permute(0, 2, 3, 1), None, gamma, beta, 1e-5)

    values = [x.to(DTYPES[-1]) for x in (images, weight, bias, gamma, beta)]
    if channels_last:
        values[0] = values[0].contiguous(memory_format=torch.channels_last)
    packed = inference.stem_weights(values[1])
    found = inference.stem(values[0], packed, kernel, stride, *values[2:], 1e-5)
    expected = plain(*(x.double() for x in values))
    assert found.shape == expected.shape
    bound = 2 * (plain(*values) - expected).abs().max() + FLOOR[DTYPES[-1]] * expected.abs().max()
    assert (found - expected).abs().max() <= bound


@kernels
@needs_triton
@pytest.mark.parametrize("piece", ["finish", "mlp_residual"])
def test_few_channels_through_the_kernels_for_many(piece, monkeypatch):
    monkeypatch.setattr(grids, "WHOLE", 0)
    monkeypatch.setattr(grids, "FEW", 0)
    check(piece, arguments(piece, SMALL["ragged"]), DTYPES[-1])


@kernels
@needs_triton
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_operators_pass_opcheck():
    shape = 2, 3, 4, 32

    def draw(*size: int) -> Tensor:
        return torch.randn(size, device=DEVICE, requires_grad=True)

    x, y, c = draw(*shape), draw(*shape), 32
    taps, vectors = [draw(c, 1, 3, 3) for _ in range(3)], [draw(c) for _ in range(3)]
    maps, square = draw(3, *shape), [draw(c, c) for _ in range(3)]
    scale = torch.rand(2, device=DEVICE)
    wide = [draw(64, c), draw(64), draw(c, 64), draw(c)]
    kept = x, y, x, draw(*shape[:3], 64)
    ops = torch.ops.pale
    calls = [
        (ops.conv_norm, (x, taps[0], *vectors, 1e-5)),
        (ops.conv_three, (x, *taps)),
        (ops.linear_three, (maps, *square, *vectors)),
        (ops.finish, (x, y, vectors[0], scale, *vectors[1:], 1e-5, *wide, scale)),
        (ops.finish, (x, y, vectors[0], None, *vectors[1:], 1e-5, *wide, None)),
        (ops.norm, (x, vectors[0], *vectors[1:], 1e-5)),
        (ops.norm, (x, None, *vectors[1:], 1e-5)),
        (ops.conv_norm_backward, (x, y, x, y, draw(9, c), vectors[0], 1e-5)),
        (ops.conv_three_backward, (maps, x, draw(27, c))),
        (ops.linear_three_backward, (x, y, x, maps, *square)),
        (ops.finish_backward, (*kept, scale, scale, vectors[0], wide[0], wide[2], 1e-5)),
        (ops.finish_backward, (*kept, None, None, vectors[0], wide[0], wide[2], 1e-5)),
        (ops.norm_backward, (x, y, vectors[0], vectors[1], 1e-5)),
        (ops.norm_backward, (x, y, None, vectors[1], 1e-5)),
    ]
    for op, args in calls:
        if op.__name__.endswith("backward"):
            args = torch.utils._pytree.tree_map(
                lambda z: z.detach() if isinstance(z, Tensor) else z, args
            )
        torch.library.opcheck(op.default, args)


@pytest.fixture(autouse=True)
def full_precision(monkeypatch):
    """Without TensorFloat-32 in cuDNN's convolutions, which is as coarse as bfloat16 is."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def small_model(**kwargs):
    """A model with one block per stage."""
    return pale.create_model("pale_nano", depths=(1, 1, 1, 1), num_classes=5, **kwargs).to(DEVICE)


@kernels
@needs_triton
@pytest.mark.parametrize("position", ["cpe", "none"])
def test_model_through_the_kernels_equals_the_plain_one(position):
    plain = small_model(backend="sdpa", position=position)
    ours = small_model(position=position)
    ours.load_state_dict(plain.state_dict())
    x = torch.randn(2, 3, *SIZE, device=DEVICE)
    expected, found = plain(x), ours(x)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    g = torch.randn_like(expected)
    for a, b in zip(
        torch.autograd.grad(found, list(ours.parameters()), g),
        torch.autograd.grad(expected, list(plain.parameters()), g),
        strict=True,
    ):
        torch.testing.assert_close(a, b, atol=1e-4 * b.abs().max().item() + 1e-6, rtol=1e-3)
    quick = pale.optimize(ours, dtype=torch.float32)
    torch.testing.assert_close(quick(x), expected, atol=1e-5, rtol=1e-4)
    assert {type(m).__name__ for m in quick.modules()} >= {"FusedBlock", "FusedStem"}
    assert not any(isinstance(m, PaleBlock) for m in quick.modules())


@kernels
@needs_triton
@pytest.mark.skipif(INTERPRETED, reason="takes most of a minute, and opcheck covers it")
def test_compiled_training_equals_eager():
    """With drop path and the random numbers of eager PyTorch, so that both drop the same branches."""
    model = small_model(drop_path_rate=0.5).train()
    x = torch.randn(4, 3, *SIZE, device=DEVICE)

    def gradients(network) -> list[Tensor]:
        torch.manual_seed(3)
        return list(torch.autograd.grad(network(x).square().sum(), list(model.parameters())))

    expected = gradients(model)
    torch._dynamo.reset()
    with torch._inductor.config.patch(fallback_random=True):
        found = gradients(torch.compile(model, fullgraph=True))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4 * b.abs().max().item() + 1e-6, rtol=1e-3)
    whole = gradients(model.eval())  # nothing is dropped
    assert (whole[0] - expected[0]).norm() > 0.05 * expected[0].norm()


@kernels
@needs_triton
def test_drop_path_and_checkpointing():
    block = small_model(drop_path_rate=0.9).train().stages[1].blocks[0]
    assert isinstance(block.drop_path1, DropPath)
    x = torch.randn(4, 2, 3, 64, device=DEVICE)
    launches = triton_op.launches

    def gradients(call) -> list[Tensor]:
        torch.manual_seed(7)
        launches.clear()
        return list(torch.autograd.grad(call(x).square().sum(), list(block.parameters())))

    expected = gradients(block)
    once = launches["conv_three"]
    found = gradients(lambda x: torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False))
    assert (once, launches["conv_three"]) == (1, 2)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


@kernels
@needs_triton
def test_a_hidden_layer_that_the_kernels_cannot_sum_is_computed_plainly():
    block = small_model(mlp_ratio=(3.3, 3.3, 3.3, 3.3)).stages[0].blocks[0]
    triton_op.launches.clear()
    block(torch.randn(1, 2, 3, 32, device=DEVICE)).sum().backward()
    assert block.mlp.fc1.out_features % 16
    assert not triton_op.launches["add_norm"] + triton_op.launches["sum_rows"]
    assert block.mlp.fc1.bias.grad.isfinite().all()


@kernels
@needs_triton
def test_no_images():
    block = small_model().stages[0].blocks[0]
    x = torch.randn(0, 2, 3, 32, device=DEVICE, requires_grad=True)
    y = block(x)
    assert y.shape == x.shape
    y.sum().backward()
    assert all(not p.grad.any() for p in block.parameters())


@kernels
@needs_triton
@pytest.mark.parametrize(
    "part", ["attn", "attn.phi_k.pointwise", "attn.proj", "mlp", "mlp.fc2", "norm1", "cpe"]
)
def test_a_hook_is_honoured(part):
    block = small_model().eval().stages[0].blocks[0]
    seen = []
    block.get_submodule(part).register_forward_hook(lambda *args: seen.append(args[2].shape))
    with torch.no_grad():
        block(torch.randn(1, 2, 3, 32, device=DEVICE))
    # Convolutions are PyTorch's own and receive NCHW maps.
    assert seen == [(1, 32, 2, 3) if part == "cpe" else (1, 2, 3, 32)]


@kernels
@needs_triton
@pytest.mark.parametrize("part", ["attn", "mlp"])
def test_a_replaced_part_is_honoured(part):
    block = small_model().eval().stages[0].blocks[0]
    setattr(block, part, torch.nn.Identity())
    triton_op.launches.clear()
    with torch.no_grad():
        block(torch.randn(1, 2, 3, 32, device=DEVICE))
    assert not triton_op.launches["conv_norm"]


class Doubled(torch.nn.Module):
    def forward(self, x):
        return 2 * x


OTHERS = {
    "mlp.act": lambda: torch.nn.GELU("tanh"),
    "drop_path1": Doubled,
    "cpe": lambda: torch.nn.Conv2d(32, 32, 3, padding=2, dilation=2, groups=32),
    "norm1": lambda: torch.nn.LayerNorm(32, elementwise_affine=False),
    "attn.proj": lambda: torch.nn.Linear(32, 32, bias=False),
    "attn.phi_q.depthwise": lambda: torch.nn.Conv2d(32, 32, 3, padding=1, groups=32),
}


@kernels
@needs_triton
@pytest.mark.parametrize("part", OTHERS)
def test_another_layer_of_the_same_class_is_what_runs(part):
    block = small_model().eval().stages[0].blocks[0]
    parent, _, name = part.rpartition(".")
    setattr(block.get_submodule(parent), name, OTHERS[part]().to(DEVICE))
    seen = []
    block.get_submodule(part).register_forward_hook(lambda *_: seen.append(1))
    x = torch.randn(1, 2, 3, 32, device=DEVICE)
    with torch.no_grad():
        expected = block(x)  # with a hook every layer is called
        block.get_submodule(part)._forward_hooks.clear()
        triton_op.launches.clear()
        # A linear layer that is called rounds differently from oneDNN's; another layer differs in the first digit.
        torch.testing.assert_close(block(x), expected, rtol=1e-5, atol=1e-5)
    assert seen == [1]
    assert not triton_op.launches["conv_norm"]


@kernels
@needs_triton
def test_a_forward_of_an_instances_own_is_honoured():
    block = small_model().eval().stages[0].blocks[0]
    x = torch.randn(1, 2, 3, 32, device=DEVICE)
    with torch.no_grad():
        before = block(x)
        proj = block.attn.proj
        proj.forward = lambda y: 100 + torch.nn.Linear.forward(proj, y)
        assert not torch.allclose(block(x), before, atol=1)


@kernels
@needs_triton
def test_an_optimized_block_refuses_weights_that_are_elsewhere():
    quick = pale.optimize(small_model(), dtype=torch.float32)
    block = quick.stages[0].blocks[0]
    block.norm1.to("meta")
    with pytest.raises(RuntimeError, match="needs its weights on the device of its input"):
        block(torch.randn(1, 2, 3, 32, device=DEVICE))


@pytest.fixture
def asked(monkeypatch):
    """Record the requested kernels, with everything that determines their compilation; none runs."""
    found = set()

    def note(module, name, grid, *args, options, **constants):
        kinds = [
            (x.dtype, x.data_ptr() % 16)
            if isinstance(x, Tensor)
            else isinstance(x, int) and x.bit_length() > 31
            for x in args
        ]
        found.add((name, *kinds, *options.items(), *constants.items()))

    monkeypatch.setattr(grids, "launch", note)
    monkeypatch.setattr(attention_op, "launch", note)
    return found


@pytest.mark.skipif(not INTERPRETED, reason="kernels run on CPU tensors only in the interpreter")
@pytest.mark.parametrize("use", ["training", "inference"])
@pytest.mark.parametrize("kind", [{}, {"attention": "vanilla"}, {"attention": "sequential"}])
def test_after_a_warm_up_no_size_needs_another_kernel(asked, use, kind):
    model = pale.create_model("pale_tiny", depths=(2, 1, 1, 2), drop_path_rate=0.1, **kind)
    if use == "inference":
        model = pale.optimize(model)
    before = {name: x.clone() for name, x in model.state_dict().items()}

    def run(job, *args):
        if use == "inference":
            with torch.inference_mode():
                job(*args)
        else:
            with torch.autocast("cpu", torch.bfloat16):
                if (y := job(*args)) is not None:
                    y.float().sum().backward()

    random = torch.get_rng_state()
    run(pale.warm_up, model)
    assert torch.equal(random, torch.get_rng_state())
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(before[name], x) for name, x in model.state_dict().items())
    known = set(asked)
    asked.clear()
    dtype = torch.bfloat16 if use == "inference" else torch.float32
    for h, w in [*TEN_SIZES, (32, 32), (1, 1), (33, 1470)]:
        run(model, torch.randn(1, 3, h, w, dtype=dtype))
        assert not asked - known, (h, w)
    for batch, side in ((8, 224), (70, 32)):
        run(model, torch.randn(batch, 3, side, side, dtype=dtype))
        assert not asked - known, (batch, side)
    assert len(asked) > 20


def test_a_warm_up_where_no_kernels_run_does_nothing(asked):
    model = pale.create_model("pale_nano", backend="sdpa" if INTERPRETED else "auto")
    assert pale.warm_up(model) is None
    assert not asked


@pytest.mark.gpu
@needs_triton
@pytest.mark.parametrize("use", ["training", "inference"])
def test_after_a_warm_up_nothing_is_compiled_for_ten_sizes(use):
    plain, model = small_model(backend="sdpa"), small_model()
    model.load_state_dict(plain.state_dict())
    model = model if use == "training" else pale.optimize(model)
    context = torch.inference_mode if use == "inference" else torch.enable_grad
    dtype = torch.bfloat16 if use == "inference" else torch.float32
    with context(), torch.autocast("cuda", torch.bfloat16, enabled=use == "training"):
        pale.warm_up(model)
        known = len(all_kernels._compiled)
        for h, w in TEN_SIZES:
            x = torch.randn(2, 3, h, w, device="cuda", dtype=dtype)
            y = model(x)
            if use == "training":
                y.float().sum().backward()
            with torch.no_grad(), torch.autocast("cuda", enabled=False):
                expected = plain(x.float())
            assert (y.float() - expected).norm() < 0.05 * expected.norm(), (h, w)
    assert len(all_kernels._compiled) == known


@needs_triton
@pytest.mark.skipif(INTERPRETED, reason="nothing is compiled")
@pytest.mark.parametrize(
    ("module", "least"),
    [
        (module, {"suppression": 2, "loss": 3}.get(family, 4))
        for family, modules in KERNELS.items()
        for module in modules
    ],
)
def test_kernels_are_compiled_for_no_number_in_particular(module, least):
    """Triton would compile one for a single token, for example; here one kernel serves all numbers."""
    found = programs(module)
    assert len(found) >= least
    for kernel in found:
        for parameter in kernel.params:
            number = not (parameter.is_constexpr or parameter.name.startswith("p_"))
            real = parameter.name in ("eps", "scale", "overlap")
            assert not number or real or parameter.do_not_specialize, (kernel, parameter.name)


@kernels
@needs_triton
@pytest.mark.parametrize("piece", list(bench_op.PIECES))
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_bench_measures_the_kernels_of_each_piece_against_plain_pytorch(piece, backward):
    setting = BenchSettings((64, 64), device=DEVICE, dtype="fp32", rounds=2)
    shape = (1, 3, 4, 16) if INTERPRETED else (2, 8, 6, 16)
    row = bench_op.OpRow(piece, bench_op.PASSES[backward], 1, shape)
    shapes, versions = bench_op.PIECES[piece](*row.map), bench_op.piece_versions(piece)
    all_kernels.launches.clear()
    versions["plain"](*bench_op._draw(shapes, setting, False))
    assert not all_kernels.launches
    bench_op._measure(row, shapes, versions, setting, copy=1e9)
    assert row.errors == {}
    assert all_kernels.launches.total() > 0
    assert row.ratio == pytest.approx(row.ms["plain"] / row.ms["fused"])


@pytest.mark.slow
@pytest.mark.timeout(1500)
@needs_triton
@pytest.mark.skipif(INTERPRETED, reason="already in the interpreter")
def test_everything_in_the_interpreter():
    in_the_interpreter(__file__)
