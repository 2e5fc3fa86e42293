"""Verification of draft trees on a GPU: as `serve.seam.verifier`, with one launch after the sampling."""

# B=requests  R=rows of a request  T=rows of the logits  V=vocabulary

from collections.abc import Sequence
from typing import Any

import torch

from serve.seam.cuda_runtime import CudaTreeRuntime
from serve.seam.verifier import Chunk, TreeVerifier
from serve.tree_batch import WalkBatch
from serve.tree_cache_kernels import tidy_states_


class CudaTreeVerifier(TreeVerifier):
    """Chunks come in the order of the step's requests."""

    _runtime: CudaTreeRuntime

    def __call__(self, logits: torch.Tensor, input_batch: Any, *args: Any, **kwargs: Any) -> Any:
        self._shifts_T = self._runtime.shifts_of_rows(input_batch.logits_indices)
        return super().__call__(logits, input_batch, *args, **kwargs)

    def _find_shifts(self, chunk: Chunk) -> torch.Tensor:
        num_rows = len(chunk.local_positions_T)
        shifts_T, self._shifts_T = self._shifts_T[:num_rows], self._shifts_T[num_rows:]
        return shifts_T

    def _walk(
        self, chunk: Chunk, target_T: torch.Tensor, of_rows: Sequence[torch.Tensor]
    ) -> tuple[WalkBatch, torch.Tensor, torch.Tensor]:
        first_request = sum(len(walk.path_BL) for walk in self._walks)
        committed = self._runtime.walk(
            first_request, chunk.drafts_T, target_T, chunk.starts_B1, self.num_speculative_steps + 1
        )
        walk = committed.walk
        tidy_states_(of_rows, chunk.starts_B1[:-1], walk.path_BL, walk.num_accepted_B)
        return walk, committed.tokens_BE, committed.num_tokens_B
