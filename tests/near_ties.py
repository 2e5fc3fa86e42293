"""Whether two runs of the data phase made the same: in other company, texts part at near-ties alone."""

from collections.abc import Iterable

import torch
from transformers import AutoModelForCausalLM

from data.shards import Sequence
from eval.lossless import NEAR_TIE_NATS
from tests.drafters import EMBEDDED_TARGET


def count_near_ties(found: Iterable[Sequence], expected: Iterable[Sequence]) -> int:
    """Sequences that part.  Fails where one does so at another place than a near-tie of the target's."""
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED_TARGET, dtype=torch.bfloat16)
    pairs = [pair for pair in zip(found, expected, strict=True) if not _are_alike(*pair)]
    for one, other in pairs:
        shared = min(len(one.token_ids), len(other.token_ids))
        position = int((one.token_ids[:shared] == other.token_ids[:shared]).long().cumprod(0).sum())
        assert position < shared, "one text merely stops"
        assert one.loss_mask[position], "the prompts differ"
        assert torch.equal(one.loss_mask[:position], other.loss_mask[:position])
        with torch.inference_mode():
            logprobs_V = model(one.token_ids[None, :position].long()).logits[0, -1].float().log_softmax(-1)
        tokens = torch.stack([one.token_ids[position], other.token_ids[position]]).long()
        gap = float((logprobs_V.max() - logprobs_V[tokens]).max())
        assert gap <= NEAR_TIE_NATS["bfloat16"], f"parted at token {position}, {gap} nats apart"
    return len(pairs)


def _are_alike(one: Sequence, other: Sequence) -> bool:
    return torch.equal(one.token_ids, other.token_ids) and torch.equal(one.loss_mask, other.loss_mask)
