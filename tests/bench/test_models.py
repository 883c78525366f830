"""`pale bench` with real models and short runs; the times themselves are not tested."""

import json
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from pale.bench import models, op, timing
from pale.bench.models import bench, model_flops
from pale.bench.plot import save_plot
from pale.bench.settings import BenchSettings
from pale.cli.main import main
from pale.model.cost import count
from pale.model.pale_transformer import PALE_NANO
from pale.ops.block import reference, triton_op
from pale.ops.pale_attention import pale_attention
from pale.view.figures import DIRECTION_TINTS

SMALL = ("--size", 64, "--rounds", 2, "--device", "cpu")
SETTING = BenchSettings((64, 64), device="cpu", rounds=2).resolved()


@pytest.fixture(autouse=True)
def _small_ceilings(monkeypatch):
    monkeypatch.setitem(timing.MATRIX_SIDE, "cpu", 256)
    monkeypatch.setitem(timing.COPY_BYTES, "cpu", 2**20)


def run(capsys, *argv):
    code = main([str(word) for word in argv])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_models_are_compared_in_every_task(capsys, tmp_path):
    path = tmp_path / "new" / "bench.json"
    tasks = "inference", "training", "latency"
    argv = ("bench", "pale_nano", "test_vit", "--task", *tasks, "--batch", 2, *SMALL)
    code, out, err = run(capsys, *argv, "--json", path)
    assert code == 0
    assert err == ""
    for text in ("pale_nano", "test_vit", "images/s", "first / this", "TFLOP/s", "GB/s"):
        assert text in out
    report = json.loads(path.read_text())
    rows = report["rows"]
    assert [(row["task"], row["model"], row["batch"]) for row in rows] == [
        (task, model, 1 if task == "latency" else 2)
        for task in tasks
        for model in ("pale_nano", "test_vit")
    ]
    for ours, it in zip(rows[::2], rows[1::2], strict=True):
        assert ours["ratio"] == 1
        assert it["ratio"] == pytest.approx(it["ms"] / ours["ms"])
        assert it["ratio"] == pytest.approx(ours["images_per_s"] / it["images_per_s"])
    for row in rows:
        assert row["error"] is None
        assert row["peak_bytes"] is None  # no such figure on a CPU
        low, high = row["quartiles"]
        assert low <= row["ms"] <= high
        assert row["images_per_s"] == pytest.approx(1e3 * row["batch"] / row["ms"])
        speed = row["flops"] / (1e-3 * row["ms"])
        assert row["matrix_share"] == pytest.approx(speed / report["ceilings"]["matrix"])


def test_json_describes_the_run(capsys, tmp_path):
    path = tmp_path / "bench.json"
    run(capsys, "bench", "pale_nano", "--batch", 1, *SMALL, "--json", path)
    about = json.loads(path.read_text())["about"]
    words = f"pale bench pale_nano --batch 1 --size 64 --rounds 2 --device cpu --json {path}"
    assert about["command"] == words
    assert "thread" in about["hardware"]
    assert {"commit", "python", "system", "cuda", "threads", "pale"} <= about.keys()
    assert about["packages"]["timm"]
    assert about["packages"]["torch"] == torch.__version__.partition("+")[0]
    assert about["setting"] == {
        "size": [64, 64],
        "device": "cpu",
        "dtype": "fp32",
        "rounds": 2,
        "seconds": 60.0,
        "autocast": False,
        "features": False,
        "optimized": False,
    }


def test_plot_has_a_bar_for_each_row_that_ran(capsys, tmp_path):
    path = tmp_path / "new" / "bench.png"
    argv = ("bench", "pale_nano", "test_vit", "no_such_net", "--batch", 1, *SMALL)
    assert run(capsys, *argv, "--plot", path)[0] == 0
    with Image.open(path) as image:
        colours = {colour for _, colour in image.convert("RGB").getcolors(1 << 24)}
    for tint in DIRECTION_TINTS[:2]:
        assert tuple(bytes.fromhex(tint[1:])) in colours


def test_bars_are_as_long_as_the_figures(tmp_path):
    report = bench(["pale_nano", "test_vit"], SETTING, batches=[1])
    report["rows"][0]["images_per_s"], report["rows"][1]["images_per_s"] = 50.0, 100.0
    save_plot(report, tmp_path / "bench.png")
    with Image.open(tmp_path / "bench.png") as image:
        counts = {colour: n for n, colour in image.convert("RGB").getcolors(1 << 24)}
    ours, other = (counts[tuple(bytes.fromhex(t[1:]))] for t in DIRECTION_TINTS[:2])
    assert other == 2 * ours


@pytest.mark.parametrize(
    ("peer", "size", "message"),
    [
        ("swin_tiny_patch4_window7_242", 64, "did you mean 'swin_tiny_patch4_window7_224'?"),
        ("test_vit", 8, "AssertionError: Input height (8) should be divisible by patch"),
    ],
    ids=["unknown", "size"],
)
def test_a_peer_that_fails_leaves_a_row_and_the_others_go_on(capsys, tmp_path, peer, size, message):
    path = tmp_path / "bench.json"
    argv = ("bench", "pale_nano", peer, "test_resnet", *SMALL, "--batch", 1, "--size", size)
    code, out, err = run(capsys, *argv, "--json", path)
    assert code == 0
    assert "failed, see below" in out
    assert message in err
    ours, failed, other = json.loads(path.read_text())["rows"]
    assert message in failed["error"]
    assert failed["ms"] is failed["ratio"] is None
    assert ours["ratio"] == 1
    assert other["ratio"] > 0


def test_our_own_failure_is_the_commands(capsys):
    code, out, err = run(capsys, "bench", "pale_nanno", "test_resnet", "--batch", 1, *SMALL)
    assert code == 1
    assert "test_resnet" in out
    assert "timm has no model 'pale_nanno'; did you mean 'pale_nano'?" in err
    assert "pale: pale_nanno, with which the others are compared, failed" in err


@pytest.mark.parametrize("autocast", [False, True], ids=["converted", "autocast"])
def test_weights_are_converted_without_autocast(monkeypatch, autocast):
    seen = []
    create = models.create_model

    def watched(name, size):
        model = create(name, size)
        model.register_forward_pre_hook(
            lambda m, x: seen.append((next(m.parameters()).dtype, x[0].dtype))
        )
        return model

    monkeypatch.setattr(models, "create_model", watched)
    setting = replace(SETTING, dtype="bf16", autocast=autocast)
    (row,) = models.compare(["pale_nano"], "inference", "eager", 1, setting, 1.0)
    assert row.error is None
    real = {pair for pair in seen if pair}
    assert (torch.float32,) * 2 in real if autocast else (torch.bfloat16,) * 2 in real
    seen.clear()
    models.compare(["pale_nano"], "training", "eager", 1, setting, 1.0)
    assert set(seen) == {(torch.float32, torch.float32)}


def test_peers_get_the_image_size_and_no_stochastic_depth():
    swin = models.create_model("swin_tiny_patch4_window7_224", (64, 96)).train()
    x = torch.randn(1, 3, 64, 96)
    assert torch.equal(swin(x), swin(x))


def test_flops_are_two_for_each_multiply_add_and_thrice_that_in_training():
    flops = model_flops("pale_nano", (64, 64), False)
    assert flops == 2 * count(PALE_NANO, (64, 64), counting="executed").macs
    assert model_flops("pale_nano", (64, 64), True) == flops - 2 * 192 * 1000
    for task, times in (("inference", 2), ("training", 6)):
        (row,) = models.compare(["pale_nano"], task, "eager", 2, SETTING, 1.0)
        assert row.flops == times * flops


def test_features_leave_the_classifier_out(monkeypatch):
    monkeypatch.setattr("pale.PaleTransformer.forward_head", None)
    setting = replace(SETTING, features=True, size=(64, 96))
    (row,) = models.compare(["pale_nano"], "training", "eager", 1, setting, 1.0)
    assert row.error is None


@pytest.mark.slow
def test_compiled_models_do_not_compile_again_while_measured(monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch._dynamo.utils.counters.clear()
    rows = models.compare(["pale_nano", "test_resnet"], "inference", "compiled", 1, SETTING, 1.0)
    assert [row.error for row in rows] == [None, None]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


def test_times_end_when_the_seconds_are_up_but_not_before_two_rounds():
    calls = []
    steps = {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}
    times = timing.time_in_turns(steps, BenchSettings(device="cpu", rounds=50, seconds=1e-9))
    assert calls == ["a", "b", "a", "b"]
    assert {name: len(values) for name, values in times.items()} == {"a": 2, "b": 2}


def test_a_wide_spread_gives_a_warning():
    warning = timing.spread_warning({"calm": (10.0, (9.5, 10.5)), "busy": (10.0, (9.0, 12.0))})
    assert "in 1 of 2 times, first busy: is there other load" in warning
    assert timing.spread_warning({"calm": (10.0, (9.5, 10.5))}) is None


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--rounds", "1"], "rounds at least 2 (for quartiles)"),
        (["--batch", "0"], "batches of at least 1"),
        (["--size", "1", "2", "3"], "height and width, got 3 numbers"),
        (["--plot", "bench.doc"], "got 'bench.doc'; use .png"),
        (["--threads", "0"], "--threads must be at least 1, got 0"),
        (["--optimized", "--task", "training"], "an optimized model is for inference"),
        (["--optimized", "--autocast"], "takes no autocast"),
    ],
    ids=["rounds", "batch", "size", "plot", "threads", "optimized training", "optimized autocast"],
)
def test_bad_values_are_one_clear_line(capsys, argv, message):
    code, out, err = run(capsys, "bench", *argv)
    assert code == 1
    assert out == ""
    assert err.startswith("pale: ")
    assert err.count("\n") == 1
    assert message in err


def test_op_on_a_cpu_measures_only_plain_attention(capsys, tmp_path):
    json_, png = tmp_path / "op.json", tmp_path / "op.png"
    argv = ("bench", "op", "pale_nano", *SMALL, "--stages", 1, 3, "--json", json_, "--plot", png)
    code, out, _ = run(capsys, *argv)
    assert code == 0
    for text in ("2x16x16x32", "2x4x4x128", "forward + backward", "Nothing fused to measure"):
        assert text in out
    assert "times as fast" not in out
    report = json.loads(json_.read_text())
    assert [row["stage"] for row in report["rows"]] == [1, 3, 1, 3]
    for row in report["rows"]:
        assert row["ms"].keys() == {"sdpa", "reference"}
        assert row["ratio"] is row["copy_share"] is None
        passes = 2 if "backward" in row["passes"] else 1
        b, h, w, c = row["map"]
        assert row["bytes"] == passes * 4 * b * h * w * c * 4  # q, k, v and the result in fp32
    assert report["about"]["command"].startswith("pale bench op pale_nano")
    with Image.open(png) as image:
        assert len(image.convert("RGB").getcolors(1 << 24)) > 2


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["pale_nanno"], "got 'pale_nanno'; did you mean 'pale_nano'?"),
        (["--pieces", "attenion"], "did you mean 'attention'?"),
        (["--kernels", "flsh"], "did you mean 'flash'?"),
        (["--stages", "5"], "stage must be one of 1, 2, 3, 4, got '5'"),
        (["--batch", "0"], "batch must be at least 1, got 0"),
    ],
    ids=["model", "piece", "kernel", "stage", "batch"],
)
def test_unknown_names_are_errors_of_op(capsys, argv, message):
    code, _, err = run(capsys, "bench", "op", *argv)
    assert code == 1
    assert message in err


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_the_ratio_is_the_plain_time_over_the_fused_one(backward):
    """Here another way to the same numbers stands for the kernels; `ops/test_block.py` measures those."""

    def slower(x, weight):
        for _ in range(50):
            y = x @ weight.T
        return y

    row = op.OpRow("linear", op.PASSES[backward], 1, (2, 8, 6, 16))
    versions = {"fused": F.linear, "plain": slower}
    op._measure(row, ((200, 160), (64, 160)), versions, replace(SETTING, rounds=5), copy=1e9)
    assert row.errors == {}
    assert row.ratio == pytest.approx(row.ms["plain"] / row.ms["fused"])
    assert row.ratio > 3
    assert row.copy_share == pytest.approx(row.bytes / (1e-3 * row.ms["fused"]) / 1e9)


@pytest.mark.parametrize("piece", list(op.PIECES))
def test_a_piece_is_measured_with_our_kernels_against_plain_pytorch(piece):
    versions = op.piece_versions(piece)
    assert versions == {"fused": getattr(triton_op, piece), "plain": getattr(reference, piece)}
    assert versions["fused"] is not versions["plain"]


def test_a_fused_piece_with_wrong_results_gets_no_time():
    row = op.OpRow("add", op.PASSES[False], 1, (2, 8, 6, 16))
    versions = {"fused": torch.sub, "plain": torch.add}
    op._measure(row, (row.map, row.map), versions, SETTING, copy=1e9)
    assert row.ms.keys() == {"plain"}
    assert "wrong results: " in row.errors["fused"]
    assert row.ratio is None


def test_means_are_geometric_over_the_stages():
    rows = [op.OpRow("mlp", "forward", stage, (), ratio=ratio) for stage, ratio in ((1, 2), (2, 8))]
    assert op._means(rows) == {"mlp, forward": pytest.approx(4)}


def test_the_plain_attention_is_pale_attention():
    q, k, v = torch.randn(3, 2, 8, 12, 4, 16).double()
    expected = pale_attention(q, k, v, pale_size=(4, 3), backend="reference")
    torch.testing.assert_close(op.plain_attention(q, k, v, (4, 3)), expected)
