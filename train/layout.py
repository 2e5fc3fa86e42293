"""What the blocks of a packed batch see of its context, in a few small integers: `train.blocks.visible`
for kernels that look at whole tiles.

Documents lie end to end and a document's blocks ascend by anchor, so a row of a block sees one stretch of
context rows, and both ends of it only ever grow from block to block.  Hence also the blocks that see a tile
of context are neighbours.  Nothing here is as long as sequence x anchors; `train.attention_kernels` reads it.
"""

# A=blocks  K=slots of a block  S=context rows  C=boundaries of context: 0, GRAIN, 2 x GRAIN, ..., S

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from recipes.schema import LayerType
from train.blocks import Places
from train.tiles import Document

GRAIN = 16
"""Context rows from one boundary to the next; a kernel's tile of context is a multiple of it."""


@dataclass(frozen=True)
class Layout:
    """Of a batch, for its layers of one kind.  Tensors are int32."""

    kind: LayerType
    window: int
    """Of a sliding layer."""
    block_size: int
    num_context: int
    first_A: torch.Tensor
    end_A: torch.Tensor
    """A block sees context rows first..end - 1: those of its document before its anchor.  Where the layer
    slides, its slot k sees none before row end + k + 1 - window."""
    blocks_C4: torch.Tensor
    """How many blocks, counted from the batch's first, at a boundary c
        0  end at c or before it
        1  begin before c
        2  end before c
        3  begin at c or before it with their last slot, hence with every slot
    so of a tile of context from boundary b to boundary e (column 0 of b is written b0)
        b0..e1 - 1  see any of its rows (blocks that see no context at all may be among them)
        e2..b3 - 1  see all of them with all their slots (none if that is no range)"""

    @property
    def slides(self) -> bool:
        return self.kind == "sliding_attention"

    def map(self, move: Callable[[torch.Tensor], torch.Tensor]) -> "Layout":
        """With each tensor moved."""
        first_A, end_A, blocks_C4 = map(move, (self.first_A, self.end_A, self.blocks_C4))
        return replace(self, first_A=first_A, end_A=end_A, blocks_C4=blocks_C4)


def lay_out(
    kind: LayerType, window: int, blocks: Places, documents: Sequence[Document], block_size: int
) -> Layout:
    """A document's context rows are its positions 0, 1, ..., its blocks ascend by anchor."""
    anchors_A = blocks.anchor[::block_size]
    starts = torch.tensor([document.context.start for document in documents])
    rows = torch.tensor([document.blocks.stop - document.blocks.start for document in documents])
    first_A = starts.repeat_interleave(rows // block_size)
    end_A = first_A + anchors_A
    slides = kind == "sliding_attention"
    begin_A = torch.maximum(first_A, end_A + 1 - window) if slides else first_A
    last_begin_A = torch.maximum(first_A, end_A + block_size - window) if slides else first_A
    num_context = documents[-1].context.stop
    bounds_C = torch.arange(-(-num_context // GRAIN) + 1).mul(GRAIN).clamp(max=num_context)
    blocks_C4 = torch.stack(
        [
            torch.searchsorted(end_A, bounds_C, right=True),
            torch.searchsorted(begin_A, bounds_C),
            torch.searchsorted(end_A, bounds_C),
            torch.searchsorted(last_begin_A, bounds_C, right=True),
        ],
        dim=1,
    )
    return Layout(kind, window, block_size, num_context, first_A.int(), end_A.int(), blocks_C4.int())
