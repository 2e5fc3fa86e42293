"""A pairwise head that learns beside the drafter: in the same steps, from some of the blocks of each.

It reads the drafter's states and pushes them nowhere, so the drafter learns what it would without.  DeepSpeed
does not know of it: every rank has the whole head, in fp32, and takes the same step on a gradient that is
summed over the ranks.  Called by `train.step`; `train.pairwise_training` trains one for a finished drafter.
"""

# A=blocks  K=slots of a block  Q=block rows (A x K)  L=drafted slots (K - 1)  D=hidden

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from recipes.errors import UserError
from recipes.load import resolve_model
from recipes.schema import PairwiseCompanion, Recipe
from serve.checkpoint import load_target_config
from serve.drafter_config import pairwise_tensors
from serve.pairwise import PairwiseTables
from train.batches import Batch
from train.feed import MicroBatch, visit_generator
from train.objective import Objective
from train.pairwise import DraftedBlocks, add_target, fill_marginals, fill_tables, gather_blocks
from train.pairwise_inputs import check_candidates
from train.pairwise_learner import HeadLearner, backward, begin_head, cut, join, tables_to_serve
from train.ranks import Ranks
from train.target_parts import TargetParts
from train.tree_acceptance import NO_LABEL, accepted_by_chains, accepted_by_trees

WAYS = ("chain", "tree", "chain_without", "tree_without")
"""Of drafting, with the head and without."""
_DRAW_STREAM = 2**31  # the same seed may draw the anchors of a visit
_STATE_BYTES = 12  # of a parameter: itself and two moments


@dataclass(frozen=True)
class KeptBlocks:
    """Those of a batch that the head learns from, slot 0 included, on the device."""

    hidden_AKD: torch.Tensor
    """After the drafter's final norm, without its graph."""
    input_ids_AK: torch.Tensor
    labels_AK: torch.Tensor
    supervised_AK: torch.Tensor
    final_AKD: torch.Tensor | None
    """What the target's head reads there (`train.objective.final_states`); None where batches have none."""


def keep_blocks(batch: Batch, hidden_QD: torch.Tensor, chosen_A: torch.Tensor) -> KeptBlocks:
    """Copies, so that the rest can go."""
    shape_AK, final_QD = batch.labels_AK.shape, batch.final_QD
    chosen_A = chosen_A.to(hidden_QD.device)
    return KeptBlocks(
        hidden_QD.detach().view(*shape_AK, -1)[chosen_A],
        batch.input_ids_Q.view(shape_AK)[chosen_A],
        batch.labels_AK[chosen_A],
        batch.supervised_AK[chosen_A],
        None if final_QD is None else final_QD.view(*shape_AK, -1)[chosen_A],
    )


@dataclass(frozen=True)
class Taught:
    """Sums over the blocks of one step or several, over all ranks."""

    loss_sum: float
    """Weight x nats."""
    weight_sum: float
    num_blocks: int
    accepted: Mapping[str, float]
    """Drafts, for each of `WAYS`, with the head as it was before the step."""
    gradient_norm: float
    """Of the last step, before clipping."""

    @property
    def loss(self) -> float:
        return self.loss_sum / self.weight_sum

    @property
    def acceptance(self) -> dict[str, float]:
        """Tokens a step, the target's own included, for each of `WAYS`."""
        return {way: 1 + accepted / self.num_blocks for way, accepted in self.accepted.items()}

    def then(self, later: "Taught") -> "Taught":
        return Taught(
            self.loss_sum + later.loss_sum,
            self.weight_sum + later.weight_sum,
            self.num_blocks + later.num_blocks,
            {way: self.accepted[way] + later.accepted[way] for way in WAYS},
            later.gradient_norm,
        )


@dataclass(frozen=True)
class Companion:
    """The head with its optimizer, and the target's frozen parts, whose head ranks its candidates."""

    learner: HeadLearner
    parts: TargetParts
    settings: PairwiseCompanion
    budget: int
    """Nodes of the trees that are simulated."""
    ranks: Ranks

    def choose(self, micro: MicroBatch) -> torch.Tensor:
        """Some of each sequence's blocks, drawn by lot: seed, visit and their number alone decide. [A]"""
        chosen = []
        for visit, blocks in zip(micro.visits, _blocks_by_document(micro.batch), strict=True):
            generator = visit_generator(self.settings.seed + _DRAW_STREAM, visit)
            drawn = torch.randperm(len(blocks), generator=generator)[: self.settings.num_anchors]
            chosen.append(blocks.start + drawn.sort().values)
        return torch.cat(chosen)

    def choose_first(self, batch: Batch) -> torch.Tensor:
        """As many, for a batch that nobody visits. [A]"""
        most = self.settings.num_anchors
        return torch.cat([torch.tensor(blocks[:most]) for blocks in _blocks_by_document(batch)])

    def find_gradient(self, kept: Sequence[KeptBlocks]) -> Taught:
        """Of the mean loss over all blocks of the step, all ranks'; the weights stay as they are.

        Raises UserError where it is not finite.
        """
        drafted = join([self._rank(blocks) for blocks in kept])
        weight = self.ranks.sum(Objective(self.settings.objective).normaliser(drafted.known_by_slot))
        loss, norm = self._descend(drafted, weight.to(drafted.hidden_ALD.device))
        if not math.isfinite(loss + norm):
            raise UserError(
                "the loss of the pairwise head or its gradient is not finite, the drafter's loss is: the head"
                " diverged; lower train.pairwise.optimizer.learning_rate and go on from the last checkpoint"
            )
        num_blocks, *accepted = self.ranks.sum(self._simulate(drafted)).tolist()
        by_way = dict(zip(WAYS, accepted, strict=True))
        return Taught(loss * float(weight), float(weight), int(num_blocks), by_way, norm)

    def take_step(self, learning_rate: float) -> None:
        """On the gradient that was found."""
        self.learner.take_step(learning_rate)

    def _rank(self, kept: KeptBlocks) -> DraftedBlocks:
        head_VD, temperature = self.parts.head_VD, self.settings.learnt_temperature
        blocks = gather_blocks(
            kept.hidden_AKD,
            kept.input_ids_AK,
            kept.labels_AK,
            kept.supervised_AK,
            head_VD,
            self.settings.candidates,
        )
        if temperature is None:
            return blocks
        assert kept.final_AKD is not None, "the batches have no final states"
        return add_target(blocks, kept.final_AKD[:, 1:], head_VD, temperature)

    def _descend(self, drafted: DraftedBlocks, weight: torch.Tensor) -> tuple[float, float]:
        """Leaves the clipped gradient with the parameters.  The loss, and the gradient's norm before."""
        head = self.learner.head
        self.learner.optimizer.zero_grad()
        own_loss = backward(head, [drafted], self.settings.objective, weight=weight)
        slopes = [parameter.grad for parameter in head.parameters()]
        parts = [own_loss[None], *(slope.flatten().double() for slope in slopes)]
        loss, *sums = self.ranks.sum(torch.cat(parts)).split([len(part) for part in parts])
        for slope, total in zip(slopes, sums, strict=True):
            slope.copy_(total.view_as(slope))
        return float(loss), float(self.learner.clip())

    @torch.no_grad()
    def _simulate(self, drafted: DraftedBlocks) -> torch.Tensor:
        """This rank's blocks, and the drafts of them that are accepted, for each of `WAYS`. [5] fp64"""
        tables = self.learner.head.make_tables()
        num_blocks = drafted.anchors_A.new_tensor([len(drafted.anchors_A)])
        by_chunk = [self._accept(blocks, tables) for blocks in cut(drafted)]
        return torch.cat([num_blocks, torch.stack(by_chunk).sum(0)]).double()

    def _accept(self, blocks: DraftedBlocks, tables: PairwiseTables) -> torch.Tensor:
        labels_AL = blocks.labels_AL.where(blocks.known_AL, NO_LABEL)
        accepted = []
        for scores_ALCC in (fill_tables(tables, blocks), fill_marginals(blocks)):
            drafts = scores_ALCC, blocks.tokens_ALC, labels_AL
            accepted += [accepted_by_chains(*drafts), accepted_by_trees(*drafts, self.budget)]
        return torch.stack(accepted).sum(1)

    def make_tables(self) -> PairwiseTables:
        """To publish."""
        return tables_to_serve(self.learner.head)

    @property
    def pair_bytes(self) -> int:
        """On the disk: the published tables, and the state."""
        head = self.learner.head
        vocab_size, hidden_size = self.parts.head_VD.shape
        published = pairwise_tensors(vocab_size, hidden_size, self.settings.rank).values()
        parameters = sum(parameter.numel() for parameter in head.parameters())
        return 2 * sum(map(math.prod, published)) + _STATE_BYTES * parameters

    def save(self, path: Path) -> None:
        """The state, with nothing drawn in it: what is drawn follows from the step."""
        learner = self.learner
        torch.save({"head": learner.head.state_dict(), "optimizer": learner.optimizer.state_dict()}, path)

    def load(self, path: Path) -> None:
        """Of a head with the same settings."""
        content = torch.load(path, map_location="cpu", weights_only=True)
        self.learner.head.load_state_dict(content["head"])
        self.learner.optimizer.load_state_dict(content["optimizer"])


def begin_companion(recipe: Recipe, parts: TargetParts, ranks: Ranks) -> Companion | None:
    """Untrained, on the parts' device; None where the recipe wants none.  Other draws stay as they were."""
    settings = recipe.train.pairwise
    if settings is None:
        return None
    with torch.random.fork_rng(devices=[ranks.device] if ranks.is_on_gpu else []):
        learner = begin_head(parts, settings)
    return Companion(learner, parts, settings, recipe.rounds.budget, ranks)


def check_companion(recipe: Recipe) -> None:
    """Raises UserError for a head that does not fit the target."""
    if recipe.train.pairwise is not None:
        target = load_target_config(resolve_model(recipe.target.model), recipe.target.revision)
        check_candidates("train.pairwise", recipe.train.pairwise, target)


def _blocks_by_document(batch: Batch) -> Iterator[range]:
    """Numbers of the blocks of each packed sequence."""
    size = batch.labels_AK.shape[1]
    for document in batch.documents:
        yield range(document.blocks.start // size, document.blocks.stop // size)
