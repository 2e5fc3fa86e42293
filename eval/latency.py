"""How long clients waited, from when the chunks of their answers came.

A chunk is what one step of the engine committed for a request: one token in plain decoding, several where
drafts were accepted.  The words and, in brackets, those of `vllm bench serve`:

    first token     from sending the request to its first chunk [TTFT]; one a request
    between chunks  from a chunk to the next, however many tokens it holds [ITL]; pooled over requests
    per token       from the first chunk to the last / the tokens after the first chunk [TPOT]; one a request
    step            from the first chunk to the last, summed over requests / verification steps

Drafting makes steps longer and tokens cheaper: only the time per token compares with plain decoding's.  A
server that merges the chunks of several steps widens the time between chunks, and no other.  Pure.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from eval.report import Latency, Spread
from serve.client import Completion


def find_latency(completions: Sequence[Completion], steps: int) -> Latency | None:
    """`steps` as in `eval.acceptance.Acceptance`.  None where no answer has a second chunk."""
    decoded = [each for each in completions if len(each.chunks) > 1]
    if not decoded:
        return None
    spans = [each.arrivals[-1] - each.arrivals[0] for each in decoded]
    tokens = [sum(each.chunks[1:]) for each in decoded]
    return Latency(
        first_token=_spread(each.arrivals[0] for each in completions),
        between_chunks=_spread(gap for each in decoded for gap in np.diff(each.arrivals)),
        per_token=_spread(span / count for span, count in zip(spans, tokens, strict=True)),
        step_ms=1e3 * sum(spans) / steps,
    )


def _spread(seconds: Iterable[float]) -> Spread:
    ms = 1e3 * np.array(list(seconds))
    return Spread(p50=float(np.quantile(ms, 0.5)), p99=float(np.quantile(ms, 0.99)))
