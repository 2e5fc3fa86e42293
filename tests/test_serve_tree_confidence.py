"""How likely nodes are said to be, against loops; and what a calibration learns."""

import math
from collections import Counter

import pytest
import torch

from serve.tree import ROOT
from serve.tree_confidence import NUM_BUCKETS, Calibration, NodeConfidence, score_chains, steps_of

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIZES = [(1, 1, 1), (3, 7, 2), (5, 15, 7), (2, 63, 15)]  # requests, nodes, slots


def draw_scores(seed: int, batch: int, num_nodes: int) -> torch.Tensor:
    """Descending; some trees end early."""
    generator = torch.Generator().manual_seed(seed)
    scores_BN = -torch.rand(batch, num_nodes, generator=generator).mul(1.2).cumsum(1)
    counts_B = torch.randint(0, num_nodes + 1, (batch, 1), generator=generator)
    return scores_BN.where(torch.arange(num_nodes) < counts_B, -torch.inf).to(DEVICE)


def draw_paths(seed: int, batch: int, num_nodes: int, num_slots: int) -> tuple[torch.Tensor, torch.Tensor]:
    """How many nodes were verified of each request, and which of them were taken."""
    generator = torch.Generator().manual_seed(seed)
    counts_B = torch.randint(0, num_nodes + 1, (batch,), generator=generator)
    path_BL = torch.full((batch, num_slots), ROOT)
    for request, count in enumerate(counts_B.tolist()):
        length = int(torch.randint(0, min(count, num_slots) + 1, (1,), generator=generator))
        path_BL[request, :length] = torch.randperm(count, generator=generator)[:length].sort().values
    return counts_B.to(DEVICE), path_BL.to(DEVICE)


def bucket_of(score: float) -> int:
    return min(int(score / -0.25), NUM_BUCKETS - 1)


def observe_in_loops(
    scores_BN: torch.Tensor, counts_B: torch.Tensor, path_BL: torch.Tensor
) -> tuple[Counter[int], Counter[int]]:
    """What was promised and taken by bucket, in units of 1 / 2^20."""
    promised, taken = Counter[int](), Counter[int]()
    for scores, count, path in zip(scores_BN, counts_B.tolist(), path_BL.tolist(), strict=True):
        for node, score in enumerate(scores[:count].tolist()):
            units = int(float(torch.tensor(score).exp()) * 2**20)
            if units:
                promised[bucket_of(score)] += units
                taken[bucket_of(score)] += (node in path) << 20
    return promised, taken


@pytest.mark.parametrize(("batch", "num_nodes", "num_slots"), SIZES)
def test_a_step_is_added_up_as_loops_do_it(batch, num_nodes, num_slots):
    scores_BN = draw_scores(batch, batch, num_nodes)
    counts_B, path_BL = draw_paths(batch, batch, num_nodes, num_slots)
    calibration, before = Calibration.begin(DEVICE), Calibration.begin(DEVICE)
    calibration.observe(scores_BN, counts_B, path_BL)
    promised, taken = observe_in_loops(scores_BN, counts_B, path_BL)
    found_promised = (calibration.promised_K - before.promised_K).tolist()
    assert found_promised == pytest.approx([promised[k] for k in range(NUM_BUCKETS)], abs=num_nodes * batch)
    assert (calibration.accepted_K - before.accepted_K).tolist() == [taken[k] for k in range(NUM_BUCKETS)]


def test_at_first_scores_are_what_they_say():
    scores_BN = draw_scores(7, 4, 15)
    torch.testing.assert_close(Calibration.begin(DEVICE).correct(scores_BN), scores_BN.exp())


def test_no_node_is_likelier_than_the_one_before_it_or_than_certain():
    calibration = Calibration.begin(DEVICE)
    calibration.accepted_K.copy_((torch.rand(NUM_BUCKETS) * 3 * calibration.promised_K.cpu()).long())
    likely_BN = calibration.correct(draw_scores(3, 9, 31))
    assert (likely_BN.diff(dim=1) <= 0).all()
    assert likely_BN.max() <= 1
    assert likely_BN.min() == 0


def test_promises_that_are_kept_half_the_time_are_halved():
    calibration, generator = Calibration.begin(DEVICE), torch.Generator().manual_seed(0)
    scores_BN = torch.full((64, 1), math.log(0.6), device=DEVICE)
    counts_B = torch.ones(64, dtype=torch.int64, device=DEVICE)
    for _ in range(100):
        taken_B1 = torch.rand(64, 1, generator=generator) < 0.3
        calibration.observe(scores_BN, counts_B, torch.where(taken_B1, 0, ROOT).to(DEVICE))
    assert float(calibration.correct(scores_BN)[0, 0]) == pytest.approx(0.3, abs=0.02)


def test_what_is_long_past_is_forgotten():
    calibration = Calibration.begin(DEVICE)
    scores_BN = torch.full((512, 1), math.log(0.9), device=DEVICE)
    counts_B = torch.ones(512, dtype=torch.int64, device=DEVICE)
    for is_taken in [True] * 100 + [False] * 100:
        path_BL = torch.full((512, 1), 0 if is_taken else ROOT, device=DEVICE)
        calibration.observe(scores_BN, counts_B, path_BL)
    assert float(calibration.correct(scores_BN)[0, 0]) < 0.01


def test_another_drafter_begins_anew_where_graphs_read():
    calibration, fresh = Calibration.begin(DEVICE), Calibration.begin(DEVICE)
    places = [part.data_ptr() for part in vars(calibration).values()]
    calibration.observe(draw_scores(5, 8, 15), *draw_paths(5, 8, 15, 7))
    assert not torch.equal(calibration.promised_K, fresh.promised_K)
    calibration.restart()
    assert torch.equal(calibration.promised_K, fresh.promised_K)
    assert torch.equal(calibration.accepted_K, fresh.accepted_K)
    assert [part.data_ptr() for part in vars(calibration).values()] == places


def test_the_order_of_adding_changes_nothing():
    """Or the ranks of an engine would choose differently."""
    scores_BN = draw_scores(11, 40, 31)
    counts_B, path_BL = draw_paths(11, 40, 31, 7)
    order = torch.randperm(40)
    one, other = Calibration.begin(DEVICE), Calibration.begin(DEVICE)
    one.observe(scores_BN, counts_B, path_BL)
    other.observe(scores_BN[order], counts_B[order], path_BL[order])
    assert torch.equal(one.promised_K, other.promised_K)
    assert torch.equal(one.accepted_K, other.accepted_K)


@pytest.mark.parametrize(("batch", "num_nodes", "num_slots"), SIZES)
def test_steps_multiply_up_to_the_probabilities(batch, num_nodes, num_slots):
    likely_BN = draw_scores(batch + num_slots, batch, num_nodes).exp()
    steps_BN = steps_of(likely_BN)
    assert steps_BN.isfinite().all()
    torch.testing.assert_close(steps_BN.cumprod(1), likely_BN)


@pytest.mark.parametrize("num_slots", [1, 2, 7])
def test_a_chains_nodes_have_the_scores_of_their_paths(num_slots):
    generator = torch.Generator().manual_seed(num_slots)
    scores_BLCC = -torch.rand(3, num_slots, 4, 4, generator=generator)
    chain_BL = torch.randint(0, 4, (3, num_slots), generator=generator)
    found_BN = score_chains(scores_BLCC.to(DEVICE), chain_BL.to(DEVICE), num_slots + 2).cpu()
    for request in range(3):
        score, parent = 0.0, 0
        for slot, candidate in enumerate(chain_BL[request].tolist()):
            score += float(scores_BLCC[request, slot, parent, candidate])
            parent = candidate
            assert float(found_BN[request, slot]) == pytest.approx(score, abs=1e-5)
    assert (found_BN[:, num_slots:] == -torch.inf).all()


def test_a_new_request_in_a_slot_shows_nothing_of_the_last_ones_tree():
    confidence, before = NodeConfidence(4, 3, DEVICE), Calibration.begin(DEVICE)
    slots_B = torch.tensor([2, 0], device=DEVICE)
    confidence.plant(slots_B, draw_scores(1, 2, 3).clamp(min=-1))
    confidence.forget(2)
    counts_B, path_BL = torch.tensor([3, 0], device=DEVICE), torch.full((2, 2), ROOT, device=DEVICE)
    confidence.observe(slots_B, counts_B, path_BL)
    assert torch.equal(confidence.calibration.promised_K, before.promised_K)


def test_a_graphs_padding_is_planted_nowhere():
    confidence = NodeConfidence(3, 2, DEVICE)
    confidence.plant(torch.tensor([1, -1], device=DEVICE), torch.zeros(2, 2, device=DEVICE))
    assert torch.equal(
        confidence._scores_SN[:3].isfinite().all(1), torch.tensor([False, True, False]).to(DEVICE)
    )
