"""One engine's part of the data phase: answers conversations, checks their states, writes shard files.

Runs in a process of its own (`data.engines` starts it and hears of what it did); the manifest is not its
business.
"""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from data import shards
from data.check_taps import NamedSequence
from data.dialogue import Dialogue, Reading
from data.groups import Rendered
from data.render import ChatTemplate, load_chat_template
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
    engine_steps: int
    """Of generating; most advance several answers."""
    read_tokens: int
    """Of given texts."""
    seconds: float
    """Of generating."""
    finish_reasons: Mapping[str, int]
    least_cosines: Mapping[int, float]
    """By tapped layer, over the states that were compared; empty where none was."""


@dataclass(frozen=True)
class Losses:
    """What a shard does not have of its conversations; the fields are those of its `ShardEntry`."""

    further: int
    incomplete: int
    dropped: Mapping[str, int]
    cut: Mapping[str, int]


@dataclass(frozen=True)
class Unwritten:
    """A shard that was generated."""

    number: int
    sequences: Sequence[NamedSequence]
    losses: Losses
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
        self._engine_steps = 0
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
        self._template: ChatTemplate | None = None

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
        """Answers every turn, and reads given texts.

        States stay in the spool's files, which have no names any more, for as long as what is returned lives.
        """
        start, steps_before = time.monotonic(), self._engine_steps
        dialogues = [self._begin(prompt) for prompt in prompts]
        answers = self._answer_all([each for each in dialogues if isinstance(each, Dialogue)])
        self._read_all([each for each in dialogues if isinstance(each, Reading)])
        seconds = time.monotonic() - start
        kept = [each for dialogue in dialogues for each in dialogue.sequences()]
        named = [each.named for each in kept]
        made = partial(
            Made,
            emitted_tokens=sum(len(answer.token_ids) for answer in answers),
            request_steps=sum(len(answer.chunks) for answer in answers),
            engine_steps=self._engine_steps - steps_before,
            read_tokens=sum(len(prompt.token_ids) for prompt in prompts if prompt.spans),
            seconds=seconds,
            finish_reasons=Counter(answer.finish_reason for answer in answers),
        )
        again = self._check.compare_again(number, named, [each.accepted for each in kept])
        return Unwritten(number, named, count_losses(dialogues), again, made)

    def write(self, shard: Unwritten) -> Made:
        """Looks through it first.  The engine may go on meanwhile, in another thread."""
        with_target = self._check.compare_with_target(shard.sequences)
        sequences = [each.sequence for each in shard.sequences]
        if self._recipe.data.final_states:
            sequences = [part_final(each, len(self._recipe.drafter.target_layer_ids)) for each in sequences]
        prompt_ids = [each.name for each in shard.sequences]
        sources = [each.source for each in shard.sequences]
        entry = write_shard_file(self._folder, shard.number, sequences, prompt_ids, sources)
        entry = entry.model_copy(update=asdict(shard.losses))
        return shard.made(entry=entry, least_cosines=merge_least(shard.again, with_target))

    def _begin(self, prompt: Rendered) -> Dialogue | Reading:
        if prompt.spans:
            return Reading(prompt)
        return Dialogue(prompt, self._recipe.data, self._template_for(prompt))

    def _read_all(self, readings: Sequence[Reading]) -> None:
        if not readings:
            return
        texts = [reading.prompt.token_ids for reading in readings]
        mean = sum(map(len, texts)) / len(texts)
        states = self._engine.read(texts, lambda _, finished: self._on_step(round(mean * finished), finished))
        for reading, hidden in zip(readings, states, strict=True):
            reading.add_states(hidden)

    def _template_for(self, prompt: Rendered) -> ChatTemplate | None:
        """Loaded once, where it is needed at all."""
        if self._template is None and prompt.num_turns > 1:
            self._template = load_chat_template(self._recipe.target)
        return self._template

    def _answer_all(self, dialogues: Sequence[Dialogue]) -> list[Answer]:
        """All first events together, then all second ones, until every dialogue has ended."""
        found = []
        while asking := [dialogue for dialogue in dialogues if dialogue.request is not None]:
            for dialogue, answer in zip(asking, self._answer(asking), strict=True):
                dialogue.add(answer)
                found.append(answer)
        return found

    def _answer(self, asking: Sequence[Dialogue]) -> list[Answer]:
        """One event of each, in their order; those of the same sampling at a time."""
        samplings = [self._choose_sampling(dialogue.prompt) for dialogue in asking]
        answers: dict[int, Answer] = {}
        for sampling in dict.fromkeys(samplings):
            alike = [number for number, chosen in enumerate(samplings) if chosen == sampling]
            requests = [request for number in alike if (request := asking[number].request) is not None]
            found = self._engine.answer(requests, sampling, self._step)
            answers |= zip(alike, found, strict=True)
        return [answers[number] for number in range(len(asking))]

    def _step(self, new_tokens: int, finished_answers: int) -> None:
        self._engine_steps += 1
        self._on_step(new_tokens, finished_answers)

    def _choose_sampling(self, prompt: Rendered) -> Sampling:
        return self._recipe.data.sampling_of(prompt.source).choose(prompt.seed)


def count_losses(dialogues: Sequence[Dialogue | Reading]) -> Losses:
    """What became of ended ones."""
    ends = [(len(dialogue.sequences()), dialogue.reason) for dialogue in dialogues]
    dropped = Counter(reason for kept, reason in ends if reason is not None and kept == 0)
    return Losses(
        further=sum(max(0, kept - 1) for kept, _ in ends),
        incomplete=dropped.pop("incomplete", 0),
        dropped={reason: count for reason, count in dropped.items() if reason != "empty_answer"},
        cut=dict(Counter(reason for kept, reason in ends if reason is not None and kept > 0)),
    )


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
