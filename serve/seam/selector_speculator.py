"""DFlash2's speculator, drafting a tree: scores after each parent are its own selector's.

What vLLM's `DFlash2Speculator` walks once, from the best to the best, a tree takes as a table.  Drafter and
selector are vLLM's own (`vllm.model_executor.models.qwen3_dflash2`); all else is `TreeSpeculator`'s.
"""

# B=requests  L=slots  C=candidates of a slot  T=B x L  D=hidden size
#
# x(p, c)  = what the selector gives candidate c after parent p: the slot's logit and a product of three
# s(p, c)  = x(p, c) - log (sum of exp x(p, .) over the slot's candidates)

import torch

from serve.seam.speculator import Scored, TreeSpeculator


class SelectorSpeculator(TreeSpeculator):
    """The candidates are those that the drafter selects from, however many nodes a tree has."""

    _speculator_name = "DFlash2"

    def _score_slots(self, hidden_TD: torch.Tensor) -> Scored:
        tokens_BLC, logits_BLC = map(self._by_block, self.model.compute_candidates(hidden_TD))
        x_BLCC = self._select(tokens_BLC, logits_BLC, self._by_block(hidden_TD))
        # the chain on x itself, as vLLM's: rounding may make equals of what differs
        return Scored(tokens_BLC, x_BLCC.log_softmax(-1), self.runtime.walk_chain(x_BLCC))

    def _select(
        self, tokens_BLC: torch.Tensor, logits_BLC: torch.Tensor, hidden_BLD: torch.Tensor
    ) -> torch.Tensor:
        """x, the parents of slot 1 being the committed token in every row. [B, L, C, C] fp32"""
        selector = self.model.model.candidate_selector
        return selector(tokens_BLC, logits_BLC, hidden_BLD, self._anchors(len(tokens_BLC))).contiguous()
