"""Verification of draft trees: the target's own token at every row, then a walk.

Stands in for `vllm.v1.worker.gpu.spec_decode.rejection_sampler.RejectionSampler`, of which it keeps all but
the rule.  The target's token at a row is stock sampling of that row (temperature, top-k, top-p,
seeds), with noise keyed by the position a node would have; no draft probability is needed, and the output has
exactly the target's distribution.
"""

# B=requests  R=rows of a request (committed token, nodes)  T=logits rows

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.v1.worker.gpu.sample.states import NO_LOGPROBS
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

from serve.seam.runtime import TreeRuntime
from serve.tree_batch import Topology, WalkBatch, follow_trees
from serve.tree_slots import commit_tokens, path_rows, tidy_rows


@dataclass(frozen=True)
class Chunk:
    """Some requests of a step; rows of the logits are counted from its first."""

    slots_B: torch.Tensor
    starts_B1: torch.Tensor
    local_positions_T: torch.Tensor
    """Of a row within its request."""
    drafts_T: torch.Tensor


class TreeVerifier(RejectionSampler):
    def __init__(self, sampler: Any, spec_config: Any, device: torch.device, runtime: TreeRuntime) -> None:
        super().__init__(sampler, spec_config, device)
        self.enable_adaptive_verification = runtime.limits.adapts  # the host's starts of requests are untrue
        self._runtime = runtime
        self._walks: list[WalkBatch] = []

    def __call__(self, logits: torch.Tensor, input_batch: Any, *args: Any, **kwargs: Any) -> Any:
        self._walks.clear()
        self._are_rows_read = self._will_read_rows(input_batch)
        output = super().__call__(logits, input_batch, *args, **kwargs)
        parts = [(walk.path_BL, walk.num_accepted_B, walk.bonus_B) for walk in self._walks]
        self._runtime.accept(WalkBatch(*(torch.cat(part) for part in zip(*parts, strict=True))))
        return output

    def _will_read_rows(self, input_batch: Any) -> bool:
        """Whether anything reads the logits' rows after the walk, in the order of the text."""
        asked = self.sampler.sampling_states.max_num_logprobs(input_batch.idx_mapping_np)
        return asked != NO_LOGPROBS or self.sampler.return_sampling_mask

    def _verify(  # noqa: PLR0913, PLR0917 - vLLM's signature
        self,
        logits: torch.Tensor,
        draft_logits: torch.Tensor | None,
        draft_sampled: torch.Tensor,
        pos: torch.Tensor,
        cu_num_logits: torch.Tensor,
        idx_mapping: torch.Tensor,
        idx_mapping_np: np.ndarray,
        expanded_idx_mapping: torch.Tensor,
        expanded_local_pos: torch.Tensor,
        seq_lens_upper_bound_np: np.ndarray,
        verify_draft_sampled: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of one chunk's requests: (processed logits in path order, [B, R] tokens, how many of them)."""
        chunk = Chunk(idx_mapping, cu_num_logits, expanded_local_pos, verify_draft_sampled)
        shift_T = self._find_shifts(chunk)
        target_T, processed = self.sampler.sample(
            logits,
            expanded_idx_mapping,
            idx_mapping,
            idx_mapping_np,
            pos + shift_T.to(pos.dtype),
            draft_sampled,
            expanded_local_pos,
            seq_lens_upper_bound_np,
        )
        of_rows = [logits] if processed is logits else [logits, processed]
        walk, tokens_BR, counts_B = self._walk(chunk, target_T, of_rows if self._are_rows_read else [])
        self._walks.append(walk)
        return processed, tokens_BR.to(target_T.dtype), counts_B.to(torch.int32)

    def _find_shifts(self, chunk: Chunk) -> torch.Tensor:
        """How much further than its row each node stands, by rows of the logits. [T]"""
        counts_B = chunk.starts_B1.diff().long()
        depths_BR = torch.nn.functional.pad(self._trees_of(chunk).depths_BN, (1, 0))
        request_T = torch.repeat_interleave(
            torch.arange(len(counts_B), device=counts_B.device),
            counts_B,
            output_size=len(chunk.local_positions_T),
        )
        return depths_BR[request_T, chunk.local_positions_T.long()] - chunk.local_positions_T

    def _walk(
        self, chunk: Chunk, target_T: torch.Tensor, of_rows: Sequence[torch.Tensor]
    ) -> tuple[WalkBatch, torch.Tensor, torch.Tensor]:
        """The walks, the tokens [B, R] and their counts; brings `of_rows` [T, V] into path order."""
        first_row_B, counts_B = chunk.starts_B1[:-1].long(), chunk.starts_B1.diff().long()
        numbers_R = torch.arange(self._runtime.budget + 1, device=target_T.device)
        rows_BR = first_row_B[:, None] + numbers_R.where(numbers_R < counts_B[:, None], 0)
        drafts_BN = chunk.drafts_T[rows_BR[:, 1:]].long()
        targets_BR = target_T[rows_BR].long()
        walk = follow_trees(self._trees_of(chunk), drafts_BN, targets_BR, self._runtime.num_slots)
        paths = path_rows(walk, first_row_B)
        for rows in of_rows:
            tidy_rows(rows, paths)
        return walk, *commit_tokens(walk, drafts_BN, self.num_speculative_steps + 1)

    def _trees_of(self, chunk: Chunk) -> Topology:
        return self._runtime.trees_at(chunk.slots_B, chunk.starts_B1.diff().long() - 1)
