"""Token ids of a conversation, as the served chat endpoint renders it.

The endpoint is vLLM's.  Before a chat template sees messages and tools, they are brought into one form there:
arguments of calls become mappings, content becomes text or a list of parts, tools get every field.  The same
is done here, since vLLM is serve/'s alone; tests/test_data_render.py holds both against one another.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jinja2 import TemplateError
from transformers import AutoProcessor, AutoTokenizer, ProcessorMixin

from data.conversations import Message
from data.template_source import TemplateSource
from recipes.errors import UserError
from recipes.load import resolve_model
from recipes.schema import Target, Thinking

Tools = Sequence[Mapping[str, Any]]
_REFUSALS = (
    TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
"""What a template raises, or runs into; our own part of the rendering is done before it."""
_TOOL_FIELDS = ("name", "description", "parameters")
_RARE_TOOL_FIELDS = ("strict", "defer_loading")
_UNREAD_HEADER = "x-anthropic-billing-header"  # a line of a client's, which the endpoint takes out


class ChatTemplate:
    """A target's tokenizer and its template, or one for chats and one for chats with tools."""

    def __init__(self, tokenizer: Any) -> None:
        """Raises UserError where the tokenizer has none."""
        if tokenizer.chat_template is None:
            raise UserError(
                f"target {tokenizer.name_or_path}: expected a tokenizer with a chat template, found none"
            )
        self.tokenizer = tokenizer
        of_processor = _find_processor_template(tokenizer)
        self._plain = TemplateSource(of_processor or tokenizer.get_chat_template())
        self._with_tools = TemplateSource(tokenizer.get_chat_template(tools=[{}]))

    def source(self, tools: Tools = ()) -> TemplateSource:
        """What renders a conversation with these tools."""
        return self._with_tools if tools else self._plain

    def render(
        self, messages: Iterable[Message], tools: Tools = (), thinking: Thinking = "template"
    ) -> list[int]:
        """Up to and with the head of the assistant's turn that follows.

        Raises UserError where the template refuses these messages, as the endpoint then does.
        """
        ids: list[int] = self._apply(messages, tools, thinking, add_generation_prompt=True, return_dict=False)
        return ids

    def render_whole(
        self, messages: Iterable[Message], tools: Tools = (), thinking: Thinking = "template"
    ) -> list[int]:
        """Up to the end of the last turn.  Raises as above."""
        ids: list[int] = self._apply(messages, tools, thinking, return_dict=False)
        return ids

    def render_marked(
        self, messages: Iterable[Message], tools: Tools = (), thinking: Thinking = "template"
    ) -> tuple[list[int], list[bool]]:
        """The same, and which tokens stand between the template's generation markers.  Raises as above."""
        found = self._apply(messages, tools, thinking, return_dict=True, return_assistant_tokens_mask=True)
        return found["input_ids"], [bool(mark) for mark in found["assistant_masks"]]

    def _apply(self, messages: Iterable[Message], tools: Tools, thinking: Thinking, **options: object) -> Any:
        source = self.source(tools)
        said, known = normalise_messages(messages, source), [normalise_tool(tool) for tool in tools]
        told = {} if thinking == "template" else {"enable_thinking": thinking == "on"}
        try:
            return self.tokenizer.apply_chat_template(
                said,
                tools=known or None,
                chat_template=source.text,
                **told,
                **options,
            )
        except _REFUSALS as refusal:
            kind = "" if isinstance(refusal, TemplateError) else f"{type(refusal).__name__}: "
            why = kind + " ".join(str(refusal).split())
            raise UserError(f"the chat template refuses these messages: {why:.200}") from refusal


def load_chat_template(target: Target) -> ChatTemplate:
    """Raises UserError as ChatTemplate does."""
    name = resolve_model(target.model)
    return ChatTemplate(AutoTokenizer.from_pretrained(name, revision=target.revision))


def normalise_messages(messages: Iterable[Message], source: TemplateSource) -> list[dict[str, Any]]:
    """As the endpoint hands them to a template."""
    said = [_normalise(message, in_parts=source.loops_over_parts) for message in messages]
    is_stranger = not source.knows_developers and any(message["role"] == "developer" for message in said)
    return _merge_system(said) if is_stranger else said


def normalise_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """With every field, named or not, in the endpoint's order; what it does not know is left out."""
    function = tool["function"]
    known = {name: function.get(name) for name in _TOOL_FIELDS}
    rare = {name: function[name] for name in _RARE_TOOL_FIELDS if function.get(name) is not None}
    return {"type": "function", "function": known | rare}


def _normalise(message: Message, *, in_parts: bool) -> dict[str, Any]:
    role = message["role"]
    texts = _read_texts(message.get("content"))
    if role == "system":
        texts = _without_unread_header(texts)
    are_parts = in_parts and role != "tool"  # what a tool says is text to every template
    parts = [{"type": "text", "text": text} for text in texts]
    made: dict[str, Any] = {"role": role, "content": parts if are_parts else "\n".join(texts)}
    if role == "assistant":
        made |= _normalise_calls(message) | _normalise_reasoning(message)
    elif role == "tool" and "tool_call_id" in message:
        made["tool_call_id"] = message["tool_call_id"]
    if isinstance(message.get("name"), str):
        made["name"] = message["name"]
    return made


def _read_texts(content: Any) -> list[str]:
    """Raises UserError for a part that is no text."""
    if content is None or isinstance(content, str):
        return [] if content is None else [content]
    texts = [part if isinstance(part, str) else part.get("text") for part in content]
    if not all(isinstance(text, str) for text in texts):
        raise UserError(f"expected content of text alone, found {content!r:.80}")
    return texts


def _without_unread_header(texts: Sequence[str]) -> list[str]:
    kept = [text.partition("\n")[2] if text.startswith(_UNREAD_HEADER) else text for text in texts]
    return [rest for text, rest in zip(texts, kept, strict=True) if rest or rest == text]


def _normalise_reasoning(message: Message) -> dict[str, str]:
    """Under both names that templates read."""
    found = (message.get(name) for name in ("reasoning", "reasoning_content"))
    reasoning = next((text for text in found if text is not None), None)
    return {} if reasoning is None else {"reasoning": reasoning, "reasoning_content": reasoning}


def _normalise_calls(message: Message) -> dict[str, Any]:
    calls = [_normalise_call(call) for call in message.get("tool_calls") or ()]
    return {"tool_calls": calls} if calls else {}


def _normalise_call(call: Mapping[str, Any]) -> dict[str, Any]:
    """The order of fields shows where a template writes a call as JSON."""
    function = call["function"]
    arguments = {"arguments": _read_arguments(function.get("arguments"))}
    made = {"id": call.get("id"), "function": arguments | _others(function, arguments), "type": "function"}
    return made | _others(call, made)


def _others(fields: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in known}


def _read_arguments(given: Any) -> dict[str, Any]:
    """JSON text or a mapping; what is neither an object nor its JSON is none to the endpoint."""
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except json.JSONDecodeError:
            return {}
    return dict(given) if isinstance(given, Mapping) else {}


def _merge_system(said: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Developers' messages become the system's, and where one is not the first, all are one that is."""
    said = [message | {"role": "system"} if message["role"] == "developer" else message for message in said]
    system = [message for message in said if message["role"] == "system"]
    if said[: len(system)] == system and len(system) == 1:
        return said
    texts = ["\n".join(_read_texts(message["content"])) for message in system]
    merged = {"role": "system", "content": "\n\n".join(text for text in texts if text)}
    return [merged, *(message for message in said if message["role"] != "system")]


def _find_processor_template(tokenizer: Any) -> str | None:
    """A multimodal target's own, which the endpoint prefers for chats without tools; None where it has none.

    Raises UserError where there are two templates and the processor, which says what counts, does not load.
    """
    name = tokenizer.name_or_path
    told = ProcessorMixin.get_processor_dict(name)[0].get("chat_template") if name else None
    if not isinstance(told, str) or told == tokenizer.chat_template:
        return None
    try:
        processor = AutoProcessor.from_pretrained(name)
    except (ImportError, OSError, ValueError) as error:
        raise UserError(
            f"target {name} has two chat templates, of its tokenizer and of its processor, and the processor"
            f" cannot be loaded ({error}): leave one of them there"
        ) from error
    return told if isinstance(processor, ProcessorMixin) else None
