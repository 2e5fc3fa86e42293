"""How likely each node of a draft tree is to be accepted, corrected by what was accepted before.

A drafter's scores say which nodes to take first, not how often they are right: a block's slots are scored
apart, so the deeper a path, the more it promises.  Nodes are sorted into buckets by score, and each bucket's
scores are multiplied by what its nodes came to (accepted / promised).  Sums are integers: any order of adding
gives the same, so that all ranks of an engine decide alike.
"""

# B=requests  L=slots  N=nodes, padded  K=buckets

from dataclasses import dataclass

import torch
from torch.nn import functional as F

NUM_BUCKETS = 24
_WIDTH = 0.25
"""Of a bucket, in nats; the last has all scores below."""
_ONE = 1 << 20
"""A probability of 1, as it is summed."""
_PRIOR_NODES = 32
"""Of each bucket, that count as having come to what they promised."""
_MOST_NODES = 4096
"""Of each bucket: once so many came, all that is known weighs half."""


@dataclass(frozen=True)
class Calibration:
    """In units of 1 / 2^20 nodes, int64; the first two are written in place."""

    promised_K: torch.Tensor
    accepted_K: torch.Tensor
    most_K: torch.Tensor
    """About as much of a bucket is remembered."""

    @classmethod
    def begin(cls, device: torch.device) -> "Calibration":
        """Scores are what they say."""
        centres_K = -_WIDTH * (torch.arange(NUM_BUCKETS, device=device) + 0.5)
        of_node_K = centres_K.exp() * _ONE
        promised_K = (_PRIOR_NODES * of_node_K).long()
        return cls(promised_K, promised_K.clone(), (_MOST_NODES * of_node_K).long())

    def restart(self) -> None:
        """In place, since graphs hold the addresses."""
        fresh = self.begin(self.promised_K.device)
        self.promised_K.copy_(fresh.promised_K)
        self.accepted_K.copy_(fresh.accepted_K)

    def correct(self, scores_BN: torch.Tensor) -> torch.Tensor:
        """Probabilities that nodes with these scores (log-probabilities of their paths) are accepted. fp32

        A node is no likelier than the one before it, without which no prefix has it; -inf has probability 0.
        """
        ratio_K = (self.accepted_K / self.promised_K).float()
        likely_BN = scores_BN.exp() * ratio_K[_buckets_of(scores_BN)]
        return likely_BN.clamp(max=1).cummin(1).values

    def observe(self, scores_BN: torch.Tensor, num_nodes_B: torch.Tensor, path_BL: torch.Tensor) -> None:
        """What became of a request's first num_nodes_B nodes: those on path_BL were taken.

        path_BL: as `serve.tree_batch.WalkBatch`.
        """
        numbers_N = torch.arange(scores_BN.shape[1], device=scores_BN.device)
        promised_BN = (scores_BN.exp().where(numbers_N < num_nodes_B[:, None], 0) * _ONE).long()
        is_taken_BN = (path_BL[:, :, None] == numbers_N).any(1) & (promised_BN > 0)
        buckets_T = _buckets_of(scores_BN).flatten()
        self.promised_K.index_add_(0, buckets_T, promised_BN.flatten())
        self.accepted_K.index_add_(0, buckets_T, is_taken_BN.flatten().long() * _ONE)
        halvings_K = (self.promised_K > self.most_K).long()
        for sums_K in (self.promised_K, self.accepted_K):
            sums_K.bitwise_right_shift_(halvings_K)


def _buckets_of(scores_BN: torch.Tensor) -> torch.Tensor:
    return (scores_BN / -_WIDTH).clamp(0, NUM_BUCKETS - 1).long()


class NodeConfidence:
    """Of the trees that wait in every request slot for their verification."""

    def __init__(self, num_slots: int, num_nodes: int, device: torch.device) -> None:
        # one more: slot -1, a graph's padding
        self._scores_SN = torch.full((num_slots + 1, num_nodes), -torch.inf, device=device)
        self.calibration = Calibration.begin(device)

    def forget(self, slot: int) -> None:
        """A new request took this slot: nothing is planted there."""
        self._scores_SN[slot] = -torch.inf

    def plant(self, slots_B: torch.Tensor, scores_BN: torch.Tensor) -> torch.Tensor:
        """Keeps the scores of trees just planted; `steps_of` their nodes' probabilities. [B, N]"""
        self._scores_SN[slots_B] = scores_BN
        return steps_of(self.calibration.correct(scores_BN))

    def observe(self, slots_B: torch.Tensor, num_nodes_B: torch.Tensor, path_BL: torch.Tensor) -> None:
        """What became of the trees planted there, before others are."""
        self.calibration.observe(self._scores_SN[slots_B], num_nodes_B, path_BL)


def steps_of(likely_BN: torch.Tensor) -> torch.Tensor:
    """Each probability over the one before it, 1 before the first: what vLLM's budgets multiply up again."""
    before_BN = F.pad(likely_BN[:, :-1], (1, 0), value=1.0)
    return (likely_BN / before_BN).where(before_BN > 0, 0)


def score_chains(scores_BLCC: torch.Tensor, chain_BL: torch.Tensor, num_nodes: int) -> torch.Tensor:
    """Of the chain's nodes, the log-probabilities of their paths, -inf past its end. [B, num_nodes]

    scores_BLCC: as `serve.tree.grow_tree` takes them; chain_BL: the candidate at each slot.
    """
    batch, num_slots, _, num_candidates = scores_BLCC.shape
    parents_BL = F.pad(chain_BL[:, :-1], (1, 0))
    of_parent = parents_BL[:, :, None, None].expand(batch, num_slots, 1, num_candidates)
    own_BL1 = scores_BLCC.gather(2, of_parent)[:, :, 0].gather(2, chain_BL[:, :, None])
    return F.pad(own_BL1[:, :, 0].cumsum(1), (0, num_nodes - num_slots), value=-torch.inf)
