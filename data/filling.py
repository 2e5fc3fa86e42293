"""Makes the missing shards of a plan: has the engine answer each group, checks the taps once, writes."""

import shutil
import time
from collections import Counter
from dataclasses import dataclass, field

import torch

from data.answer_bar import AnswerBar, answer_bar
from data.check_taps import HookedTarget, NamedSequence, check_taps
from data.groups import Rendered
from data.shard_plan import ShardPlan
from data.shards import Sequence
from serve.generation import Answer, CapturingEngine, Request


@dataclass
class Tally:
    """What one run of the data phase did."""

    emitted_tokens: int = 0
    seconds: float = 0.0
    """Of generating, the start of the engine and the checks left out."""
    finish_reasons: Counter[str] = field(default_factory=Counter)
    least_cosines: dict[int, float] = field(default_factory=dict)
    """By tapped layer, where they were checked."""


def fill_shards(plan: ShardPlan) -> Tally:
    """Raises MachineError if the taps are not the transformers model's; no shard is written then."""
    tally = Tally()
    if plan.missing:
        _generate(plan, tally)
    if not plan.writer.manifest.complete:
        plan.writer.finish(plan.count_dropped())
    return tally


def _generate(plan: ShardPlan, tally: Tally) -> None:
    recipe = plan.recipe
    engine = CapturingEngine(recipe.target, recipe.serve, recipe.drafter.target_layer_ids, plan.spool)
    with answer_bar(sum(len(plan.groups[number]) for number in plan.missing)) as bar:
        for number in plan.missing:
            _make_shard(plan, engine, number, bar, tally)
    shutil.rmtree(plan.spool)


def _make_shard(plan: ShardPlan, engine: CapturingEngine, number: int, bar: AnswerBar, tally: Tally) -> None:
    """Its states stay in the spool's files, which are gone from the disk when this returns."""
    answers = _answer(plan, engine, number, bar, tally)
    named = [
        NamedSequence(prompt.id, make_sequence(prompt, answer))
        for prompt, answer in zip(plan.groups[number], answers, strict=True)
        if not is_empty(answer)
    ]
    if number == plan.missing[0]:
        _check(plan, named, tally)
    sequences, prompt_ids = [each.sequence for each in named], [each.name for each in named]
    entry = plan.writer.write_shard(number, sequences, prompt_ids)
    bar.tell(f"{entry.file}: {entry.sequences} sequences, {entry.tokens} tokens")


def _answer(
    plan: ShardPlan, engine: CapturingEngine, number: int, bar: AnswerBar, tally: Tally
) -> list[Answer]:
    requests = [Request(prompt.token_ids, prompt.seed) for prompt in plan.groups[number]]
    start = time.monotonic()
    answers = engine.answer(requests, plan.recipe.data.sampling, bar.advance)
    tally.seconds += time.monotonic() - start
    tally.emitted_tokens += sum(len(answer.token_ids) for answer in answers)
    tally.finish_reasons.update(answer.finish_reason for answer in answers)
    return answers


def is_empty(answer: Answer) -> bool:
    """Nothing but the end of the turn."""
    return answer.finish_reason == "stop" and len(answer.token_ids) <= 1


def make_sequence(prompt: Rendered, answer: Answer) -> Sequence:
    token_ids = [*prompt.token_ids, *answer.token_ids]
    is_emitted = torch.arange(len(token_ids)) >= len(prompt.token_ids)
    return Sequence(torch.tensor(token_ids, dtype=torch.int32), is_emitted, answer.hidden)


def _check(plan: ShardPlan, named: list[NamedSequence], tally: Tally) -> None:
    """On the first shard this run makes, before it is written."""
    data, layers = plan.recipe.data, plan.recipe.drafter.target_layer_ids
    if data.check_sequences:
        reference = HookedTarget(plan.recipe.target, layers)
        sample = named[: data.check_sequences]
        tally.least_cosines = check_taps(sample, reference.compute_taps, layers, data.check_cosine)
