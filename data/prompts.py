"""Prompts: what the target is asked, from a named source and always in the same order."""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from data.conversations import Conversation, Message, make_conversation
from data.mixture import load_held_out, load_source
from data.skips import describe_skips
from recipes.errors import UserError
from recipes.schema import Data

DATA_HELDOUT = "data:heldout"
"""The suite of what a recipe's own sources hold out (data.held_out_share)."""
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prompt:
    """A conversation the target is to answer."""

    id: str
    """16 hex digits of the sha256 of its messages and tools."""
    messages: tuple[Message, ...]
    """Each with "role" and "content"; the last is the user's, or a tool's."""
    tools: tuple[Mapping[str, Any], ...] = ()


def load_prompts(source: str, count: int) -> list[Prompt]:
    """Up to `count` prompts, each once: a file's in its order, the standard library's shuffled.

    Rows that are no conversations are left out and logged by number.
    Raises UserError for an unknown source, a missing file, or one without a single conversation.
    """
    loaded = load_source(source, count)
    if told := describe_skips(loaded.skips):
        _LOG.warning(told)
    return _each_once(loaded.conversations)


def load_suite_prompts(suite: str, count: int, training: Data | None) -> list[Prompt]:
    """As load_prompts; `data:heldout` is what `training` holds out.

    Raises UserError for `data:heldout` where there is no such data, and for prompts with tools, which
    measuring does not send.
    """
    prompts = _load_held_out(training, count) if suite == DATA_HELDOUT else load_prompts(suite, count)
    if any(prompt.tools for prompt in prompts):
        raise UserError(f"suite {suite}: its prompts have tools, which measuring does not send; name another")
    return prompts


def _load_held_out(training: Data | None, count: int) -> list[Prompt]:
    if training is None or not training.held_out_share:
        raise UserError(
            f"suite {DATA_HELDOUT}: nothing is held out; write a recipe with data.held_out_share above 0"
        )
    return _each_once(load_held_out(training, count).conversations)


def _each_once(conversations: Iterable[Conversation]) -> list[Prompt]:
    """Two may begin alike."""
    prompts = map(as_prompt, conversations)
    return list({prompt.id: prompt for prompt in prompts}.values())


def make_prompt(messages: Iterable[Message]) -> Prompt:
    plain = [{"role": message["role"], "content": message["content"]} for message in messages]
    return as_prompt(make_conversation(plain))


def as_prompt(conversation: Conversation) -> Prompt:
    """What the target is asked first: up to a turn that is open, or else without the answer at the end."""
    messages = conversation.messages
    is_open = [each["role"] == "assistant" and says_nothing(each) for each in messages]
    end = len(messages) - (messages[-1]["role"] == "assistant")
    asked = make_conversation(messages[: is_open.index(True) if any(is_open) else end], conversation.tools)
    return Prompt(asked.id, asked.messages, asked.tools)


def says_nothing(message: Message) -> bool:
    return not message["content"] and "tool_calls" not in message
