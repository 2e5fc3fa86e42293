"""Verification of draft trees on a GPU: as `serve.seam.verifier`, with one launch after the sampling."""

# B=requests  R=rows of a request  T=logits rows

from typing import Any

import numpy as np
import torch

from serve.seam.cuda_runtime import CudaTreeRuntime
from serve.seam.verifier import TreeVerifier
from serve.tree_cache_kernels import tidy_states_


class CudaTreeVerifier(TreeVerifier):
    _runtime: CudaTreeRuntime

    def __call__(self, logits: torch.Tensor, input_batch: Any, *args: Any, **kwargs: Any) -> Any:
        self._depths_T = self._runtime.depths_of_rows(input_batch.logits_indices)
        self._first_logit = self._first_request = 0
        return super().__call__(logits, input_batch, *args, **kwargs)

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
        """Of one chunk's requests, chunks in their order: as `TreeVerifier._verify`."""
        depths_T = self._depths_T[self._first_logit : self._first_logit + len(logits)]
        target_T, processed = self.sampler.sample(
            logits,
            expanded_idx_mapping,
            idx_mapping,
            idx_mapping_np,
            pos + depths_T.to(pos.dtype),
            draft_sampled,
            expanded_local_pos,
            seq_lens_upper_bound_np,
        )
        num_tokens = self.num_speculative_steps + 1
        committed = self._runtime.walk(
            self._first_request, verify_draft_sampled, target_T, cu_num_logits, num_tokens
        )
        self._first_logit += len(logits)
        self._first_request += len(idx_mapping)
        walk = committed.walk
        self._walks.append(walk)
        # log-probabilities are read in the order of the text
        ordered = [logits] if processed is logits else [logits, processed]
        tidy_states_(ordered, cu_num_logits[:-1], walk.path_BL, walk.num_accepted_B)
        return processed, committed.tokens_BE.to(target_T.dtype), committed.num_tokens_B
