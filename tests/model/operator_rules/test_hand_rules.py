"""Splits that need a mask or a collective of their own hold in the same trial as all others, unevenly too."""

import pytest
import torch
from torch import nn

from model.operator_rules.test_discover import aten, empty_cache, signature
from outsize.model.operator_rules.discover import RuleFinder

__all__ = ["empty_cache"]  # a fixture


def texts(found, degree: int = 2) -> set[str]:
    """Even and uneven splits of an operator."""
    finder = RuleFinder(degree)
    return {str(rule) for rule in (*finder.rules(found), *finder.uneven_rules(found))}


def test_batch_norm_in_training_splits_its_channels_alone():
    """Statistics are over samples and positions; running ones stay whole on every rank."""
    norm = nn.BatchNorm2d(6).double()

    def function(weight, bias, x):
        mean, variance = norm.running_mean.to(x.device), norm.running_var.to(x.device)
        return nn.functional.batch_norm(x, mean, variance, weight, bias, training=True)

    images = torch.zeros(4, 6, 3, 3, dtype=torch.float64)
    found = signature(function, aten.native_batch_norm.default, images, parameters=[(6,), (6,)])
    assert texts(found) == {"S1, S0, S0, R, R -> S1, S0, S0 (channel_split_batch_norm)"}
    assert "S1[6], S0[6], S0[6], R, R -> S1[6], S0[6], S0[6] (channel_split_batch_norm)" in texts(found, 4)


@pytest.mark.parametrize(
    ("loss", "name"),
    [
        (nn.functional.mse_loss, "mse_loss"),
        (nn.functional.smooth_l1_loss, "smooth_l1_loss"),
        (nn.functional.binary_cross_entropy_with_logits, "binary_cross_entropy_with_logits"),
    ],
)
def test_a_mean_loss_is_a_sum_of_shares(loss, name):
    """Along any dim, and weighted by how much each rank holds where that differs."""
    target = getattr(aten, name).default
    found = signature(loss, target, torch.zeros(6, 5), parameters=[(6, 5)])
    expected = {f"S0, S0 -> P (split_{name})", f"S1[5], S1[5] -> P (split_{name})"}
    assert {text for text in texts(found) if "S" in text} == expected


def test_bags_of_embeddings_split_their_width_and_their_rows():
    """Rows of other ranks weigh nothing in the sum; a table of 50 rows over four ranks is cut unevenly."""

    def bags(weight, indices, offsets):
        return nn.functional.embedding_bag(indices, weight, offsets, mode="sum")

    indices, offsets = torch.zeros(12, dtype=torch.long), torch.tensor([0, 3, 6, 9])
    found = signature(bags, aten._embedding_bag.default, indices, offsets, parameters=[(50, 8)])
    rows = "S0, R, R -> P, R, R, R (row_split_embedding_bag)"
    assert {rows, "S1, R, R -> S1, R, R, R"} <= texts(found)
    assert rows.replace("S0", "S0[50]") in texts(found, 4)


def test_writing_in_place_splits_as_its_plain_form_does():
    """A residual added in place, with gradients of both sides."""

    def add(left, right):
        left = left * 1
        kept = left.view(-1)  # sees the write, which so stays one
        left += right
        return left + kept.view_as(left)

    found = signature(add, aten.add_.Tensor, parameters=[(4, 6), (4, 6)])
    assert {"S0, S0 -> S0", "S1, S1 -> S1"} <= texts(found)


def test_embeddings_and_cross_entropy_split_an_odd_vocabulary():
    """Each rank masks what is not between its first and its last class."""
    ids = torch.zeros(12, dtype=torch.long)

    def lookup(weight, ids):
        return nn.functional.embedding(ids, weight)

    def loss(logits, labels):
        return nn.functional.cross_entropy(logits, labels)

    table = signature(lookup, aten.embedding.default, ids, parameters=[(31, 8)])
    softmax = signature(loss, aten._log_softmax.default, ids, parameters=[(12, 31)])
    nll = signature(loss, aten.nll_loss_forward.default, ids, parameters=[(12, 31)])
    assert "S0[31], R -> P (row_split_embedding)" in texts(table, 4)
    assert "S1[31] -> S1[31] (class_split_log_softmax)" in texts(softmax, 4)
    assert "S1[31], R -> P, R (class_split_nll_loss)" in texts(nll, 4)


@pytest.mark.parametrize("num_key_heads", [4, 2])
def test_queries_of_a_causal_sequence_are_split(num_key_heads):
    """Each rank attends to the keys up to its own queries, evenly or not, and has a share of their gradients.

    Without a mask the trial finds the same split by itself.
    """

    def attend(is_causal):
        return lambda q, k, v: nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=is_causal, enable_gqa=num_key_heads < 4
        )

    target = aten._scaled_dot_product_flash_attention_for_cpu.default
    shapes = [(2, 4, 10, 8), *[(2, num_key_heads, 10, 8)] * 2]
    causal, plain = (texts(signature(attend(c), target, parameters=shapes), 4) for c in (True, False))
    assert "S2[10], R~, R~ -> S2[10], S2[10] (query_split_attention)" in causal
    assert "S2[10], R~, R~ -> S2[10], S2[10]" in plain
    assert not any(text.startswith("S2") and "query_split" not in text for text in causal)
