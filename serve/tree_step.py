"""The trees of one step as the layers of a GPU see them.

A step's batch has the requests with drafts first, then the others; in a CUDA graph, padding follows, which
has no rows.  `serve.tree_batch_kernels.lay_out_step` fills what is viewed here.
"""

# B=requests  N=nodes  R=rows of a request: the committed token, then the nodes  T=rows of the step

from dataclasses import dataclass

import torch

from serve.tree_batch_kernels import StepBuffers
from serve.tree_gdn_kernels import Placement


@dataclass(frozen=True)
class Extent:
    """How much of a batch is trees.  Known to the host, and part of a graph."""

    num_requests: int
    """With trees; in a graph, padding included."""
    num_rows: int
    """Theirs, the first of the batch."""
    is_all_of_batch: bool
    """Whether no other rows follow."""


@dataclass(frozen=True)
class GroupTrees:
    """For the layers of one KV cache group; views of buffers that last."""

    extent: Extent
    max_rows: int
    """R"""
    parents_BN: torch.Tensor
    words_BR: torch.Tensor
    """As `serve.tree_attention.pack_sees`."""
    words_T: torch.Tensor
    """As `serve.tree_attention.spread_words`."""
    query_starts_B1: torch.Tensor
    """int32"""
    context_lengths_B: torch.Tensor
    """Tokens before a request's rows. int32"""
    placement: Placement


def view_trees(
    step: StepBuffers, extent: Extent, query_starts_B1: torch.Tensor, state_slots_B: torch.Tensor
) -> GroupTrees:
    """query_starts_B1, state_slots_B: of at least the extent's requests."""
    requests = slice(extent.num_requests)
    return GroupTrees(
        extent,
        step.words_PR.shape[1],
        step.trees.parents_BN[requests],
        step.words_PR[requests],
        step.words_T[: extent.num_rows],
        query_starts_B1[: extent.num_requests + 1],
        step.context_lens_P[requests],
        Placement(step.first_row_P[requests], step.num_rows_P[requests], state_slots_B[requests]),
    )
