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
from serve.tree_batch import Topology, TreeBatch, grow_trees


class TreeSpeculator(DFlashSpeculator):
    """`propose` returns the nodes' tokens, [B, N], and plants the trees in the request slots."""

    def __init__(self, vllm_config: Any, device: torch.device, runtime: TreeRuntime) -> None:
        narrow = copy.copy(vllm_config)
        narrow.speculative_config = copy.copy(vllm_config.speculative_config)
        narrow.speculative_config.num_speculative_tokens = runtime.num_slots
        super().__init__(narrow, device)
        self.runtime = runtime
        shape = (self.max_num_reqs, runtime.budget)
        self._tokens_BN = torch.zeros(shape, dtype=torch.int64, device=device)
        self._parents_BN = torch.zeros(shape, dtype=torch.int64, device=device)
        self._depths_BN = torch.zeros(shape, dtype=torch.int64, device=device)
        self._num_nodes_B = torch.zeros(self.max_num_reqs, dtype=torch.int64, device=device)

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
        """Grows the trees of this step into the buffers; the return value is the chain's, [B x L]."""
        logits = self.compute_draft_logits(hidden_states, spec_step_idx)
        logits_BLV = logits.float().unflatten(0, (-1, self.num_speculative_steps))
        # no tree takes more of a slot's candidates than it has nodes (arXiv 2604.12989, lemma 1)
        best = logits_BLV.topk(min(self.runtime.budget, logits_BLV.shape[-1]), dim=-1)
        log_probs_BLC = best.values - logits_BLV.logsumexp(-1, keepdim=True)
        self._keep(self._grow(log_probs_BLC), best.indices)
        return best.indices[:, :, 0].flatten()

    def _grow(self, log_probs_BLC: torch.Tensor) -> TreeBatch:
        num_candidates = log_probs_BLC.shape[-1]
        scores_BLCC = log_probs_BLC.clamp(max=0)[:, :, None].expand(-1, -1, num_candidates, -1)
        return grow_trees(scores_BLCC, self.runtime.budget)

    def _keep(self, trees: TreeBatch, candidates_BLC: torch.Tensor) -> None:
        batch = len(candidates_BLC)
        slots_BN = (trees.depths_BN - 1).clamp(min=0)
        of_slot_BNC = candidates_BLC.gather(1, slots_BN[:, :, None].expand(-1, -1, candidates_BLC.shape[2]))
        self._tokens_BN[:batch] = of_slot_BNC.gather(2, trees.candidates_BN[:, :, None])[:, :, 0]
        self._parents_BN[:batch] = trees.parents_BN
        self._depths_BN[:batch] = trees.depths_BN
        self._num_nodes_B[:batch] = trees.num_nodes_B

    @torch.inference_mode()
    def propose(self, input_batch: Any, *args: Any, dummy_run: bool = False, **kwargs: Any) -> torch.Tensor:
        """As DFlash's; first brings the tap states of the accepted path to where a chain's would be."""
        batch, aux_hidden_states = input_batch.num_reqs, args[3]
        if not dummy_run:
            self.runtime.tidy_states(input_batch, aux_hidden_states)
        chain_BL = super().propose(input_batch, *args, dummy_run=dummy_run, **kwargs)
        if not dummy_run:
            tokens_BN = self.runtime.plant(input_batch, self._trees(batch), self._tokens_BN[:batch], chain_BL)
        else:
            tokens_BN = self._tokens_BN[:batch]
        return tokens_BN.clone()  # the runner writes into it

    def _trees(self, batch: int) -> Topology:
        parts = (self._parents_BN, self._depths_BN, self._num_nodes_B)
        return Topology(*(part[:batch] for part in parts))
