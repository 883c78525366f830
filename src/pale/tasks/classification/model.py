"""Settings of a classifier: the network and its initial weights."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator
from torch import nn

from ...core.settings import MAX_SIZE, Settings
from ...model.pale_transformer import (
    VARIANTS,
    AttentionMode,
    PaleConfig,
    Position,
    TokenTransformer,
)
from ...weights.compare import load_into
from ...weights.read import load_weights
from ..building import create
from ..freezing import FreezeLevel

PALE_ARGUMENTS = ("attention", "position", "pale_size", "stem_stride")


class Model(Settings):
    """Settings of the network and of the weights that it starts from."""

    name: str = "pale_tiny"  # or any classifier of timm
    drop_path: float = Field(default=0.0, ge=0, lt=1)
    attention: AttentionMode = "parallel"
    position: Position = "cpe"
    pale_size: int | tuple[int, ...] | None = None
    stem_stride: Literal[4, 2, 1] = 4
    checkpointing: bool = False  # recompute blocks in the backward pass: less memory, more time
    weights: Path | None = None  # a run, a .safetensors file, or a .pth file of another project
    new_head: bool = False  # load the backbone of `weights` without its classifier
    # Parameters that are not trained: the early half of the stages, or everything except the heads.
    freeze: FreezeLevel = "nothing"
    # Further arguments of the architecture, by timm's names; see `building`.
    options: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _pale_alone(self) -> Model:
        given = [
            name
            for name in PALE_ARGUMENTS
            if getattr(self, name) != type(self).model_fields[name].default
        ]
        if given and not self.name.startswith("pale_"):
            raise ValueError(
                f"{', '.join(given)} applies only to {', '.join(VARIANTS)}, not to {self.name}; "
                "put arguments of other models into model.options"
            )
        return self

    @model_validator(mode="after")
    def _architecture(self) -> Model:
        if self.name in VARIANTS:
            known = {field.name for field in fields(PaleConfig)} & self.options.keys()
            given = {name: getattr(self, name) for name in PALE_ARGUMENTS}
            config = replace(VARIANTS[self.name], **given | {k: self.options[k] for k in known})
            if max(config.pale_sizes) > MAX_SIZE:
                raise ValueError(f"pale_size must be at most {MAX_SIZE}, got {config.pale_sizes}")
        return self

    def build(self, classes: int, size: int) -> nn.Module:
        """Build the model, and load the weights that the settings name."""
        return self._create(classes, size, {})

    def build_token_transformer(self, classes: int, size: int) -> TokenTransformer:
        """Build the model for MixToken and token labels, and load the weights that the settings name."""
        model = self._create(classes, size, {"token_outputs": True})
        assert isinstance(model, TokenTransformer)
        return model

    def architecture(self, size: int | tuple[int, int]) -> dict[str, Any]:
        """Return the arguments of the network that these settings set, for images of `size`."""
        arguments: dict[str, Any] = {"drop_path_rate": self.drop_path} if self.drop_path else {}
        if self.name in VARIANTS:
            arguments |= {name: getattr(self, name) for name in PALE_ARGUMENTS}
            arguments["img_size"] = size
        return arguments

    def _create(self, classes: int, size: int, given: dict[str, Any]) -> nn.Module:
        arguments = {"num_classes": classes} | given | self.architecture(size)
        model: nn.Module = create(self.name, arguments, self.options)
        if self.checkpointing:
            model.set_grad_checkpointing(True)  # type: ignore[operator]
        if self.weights is not None:
            load_into(model, load_weights(self.weights), self.weights, self.new_head)
        return model
