"""What stubs of `serve.generation.CapturingEngine` share: requests begin at any time, steps let them grow.

A request lasts as many steps as its answer has chunks, a reading one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from recipes.schema import Sampling
from serve.generation import Answer, Request, Step


@dataclass
class Grown:
    answer: Answer
    num_steps: int = 0

    @property
    def has_ended(self) -> bool:
        return self.num_steps >= max(1, len(self.answer.chunks))


@dataclass
class SteppingStub:
    """Subclasses say what is answered."""

    num_begun: int = 0
    at_once: list[list[int]] = field(default_factory=list)
    """Of each step, the numbers of the requests that ran."""
    _asked: dict[int, tuple[Request, Sampling]] = field(default_factory=dict)
    _texts: dict[int, Sequence[int]] = field(default_factory=dict)
    _grown: dict[int, Grown] = field(default_factory=dict)

    def answer_together(
        self, numbers: Sequence[int], requests: Sequence[Request], samplings: Sequence[Sampling]
    ) -> list[Answer]:
        """Requests that begin with the same step."""
        raise NotImplementedError

    def read_together(self, texts: Sequence[Sequence[int]]) -> Sequence[torch.Tensor | None]:
        raise NotImplementedError

    def begin(self, request: Request, sampling: Sampling, *, is_chain: bool = False) -> int:
        self._asked[self.num_begun] = request, sampling
        self.num_begun += 1
        return self.num_begun - 1

    def begin_reading(self, text: Sequence[int]) -> int:
        self._texts[self.num_begun] = text
        self.num_begun += 1
        return self.num_begun - 1

    def step(self) -> Step:
        self._begin_all()
        running = {number: each for number, each in self._grown.items() if not each.has_ended}
        assert running, "nothing runs"
        self.at_once.append(list(running))
        for each in running.values():
            each.num_steps += 1
        chunks = {number: each.answer.chunks[each.num_steps - 1 :] for number, each in running.items()}
        return Step(
            {number: left[0] for number, left in chunks.items() if left},
            [number for number, each in running.items() if each.has_ended],
        )

    def _begin_all(self) -> None:
        if self._asked:
            answers = self.answer_together(list(self._asked), *zip(*self._asked.values(), strict=True))
            self._grown |= {number: Grown(each) for number, each in zip(self._asked, answers, strict=True)}
        if self._texts:
            states = self.read_together(list(self._texts.values()))
            self._grown |= {
                number: Grown(Answer([0], "length", hidden, [1]))
                for number, hidden in zip(self._texts, states, strict=True)
            }
        self._asked, self._texts = {}, {}

    def has_ended(self, number: int) -> bool:
        return number in self._grown and self._grown[number].has_ended

    def collect(self, numbers: Sequence[int]) -> list[Answer]:
        assert all(map(self.has_ended, numbers)), numbers
        return [self._grown.pop(number).answer for number in numbers]

    def answer(
        self, requests: Sequence[Request], sampling: Sampling, *, is_chain: bool = False
    ) -> list[Answer]:
        numbers = [self.begin(request, sampling) for request in requests]
        while not all(map(self.has_ended, numbers)):
            self.step()
        return self.collect(numbers)
