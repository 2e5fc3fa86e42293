"""What a drafter commits on text that a head never saw, with the head and without: decoding, simulated.

The drafter reads the text once; its blocks stay in host memory and are scored anew for each head.  Trees take
`pairwise.candidates` of a slot, where a server takes as many as they have nodes.
"""

# A=blocks  L=drafted slots  C=candidates of a slot

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from data.shards import Sequence as TextSequence
from data.shards import Shards
from serve.pairwise import PairwiseTables
from train.batches import pack
from train.pairwise import DraftedBlocks, fill_marginals, fill_tables
from train.pairwise_inputs import Split, decoding_anchors
from train.pairwise_learner import BLOCKS_AT_ONCE, FrozenDrafter, cut, join
from train.pairwise_manifest import Simulated
from train.tree_acceptance import NO_LABEL, accepted_by_chains, accepted_by_trees, committed_by_step

Piece = tuple[TextSequence, torch.Tensor]
"""Of a sequence: some of the anchors that decoding may draft at."""


@dataclass(frozen=True)
class HeldOut:
    drafted: DraftedBlocks
    """On the CPU, sequence after sequence."""
    blocks_by_sequence: list[int]
    device: torch.device
    """Where they are scored."""

    @property
    def num_blocks(self) -> int:
        return sum(self.blocks_by_sequence)

    def simulate(self, tables: PairwiseTables | None, budgets: Sequence[int]) -> Simulated:
        """None: the drafter's own scores.  Trees of each of `budgets` nodes."""
        accepted = [self._accept(blocks, tables, budgets) for blocks in cut(self.drafted)]
        chain, *trees = (self._committed(torch.cat(of_all)) for of_all in zip(*accepted, strict=True))
        return Simulated(chain=chain, trees=trees)

    def _accept(
        self, blocks: DraftedBlocks, tables: PairwiseTables | None, budgets: Sequence[int]
    ) -> list[torch.Tensor]:
        """Drafts accepted of each block by the chain, then by trees. [A] each"""
        blocks = move(blocks, self.device)
        scores_ALCC = fill_marginals(blocks) if tables is None else fill_tables(tables, blocks)
        drafts = scores_ALCC, blocks.tokens_ALC, blocks.labels_AL.where(blocks.known_AL, NO_LABEL)
        by_trees = [accepted_by_trees(*drafts, budget) for budget in budgets]
        return [accepted_A.cpu() for accepted_A in (accepted_by_chains(*drafts), *by_trees)]

    def _committed(self, accepted_A: torch.Tensor) -> float:
        """Tokens a step, over all sequences."""
        by_sequence = accepted_A.split(self.blocks_by_sequence)
        steps = [step for accepted in by_sequence for step in committed_by_step(accepted.tolist())]
        return sum(steps) / len(steps)


def move(blocks: DraftedBlocks, device: torch.device) -> DraftedBlocks:
    return blocks.map(lambda part: part.to(device))


def draft_held_out(frozen: FrozenDrafter, shards: Shards, split: Split) -> HeldOut:
    """Each held-out sequence at every token at which decoding might draft."""
    frozen = replace(frozen, temperature=None)
    drafted = []
    for group in _group(_pieces(shards, split.held_out)):
        sequences, anchors = zip(*group, strict=True)
        batch = pack(sequences, anchors, frozen.drafter.shape)
        drafted.append(move(frozen.draft(batch), torch.device("cpu")))
    return HeldOut(join(drafted), split.held_out_blocks.tolist(), frozen.device)


def _pieces(shards: Shards, numbers: Iterable[int]) -> Iterator[Piece]:
    for number in numbers:
        sequence = shards[int(number)]
        some_anchors = decoding_anchors(sequence.loss_mask).split(BLOCKS_AT_ONCE)
        yield from ((sequence, anchors_A) for anchors_A in some_anchors)


def _group(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Of at most BLOCKS_AT_ONCE anchors, in order."""
    group: list[Piece] = []
    size = 0
    for piece in pieces:
        if size + len(piece[1]) > BLOCKS_AT_ONCE:
            yield group
            group, size = [], 0
        group.append(piece)
        size += len(piece[1])
    yield group
