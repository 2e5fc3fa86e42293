"""Answers chats in one vLLM engine of this process and tells what was drafted and accepted, for a test.

    python stock_probe.py ASKED.json TOLD.json

ASKED holds the engine's `arguments`, the `chats`, `max_tokens` and whether to `compare_mend`: then the engine
starts without our mend of the drafter's context keys, answers, is mended, and answers again.  TOLD lists the
rounds: `token_ids` of each answer, how many steps had `drafts`, and how many of those were `accepted`.
"""

import json
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

from vllm import LLM, SamplingParams

from serve.seam import processor

COUNTERS = {"drafts": "vllm:spec_decode_num_drafts", "accepted": "vllm:spec_decode_num_accepted_tokens"}


def main(asked_path: Path, told_path: Path) -> None:
    asked = json.loads(asked_path.read_text())
    rounds = answer_around_mend(asked) if asked["compare_mend"] else [answer(start_engine(asked), asked)]
    told_path.write_text(json.dumps(rounds))


def answer_around_mend(asked: dict[str, Any]) -> list[dict[str, Any]]:
    """The same engine without the mend and, since it replaces a method, then with it."""
    with patch.object(processor, "_mend_context_keys") as left_out:
        engine = start_engine(asked)
    left_out.assert_called_once_with()
    unmended = answer(engine, asked)
    processor._mend_context_keys()
    return [unmended, answer(engine, asked)]


def start_engine(asked: dict[str, Any]) -> LLM:
    return LLM(**asked["arguments"], disable_log_stats=False)


def answer(engine: LLM, asked: dict[str, Any]) -> dict[str, Any]:
    before = read_counters(engine)
    outputs = engine.chat(
        asked["chats"], SamplingParams(temperature=0, max_tokens=asked["max_tokens"]), use_tqdm=False
    )
    after = read_counters(engine)
    counted = {name: after[name] - before[name] for name in COUNTERS}
    return {"token_ids": [list(output.outputs[0].token_ids) for output in outputs]} | counted


def read_counters(engine: LLM) -> dict[str, int]:
    """Since the engine started."""
    values = {metric.name: metric.value for metric in engine.get_metrics() if hasattr(metric, "value")}
    return {name: int(values[counter]) for name, counter in COUNTERS.items()}


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
