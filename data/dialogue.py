"""A conversation as the target answers it, one event after the other, and what of it makes sequences.

Called by data/batch.py, which has the engine.
"""

import hashlib
from dataclasses import dataclass

import torch

from data import shards
from data.check_taps import NamedSequence
from data.conversations import Message
from data.given_text import GivenText
from data.groups import Rendered
from data.render import ChatTemplate
from data.turns import Event, Joined, join_events, read_answer, say_before
from recipes.errors import UserError
from recipes.schema import Data
from serve.generation import Answer, Request


@dataclass(frozen=True)
class Kept:
    """A sequence, and how many drafts were accepted while its states were captured."""

    named: NamedSequence
    accepted: int


class Dialogue:
    """One conversation.  It has a request until it ends, whose answer is added."""

    def __init__(self, prompt: Rendered, data: Data, template: ChatTemplate | None) -> None:
        """template: the target's; only a prompt with further turns needs one."""
        self.prompt = prompt
        self.request: Request | None = Request(prompt.token_ids, prompt.seed)
        self.reason: str | None = None
        """Why there is no answer to some turn; None where each has one, or is still to come."""
        self._data, self._template = data, template
        self._said: list[Message] = []
        self._events: list[Event] = []
        self._answers: list[Answer] = []

    @property
    def goes_on(self) -> bool:
        """With another turn, if the answer to the request is one to go on from."""
        return len(self._said) + 1 < self.prompt.num_turns

    def add(self, answer: Answer) -> None:
        """To the request."""
        assert self.request is not None, self.prompt.id
        event = Event(self.request.token_ids, answer.token_ids)
        fault = self._find_fault(answer)
        if fault is None:
            self._events.append(event)
            self._answers.append(answer)
        goes_on = self.goes_on
        self.request = None
        if fault is None and goes_on:
            fault = "truncated" if is_truncated(answer) else self._go_on(event)
        self.reason = fault

    def sequences(self) -> list[Kept]:
        """In order; states are those of each one's last event, whose prefill read all that came before."""
        return [self._keep(joined) for joined in join_events(self._events)]

    def _find_fault(self, answer: Answer) -> str | None:
        """Why it is not kept."""
        if not is_whole(answer):
            return "incomplete"
        if is_empty(answer):
            return "empty_answer"
        return "truncated" if is_truncated(answer) and not self._data.keep_truncated else None

    def _go_on(self, event: Event) -> str | None:
        """Makes the next request, or says why there is none."""
        prompt, template = self.prompt, self._template
        assert prompt.conversation is not None and template is not None, prompt.id
        tools = prompt.conversation.tools
        message = read_answer(event, template.tokenizer, template.source(tools))
        if message is None:
            return "unreadable_answer"
        self._said.append(message)
        number = len(self._said)
        messages = say_before(prompt.conversation, prompt.turns, self._said, number)
        try:
            token_ids = template.render(messages, tools, prompt.thinking)
        except UserError:
            return "refused_by_template"
        if len(token_ids) > self._data.max_prompt_tokens:
            return "prompt_too_long"
        self.request = Request(token_ids, draw_seed(prompt, number))
        return None

    def _keep(self, joined: Joined) -> Kept:
        answer = self._answers[joined.last]
        assert answer.hidden is not None
        token_ids = torch.tensor(joined.token_ids, dtype=torch.int32)
        sequence = shards.Sequence(token_ids, joined.loss_mask(), answer.hidden)
        name = f"{self.prompt.id}-{joined.first}" if joined.first else self.prompt.id
        return Kept(NamedSequence(name, sequence, self.prompt.source), count_accepted(answer))


class Reading:
    """A given text, whose states are read; beside dialogues it is one that asks nothing."""

    goes_on = False

    def __init__(self, prompt: Rendered) -> None:
        self.prompt = prompt
        self.reason: str | None = "incomplete"
        """As a dialogue's; until its states are there."""
        self._hidden: torch.Tensor | None = None

    def add(self, answer: Answer) -> None:
        """Its states alone, None where the engine gave the text up."""
        self._hidden = answer.hidden
        self.reason = None if is_whole(answer) else "incomplete"

    def sequences(self) -> list[Kept]:
        """One, or none where the states are not there."""
        if self._hidden is None:
            return []
        text = GivenText(self.prompt.token_ids, list(self.prompt.spans))
        token_ids = torch.tensor(text.token_ids, dtype=torch.int32)
        sequence = shards.Sequence(token_ids, text.loss_mask(), self._hidden)
        return [Kept(NamedSequence(self.prompt.id, sequence, self.prompt.source), accepted=0)]


def draw_seed(prompt: Rendered, number: int) -> int:
    """Of the sampling of its event `number`: 60 bits."""
    if number == 0:
        return prompt.seed
    return int(hashlib.sha256(f"{prompt.id} {number}".encode()).hexdigest()[:15], 16)


def is_whole(answer: Answer) -> bool:
    """Its text and the states of it."""
    return answer.hidden is not None


def is_empty(answer: Answer) -> bool:
    """Nothing but the end of the turn."""
    return answer.finish_reason == "stop" and len(answer.token_ids) <= 1


def is_truncated(answer: Answer) -> bool:
    return answer.finish_reason == "length"


def count_accepted(answer: Answer) -> int:
    """Drafts in it: each step after the prefill's adds a token of the target's own."""
    return sum(size - 1 for size in answer.chunks[1:])
