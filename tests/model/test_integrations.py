"""The model inside the libraries around it, all offline: timm, transformers, smp, torchvision."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import pytest
import timm
import torch
from support.timm_folder import save_timm_folder
from support.weights import weights
from torch import Tensor, nn
from torch.testing import assert_close

import pale
from pale.model.pale_transformer import resize_map
from pale.tools.publish import export

PETS = "pale_nano.pets"
CHANNELS = [32, 64, 128, 192]  # of pale_nano


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test may connect to the hub."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for library in ("huggingface_hub.constants", "transformers.utils.hub"):
        module = pytest.importorskip(library)
        for name in ("HF_HUB_OFFLINE", "_is_offline_mode"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, True)


class TestTimmFolders:
    @pytest.mark.parametrize(
        "arguments",
        [
            {},
            {"attention": "cross", "pale_size": [7, 5, 3, 1], "depths": [1, 1, 2, 1]},
            {"position": "ape", "img_size": 64, "stem_stride": 2, "in_chans": 5},
        ],
        ids=["plain", "cross", "ape"],
    )
    def test_a_saved_folder_is_the_model_again(self, arguments: dict, tmp_path: Path) -> None:
        model = pale.create_model("pale_nano", num_classes=7, **arguments).eval()
        # timm saves the number of classes; the architecture needs `model_args`.
        if model.in_chans != 3:
            # timm treats the weights of this layer as RGB weights and would initialise them again.
            model.pretrained_cfg["first_conv"] = None
        timm.models.save_for_hf(model, tmp_path, model_args=arguments, safe_serialization=True)
        assert {p.name for p in tmp_path.iterdir()} == {"config.json", "model.safetensors"}
        again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
        assert again.config == model.config
        x = torch.randn(1, arguments.get("in_chans", 3), 64, 80)
        assert torch.equal(again(x), model(x))

    def test_a_saved_folder_takes_another_head_and_other_channels(self, tmp_path: Path) -> None:
        model = pale.create_model("pale_nano", depths=(1, 1, 1, 1), num_classes=7)
        arguments = {"depths": [1, 1, 1, 1]}
        timm.models.save_for_hf(model, tmp_path, model_args=arguments, safe_serialization=True)
        again = timm.create_model(
            f"local-dir:{tmp_path}", pretrained=True, num_classes=3, in_chans=1
        )
        weight = model.stages[0].merge.conv.weight
        assert_close(again.stages[0].merge.conv.weight, weight.sum(1, keepdim=True))
        assert again.head.fc.weight.shape == (3, 192)
        assert torch.equal(again.stages[3].merge.conv.weight, model.stages[3].merge.conv.weight)

    def test_positions_of_another_size_load_from_a_folder(self, tmp_path: Path) -> None:
        model = pale.create_model("pale_nano", position="ape", img_size=224)
        timm.models.save_for_hf(
            model, tmp_path, model_args={"position": "ape"}, safe_serialization=True
        )
        again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True, img_size=384)
        assert again.stages[0].ape.map.shape == (1, 96, 96, 32)
        assert_close(
            again.stages[0].ape.map, resize_map(model.stages[0].ape.map, again.stages[0].ape.map)
        )


class TestTimmArguments:
    @pytest.mark.parametrize("feature_cls", ["getter", "list", "dict", "hook", "fx"])
    def test_every_feature_class_gives_the_same_maps(self, feature_cls: str) -> None:
        arguments = {"depths": (1, 1, 1, 1), "features_only": True}
        model = pale.create_model("pale_nano", **arguments).eval()
        other = timm.create_model("pale_nano", **arguments, feature_cls=feature_cls).eval()
        weights = model.state_dict().values()
        other.load_state_dict(dict(zip(other.state_dict(), weights, strict=True)))
        x = torch.randn(1, 3, 64, 80)
        with torch.no_grad():
            found = other(x)
            maps = list(found.values()) if isinstance(found, dict) else found
            for a, b in zip(maps, model(x), strict=True):
                assert_close(a, b)

    def test_without_pooling_logits_stand_at_every_place(self) -> None:
        arguments = {"depths": (1, 1, 1, 1), "num_classes": 5}
        model = timm.create_model("pale_nano", **arguments).eval()
        maps = timm.create_model("pale_nano", **arguments, global_pool="").eval()
        maps.load_state_dict(model.state_dict())
        x = torch.randn(2, 3, 64, 80)
        with torch.no_grad():
            assert maps(x).shape == (2, 5, 2, 3)
            assert_close(maps(x).mean((2, 3)), model(x))
            maps.reset_classifier(7, "avg")
            assert maps(x).shape == (2, 7)
            maps.reset_classifier(0, "")
            assert_close(maps(x), maps.forward_features(x))


class TestTransformers:
    @pytest.fixture(autouse=True)
    def _transformers(self) -> None:
        self.transformers = pytest.importorskip("transformers")

    def backbone_config(self, **kwargs: object) -> object:
        # Without this, the configuration requests weights from the hub.
        return self.transformers.TimmBackboneConfig(
            backbone="pale_nano", use_pretrained_backbone=False, out_indices=(0, 1, 2, 3), **kwargs
        )

    @pytest.mark.parametrize("size", [(64, 96), (61, 75)], ids=["64x96", "61x75"])
    def test_auto_backbone_gives_nchw_maps(self, size: tuple[int, int]) -> None:
        backbone = self.transformers.AutoBackbone.from_config(self.backbone_config()).eval()
        assert backbone.channels == CHANNELS
        maps = backbone(torch.randn(1, 3, *size)).feature_maps
        assert [tuple(y.shape) for y in maps] == [
            (1, c, -(-size[0] // r), -(-size[1] // r))
            for c, r in zip(CHANNELS, (4, 8, 16, 32), strict=True)
        ]

    @pytest.mark.parametrize("way", ["AutoBackbone", "TimmBackbone"])
    def test_a_backbone_takes_the_weights_of_an_exported_folder(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
    ) -> None:
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        export(Path("classify_pets"), tmp_path / "pets")
        name, indices = f"local-dir:{tmp_path / 'pets'}", [0, 1, 2, 3]
        if way == "AutoBackbone":
            config = self.transformers.TimmBackboneConfig(backbone=name, out_indices=indices)
            backbone = self.transformers.AutoBackbone.from_config(config, pretrained=True)
        else:
            backbone = self.transformers.TimmBackbone.from_pretrained(name, out_indices=indices)
        wanted = pale.Predictor("classify_pets", device="cpu").loaded.model
        x = torch.randn(1, 3, 64, 96)
        with torch.no_grad():
            maps = backbone.eval()(x).feature_maps
            expected = wanted.forward_intermediates(x, intermediates_only=True)
        for found, want in zip(maps, expected, strict=True):
            torch.testing.assert_close(found, want)

    def test_upernet_trains_and_survives_saving(self, tmp_path: Path) -> None:
        config = self.transformers.UperNetConfig(
            backbone_config=self.backbone_config(),
            num_labels=5,
            hidden_size=32,
            auxiliary_in_channels=128,
            auxiliary_channels=16,
        )
        model = self.transformers.UperNetForSemanticSegmentation(config)
        x, labels = torch.randn(2, 3, 64, 96), torch.randint(0, 5, (2, 64, 96))
        loss = model(x, labels=labels).loss
        loss.backward()
        assert loss.isfinite()
        # The last map is the one without norm: the whole backbone runs.
        dead = [name for name, p in model.backbone.named_parameters() if p.grad is None]
        assert dead == []
        model.eval().save_pretrained(tmp_path)
        again = self.transformers.UperNetForSemanticSegmentation.from_pretrained(tmp_path).eval()
        with torch.no_grad():
            assert_close(again(x).logits, model(x).logits)

    def test_backbones_start_from_included_weights(self) -> None:
        """transformers' `AutoBackbone.from_pretrained` requests any name from the hub first."""
        config = self.transformers.TimmBackboneConfig(backbone=PETS, out_indices=(0, 1, 2, 3))
        auto = self.transformers.AutoBackbone.from_config(config, pretrained=True).eval()
        named = self.transformers.TimmBackbone.from_pretrained(PETS, out_indices=(1, 3)).eval()
        x = torch.randn(1, 3, 61, 75)
        with torch.no_grad():
            maps = pale.create_model(PETS, pretrained=True, features_only=True).eval()(x)
            for ours, theirs in zip(maps, auto(x).feature_maps, strict=True):
                assert_close(ours, theirs)
            for ours, theirs in zip(maps[1::2], named(x).feature_maps, strict=True):
                assert_close(ours, theirs)

    def test_timm_folders_load_as_image_classifiers(self, tmp_path: Path) -> None:
        model = pale.create_model("pale_nano", attention="cross", num_classes=7).eval()
        save_timm_folder(model, tmp_path, {"attention": "cross"})
        auto = self.transformers.AutoModelForImageClassification
        again = auto.from_pretrained(tmp_path).eval()
        assert again.timm_model.config == model.config
        x = torch.randn(1, 3, 70, 50)
        with torch.no_grad():
            assert_close(again(x).logits, model(x))

    def test_exported_weights_load_as_image_classifiers(self, tmp_path: Path) -> None:
        source = weights(tmp_path)["classification"]
        export(source, tmp_path / "hub")
        auto = self.transformers.AutoModelForImageClassification
        again = auto.from_pretrained(tmp_path / "hub").eval()
        model = pale.Predictor(source, device="cpu").loaded.model.eval()
        x = torch.randn(1, 3, 40, 48)
        with torch.no_grad():
            assert_close(again(x).logits, model(x))


class TestSegmentationModels:
    @pytest.mark.parametrize("in_channels", [3, 5])
    def test_upernet_takes_the_encoder(self, in_channels: int) -> None:
        smp = pytest.importorskip("segmentation_models_pytorch")
        model = smp.UPerNet(
            "tu-pale_nano",
            encoder_weights=None,
            in_channels=in_channels,
            classes=4,
            decoder_channels=32,
        )
        y = model(torch.randn(2, in_channels, 64, 96))
        assert y.shape == (2, 4, 64, 96)
        y.square().mean().backward()
        assert [name for name, p in model.named_parameters() if p.grad is None] == []

    def test_the_encoder_starts_from_included_weights(self) -> None:
        smp = pytest.importorskip("segmentation_models_pytorch")
        model = smp.UPerNet(
            f"tu-{PETS}", encoder_weights=True, in_channels=1, classes=4, decoder_channels=32
        )
        expected = pale.create_model(PETS, pretrained=True, in_chans=1, features_only=True)
        found = model.encoder.model.state_dict()
        assert found.keys() == expected.state_dict().keys()
        assert all(torch.equal(found[name], t) for name, t in expected.state_dict().items())
        preprocessing = smp.encoders.get_preprocessing_params(f"tu-{PETS}")
        assert preprocessing["mean"] == list(expected.pretrained_cfg["mean"])


class FeaturePyramid(nn.Module):
    """A backbone as torchvision's detectors need it."""

    def __init__(self, out_channels: int = 32) -> None:
        super().__init__()
        ops = pytest.importorskip("torchvision.ops")
        self.body = pale.create_model("pale_nano", features_only=True)
        self.fpn = ops.FeaturePyramidNetwork(self.body.feature_info.channels(), out_channels)
        self.out_channels = out_channels

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return self.fpn(OrderedDict((str(i), y) for i, y in enumerate(self.body(x))))


class TestTorchvision:
    @pytest.mark.parametrize("size", [(64, 96), (61, 75)], ids=["64x96", "61x75"])
    def test_a_feature_pyramid_stands_on_the_maps(self, size: tuple[int, int]) -> None:
        maps = FeaturePyramid()(torch.randn(1, 3, *size))
        assert {name: tuple(y.shape) for name, y in maps.items()} == {
            str(i): (1, 32, -(-size[0] // r), -(-size[1] // r))
            for i, r in enumerate((4, 8, 16, 32))
        }

    def test_mask_rcnn_takes_a_training_step(self) -> None:
        detection = pytest.importorskip("torchvision.models.detection")
        anchors = detection.anchor_utils.AnchorGenerator(
            tuple((size,) for size in (16, 32, 64, 128)), ((0.5, 1.0, 2.0),) * 4
        )
        model = detection.MaskRCNN(
            FeaturePyramid(),
            rpn_anchor_generator=anchors,
            box_head=detection.faster_rcnn.TwoMLPHead(32 * 7 * 7, 32),
            box_predictor=detection.faster_rcnn.FastRCNNPredictor(32, 3),
            mask_head=detection.mask_rcnn.MaskRCNNHeads(32, (32,), 1),
            mask_predictor=detection.mask_rcnn.MaskRCNNPredictor(32, 32, 3),
            min_size=96,
            max_size=128,
        )
        box = torch.tensor([[10.0, 20.0, 60.0, 70.0]])
        mask = torch.zeros(1, 96, 112, dtype=torch.uint8)
        mask[:, 20:70, 10:60] = 1
        target = {"boxes": box, "labels": torch.tensor([1]), "masks": mask}
        images = [torch.rand(3, 96, 112), torch.rand(3, 96, 112)]
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        losses = model(images, [target, target])
        assert set(losses) == {
            "loss_classifier",
            "loss_box_reg",
            "loss_mask",
            "loss_objectness",
            "loss_rpn_box_reg",
        }
        assert all(loss.isfinite() for loss in losses.values())
        sum(losses.values()).backward()
        assert [n for n, p in model.backbone.body.named_parameters() if p.grad is None] == []
        optimizer.step()
        (prediction, _) = model.eval()(images)
        assert prediction["masks"].shape[1:] == (1, 96, 112)
