"""Answers with capture while trees and chains are drafted, in an engine of its own, for a test.

    python generation_probe.py float32|bfloat16 OUT.pt

Told in either precision: {way: answers}, what a prefill reads of the same texts, how many accepted paths were
no chains, what a misfit drafter was told, and on a GPU what sleep did.  In bfloat16, which is that of shards,
also what making a shard says to each fault of capture.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
from capture_faults import (
    Fault,
    counted_moves,
    lost_request,
    lost_rows,
    other_taps,
    rows_of_another,
    untidy_paths,
    zero_rows,
)
from drafters import EMBEDDED_TARGET, tiny_recipe, write_random_drafter
from transformers import AutoTokenizer

from data.check_taps import FINAL
from data.groups import Rendered, render
from data.prompts import load_prompts
from data.shard_maker import Made, ShardMaker
from recipes.errors import MachineError
from recipes.schema import Sampling, Serve, Target
from serve.engine import enter_environment, is_cuda
from serve.generation import Answer, CapturingEngine, Drafting, Request

REFERENCE = EMBEDDED_TARGET.parent / "drafter"
TAPS = [1, 3, 5, 6]
CAPTURED = [*TAPS, FINAL]
SERVE = Serve(
    max_model_len=256,
    max_num_seqs=3,
    max_num_batched_tokens=100,
    enforce_eager=not is_cuda(),
    kv_cache_gib=1,
    gpu_memory_utilization=0.2,
)
WAYS = {
    "greedy": (Sampling(temperature=0.0, max_tokens=32), False),
    "sampled": (Sampling(temperature=0.7, max_tokens=32), False),
    "chain": (Sampling(temperature=0.0, max_tokens=32), True),
    "sampled chain": (Sampling(temperature=0.7, max_tokens=32), True),
}


def target_in(dtype: str) -> Target:
    return Target.model_validate({"model": str(EMBEDDED_TARGET), "dtype": dtype})


def texts_of(prompts: Sequence[Rendered], answers: Sequence[Answer]) -> list[list[int]]:
    return [[*prompt.token_ids, *answer.token_ids] for prompt, answer in zip(prompts, answers, strict=True)]


def tell_ways(engine: CapturingEngine, prompts: Sequence[Rendered]) -> dict[str, Any]:
    requests = [Request(prompt.token_ids, prompt.seed) for prompt in prompts]
    told: dict[str, Any] = {"answers": {}, "read": {}, "moves": {}}
    for way, (sampling, is_chain) in WAYS.items():
        with counted_moves() as moves:
            told["answers"][way] = engine.answer(requests, sampling, is_chain=is_chain)
        told["moves"][way] = sum(moves)
    for way, answers in told["answers"].items():
        told["read"][way] = engine.read(texts_of(prompts, answers))
    return told


def tell_one_by_one(engine: CapturingEngine, prompts: Sequence[Rendered]) -> list[Answer]:
    """Each is collected in the step it ends with, while others run; in the order of the prompts."""
    sampling, _ = WAYS["greedy"]
    running = [engine.begin(Request(prompt.token_ids, prompt.seed), sampling) for prompt in prompts]
    answers: dict[int, Answer] = {}
    while len(answers) < len(running):
        ended = engine.step().ended
        answers |= zip(ended, engine.collect(ended), strict=True)
    return [answers[number] for number in running]


def tell_longest(engine: CapturingEngine, prompts: Sequence[Rendered]) -> dict[str, Any]:
    """A text that fills the engine's max_model_len, many chunks of a step, beside a short one."""
    words = [token for prompt in prompts for token in prompt.token_ids] * 2
    texts = [words[: SERVE.max_model_len], words[:3]]
    return {"texts": texts, "read": engine.read(texts)}


def tell_swaps(engine: CapturingEngine, prompts: Sequence[Rendered], folder: Path) -> dict[str, Any]:
    told: dict[str, Any] = {}
    try:
        engine.swap(write_random_drafter(folder / "misfit"))
    except MachineError as refusal:
        told["refusal"] = str(refusal)
    engine.swap(REFERENCE)
    told["after"] = answer_greedily(engine, prompts)
    return told


def tell_sleep(engine: CapturingEngine, prompts: Sequence[Rendered]) -> dict[str, Any]:
    """Bytes of the GPU that each of two sleeps freed, and the answers after them."""
    freed = []
    for _ in range(2):
        awake = torch.cuda.mem_get_info()[0]
        engine.sleep()
        freed.append(torch.cuda.mem_get_info()[0] - awake)
        engine.wake()
    return {"freed": freed, "woken": answer_greedily(engine, prompts)}


def answer_greedily(engine: CapturingEngine, prompts: Sequence[Rendered]) -> list[Answer]:
    requests = [Request(prompt.token_ids, prompt.seed) for prompt in prompts]
    return engine.answer(requests, WAYS["greedy"][0])


def tell_faults(engine: CapturingEngine, prompts: Sequence[Rendered], folder: Path) -> dict[str, Any]:
    """{fault: what making a shard says}, None where it made one; the files there are, and what was lost."""
    recipe = tiny_recipe(
        "drafter.target_layer_ids=[1,3,5,6]",
        "data.sampling.max_tokens=32",
        "data.check_sequences=2",
        "data.check_again=2",
        "data.check_cosine=0.998",
        "data.final_states=true",
    )
    with patch("data.shard_maker.CapturingEngine", lambda *_, **__: engine):
        maker, fresh = (ShardMaker(recipe, folder, folder / "spool", lambda *_: None) for _ in range(2))
    whole = maker.make(0, prompts)  # the first, which transformers vouches for
    later: Mapping[str, Fault] = {
        "zero rows": lambda: zero_rows(after=40),
        "rows of another": rows_of_another,
        "untidy paths": untidy_paths,
    }
    said = {name: make_with(fault, maker, 1, prompts)[1] for name, fault in later.items()}
    for shift in () if is_cuda() else (1, -1):  # a GPU's graphs hold the taps
        fault = lambda shift=shift: other_taps(engine, TAPS, shift)  # noqa: E731
        said[f"taps {shift:+}"] = make_with(fault, fresh, 2, prompts)[1]
    lost = make_with(lambda: lost_rows(f"{engine.num_begun + 1}", count=30), maker, 3, prompts)[0]
    gone = make_with(lambda: lost_request(f"{engine.num_begun + 2}"), maker, 4, prompts)[0]
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    return {"said": said, "files": files, "whole": whole, "lost": lost, "gone": gone}


def make_with(
    fault: Fault, maker: ShardMaker, number: int, prompts: Sequence[Rendered]
) -> tuple[Made | None, str | None]:
    """The shard, or why it was refused."""
    with fault():
        try:
            return maker.make(number, prompts), None
        except MachineError as refusal:
            return None, str(refusal)


def main(dtype: str, out: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_TARGET)
    prompts = render(load_prompts("stdlib:heldout", 5), tokenizer)
    with TemporaryDirectory() as name:
        folder = Path(name)
        drafting = Drafting(REFERENCE, 15)
        engine = CapturingEngine(
            target_in(dtype), SERVE, TAPS, folder / "spool", drafting, final_states=True, sleeps=is_cuda()
        )
        told = {"prompts": [prompt.token_ids for prompt in prompts], **tell_ways(engine, prompts)}
        told["one by one"] = tell_one_by_one(engine, prompts)
        told["longest"] = tell_longest(engine, prompts)
        if is_cuda():
            told |= tell_sleep(engine, prompts)
        told |= tell_swaps(engine, prompts, folder)
        if dtype == "bfloat16":
            told |= tell_faults(engine, prompts, folder)
    torch.save(told, out)


if __name__ == "__main__":
    enter_environment()
    main(*sys.argv[1:])
