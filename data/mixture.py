"""Several sources of conversations mixed by weight, filtered, each said once, some held out.

Places are dealt to the sources by weight, one after the other, whatever their number; of each source those
conversations are taken whose ids come first.  So the first N are the same for every larger count.  Two that
differ in white space or case alone are one.  A source that a recipe names alone is read in its own order, and
there only two that are the same are one.  Called by `data.prompts`.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import nsmallest
from itertools import islice
from typing import get_args

from data.conversations import Conversation, Message, make_conversation
from data.shapes import RowError
from data.skips import Skips
from data.sources import Found, name_source, read_source
from recipes.schema import Data, Filters, Role, Source


@dataclass(frozen=True)
class Side:
    """Which conversations are wanted: those that are held out, or the others."""

    held_out_share: float = 0.0
    is_held_out: bool = False


@dataclass(frozen=True)
class Loaded:
    """What the prompts of a recipe come to."""

    conversations: list[Conversation]
    skips: list[Skips]
    """Of each source, in the recipe's order."""


def load_conversations(data: Data) -> Loaded:
    """Up to data.num_prompts to train on, each once, in an order that is the same at any time.

    Raises UserError for a source that cannot be read or has not one conversation.
    """
    return _load(data, data.num_prompts, Side(data.held_out_share))


def load_held_out(data: Data, count: int) -> Loaded:
    """As load_conversations, of those that are never trained on."""
    return _load(data, count, Side(data.held_out_share, is_held_out=True))


def load_source(name: str, count: int) -> Loaded:
    """Of a source that is known by its name alone."""
    return _load_alone(name_source(name), count, Side())


def _load(data: Data, count: int, side: Side) -> Loaded:
    if isinstance(data.prompts, str):
        return _load_alone(name_source(data.prompts), count, side)
    places = deal_places([source.weight for source in data.prompts], count)
    all_skips, seen = [Skips(source.label) for source in data.prompts], set[bytes]()
    taken = []
    for index, (source, skips) in enumerate(zip(data.prompts, all_skips, strict=True)):
        fit = _filter(read_source(source, skips), source.filters, skips)
        new = _take_new(_take_side(fit, side, skips), _key_loosely, seen, skips)
        share = places.count(index)
        taken.append(nsmallest(share, new, key=lambda conversation: conversation.id))
        skips.missing = share - len(taken[-1])
    queues = [iter(conversations) for conversations in taken]
    return Loaded([one for index in places for one in islice(queues[index], 1)], all_skips)


def _load_alone(source: Source, count: int, side: Side) -> Loaded:
    skips = Skips(source.label)
    new = _take_new(_take_side(read_source(source, skips), side, skips), _key_exactly, set(), skips)
    conversations = list(islice(new, count))
    for _ in new:  # what is bad behind them is told too
        pass
    return Loaded(conversations, [skips])


def deal_places(weights: Sequence[float], count: int) -> list[int]:
    """Which source has which place: the one that is furthest behind its weight, the earlier one of equals."""
    dealt = [0] * len(weights)
    places = []
    for _ in range(count):
        index = min(range(len(weights)), key=lambda each: (dealt[each] + 0.5) / weights[each])
        dealt[index] += 1
        places.append(index)
    return places


# What is left out


def _filter(given: Iterable[Found], filters: Filters, skips: Skips) -> Iterator[Found]:
    for place, conversation in given:
        problem = _find_filter(conversation, filters)
        if problem is None:
            yield place, conversation
        else:
            skips.add(place, problem)


def _find_filter(conversation: Conversation, filters: Filters) -> RowError | None:
    """The first that leaves it out."""
    messages = conversation.messages
    length = sum(len(message["content"]) for message in messages)
    turns = [message["content"] for message in messages if message["role"] == "user"]
    others = {message["role"] for message in messages} - set(filters.roles or get_args(Role))
    if others:
        return RowError("filters.roles", f"there is a {', a '.join(sorted(others))}")
    if length < filters.min_characters:
        return RowError("filters.min_characters", f"{length:,} characters")
    if filters.max_characters is not None and length > filters.max_characters:
        return RowError("filters.max_characters", f"{length:,} characters")
    if filters.user_matches and not any(re.search(filters.user_matches, turn) for turn in turns):
        return RowError("filters.user_matches", "found in no turn of the user's")
    if filters.user_avoids and any(re.search(filters.user_avoids, turn) for turn in turns):
        return RowError("filters.user_avoids", "found in a turn of the user's")
    return None


def _take_side(given: Iterable[Found], side: Side, skips: Skips) -> Iterator[Found]:
    for place, conversation in given:
        if is_apart(conversation, side.held_out_share) == side.is_held_out:
            yield place, conversation
        elif not side.is_held_out:
            skips.add(place, RowError("held_out", "for measuring (data.held_out_share)"))


def is_apart(conversation: Conversation, held_out_share: float) -> bool:
    """Whether it is held out: its first user's turn alone decides."""
    if not held_out_share:
        return False
    return int.from_bytes(digest_first_turn(conversation.messages)[:8]) < held_out_share * 2**64


def digest_first_turn(messages: Iterable[Message]) -> bytes:
    """Of the user's, white space and case apart."""
    return _digest([next(message["content"] for message in messages if message["role"] == "user")])


def _take_new(
    given: Iterable[Found], key: Callable[[Conversation], bytes], seen: set[bytes], skips: Skips
) -> Iterator[Conversation]:
    for place, conversation in given:
        found = key(conversation)
        if found in seen:
            skips.add(place, RowError("duplicate", "another before asks the same"))
        else:
            seen.add(found)
            yield conversation


def _key_exactly(conversation: Conversation) -> bytes:
    """Of all but the answer at the end, which the target gives anew."""
    return bytes.fromhex(make_conversation(_without_answer(conversation), conversation.tools).id)


def _key_loosely(conversation: Conversation) -> bytes:
    """The same, white space and case apart."""
    said = [str(value) for message in _without_answer(conversation) for value in message.values()]
    return _digest([*said, *map(json.dumps, conversation.tools)])


def _without_answer(conversation: Conversation) -> tuple[Message, ...]:
    messages = conversation.messages
    return messages[:-1] if messages[-1]["role"] == "assistant" else messages


def _digest(texts: Iterable[str]) -> bytes:
    """Of each text, white space and case apart."""
    alike = [" ".join(text.casefold().split()) for text in texts]
    return hashlib.sha256("\0".join(alike).encode()).digest()[:16]
