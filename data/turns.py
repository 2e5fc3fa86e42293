"""Which turns of a conversation the target answers, what is said before each, which sequences they make.

An event is one answer: the prompt's ids and the emitted ones.  Pure; `data/dialogue.py` has an engine between
the events.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from data.conversations import Conversation, Message
from data.template_source import TemplateSource

_ASKING = ("user", "tool")
_STRUCTURE = re.compile(r"[<\[].*[>\]]", re.DOTALL)
"""Added tokens that mark something; others are long words or runs of spaces."""


@dataclass(frozen=True)
class Event:
    """One answer of the target."""

    prompt_ids: Sequence[int]
    emitted_ids: Sequence[int]
    """With the end-of-turn token, if it came."""

    @property
    def token_ids(self) -> list[int]:
        return [*self.prompt_ids, *self.emitted_ids]


@dataclass(frozen=True)
class Joined:
    """Events in one text, that of the last of them."""

    first: int
    """The number of the first event."""
    events: Sequence[Event]

    @property
    def token_ids(self) -> list[int]:
        return self.events[-1].token_ids

    @property
    def spans(self) -> list[tuple[int, int]]:
        """[start, end) of what was emitted, ascending."""
        starts = [len(event.prompt_ids) for event in self.events]
        lengths = [len(event.emitted_ids) for event in self.events]
        return [(start, start + length) for start, length in zip(starts, lengths, strict=True)]

    @property
    def last(self) -> int:
        """The number of the last event."""
        return self.first + len(self.events) - 1

    def loss_mask(self) -> torch.Tensor:
        """[tokens] bool: the target emitted it."""
        mask = torch.zeros(len(self.token_ids), dtype=torch.bool)
        for start, end in self.spans:
            mask[start:end] = True
        return mask


def find_turns(conversation: Conversation) -> list[int]:
    """Where the target answers, each the number of messages that are said before; it may be all of them.

    After a user's or tool's message, unless calls of tools stand there whose results follow: the target's own
    calls may be others, so these stay as they are, as do the results.  What an assistant says after its own
    turn, or before anyone else, stays too.
    """
    said = conversation.messages
    return [
        index
        for index in range(1, len(said) + 1)
        if said[index - 1]["role"] in _ASKING and _is_answered(said[index : index + 2])
    ]


def _is_answered(following: Sequence[Message]) -> bool:
    """By the target, where these come next."""
    if not following:
        return True
    has_results = len(following) > 1 and following[1]["role"] == "tool"
    return following[0]["role"] == "assistant" and not (following[0].get("tool_calls") and has_results)


def say_before(
    conversation: Conversation, turns: Sequence[int], answers: Sequence[Message], number: int
) -> list[Message]:
    """The messages before turn `number`, earlier answers of the target's in their places, as far as given."""
    own = dict(zip(turns, answers, strict=False))
    return [own.get(index, message) for index, message in enumerate(conversation.messages[: turns[number]])]


def read_answer(event: Event, tokenizer: Any, source: TemplateSource) -> Message | None:
    """What the history holds of an answer that ended by itself; None where it cannot be told soundly.

    Reasoning is what stands before the end marker that the template knows, where the beginning was in the
    prompt's head or first in the answer; nothing is stripped, as the endpoint strips nothing.  None for a
    marker without the other, for a second pair, and for any other token that marks structure, a call above
    all: its results are not there.
    """
    emitted_ids = event.emitted_ids[:-1]  # the end of the turn is the template's to say
    markers = source.think_markers or ("", "")
    if _find_structure(tokenizer, set(emitted_ids)) - set(markers):
        return None
    text = _decode(tokenizer, emitted_ids)
    if not any(marker and marker in text for marker in markers) and not _is_open(
        tokenizer, event, markers[0]
    ):
        return {"role": "assistant", "content": text}
    return _split(text, markers, is_open=_is_open(tokenizer, event, markers[0]))


def _split(text: str, markers: tuple[str, str], *, is_open: bool) -> Message | None:
    begin, end = markers
    if not is_open:
        before, found, text = text.partition(begin)
        if not found or before.strip():
            return None
    reasoning, found, content = text.partition(end)
    if not found or any(marker in part for marker in markers for part in (reasoning, content)):
        return None
    return {"role": "assistant", "content": content, "reasoning_content": reasoning}


def _is_open(tokenizer: Any, event: Event, begin: str) -> bool:
    """Whether the head of the turn ends within reasoning."""
    head = _decode(tokenizer, event.prompt_ids[-16:])
    return bool(begin) and head.rstrip().endswith(begin)


def _find_structure(tokenizer: Any, ids: set[int]) -> set[str]:
    added = tokenizer.added_tokens_decoder
    return {added[id].content for id in ids if id in added and _STRUCTURE.fullmatch(added[id].content)}


def _decode(tokenizer: Any, ids: Sequence[int]) -> str:
    text: str = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text


def join_events(events: Sequence[Event]) -> list[Joined]:
    """An event whose prompt begins with all of the one before goes on in its sequence; others begin one.

    Where a template takes reasoning out of the history, each event has a sequence of its own.
    """
    if not events:
        return []
    starts = [0]
    for number, (earlier, later) in enumerate(pairwise(events), start=1):
        if list(later.prompt_ids[: len(earlier.token_ids)]) != earlier.token_ids:
            starts.append(number)
    ends = [*starts[1:], len(events)]
    return [Joined(start, events[start:end]) for start, end in zip(starts, ends, strict=True)]
