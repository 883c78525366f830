"""The contract of the backbone: every variant, every attention mode, every position encoding."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import safetensors.torch
import timm
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from timm.optim import param_groups_layer_decay, param_groups_weight_decay
from torch import Tensor, nn
from torch.testing import assert_close

import pale
from pale import PaleConfig, PaleTransformer
from pale.model.pale_transformer import PSAttention

MILLIONS = {"pale_nano": 2, "pale_tiny": 22, "pale_small": 48, "pale_base": 85}
MODES = ["parallel", "sequential", "vanilla", "axial", "cross"]
POSITIONS = ["cpe", "ape", "none"]
TINY = {"channels": (8, 16, 16, 32), "heads": (2, 2, 2, 4), "depths": (2, 1, 1, 1)}

each_mode = pytest.mark.parametrize("attention", MODES)
each_position = pytest.mark.parametrize("position", POSITIONS)
each_model = pytest.mark.parametrize("name", MILLIONS)


def small(**kwargs: Any) -> PaleTransformer:
    """pale_nano with few blocks: two in the first stage, one in the others."""
    return pale.create_model("pale_nano", **{"depths": (2, 1, 1, 1), "num_classes": 10, **kwargs})


def tiny(**kwargs: Any) -> PaleTransformer:
    """Even narrower, for sweeps."""
    return small(**{**TINY, **kwargs})


def gradients(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    y = model(x)
    (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


class TestParameters:
    @each_model
    def test_parameter_count_is_the_papers(self, name: str) -> None:
        model = pale.create_model(name, device="meta")
        assert round(sum(p.numel() for p in model.parameters()) / 1e6) == MILLIONS[name]

    @each_mode
    @each_position
    def test_every_parameter_gets_a_gradient(self, attention: str, position: str) -> None:
        model = small(attention=attention, position=position)
        # Attention adds the key's bias to all scores of a query, so the softmax does not change.
        named = [name for name, _ in model.named_parameters() if "phi_k.pointwise.bias" not in name]
        grads = gradients(model, torch.randn(2, 3, 64, 96))
        assert [name for name in named if name not in grads or not grads[name].any()] == []
        assert all(grad.isfinite().all() for grad in grads.values())

    @pytest.mark.parametrize("indices", [(0, 1, 2, 3), (1, 2), (2,)], ids=str)
    def test_features_only_has_no_dead_parameters(self, indices: tuple[int, ...]) -> None:
        model = small(features_only=True, out_indices=indices)
        sum(y.square().sum() for y in model(torch.randn(1, 3, 64, 64))).backward()
        assert [name for name, p in model.named_parameters() if p.grad is None] == []

    @each_mode
    @each_position
    def test_weights_move_from_parallel_to_every_mode(self, attention: str, position: str) -> None:
        parallel, other = small(position=position), small(position=position, attention=attention)
        assert list(parallel.state_dict()) == list(other.state_dict())
        other.load_state_dict(parallel.state_dict())
        for name, p in other.state_dict().items():
            assert torch.equal(p, parallel.state_dict()[name])

    def test_every_mode_computes_something_of_its_own(self) -> None:
        weights = small().state_dict()
        x = torch.randn(1, 3, 96, 160)
        outputs = {}
        for attention in MODES:
            model = small(attention=attention).eval()
            model.load_state_dict(weights)
            outputs[attention] = model(x)
        for a in MODES:
            for b in MODES:
                assert torch.equal(outputs[a], outputs[b]) == (a == b), (a, b)

    def test_weights_survive_safetensors_bit_by_bit(self, tmp_path) -> None:
        model, other = small(position="ape").eval(), small(position="ape").eval()
        x = torch.randn(1, 3, 50, 70)
        assert not torch.equal(model(x), other(x))
        safetensors.torch.save_file(model.state_dict(), tmp_path / "model.safetensors")
        other.load_state_dict(safetensors.torch.load_file(tmp_path / "model.safetensors"))
        assert torch.equal(model(x), other(x))

    @pytest.mark.parametrize(
        "clone",
        [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))],
        ids=["deepcopy", "pickle"],
    )
    @each_mode
    def test_a_copy_computes_the_same_and_shares_nothing(
        self, clone: Callable[[nn.Module], nn.Module], attention: str
    ) -> None:
        model = tiny(attention=attention, position="ape").eval()
        other = clone(model)
        x = torch.randn(1, 3, 40, 56)
        expected = model(x)
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        assert torch.equal(other(x), expected)
        assert other.config == model.config


class TestGradientCheckpointing:
    @each_mode
    @pytest.mark.parametrize("drop_path_rate", [0.0, 0.5], ids=["plain", "drop-path"])
    def test_it_changes_no_output_and_no_gradient(
        self, attention: str, drop_path_rate: float
    ) -> None:
        model = tiny(attention=attention, drop_path_rate=drop_path_rate).train()
        x = torch.randn(4, 3, 61, 75)
        results = []
        for enable in (False, True):
            model.set_grad_checkpointing(enable)
            torch.manual_seed(7)
            results.append((model(x), gradients(model, x)))
        assert torch.equal(results[0][0], results[1][0])
        for name, grad in results[0][1].items():
            assert torch.equal(grad, results[1][1][name]), name

    def test_every_block_runs_again_in_the_backward_pass(self) -> None:
        model = tiny().train()
        model.set_grad_checkpointing()
        runs = []
        for stage in model.stages:
            for block in stage.blocks:
                block.register_forward_pre_hook(lambda *_: runs.append(1))
        y = model(torch.randn(1, 3, 32, 32))
        assert len(runs) == sum(TINY["depths"])
        y.sum().backward()
        assert len(runs) == 2 * sum(TINY["depths"])


class TestMaps:
    @each_model
    def test_features_are_nchw_at_strides_4_to_32(self, name: str) -> None:
        model = pale.create_model(name, features_only=True, depths=(1, 1, 1, 1)).eval()
        channels = pale.model.pale_transformer.VARIANTS[name].channels
        assert model.feature_info.channels() == list(channels)
        assert model.feature_info.reduction() == [4, 8, 16, 32]
        maps = model(torch.randn(2, 3, 64, 96))
        assert [y.shape for y in maps] == [
            (2, c, 64 // r, 96 // r) for c, r in zip(channels, (4, 8, 16, 32), strict=True)
        ]

    @pytest.mark.parametrize("stem_stride", [4, 2, 1])
    @pytest.mark.parametrize(
        "size", [(64, 96), (61, 83), (33, 32)], ids=["64x96", "61x83", "33x32"]
    )
    def test_map_sizes_are_rounded_up(self, stem_stride: int, size: tuple[int, int]) -> None:
        model = tiny(stem_stride=stem_stride, features_only=True).eval()
        reduction = [stem_stride * 2**i for i in range(4)]
        assert model.feature_info.reduction() == reduction
        sizes = [tuple(y.shape[-2:]) for y in model(torch.randn(1, 3, *size))]
        assert sizes == [tuple(math.ceil(n / r) for n in size) for r in reduction]
        assert sizes == model.model.config.maps(*size)

    def test_intermediates_are_the_features(self) -> None:
        model, features = tiny().eval(), tiny(features_only=True).eval()
        features.model.load_state_dict(model.state_dict(), strict=False)
        x = torch.randn(1, 3, 70, 50)
        last, maps = model.forward_intermediates(x)
        for a, b in zip(maps, features(x), strict=True):
            assert torch.equal(a, b)
        assert torch.equal(last, model.forward_features(x))
        (only,) = model.forward_intermediates(x, indices=[3], norm=True, intermediates_only=True)
        assert torch.equal(only, last)

    def test_stop_early_runs_no_later_stage(self) -> None:
        model = tiny().eval()
        model.stages[2].register_forward_hook(lambda *_: pytest.fail("stage 2 ran"))
        (y,) = model.forward_intermediates(
            torch.randn(1, 3, 32, 32), indices=[1], stop_early=True, intermediates_only=True
        )
        assert y.shape == (1, 16, 4, 4)

    def test_another_output_format_is_an_error(self) -> None:
        with pytest.raises(ValueError, match=r"output_fmt must be 'NCHW', got 'NLC'"):
            tiny().forward_intermediates(torch.randn(1, 3, 32, 32), output_fmt="NLC")


SIZES = [(32, 32), (33, 47), (97, 130), (300, 299), (31, 512), (512, 30), (1, 1), (2, 257)]


class TestSizes:
    @each_mode
    @pytest.mark.parametrize("size", SIZES, ids=[f"{h}x{w}" for h, w in SIZES])
    def test_forward_and_backward_are_finite(self, attention: str, size: tuple[int, int]) -> None:
        model = tiny(attention=attention)
        x = torch.randn(1, 3, *size, requires_grad=True)
        grads = gradients(model, x)
        assert x.grad is not None
        assert x.grad.isfinite().all()
        assert all(grad.isfinite().all() for grad in grads.values())
        assert len(grads) == len(list(model.parameters()))

    @each_mode
    @settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
    @given(h=st.integers(1, 150), w=st.integers(1, 150))
    def test_the_model_is_its_reference_at_any_size(self, attention: str, h: int, w: int) -> None:
        model = tiny(attention=attention, backend="sdpa").double().eval()
        reference = tiny(attention=attention, backend="reference").double().eval()
        reference.load_state_dict(model.state_dict())
        x = torch.randn(1, 3, h, w, dtype=torch.float64)
        assert_close(model(x), reference(x), rtol=1e-9, atol=1e-9)

    @each_mode
    @pytest.mark.parametrize("size", [(64, 1600), (1600, 64)], ids=["wide", "tall"])
    def test_a_far_pixel_influences_the_first_token(
        self, attention: str, size: tuple[int, int]
    ) -> None:
        # Far beyond the convolutions of a model with five blocks: 1600 px.
        model = tiny(attention=attention).double()
        x = torch.randn(1, 3, *size, dtype=torch.float64, requires_grad=True)
        model.forward_features(x)[0, 0, 0, 0].backward()
        assert x.grad is not None
        assert x.grad[0, :, -1, -1].any()

    def test_without_attention_a_far_pixel_has_no_influence(self) -> None:
        model = tiny().double()
        for module in model.modules():
            if isinstance(module, PSAttention):
                nn.init.zeros_(module.proj.weight)
        x = torch.randn(1, 3, 64, 1600, dtype=torch.float64, requires_grad=True)
        model.forward_features(x)[0, 0, 0, 0].backward()
        assert x.grad is not None
        assert not x.grad[0, :, -1, -1].any()

    @each_position
    def test_one_model_serves_all_sizes_as_separate_models_would(self, position: str) -> None:
        model = tiny(position=position).eval()
        copies = {size: copy.deepcopy(model) for size in SIZES}
        for size in [*SIZES, *reversed(SIZES)]:
            x = torch.randn(2, 3, *size)
            assert torch.equal(model(x), copies[size](x))

    def test_images_of_a_batch_do_not_mix(self) -> None:
        model = tiny().double().eval()
        x = torch.randn(3, 3, 45, 67, dtype=torch.float64)
        assert_close(model(x), torch.cat([model(image[None]) for image in x]))

    @pytest.mark.parametrize("in_chans", [1, 5, 8])
    def test_any_number_of_input_channels(self, in_chans: int) -> None:
        model = tiny(in_chans=in_chans)
        grads = gradients(model, torch.randn(2, in_chans, 32, 32))
        assert grads["stages.0.merge.conv.weight"].shape == (8, in_chans, 7, 7)

    def test_without_classes_the_model_gives_pooled_features(self) -> None:
        model = tiny(num_classes=0).eval()
        x = torch.randn(2, 3, 64, 64)
        assert_close(model(x), model.forward_features(x).mean((2, 3)))
        assert_close(model(x), model.forward_head(model.forward_features(x), pre_logits=True))

    @pytest.mark.parametrize("global_pool", ["avg", "max", "catavgmax"])
    def test_a_new_classifier_keeps_or_changes_the_pooling(self, global_pool: str) -> None:
        model = tiny().eval()
        model.reset_classifier(3, global_pool)
        x = torch.randn(2, 3, 64, 64)
        maps = model.forward_features(x)
        pooled = {
            "avg": maps.mean((2, 3)),
            "max": maps.amax((2, 3)),
            "catavgmax": torch.cat([maps.mean((2, 3)), maps.amax((2, 3))], 1),
        }[global_pool]
        assert_close(model(x), model.get_classifier()(pooled))
        model.reset_classifier(5)
        assert model(x).shape == (2, 5)
        assert model.global_pool == global_pool


class TestAbsolutePositions:
    def test_weights_of_224_px_load_into_a_model_of_384_px(self) -> None:
        model = tiny(position="ape", img_size=224)
        weights = model.state_dict()
        shapes = {name: p.shape for name, p in weights.items()}
        larger = tiny(position="ape", img_size=384)
        larger.load_state_dict(weights)
        assert [stage.ape.map.shape[1:3] for stage in larger.stages] == [
            (96, 96),
            (48, 48),
            (24, 24),
            (12, 12),
        ]
        for a, b in zip(larger.stages, model.stages, strict=True):
            a, b = a.ape.map.permute(0, 3, 1, 2), b.ape.map.permute(0, 3, 1, 2)
            resized = nn.functional.interpolate(b, a.shape[2:], mode="bicubic", antialias=True)
            assert_close(a, resized)
        assert {name: p.shape for name, p in weights.items()} == shapes

    def test_set_input_size_does_what_the_input_would(self) -> None:
        model = tiny(position="ape", img_size=(64, 96)).eval()
        x = torch.randn(1, 3, 100, 76)
        expected = model(x)
        model.set_input_size((100, 76))
        assert model.stages[0].ape.map.shape[1:3] == (25, 19)
        assert model.stages[0].ape.map.requires_grad
        assert model.config.img_size == (100, 76)
        assert_close(model(x), expected)

    def test_at_its_own_size_the_map_is_added_as_it_is(self) -> None:
        model = tiny(position="ape", img_size=64).eval()
        ape = model.stages[0].ape
        assert ape(torch.empty(1, 16, 16, 8)) is ape.map
        assert ape.map.std().item() == pytest.approx(0.02, rel=0.1)

    def test_positions_are_not_decayed(self) -> None:
        model = tiny(position="ape")
        assert model.no_weight_decay() == {f"stages.{i}.ape.map" for i in range(4)}
        plain, decayed = param_groups_weight_decay(
            model, 0.05, no_weight_decay_list=model.no_weight_decay()
        )
        assert plain["weight_decay"] == 0.0
        assert decayed["weight_decay"] == 0.05
        for stage in model.stages:
            assert any(p is stage.ape.map for p in plain["params"])
        assert tiny().no_weight_decay() == set()


class TestTraining:
    def test_layer_decay_grows_from_the_stem_to_the_head(self) -> None:
        model = small(position="ape")
        names = {id(p): name for name, p in model.named_parameters()}
        groups = param_groups_layer_decay(model, layer_decay=0.5)
        scale = {names[id(p)]: group["lr_scale"] for group in groups for p in group["params"]}
        assert scale.keys() == set(names.values())

        def scales(prefix: str) -> set[float]:
            return {value for name, value in scale.items() if name.startswith(prefix)}

        # One step for the stem, one for each of five blocks (a merge goes with the block after it), the head at 1.
        order = [
            ("stages.0.merge", "stages.0.ape"),
            ("stages.0.blocks.0",),
            ("stages.0.blocks.1",),
            ("stages.1.",),
            ("stages.2.",),
            ("stages.3.", "norm"),
            ("head",),
        ]
        for step, prefixes in enumerate(reversed(order)):
            for prefix in prefixes:
                assert scales(prefix) == {0.5**step}, prefix

    @pytest.mark.parametrize("name", ["pale_nano", "pale_tiny"])
    def test_the_residual_stream_keeps_its_scale_at_init(self, name: str) -> None:
        model = pale.create_model(name).eval()
        std: dict[str, float] = {}
        for path, module in model.named_modules():
            if path.split(".")[-2:-1] == ["blocks"]:
                module.register_forward_hook(
                    lambda _m, _i, y, path=path: std.update({path: y.std().item()})
                )
        with torch.no_grad():
            model(torch.randn(1, 3, 224, 224))
        assert len(std) == sum(model.config.depths)
        assert min(std.values()) > 0.5
        assert max(std.values()) < 3

    def test_sequential_alternates_rows_and_columns(self) -> None:
        model = pale.create_model("pale_nano", attention="sequential", device="meta")
        for stage in model.stages:
            scopes = [block.attn.region.scope for block in stage.blocks]
            assert scopes == ["row", "column"] * (len(scopes) // 2)

    def test_drop_path_is_active_in_training_alone(self) -> None:
        model = tiny(drop_path_rate=0.9)
        x = torch.randn(1, 3, 32, 32).expand(16, -1, -1, -1)
        y = model.train()(x)
        assert y.std(0).max() > 1e-3
        y = model.eval()(x)
        assert_close(y, y[:1].expand_as(y))
        rates = [
            getattr(block.drop_path1, "drop_prob", 0.0)
            for stage in model.stages
            for block in stage.blocks
        ]
        assert rates == sorted(rates)
        assert rates[0] == 0.0
        assert rates[-1] == pytest.approx(0.9)

    @each_mode
    def test_bfloat16_stays_near_float32(self, attention: str) -> None:
        model = small(attention=attention).eval()
        x = torch.randn(2, 3, 97, 75)
        with torch.no_grad():
            expected = model(x)
            with torch.autocast("cpu", torch.bfloat16):
                mixed = model(x)
            half = model.to(torch.bfloat16)(x.bfloat16())
        assert mixed.dtype == half.dtype == torch.bfloat16
        for y in (mixed, half):
            assert not torch.equal(y.float(), expected)
            assert (y.float() - expected).norm() < 0.03 * expected.norm()

    def test_a_bfloat16_model_trains(self) -> None:
        model = tiny(dtype=torch.bfloat16)
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
        grads = gradients(model, torch.randn(1, 3, 64, 64, dtype=torch.bfloat16))
        assert all(grad.isfinite().all() for grad in grads.values())

    def test_an_optimizer_step_learns_under_autocast(self) -> None:
        model = tiny(num_classes=4, drop_path_rate=0.1).train()
        x, target = torch.randn(8, 3, 40, 40), torch.arange(8) % 4
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        losses = []
        for _ in range(30):
            with torch.autocast("cpu", torch.bfloat16):
                loss = nn.functional.cross_entropy(model(x), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < 0.2 * losses[0]


ERRORS = {
    "misspelt-mode": ({"attention": "crss"}, r"attention must be one of .*did you mean 'cross'\?"),
    "misspelt-position": ({"position": "cep"}, r"position must be one of .*did you mean 'cpe'\?"),
    "misspelt-backend": ({"backend": "sdp"}, r"backend must be one of .*did you mean 'sdpa'\?"),
    "axial-with-a-pale-size": (
        {"attention": "axial", "pale_size": 7},
        r"pale size 1 by definition, got pale_size=7; leave it out, or use attention='parallel'",
    ),
    "odd-heads": (
        {"heads": (1, 2, 4, 6)},
        r"for attention='parallel', be even: got 1 heads for 32 channels; 'sequential' and",
    ),
    "heads-that-do-not-divide": ({"heads": (6, 2, 4, 6)}, r"heads must divide the channels"),
    "too-few-channels": ({"channels": (32, 64)}, r"channels needs one entry for each of the 4"),
    "too-few-heads": ({"heads": (2, 2, 4)}, r"heads needs one entry for each of the 4 stages"),
    "too-few-ratios": ({"mlp_ratio": (4,)}, r"mlp_ratio needs one entry for each of the 4 stages"),
    "depth-zero": ({"depths": (1, 0, 1, 1)}, r"depths must be whole numbers of at least 1"),
    "too-few-pale-sizes": ({"pale_size": (7, 7)}, r"pale_size must be one .*got \(7, 7\)"),
    "pale-size-zero": ({"pale_size": 0}, r"pale_size must be one whole number of at least 1"),
    "fractional-pale-size": ({"pale_size": 3.5}, r"pale_size must be one whole number"),
    "stem-stride-3": ({"stem_stride": 3}, r"stem_stride must be 4, 2 or 1, got 3"),
}


class TestErrors:
    @pytest.mark.parametrize(("kwargs", "message"), ERRORS.values(), ids=ERRORS)
    def test_a_wrong_architecture_says_what_is_wrong(
        self, kwargs: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(ValueError, match=message):
            pale.create_model("pale_nano", **kwargs)

    @pytest.mark.parametrize("attention", ["sequential", "vanilla"])
    def test_odd_head_counts_run_where_the_message_says_so(self, attention: str) -> None:
        model = tiny(attention=attention, heads=(1, 1, 1, 1))
        assert model(torch.randn(1, 3, 32, 32)).isfinite().all()

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            (
                "pale_tny",
                r"model must be one of pale_nano.*got 'pale_tny'; did you mean 'pale_tiny'",
            ),
            ("resnet50", r"model must be one of pale_nano.*got 'resnet50'$"),
        ],
        ids=["misspelt", "not-ours"],
    )
    def test_an_unknown_name_lists_ours(self, name: str, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            pale.create_model(name)

    def test_an_unknown_argument_is_an_error(self) -> None:
        with pytest.raises(TypeError, match="attenion"):
            pale.create_model("pale_nano", attenion="cross")

    @pytest.mark.parametrize("name", ["pale_small", "pale_base"])
    def test_pretrained_weights_do_not_exist(self, name: str) -> None:
        with pytest.raises(RuntimeError, match=f"No pretrained weights exist for {name}"):
            pale.create_model(name, pretrained=True, device="meta")

    @pytest.mark.parametrize("features", [False, True], ids=["model", "features"])
    def test_timm_creates_the_same_model(self, features: bool) -> None:
        torch.manual_seed(3)
        ours = pale.create_model("pale_nano", features_only=features)
        torch.manual_seed(3)
        theirs = timm.create_model("pale_nano", features_only=features)
        assert type(ours) is type(theirs)
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(a, b)

    def test_lists_serve_as_tuples(self) -> None:
        given_lists = PaleConfig(channels=[8, 16], heads=[2, 2], depths=[1, 1], mlp_ratio=[4, 4])
        assert given_lists == PaleConfig((8, 16), (2, 2), (1, 1), mlp_ratio=(4, 4))

    def test_repr_shows_where_each_block_attends(self) -> None:
        text = repr(tiny(attention="cross", pale_size=(7, 5, 3, 1), backend="sdpa"))
        for s in (7, 5, 3, 1):
            assert f"Region(pale_size=({s}, {s}), scope='parallel', grouping='contiguous')" in text
        assert "heads=2" in text
        assert "backend='sdpa'" in text
