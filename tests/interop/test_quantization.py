"""torchao and torch.ao: linear layers whose weights are tensor subclasses or packed."""

from __future__ import annotations

import copy

import pytest
import torch
from interop.models import build, client_warnings, difference, each_model, eager, images
from torch import nn

pytestmark = pytest.mark.slow
# Activations in eight bits err by 0.01 to 0.11 with random weights, ours and the peers; unrelated logits by 1.
CLOSE = 0.2


def linears(model: nn.Module) -> dict[str, nn.Module]:
    return {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear)}


@client_warnings
class TestTorchao:
    client = "torchao"

    @pytest.fixture(autouse=True)
    def _torchao(self) -> None:
        pytest.importorskip("torchao", reason="torchao is not installed")

    def quantized(self, model: nn.Module, config: str, **options: object) -> nn.Module:
        from torchao import quantization

        model = copy.deepcopy(model)
        quantization.quantize_(model, getattr(quantization, config)(**options))
        changed = {n for n, m in linears(model).items() if type(m.weight.data) is not torch.Tensor}
        assert changed == set(linears(model))
        return model

    @each_model
    @pytest.mark.parametrize(
        ("config", "options"),
        [
            ("Int8WeightOnlyConfig", {}),
            ("Float8WeightOnlyConfig", {}),
            ("IntxWeightOnlyConfig", {"weight_dtype": torch.int4}),
            ("IntxWeightOnlyConfig", {"weight_dtype": torch.int8}),
        ],
        ids=["int8", "float8", "intx4", "intx8"],
    )
    def test_weight_only_is_the_model_with_rounded_weights(
        self, config: str, options: dict, name: str, measured
    ) -> None:
        """`quantize_`, weight only: against eager with the same weights dequantised"""
        model, x = build(name), images()
        quantized = self.quantized(model, config, **options)
        rounded = copy.deepcopy(model)
        for path, module in linears(quantized).items():
            rounded.get_submodule(path).weight.data = module.weight.dequantize()
        assert difference(eager(rounded, x), eager(model, x)) > 1e-4  # rounding is seen
        with torch.no_grad():
            measured(difference(quantized(x), eager(rounded, x)), 1e-5)

    @each_model
    def test_int8_activations_and_weights_stay_close(self, name: str, measured) -> None:
        """`quantize_`, int8 activations and weights: against eager in float32"""
        model, x = build(name), images()
        quantized = self.quantized(model, "Int8DynamicActivationInt8WeightConfig")
        with torch.no_grad():
            measured(difference(quantized(x), eager(model, x)), CLOSE)


@client_warnings
class TestQuantizeDynamic:
    client = "torch"

    @each_model
    def test_every_linear_layer_is_found(self, name: str, measured) -> None:
        """`torch.ao.quantization.quantize_dynamic`: every `nn.Linear` becomes an int8 one"""
        model, x = build(name), images()
        quantized = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
        kind = torch.ao.nn.quantized.dynamic.Linear
        found = {n for n, m in quantized.named_modules() if isinstance(m, kind)}
        assert found == set(linears(model))
        with torch.no_grad():
            measured(difference(quantized(x), eager(model, x)), CLOSE)
