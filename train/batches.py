"""Packs sequences and their blocks into one batch without padding: documents lie end to end.

Tensors only: which sequences and anchors a batch holds is `train.feed`'s business.  Packing takes time and
memory by rows and blocks, never by their product: masks are for a CPU alone, which makes them at its step.
"""

# L=tokens of a sequence  S=context rows  E=taps x hidden  A=blocks  K=slots of a block  Q=block rows (A x K)

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from data.shards import Sequence
from recipes.schema import Drafter, LayerType
from train.attention import View
from train.blocks import Blocks, Places, block_places, context_places, join_places, make_blocks
from train.head import Rows, find_rows
from train.layout import Layout, lay_out
from train.objective import final_states
from train.tiles import Document, Tiling, cut_tiles

Move = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Batch:
    taps_SE: torch.Tensor
    """The target's tapped states of each document's tokens, up to before its last anchor."""
    context_positions_S: torch.Tensor
    block_positions_Q: torch.Tensor
    input_ids_Q: torch.Tensor
    labels_AK: torch.Tensor
    supervised_AK: torch.Tensor
    rows: Rows
    """The supervised ones of the block rows, without final states."""
    context: Places
    """Of the context rows, on the host as `blocks`."""
    blocks: Places
    """Of the block rows."""
    documents: list[Document]
    layouts: dict[LayerType, Layout]
    num_tokens: int
    """Tokens of the packed sequences, all of them."""
    final_QD: torch.Tensor | None = None
    """`train.objective.final_states` of each document; None where the sequences have none."""

    @cached_property
    def views(self) -> Mapping[LayerType, View]:
        """What `train.attention` takes on the batch's device."""
        return self.layouts if self.taps_SE.is_cuda else self.cut_tiles()

    def cut_tiles(self) -> dict[LayerType, Tiling]:
        """Masks of all that a CPU looks at, made anew."""
        return {
            kind: cut_tiles(kind, layout.window, self.context, self.blocks, self.documents, layout.block_size)
            for kind, layout in self.layouts.items()
        }

    def to(self, device: torch.device, dtype: torch.dtype) -> "Batch":
        """On `device`, the states in `dtype`; from pinned memory without waiting for it."""
        return self.map(
            lambda part: part.to(device, non_blocking=True),
            lambda states: states.to(device, dtype, non_blocking=True),
        )

    def pin(self) -> "Batch":
        """In pinned memory, all but the states, which are packed there."""
        return self.map(torch.Tensor.pin_memory, lambda states: states)

    def map(self, move: Move, move_states: Move) -> "Batch":
        """With all that a device reads moved."""
        supervised_AK = move(self.supervised_AK)
        return replace(
            self,
            taps_SE=move_states(self.taps_SE),
            final_QD=None if self.final_QD is None else move_states(self.final_QD),
            context_positions_S=move(self.context_positions_S),
            block_positions_Q=move(self.block_positions_Q),
            input_ids_Q=move(self.input_ids_Q),
            labels_AK=move(self.labels_AK),
            supervised_AK=supervised_AK,
            rows=replace(
                self.rows,
                supervised_AK=supervised_AK,
                places_R=move(self.rows.places_R),
                labels_R=move(self.rows.labels_R),
            ),
            layouts={kind: layout.map(move) for kind, layout in self.layouts.items()},
        )


def pack(
    sequences: Many[Sequence], anchors: Many[torch.Tensor], drafter: Drafter, *, pins: bool = False
) -> Batch:
    """One batch of `sequences`, each with its anchors (ascending, at least one).

    pins: all of it lies in pinned memory, from which a copy to a GPU does not wait.
    """
    blocks = [
        make_blocks(
            sequence.token_ids, sequence.loss_mask, anchors_A, drafter.block_size, drafter.mask_token_id
        )
        for sequence, anchors_A in zip(sequences, anchors, strict=True)
    ]
    context_rows = [int(anchors_A[-1]) for anchors_A in anchors]
    context, places, documents = _place(context_rows, blocks, drafter.block_size)
    labels_AK = torch.cat([b.labels_AK for b in blocks])
    supervised_AK = torch.cat([b.supervised_AK for b in blocks])
    batch = Batch(
        taps_SE=_join([s.hidden[:rows] for s, rows in zip(sequences, context_rows, strict=True)], pins),
        context_positions_S=context.position,
        block_positions_Q=places.position,
        input_ids_Q=torch.cat([b.input_ids_AK for b in blocks]).flatten(),
        labels_AK=labels_AK,
        supervised_AK=supervised_AK,
        rows=find_rows(labels_AK, supervised_AK),
        context=context,
        blocks=places,
        documents=documents,
        layouts={
            kind: lay_out(kind, drafter.sliding_window, places, documents, drafter.block_size)
            for kind in set(drafter.layer_types)
        },
        num_tokens=sum(len(sequence.token_ids) for sequence in sequences),
        final_QD=_pack_final(sequences, anchors, drafter.block_size, pins),
    )
    return batch.pin() if pins else batch


def _join(parts: Many[torch.Tensor], pins: bool) -> torch.Tensor:
    """Copied once, to where they are wanted."""
    shape = sum(map(len, parts)), *parts[0].shape[1:]
    return torch.cat(list(parts), out=torch.empty(shape, dtype=parts[0].dtype, pin_memory=pins))


def _pack_final(
    sequences: Many[Sequence],
    anchors: Many[torch.Tensor],
    block_size: int,
    pins: bool,
) -> torch.Tensor | None:
    parts = [
        final_states(sequence.final, anchors_A, block_size)
        for sequence, anchors_A in zip(sequences, anchors, strict=True)
        if sequence.final is not None
    ]
    return _join(parts, pins) if parts else None


def _place(
    context_rows: Many[int], blocks: Many[Blocks], block_size: int
) -> tuple[Places, Places, list[Document]]:
    contexts, places, documents = [], [], []
    first_row = first_block = 0
    for number, (rows, block) in enumerate(zip(context_rows, blocks, strict=True)):
        last_block = first_block + len(block.anchors_A)
        contexts.append(context_places(number, rows))
        places.append(block_places(number, first_block, block.anchors_A, block_size))
        documents.append(
            Document(
                slice(first_row, first_row + rows), slice(first_block * block_size, last_block * block_size)
            )
        )
        first_row, first_block = first_row + rows, last_block
    return join_places(contexts), join_places(places), documents


def worst_case_batch(
    num_sequences: int,
    num_tokens: int,
    num_anchors: int,
    drafter: Drafter,
    hidden_size: int,
    *,
    with_final: bool = False,
) -> Batch:
    """The largest batch of a recipe: `num_sequences` of `num_tokens`, all supervised, the anchors as late as
    can be; the states are zero."""
    sequence = Sequence(
        token_ids=torch.zeros(num_tokens, dtype=torch.int32),
        loss_mask=torch.ones(num_tokens, dtype=torch.bool),
        hidden=torch.zeros(num_tokens - 1, len(drafter.target_layer_ids) * hidden_size),
        final=torch.zeros(num_tokens - 1, hidden_size) if with_final else None,
    )
    anchors_A = torch.arange(max(0, num_tokens - 1 - num_anchors), num_tokens - 1)
    return pack([sequence] * num_sequences, [anchors_A] * num_sequences, drafter)
