"""The attention of a model as arrays."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from support.recipes import classification_recipe, segmentation_recipe
from tasks.detection.test_fixed import detector
from torch import Tensor
from view.traces import SMALL, each_mode, scene, traced

import pale
from pale.cli.main import main
from pale.predict import Predictor
from pale.predict.bundle import load
from pale.view.attention import (
    AttentionTrace,
    propagate,
    select_heads,
    trace_attention,
    undo_merging,
)
from pale.view.page import page
from pale.view.sheet import PAGES
from pale.weights import zoo
from pale.weights.write import save_weights


def tokens(one: AttentionTrace, stage: int) -> Iterator[tuple[int, int]]:
    h, w = one.stages[stage][0].q.shape[:2]
    for i in range(0, h, 3):
        for j in range(0, w, 4):
            yield i, j


def attention_outputs(one: AttentionTrace) -> list[tuple[Tensor, Tensor]]:
    """Values and result of each block's attention as the model itself computes them, (h, w, heads, d)."""
    inputs: list[Tensor] = []
    results: list[Tensor] = []
    hooks, model = [], one.bundle.model
    attentions = [block.attn for stage in model.stages for block in stage.blocks]
    for attn in attentions:
        hooks.append(attn.register_forward_pre_hook(lambda _, x: inputs.append(x[0])))
        hooks.append(attn.proj.register_forward_pre_hook(lambda _, x: results.append(x[0])))
    with torch.no_grad():
        model(one.bundle.normalise(torch.from_numpy(one.pixels).permute(2, 0, 1)[None]))
        values = [attn.phi_v(x) for attn, x in zip(attentions, inputs, strict=True)]
    for hook in hooks:
        hook.remove()
    return [
        tuple(x[0].unflatten(-1, (attn.heads, -1)) for x in pair)
        for attn, *pair in zip(attentions, values, results, strict=True)
    ]


class TestWeights:
    @each_mode
    def test_weights_sum_up_the_values_to_what_the_model_computed(self, attention: str) -> None:
        one = traced(attention)
        computed = iter(attention_outputs(one))
        for stage, blocks in enumerate(one.stages):
            for block in range(len(blocks)):
                values, result = next(computed)
                for at in tokens(one, stage):
                    weights = torch.from_numpy(one.weights(stage, at, block))
                    mine = (weights.permute(1, 2, 0)[..., None] * values).sum((0, 1))
                    torch.testing.assert_close(mine, result[at], rtol=1e-4, atol=1e-5)

    @each_mode
    def test_weights_sum_to_one_over_exactly_the_tokens_of_the_region(self, attention: str) -> None:
        one = traced(attention)
        for stage, blocks in enumerate(one.stages):
            for block in range(len(blocks)):
                for at in tokens(one, stage):
                    weights, region = one.weights(stage, at, block), one.attended(stage, at, block)
                    np.testing.assert_array_equal(weights > 0, region)
                    np.testing.assert_allclose(weights.sum((1, 2)), 1, rtol=1e-5)

    def test_the_region_is_rows_for_half_of_the_heads_and_columns_for_the_rest(self) -> None:
        one = traced()
        h, w = one.stages[0][0].q.shape[:2]
        n_r, n_c = -(-h // 7), -(-w // 7)
        region = one.attended(0, (4, 5))
        rows = np.broadcast_to((np.arange(h) % n_r == 4 % n_r)[:, None], (h, w))
        columns = np.broadcast_to((np.arange(w) % n_c == 5 % n_c)[None], (h, w))
        np.testing.assert_array_equal(region, [rows, columns])

    def test_options_choose_heads(self) -> None:
        block = traced().block(1)
        assert list(select_heads(block, "mean")) == [0, 1, 2, 3]
        assert list(select_heads(block, "rows")) == [0, 1]
        assert list(select_heads(block, "columns")) == [2, 3]
        assert list(select_heads(block, "3")) == [2]
        with pytest.raises(ValueError, match=r"mean, rows, columns or a number in 1\.\.4, got '5'"):
            select_heads(block, "5")
        with pytest.raises(ValueError, match="no head of this block attends in columns"):
            select_heads(traced("sequential").block(0, 0), "columns")

    def test_a_trace_leaves_the_model_as_it_was(self) -> None:
        model = pale.create_model("pale_nano", num_classes=5, **SMALL).train()
        before = {name: t.clone() for name, t in model.state_dict().items()}
        one = trace_attention(scene(), model, size=60)
        one.grad_cam(0)
        assert model.training
        assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())
        assert not any(m._forward_pre_hooks or m._forward_hooks for m in one.bundle.model.modules())


class TestRollout:
    @each_mode
    def test_propagation_is_a_product_with_the_mean_attention(self, attention: str) -> None:
        one = traced(attention)
        block = one.block(1, 0)
        h, w = block.q.shape[:2]
        matrix = np.stack(
            [one.weights(1, (i, j), 0).mean(0).ravel() for i in range(h) for j in range(w)]
        )
        held = torch.rand(h * w)
        np.testing.assert_allclose(
            propagate(block, held), held.numpy() @ matrix, rtol=1e-4, atol=1e-6
        )

    @each_mode
    def test_rollout_sums_to_one_on_the_first_map(self, attention: str) -> None:
        one = traced(attention)
        for stage in range(2):
            rolled = one.rollout(stage, (2, 3))
            assert rolled.shape == one.stages[0][0].q.shape[:2]
            assert rolled.min() >= 0
            assert rolled.sum() == pytest.approx(1, abs=1e-5)

    def test_rollout_of_the_first_stage_is_its_blocks_and_nothing_else(self) -> None:
        one = traced()
        h, w = one.stages[0][0].q.shape[:2]
        held = np.zeros(h * w)
        held[2 * w + 3] = 1
        for block in (1, 0):
            rows = [
                one.weights(0, (i, j), block).mean(0).ravel() for i in range(h) for j in range(w)
            ]
            held = (held + held @ np.stack(rows)) / 2
        np.testing.assert_allclose(one.rollout(0, (2, 3)).ravel(), held, rtol=1e-4, atol=1e-7)

    @settings(max_examples=40, deadline=None)
    @given(h=st.integers(1, 12), w=st.integers(1, 12))
    def test_merging_backwards_gives_each_token_to_what_its_convolution_reads(
        self, h: int, w: int
    ) -> None:
        coarse = (h + 1) // 2, (w + 1) // 2
        reads = torch.nn.functional.unfold(
            torch.arange(1.0, h * w + 1).view(1, 1, h, w), 3, padding=1, stride=2
        )[0].T  # the numbers of the tokens that each coarse token reads, 0 for padding
        held = torch.rand(coarse)
        wanted = torch.zeros(h * w)
        for amount, numbers in zip(held.flatten(), reads.long(), strict=True):
            inside = numbers[numbers > 0] - 1
            wanted[inside] += amount / len(inside)
        torch.testing.assert_close(undo_merging(held, (h, w)).flatten(), wanted)


class TestGradCam:
    def test_it_is_the_gradient_weighted_map_of_the_stage(self) -> None:
        one = traced()
        model = one.bundle.model
        x = one.bundle.normalise(torch.from_numpy(one.pixels).permute(2, 0, 1)[None])
        map_ = model.forward_intermediates(x, intermediates_only=True)[1].detach().requires_grad_()
        logits = model.forward_head(model.norm(map_))
        (gradient,) = torch.autograd.grad(logits[0, 2], map_)
        wanted = (gradient.mean((2, 3), keepdim=True) * map_).sum(1)[0].clamp(min=0)
        np.testing.assert_allclose(one.grad_cam(2), wanted.detach(), rtol=1e-4, atol=1e-6)
        assert not np.allclose(one.grad_cam(2), one.grad_cam(3))

    def test_every_stage_has_one(self) -> None:
        one = traced()
        for stage, blocks in enumerate(one.stages):
            assert one.grad_cam(0, stage).shape == blocks[0].q.shape[:2]

    def test_classes_go_by_name_or_number(self) -> None:
        one = traced()
        assert one.class_number("3") == 3
        assert one.class_number("class 3") == 3
        with pytest.raises(ValueError, match="no class 'clas 3'; did you mean 'class 3'"):
            one.class_number("clas 3")
        with pytest.raises(ValueError, match="classes 0 to 4, got 5"):
            one.grad_cam(5)


class TestPoints:
    @settings(max_examples=60, deadline=None)
    @given(x=st.floats(0, 89.99), y=st.floats(0, 69.99))
    def test_the_token_of_a_point_holds_it(self, x: float, y: float) -> None:
        one = traced()
        h, w = one.pixels.shape[:2]
        for stage, stride in enumerate(one.strides):
            i, j = one.token((x, y), stage)
            assert i * stride <= y * h / 70 < (i + 1) * stride
            assert j * stride <= x * w / 90 < (j + 1) * stride
            assert (i, j) < one.stages[stage][0].q.shape[:2]

    def test_missing_stages_blocks_and_points_are_errors(self) -> None:
        one = traced()
        with pytest.raises(ValueError, match=r"x in 0\.\.89 and y in 0\.\.69, got 90 3"):
            one.token((90, 3), 0)
        with pytest.raises(ValueError, match="has 2 stages and no stage 5; choose from 1 to 2"):
            one.weights(4, (0, 0))
        with pytest.raises(ValueError, match="stage 1 has 2 blocks and no block 3"):
            one.weights(0, (0, 0), 2)
        with pytest.raises(ValueError, match="no pale attention to show"):
            trace_attention(scene(), "resnet10t")
        with pytest.raises(ValueError, match=r"size must be in 16\.\.448, got 900"):
            trace_attention(scene(), "pale_nano", size=900)


class TestCommand:
    def test_a_run_of_a_classifier(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        recipe = classification_recipe()
        run = tmp_path / "run"
        run.mkdir()
        model = recipe.model.build(2, recipe.data.size)
        about = {"recipe": recipe.plain(), "classes": ["cat", "dog"]}
        save_weights(run / "weights.safetensors", model.state_dict(), about)
        scene().save(tmp_path / "photo.png")
        command = ["view", "attention", str(tmp_path / "photo.png"), "--weights", str(run)]
        command += ["--point", "40", "30", "--class", "dog", "--json"]
        assert main([*command, "-o", str(tmp_path / "out" / "a.png")]) == 0
        about = json.loads(capsys.readouterr().out)
        assert {c["name"] for c in about["classes"]} == {"cat", "dog"}
        assert about["trained"]
        assert about["tokens"][0] == [int(30 * 32 / 70) // 4, int(40 * 41 / 90) // 4]
        with Image.open(tmp_path / "out" / "a.png") as image:
            assert image.width > 700
        assert (
            main([*command, "-o", str(tmp_path / "a.html"), "--stage", "2", "--head", "rows"]) == 0
        )

    def test_a_segmenter(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        recipe = segmentation_recipe()
        names = [f"kind {i}" for i in range(9)]
        model = recipe.model.build(9, 32)
        file = tmp_path / "segmenter.safetensors"
        save_weights(file, model.state_dict(), {"recipe": recipe.plain(), "classes": names})
        one = trace_attention(scene(), file, size=64)
        assert sum(s.share for s in one.scores) == pytest.approx(1)
        assert one.grad_cam(one.scores[0].number).shape == (2, 3)
        assert one.rollout(3, (0, 0)).sum() == pytest.approx(1, abs=1e-5)

    def test_a_detector(self) -> None:
        model = detector()
        one = trace_attention(scene(), model, size=64)
        assert len(one.scores) == 8
        assert all(0 <= s.share <= 1 for s in one.scores)
        cam = one.grad_cam(one.scores[0].number)
        assert cam.shape == (2, 3)
        assert one.weights(3, (1, 1)).sum((1, 2)) == pytest.approx(
            [1] * one.block(3).heads, abs=1e-5
        )
        assert "probability" in page(one)

    @pytest.mark.parametrize("name", ["classify_pets", "segment_pets"])
    def test_classes_and_scores_are_those_of_predict(self, name: str) -> None:
        photo = PAGES / "cat.jpg"  # not square: a crop and the whole photo give other answers
        found = Predictor(name, device="cpu", top=3)(photo)
        one = trace_attention(photo, name)
        if name == "classify_pets":
            best = {s.name: pytest.approx(s.share, abs=1e-5) for s in one.scores[:3]}
            assert dict(found.scores) == best
            assert list(found.scores) == [s.name for s in one.scores[:3]]
        else:
            # Shares of the pixels of the photo and of the model's map.
            shares = {each["class"]: each["share"] for each in found.plain()["classes"]}
            assert shares == {s.name: pytest.approx(100 * s.share, abs=1) for s in one.scores}

    def test_untrained_weights_are_reported(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        scene().save(tmp_path / "photo.png")
        command = ["view", "attention", str(tmp_path / "photo.png"), "--weights", "pale_nano"]
        assert main([*command, "--size", "64", "-o", str(tmp_path / "a.html")]) == 0
        assert "untrained" in capsys.readouterr().out

    def test_without_weights_it_is_the_packaged_classifier(
        self,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        scene().save(tmp_path / "photo.png")
        command = ["view", "attention", str(tmp_path / "photo.png"), "--size", "64", "--json"]
        assert main([*command, "-o", str(tmp_path / "a.png")]) == 0
        about = json.loads(capsys.readouterr().out)
        assert (about["model"], about["trained"]) == ("pale_nano", True)
        assert about["classes"][0]["name"] in load("classify_pets").classes
        monkeypatch.setattr(zoo.index, "FOLDER", tmp_path)
        assert main([*command, "-o", str(tmp_path / "b.png")]) == 0
        about = json.loads(capsys.readouterr().out)
        assert (about["model"], about["trained"]) == ("pale_tiny", False)

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["--point", "400", "3"], "the point must lie in the image"),
            (["--stage", "0"], "--stage must be at least 1"),
            (["--stage", "7"], "has 4 stages and no stage 7"),
            (["--head", "left"], "head must be mean, rows, columns or a number"),
            (["--weights", "pale_nan"], "did you mean pale_nano"),
            (["--weights", "runs/none"], "there are no weights at runs/none"),
            (["-o", "x.doc"], "use .png"),
        ],
    )
    def test_errors_say_what_to_do(
        self, words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        scene().save(tmp_path / "photo.png")
        command = ["view", "attention", str(tmp_path / "photo.png"), "--size", "32"]
        command += ["--weights", "pale_nano", "-o", str(tmp_path / "a.png"), *words]
        assert main(command) == 1
        assert message in capsys.readouterr().err
        assert not (tmp_path / "a.png").exists()
