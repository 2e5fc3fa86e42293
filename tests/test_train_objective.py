"""The loss and the simulated acceptance, against their definitions."""

import math

import pytest
import torch

from train.objective import (
    accepted_per_block,
    blocks_by_depth,
    simulated_acceptance,
    slot_weights,
    weighted_cross_entropy,
    weighted_cross_entropy_at_once,
)


def rows(num_rows: int, dtype: torch.dtype = torch.float32):
    generator = torch.Generator().manual_seed(num_rows)
    hidden_RD = torch.randn(num_rows, 8, generator=generator).to(dtype).requires_grad_()
    head_VD = torch.randn(37, 8, generator=generator).to(dtype)
    labels_R = torch.randint(0, 37, (num_rows,), generator=generator)
    return hidden_RD, head_VD, labels_R, torch.rand(num_rows, generator=generator)


@pytest.mark.parametrize("num_rows", [1, 7, 64, 65])
@pytest.mark.parametrize("chunk_rows", [1, 7, 64])
def test_the_loss_in_chunks_equals_its_slow_twin_forward_and_backward(num_rows, chunk_rows, monkeypatch):
    monkeypatch.setattr("train.objective.CHUNK_LOGITS", chunk_rows * 37)
    hidden_RD, *others = rows(num_rows)
    results = []
    for function in (weighted_cross_entropy, weighted_cross_entropy_at_once):
        drafted = function(hidden_RD, *others)
        (gradient,) = torch.autograd.grad(drafted.loss_sum * 0.3, hidden_RD)
        results.append((drafted.loss_sum, drafted.tokens_R, gradient))
    torch.testing.assert_close(*results, atol=1e-6, rtol=1e-5)


def test_the_loss_in_chunks_follows_its_slow_twin_in_bf16():
    hidden_RD, *others = rows(33, torch.bfloat16)
    fast, slow = (
        weighted_cross_entropy(hidden_RD, *others),
        weighted_cross_entropy_at_once(hidden_RD, *others),
    )
    by_fast, by_slow = (torch.autograd.grad(drafted.loss_sum, hidden_RD)[0] for drafted in (fast, slow))
    torch.testing.assert_close(fast.loss_sum, slow.loss_sum)
    torch.testing.assert_close(by_fast, by_slow, atol=2e-2, rtol=2e-2)


def test_splitting_the_rows_changes_neither_loss_nor_gradient():
    hidden_RD, head_VD, labels_R, weights_R = rows(20)
    whole = weighted_cross_entropy(hidden_RD, head_VD, labels_R, weights_R).loss_sum
    (gradient,) = torch.autograd.grad(whole, hidden_RD)
    cuts = [slice(0, 3), slice(3, 4), slice(4, 20)]
    split = sum(
        weighted_cross_entropy(hidden_RD[cut], head_VD, labels_R[cut], weights_R[cut]).loss_sum
        for cut in cuts
    )
    torch.testing.assert_close(split, whole)
    torch.testing.assert_close(torch.autograd.grad(split, hidden_RD)[0], gradient)


def test_slot_k_weighs_exp_of_its_distance_to_slot_1():
    supervised = torch.tensor([[0, 1, 1, 1], [0, 1, 0, 1]], dtype=torch.bool)
    weights = slot_weights(supervised, decay=4.0)
    expected = [[0, 1, math.exp(-1 / 4), math.exp(-2 / 4)], [0, 1, 0, math.exp(-2 / 4)]]
    torch.testing.assert_close(weights, torch.tensor(expected))


def acceptance_of(tokens: torch.Tensor, labels: torch.Tensor, supervised: torch.Tensor) -> float:
    return simulated_acceptance(
        blocks_by_depth(accepted_per_block(tokens, labels, supervised), tokens.shape[1])
    )


def test_half_the_blocks_all_right_and_half_all_wrong_accept_three():
    labels = torch.ones(10, 5, dtype=torch.long)
    tokens = labels.clone()
    tokens[::2] = 2
    supervised = torch.ones(10, 5, dtype=torch.bool)
    assert acceptance_of(tokens, labels, supervised) == 3.0  # the product of marginals would say 1.94


def test_a_run_ends_at_the_first_wrong_or_unsupervised_slot():
    labels = torch.zeros(4, 5, dtype=torch.long)
    tokens = torch.tensor([[9, 0, 0, 0, 0], [9, 0, 7, 0, 0], [9, 7, 0, 0, 0], [9, 0, 0, 0, 0]])
    supervised = torch.tensor([[0, 1, 1, 1, 1]] * 3 + [[0, 1, 1, 0, 1]], dtype=torch.bool)
    accepted = accepted_per_block(tokens, labels, supervised)
    assert accepted.tolist() == [4, 1, 0, 2]
    assert blocks_by_depth(accepted, 5).tolist() == [4, 3, 2, 1, 1]
    assert simulated_acceptance(blocks_by_depth(accepted, 5)) == 1 + 7 / 4
