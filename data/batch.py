"""What an engine answers at a time: the prompts of a shard and, where those leave room, of the next one.

Called by data/shard_maker.py, which checks and writes the shards.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence

import torch

from data.dialogue import Dialogue, Reading
from recipes.schema import Recipe
from serve.generation import Answer, CapturingEngine, Step

OnStep = Callable[[int, int], None]
"""Called after each step of an engine with its new tokens and finished answers."""


class OpenShard:
    """A shard whose prompts are being answered, each dialogue one event after the other."""

    def __init__(self, number: int, dialogues: Sequence[Dialogue | Reading]) -> None:
        self.number = number
        self.dialogues = dialogues
        self.ready = deque(sorted(dialogues, key=lambda each: isinstance(each, Reading)))
        """Those whose request waits for room; texts that are only read come last."""
        self.running: dict[int, Dialogue | Reading] = {}
        """By the number of the request."""
        self.answers: list[Answer] = []
        self.engine_steps = 0
        self.seconds = 0.0
        self._ended: dict[int, Dialogue | Reading] = {}
        """Whose states were not asked for."""
        self._is_awaited = False

    @property
    def is_generated(self) -> bool:
        return not (self.ready or self.running or self._ended)

    @property
    def is_answering(self) -> bool:
        return any(isinstance(each, Dialogue) for each in self.running.values())

    def end(self, number: int) -> None:
        """The engine is done with a request."""
        dialogue = self._ended[number] = self.running.pop(number)
        self._is_awaited |= dialogue.goes_on or not (self.ready or self.running)

    def take_awaited(self) -> list[int]:
        """The ended requests, once a next turn or the shard waits for their states.

        Not one by one: the engine stands while files are finished.
        """
        awaited = list(self._ended) if self._is_awaited else []
        self._is_awaited = False
        return awaited

    def add(self, number: int, answer: Answer) -> None:
        """To a request that ended; what it leads to is ready."""
        dialogue = self._ended.pop(number)
        dialogue.add(answer)
        if isinstance(dialogue, Dialogue):
            self.answers.append(answer)
            if dialogue.request is not None:
                self.ready.append(dialogue)


class Batch:
    """An engine's requests: an earlier shard's are begun before a later one's, as many as there is room for.

    A step, and the time from the last one to its end, is the first shard's that is not generated yet, whoever
    else had a part in it; what a check alone reads is nobody's.
    """

    def __init__(self, recipe: Recipe, engine: CapturingEngine, on_step: OnStep) -> None:
        self._data, self._most_at_once = recipe.data, recipe.serve.max_num_seqs
        self._engine, self._on_step = engine, on_step
        self._shards: list[OpenShard] = []
        self._counted_until = 0.0

    @property
    def num_open(self) -> int:
        return len(self._shards)

    @property
    def wants_more(self) -> bool:
        """Every request that can be was begun."""
        return not any(shard.ready for shard in self._shards)

    def add(self, shard: OpenShard) -> None:
        if self._find_current() is None:
            self._counted_until = time.monotonic()
        self._shards.append(shard)

    def step(self) -> None:
        """One of the engine, if there is something to do."""
        if (current := self._find_current()) is None:
            return
        self._fill()
        step = self._engine.step()
        current.engine_steps += any(shard.is_answering for shard in self._shards)
        self._tell(step)
        self._go_on(step)
        now = time.monotonic()
        current.seconds += now - self._counted_until
        self._counted_until = now

    def take_generated(self) -> list[OpenShard]:
        """They are open no longer."""
        generated = [shard for shard in self._shards if shard.is_generated]
        self._shards = [shard for shard in self._shards if not shard.is_generated]
        return generated

    def read(self, texts: Sequence[Sequence[int]]) -> list[torch.Tensor | None]:
        """As the engine's, while the open shards go on."""
        numbers = [self._engine.begin_reading(text) for text in texts]
        while not all(map(self._engine.has_ended, numbers)):
            if self._find_current() is None:
                self._engine.step()
            else:
                self.step()
        return [answer.hidden for answer in self._engine.collect(numbers)]

    def _find_current(self) -> OpenShard | None:
        return next((shard for shard in self._shards if not shard.is_generated), None)

    def _fill(self) -> None:
        room = self._most_at_once - sum(len(shard.running) for shard in self._shards)
        for shard in self._shards:
            while shard.ready and room > 0:
                dialogue = shard.ready.popleft()
                shard.running[self._begin(dialogue)] = dialogue
                room -= 1

    def _begin(self, dialogue: Dialogue | Reading) -> int:
        if isinstance(dialogue, Reading):
            return self._engine.begin_reading(dialogue.prompt.token_ids)
        prompt = dialogue.prompt
        assert dialogue.request is not None, prompt.id
        return self._engine.begin(dialogue.request, self._data.sampling_of(prompt.source).choose(prompt.seed))

    def _tell(self, step: Step) -> None:
        """Of the shards' requests: a check's are no answers.  A text that was read counts with its length."""
        running = {number: each for shard in self._shards for number, each in shard.running.items()}
        ended = [running[number] for number in step.ended if number in running]
        read = [each for each in ended if isinstance(each, Reading)]
        answering = [number for number, each in running.items() if isinstance(each, Dialogue)]
        emitted = sum(step.grown.get(number, 0) for number in answering)
        self._on_step(emitted + sum(len(each.prompt.token_ids) for each in read), len(ended))

    def _go_on(self, step: Step) -> None:
        for shard in self._shards:
            for number in step.ended:
                if number in shard.running:
                    shard.end(number)
            awaited = shard.take_awaited()
            for number, answer in zip(awaited, self._engine.collect(awaited), strict=True):
                shard.add(number, answer)
