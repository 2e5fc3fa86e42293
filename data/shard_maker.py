"""One engine's part of the data phase: answers groups of prompts, checks their states, writes shard files.

Runs in a process of its own (`data.engines` starts it and hears of what it did); the manifest is not its
business.
"""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from data import shards
from data.check_taps import NamedSequence
from data.groups import Rendered
from data.shard_check import ShardCheck
from data.shards import write_shard_file
from recipes.errors import UserError
from recipes.manifest import Pulse, ShardEntry
from recipes.schema import Recipe, Sampling
from serve.generation import Answer, CapturingEngine, Drafting, OnStep, Request


@dataclass(frozen=True)
class Made:
    """A shard, whole on the disk."""

    entry: ShardEntry
    emitted_tokens: int
    request_steps: int
    """Over the answers: steps in which one grew."""
    seconds: float
    """Of generating."""
    finish_reasons: Mapping[str, int]
    least_cosines: Mapping[int, float]
    """By tapped layer, over the states that were compared; empty where none was."""


@dataclass(frozen=True)
class Unwritten:
    """A shard that was generated."""

    number: int
    sequences: Sequence[NamedSequence]
    incomplete: int
    again: Mapping[int, float]
    """Layer -> the least cosine, with what the engine read again."""
    made: "partial[Made]"
    """What there is to tell of it, the file's entry and the cosines left out."""


class ShardMaker:
    """A capturing engine and where its shards go.  Each is checked before it is written."""

    def __init__(
        self, recipe: Recipe, folder: Path, spool: Path, on_step: OnStep, drafting: Drafting | None = None
    ) -> None:
        self._recipe = recipe
        self._folder = folder
        self._on_step = on_step
        layers = recipe.drafter.target_layer_ids
        sleeps = drafting is not None and recipe.rounds.engines_sleep
        final_states = recipe.data.final_states
        self._engine = CapturingEngine(
            recipe.target,
            recipe.serve,
            layers,
            spool,
            drafting,
            final_states=final_states,
            sleeps=sleeps,
        )
        self._check = ShardCheck(recipe, self._engine.read)

    def swap(self, ckpt: Path) -> None:
        """Another checkpoint drafts from now on."""
        self._engine.swap(ckpt)
        self._check.begin_anew()

    def sleep(self) -> None:
        """Leaves the GPU."""
        self._engine.sleep()

    def wake(self) -> None:
        self._engine.wake()

    def measure(self, prompts: Sequence[Rendered], sampling: Sampling, *, is_chain: bool) -> Pulse:
        """What the engine accepts on these prompts, whose answers are kept nowhere."""
        requests = [Request(prompt.token_ids, prompt.seed) for prompt in prompts]
        answers = self._engine.answer(requests, sampling, lambda *_: None, is_chain=is_chain)
        return count_pulse(answers, sampling.temperature, is_chain=is_chain)

    def make(self, number: int, prompts: Sequence[Rendered]) -> Made:
        return self.write(self.generate(number, prompts))

    def generate(self, number: int, prompts: Sequence[Rendered]) -> Unwritten:
        """Its states stay in the spool's files, which have no names any more, for as long as it lives."""
        start = time.monotonic()
        answers = self._answer(prompts)
        seconds = time.monotonic() - start
        pairs = zip(prompts, answers, strict=True)
        kept = [(prompt, answer) for prompt, answer in pairs if is_whole(answer) and not is_empty(answer)]
        named = [NamedSequence(prompt.id, make_sequence(prompt, answer)) for prompt, answer in kept]
        accepted = [count_accepted(answer) for _, answer in kept]
        made = partial(
            Made,
            emitted_tokens=sum(len(answer.token_ids) for answer in answers),
            request_steps=sum(len(answer.chunks) for answer in answers),
            seconds=seconds,
            finish_reasons=Counter(answer.finish_reason for answer in answers),
        )
        again = self._check.compare_again(number, named, accepted)
        return Unwritten(number, named, sum(not is_whole(answer) for answer in answers), again, made)

    def write(self, shard: Unwritten) -> Made:
        """Looks through it first.  The engine may go on meanwhile, in another thread."""
        with_target = self._check.compare_with_target(shard.sequences)
        sequences = [each.sequence for each in shard.sequences]
        if self._recipe.data.final_states:
            sequences = [part_final(each, len(self._recipe.drafter.target_layer_ids)) for each in sequences]
        prompt_ids = [each.name for each in shard.sequences]
        entry = write_shard_file(self._folder, shard.number, sequences, prompt_ids)
        entry = entry.model_copy(update={"incomplete": shard.incomplete})
        return shard.made(entry=entry, least_cosines=merge_least(shard.again, with_target))

    def _answer(self, prompts: Sequence[Rendered]) -> list[Answer]:
        requests = [Request(prompt.token_ids, prompt.seed) for prompt in prompts]
        return self._engine.answer(requests, self._recipe.data.sampling, self._on_step)


def merge_least(*found: Mapping[int, float]) -> dict[int, float]:
    """Layer -> the least over all."""
    layers = dict.fromkeys(layer for each in found for layer in each)
    return {layer: min(each[layer] for each in found if layer in each) for layer in layers}


def part_final(sequence: shards.Sequence, num_taps: int) -> shards.Sequence:
    """The final states were captured as one more tap."""
    width = sequence.hidden.shape[1] // (num_taps + 1) * num_taps
    return replace(sequence, hidden=sequence.hidden[:, :width], final=sequence.hidden[:, width:])


def count_pulse(answers: Sequence[Answer], temperature: float, *, is_chain: bool) -> Pulse:
    """As `eval.acceptance` counts: an answer's first chunk is the prefill's, each further one a step's."""
    sizes = [size for answer in answers for size in answer.chunks[1:]]
    if not sizes:
        raise UserError("a pulse took no verification step: raise rounds.pulse_prompts or eval.max_tokens")
    return Pulse(
        temperature=temperature,
        is_chain=is_chain,
        steps=len(sizes),
        committed_tokens=sum(sizes),
        reached=[sum(size > depth for size in sizes) for depth in range(1, max(sizes))],
    )


def is_whole(answer: Answer) -> bool:
    """Its text and the states of it."""
    return answer.hidden is not None


def is_empty(answer: Answer) -> bool:
    """Nothing but the end of the turn."""
    return answer.finish_reason == "stop" and len(answer.token_ids) <= 1


def count_accepted(answer: Answer) -> int:
    """Drafts in it: each step after the prefill's adds a token of the target's own."""
    return sum(size - 1 for size in answer.chunks[1:])


def make_sequence(prompt: Rendered, answer: Answer) -> shards.Sequence:
    """Of a whole answer."""
    assert answer.hidden is not None
    token_ids = [*prompt.token_ids, *answer.token_ids]
    is_emitted = torch.arange(len(token_ids)) >= len(prompt.token_ids)
    return shards.Sequence(torch.tensor(token_ids, dtype=torch.int32), is_emitted, answer.hidden)
