"""The cost model against the paper's tables, its formulas, and PyTorch's own counter."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import pale
from pale.model import cost
from pale.model.pale_transformer import PALE_B, PALE_S, PALE_T, VARIANTS
from pale.ops.pale_attention.region import Region

MODES = ["parallel", "sequential", "vanilla", "axial", "cross"]

# Every ImageNet figure of the Pale rows, copied from the paper independently: (table, row): (parameters
# M, multiply-adds G).
FIGURES = {
    ("Variants, ImageNet-1K", "Pale-T"): (22, 4.2),
    ("Variants, ImageNet-1K", "Pale-T*"): (22, 4.2),
    ("Variants, ImageNet-1K", "Pale-S"): (48, 9.0),
    ("Variants, ImageNet-1K", "Pale-S*"): (48, 9.0),
    ("Variants, ImageNet-1K", "Pale-B"): (85, 15.6),
    ("Variants, ImageNet-1K", "Pale-B*"): (85, 15.6),
    ("Pale size", "1 1 1 1"): (22, 3.8),
    ("Pale size", "3 3 3 3"): (22, 4.1),
    ("Pale size", "5 5 5 5"): (22, 4.4),
    ("Pale size", "7 7 7 7"): (22, 4.2),
    ("Pale size", "9 9 9 9"): (22, 5.4),
    ("Attention mode", "Axial"): (22, 3.8),
    ("Attention mode", "Cross-Shaped"): (22, 4.2),
    ("Attention mode", "Pale (vanilla)"): (22, 5.4),
    ("Attention mode", "Pale (sequential)"): (22, 4.2),
    ("Attention mode", "Pale (parallel)"): (22, 4.2),
    ("Position", "no pos."): (22, 4.2),
    ("Position", "APE"): (22, 4.2),
    ("Position", "CPE"): (22, 4.2),
}


# The ADE20K columns: UperNet at 512x2048.
ADE20K = {
    ("ADE20K", "Pale-T"): (52, 996),
    ("ADE20K", "Pale-S"): (80, 1135),
    ("ADE20K", "Pale-B"): (119, 1311),
    ("Pale size", "1 1 1 1"): (52, 929),
    ("Pale size", "3 3 3 3"): (52, 950),
    ("Pale size", "5 5 5 5"): (52, 972),
    ("Pale size", "7 7 7 7"): (52, 996),
    ("Pale size", "9 9 9 9"): (52, 1021),
    ("Attention mode", "Axial"): (52, 929),
    ("Attention mode", "Cross-Shaped"): (52, 996),
    ("Attention mode", "Pale (vanilla)"): (52, 2677),
    ("Attention mode", "Pale (sequential)"): (52, 996),
    ("Attention mode", "Pale (parallel)"): (52, 996),
    ("Position", "no pos."): (51, 996),
    ("Position", "APE"): (59, 996),
    ("Position", "CPE"): (52, 996),
}


# The COCO columns: Mask R-CNN at 800x1280, 1000 boxes and 100 masks.
COCO = {
    ("COCO", "Pale-T"): (41, 306),
    ("COCO", "Pale-S"): (68, 432),
    ("COCO", "Pale-B"): (105, 595),
    ("Pale size", "1 1 1 1"): (41, 253),
    ("Pale size", "3 3 3 3"): (41, 269),
    ("Pale size", "5 5 5 5"): (41, 283),
    ("Pale size", "7 7 7 7"): (41, 306),
    ("Pale size", "9 9 9 9"): (41, 322),
    ("Attention mode", "Axial"): (41, 253),
    ("Attention mode", "Cross-Shaped"): (41, 306),
    ("Attention mode", "Pale (vanilla)"): (41, 668),
    ("Attention mode", "Pale (sequential)"): (41, 306),
    ("Attention mode", "Pale (parallel)"): (41, 306),
    ("Position", "no pos."): (41, 306),
    ("Position", "APE"): (49, 306),
    ("Position", "CPE"): (41, 306),
}


def test_every_coco_figure_is_met_within_one_percent():
    rows = {(row.table, row.setting): row for row in cost.reproduce() if row.task == "coco"}
    assert rows.keys() == COCO.keys()
    for key, (params, macs) in COCO.items():
        row = rows[key]
        assert (row.params_paper, row.macs_paper) == (params, macs)
        assert round(row.params) == params, key
        assert row.macs == pytest.approx(macs, rel=0.01), key


def test_every_ade20k_figure_is_met_within_one_percent():
    rows = {(row.table, row.setting): row for row in cost.reproduce() if row.task == "ade20k"}
    assert rows.keys() == ADE20K.keys()
    for key, (params, macs) in ADE20K.items():
        row = rows[key]
        assert (row.params_paper, row.macs_paper) == (params, macs)
        assert round(row.params) == params, key
        assert row.macs == pytest.approx(macs, rel=0.01), key


def test_every_imagenet_figure_is_met_within_two_percent():
    rows = {(row.table, row.setting): row for row in cost.reproduce() if row.task == "imagenet"}
    assert rows.keys() == FIGURES.keys()
    for key, (params, macs) in FIGURES.items():
        row = rows[key]
        assert (row.params_paper, row.macs_paper) == (params, macs)
        assert round(row.params) == params, key
        assert row.macs == pytest.approx(macs, rel=0.02), key


def test_main_variants_meet_the_paper_after_rounding():
    counted = [
        cost.count(config, (224, 224), counting="paper") for config in (PALE_T, PALE_S, PALE_B)
    ]
    assert [round(total.params / 1e6) for total in counted] == [22, 48, 85]
    assert [round(total.macs / 1e9, 1) for total in counted[:2]] == [4.2, 9.0]
    assert counted[2].macs == pytest.approx(15.6e9, rel=0.005)


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("position", ["cpe", "ape", "none"])
def test_counted_parameters_are_those_of_the_model(name, position):
    arguments = {"position": position, "img_size": (96, 130)}
    model = pale.create_model(name, in_chans=5, num_classes=11, device="meta", **arguments)
    config = replace(VARIANTS[name], **arguments)
    total = cost.count(config, (64, 64), in_chans=5, num_classes=11)
    assert total.params == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("size", [(224, 224), (100, 173), (225, 320)], ids=str)
@pytest.mark.parametrize("attention", MODES)
@pytest.mark.parametrize("backend", ["sdpa", "reference"])
def test_executed_count_equals_pytorchs_counter_to_the_digit(size, attention, backend):
    if backend == "reference":
        size = (size[0] // 3, size[1] // 3)  # one group after the other is slow
    arguments = {"attention": attention}
    if size in ((225, 320), (75, 106)) and attention != "axial":
        arguments["pale_size"] = 9
    # The whole Pale-T once per size, a small model for every other combination.
    name = "pale_tiny" if (attention, backend) == ("parallel", "sdpa") else "pale_nano"
    model = pale.create_model(name, backend=backend, **arguments).eval()
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(torch.randn(1, 3, *size))
    total = cost.count(
        replace(VARIANTS[name], **arguments), size, counting="executed", backend=backend
    )
    assert counter.get_total_flops() == 2 * total.macs


@given(
    n_r=st.integers(1, 6),
    n_c=st.integers(1, 6),
    s_r=st.integers(1, 9),
    s_c=st.integers(1, 9),
    heads=st.sampled_from([2, 4]),
    grouping=st.sampled_from(["interlaced", "contiguous"]),
)
def test_ideal_count_is_the_papers_formula_where_sizes_divide(n_r, n_c, s_r, s_c, heads, grouping):
    h, w, c = n_r * s_r, n_c * s_c, heads * 8
    region = Region((s_r, s_c), "parallel", grouping)
    formula = cost.parallel_attention(h, w, c, s_r, s_c)
    for counting in ("ideal", "executed", "paper"):
        assert cost.attention(region, h, w, c, heads, counting) == formula


def test_one_group_of_all_rows_is_global_attention_plus_phi():
    h, w, c = 6, 10, 32
    row = cost.attention(Region((h, w), "row"), h, w, c, heads=2)
    assert row == cost.global_attention(h, w, c) + 27 * h * w * c


@pytest.mark.parametrize("attention", MODES)
@given(h=st.integers(1, 400), w=st.integers(1, 400))
def test_ideal_never_costs_more_than_executed_nor_executed_more_than_paper(attention, h, w):
    config = replace(PALE_T, attention=attention, depths=(2, 2, 2, 2))
    ideal, executed, paper = (
        cost.count(config, (h, w), counting=way).macs for way in ("ideal", "executed", "paper")
    )
    assert ideal <= executed
    if (
        attention != "vanilla"
    ):  # its executed form repeats crossings, which the paper's padding may not outweigh
        assert executed <= paper


@pytest.mark.parametrize("size", [(224, 224), (100, 173)], ids=str)
def test_kept_activations_are_those_that_autograd_saves(size):
    """Within a tenth: the estimate does not count padding, masks, statistics and the image."""
    model = pale.create_model("pale_tiny")
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved = {}

    def keep(x):
        if (storage := x.untyped_storage()).data_ptr() not in weights:
            saved[storage.data_ptr()] = (
                storage.nbytes(),
                x,
            )  # holding x keeps its address from being used again
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        model(torch.randn(1, 3, *size)).sum()
    assert cost.count(PALE_T, size).kept * 4 == pytest.approx(
        sum(n for n, _ in saved.values()), rel=0.1
    )


def test_parts_add_up_and_a_head_can_be_added():
    head = cost.Cost((cost.Part("decode", 7, 11),))
    total = cost.backbone(PALE_T, (64, 64)) + head
    stages = [total.under(f"stages.{i}.") for i in range(4)]
    assert total.macs == sum(stage.macs for stage in stages) + 11
    assert total.params == sum(stage.params for stage in stages) + 7


def test_an_unknown_way_to_count_is_an_error():
    with pytest.raises(
        ValueError,
        match=r"counting must be one of paper, ideal, executed, got 'idael'; did you mean 'ideal'",
    ):
        cost.count(PALE_T, (224, 224), counting="idael")
