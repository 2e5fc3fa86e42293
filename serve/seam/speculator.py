"""DFlash's speculator, drafting a tree: the drafter works at its own depth, the engine sees the tree's nodes.

Stands in for `vllm.v1.worker.gpu.spec_decode.dflash.speculator.DFlashSpeculator`, whose drafter, cache and
graphs it keeps; the tree is grown where that one takes its argmax.
"""

# B=requests  L=slots  N=nodes  C=candidates of a slot  V=vocabulary  D=hidden size

import copy
from typing import Any

import torch
from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator

from serve.seam.runtime import TreeRuntime
from serve.tree_batch import TreeBatch


class TreeSpeculator(DFlashSpeculator):
    """`propose` returns the nodes' tokens, [B, N], and plants the trees in the request slots.

    All of it happens in `sample_draft`, which vLLM captures in the drafter's CUDA graph.
    """

    def __init__(self, vllm_config: Any, device: torch.device, runtime: TreeRuntime) -> None:
        narrow = copy.copy(vllm_config)
        narrow.speculative_config = copy.copy(vllm_config.speculative_config)
        narrow.speculative_config.num_speculative_tokens = runtime.num_slots
        super().__init__(narrow, device)
        self.runtime = runtime
        shape = (self.max_num_reqs, runtime.budget)
        self._tokens_BN = torch.zeros(shape, dtype=torch.int64, device=device)

    def _num_graph_context_tokens(self, num_reqs: int) -> int:
        """Rows that the target may have verified, which are more than the drafter's own."""
        return min(num_reqs * (self.runtime.budget + 1), self.max_num_tokens)

    def sample_draft(
        self,
        hidden_states: torch.Tensor,
        sample_src_positions: torch.Tensor,
        idx_mapping: torch.Tensor,
        temperature: torch.Tensor,
        seeds: torch.Tensor,
        draft_step: torch.Tensor,
        draft_logits: torch.Tensor | None,
        spec_step_idx: int = 0,
    ) -> torch.Tensor:
        """Grows and plants the trees of this step; the return value is the chain's, [B x L]."""
        logits_TV = self.compute_draft_logits(hidden_states, spec_step_idx)
        # no tree takes more of a slot's candidates than it has nodes (arXiv 2604.12989, lemma 1)
        best = self.runtime.rank_candidates(logits_TV, min(self.runtime.budget, logits_TV.shape[1]))
        of_blocks = 0, (-1, self.num_speculative_steps)
        log_probs_BLC, tokens_BLC = (
            best.log_probs_TC.unflatten(*of_blocks),
            best.tokens_TC.unflatten(*of_blocks),
        )
        slots_B = idx_mapping[:: self.num_speculative_steps]  # negative for a graph's padding
        tokens_BN = self.runtime.plant(slots_B, self._grow(log_probs_BLC), tokens_BLC)
        self._tokens_BN[: len(tokens_BN)] = tokens_BN
        return best.tokens_TC[:, 0]

    def _grow(self, log_probs_BLC: torch.Tensor) -> TreeBatch:
        num_candidates = log_probs_BLC.shape[-1]
        scores_BLCC = log_probs_BLC.clamp(max=0)[:, :, None].expand(-1, -1, num_candidates, -1)
        return self.runtime.grow_trees(scores_BLCC, self.runtime.budget)

    @torch.inference_mode()
    def propose(self, input_batch: Any, *args: Any, dummy_run: bool = False, **kwargs: Any) -> torch.Tensor:
        """As DFlash's; first brings the tap states of the accepted path to where a chain's would be."""
        if not dummy_run:
            self.runtime.tidy_states(input_batch, args[3])
        super().propose(input_batch, *args, dummy_run=dummy_run, **kwargs)
        return self._tokens_BN[: input_batch.num_reqs].clone()  # the runner writes into it
