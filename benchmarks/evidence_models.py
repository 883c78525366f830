"""Models of other people's tables, built from timm's parts and registered with timm.

`swin_spt_lsa` is the Swin of "Vision Transformer for Small-Size Datasets" (arXiv 2112.13492; its code is
aanna0701/SPT_LSA_ViT, models/create_model.py and models/swin.py at 54bd796): three stages, window 4, patch 4, MLP ratio
2, an absolute position embedding beside the relative bias, and PyTorch's default initialisation of linear layers.

`resnet50_without_pool` is timm's ResNet-50 without the max pooling of its stem, for images of 64 px.
"""

from __future__ import annotations

from typing import Any

import torch
from timm.layers import trunc_normal_
from timm.models import register_model
from timm.models.resnet import Bottleneck, ResNet
from timm.models.swin_transformer import SwinTransformer
from torch import Tensor, nn


class AbsoluteSwin(SwinTransformer):
    """timm's Swin with a learned absolute position embedding and default initialisation."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        h, w = self.patch_embed.grid_size
        self.absolute_pos_embed = nn.Parameter(torch.zeros(1, h, w, self.embed_dim))
        trunc_normal_(self.absolute_pos_embed, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                module.reset_parameters()

    def forward_features(self, x: Tensor) -> Tensor:
        """Return the normalised map of the last stage, (b, h, w, c)."""
        x = self.patch_embed(x) + self.absolute_pos_embed
        return self.norm(self.layers(x))


@register_model
def swin_spt_lsa(pretrained: bool = False, **arguments: Any) -> AbsoluteSwin:
    """Return the Swin of arXiv 2112.13492 for 64 px: 7.15 M parameters with 200 classes."""
    arguments = _architecture(arguments)
    fixed = {"img_size": 64, "patch_size": 4, "window_size": 4, "mlp_ratio": 2.0, "embed_dim": 96}
    return AbsoluteSwin(depths=(2, 6, 4), num_heads=(3, 6, 12), **(fixed | arguments))


@register_model
def resnet50_without_pool(pretrained: bool = False, **arguments: Any) -> ResNet:
    """Return ResNet-50 with a first map of half the image size."""
    model = ResNet(Bottleneck, (3, 4, 6, 3), **_architecture(arguments))
    model.maxpool = nn.Identity()
    return model


def _architecture(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments without those that timm's factory adds."""
    unused = ("pretrained_cfg", "pretrained_cfg_overlay", "cache_dir")
    return {name: value for name, value in arguments.items() if name not in unused}
