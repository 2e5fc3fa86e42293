"""The pairwise head and its losses against their definitions, and trees followed along recorded text."""

import math

import pytest
import torch

from recipes.schema import Objective as Settings
from serve.tree import broadcast_marginals
from train.objective import Objective
from train.pairwise import (
    DraftedBlocks,
    Labelled,
    PairwiseHead,
    fill_tables,
    gather_blocks,
    label_among_candidates,
    label_in_vocabulary,
    loss_sum,
    score,
)
from train.target_parts import TargetParts
from train.tree_acceptance import (
    NO_LABEL,
    accepted_by_chains,
    accepted_by_trees,
    accepted_by_trees_one_by_one,
    committed_by_step,
)

BY_DEPTH = Settings(kind="cross_entropy", decay=2.5)
HIDDEN, VOCAB, RANK, SLOTS, COUNT = 6, 23, 5, 3, 7
DEVICES = ["cpu", *["cuda"] * torch.cuda.is_available()]


def make_parts(seed: int = 0) -> TargetParts:
    generator = torch.Generator().manual_seed(seed)
    embedding_VD, head_VD = torch.randn(2, VOCAB, HIDDEN, generator=generator)
    return TargetParts(embedding_VD, head_VD)


def make_blocks(num_blocks: int = 9, count: int = COUNT) -> DraftedBlocks:
    """With gaps in their supervision."""
    generator = torch.Generator().manual_seed(num_blocks)
    supervised_AK = torch.rand(num_blocks, SLOTS + 1, generator=generator) < 0.8
    supervised_AK[:, 0], supervised_AK[0] = False, torch.tensor([False, True, True, True])
    labels_AK = torch.randint(0, VOCAB, supervised_AK.shape, generator=generator) * supervised_AK
    hidden_AKD = torch.randn(num_blocks, SLOTS + 1, HIDDEN, generator=generator)
    input_ids_AK = torch.randint(0, VOCAB, supervised_AK.shape, generator=generator)
    return gather_blocks(hidden_AKD, input_ids_AK, labels_AK, supervised_AK, make_parts().head_VD, count)


def make_head(*, is_trained: bool = True) -> PairwiseHead:
    torch.manual_seed(1)
    head = PairwiseHead(make_parts(), RANK)
    if is_trained:
        for parameter in head.parameters():
            torch.nn.init.normal_(parameter, std=0.7)
    return head


# What the head is


def bias_by_hand(
    head: PairwiseHead, hidden_D: torch.Tensor, parent: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a parent adds to every token's score and to that of the rest: [V] and a scalar."""
    tables = head.make_tables()
    mixed_r = tables.parents_Vr[parent] * (1 + head.gate.weight @ hidden_D)
    return tables.children_Vr @ mixed_r, head.rest_r @ mixed_r


def scores_by_hand(head: PairwiseHead, blocks: DraftedBlocks, block: int, slot: int, parent: int):
    """Probabilities of the slot's candidates, then of the rest. [C + 1]"""
    bias_V, rest_bias = bias_by_hand(head, blocks.hidden_ALD[block, slot], parent)
    q_V = (blocks.hidden_ALD[block, slot] @ make_parts().head_VD.T).softmax(-1)
    tokens_C = blocks.tokens_ALC[block, slot]
    others = q_V.sum() - q_V[tokens_C].sum()
    mass = torch.cat([q_V[tokens_C] * bias_V[tokens_C].exp(), (others * rest_bias.exp())[None]])
    return mass / mass.sum()


def test_the_table_is_its_definition():
    head, blocks = make_head(), make_blocks()
    table_ALCC = fill_tables(head.make_tables(), blocks)
    for block, slot, row in [(0, 0, 0), (0, 0, 3), (4, 1, 2), (8, 2, 6)]:
        parent = blocks.anchors_A[block] if slot == 0 else blocks.tokens_ALC[block, slot - 1, row]
        expected = scores_by_hand(head, blocks, block, slot, int(parent))
        torch.testing.assert_close(table_ALCC[block, slot, row].exp(), expected[:-1], rtol=1e-4, atol=1e-6)


def test_scores_after_a_parent_and_the_rests_sum_to_one():
    head, blocks = make_head(), make_blocks()
    scores = score(head.make_tables(), blocks, torch.randint(0, VOCAB, (9, SLOTS, 4)))
    total_ALP = scores.candidates_BLPC.exp().sum(-1) + scores.rest_BLP.exp()
    torch.testing.assert_close(total_ALP, torch.ones_like(total_ALP))
    assert (scores.candidates_BLPC <= 0).all()


def test_an_untrained_head_changes_nothing():
    head, blocks = make_head(is_trained=False), make_blocks()
    table_ALCC = fill_tables(head.make_tables(), blocks)
    marginals = [torch.tensor(broadcast_marginals(each.numpy())) for each in blocks.log_probs_ALC]
    torch.testing.assert_close(table_ALCC.detach(), torch.stack(marginals), rtol=0, atol=2e-6)


def test_candidates_that_are_the_whole_vocabulary_leave_the_rest_nothing():
    blocks = make_blocks(count=VOCAB)
    head = make_head(is_trained=False)
    table_ALCC = fill_tables(head.make_tables(), blocks)
    assert table_ALCC.isfinite().all()
    torch.testing.assert_close(table_ALCC[:, :, 0], blocks.log_probs_ALC, rtol=0, atol=1e-5)


def test_what_is_saved_has_no_row_for_a_token():
    shapes = {name: tuple(weight.shape) for name, weight in make_head().state_dict().items()}
    assert shapes == {
        "parent_table.weight": (HIDDEN, RANK),
        "child_table.weight": (HIDDEN, RANK),
        "gate.weight": (RANK, HIDDEN),
        "rest_r": (RANK,),
    }


# Blocks


def test_labels_are_known_up_to_the_first_gap():
    supervised_AK = torch.tensor([[0, 1, 1, 1], [0, 1, 0, 1], [0, 0, 1, 1]]).bool()
    labels_AK = torch.tensor([[0, 4, 5, 6], [0, 4, 0, 6], [0, 0, 5, 6]])
    blocks = gather_blocks(
        torch.randn(3, 4, HIDDEN), torch.full((3, 4), 2), labels_AK, supervised_AK, make_parts().head_VD, 2
    )
    assert blocks.known_AL.tolist() == [[True, True, True], [True, False, False], [False, False, False]]
    assert blocks.labels_AL.tolist() == [[4, 5, 6], [4, 0, 0], [0, 0, 0]]
    assert blocks.recorded_parents.tolist() == [[2, 4, 5], [2, 4, 0], [2, 0, 0]]


def test_fewer_candidates_are_the_first_of_more():
    torch.testing.assert_close(vars(make_blocks().keep(3)), vars(make_blocks(count=3)))


# Losses


def gradients(head: PairwiseHead, value: torch.Tensor) -> dict[str, torch.Tensor]:
    names = [name for name, parameter in head.named_parameters() if parameter.requires_grad]
    found = torch.autograd.grad(value, [head.get_parameter(name) for name in names], allow_unused=True)
    return {name: grad for name, grad in zip(names, found, strict=True) if grad is not None}


def by_reach(alpha: float) -> Settings:
    return Settings(kind="d_pace", alpha=alpha)


def mean_loss(blocks: DraftedBlocks, labelled: Labelled, settings: Settings) -> torch.Tensor:
    return loss_sum(blocks, labelled, settings) / Objective(settings).normaliser(blocks.known_by_slot).float()


def weighted_mean(terms: list[tuple[float, torch.Tensor]]) -> torch.Tensor:
    return sum(weight * term for weight, term in terms) / sum(weight for weight, _ in terms)


def known_slots(blocks: DraftedBlocks):
    for block, slot in blocks.known_AL.nonzero().tolist():
        yield block, slot, int(blocks.recorded_parents[block, slot]), int(blocks.labels_AL[block, slot])


def test_the_loss_over_candidates_and_its_gradient_are_their_definition():
    head, blocks = make_head(), make_blocks()
    found = mean_loss(blocks, label_among_candidates(head, blocks), BY_DEPTH)
    terms, missed = [], 0
    for block, slot, parent, label in known_slots(blocks):
        tokens = blocks.tokens_ALC[block, slot].tolist()
        missed += label not in tokens
        place = tokens.index(label) if label in tokens else COUNT
        prob = scores_by_hand(head, blocks, block, slot, parent)[place]
        terms.append((math.exp(-slot / 2.5), -prob.log()))
    assert 0 < missed < len(terms)
    expected = weighted_mean(terms)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradients(head, found), gradients(head, expected), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("most_logits", [1, 5 * SLOTS * VOCAB, 1 << 20])
def test_the_loss_over_the_vocabulary_and_its_gradient_are_their_definition(most_logits):
    head, blocks, head_VD = make_head(), make_blocks(), make_parts().head_VD
    found = mean_loss(blocks, label_in_vocabulary(head, blocks, head_VD, most_logits), BY_DEPTH)
    terms = []
    for block, slot, parent, label in known_slots(blocks):
        hidden_D = blocks.hidden_ALD[block, slot]
        logits_V = head_VD @ hidden_D + bias_by_hand(head, hidden_D, parent)[0]
        terms.append((math.exp(-slot / 2.5), -logits_V.log_softmax(-1)[label]))
    expected = weighted_mean(terms)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradients(head, found), gradients(head, expected), rtol=1e-4, atol=1e-6)


def test_with_every_token_a_candidate_the_two_losses_are_one():
    head, blocks = make_head(), make_blocks(count=VOCAB)
    among = label_among_candidates(head, blocks).log_probs_AL[blocks.known_AL]
    over = label_in_vocabulary(head, blocks, make_parts().head_VD).log_probs_AL[blocks.known_AL]
    torch.testing.assert_close(among, over, rtol=0, atol=1e-3)  # the rest keeps a millionth, times exp(m b)


def test_without_smoothing_d_pace_has_the_gradient_of_the_accepted_drafts():
    head, blocks = make_head(), make_blocks()
    labelled = label_among_candidates(head, blocks)
    found = loss_sum(blocks, labelled, by_reach(0.0))
    right_AL = label_among_candidates(head, blocks).log_probs_AL.exp() * labelled.is_candidate_AL
    expected = -(right_AL * blocks.known_AL).cumprod(1).sum()
    torch.testing.assert_close(gradients(head, found), gradients(head, expected), rtol=1e-4, atol=1e-6)


def test_a_label_that_no_tree_can_hold_ends_the_reach():
    head, blocks = make_head(), make_blocks()
    labelled = label_among_candidates(head, blocks)
    reached_AL = (labelled.is_candidate_AL & blocks.known_AL).long().cumprod(1).bool()
    assert (blocks.known_AL & ~reached_AL).any()
    log_probs_AL = labelled.log_probs_AL.detach().requires_grad_()
    value = loss_sum(blocks, Labelled(log_probs_AL, labelled.is_candidate_AL), by_reach(0.0))
    (slope_AL,) = torch.autograd.grad(value, log_probs_AL)
    assert ((slope_AL < 0) == reached_AL).all()


def test_a_few_steps_learn_who_follows_whom():
    """A drafter that knows nothing, and a text where a token's follower is a matter of the token."""
    generator = torch.Generator().manual_seed(3)
    follower_V = torch.randperm(VOCAB, generator=generator)
    anchors_A = torch.randint(0, VOCAB, (64,), generator=generator)
    labels = [follower_V[anchors_A]]
    while len(labels) < SLOTS:
        labels.append(follower_V[labels[-1]])
    hidden_ALD = torch.zeros(64, SLOTS, HIDDEN)
    tokens_ALC = torch.arange(VOCAB).expand(64, SLOTS, VOCAB)
    blocks = DraftedBlocks(
        hidden_ALD,
        anchors_A,
        torch.stack(labels, dim=1),
        torch.ones(64, SLOTS, dtype=torch.bool),
        tokens_ALC,
        torch.full(tokens_ALC.shape, -math.log(VOCAB)),
    )
    head = make_head(is_trained=False)
    optimizer = torch.optim.Adam(head.parameters(), lr=0.05)
    for _ in range(150):
        value = mean_loss(blocks, label_among_candidates(head, blocks), by_reach(0.5))
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
    table_ALCC = fill_tables(head.make_tables(), blocks).detach()
    before = accepted_by_chains(torch.zeros_like(table_ALCC), tokens_ALC, blocks.labels_AL)
    after = accepted_by_chains(table_ALCC, tokens_ALC, blocks.labels_AL)
    assert after.float().mean() > before.float().mean() + 0.3


# Trees on recorded text


def draw_table(seed: int, num_blocks: int, num_slots: int, count: int):
    generator = torch.Generator().manual_seed(seed)
    scores_ALCC = torch.randn(num_blocks, num_slots, count, count, generator=generator).log_softmax(-1)
    if seed % 2:
        scores_ALCC = scores_ALCC.round()  # ties
    tokens_ALC = torch.stack(
        [torch.randperm(VOCAB, generator=generator)[:count] for _ in range(num_blocks * num_slots)]
    ).view(num_blocks, num_slots, count)
    picked = torch.randint(0, min(2, count), (num_blocks, num_slots, 1), generator=generator)
    labels_AL = tokens_ALC.gather(2, picked)[..., 0]
    ended_AL = torch.arange(num_slots) >= torch.randint(
        1, num_slots + 2, (num_blocks, 1), generator=generator
    )
    return scores_ALCC, tokens_ALC, labels_AL.masked_fill(ended_AL, NO_LABEL)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("budget", [1, 5, 31])
def test_trees_of_a_batch_accept_what_they_do_one_by_one(seed, budget, device):
    table = draw_table(seed, num_blocks=13, num_slots=1 + seed % 7, count=1 + seed % 5)
    found = accepted_by_trees(*(part.to(device) for part in table), budget)
    assert found.device.type == device
    assert found.tolist() == accepted_by_trees_one_by_one(*table, budget).tolist()


def test_a_tree_of_everything_accepts_as_far_as_candidates_hold_the_text():
    scores_ALCC, tokens_ALC, labels_AL = draw_table(4, num_blocks=20, num_slots=3, count=3)
    labels_AL = labels_AL.clone()
    labels_AL[:7, 1] = VOCAB  # a token that nobody proposes
    held_AL = (tokens_ALC == labels_AL[:, :, None]).any(-1)
    found = accepted_by_trees(scores_ALCC, tokens_ALC, labels_AL, 3 + 9 + 27)
    assert found.tolist() == held_AL.long().cumprod(1).sum(1).tolist()


def test_a_chain_takes_what_is_best_after_the_last_token():
    # after candidate 0 of slot 1 candidate 0 is best, after candidate 1 it is candidate 1
    scores_LCC = torch.tensor([[[-2.0, -0.1], [-2.0, -0.1]], [[-0.1, -3.0], [-3.0, -0.1]]])
    tokens_LC = torch.tensor([[10, 11], [20, 21]])
    labels_AL = torch.tensor([[11, 21], [11, 20], [10, 20], [11, NO_LABEL]])
    every = (scores_LCC.expand(4, 2, 2, 2), tokens_LC.expand(4, 2, 2), labels_AL)
    assert accepted_by_chains(*every).tolist() == [2, 1, 0, 1]
    assert accepted_by_trees(*every, 2).tolist() == [2, 1, 0, 1]
    assert accepted_by_trees(*every, 3).tolist() == [2, 1, 1, 1]


def test_steps_commit_accepted_drafts_and_the_next_token_until_the_text_ends():
    """Eight tokens, of which the prefill gave the first: seven are left to commit."""
    accepted = [2, 0, 7, 0, 1, 3, 0]
    # anchor 0: two drafts and one more; anchor 3: one more alone; anchor 4: one draft and one more; anchor 6
    assert committed_by_step(accepted) == [3, 1, 2, 1]
    assert committed_by_step([7] * 7) == [7]
    assert committed_by_step([0] * 7) == [1] * 7
    assert committed_by_step([]) == []
