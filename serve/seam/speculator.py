"""DFlash's speculator, drafting a tree: the drafter works at its own depth, the engine sees the tree's nodes.

Stands in for `vllm.v1.worker.gpu.spec_decode.dflash.speculator.DFlashSpeculator`, whose drafter, cache and
graphs it keeps; the tree is grown where that one takes its argmax.
"""

# B=requests  L=slots  N=nodes  C=candidates of a slot  V=vocabulary  T=B x L  D=hidden size
# K=nodes with reserved rows

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.logger import init_logger
from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator

from serve.pairwise import PairwiseTables, read_pairwise
from serve.seam.runtime import TreeRuntime
from serve.tree_candidates import Candidates

_logger = init_logger("vllm.draftsmith")  # below vllm's own, whose settings it shares


@dataclass(frozen=True)
class Scored:
    """What trees and chains are grown on."""

    tokens_BLC: torch.Tensor
    scores_BLCC: torch.Tensor
    """As `serve.tree.grow_tree` takes them."""
    chain_BL: torch.Tensor | None
    """The chain's candidates; None: each slot's first."""

    def reserve(self, count: int) -> torch.Tensor | None:
        """Candidates of as many of the chain's nodes, or of all that it has; None for none. [B, K]"""
        if count == 0:
            return None
        if self.chain_BL is None:
            return torch.zeros_like(self.tokens_BLC[:, :count, 0])
        return self.chain_BL[:, :count]


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
        self.draft_token_confidence_probs = torch.zeros(shape, device=device)
        """Where `runtime.confidence` is kept: `serve.seam.budgets` reads it after each `propose`."""
        self.pairwise: PairwiseTables | None = None
        """Where the engine was started with a pairwise head: graphs hold it, others are copied there."""

    def load_draft_model(self, *args: Any) -> Any:
        model = super().load_draft_model(*args)
        head = self.read_pairwise(Path(self.draft_model_config.model))
        if head is not None:
            like = {"device": self.device, "dtype": self.dtype}
            self.pairwise = PairwiseTables.without_effect(*self._widths(), head.rank, **like)
            self.pairwise.copy_(head)
            _logger.info("tokens are scored after their parents: a pairwise head of rank %d", head.rank)
        return model

    def read_pairwise(self, ckpt: Path) -> PairwiseTables | None:
        """A checkpoint's head, if it has one; UserError for one that does not fit this drafter or engine."""
        vocab_size, hidden_size = self._widths()
        return read_pairwise(ckpt, hidden_size, vocab_size)

    def _widths(self) -> tuple[int, int]:
        config = self.draft_model_config.hf_config
        return config.vocab_size, config.hidden_size

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
        scored = self._score_slots(hidden_states)
        limits = self.runtime.limits
        trees = self.runtime.grow_trees(scored.scores_BLCC, limits.budget, scored.reserve(limits.reserved))
        slots_B = idx_mapping[:: self.num_speculative_steps]  # negative for a graph's padding
        tokens_BN = self.runtime.plant(slots_B, trees, scored.tokens_BLC, scored.chain_BL)
        self._tokens_BN[: len(tokens_BN)] = tokens_BN
        if self.runtime.confidence is not None:
            steps_BN = self.runtime.judge(slots_B, trees, scored.scores_BLCC, scored.chain_BL)
            self.draft_token_confidence_probs[: len(steps_BN)] = steps_BN
        return scored.tokens_BLC[:, :, 0].flatten()

    def _score_slots(self, hidden_TD: torch.Tensor) -> Scored:
        logits_TV = self.compute_draft_logits(hidden_TD, 0)  # one pass drafts all slots
        # no tree takes more of a slot's candidates than it has nodes (arXiv 2604.12989, lemma 1)
        best = self.runtime.rank_candidates(logits_TV, min(self.runtime.budget, logits_TV.shape[1]))
        return Scored(self._by_block(best.tokens_TC), *self._score(self._by_block(hidden_TD), best))

    def _score(self, hidden_BLD: torch.Tensor, best: Candidates) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What trees grow on, and the chain's candidates; None: each slot's first."""
        tokens_BLC, log_probs_BLC = map(self._by_block, (best.tokens_TC, best.log_probs_TC.clamp(max=0)))
        if self.pairwise is None:
            return log_probs_BLC[:, :, None].expand(-1, -1, tokens_BLC.shape[-1], -1), None
        anchors_B = self._anchors(len(tokens_BLC))
        scores_BLCC = self.runtime.fill_table(self.pairwise, hidden_BLD, anchors_B, tokens_BLC, log_probs_BLC)
        return scores_BLCC, self.runtime.walk_chain(scores_BLCC)

    def _anchors(self, batch: int) -> torch.Tensor:
        """The committed tokens that drafts follow. [B]"""
        rows = batch * self.num_query_per_req
        return self.input_buffers.input_ids[: rows : self.num_query_per_req]

    def _by_block(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.unflatten(0, (-1, self.num_speculative_steps))

    def observe_verification(self, *args: Any) -> None:
        """Called before `propose`, which plants other trees."""
        self.runtime.observe()

    @torch.inference_mode()
    def propose(self, input_batch: Any, *args: Any, dummy_run: bool = False, **kwargs: Any) -> torch.Tensor:
        """As DFlash's; first brings the tap states of the accepted path to where a chain's would be."""
        if not dummy_run:
            self.runtime.tidy_states(input_batch, args[3])
        super().propose(input_batch, *args, dummy_run=dummy_run, **kwargs)
        return self._tokens_BN[: input_batch.num_reqs].clone()  # the runner writes into it
