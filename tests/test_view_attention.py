"""What a model looks at: the arrays, the sheet, and the page with its own arithmetic."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from tasks.segmented import segmented
from tasks.test_fixed import detector
from torch import Tensor
from train.tiny import tiny

import pale
from pale import weights as weight_files
from pale import zoo
from pale.cli import main
from pale.data.scenes import draw
from pale.loading import load
from pale.view_attention import Look, chosen_heads, handed_on, look, unmerged
from pale.view_sheet import DARK, TINTS, heat, laid_over, page, pale_colours, save, sheet

MODES = ["parallel", "sequential", "vanilla", "axial", "cross"]
SMALL = {"depths": (2, 2), "channels": (8, 16), "heads": (2, 4), "mlp_ratio": (2, 2)}
each_mode = pytest.mark.parametrize("attention", MODES)


def scene(width: int = 90, height: int = 70) -> Image.Image:
    return Image.fromarray(draw(3, 1, 128).image).resize((width, height))


@cache
def seen(attention: str = "parallel") -> Look:
    torch.manual_seed(1)
    model = pale.create_model("pale_nano", attention=attention, num_classes=5, **SMALL)
    for parameter in model.parameters():  # or all weights would be nearly equal
        if parameter.dim() > 1:
            parameter.data.mul_(4)
    return look(scene(), model, size=60)


def tokens(one: Look, stage: int) -> Iterator[tuple[int, int]]:
    h, w = one.stages[stage][0].q.shape[:2]
    for i in range(0, h, 3):
        for j in range(0, w, 4):
            yield i, j


def attended(one: Look) -> list[tuple[Tensor, Tensor]]:
    """Values and result of each block's attention as the model itself computes them, (h, w, heads, d)."""
    inputs: list[Tensor] = []
    results: list[Tensor] = []
    hooks, model = [], one.loaded.model
    attentions = [block.attn for stage in model.stages for block in stage.blocks]
    for attn in attentions:
        hooks.append(attn.register_forward_pre_hook(lambda _, x: inputs.append(x[0])))
        hooks.append(attn.proj.register_forward_pre_hook(lambda _, x: results.append(x[0])))
    with torch.no_grad():
        model(one.loaded.normalise(torch.from_numpy(one.image).permute(2, 0, 1)[None]))
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
        one = seen(attention)
        computed = iter(attended(one))
        for stage, blocks in enumerate(one.stages):
            for block in range(len(blocks)):
                values, result = next(computed)
                for at in tokens(one, stage):
                    weights = torch.from_numpy(one.weights(stage, at, block))
                    mine = (weights.permute(1, 2, 0)[..., None] * values).sum((0, 1))
                    torch.testing.assert_close(mine, result[at], rtol=1e-4, atol=1e-5)

    @each_mode
    def test_weights_sum_to_one_over_exactly_the_tokens_of_the_region(self, attention: str) -> None:
        one = seen(attention)
        for stage, blocks in enumerate(one.stages):
            for block in range(len(blocks)):
                for at in tokens(one, stage):
                    weights, region = one.weights(stage, at, block), one.region(stage, at, block)
                    np.testing.assert_array_equal(weights > 0, region)
                    np.testing.assert_allclose(weights.sum((1, 2)), 1, rtol=1e-5)

    def test_the_region_is_rows_for_half_of_the_heads_and_columns_for_the_rest(self) -> None:
        one = seen()
        h, w = one.stages[0][0].q.shape[:2]
        n_r, n_c = -(-h // 7), -(-w // 7)
        region = one.region(0, (4, 5))
        rows = np.broadcast_to((np.arange(h) % n_r == 4 % n_r)[:, None], (h, w))
        columns = np.broadcast_to((np.arange(w) % n_c == 5 % n_c)[None], (h, w))
        np.testing.assert_array_equal(region, [rows, columns])

    def test_words_choose_heads(self) -> None:
        block = seen().block(1)
        assert list(chosen_heads(block, "mean")) == [0, 1, 2, 3]
        assert list(chosen_heads(block, "rows")) == [0, 1]
        assert list(chosen_heads(block, "columns")) == [2, 3]
        assert list(chosen_heads(block, "3")) == [2]
        with pytest.raises(ValueError, match=r"mean, rows, columns or a number in 1\.\.4, got '5'"):
            chosen_heads(block, "5")
        with pytest.raises(ValueError, match="no head of this block attends in columns"):
            chosen_heads(seen("sequential").block(0, 0), "columns")

    def test_a_look_leaves_the_model_as_it_was(self) -> None:
        model = pale.create_model("pale_nano", num_classes=5, **SMALL).train()
        before = {name: t.clone() for name, t in model.state_dict().items()}
        one = look(scene(), model, size=60)
        one.grad_cam(0)
        assert model.training
        assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())
        assert not any(m._forward_pre_hooks or m._forward_hooks for m in one.loaded.model.modules())


class TestRollout:
    @each_mode
    def test_handing_on_is_a_product_with_the_mean_attention(self, attention: str) -> None:
        one = seen(attention)
        block = one.block(1, 0)
        h, w = block.q.shape[:2]
        matrix = np.stack(
            [one.weights(1, (i, j), 0).mean(0).ravel() for i in range(h) for j in range(w)]
        )
        held = torch.rand(h * w)
        np.testing.assert_allclose(
            handed_on(block, held), held.numpy() @ matrix, rtol=1e-4, atol=1e-6
        )

    @each_mode
    def test_rollout_sums_to_one_on_the_first_map(self, attention: str) -> None:
        one = seen(attention)
        for stage in range(2):
            rolled = one.rollout(stage, (2, 3))
            assert rolled.shape == one.stages[0][0].q.shape[:2]
            assert rolled.min() >= 0
            assert rolled.sum() == pytest.approx(1, abs=1e-5)

    def test_rollout_of_the_first_stage_is_its_blocks_and_nothing_else(self) -> None:
        one = seen()
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
        torch.testing.assert_close(unmerged(held, (h, w)).flatten(), wanted)


class TestGradCam:
    def test_it_is_the_gradient_weighted_map_of_the_stage(self) -> None:
        one = seen()
        model = one.loaded.model
        x = one.loaded.normalise(torch.from_numpy(one.image).permute(2, 0, 1)[None])
        map_ = model.forward_intermediates(x, intermediates_only=True)[1].detach().requires_grad_()
        logits = model.forward_head(model.norm(map_))
        (gradient,) = torch.autograd.grad(logits[0, 2], map_)
        wanted = (gradient.mean((2, 3), keepdim=True) * map_).sum(1)[0].clamp(min=0)
        np.testing.assert_allclose(one.grad_cam(2), wanted.detach(), rtol=1e-4, atol=1e-6)
        assert not np.allclose(one.grad_cam(2), one.grad_cam(3))

    def test_every_stage_has_one(self) -> None:
        one = seen()
        for stage, blocks in enumerate(one.stages):
            assert one.grad_cam(0, stage).shape == blocks[0].q.shape[:2]

    def test_classes_go_by_name_or_number(self) -> None:
        one = seen()
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
        one = seen()
        h, w = one.image.shape[:2]
        for stage, stride in enumerate(one.strides):
            i, j = one.token((x, y), stage)
            assert i * stride <= y * h / 70 < (i + 1) * stride
            assert j * stride <= x * w / 90 < (j + 1) * stride
            assert (i, j) < one.stages[stage][0].q.shape[:2]

    def test_what_is_not_there_is_an_error(self) -> None:
        one = seen()
        with pytest.raises(ValueError, match=r"x in 0\.\.89 and y in 0\.\.69, got 90 3"):
            one.token((90, 3), 0)
        with pytest.raises(ValueError, match="has 2 stages and no stage 5; choose from 1 to 2"):
            one.weights(4, (0, 0))
        with pytest.raises(ValueError, match="stage 1 has 2 blocks and no block 3"):
            one.weights(0, (0, 0), 2)
        with pytest.raises(ValueError, match="no pale attention to look at"):
            look(scene(), "resnet10t")
        with pytest.raises(ValueError, match=r"size must be in 16\.\.448, got 900"):
            look(scene(), "pale_nano", size=900)


class TestSheet:
    def test_tokens_lie_where_their_pixels_are(self) -> None:
        overlay = np.zeros((3, 4, 4), np.float32)
        overlay[1, 2] = (255, 0, 0, 1)
        image = np.full((22, 30, 3), 7, np.uint8)  # the last tokens reach over the edge
        shown = np.asarray(laid_over(image, overlay, 8, (60, 44)))
        red = np.zeros((44, 60), bool)
        red[16:32, 32:48] = True
        np.testing.assert_array_equal(shown[..., 0] == 255, red)
        assert (shown[~red] == 7).all()

    def test_colours_tell_rows_columns_and_both(self) -> None:
        one = seen()
        region = one.region(0, (4, 5))
        colours = pale_colours(one.block(0), region)[..., :3]
        rows, columns = region
        assert (colours[rows & ~columns] == TINTS["row"]).all()
        assert (colours[columns & ~rows] == TINTS["column"]).all()
        assert (colours[~rows & ~columns] == DARK).all()

    def test_the_largest_value_is_the_brightest(self) -> None:
        values = np.random.default_rng(0).random((5, 6)).astype(np.float32)
        light = heat(values)[..., :3].mean(-1)
        assert light.argmax() == values.argmax()
        assert (heat(np.zeros((2, 2), np.float32)) >= 0).all()

    @each_mode
    def test_every_mode_has_a_sheet(self, attention: str) -> None:
        one = seen(attention)
        whole, blocks = sheet(one), sheet(one, (3, 4), stage=1)
        assert whole.size == blocks.size  # two stages; two blocks
        assert np.asarray(whole).std() > 20

    def test_the_page_holds_everything_and_asks_for_nothing(self) -> None:
        text = page(seen(), (10, 20), title="</script><b>x")
        assert "<b>x" not in text
        assert not re.findall(r"""(?:src|href)=["']?(?!data:)\S+""", text)
        assert not re.findall(r"https?://|url\(|import\(|fetch\(|XMLHttpRequest", text)
        data = json.loads(text.split('type="application/json">')[1].split("</script>")[0])
        assert [len(s["blocks"]) for s in data["stages"]] == [2, 2]
        assert data["image"].startswith("data:image/jpeg;base64,")
        assert data["start"]["x"] == pytest.approx(10.5 * data["width"] / 90)

    def test_a_suffix_that_is_no_format_is_an_error(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"\.html or name an image format"):
            save(seen(), tmp_path / "out.doc")
        with pytest.raises(ValueError, match="no block 9"):
            save(seen(), tmp_path / "out.html", stage=0, block=8)


@pytest.mark.skipif(shutil.which("node") is None, reason="no node to run the page's arithmetic")
class TestArithmeticOfThePage:
    @each_mode
    def test_the_page_computes_the_weights_and_the_rollout_of_the_operator(
        self, attention: str, project: Path
    ) -> None:
        one = seen(attention)
        text = page(one)
        data = text.split('type="application/json">')[1].split("</script>")[0]
        core = project / "src" / "pale" / "pages" / "attention.js"
        done = subprocess.run(
            ["node", str(Path(__file__).parent / "page_numbers.js"), str(core)],
            input=data,
            capture_output=True,
            text=True,
            check=True,
        )
        out = json.loads(done.stdout)
        assert len(out["weights"]) == 3 * 2 * (2 + 4)
        for s, b, i, j, n, weights, region in out["weights"]:
            wanted = one.weights(s, (i, j), b)[n].ravel()
            np.testing.assert_allclose(weights, wanted, rtol=0.02, atol=1e-4)
            np.testing.assert_array_equal(region, one.region(s, (i, j), b)[n].ravel())
            assert sum(weights) == pytest.approx(1, abs=1e-9)
        for s, i, j, rolled in out["rollout"]:
            np.testing.assert_allclose(rolled, one.rollout(s, (i, j)).ravel(), rtol=0.02, atol=1e-4)


BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
ACT = (Path(__file__).parent / "page_acts.js").read_text()


@pytest.mark.slow
@pytest.mark.skipif(
    BROWSER is None, reason="no Chromium to open the page in; apt-get install chromium"
)
@pytest.mark.parametrize("width", [1200, 500], ids=["wide", "narrow"])
def test_the_page_works_in_a_browser(width: int, tmp_path: Path) -> None:
    one = seen()
    file = tmp_path / "page.html"
    file.write_text(
        page(one, (45, 35)).replace("<head>", f"<head><script>{ACT}</script>"), encoding="utf-8"
    )
    assert BROWSER
    words = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=8000"]
    words += [f"--window-size={width},900", f"--user-data-dir={tmp_path / 'user'}", "--dump-dom"]
    done = subprocess.run(
        [BROWSER, *words, file.as_uri()], capture_output=True, text=True, timeout=120, check=True
    )
    found = re.search(r'<pre id="out">(.*?)</pre>', done.stdout)
    assert found, done.stderr[-2000:]
    out = json.loads(found[1])
    h, w = one.stages[1][0].q.shape[:2]
    i, j = one.token((45, 35), 1)
    assert out["start"]["token"] == f"row {i}, column {j}"
    assert out["start"]["sum"] == "1.0000"
    assert out["corner"]["token"] == "row 0, column 0"
    assert out["pinned"]["token"] == f"row {h - 1}, column {w - 1}"
    assert out["up"]["token"] == f"row {h - 2}, column {w - 1}"
    rows = one.region(1, (h - 2, w - 1))[0].sum()
    assert out["rows"]["tokens"] == str(rows)
    assert out["pale"]["rows"] == f"{rows} tokens"
    assert out["rollout"]["sum"] == "1.0000"
    assert out["cam"]["class"] == one.scores[0].name
    assert out["first"]["stage"].startswith("1 of 2")
    assert out["wide"] <= 0  # nothing to scroll sideways


class TestCommand:
    def test_a_run_of_a_classifier(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        recipe = tiny()
        run = tmp_path / "run"
        run.mkdir()
        model = recipe.model.build(2, recipe.data.size)
        about = {"recipe": recipe.plain(), "classes": ["cat", "dog"]}
        weight_files.save(run / "weights.safetensors", model.state_dict(), about)
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
        recipe = segmented()
        names = [f"kind {i}" for i in range(9)]
        model = recipe.model.build(9, 32)
        file = tmp_path / "segmenter.safetensors"
        weight_files.save(file, model.state_dict(), {"recipe": recipe.plain(), "classes": names})
        one = look(scene(), file, size=64)
        assert sum(s.share for s in one.scores) == pytest.approx(1)
        assert one.grad_cam(one.scores[0].number).shape == (2, 3)
        assert one.rollout(3, (0, 0)).sum() == pytest.approx(1, abs=1e-5)

    def test_a_detector(self) -> None:
        model = detector()
        one = look(scene(), model, size=64)
        assert len(one.scores) == 8
        assert all(0 <= s.share <= 1 for s in one.scores)
        cam = one.grad_cam(one.scores[0].number)
        assert cam.shape == (2, 3)
        assert one.weights(3, (1, 1)).sum((1, 2)) == pytest.approx(
            [1] * one.block(3).heads, abs=1e-5
        )
        assert "probability" in page(one)

    def test_untrained_weights_are_told(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        scene().save(tmp_path / "photo.png")
        command = ["view", "attention", str(tmp_path / "photo.png"), "--weights", "pale_nano"]
        assert main([*command, "--size", "64", "-o", str(tmp_path / "a.html")]) == 0
        assert "untrained" in capsys.readouterr().out

    def test_without_weights_it_is_the_classifier_in_the_box(
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
        monkeypatch.setattr(zoo, "FOLDER", tmp_path)
        assert main([*command, "-o", str(tmp_path / "b.png")]) == 0
        about = json.loads(capsys.readouterr().out)
        assert (about["model"], about["trained"]) == ("pale_tiny", False)

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["--point", "400", "3"], "the point must lie in the picture"),
            (["--stage", "0"], "--stage counts from 1"),
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
