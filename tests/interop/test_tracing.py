"""Tracers (torch.jit.trace, TensorBoard, torch.fx) and counters of operations (thop, ptflops)."""

from __future__ import annotations

import contextlib
import copy
import io
from pathlib import Path

import pytest
import timm
import torch
from interop.models import MODELS, build, client_warnings, difference, each_model, eager, images
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

pytestmark = pytest.mark.slow


@client_warnings
class TestJitTrace:
    client = "torch"

    @each_model
    @pytest.mark.parametrize("grad", [False, True], ids=["inference", "gradients"])
    def test_a_traced_model_is_saved_and_runs(
        self, grad: bool, name: str, measured, tmp_path: Path
    ) -> None:
        """`torch.jit.trace`, saved and loaded: other images of the traced size"""
        model, x = build(name), images(seed=2)
        with torch.set_grad_enabled(grad):
            torch.jit.trace(model, images(seed=1)).save(tmp_path / "traced.pt")
        traced = torch.jit.load(tmp_path / "traced.pt")
        with torch.no_grad():
            measured(difference(traced(x), eager(model, x)), 1e-5)


@client_warnings
class TestTensorBoard:
    client = "tensorboard"

    @each_model
    def test_the_graph_holds_every_layer(self, name: str, tmp_path: Path) -> None:
        """`SummaryWriter.add_graph`: one node for each convolution and linear layer"""
        pytest.importorskip("tensorboard", reason="tensorboard is not installed")
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
        from torch.utils.tensorboard import SummaryWriter

        model = build(name)
        with SummaryWriter(tmp_path) as writer:
            writer.add_graph(model, images(1))
        events = EventAccumulator(str(tmp_path))
        events.Reload()
        nodes = events.Graph().node
        for kind, operator in ((nn.Conv2d, "aten::_convolution"), (nn.Linear, "aten::linear")):
            layers = [m for m in model.modules() if isinstance(m, kind)]
            assert len([n for n in nodes if n.op == operator]) == len(layers)


class TestTimmFeatures:
    client = "timm"

    @pytest.mark.parametrize("kind", ["list", "dict", "hook", "fx", "getter"])
    def test_every_kind_of_features_gives_the_same_maps(self, kind: str, measured) -> None:
        """`features_only` with each `feature_cls`: against `forward_intermediates`"""
        model, x = build("pale"), images()
        name, options = MODELS["pale"]
        features = timm.create_model(name, features_only=True, feature_cls=kind, **options).eval()
        assert features.feature_info.channels() == [32, 64, 128, 192]
        assert features.feature_info.reduction() == [4, 8, 16, 32]
        features.load_state_dict(renamed(model.state_dict(), list(features.state_dict())))
        maps = features(x)
        maps = list(maps.values()) if isinstance(maps, dict) else maps
        expected = model.forward_intermediates(x, intermediates_only=True)
        assert len(maps) == len(expected) == 4
        pairs = zip(maps, expected, strict=True)
        measured(max(difference(y, e) for y, e in pairs), 1e-5, "of a map's largest value")

    def test_some_stages_alone_are_a_smaller_model(self) -> None:
        """`features_only` with `out_indices=(0, 2)`, each `feature_cls`: no stage beyond the third"""
        for kind in ("list", "dict", "getter"):
            features = timm.create_model(
                "pale_nano", features_only=True, feature_cls=kind, out_indices=(0, 2)
            )
            maps = features(images(1))
            maps = list(maps.values()) if isinstance(maps, dict) else maps
            assert [m.shape[1] for m in maps] == [32, 128]
            sum(m.mean() for m in maps).backward()
            assert [n for n, p in features.named_parameters() if p.grad is None] == []

    @pytest.mark.parametrize("name", ["pale", "swin"])
    def test_without_pooling_there_are_logits_at_every_place(self, name: str, measured) -> None:
        """`global_pool=''` with classes: their mean is the logits of `global_pool='avg'`"""
        pooled, x = build(name), images()
        places = build(name, global_pool="")
        places.load_state_dict(pooled.state_dict())
        with torch.no_grad():
            logits = places(x)
            assert logits.dim() == 4
            axes = (1, 2) if logits.shape[-1] == 10 else (2, 3)
            measured(difference(logits.mean(axes), pooled(x)), 1e-5)

    def test_without_pooling_and_classes_the_map_is_left(self, measured) -> None:
        """`global_pool=''`, `num_classes=0`: `forward_features`"""
        model, x = build("pale", num_classes=0, global_pool=""), images()
        with torch.no_grad():
            measured(difference(model(x), model.forward_features(x)), 0.0)
        model.reset_classifier(7, "")
        assert 7 in (model(x).shape[1], model(x).shape[-1])


def renamed(weights: dict[str, Tensor], names: list[str]) -> dict[str, Tensor]:
    """Return weights under the names of a wrapper: with a prefix, or `stages_0` for `stages.0`."""
    plain = {name.replace("_", "."): weight for name, weight in weights.items()}
    return {
        name: next(w for n, w in plain.items() if name.replace("_", ".").endswith(n))
        for name in names
    }


@client_warnings
class TestTorchvisionFeatures:
    client = "torchvision"

    @each_model
    def test_the_feature_extractor_gives_the_maps(self, name: str, measured) -> None:
        """`create_feature_extractor` of the four stages: against `forward_intermediates`"""
        extraction = pytest.importorskip("torchvision.models.feature_extraction")
        model, x = build(name), images()
        stages = "layers" if name == "swin" else "stages"
        nodes = {f"{stages}.{i}": str(i) for i in range(4)}
        features = extraction.create_feature_extractor(copy.deepcopy(model), nodes)
        with torch.no_grad():
            maps = features(x)
            expected = model.forward_intermediates(x, intermediates_only=True)
            assert list(maps) == ["0", "1", "2", "3"]
            shown = [m.permute(0, 3, 1, 2) if name == "swin" else m for m in maps.values()]
            pairs = zip(shown, expected, strict=True)
            measured(max(difference(y, e) for y, e in pairs), 1e-5, "of a map's largest value")

    def test_the_extractor_takes_other_sizes(self, measured) -> None:
        """`create_feature_extractor`: traced once, called at 64x96, 61x75 and 32x32"""
        extraction = pytest.importorskip("torchvision.models.feature_extraction")
        model = build("pale")
        features = extraction.create_feature_extractor(copy.deepcopy(model), {"stages.3": "map"})
        gaps = []
        with torch.no_grad():
            for size in ((64, 96), (61, 75), (32, 32)):
                x = images(3, size)
                gaps.append(difference(features(x)["map"], model.stages(x)))
        measured(max(gaps), 1e-5, "of the map's largest value")


def layer_macs(model: nn.Module) -> float:
    """Return the multiply-adds of convolutions and linear layers for one image, by PyTorch's counter."""
    with (
        nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH),
        FlopCounterMode(display=False) as counter,
    ):
        model(images(1))
    counts = counter.get_flop_counts()["Global"]
    return sum(n for op, n in counts.items() if "bmm" not in str(op)) / 2


@client_warnings
class TestCounters:
    client = "thop"

    @each_model
    def test_thop_counts_the_layers(self, name: str, measured) -> None:
        """`profile`: multiply-adds of convolutions and linear layers, against `FlopCounterMode`"""
        thop = pytest.importorskip("thop", reason="thop is not installed")
        model = build(name)
        expected = layer_macs(model)
        macs, parameters = thop.profile(copy.deepcopy(model), (images(1),), verbose=False)
        # It leaves out parameters of layers that it does not know: our last norm (0.02 %), ConvNeXt's scales (0.2 %).
        assert 1 - parameters / sum(p.numel() for p in model.parameters()) < 5e-3
        # thop adds what norms and pooling cost.
        measured(abs(macs - expected) / expected, 0.1, "of the multiply-adds")


@client_warnings
class TestPtflops:
    client = "ptflops"

    @each_model
    @pytest.mark.parametrize("backend", ["pytorch", "aten"])
    def test_ptflops_counts_the_layers(self, backend: str, name: str, measured) -> None:
        """`get_model_complexity_info`, both back-ends: multiply-adds against `FlopCounterMode`"""
        ptflops = pytest.importorskip("ptflops", reason="ptflops is not installed")
        model = build(name)
        expected = layer_macs(model)
        with contextlib.redirect_stdout(io.StringIO()):
            macs, _ = ptflops.get_model_complexity_info(
                copy.deepcopy(model),
                tuple(images(1).shape[1:]),
                as_strings=False,
                print_per_layer_stat=False,
                backend=backend,
            )
        assert macs is not None
        # ptflops adds biases, norms, activations and attention.
        measured(abs(macs - expected) / expected, 0.2, "of the multiply-adds")
