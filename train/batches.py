"""Packs sequences and their blocks into one batch without padding: documents lie end to end.

Tensors only: which sequences and anchors a batch holds is `train.feed`'s business.
"""

# L=tokens of a sequence  S=context rows  E=taps x hidden  A=blocks  K=slots of a block  Q=block rows (A x K)

from collections.abc import Sequence as Many
from dataclasses import dataclass, replace

import torch

from data.shards import Sequence
from recipes.schema import Drafter, LayerType
from train.blocks import Blocks, Places, block_places, context_places, join_places, make_blocks
from train.tiles import Document, Tiling, cut_tiles


@dataclass(frozen=True)
class Batch:
    taps_SE: torch.Tensor
    """The target's tapped states of each document's tokens, up to before its last anchor."""
    context_positions_S: torch.Tensor
    block_positions_Q: torch.Tensor
    input_ids_Q: torch.Tensor
    labels_AK: torch.Tensor
    supervised_AK: torch.Tensor
    documents: list[Document]
    tilings: dict[LayerType, Tiling]
    num_tokens: int
    """Tokens of the packed sequences, all of them."""

    def to(self, device: torch.device, dtype: torch.dtype) -> "Batch":
        """On `device`, the taps in `dtype`."""
        return replace(
            self,
            taps_SE=self.taps_SE.to(device, dtype, non_blocking=True),
            context_positions_S=self.context_positions_S.to(device),
            block_positions_Q=self.block_positions_Q.to(device),
            input_ids_Q=self.input_ids_Q.to(device),
            labels_AK=self.labels_AK.to(device),
            supervised_AK=self.supervised_AK.to(device),
            tilings={kind: tiling.to(device) for kind, tiling in self.tilings.items()},
        )


def pack(sequences: Many[Sequence], anchors: Many[torch.Tensor], drafter: Drafter) -> Batch:
    """One batch of `sequences`, each with its anchors (ascending, at least one)."""
    blocks = [
        make_blocks(
            sequence.token_ids, sequence.loss_mask, anchors_A, drafter.block_size, drafter.mask_token_id
        )
        for sequence, anchors_A in zip(sequences, anchors, strict=True)
    ]
    context_rows = [int(anchors_A[-1]) for anchors_A in anchors]
    context, places, documents = _lay_out(context_rows, blocks, drafter.block_size)
    return Batch(
        taps_SE=torch.cat([s.hidden[:rows] for s, rows in zip(sequences, context_rows, strict=True)]),
        context_positions_S=context.position,
        block_positions_Q=places.position,
        input_ids_Q=torch.cat([b.input_ids_AK for b in blocks]).flatten(),
        labels_AK=torch.cat([b.labels_AK for b in blocks]),
        supervised_AK=torch.cat([b.supervised_AK for b in blocks]),
        documents=documents,
        tilings={
            kind: cut_tiles(kind, drafter.sliding_window, context, places, documents, drafter.block_size)
            for kind in set(drafter.layer_types)
        },
        num_tokens=sum(len(sequence.token_ids) for sequence in sequences),
    )


def _lay_out(
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
    num_sequences: int, num_tokens: int, num_anchors: int, drafter: Drafter, hidden_size: int
) -> Batch:
    """The largest batch of a recipe: `num_sequences` of `num_tokens`, all supervised, the anchors as late as
    can be; the tap states are zero."""
    sequence = Sequence(
        token_ids=torch.zeros(num_tokens, dtype=torch.int32),
        loss_mask=torch.ones(num_tokens, dtype=torch.bool),
        hidden=torch.zeros(num_tokens - 1, len(drafter.target_layer_ids) * hidden_size),
    )
    anchors_A = torch.arange(max(0, num_tokens - 1 - num_anchors), num_tokens - 1)
    return pack([sequence] * num_sequences, [anchors_A] * num_sequences, drafter)
