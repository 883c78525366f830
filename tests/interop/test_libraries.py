"""Training software around the model: DDP and FSDP2, transformers' Trainer and detectors, torchvision's detectors."""

from __future__ import annotations

import copy
import os
import re
from pathlib import Path

import pytest
import timm
import torch
import torch.nn.functional as F
from interop.models import build, client_warnings, difference, images
from support.processes import torchrun
from support.timm_folder import save_timm_folder
from torch import Tensor, nn

pytestmark = pytest.mark.slow
HERE = Path(__file__).parent


class TestParallel:
    client = "torch"

    @pytest.mark.parametrize("name", ["pale", "convnext"])
    @pytest.mark.parametrize("way", ["ddp", "fsdp2"])
    def test_two_processes_step_as_one(
        self, way: str, name: str, measured, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """`DistributedDataParallel` and `fully_shard`, 2 processes (gloo): two steps against one process"""
        paths = [str(HERE.parent), os.environ.get("PYTHONPATH", "")]
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in paths if path))
        output = torchrun(way, name, script=(str(HERE / "parallel.py"),))
        (gap,) = re.findall(r"difference (\S+)", output)
        measured(float(gap), 1e-4, "of a parameter's largest entry")


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test may reach for the hub."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


@client_warnings
@pytest.mark.usefixtures("offline")
class TestTransformers:
    client = "transformers"

    @pytest.fixture(autouse=True)
    def _transformers(self) -> None:
        self.transformers = pytest.importorskip("transformers", reason="transformers is missing")

    @pytest.mark.parametrize("name", ["pale", "convnext"])
    def test_the_trainer_steps_as_a_plain_loop(self, name: str, measured, tmp_path: Path) -> None:
        """`Trainer`, three steps of SGD on a classifier of a timm folder: against a plain loop"""
        pytest.importorskip("accelerate", reason="accelerate is not installed")
        plain, x, labels = build(name), images(4), torch.arange(4)
        model = copy.deepcopy(plain)
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            F.cross_entropy(plain(x), labels).backward()
            optimizer.step()

        options = {} if name == "pale" else {"depths": (1, 1, 2, 1)}
        save_timm_folder(model, tmp_path / "model", options)
        auto = self.transformers.AutoModelForImageClassification
        wrapped = auto.from_pretrained(tmp_path / "model")
        arguments = self.transformers.TrainingArguments(
            output_dir=str(tmp_path / "out"),
            max_steps=3,
            per_device_train_batch_size=4,
            max_grad_norm=0.0,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
        )
        own = torch.optim.SGD(wrapped.parameters(), lr=0.1)
        data = [{"pixel_values": i, "labels": n} for i, n in zip(x, labels, strict=True)]
        trainer = self.transformers.Trainer(
            wrapped,
            arguments,
            train_dataset=data,
            optimizers=(own, torch.optim.lr_scheduler.LambdaLR(own, lambda step: 1.0)),
        )
        trainer.train()
        found = dict(wrapped.timm_model.named_parameters())
        gaps = [difference(found[n], p) for n, p in plain.named_parameters()]
        measured(max(gaps), 1e-4, "of a parameter's largest entry")

    def backbone_config(self, name: str) -> object:
        return self.transformers.TimmBackboneConfig(
            backbone={"pale": "pale_nano", "convnext": "convnext_atto"}[name],
            use_pretrained_backbone=False,
            out_indices=(0, 1, 2, 3),
        )

    def detector(self, kind: str, name: str) -> nn.Module:
        small = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 2}
        small |= {"encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "num_queries": 5}
        small |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "num_labels": 3}
        backbone = self.backbone_config(name)
        t = self.transformers
        if kind == "detr":
            config = t.DetrConfig(
                use_timm_backbone=False,
                use_pretrained_backbone=False,
                backbone=None,
                backbone_config=backbone,
                **small,
            )
            return t.DetrForObjectDetection(config)
        if kind == "upernet":
            channels = {"pale": 128, "convnext": 160}[name]
            config = t.UperNetConfig(
                backbone_config=backbone,
                num_labels=3,
                hidden_size=32,
                auxiliary_in_channels=channels,
                auxiliary_channels=16,
            )
            return t.UperNetForSemanticSegmentation(config)
        config = t.DeformableDetrConfig(
            use_timm_backbone=False,
            use_pretrained_backbone=False,
            backbone=None,
            backbone_config=backbone,
            num_feature_levels=4,
            **small,
        )
        return t.DeformableDetrForObjectDetection(config)

    @pytest.mark.parametrize("name", ["pale", "convnext"])
    @pytest.mark.parametrize("kind", ["detr", "deformable_detr", "upernet"])
    def test_a_model_on_a_backbone_config_trains_and_survives_saving(
        self, kind: str, name: str, measured, tmp_path: Path
    ) -> None:
        """DETR, Deformable DETR and UperNet on `TimmBackboneConfig`: a step, then saved and loaded"""
        if kind != "upernet":
            pytest.importorskip("scipy", reason="transformers' matching of boxes needs scipy")
        model, x = self.detector(kind, name), images(2)
        labels: object = torch.randint(0, 3, (2, 64, 96))
        if kind != "upernet":
            box = torch.tensor([[0.5, 0.5, 0.4, 0.3]])
            labels = [{"class_labels": torch.tensor([1]), "boxes": box} for _ in range(2)]
        loss = model.train()(pixel_values=x, labels=labels).loss
        loss.backward()
        assert loss.isfinite()
        backbone = [
            p.grad for n, p in model.named_parameters() if "backbone" in n and p.requires_grad
        ]
        assert all(g is not None and g.isfinite().all() for g in backbone)
        torch.optim.SGD(model.parameters(), lr=1e-3).step()
        model.eval().save_pretrained(tmp_path)
        again = type(model).from_pretrained(tmp_path).eval()
        with torch.no_grad():
            y, expected = again(pixel_values=x), model(pixel_values=x)
        measured(difference(y.logits, expected.logits), 1e-5)

    def test_the_backbone_gives_the_maps_of_the_model(self, measured) -> None:
        """`AutoBackbone` with the weights of a model: against `forward_intermediates`"""
        model, x = build("pale"), images()
        backbone = self.transformers.AutoBackbone.from_config(self.backbone_config("pale")).eval()
        weights = {n: w for n, w in model.state_dict().items() if n.startswith("stages")}
        prefix = next(n for n in backbone.state_dict() if n.endswith("stages.0.merge.conv.weight"))
        prefix = prefix.removesuffix("stages.0.merge.conv.weight")
        backbone.load_state_dict({prefix + n: w for n, w in weights.items()})
        with torch.no_grad():
            maps = backbone(x).feature_maps
            expected = model.forward_intermediates(x, intermediates_only=True)
        pairs = zip(maps, expected, strict=True)
        measured(max(difference(y, e) for y, e in pairs), 1e-6, "of a map's largest value")


@client_warnings
class TestTorchvisionDetection:
    client = "torchvision"

    def pyramid(self) -> nn.Module:
        """Return the backbone as torchvision's own references build one: extracted maps and an FPN."""
        from torchvision.models.detection.backbone_utils import BackboneWithFPN
        from torchvision.models.feature_extraction import create_feature_extractor

        model = timm.create_model("pale_nano")
        nodes = {f"stages.{i}": str(i) for i in range(4)}
        backbone = BackboneWithFPN(nn.Identity(), {}, model.config.channels, 32)
        backbone.body = create_feature_extractor(model, nodes)
        return backbone

    @pytest.mark.parametrize("kind", ["RetinaNet", "FCOS", "FasterRCNN"])
    def test_a_detector_learns_one_image(self, kind: str, measured) -> None:
        """RetinaNet, FCOS and Faster R-CNN with the references' loop: loss on one image after 60 or 12 steps"""
        detection = pytest.importorskip("torchvision.models.detection")
        sizes = tuple((s, int(s * 1.26), int(s * 1.59)) for s in (16, 32, 64, 128, 256))
        anchors = detection.anchor_utils.AnchorGenerator(sizes, ((0.5, 1.0, 2.0),) * 5)
        options = {"min_size": 96, "max_size": 128, "num_classes": 3}
        torch.manual_seed(0)
        if kind == "RetinaNet":
            model = detection.RetinaNet(self.pyramid(), anchor_generator=anchors, **options)
        elif kind == "FCOS":
            single = detection.anchor_utils.AnchorGenerator(
                ((8,), (16,), (32,), (64,), (128,)), ((1.0,),) * 5
            )
            model = detection.FCOS(self.pyramid(), anchor_generator=single, **options)
        else:
            model = detection.FasterRCNN(self.pyramid(), rpn_anchor_generator=anchors, **options)
        # The focal loss starts at the rare objects' prior and falls slowly: 0.95 after 12 steps, 0.76 after 60.
        losses = references_loop(model, steps=60 if kind == "RetinaNet" else 12)
        assert [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None] == []
        measured(losses[-1] / losses[0], 0.8, "of the first loss")
        (found,) = model.eval()([torch.rand(3, 96, 112)])
        assert {"boxes", "scores", "labels"} <= found.keys()


def references_loop(model: nn.Module, steps: int) -> list[float]:
    """Train as torchvision's references/detection/engine.py does: warm-up, summed losses, SGD."""
    box = torch.tensor([[10.0, 20.0, 60.0, 70.0], [50.0, 5.0, 100.0, 60.0]])
    target = {"boxes": box, "labels": torch.tensor([1, 2])}
    image = torch.zeros(3, 96, 112)
    image[0, 20:70, 10:60] = 1
    image[2, 5:60, 50:100] = 1
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=0.01, momentum=0.9, weight_decay=1e-4)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=3)
    model.train()
    losses: list[float] = []
    for _ in range(steps):
        parts: dict[str, Tensor] = model([image], [target])
        loss = sum(parts.values())
        assert isinstance(loss, Tensor)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        warmup.step()
        losses.append(loss.item())
    return losses
