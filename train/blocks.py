"""The one owner of a block's conventions: slots, positions, labels and who sees whom.

A block anchored at position a is [token a, mask x (K - 1)].  Slot k stands at position a + k, and slots
1..K-1 predict the token at their own position.  The target's state of token a is not known yet when the block
is drafted, so a block sees context strictly before a, and never another block (arXiv 2602.06036, section 4).
`visible` is elementwise over indices: the dense tiles of `train.tiles` call it on grids, and a block-sparse
kernel can call it on its index tensors.
"""

# L=tokens of a sequence  A=blocks  K=slots of a block  Q=query rows (A x K)  S=context rows

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from recipes.schema import LayerType

CONTEXT = -1
"""The `block` of a row that is context."""


@dataclass(frozen=True)
class Places:
    """Where rows stand: four int tensors of one shape (or plain ints, for a single row)."""

    document: torch.Tensor
    position: torch.Tensor
    """Of the row's token in its document."""
    block: torch.Tensor
    """The block's number in the batch, CONTEXT for a context row."""
    anchor: torch.Tensor
    """Position of the block's slot 0; without meaning for a context row."""

    def __getitem__(self, index: Any) -> "Places":
        return Places(self.document[index], self.position[index], self.block[index], self.anchor[index])


@dataclass(frozen=True)
class Blocks:
    """The blocks of one sequence, ascending by anchor."""

    anchors_A: torch.Tensor
    input_ids_AK: torch.Tensor
    labels_AK: torch.Tensor
    """Token a + k; 0 where it is not supervised."""
    supervised_AK: torch.Tensor
    """bool; from slot 1 to the first token that the loss mask leaves out, or the end: what comes after a gap
    is another answer's."""


def anchor_candidates(loss_mask_L: torch.Tensor) -> torch.Tensor:
    """Positions a whose token a + 1 is supervised, ascending. int64"""
    return loss_mask_L[1:].nonzero().flatten()


def draw_anchors(loss_mask_L: torch.Tensor, num_anchors: int, generator: torch.Generator) -> torch.Tensor:
    """Up to `num_anchors` of the candidates, ascending, each once. [A] int64"""
    candidates = anchor_candidates(loss_mask_L)
    chosen = torch.randperm(len(candidates), generator=generator)[:num_anchors]
    return candidates[chosen].sort().values


def make_blocks(
    token_ids_L: torch.Tensor,
    loss_mask_L: torch.Tensor,
    anchors_A: torch.Tensor,
    block_size: int,
    mask_token_id: int,
) -> Blocks:
    positions_AK = block_positions(anchors_A, block_size)
    inside_AK = positions_AK < len(token_ids_L)
    source_AK = positions_AK.clamp(max=len(token_ids_L) - 1)
    emitted_AK = inside_AK & loss_mask_L[source_AK]
    emitted_AK[:, 0] = True  # the anchor, whoever wrote it
    supervised_AK = emitted_AK.cumprod(1).bool()
    supervised_AK[:, 0] = False
    input_ids_AK = torch.full_like(positions_AK, mask_token_id)
    input_ids_AK[:, 0] = token_ids_L[anchors_A].long()
    labels_AK = torch.where(supervised_AK, token_ids_L[source_AK].long(), 0)
    return Blocks(anchors_A, input_ids_AK, labels_AK, supervised_AK)


def block_positions(anchors_A: torch.Tensor, block_size: int) -> torch.Tensor:
    """Slot k of a block anchored at a stands at a + k. [A, K]"""
    return anchors_A[:, None] + torch.arange(block_size)


def context_places(document: int, num_rows: int) -> Places:
    """The first `num_rows` positions of a document. [S]"""
    positions_S = torch.arange(num_rows)
    return Places(
        torch.full_like(positions_S, document),
        positions_S,
        torch.full_like(positions_S, CONTEXT),
        torch.full_like(positions_S, CONTEXT),
    )


def block_places(document: int, first_block: int, anchors_A: torch.Tensor, block_size: int) -> Places:
    """The slots of a document's blocks, which are numbered from `first_block`. [Q]"""
    positions_Q = block_positions(anchors_A, block_size).flatten()
    return Places(
        torch.full_like(positions_Q, document),
        positions_Q,
        torch.arange(first_block, first_block + len(anchors_A)).repeat_interleave(block_size),
        anchors_A.repeat_interleave(block_size),
    )


def join_places(parts: Sequence[Places]) -> Places:
    return Places(
        torch.cat([part.document for part in parts]),
        torch.cat([part.position for part in parts]),
        torch.cat([part.block for part in parts]),
        torch.cat([part.anchor for part in parts]),
    )


def visible(kind: LayerType, window: int, query: Places, key: Places) -> torch.Tensor:
    """Whether a block row sees a row of context or of a block; broadcasts. bool"""
    # full:     context of the same document with p < a, and every slot of the own block
    # sliding:  of those, the rows at positions p' with 0 <= (a + k) - p' < window
    in_context = (key.block == CONTEXT) & (key.document == query.document) & (key.position < query.anchor)
    seen = in_context | (key.block == query.block)
    if kind == "full_attention":
        return seen
    distance = query.position - key.position
    return seen & (distance >= 0) & (distance < window)


def visibility(kind: LayerType, window: int, context: Places, blocks: Places) -> torch.Tensor:
    """Which of [context, blocks] each block row sees. [Q, S + Q] bool"""
    query = blocks[:, None]
    to_context_QS = visible(kind, window, query, context[None, :])
    return torch.cat([to_context_QS, visible(kind, window, query, blocks[None, :])], dim=1)


def visibility_cell_by_cell(kind: LayerType, window: int, context: Places, blocks: Places) -> torch.Tensor:
    """The slow twin of `visibility`: the published rule, spelt out for one cell at a time."""
    num_rows, num_context = len(blocks.position), len(context.position)
    mask = torch.zeros(num_rows, num_context + num_rows, dtype=torch.bool)
    for row in range(num_rows):
        anchor, position = int(blocks.anchor[row]), int(blocks.position[row])
        slot = position - anchor
        for column in range(num_context):
            p = int(context.position[column])
            same_document = int(context.document[column]) == int(blocks.document[row])
            near = kind == "full_attention" or (anchor + slot) - p < window
            mask[row, column] = same_document and p < anchor and near
        for other in range(num_rows):
            other_slot = int(blocks.position[other]) - int(blocks.anchor[other])
            same_block = int(blocks.block[other]) == int(blocks.block[row])
            near = kind == "full_attention" or (other_slot <= slot and slot - other_slot < window)
            mask[row, num_context + other] = same_block and near
    return mask
