"""Exported files: the same outputs as PyTorch at every size, and a note about their use."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from serve.serving import running
from support.recipes import classification_recipe, detection_recipe, segmentation_recipe
from tasks.detection.test_fixed import detector
from torch import Tensor, nn

import pale
from pale.cli.main import main
from pale.data.decoding import read_image
from pale.data.sources.scenes import draw_scene
from pale.exporting import NOTE, read_about
from pale.predict.bundle import load
from pale.serve import Models
from pale.tasks.segmentation.inference import FullSize
from pale.weights.write import save_weights

WHY = "ONNX needs the extra export"
onnxruntime = pytest.importorskip("onnxruntime", reason=WHY)
onnx = pytest.importorskip("onnx", reason=WHY)
pytest.importorskip("onnxscript", reason=WHY)

# One stage of one block: all that an exporter meets, in a fraction of the time.
SMALL = {"depths": [1], "channels": [8], "heads": [2], "mlp_ratio": [2]}
NAMES = ["cat", "dog", "a bird, <flying>"]


def lively(model: nn.Module) -> nn.Module:
    """Weights with distinct outputs for distinct images."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(3)
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("exported")


@pytest.fixture(scope="module")
def run(folder: Path) -> Path:
    """A run of a classifier."""
    torch.manual_seed(0)
    changes = {"model.options": SMALL, "model.attention": "sequential"}  # half of the graph
    recipe = classification_recipe(data__size=40, data__crop=0.9).override(changes)
    path = folder / "run"
    path.mkdir()
    model = lively(recipe.model.build(len(NAMES), 40))
    about = {"recipe": recipe.plain(), "classes": NAMES}
    save_weights(path / "weights.safetensors", model.state_dict(), about)
    return path


@pytest.fixture(scope="module")
def photos(folder: Path) -> Path:
    """Images of many kinds: odd sizes, rotated by EXIF, grey, transparent, CMYK; in folders of classes."""
    root = folder / "photos"
    kinds = {
        "odd": (67, 43),
        "turned": (60, 90),
        "grey": (80, 80),
        "clear": (41, 77),
        "cmyk": (64, 48),
    }
    for i, (kind, size) in enumerate(kinds.items()):
        place = root / NAMES[i % len(NAMES)]
        place.mkdir(parents=True, exist_ok=True)
        image = Image.fromarray(draw_scene(i, i, 128).image).resize(size)
        if kind == "turned":
            exif = Image.Exif()
            exif[0x0112] = 6
            image.save(place / "turned.jpg", exif=exif)
        elif kind == "grey":
            image.convert("L").save(place / "grey.png")
        elif kind == "clear":
            image.putalpha(Image.linear_gradient("L").resize(size))
            image.save(place / "clear.png")
        elif kind == "cmyk":
            image.convert("CMYK").save(place / "cmyk.jpg")
        else:
            image.save(place / "odd.jpg")
    return root


@pytest.fixture(scope="module")
def onnx_file(run: Path, folder: Path) -> Path:
    path = folder / "made" / "model.onnx"
    assert main(["export", str(run), "-o", str(path)]) == 0
    return path


@torch.no_grad()
def wanted(run: Path, photo: Path) -> Tensor:
    """Return the logits of PyTorch."""
    loaded = load(run)
    return loaded.model(loaded.normalise(loaded.preprocess(read_image(photo))[None]))[0]


class TestOnnx:
    def test_the_file_describes_its_preprocessing(self, onnx_file: Path) -> None:
        about = read_about(onnx_file)
        assert about["task"] == "classification"
        assert about["classes"] == NAMES
        assert (about["size"], about["crop"], about["interpolation"]) == (40, 0.9, "bicubic")
        assert about["mean"] == pytest.approx([0.485, 0.456, 0.406])
        assert about["trained"]
        model = onnx.load(onnx_file)
        onnx.checker.check_model(model)
        assert {o.domain: o.version for o in model.opset_import}[""] >= 20
        (images,) = model.graph.input
        dims = [d.dim_param or d.dim_value for d in images.type.tensor_type.shape.dim]
        assert (images.name, dims) == ("images", ["batch", 3, "height", "width"])
        assert [o.name for o in model.graph.output] == ["logits"]

    @settings(max_examples=25, deadline=None)
    @given(b=st.integers(1, 4), h=st.integers(1, 130), w=st.integers(1, 130))
    def test_it_gives_the_logits_of_pytorch_at_every_size(
        self, onnx_file: Path, run: Path, b: int, h: int, w: int
    ) -> None:
        images = torch.randn(b, 3, h, w)
        (logits,) = session(onnx_file).run(None, {"images": images.numpy()})
        with torch.no_grad():
            torch.testing.assert_close(
                torch.from_numpy(logits), model_of(run)(images), rtol=1e-4, atol=1e-4
            )

    def test_the_example_predicts_photos_without_torch(
        self, onnx_file: Path, run: Path, photos: Path, project: Path, tmp_path: Path
    ) -> None:
        for package in ("torch", "torchvision", "timm", "pale"):
            (tmp_path / f"{package}.py").write_text("raise ImportError('must not be imported')\n")
        environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
        files = sorted(file for file in photos.rglob("*") if file.is_file())
        assert len(files) == 5
        for photo in files:
            command = [sys.executable, project / "examples" / "onnx_predict.py", onnx_file, photo]
            done = subprocess.run(
                [*command, "--json"], env=environment, capture_output=True, text=True, check=True
            )
            found, logits = json.loads(done.stdout), wanted(run, photo)
            np.testing.assert_allclose(found["logits"], logits, rtol=1e-3, atol=1e-3)
            best = logits.softmax(0).argmax()
            assert found["best"][0][0] == NAMES[best]

    def test_int8_reports_its_effect(
        self, run: Path, photos: Path, folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = folder / "int8.onnx"
        command = ["export", str(run), "--format", "int8", "-o", str(path), "--data", str(photos)]
        assert main([*command, "--json"]) == 0
        about = json.loads(capsys.readouterr().out)
        assert 0 < about["checks"][0]["share"] < 0.3
        operators = {node.op_type for node in onnx.load(path).graph.node}
        assert "MatMulInteger" in operators
        files = sorted(file for file in photos.rglob("*") if file.is_file())
        labels = [NAMES.index(file.parent.name) for file in files]
        right = [int(wanted(run, f).argmax()) == n for f, n in zip(files, labels, strict=True)]
        assert about["data"]["pictures"] == 5  # kept name
        assert about["data"]["top1"] == pytest.approx(100 * np.mean(right))
        loaded, runtime = load(run), session(path)
        inputs = [loaded.normalise(loaded.preprocess(read_image(f))[None]).numpy() for f in files]
        guesses = [int(runtime.run(None, {"images": x})[0].argmax()) for x in inputs]
        same = [g == int(wanted(run, f).argmax()) for g, f in zip(guesses, files, strict=True)]
        assert about["data"]["agreement"] == pytest.approx(100 * np.mean(same))
        assert about["data"]["top1_file"] == pytest.approx(
            100 * np.mean([g == n for g, n in zip(guesses, labels, strict=True)])
        )
        assert read_about(path)["format"] == "int8"


def session(path: Path) -> Any:
    return onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])


def model_of(run: Path) -> nn.Module:
    return load(run).model


class TestPt2:
    @pytest.mark.slow
    def test_it_runs_without_this_package(
        self, run: Path, folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = folder / "model.pt2"
        assert main(["export", str(run), "-o", str(path), "--sizes", "1x40x40", "2x33x70"]) == 0
        printed = capsys.readouterr().out
        assert "33x70" in printed
        assert f"{path} written: pt2" in printed
        images = torch.randn(3, 3, 51, 77)
        torch.save(images, folder / "images.pt")
        code = """if True:
            import sys, torch
            images = torch.load(sys.argv[2])
            notes = {"pale.json": ""}
            program = torch.export.load(sys.argv[1], extra_files=notes)
            torch.save(program.module()(images), sys.argv[2])
            assert "pale" not in sys.modules
            print(notes["pale.json"])
        """
        done = subprocess.run(
            [sys.executable, "-c", code, path, folder / "images.pt"],
            capture_output=True,
            text=True,
            check=True,
        )
        assert json.loads(done.stdout)["classes"] == NAMES
        assert read_about(path)["classes"] == NAMES
        with torch.no_grad():
            torch.testing.assert_close(
                torch.load(folder / "images.pt").detach(),
                model_of(run)(images),
                rtol=1e-4,
                atol=1e-5,
            )

    def test_a_model_of_one_size_is_exported_for_it(self, tmp_path: Path) -> None:
        model = Flat().eval()
        with pytest.raises(RuntimeError, match="export it for that size: fixed"):
            pale.export(model, tmp_path / "a.pt2")
        assert list(tmp_path.iterdir()) == []
        done = pale.export(model, tmp_path / "a.pt2", fixed=True, sizes=[(1, 8, 8)])
        assert [check.size for check in done.checks] == [(1, 8, 8), (2, 8, 8), (3, 8, 8)]
        assert read_about(tmp_path / "a.pt2")["fixed"] == [8, 8]

    @pytest.mark.slow
    @pytest.mark.parametrize(("size", "masked"), [((224, 224), False), ((100, 70), True)])
    def test_a_file_for_one_size_has_masks_only_where_groups_are_ragged(
        self, tmp_path: Path, size: tuple[int, int], masked: bool
    ) -> None:
        import onnx

        model = pale.create_model("pale_nano", depths=(1, 1, 1, 1), num_classes=3).eval()
        pale.export(model, tmp_path / "a.onnx", fixed=True, sizes=[(1, *size)])
        nodes = onnx.load(tmp_path / "a.onnx").graph.node
        made_by = {name: node.op_type for node in nodes for name in node.output}
        scores = {made_by[node.input[0]] for node in nodes if node.op_type == "Softmax"}
        assert ("Add" in scores) == masked
        images = torch.randn(3, 3, *size)
        (found,) = session(tmp_path / "a.onnx").run(None, {"images": images.numpy()})
        with torch.no_grad():
            torch.testing.assert_close(torch.from_numpy(found), model(images), rtol=1e-4, atol=1e-5)
        with pytest.raises(Exception, match="Got: 96 Expected"):
            session(tmp_path / "a.onnx").run(None, {"images": torch.randn(1, 3, 96, 96).numpy()})


@pytest.mark.slow
def test_every_way_gives_the_same_result_for_every_photo(
    onnx_file: Path, run: Path, photos: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Python, the command, the server, ONNX and .pt2: probabilities by class, to four digits."""
    program = folder / "same.pt2"
    pale.export(run, program)
    traced = torch.export.load(program).module()
    predictor = pale.Predictor(run, device="cpu")
    loaded = predictor.loaded
    with running(Models([run], device="cpu")) as server:
        for photo in sorted(file for file in photos.rglob("*") if file.is_file()):
            results = {"Python": dict(predictor(photo).scores)}
            capsys.readouterr()
            assert main(["predict", str(photo), "--weights", str(run), "--json"]) == 0
            answer = server.client.post("/predict/classification", content=photo.read_bytes())
            for way, found in (
                ("command", json.loads(capsys.readouterr().out)),
                ("server", answer.json()),
            ):
                results[way] = {c["class"]: c["probability"] for c in found["classes"]}
            images = loaded.normalise(loaded.preprocess(read_image(photo))[None])
            (logits,) = session(onnx_file).run(None, {"images": images.numpy()})
            for way, row in (("ONNX", torch.from_numpy(logits)[0]), ("pt2", traced(images)[0])):
                results[way] = dict(zip(NAMES, row.softmax(0).tolist(), strict=True))
            for way, found in results.items():
                assert found == pytest.approx(results["Python"], abs=1e-4), f"{way}, {photo.name}"


class Flat(nn.Module):
    """Accepts 8x8 pixels only."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3 * 64, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x.flatten(1))


@pytest.mark.slow
def test_a_segmenter_is_one_file_with_logits_at_the_size_of_the_image(
    folder: Path, project: Path
) -> None:
    recipe = segmentation_recipe().override({"model.attention": "sequential"})
    names = [f"kind {i}" for i in range(9)]
    model = lively(recipe.model.build(9, 32)).eval()
    weights = folder / "segmenter.safetensors"
    save_weights(weights, model.state_dict(), {"recipe": recipe.plain(), "classes": names})
    path = folder / "segmenter.onnx"
    done = pale.export(weights, path)
    assert done.about["task"] == "segmentation"
    assert max(check.share for check in done.checks) < 1e-3
    runtime, whole = session(path), FullSize(model)
    for size in [(1, 3, 64, 64), (2, 3, 97, 41), (1, 3, 5, 200), (3, 3, 1, 1)]:
        images = torch.randn(size)
        (logits,) = runtime.run(None, {"images": images.numpy()})
        assert logits.shape == (size[0], 9, *size[2:])
        with torch.no_grad():
            torch.testing.assert_close(
                torch.from_numpy(logits), whole(images), rtol=1e-3, atol=1e-3
            )
    photo = folder / "scene.png"
    Image.fromarray(draw_scene(0, 0, 96).image).crop((0, 0, 91, 67)).save(photo)
    example = [sys.executable, project / "examples" / "onnx_predict.py", path, photo]
    subprocess.run([*example, "-o", folder / "mask.png"], check=True, capture_output=True)
    with Image.open(folder / "mask.png") as mask:
        same = np.asarray(mask) == pale.Predictor(weights)(photo).labels
    assert same.mean() > 0.999  # a pixel between two classes may fall to either


@pytest.mark.slow
def test_a_detector_is_one_file_with_a_fixed_number_of_objects(folder: Path, project: Path) -> None:
    recipe = detection_recipe().override(
        {"model.attention": "sequential", "test.score": 0.1, "test.most": 9}
    )
    names = [f"kind {i}" for i in range(8)]
    weights = folder / "detector.safetensors"
    about = {"recipe": recipe.plain(), "classes": names}
    save_weights(weights, detector(model__attention="sequential").state_dict(), about)
    path = folder / "detector.onnx"
    done = pale.export(weights, path)
    assert done.about["task"] == "detection"
    assert [check.size[0] for check in done.checks] == [1, 1, 1]
    runtime = session(path)
    assert [o.shape for o in runtime.get_outputs()] == [[9, 4], [9], [9], [9, 28, 28]]
    photo = folder / "scene.png"
    Image.fromarray(draw_scene(0, 0, 96).image).crop((0, 0, 91, 67)).save(photo)
    example = [sys.executable, project / "examples" / "onnx_predict.py", path, photo, "--json"]
    done = subprocess.run([*example, "--score", "0.1"], check=True, capture_output=True, text=True)
    found = json.loads(done.stdout)["objects"]
    wanted = pale.Predictor(weights, device="cpu", score=0.1)(photo)
    assert len(found) == len(wanted.objects) > 1
    for one, other in zip(found, wanted.objects, strict=True):
        left, top, w, h = other["bbox"]
        assert one["name"] == wanted.classes[other["category_id"] - 1]
        assert one["score"] == pytest.approx(
            other["score"], abs=1e-2
        )  # Pillow resizes a little otherwise
        assert one["box"] == pytest.approx([left, top, left + w, top + h], abs=2)
    with pytest.raises(ValueError, match="takes one image at a time"):
        pale.export(weights, path, sizes=[(2, 32, 32)])


@pytest.mark.slow
def test_an_aoti_package_gives_the_logits_of_pytorch(folder: Path) -> None:
    path = folder / "compiled.pt2"
    model = lively(pale.create_model("pale_nano", num_classes=3, attention="sequential", **SMALL))
    sizes = [(1, 40, 40), (2, 33, 70), (1, 224, 224), (3, 9, 28), (1, 1, 1), (2, 57, 300)]
    done = pale.export(model, path, "aoti", sizes=sizes)
    assert max(check.share for check in done.checks) < 1e-3
    assert read_about(path)["format"] == "aoti"


class Untranslatable(nn.Module):
    """Uses an operator without ONNX equivalent."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.special.i1e(x.mean((2, 3)))


class Random(nn.Module):
    """Returns different outputs in each call."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean((2, 3)) + torch.rand(3)


class TestErrors:
    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["-o", "{}/a.onnx", "--format", "onx"], "format must be one of pt2, aoti, onnx, int8"),
            (["-o", "{}/a.onnx", "--format", "pt2"], "must end in .pt2"),
            (["-o", "{}/a.bin"], "if no format is given"),
            (["-o", "{}"], "is a folder; name a file in it"),
            (["-o", "/proc/a.onnx"], "cannot be written"),
            (["-o", "{}/a.onnx", "--opset", "17"], "opset must be at least 20, got 17"),
            (["-o", "{}/a.pt2", "--device", "cuda"], "only aoti is compiled for a device"),
            (["-o", "{}/a.onnx", "--sizes", "224"], "such as 1x224x224, got '224'"),
            (["-o", "{}/a.onnx", "--sizes", "0x3x3"], "each at least 1"),
            (["-o", "{}/a.onnx", "--data", "{}/none"], "there is no folder"),
            (["-o", "{}/a.onnx", "--data", "{}"], "there are no images"),
        ],
    )
    def test_impossible_requests_are_refused_before_the_work(
        self, words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["export", "pale_nano", *(w.replace("{}", str(tmp_path)) for w in words)]) == 1
        assert message in capsys.readouterr().err
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize(
        ("source", "message"),
        [
            ("pale_nan", "did you mean pale_nano"),
            ("runs/none", "there are no weights at runs/none"),
            ("none.safetensors", "there are no weights at none.safetensors"),
        ],
    )
    def test_a_missing_model_is_an_error(
        self, source: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["export", source, "-o", str(tmp_path / "a.onnx")]) == 1
        assert message in capsys.readouterr().err

    @pytest.mark.parametrize("package", ["onnx", "onnxscript", "onnxruntime"])
    def test_a_missing_package_is_named(
        self, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(RuntimeError, match=rf"needs the package {package}, .* pip install"):
            pale.export("pale_nano", tmp_path / "a.onnx")

    def test_an_operator_without_onnx_equivalent_is_an_error(self, tmp_path: Path) -> None:
        with pytest.raises(RuntimeError, match=r"exporter cannot convert this model .* pt2"):
            pale.export(Untranslatable(), tmp_path / "a.onnx")
        assert list(tmp_path.iterdir()) == []

    def test_a_file_that_computes_something_else_is_not_kept(self, tmp_path: Path) -> None:
        kept = tmp_path / "a.pt2"
        kept.write_text("the last good one")
        with pytest.raises(RuntimeError, match="does not compute the same as PyTorch"):
            pale.export(Random(), kept)
        assert kept.read_text() == "the last good one"
        assert [file.name for file in tmp_path.iterdir()] == ["a.pt2"]

    def test_a_file_of_another_project_has_no_note(self, tmp_path: Path) -> None:
        program = torch.export.export(Flat().eval(), (torch.zeros(1, 3, 8, 8),))
        torch.export.save(program, tmp_path / "foreign.pt2")
        with pytest.raises(ValueError, match="has no metadata"):
            read_about(tmp_path / "foreign.pt2")
        (tmp_path / "broken.onnx").write_text("no")
        with pytest.raises(ValueError, match="cannot be read"):
            read_about(tmp_path / "broken.onnx")

    @pytest.mark.parametrize(
        "note", [b" " * (8 << 20), b"[" * 100_000, b"[1]"], ids=["long", "nested", "list"]
    )
    def test_a_hostile_note_is_refused(self, tmp_path: Path, note: bytes) -> None:
        path = tmp_path / "a.pt2"
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(f"a/extra/{NOTE}.json", note)
        with pytest.raises(
            ValueError, match=r"more than 4194304 bytes|nest|recursion|has no metadata"
        ):
            read_about(path)
