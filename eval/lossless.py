"""Whether drafted text is what plain decoding says at temperature 0, and by how little it differs where not.

Pure: compares token ids and the plain run's own top log-probabilities.  `eval/measure.py` calls it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from recipes.schema import Precision
from serve.client import Completion

NEAR_TIE_NATS: dict[Precision, float] = {"bfloat16": 0.25, "float32": 1e-3}
"""The largest gap between two tokens' log-probabilities that rounding alone may turn round.

bf16 has 8 significant bits, so that a logit of magnitude 8 to 16 is known to steps of 2**-4 = 0.0625, and
one of 16 to 32 to steps of 0.125.  Verifying a block multiplies matrices of other shapes than decoding one
token does, hence sums in another order and rounds differently: two steps of error on each of two logits
make 4 * 0.0625 = 0.25 nats (log-probabilities differ as logits do).  fp32 has 2**16 times finer steps; what
is left there is the error of long sums, and 1e-3 is generous.
"""

Gap = float | Literal["outside the top k", "ended early"]


@dataclass(frozen=True)
class Divergence:
    """The first token at which two greedy completions of one prompt part."""

    prompt: int  # index
    position: int  # in the response
    gap: Gap  # nats by which the plain run preferred its own token to the drafted run's
    is_near_tie: bool


def find_divergences(
    plain: Sequence[Completion], drafted: Sequence[Completion], near_tie_nats: float
) -> list[Divergence]:
    """One Divergence per prompt whose completions differ; `plain` must bear its top log-probabilities.

    A divergence is a near-tie when its gap is at most `near_tie_nats`; "outside the top k" (the drafted
    run's token is not among the recorded ones) and "ended early" (one completion merely stops) never are.
    """
    assert len(plain) == len(drafted), f"{len(plain)} plain completions, {len(drafted)} drafted"
    found = []
    for prompt, (one, other) in enumerate(zip(plain, drafted, strict=True)):
        if one.token_ids != other.token_ids:
            position = _first_difference(one.token_ids, other.token_ids)
            gap = _gap(one, other, position)
            is_near_tie = isinstance(gap, float) and gap <= near_tie_nats
            found.append(Divergence(prompt, position, gap, is_near_tie))
    return found


def _first_difference(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((position for position, (a, b) in pairs if a != b), min(len(one), len(other)))


def _gap(plain: Completion, drafted: Completion, position: int) -> Gap:
    if position in (len(plain.token_ids), len(drafted.token_ids)):
        return "ended early"
    assert plain.top_logprobs is not None, "the plain run was made without log-probabilities"
    logprobs = plain.top_logprobs[position]
    if drafted.token_ids[position] not in logprobs:
        return "outside the top k"
    return logprobs[plain.token_ids[position]] - logprobs[drafted.token_ids[position]]
