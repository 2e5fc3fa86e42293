"""The shapes that people keep conversations in, one row -> `Conversation`, or the reason why it is none.

OpenAI's `messages`, ShareGPT's `conversations` of from and value, Alpaca's instruction, input and output, a
prompt and its response, a question and its answer, and text, which is one user's turn.  A row's columns tell
which, or a recipe's `columns`.  Nothing is mended: a row that breaks a rule is left out whole, and `RowError`
has the words for the skip report.  Called by `data.sources`.
"""

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from data.conversations import Conversation, make_conversation

Row = Mapping[str, Any]

_CHATS = ("messages", "conversations", "conversation")
_ASKED = ("instruction", "prompt", "question", "text")
_ANSWERED = ("output", "response", "completion", "answer")
_SYSTEMS = ("system", "system_prompt")
_ROLES = {
    **{"system": "system", "developer": "system"},
    **{"user": "user", "human": "user"},
    **{"assistant": "assistant", "gpt": "assistant", "model": "assistant", "function_call": "assistant"},
    **{"tool": "tool", "observation": "tool", "function": "tool", "function_response": "tool"},
}
_AFTER = {  # who may speak next
    "system": ("user",),
    "user": ("assistant",),
    "assistant": ("user", "tool"),
    "tool": ("assistant", "tool"),
}


class RowError(ValueError):
    """Why a row is left out."""

    def __init__(self, reason: str, found: str) -> None:
        super().__init__(f"{reason}: {found}")
        self.reason = reason
        """One of few, to be counted: "unknown_role"."""
        self.found = found
        """In this row."""


def read_conversation(
    row: Any, source: str = "", columns: Mapping[str, str] | None = None, *, has_open_turns: bool = False
) -> Conversation:
    """Raises RowError for a row that is no conversation.

    `columns` maps what this file calls columns (`messages`, `prompt`, `tools`, ...) to what the data set
    calls them; then no other column of the row is looked at, and each must be there.
    has_open_turns: an assistant's message may be empty: there the target answers before the user goes on.
    """
    if isinstance(row, str):
        row = {"text": row}
    if not isinstance(row, Mapping):
        raise RowError("wrong_type", f"expected an object or text, found {_show(row)}")
    named = row if columns is None else _rename(row, columns)
    messages = [_read_message(message, has_open_turns) for message in _find_messages(named)]
    _check_order([message["role"] for message in messages])
    try:
        return make_conversation(messages, _read_tools(named.get("tools")), source)
    except UnicodeEncodeError as error:  # JSON may escape half of a pair, and bytes may be no UTF-8
        raise RowError("not_utf8", f"a lone surrogate, {error.object[error.start]!a}") from error


def _rename(row: Row, columns: Mapping[str, str]) -> Row:
    missing = [name for name in columns.values() if name not in row]
    if missing:
        raise RowError("missing_column", f"no {', '.join(missing)}; the row has {', '.join(map(str, row))}")
    return {ours: row[theirs] for ours, theirs in columns.items()}


# Which columns


def _find_messages(row: Row) -> list[Any]:
    """As the row has them, but for their being a list."""
    chat, asked = _first_set(row, _CHATS), _first_set(row, _ASKED)
    if chat is None and asked is None:
        known = [name for name in (*_CHATS, *_ASKED) if name in row]
        if known:
            raise RowError("null_content", f"nothing in {', '.join(known)}")
        raise RowError("unknown_shape", f"the columns {', '.join(map(str, row)) or 'of no name'}")
    messages = _listed(row, chat) if chat else _pair(row, str(asked))
    system = _first_set(row, _SYSTEMS)
    if system is None or row[system] == "" or _is_system(messages):
        return messages
    return [{"role": "system", "content": row[system]}, *messages]


def _first_set(row: Row, names: Sequence[str]) -> str | None:
    return next((name for name in names if row.get(name) is not None), None)


def _is_system(messages: Sequence[Any]) -> bool:
    first = messages[0] if messages else None
    return isinstance(first, Mapping) and _ROLES.get(str(first.get("role", first.get("from")))) == "system"


def _listed(row: Row, name: str) -> list[Any]:
    if not isinstance(row[name], list):
        raise RowError("wrong_type", f"expected a list in {name}, found {_show(row[name])}")
    return row[name]


def _pair(row: Row, asked: str) -> list[Any]:
    """A prompt, which may be a list of messages, and the response to it if there is one."""
    question = row[asked] if isinstance(row[asked], list) else [_said("user", _join_input(row, asked))]
    known = [name for name in _ANSWERED if name in row]
    if not known:
        return question
    answered = _first_set(row, known)
    if answered is None:
        raise RowError("null_content", f"nothing in {', '.join(known)}")
    answer = row[answered]
    return question + (answer if isinstance(answer, list) else [_said("assistant", answer)])


def _join_input(row: Row, asked: str) -> Any:
    """Alpaca's instruction has what it is about in a column of its own."""
    about = row.get("input") if asked == "instruction" else None
    if about is None or about == "":
        return row[asked]
    if not isinstance(about, str) or not isinstance(row[asked], str):
        raise RowError("wrong_type", f"expected text in instruction and input, found {_show(about)}")
    return f"{row[asked]}\n\n{about}"


def _said(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


# One message


def _read_message(message: Any, may_be_open: bool) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RowError("wrong_type", f"expected a message, found {_show(message)}")
    said = message.get("role", message.get("from"))
    role = _ROLES.get(said) if isinstance(said, str) else None
    if role is None:
        raise RowError("unknown_role", f"found {_show(said)}; known are {', '.join(_ROLES)}")
    content = message.get("content", message.get("value"))
    if said == "function_call":
        return {"role": role, "content": "", "tool_calls": _read_calls(_parse(content, "bad_tool_call"))}
    calls = _read_calls(message.get("tool_calls")) if role == "assistant" else []
    says_nothing = bool(calls) or (may_be_open and role == "assistant")
    read: dict[str, Any] = {"role": role, "content": _read_content(content, role, says_nothing)}
    if calls:
        read["tool_calls"] = calls
    for ours, theirs in _extras(role):
        if isinstance(message.get(theirs), str) and message[theirs] and ours not in read:
            read[ours] = message[theirs]
    return read


def _extras(role: str) -> Sequence[tuple[str, str]]:
    """Other fields that are kept -> what they may be called."""
    if role == "assistant":
        return [("reasoning_content", "reasoning_content"), ("reasoning_content", "reasoning")]
    return [("tool_call_id", "tool_call_id"), ("name", "name")] if role == "tool" else []


def _read_content(content: Any, role: str, says_nothing: bool) -> str:
    """says_nothing: it may be empty."""
    if content is None and says_nothing:
        return ""
    if content is None:
        raise RowError("null_content", f"in a turn of the {role}")
    text = _join_parts(content) if isinstance(content, list) else content
    if not isinstance(text, str):
        raise RowError("wrong_type", f"expected text as content, found {_show(content)}")
    if not text.strip() and role != "tool" and not says_nothing:
        raise RowError("zero_length_response" if role == "assistant" else "empty_content", f"{text!r:.40}")
    return text


def _join_parts(parts: Sequence[Any]) -> str:
    for part in parts:
        if not isinstance(part, Mapping) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, Mapping) else part
            raise RowError("unknown_part", f"expected parts of type text, found {_show(kind)}")
        if not isinstance(part.get("text"), str):
            raise RowError("wrong_type", f"expected text in a part, found {_show(part.get('text'))}")
    return "".join(part["text"] for part in parts)


# Tools


def _read_calls(calls: Any) -> list[dict[str, Any]]:
    """As OpenAI has them: each with "type" and "function", whose "arguments" are JSON text; "id" if there is
    one."""
    if calls is None:
        return []
    listed = [calls] if isinstance(calls, Mapping) else calls
    if not isinstance(listed, list):
        raise RowError("bad_tool_call", f"expected a list, found {_show(calls)}")
    return [_read_call(call) for call in listed]


def _read_call(call: Any) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name, str) or not name:
        raise RowError("bad_tool_call", f"expected a function's name, found {_show(call)}")
    given = function.get("arguments")
    arguments = _parse(given, "bad_tool_call") if isinstance(given, str) and given.strip() else given or {}
    if not isinstance(arguments, Mapping):
        raise RowError("bad_tool_call", f"expected an object of arguments, found {_show(given)}")
    text = given if isinstance(given, str) and given.strip() else json.dumps(arguments, ensure_ascii=False)
    named = {"id": call["id"]} if isinstance(call.get("id"), str) and call["id"] else {}
    return named | {"type": "function", "function": {"name": name, "arguments": text}}


def _read_tools(tools: Any) -> list[dict[str, Any]]:
    """Schemas, bare ones wrapped as OpenAI has them; they may stand in the row as JSON text."""
    if tools is None or tools == "":
        return []
    listed = _parse(tools, "bad_tools") if isinstance(tools, str) else tools
    if not isinstance(listed, list):
        raise RowError("bad_tools", f"expected a list of schemas, found {_show(tools)}")
    return [_read_tool(tool) for tool in listed]


def _read_tool(tool: Any) -> dict[str, Any]:
    function = tool.get("function", tool) if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RowError("bad_tools", f"expected a function's schema with a name, found {_show(tool)}")
    return {"type": "function", "function": dict(function)}


def _parse(text: Any, reason: str) -> Any:
    try:
        return json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise RowError(reason, f"expected JSON, found {_show(text)}") from error


# Who speaks when


def _check_order(roles: Sequence[str]) -> None:
    if not roles:
        raise RowError("no_messages", "an empty list")
    if set(roles) == {"system"}:
        raise RowError("system_only", f"{len(roles)} system messages and no other")
    if "system" in roles[1:]:
        raise RowError("system_not_first", f"message {roles.index('system', 1) + 1}")
    first = roles[1] if roles[0] == "system" else roles[0]
    if first != "user":
        raise RowError(f"{first}_first", f"the {first} speaks before the user")
    for number, (one, other) in enumerate(pairwise(roles), start=2):
        if other not in _AFTER[one]:
            raise RowError("not_alternating", f"message {number}: the {other} after the {one}")


def _show(value: Any) -> str:
    return "nothing" if value is None else f"{value!r:.60}"
