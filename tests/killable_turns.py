"""data/regenerate.py over conversations with a stub for vLLM, in forks of one process; see killable_loop.py.

    python tests/killable_turns.py < ORDERS

An order is a line of JSON: {"overrides": [...], "log": FILE, "changed": PATH or null, "number": N}.  Before
the N-th change of that path below output_dir, or of any, it ends as by kill -9; N = 0 is never.  The answer
is a line with the exit code.
"""

import json
import os
import random
import sys
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from chat_targets import END_OF_TURN
from drafters import EMBEDDED_TARGET
from killable_loop import Changes, StubEngine, die, do_all, fork, one_engine
from loop_lives import SMALL_RECIPE
from transformers import AutoTokenizer

from data import filling, regenerate, shard_maker
from recipes.errors import run_command
from recipes.load import load_recipe
from recipes.schema import Sampling
from serve.generation import Answer, Request

WORDS = ("so", "then", "left", "never", "one", "more")


@cache
def load_tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(EMBEDDED_TARGET)


class TalkingEngine(StubEngine):
    """Says some words and ends its turn; one in eight times it does not get to the end, or says nothing."""

    def _answer_one(self, name: str, request: Request, sampling: Sampling) -> Answer:
        draws = random.Random(request.seed)
        words = " ".join(draws.choices(WORDS, k=draws.randint(1, 4)))
        tokens = load_tokenizer().encode("" if draws.random() < 1 / 16 else words, add_special_tokens=False)
        is_cut = bool(tokens) and draws.random() < 1 / 16
        tokens += [] if is_cut else [END_OF_TURN]
        hidden = self._pass_through_spool(name, self._states([*request.token_ids, *tokens])[:-1])
        return Answer(tokens, "length" if is_cut else "stop", hidden, [1] * len(tokens))


def live(order: SimpleNamespace) -> None:
    """One run of the command, in this process, whose output goes to the log; the last line counts changes."""
    with Path(order.log).open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    folder = load_recipe(SMALL_RECIPE, order.overrides).output_dir
    changes = Changes(folder, order.changed, order.number, die)
    run_command(partial(regenerate.main, SMALL_RECIPE, order.overrides))
    print(f"{changes.count} changes", flush=True)


def main() -> None:
    shard_maker.CapturingEngine = TalkingEngine  # type: ignore[misc, assignment]
    filling.running_engines = one_engine  # type: ignore[assignment]
    filling.share_out = do_all  # type: ignore[assignment]
    regenerate.enter_environment = lambda: None  # it would begin this script anew
    load_tokenizer()
    for line in sys.stdin:
        print(fork(partial(live, SimpleNamespace(**json.loads(line)))), flush=True)


if __name__ == "__main__":
    main()
