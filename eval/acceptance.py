"""Acceptance, defined once: from the chunks that a server streamed and the engine's own counters.

A completion's first chunk holds the token that the prefill sampled; every further chunk holds what one
verification step committed, the bonus token included, after the server's cut at EOS, stop string or
max_tokens.  So for R requests with chunks c[r][0..n_r]:

    steps               sum over r of n_r
    acceptance length   (sum over r and i >= 1 of c[r][i]) / steps
    accepted by depth   [k-1] = (steps with c[r][i] - 1 >= k) / steps,  k = 1 .. num_drafts
    hence               1 + sum over k of accepted by depth = acceptance length

Pure: no clock, no file, no torch.  `eval/measure.py` calls it.
"""

# N=requests  S=resamples

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from recipes.errors import UserError
from serve.client import SpecCounters

NUM_RESAMPLES = 2000
"""Of the bootstrap: its interval's ends then move by a few hundredths of its width with another seed."""


@dataclass(frozen=True)
class Acceptance:
    """What one run committed; counts first, so that the ratios hang together exactly."""

    steps: int
    committed_tokens: int
    reached: tuple[int, ...]  # [k-1]: steps that accepted at least k drafts
    mean_of_request_means: float | None  # None when the chunks cannot tell
    standard_error: float | None  # of the acceptance length over requests; None below two requests
    interval: tuple[float, float] | None  # of 95 %, by a bootstrap over requests; None as above
    coalesced: bool  # the chunks were not one per step: `steps` and `reached` are the engine's counters
    undrafted_steps: int  # of a drafting engine: steps for which it had no draft (after a preemption, say)

    @property
    def acceptance_length(self) -> float:
        return self.committed_tokens / self.steps

    @property
    def accepted_by_depth(self) -> tuple[float, ...]:
        return tuple(count / self.steps for count in self.reached)


@dataclass(frozen=True)
class Counts:
    """Of each request, in their order: all that an acceptance length and its error are made of."""

    steps_N: np.ndarray
    tokens_N: np.ndarray
    """Committed by those steps."""

    @property
    def length(self) -> float:
        """Acceptance length."""
        return float(self.tokens_N.sum() / self.steps_N.sum())

    @property
    def residuals(self) -> np.ndarray:
        """How much each request moves the length, to first order. [N]"""
        return (self.tokens_N - self.length * self.steps_N) / self.steps_N.sum()

    @property
    def is_decoded(self) -> np.ndarray:
        """Whether the answer is longer than the prefill's token. [N]"""
        return self.steps_N > 0

    @property
    def standard_error(self) -> float:
        """Of the length; zero of a single request."""
        return find_standard_error(self.residuals, self.is_decoded)


def count_requests(requests: Sequence[Sequence[int]]) -> Counts:
    """From the chunk sizes of each."""
    steps = [chunks[1:] for chunks in requests]
    return Counts(np.array([len(sizes) for sizes in steps]), np.array([sum(sizes) for sizes in steps]))


def find_standard_error(residuals_N: np.ndarray, is_decoded_N: np.ndarray) -> float:
    """Of a ratio of sums over requests (requests, not steps, are what is independent)."""
    number = int(is_decoded_N.sum())
    return math.sqrt(float((residuals_N**2).sum()) * number / max(1, number - 1))


def bootstrap_interval(counts: Counts, seed: int = 0) -> tuple[float, float]:
    """The middle 95 % of the lengths that as many requests have, drawn from these with replacement."""
    chosen_N = np.flatnonzero(counts.is_decoded)
    drawn_SN = np.random.default_rng(seed).choice(chosen_N, size=(NUM_RESAMPLES, len(chosen_N)))
    lengths_S = counts.tokens_N[drawn_SN].sum(axis=1) / counts.steps_N[drawn_SN].sum(axis=1)
    return float(np.quantile(lengths_S, 0.025)), float(np.quantile(lengths_S, 0.975))


def count_acceptance(requests: Sequence[Sequence[int]], counters: SpecCounters | None) -> Acceptance:
    """Acceptance of a run, from the chunk sizes of each request, checked against the engine's counters.

    `counters` is what the engine counted during just this run; None for plain decoding.  Where the two
    disagree because chunks were merged on their way, `steps` and `reached` come from the counters, and
    `coalesced` says so; the counters know no cut, so their depths may sum to a little more than the length.
    Raises UserError where no step was taken, or where the counters hold somebody else's requests too.
    """
    _refuse_stepless(requests)
    if counters is None:
        return _count_plain(requests)
    _refuse_foreign_drafts(requests, counters)
    if _is_coalesced(requests, counters):
        return _count_engine(requests, counters)
    return _count_chunks(requests, counters)


def cut_to_depth(counters: SpecCounters, depth: int) -> SpecCounters:
    """Counters of draft trees whose paths hold at most `depth` drafts, with no position beyond it.

    The engine knows a position for each node of a tree, but counts along the accepted path: the k-th position
    is depth k, and those beyond `depth` stay empty.
    """
    beyond = counters.accepted_per_position[depth:]
    assert not any(beyond), f"drafts were accepted beyond depth {depth}: {counters}"
    return replace(counters, accepted_per_position=counters.accepted_per_position[:depth])


def repeated_ngram_share(responses: Iterable[Sequence[int]], n: int = 8) -> float:
    """Share of the generated tokens that lie inside an n-gram occurring more than once in its own response.

    Pooled over the responses; a small model that loops flatters every drafter, and this shows it.
    """
    repeated = total = 0
    for token_ids in responses:
        repeated += len(_repeated_positions(token_ids, n))
        total += len(token_ids)
    return repeated / total if total else 0.0


def _repeated_positions(token_ids: Sequence[int], n: int) -> set[int]:
    ngrams = [tuple(token_ids[start : start + n]) for start in range(len(token_ids) - n + 1)]
    occurrences = Counter(ngrams)
    repeats = (start for start, ngram in enumerate(ngrams) if occurrences[ngram] > 1)
    return set(chain.from_iterable(range(start, start + n) for start in repeats))


def _steps(requests: Sequence[Sequence[int]]) -> list[int]:
    """The chunks that are verification steps, pooled."""
    return [size for chunks in requests for size in chunks[1:]]


def _committed(requests: Sequence[Sequence[int]]) -> int:
    """Tokens after each prefill's one, however they were chunked."""
    return sum(sum(chunks) - 1 for chunks in requests)


def _count_chunks(requests: Sequence[Sequence[int]], counters: SpecCounters) -> Acceptance:
    steps = _steps(requests)
    means = [sum(chunks[1:]) / len(chunks[1:]) for chunks in requests if len(chunks) > 1]
    counts = count_requests(requests)
    has_spread = counts.is_decoded.sum() > 1
    return Acceptance(
        steps=len(steps),
        committed_tokens=sum(steps),
        reached=tuple(sum(size > k for size in steps) for k in range(1, _num_drafts(counters) + 1)),
        mean_of_request_means=sum(means) / len(means),
        standard_error=counts.standard_error if has_spread else None,
        interval=bootstrap_interval(counts) if has_spread else None,
        coalesced=False,
        undrafted_steps=len(steps) - counters.drafts,
    )


def _count_engine(requests: Sequence[Sequence[int]], counters: SpecCounters) -> Acceptance:
    return Acceptance(
        steps=counters.drafts,
        committed_tokens=_committed(requests),
        reached=counters.accepted_per_position,
        mean_of_request_means=None,
        standard_error=None,
        interval=None,
        coalesced=True,
        undrafted_steps=0,
    )


def _count_plain(requests: Sequence[Sequence[int]]) -> Acceptance:
    """Plain decoding commits one token a step by definition, whatever the chunks were."""
    committed = _committed(requests)
    return Acceptance(
        steps=committed,
        committed_tokens=committed,
        reached=(),
        mean_of_request_means=1.0,
        standard_error=0.0,
        interval=(1.0, 1.0),
        coalesced=any(size > 1 for chunks in requests for size in chunks),
        undrafted_steps=0,
    )


def _num_drafts(counters: SpecCounters) -> int:
    return len(counters.accepted_per_position)


def _is_coalesced(requests: Sequence[Sequence[int]], counters: SpecCounters) -> bool:
    """Fewer chunks than steps, or a chunk that no single step can have made.

    More chunks than drafts is no sign of merging: a step without drafts streams its token all the same.
    """
    steps, most = _steps(requests), _num_drafts(counters) + 1
    impossible = any(chunks[0] != 1 for chunks in requests) or any(size > most for size in steps)
    return impossible or len(steps) < counters.drafts


def _refuse_stepless(requests: Sequence[Sequence[int]]) -> None:
    assert all(size > 0 for chunks in requests for size in chunks), f"an empty chunk in {requests}"
    if not requests or _committed(requests) == 0:
        raise UserError(
            f"no verification step was taken: {len(requests)} responses ended with their first token;"
            " ask for more tokens (--max-tokens) or other prompts (--suite)"
        )


def _refuse_foreign_drafts(requests: Sequence[Sequence[int]], counters: SpecCounters) -> None:
    """The cut takes at most `num_drafts` tokens from a request's last step: a larger excess is not ours."""
    excess = counters.drafts + counters.accepted_tokens - _committed(requests)
    if excess > len(requests) * _num_drafts(counters):
        raise UserError(
            f"the engine committed {excess} tokens more than these {len(requests)} requests received:"
            " somebody else used it meanwhile; measure on an engine that serves nothing else"
        )
