"""Conversations: what people and tools said, and where the target is to answer."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

Message = Mapping[str, Any]
"""As OpenAI's chat API has them: "role" and "content", an assistant's "tool_calls" and "reasoning_content", a
tool's "tool_call_id" and "name"; other fields are left out when a conversation is read."""


@dataclass(frozen=True)
class Conversation:
    """At least one message; the target answers where an assistant's message stands, and after the last."""

    id: str
    """16 hex digits of the sha256 of its messages and tools: two that say the same are the same."""
    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    """Schemas, as a chat template takes them."""
    source: str = ""
    """The name of where it comes from."""
    place: str = field(default="", compare=False)
    """Where it stands there: "line 3"."""


def make_conversation(
    messages: Iterable[Message], tools: Iterable[Mapping[str, Any]] = (), source: str = ""
) -> Conversation:
    """Of messages whose shape is right."""
    said, known = tuple(messages), tuple(tools)
    told: Any = list(said) if not known else {"messages": list(said), "tools": list(known)}
    digest = hashlib.sha256(json.dumps(told, ensure_ascii=False).encode()).hexdigest()
    return Conversation(digest[:16], said, known, source)
