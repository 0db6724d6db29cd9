"""Rules found by running operators on shards, against what algebra says."""

import os

import pytest
import torch
from torch import nn

from outsize.model.operator_rules.discover import RuleFinder
from outsize.model.operator_rules.guard import run_guarded
from outsize.model.operator_rules.rule_cache import cache_folder
from outsize.model.operator_rules.signature import OperatorSignature, signature_of
from outsize.model.program import NodeKind
from outsize.model.record import record_module

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    """Each test finds its rules anew."""
    monkeypatch.setenv("OUTSIZE_CACHE", str(tmp_path))


class Call(nn.Module):
    """Calls one function on its parameters and inputs, so that it can be recorded."""

    def __init__(self, function, parameters=()):
        super().__init__()
        self.function = function
        self.weights = nn.ParameterList([nn.Parameter(torch.empty(shape)) for shape in parameters])

    def forward(self, *inputs):
        return self.function(*self.weights, *inputs[1:])


def signature(function, target, *inputs, parameters=()) -> OperatorSignature:
    program = record_module(Call(function, parameters), (torch.zeros(1), *inputs), granularity="operators")
    nodes = [node for _, node in program.nodes_of_kind(NodeKind.OPERATOR) if node.target is target]
    return signature_of(program, nodes[0])


def rules(found: OperatorSignature, degree: int = 2, segments=()) -> set[str]:
    return {str(rule) for rule in RuleFinder(degree, segments).rules(found)}


@pytest.mark.parametrize("degree", [2, 3, 4])
def test_a_matrix_product_splits_rows_columns_and_the_contracted_dim(degree):
    """C = A B: rows of A, columns of B, or both along the contracted dim as a partial sum."""
    found = signature(torch.mm, aten.mm.default, parameters=[(12, 24), (24, 36)])
    assert rules(found, degree) >= {"S0, R~ -> S0", "R~, S1 -> S1", "S1, S0 -> P"}
    assert "S0, S0 -> S0" not in rules(found, degree)


def test_a_size_that_the_degree_does_not_divide_has_no_split_there():
    """Rows 12 divide by 4, the contracted 6 and the columns 10 do not."""
    found = signature(torch.mm, aten.mm.default, parameters=[(12, 6), (6, 10)])
    assert {rule for rule in rules(found, 4) if "S" in rule} == {"S0, R~ -> S0"}


def test_grouped_query_attention_splits_along_heads_and_batch():
    """Each group of query heads goes with its key-value head."""

    def attend(q, k, v):
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    target = aten._scaled_dot_product_flash_attention_for_cpu.default
    shapes = [(2, 4, 6, 8), (2, 2, 6, 8), (2, 2, 6, 8)]
    found = rules(signature(attend, target, parameters=shapes))
    assert {"S0, S0, S0 -> S0, S0", "S1, S1, S1 -> S1, S1"} <= found
    without_kernel = {rule for rule in found if "query_split_attention" not in rule}
    assert not any(rule.startswith("S2") for rule in without_kernel), "the mask of a part is another"
    assert not rules(signature(attend, target, parameters=shapes), 4) - {"R~, R~, P -> P, R"}


@pytest.mark.parametrize(("queries", "keys"), [(16, 8), (64, 8), (48, 12)])
def test_small_shapes_keep_how_many_query_heads_share_a_key_head(queries, keys):
    """Attention of ordinary sizes, too large to try as it is: heads split at every degree they divide by."""

    def attend(q, k, v):
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    shapes = [(1, queries, 2048, 128), (1, keys, 2048, 128), (1, keys, 2048, 128)]
    found = signature(attend, aten._scaled_dot_product_flash_attention_for_cpu.default, parameters=shapes)
    for degree in (2, 4):
        assert "S1, S1, S1 -> S1, S1" in rules(found, degree)


def test_sizes_among_the_arguments_become_local_sizes():
    """A view into heads splits where its count of heads is divided."""
    found = signature(lambda x: x.view(2, 6, 4, 8), aten.view.default, parameters=[(2, 6, 32)])
    by_heads = [rule for rule in RuleFinder(4).rules(found) if str(rule) == "S2 -> S2"]
    assert [rule.local_arguments for rule in by_heads] == [(3,)]


def test_a_fused_projection_splits_each_of_its_segments():
    """Query, key and value of one product, each cut on its own; without segments the cut is refused."""
    found = signature(lambda x: x.split(8, 2), aten.split.Tensor, parameters=[(2, 6, 24)])
    assert "S2[8,8,8] -> S2, S2, S2" in rules(found, 2, segments=((8, 8, 8),))
    assert not any(rule.startswith("S2") for rule in rules(found))


def test_an_embedding_splits_its_width_its_tokens_and_with_a_mask_its_rows():
    """The row split looks up only the rows a rank holds."""
    found = signature(
        lambda w, i: nn.functional.embedding(i, w),
        aten.embedding.default,
        torch.zeros(2, 6, dtype=torch.long),
        parameters=[(32, 8)],
    )
    expected = {"S1, R -> S2", "R~, S0 -> S0", "R~, S1 -> S1", "S0, R -> P (row_split_embedding)"}
    assert expected <= rules(found)
    assert "S0, R -> P (row_split_embedding)" in rules(found, 4)


@pytest.mark.parametrize("degree", [2, 4])
def test_cross_entropy_splits_over_the_vocabulary(degree):
    """Log-softmax stays split over classes, the loss is the sum of what each rank's classes give."""

    def loss(logits, labels):
        return nn.functional.cross_entropy(logits, labels)

    labels = torch.zeros(12, dtype=torch.long)
    softmax = signature(loss, aten._log_softmax.default, labels, parameters=[(12, 32)])
    nll = signature(loss, aten.nll_loss_forward.default, labels, parameters=[(12, 32)])
    assert "S1 -> S1 (class_split_log_softmax)" in rules(softmax, degree)
    assert "S1, R -> P, R (class_split_nll_loss)" in rules(nll, degree)


def test_a_mean_over_a_split_dim_is_a_sum_of_shares():
    """Over all elements, and over one dim that stays."""
    whole = signature(torch.mean, aten.mean.default, parameters=[(4, 6)])
    assert {"S0 -> P (split_mean)", "S1 -> P (split_mean)"} <= rules(whole)
    last = signature(lambda x: x.mean(-1, keepdim=True), aten.mean.dim, parameters=[(4, 6)])
    assert {rule for rule in rules(last) if "S" in rule} == {"S0 -> S0", "S1 -> P (split_mean)"}


def test_a_normalised_dim_is_not_split():
    """Layer norm needs its whole row; its weight then has a partial gradient on each rank."""
    found = signature(
        lambda w, b, x: nn.functional.layer_norm(x, (8,), w, b),
        aten.native_layer_norm.default,
        torch.zeros(4, 6, 8),
        parameters=[(8,), (8,)],
    )
    assert {r for r in rules(found) if "S" in r} == {"S0, R~, R~ -> S0, S0, S0", "S1, R~, R~ -> S1, S1, S1"}


def test_non_linear_operators_take_no_partial_sum():
    """A sum of halves through silu is not the silu of the sum."""
    found = signature(nn.functional.silu, aten.silu.default, parameters=[(4, 6)])
    assert rules(found) == {"S0 -> S0", "S1 -> S1"}


def test_large_operators_are_tried_small():
    """A view and a product of gigabytes get their rules in well under their run time and memory."""
    view = signature(lambda x: x.view(8, 2048, 32, 128), aten.view.default, parameters=[(8, 2048, 4096)])
    assert {"S0 -> S0", "S1 -> S1", "S2 -> S2"} <= rules(view, 8)
    product = signature(torch.mm, aten.mm.default, parameters=[(16384, 4096), (4096, 14336)])
    assert {"S0, R~ -> S0", "R~, S1 -> S1", "S1, S0 -> P"} <= rules(product, 8)


def test_a_crash_in_a_trial_leaves_out_that_step_alone():
    """The guarded process dies at the second step; the others are still taken, and later tasks run."""

    def task(attempt):
        for step in range(4):
            if attempt(step):
                if step == 1:
                    os.abort()
                yield step

    def crash(attempt):
        os.abort()
        yield attempt(0)

    assert run_guarded([task, crash, task]) == [[0, 2, 3], [], [0, 2, 3]]


def test_trials_leave_the_random_numbers_alone():
    """Finding rules does not change what the caller draws next."""
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    rules(signature(nn.functional.silu, aten.silu.default, parameters=[(4, 6)]))
    assert torch.equal(torch.rand(4), expected)


def _refuse(tasks):
    raise ZeroDivisionError(tasks)


def test_rules_are_found_once(monkeypatch):
    """A second finder reads what the first one found; a damaged file is as good as none."""
    found = signature(torch.mm, aten.mm.default, parameters=[(4, 6), (6, 8)])
    expected = rules(found)
    monkeypatch.setattr("outsize.model.operator_rules.discover.run_guarded", _refuse)
    assert rules(found) == expected
    for path in (cache_folder() / "operator_rules").iterdir():
        path.write_text("{")
    with pytest.raises(ZeroDivisionError):
        rules(found)


def test_a_width_of_heads_that_do_not_divide_is_cut_at_heads():
    """Six heads over four ranks; without a known number of heads the width divides evenly."""
    finder = RuleFinder(4)
    heads = signature(lambda x: x.view(2, 5, 6, 8), aten.view.default, parameters=[(2, 5, 48)])
    assert "S2[48]/6 -> S2[6]" in {str(rule) for rule in finder.uneven_rules(heads)}
    product = signature(torch.mm, aten.mm.default, parameters=[(10, 48), (48, 16)])
    assert "S1[48]/6, S0[48]/6 -> P" in {str(rule) for rule in finder.uneven_rules(product, {48: [6]})}
    assert not any("[48]" in str(rule) for rule in finder.uneven_rules(product))


def test_groups_and_channels_become_local_together():
    """Group norm over half of the groups has half of the channels."""
    found = signature(
        lambda w, b, x: nn.functional.group_norm(x, 4, w, b),
        aten.native_group_norm.default,
        torch.zeros(3, 16, 5),
        parameters=[(16,), (16,)],
    )
    by_channels = [rule for rule in RuleFinder(2).rules(found) if str(rule) == "S1, S0, S0 -> S1, S1, S1"]
    assert len(by_channels[0].local_arguments) == 2


def test_what_seldom_depends_on_a_value_is_not_taken_to_be_independent_of_it():
    """Whether a number is zero, or any of many is true, looks the same for random shares; it is not."""
    mask = torch.zeros(40, 4, dtype=torch.float64)
    is_set = signature(lambda x: x.to(torch.bool), aten._to_copy.default, mask, parameters=())
    assert rules(is_set) == {"S0 -> S0", "S1 -> S1"}
    any_set = signature(lambda x: (x > 0).any(), aten.any.default, mask, parameters=())
    assert not rules(any_set)
