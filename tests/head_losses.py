"""Losses that a pairwise head may learn for: the product's, and those that `compare_head_training.py` tries.

A label exists after the recorded parent alone.  What is learnt after a wrong one is made up here, to see what
that costs; losses about trees take the recorded path for what is right.
"""

# A=blocks  L=drafted slots  C=candidates of a slot  T=slots of all blocks  V=vocabulary  D=hidden

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from recipes.schema import Pairwise
from serve.tree_batch import grow_trees
from train.objective import slot_weights
from train.pairwise import (
    DraftedBlocks,
    Labelled,
    PairwiseHead,
    divergence_sum,
    fill_tables,
    label_among_candidates,
    label_in_vocabulary,
    loss_sum,
    score,
)

_KEPT_NODES = 31
"""Of the trees that losses about trees grow."""


@dataclass(frozen=True)
class Lesson:
    head: PairwiseHead
    blocks: DraftedBlocks
    settings: Pairwise
    head_VD: torch.Tensor

    @property
    def weights(self) -> torch.Tensor:
        """Of the known slots, by depth. [A, L]"""
        return slot_weights(self.blocks.known_by_slot, self.settings.objective.decay)[:, 1:]

    def labelled(self) -> Labelled:
        return label_among_candidates(self.head, self.blocks)


Loss = Callable[[Lesson], torch.Tensor]
"""Summed over blocks."""


def learn_labels(lesson: Lesson) -> torch.Tensor:
    return loss_sum(lesson.blocks, lesson.labelled(), lesson.settings.objective)


def learn_target(lesson: Lesson) -> torch.Tensor:
    return divergence_sum(lesson.head, lesson.blocks, lesson.settings.objective)


def learn_over_vocabulary(lesson: Lesson) -> torch.Tensor:
    labelled = label_in_vocabulary(lesson.head, lesson.blocks, lesson.head_VD)
    return loss_sum(lesson.blocks, labelled, lesson.settings.objective)


def learn_after_right_draws(lesson: Lesson) -> torch.Tensor:
    """Slots alone whose parent, drawn from the drafter's own candidates, is the recorded one."""
    drawn_AL, recorded_AL = draw_parents(lesson.blocks), lesson.blocks.recorded_parents
    weights_AL = lesson.weights * (drawn_AL == recorded_AL)
    return -(weights_AL * lesson.labelled().log_probs_AL).sum()


def learn_after_any_draw(lesson: Lesson) -> torch.Tensor:
    """Unsound: after a drawn parent that is wrong the recorded next token is nobody's."""
    log_probs_AL = label_after(lesson, draw_parents(lesson.blocks))
    return -(lesson.weights * log_probs_AL).sum()


def rule_out_after_wrong_draws(lesson: Lesson) -> torch.Tensor:
    """After drawn parents that are wrong no candidate is right, at a tenth of the weight."""
    drawn_AL, blocks = draw_parents(lesson.blocks), lesson.blocks
    rest_AL = score(lesson.head.make_tables(), blocks, drawn_AL[:, :, None]).rest_BLP[:, :, 0]
    wrong_AL = drawn_AL != blocks.recorded_parents
    return -0.1 * (lesson.weights * wrong_AL * rest_AL).sum()


def draw_parents(blocks: DraftedBlocks) -> torch.Tensor:
    """From the drafter's candidates of the slot before; slot 1's is the committed token. [A, L]"""
    probs_TC = blocks.log_probs_ALC[:, :-1].exp().flatten(0, 1)
    places_AL1 = torch.multinomial(probs_TC, 1).view(*blocks.labels_AL[:, 1:].shape, 1)
    drawn = blocks.tokens_ALC[:, :-1].gather(-1, places_AL1)[..., 0]
    return torch.cat([blocks.anchors_A[:, None], drawn], dim=1)


def label_after(lesson: Lesson, parents_AL: torch.Tensor) -> torch.Tensor:
    """How likely the recorded tokens are after other parents than the recorded ones. [A, L]"""
    blocks = lesson.blocks
    scores = score(lesson.head.make_tables(), blocks, parents_AL[:, :, None])
    hit_ALC = blocks.tokens_ALC == blocks.labels_AL[:, :, None]
    place_AL1 = hit_ALC.long().argmax(-1, keepdim=True)
    of_label_AL = scores.candidates_BLPC[:, :, 0].gather(-1, place_AL1)[..., 0]
    return of_label_AL.where(hit_ALC.any(-1), scores.rest_BLP[:, :, 0])


def keep_right_nodes(lesson: Lesson) -> torch.Tensor:
    """Minus the probability of each right node that a tree of the scores keeps."""
    path_AL, last_A1 = right_path(lesson)
    return -(path_AL.exp() * (path_AL.detach() >= last_A1)).sum()


def raise_right_nodes(lesson: Lesson) -> torch.Tensor:
    """Minus a sigmoid of each right node's score over that of the tree's last, half a nat wide."""
    path_AL, last_A1 = right_path(lesson)
    return -torch.sigmoid((path_AL - last_A1) / 0.5).sum()


def right_path(lesson: Lesson) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores of the recorded path [A, L], -inf where no tree holds it; and of trees' last nodes [A, 1]."""
    labelled, tables = lesson.labelled(), lesson.head.make_tables()
    held_AL = (labelled.is_candidate_AL & lesson.blocks.known_AL).long().cumprod(1).bool()
    with torch.no_grad():
        last_A = grow_trees(fill_tables(tables, lesson.blocks), _KEPT_NODES).scores_BN[:, -1]
    path_AL = labelled.log_probs_AL.cumsum(1).masked_fill(~held_AL, -torch.inf)
    return path_AL, last_A[:, None]


def both(first: Loss, second: Loss) -> Loss:
    return lambda lesson: first(lesson) + second(lesson)


LOSSES: Mapping[str, Loss] = {
    "cross_entropy": learn_labels,
    "d_pace": learn_labels,
    "kl": learn_target,
    "vocabulary": learn_over_vocabulary,
    "right_draws": learn_after_right_draws,
    "any_draws": learn_after_any_draw,
    "wrong_draws": both(learn_labels, rule_out_after_wrong_draws),
    "kl_wrong_draws": both(learn_target, rule_out_after_wrong_draws),
    "kept": keep_right_nodes,
    "raised": raise_right_nodes,
    "kept_too": both(learn_labels, keep_right_nodes),
    "raised_too": both(learn_labels, raise_right_nodes),
}
