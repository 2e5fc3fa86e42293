"""Verification of draft trees: the target's own token at every row, then a walk.

Stands in for `vllm.v1.worker.gpu.spec_decode.rejection_sampler.RejectionSampler`, of which it keeps all but
the rule.  The target's token at a row is stock sampling of that row (temperature, top-k, top-p,
seeds), with noise keyed by the position a node would have; no draft probability is needed, and the output has
exactly the target's distribution.
"""

# B=requests  R=rows of a request (committed token, nodes)  T=logits rows

from typing import Any

import numpy as np
import torch
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

from serve.seam.runtime import TreeRuntime
from serve.tree_batch import WalkBatch, follow_trees
from serve.tree_slots import commit_tokens, path_rows, tidy_rows


class TreeVerifier(RejectionSampler):
    def __init__(self, sampler: Any, spec_config: Any, device: torch.device, runtime: TreeRuntime) -> None:
        super().__init__(sampler, spec_config, device)
        self._runtime = runtime
        self._walks: list[WalkBatch] = []

    def __call__(self, logits: torch.Tensor, input_batch: Any, *args: Any, **kwargs: Any) -> Any:
        self._walks.clear()
        output = super().__call__(logits, input_batch, *args, **kwargs)
        parts = [(walk.path_BL, walk.num_accepted_B, walk.bonus_B) for walk in self._walks]
        self._runtime.accept(WalkBatch(*(torch.cat(part) for part in zip(*parts, strict=True))))
        return output

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
        first_row_B, counts_B = cu_num_logits[:-1].long(), cu_num_logits.diff().long()
        topology = self._runtime.trees_at(idx_mapping, counts_B - 1)
        depths_BR = torch.nn.functional.pad(topology.depths_BN, (1, 0))
        request_T = torch.repeat_interleave(
            torch.arange(len(counts_B), device=logits.device), counts_B, output_size=len(logits)
        )
        depth_T = depths_BR[request_T, expanded_local_pos.long()]
        target_T, processed = self.sampler.sample(
            logits,
            expanded_idx_mapping,
            idx_mapping,
            idx_mapping_np,
            pos - expanded_local_pos + depth_T.to(pos.dtype),
            draft_sampled,
            expanded_local_pos,
            seq_lens_upper_bound_np,
        )
        numbers_R = torch.arange(depths_BR.shape[1], device=logits.device)
        rows_BR = first_row_B[:, None] + numbers_R.where(numbers_R < counts_B[:, None], 0)
        drafts_BN = verify_draft_sampled[rows_BR[:, 1:]].long()
        walk = follow_trees(topology, drafts_BN, target_T[rows_BR].long(), self._runtime.num_slots)
        self._walks.append(walk)
        paths = path_rows(walk, first_row_B)
        for rows in [logits] if processed is logits else [logits, processed]:
            tidy_rows(rows, paths)  # log-probabilities are read in the order of the text
        sampled_BR, num_sampled_B = commit_tokens(walk, drafts_BN, self.num_speculative_steps + 1)
        return processed, sampled_BR.to(target_T.dtype), num_sampled_B.to(torch.int32)
