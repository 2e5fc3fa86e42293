"""One engine's part of the data phase: answers conversations, checks their states, writes shard files.

Runs in a process of its own (`data.engines` starts it and hears of what it did); the manifest is not its
business.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from data import shards
from data.batch import Batch, OnStep, OpenShard
from data.check_taps import NamedSequence
from data.dialogue import Dialogue, Reading
from data.groups import Rendered
from data.render import ChatTemplate, load_chat_template
from data.shard_check import ShardCheck
from data.shards import write_shard_file
from recipes.errors import UserError
from recipes.manifest import Pulse, ShardEntry
from recipes.schema import Recipe, Sampling
from serve.generation import Answer, CapturingEngine, Drafting, Request


@dataclass(frozen=True)
class Made:
    """A shard, whole on the disk."""

    entry: ShardEntry
    emitted_tokens: int
    request_steps: int
    """Over the answers: steps in which one grew."""
    engine_steps: int
    """Of generating; most advance several answers.  Each is one shard's, as `data.batch.Batch` says."""
    read_tokens: int
    """Of given texts."""
    seconds: float
    """Of generating: of those steps."""
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
    """A capturing engine and where its shards go, of which several may be open.

    Each is checked before it is written.
    """

    def __init__(
        self, recipe: Recipe, folder: Path, spool: Path, on_step: OnStep, drafting: Drafting | None = None
    ) -> None:
        self._recipe = recipe
        self._folder = folder
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
        self._batch = Batch(recipe, self._engine, on_step)
        self._check = ShardCheck(recipe, self._batch.read)
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
        answers = self._engine.answer(requests, sampling, is_chain=is_chain)
        return count_pulse(answers, sampling.temperature, is_chain=is_chain)

    def make(self, number: int, prompts: Sequence[Rendered]) -> Made:
        """From its first prompt to its file, with no other shard beside it."""
        self.begin(number, prompts)
        while not (generated := self.step()):
            pass
        (shard,) = generated
        return self.write(shard)

    @property
    def num_open(self) -> int:
        """Shards that were begun and are not generated yet."""
        return self._batch.num_open

    @property
    def wants_more(self) -> bool:
        """All that the open shards can ask the engine now was begun."""
        return self._batch.wants_more

    def begin(self, number: int, prompts: Sequence[Rendered]) -> None:
        """Opens a shard; the prompts of an earlier one are begun before its own."""
        self._batch.add(OpenShard(number, [self._begin(prompt) for prompt in prompts]))

    def step(self) -> list[Unwritten]:
        """One step of the engine for the open shards; those that are generated with it.

        States stay in the spool's files, which have no names any more, for as long as what is returned lives.
        """
        self._batch.step()
        return [self._close(shard) for shard in self._batch.take_generated()]

    def _close(self, shard: OpenShard) -> Unwritten:
        kept = [each for dialogue in shard.dialogues for each in dialogue.sequences()]
        named = [each.named for each in kept]
        made = partial(
            Made,
            emitted_tokens=sum(len(answer.token_ids) for answer in shard.answers),
            request_steps=sum(len(answer.chunks) for answer in shard.answers),
            engine_steps=shard.engine_steps,
            read_tokens=sum(len(each.prompt.token_ids) for each in shard.dialogues if each.prompt.spans),
            seconds=shard.seconds,
            finish_reasons=Counter(answer.finish_reason for answer in shard.answers),
        )
        again = self._check.compare_again(shard.number, named, [each.accepted for each in kept])
        return Unwritten(shard.number, named, count_losses(shard.dialogues), again, made)

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

    def _template_for(self, prompt: Rendered) -> ChatTemplate | None:
        """Loaded once, where it is needed at all."""
        if self._template is None and prompt.num_turns > 1:
            self._template = load_chat_template(self._recipe.target)
        return self._template


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
