"""Every objective and the simulated acceptance, against their definitions."""

import math

import pytest
import torch
from torch.nn import functional as F

from recipes.schema import Objective as Settings
from train.head import Rows, find_rows
from train.objective import (
    Objective,
    accepted_per_block,
    blocks_by_depth,
    d_pace_weights,
    final_states,
    simulated_acceptance,
    slot_weights,
)

FROM_DISTRIBUTIONS = ["kl", "total_variation", "lk"]
KINDS = ["cross_entropy", "d_pace", *FROM_DISTRIBUTIONS]
HIDDEN, VOCAB = 8, 37


def objective(kind: str, **changes: float) -> Objective:
    return Objective(Settings.model_validate({"kind": kind, "decay": 3.0} | changes))


def example(kind: str, num_blocks: int = 9, block_size: int = 5, dtype: torch.dtype = torch.float32):
    """Hidden states that want a gradient, a head, and rows with gaps in their supervision."""
    generator = torch.Generator().manual_seed(num_blocks)
    supervised_AK = torch.rand(num_blocks, block_size, generator=generator) < 0.8
    supervised_AK[:, 0], supervised_AK[:, 1] = False, True
    labels_AK = torch.randint(0, VOCAB, supervised_AK.shape, generator=generator)
    final_QD = torch.randn(supervised_AK.numel(), HIDDEN, generator=generator).to(dtype)
    rows = find_rows(labels_AK, supervised_AK, final_QD if kind in FROM_DISTRIBUTIONS else None)
    hidden_RD = torch.randn(len(rows.labels_R), HIDDEN, generator=generator).to(dtype).requires_grad_()
    return hidden_RD, torch.randn(VOCAB, HIDDEN, generator=generator).to(dtype), rows


def value_and_gradient(loss, hidden_RD: torch.Tensor, *others):
    drafted = loss(hidden_RD, *others)
    return drafted.loss_sum, drafted.tokens_R, torch.autograd.grad(drafted.loss_sum * 0.3, hidden_RD)[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_blocks", [1, 7, 16])
@pytest.mark.parametrize("chunk_rows", [1, 9, 64])
def test_a_loss_in_chunks_equals_its_slow_twin_forward_and_backward(
    kind, num_blocks, chunk_rows, monkeypatch
):
    monkeypatch.setattr("train.head.CHUNK_LOGITS", {"cpu": chunk_rows * VOCAB})
    found = value_and_gradient(objective(kind).loss, *example(kind, num_blocks))
    expected = value_and_gradient(objective(kind).loss_at_once, *example(kind, num_blocks))
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_loss_in_chunks_follows_its_slow_twin_in_bf16(kind):
    tensors = example(kind, dtype=torch.bfloat16)
    found = value_and_gradient(objective(kind).loss, *tensors)
    expected = value_and_gradient(objective(kind).loss_at_once, *tensors)
    assert found[2].dtype == torch.bfloat16
    torch.testing.assert_close(found[:2], expected[:2], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found[2], expected[2], atol=1e-2, rtol=2e-2)


def take(rows: Rows, hidden_RD: torch.Tensor, blocks: list[int]) -> tuple[torch.Tensor, Rows]:
    """Those blocks, as a micro-batch of their own."""
    block_size = rows.supervised_AK.shape[1]
    labels_AK = torch.zeros_like(rows.supervised_AK, dtype=torch.long).flatten()
    labels_AK = labels_AK.index_copy_(0, rows.places_R, rows.labels_R).view_as(rows.supervised_AK)
    final_QD = None
    if rows.final_QD is not None:
        final_QD = rows.final_QD.view(-1, block_size, HIDDEN)[blocks].flatten(0, 1)
    mine = [row for block in blocks for row in range(rows.first_rows[block], rows.first_rows[block + 1])]
    return hidden_RD[mine], find_rows(labels_AK[blocks], rows.supervised_AK[blocks], final_QD)


@pytest.mark.parametrize("kind", KINDS)
def test_neither_a_split_nor_the_order_of_blocks_changes_loss_gradient_or_normaliser(kind):
    hidden_RD, head_VD, rows = example(kind)
    whole = objective(kind).loss(hidden_RD, head_VD, rows).loss_sum
    (gradient,) = torch.autograd.grad(whole, hidden_RD)
    parts = [take(rows, hidden_RD, blocks) for blocks in ([8, 0, 3], [5], [1, 2, 4, 6, 7])]
    split = sum(objective(kind).loss(part, head_VD, its_rows).loss_sum for part, its_rows in parts)
    torch.testing.assert_close(split, whole)
    torch.testing.assert_close(torch.autograd.grad(split, hidden_RD)[0], gradient)
    normalisers = [objective(kind).normaliser(its_rows.supervised_AK) for _, its_rows in parts]
    torch.testing.assert_close(sum(normalisers), objective(kind).normaliser(rows.supervised_AK))


@pytest.mark.parametrize("kind", KINDS)
def test_the_definition_row_by_row(kind):
    hidden_RD, head_VD, rows = example(kind)
    q = torch.softmax(hidden_RD.detach().double() @ head_VD.double().T, -1)
    expected = 0.0
    for row, (place, label) in enumerate(zip(rows.places_R.tolist(), rows.labels_R.tolist(), strict=True)):
        block, slot = divmod(place, 5)
        weight = math.exp(-(slot - 1) / 3.0)
        if kind == "d_pace":
            probs = [
                float(q[other, rows.labels_R[other]])
                for other in range(rows.first_rows[block], rows.first_rows[block + 1])
            ]
            weight = weights_by_hand(probs, 0.5)[row - rows.first_rows[block]]
        loss = -math.log(q[row, label])
        if rows.final_QD is not None:
            p = torch.softmax(rows.final_QD[place].double() @ head_VD.double().T, -1)
            kl, variation = float((p * (p / q[row]).log()).sum()), float((p - q[row]).abs().sum() / 2)
            acceptance = float(torch.minimum(p, q[row]).sum())
            share = {"kl": 1.0, "total_variation": 0.0, "lk": math.exp(-3.0 * acceptance)}[kind]
            loss = share * kl + (1 - share) * variation
        expected += weight * loss
    found = objective(kind).loss(hidden_RD, head_VD, rows).loss_sum
    assert found.item() == pytest.approx(expected, rel=1e-5)


# D-PACE


def weights_by_hand(label_probs: list[float], alpha: float) -> list[float]:
    """Of a block's supervised slots: w_j = sum over m >= j of the product over i <= m."""
    smooth = [(1 - alpha) * prob + alpha for prob in label_probs]
    return [sum(math.prod(smooth[: m + 1]) for m in range(j, len(smooth))) for j in range(len(smooth))]


def test_d_pace_weights_of_a_small_block():
    probs = torch.tensor([[9.0, 0.5, 0.1, 1.0]])
    supervised = torch.tensor([[False, True, True, True]])
    # smoothed by 0.5: 0.75, 0.55, 1; reached: 0.75, 0.4125, 0.4125
    expected = torch.tensor([[0.0, 1.575, 0.825, 0.4125]])
    torch.testing.assert_close(d_pace_weights(probs, supervised, 0.5), expected)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_d_pace_weights_are_the_formula_and_a_gap_is_as_if_it_were_not_there(alpha):
    generator = torch.Generator().manual_seed(1)
    probs_AK, supervised_AK = (
        torch.rand(20, 7, generator=generator),
        torch.rand(20, 7, generator=generator) < 0.6,
    )
    weights_AK = d_pace_weights(probs_AK, supervised_AK, alpha)
    assert not weights_AK[~supervised_AK].any()
    for probs, supervised, weights in zip(probs_AK, supervised_AK, weights_AK, strict=True):
        expected = weights_by_hand(probs[supervised].tolist(), alpha)
        assert weights[supervised].tolist() == pytest.approx(expected, rel=1e-5)


def test_without_confidence_to_follow_d_pace_weighs_slots_by_those_after_them():
    supervised = torch.tensor([[False, True, True, True, True]])
    assert d_pace_weights(torch.rand(1, 5), supervised, 1.0).tolist() == [[0, 4, 3, 2, 1]]


def test_d_pace_weights_are_constants_for_the_gradient():
    hidden_RD, head_VD, rows = example("d_pace")
    logits_RV = (hidden_RD @ head_VD.T).detach().requires_grad_()
    probs_R = logits_RV.softmax(-1).gather(1, rows.labels_R[:, None])[:, 0].detach()
    probs_AK = torch.zeros(rows.supervised_AK.shape).masked_scatter(rows.supervised_AK, probs_R)
    weights_R = d_pace_weights(probs_AK, rows.supervised_AK, 0.5)[rows.supervised_AK]
    (weights_R * F.cross_entropy(logits_RV, rows.labels_R, reduction="none")).sum().backward()
    loss = objective("d_pace").loss(hidden_RD, head_VD, rows).loss_sum
    torch.testing.assert_close(torch.autograd.grad(loss, hidden_RD)[0], logits_RV.grad @ head_VD)


def test_d_pace_counts_blocks_with_a_supervised_slot():
    supervised = torch.tensor([[0, 1, 1], [0, 0, 0], [0, 0, 1]], dtype=torch.bool)
    assert objective("d_pace").normaliser(supervised) == 2


# The target's own distribution


@pytest.mark.parametrize("kind", FROM_DISTRIBUTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_drafter_that_equals_its_teacher_has_nothing_to_learn(kind, dtype):
    hidden_RD, head_VD, rows = example(kind, dtype=dtype)
    rows.final_QD[rows.places_R] = hidden_RD.detach()
    loss, _, gradient = value_and_gradient(objective(kind).loss, hidden_RD, head_VD, rows)
    assert loss.item() == 0.0
    assert not gradient.any()


@pytest.mark.parametrize(("kind", "eta"), [("kl", 1e-9), ("total_variation", 1e9)])
def test_lk_lies_between_kl_and_total_variation(kind, eta):
    tensors = example(kind)
    found = value_and_gradient(objective("lk", eta=eta).loss, *tensors)
    torch.testing.assert_close(found, value_and_gradient(objective(kind).loss, *tensors))


@pytest.mark.parametrize("kind", FROM_DISTRIBUTIONS)
def test_a_drafter_learns_its_teacher(kind):
    hidden_RD, head_VD, rows = example(kind)
    state_RD = hidden_RD.detach().clone().requires_grad_()
    optimizer = torch.optim.Adam([state_RD], 0.2)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = objective(kind).loss(state_RD, head_VD, rows).loss_sum
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.1 * losses[0]


def certain_states(
    token_ids_L: torch.Tensor, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """A head, and states of all tokens but the last, each of which predicts the next token."""
    head_VD = F.normalize(torch.randn(VOCAB, 64, generator=generator), dim=1)
    return head_VD, 40 * head_VD[token_ids_L[1:]]


def test_the_teachers_state_at_a_slot_predicts_the_slots_label():
    generator = torch.Generator().manual_seed(3)
    token_ids_L = torch.randperm(VOCAB, generator=generator)[:12]
    head_VD, final_LD = certain_states(token_ids_L, generator)
    anchors_A, block_size = torch.tensor([0, 4, 10]), 4
    positions_AK = anchors_A[:, None] + torch.arange(block_size)
    supervised_AK = (positions_AK < len(token_ids_L)) & (torch.arange(block_size) > 0)
    labels_AK = token_ids_L[positions_AK.clamp(max=11)]
    rows = find_rows(labels_AK, supervised_AK, final_states(final_LD, anchors_A, block_size))
    hidden_RD = 40 * head_VD[rows.labels_R]  # a drafter that knows every label
    assert float(objective("total_variation").loss(hidden_RD, head_VD, rows).loss_sum) < 1e-3
    off_by_one = find_rows(labels_AK, supervised_AK, final_states(final_LD, anchors_A - 1, block_size))
    assert float(objective("total_variation").loss(hidden_RD, head_VD, off_by_one).loss_sum) > 4


# Weights and chunks


def test_slot_k_weighs_exp_of_its_distance_to_slot_1():
    supervised = torch.tensor([[0, 1, 1, 1], [0, 1, 0, 1]], dtype=torch.bool)
    weights = slot_weights(supervised, decay=4.0)
    expected = [[0, 1, math.exp(-1 / 4), math.exp(-2 / 4)], [0, 1, 0, math.exp(-2 / 4)]]
    torch.testing.assert_close(weights, torch.tensor(expected))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "d_pace"])
def test_a_constant_loss_of_one_sums_to_the_normaliser(kind):
    *_, rows = example(kind)
    weights_R = objective(kind)._weights(torch.ones(len(rows.labels_R)), rows)
    assert float(weights_R.sum()) == pytest.approx(float(objective(kind).normaliser(rows.supervised_AK)))


@pytest.mark.parametrize("most_rows", [1, 4, 11, 100])
def test_chunks_are_runs_of_whole_blocks_and_pass_over_those_without_a_row(most_rows):
    supervised_AK = torch.tensor([[0, 1, 1], [0, 0, 0], [0, 0, 0], [0, 0, 1], [0, 1, 0]], dtype=torch.bool)
    labels_AK = torch.arange(15).view(5, 3)
    rows = find_rows(labels_AK, supervised_AK)
    taken = []
    for where, chunk in rows.cut(most_rows):
        assert where.stop - where.start == len(chunk.labels_R) == chunk.first_rows[-1]
        assert len(chunk.labels_R) <= max(2, most_rows)
        assert torch.equal(chunk.places_R, chunk.supervised_AK.flatten().nonzero().flatten())
        taken += chunk.labels_R.tolist()
    assert taken == [1, 2, 11, 13]


# Simulated acceptance


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
