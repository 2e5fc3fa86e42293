"""The best tokens of each row of a drafter's logits: what the nodes of a tree are chosen from.

In torch, which a CPU's engine runs and which says what `serve/tree_candidates_kernels.py` has to give.  A
sort by value alone would leave tokens of equal logits in any order, and bf16 makes many; here they come in
order of the token, so that both twins, and any two runs, draft the same.
"""

# T=rows of logits  V=vocabulary  C=candidates of a row

from dataclasses import dataclass

import torch

LAST_TOKEN = 2**31 - 1
"""Beyond every token, and the bits of a key that hold one; also those of a float's magnitude."""

_KEYS_AT_ONCE = 2**18  # 2 MiB: small enough for a CPU's cache, and for its allocator to use again


@dataclass(frozen=True)
class Candidates:
    """The most probable tokens of each row, best first; of equal logits the lower token comes first."""

    tokens_TC: torch.Tensor
    """int64"""
    log_probs_TC: torch.Tensor
    """Logit minus the row's logsumexp; -inf for a logit of -inf, whatever else the row has.  fp32"""


def rank_candidates(logits_TV: torch.Tensor, count: int) -> Candidates:
    """The `count` first tokens of each row.

    logits_TV: bf16, fp16 or fp32, rows of any stride, each of them dense.  count: C, at most V.  A row with a
    NaN ranks tokens of the vocabulary, each once, in no order to rely on.
    """
    check_logits(logits_TV, count)
    values_TV = logits_TV.float()
    chunks = values_TV.split(max(1, _KEYS_AT_ONCE // values_TV.shape[1]))
    best_TC = torch.cat([_sort_keys(chunk).topk(count).values for chunk in chunks])
    tokens_TC = (best_TC & LAST_TOKEN) ^ LAST_TOKEN
    values_TC = values_TV.gather(1, tokens_TC)
    log_probs_TC = values_TC - values_TV.logsumexp(1, keepdim=True)
    return Candidates(tokens_TC, log_probs_TC.masked_fill(values_TC == -torch.inf, -torch.inf))


def check_logits(logits_TV: torch.Tensor, count: int) -> None:
    """What both twins ask of their caller."""
    assert logits_TV.dtype in (torch.bfloat16, torch.float16, torch.float32), f"logits are {logits_TV.dtype}"
    num_tokens = logits_TV.shape[1]
    assert 0 < count <= num_tokens < LAST_TOKEN, f"{count} candidates of {num_tokens} tokens"
    assert logits_TV.stride(1) == 1, f"tokens lie {logits_TV.stride(1)} apart, expected 1"


def _sort_keys(values_TV: torch.Tensor) -> torch.Tensor:
    """An integer for each token that ascends as (value, then lower token) does.  int64

    The high half is the value's bits, sign and magnitude, as two's complement, where the two zeros are one.
    The low half is the token with its bits flipped, which is LAST_TOKEN - token.
    """
    bits_TV = values_TV.view(torch.int32)
    signs_TV = bits_TV >> 31  # 0 or -1; torch.where takes ten times as long on a CPU
    keys_TV = (((bits_TV & LAST_TOKEN) ^ signs_TV) - signs_TV).long()
    keys_TV <<= 32
    keys_TV |= torch.arange(values_TV.shape[1], device=values_TV.device) ^ LAST_TOKEN
    return keys_TV
