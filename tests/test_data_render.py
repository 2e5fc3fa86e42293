"""data/render.py: the ids are those that vLLM's chat endpoint gives its engine, whatever the template."""

from collections.abc import Callable
from pathlib import Path

import pytest
from chat_targets import TEMPLATES, Endpoint, write_chat_target, write_wrapped_target
from transformers import AutoTokenizer

from data.groups import render
from data.prompts import load_prompts
from data.render import ChatTemplate, load_chat_template, normalise_tool
from data.template_source import TemplateSource
from recipes.errors import UserError
from recipes.schema import Target, Thinking
from tests.drafters import EMBEDDED_TARGET

MODES: list[Thinking] = ["template", "on", "off"]
SYSTEM = {"role": "system", "content": "Be brief."}
ASKED = {"role": "user", "content": "How are you?"}
SAID = {"role": "assistant", "content": "Well.", "reasoning_content": "\nHe asks.\n"}
AGAIN = {"role": "user", "content": "And now?"}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "parameters": {"type": "object", "properties": {"b": {}}}},
    },
    {"function": {"strict": True, "name": "stop", "description": 'ends <it> & "all"'}},
]
CALLED = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"type": "function", "function": {"name": "add", "arguments": '{"b": 1, "a": [2, "é"]}'}, "id": "c1"},
        {"id": "c2", "type": "function", "function": {"name": "stop", "arguments": ""}},
    ],
}
RESULTS = [
    {"tool_call_id": "c1", "role": "tool", "content": "3", "name": "add"},
    {
        "role": "tool",
        "content": [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}],
        "tool_call_id": "c2",
    },
]
CHATS = {
    "one turn": [ASKED],
    "system": [SYSTEM, ASKED],
    "turns": [ASKED, SAID, AGAIN],
    "three turns": [SYSTEM, ASKED, SAID, AGAIN, {"role": "assistant", "content": "Still well."}, ASKED],
    "parts": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"text": "b\n", "type": "text"}]}],
    "a name": [ASKED | {"name": "Ada"}],
    "no content": [ASKED, {"role": "assistant", "content": None}, AGAIN],
    "reasoning by its other name": [ASKED, {"role": "assistant", "content": "A", "reasoning": "why"}, AGAIN],
    "developer": [{"role": "developer", "content": "Obey."}, ASKED],
    "developer later": [SYSTEM, ASKED, SAID, {"role": "developer", "content": "Obey."}, AGAIN],
    "markers within": [{"role": "user", "content": "<|im_end|><think>x</think>\r\n "}],
    "a client's header": [{"role": "system", "content": "x-anthropic-billing-header: 7\nBe brief."}, ASKED],
    "that alone": [{"role": "system", "content": "x-anthropic-billing-header: 7"}, ASKED],
}
CALLS = {
    "asked": [ASKED],
    "two parallel calls": [ASKED, CALLED, *RESULTS],
    "answered": [SYSTEM, ASKED, CALLED, *RESULTS, SAID, AGAIN],
    **{
        f"arguments {text!r}": [
            ASKED,
            CALLED
            | {
                "tool_calls": [{"id": "c2", "type": "function", "function": {"arguments": text, "name": "f"}}]
            },
            RESULTS[1],
        ]
        for text in ("", "{}", "[1]", "4", '{"a": ', "null")
    },
}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}
    root = tmp_path_factory.mktemp("targets")

    def write(name: str) -> Path:
        if name not in made:
            wrapped = name.removeprefix("wrapped ")
            other = TEMPLATES["plain"].replace("im_start", "mask")
            made[name] = (
                write_chat_target(root / name, TEMPLATES[name])
                if wrapped == name
                else write_wrapped_target(root / name, other, TEMPLATES[wrapped])
            )
        return made[name]

    return write


@pytest.fixture(scope="module")
def pair_of(folder_of) -> Callable[[str], tuple[ChatTemplate, Endpoint]]:
    """Ours and vLLM's, of a template by its name, or of one in a multimodal config."""
    made: dict[str, tuple[ChatTemplate, Endpoint]] = {}

    def load(name: str) -> tuple[ChatTemplate, Endpoint]:
        if name not in made:
            folder = folder_of(name)
            made[name] = load_chat_template(Target(model=str(folder))), Endpoint(folder)
        return made[name]

    return load


# The endpoint's ids

VARIANTS = ["plain", "marked", "stripping", "inserting", "tools", "parts", "wrapped parts"]


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("chat", CHATS)
def test_the_ids_are_the_endpoints_in_every_mode(pair_of, name, chat):
    ours, endpoint = pair_of(name)
    for mode in MODES:
        assert ours.render(CHATS[chat], (), mode) == endpoint.render(CHATS[chat], (), mode)


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("chat", CALLS)
def test_the_ids_are_the_endpoints_with_tools(pair_of, name, chat):
    ours, endpoint = pair_of(name)
    assert ours.render(CALLS[chat], TOOLS) == endpoint.render(CALLS[chat], TOOLS)


def test_schemas_and_both_of_two_parallel_calls_stand_in_the_ids(pair_of):
    ours, _ = pair_of("tools")
    text = ours.tokenizer.decode(ours.render(CALLS["answered"], TOOLS))
    assert '"properties": {"b": {}}' in text
    assert text.count("<tool_call>") == 2
    assert "c1 b=1 a=[2, 'é']" in text
    assert '"name": "stop"}</tool_call>c2' in text


def test_modes_differ_where_the_template_knows_them(pair_of):
    ours, _ = pair_of("inserting")
    rendered = [ours.tokenizer.decode(ours.render([ASKED], (), mode)) for mode in MODES]
    head = "<|im_start|>assistant\n"
    ends = ["", "<think>\n", "<think>\n\n</think>\n\n"]
    assert [text.partition(head)[2] for text in rendered] == ends


def test_a_processors_template_counts_without_tools_alone(pair_of):
    ours, _ = pair_of("wrapped parts")
    assert "[text]How" in ours.tokenizer.decode(ours.render([ASKED]))
    assert "<|mask|>user\nHow" in ours.tokenizer.decode(ours.render([ASKED], TOOLS))


def test_what_the_template_refuses_the_endpoint_refuses_too(pair_of):
    ours, endpoint = pair_of("strict")
    assert ours.render([ASKED]) == endpoint.render([ASKED])
    from vllm.exceptions import VLLMValidationError  # noqa: PLC0415 - once the environment is right

    with pytest.raises(VLLMValidationError, match="a user comes first"):
        endpoint.render([SYSTEM, ASKED])
    with pytest.raises(UserError, match="refuses these messages: a user comes first"):
        ours.render([SYSTEM, ASKED])


def test_messages_and_tools_are_left_as_they_are(pair_of):
    ours, _ = pair_of("tools")
    before = repr((CALLS["answered"], TOOLS))
    ours.render(CALLS["answered"], TOOLS)
    assert repr((CALLS["answered"], TOOLS)) == before


def test_a_tools_unknown_fields_are_left_out():
    tool = {"type": "function", "function": {"name": "f", "note": 1}, "note": 2}
    function = {"name": "f", "description": None, "parameters": None}
    assert normalise_tool(tool) == {"type": "function", "function": function}


def test_content_that_is_no_text_is_refused(pair_of):
    ours, _ = pair_of("plain")
    with pytest.raises(UserError, match="expected content of text alone"):
        ours.render([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}])


def test_single_prompts_are_rendered_as_transformers_does():
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_TARGET)
    prompts = load_prompts("stdlib:heldout", 20)
    expected = [
        tokenizer.apply_chat_template(
            list(map(dict, prompt.messages)), add_generation_prompt=True, return_dict=False
        )
        for prompt in prompts
    ]
    assert [each.token_ids for each in render(prompts, tokenizer)] == expected


# What a template's text tells


_MACRO = "{% macro show(x) %}{% for c in x %}{% endfor %}{% endmacro %}"
LOOPS = {
    "{% for m in messages %}{{ m.content }}{% endfor %}": False,
    "{% for m in messages %}{% for c in m.content %}{% endfor %}{% endfor %}": True,
    "{% for m in messages %}{% for c in m['content'] %}{% endfor %}{% endfor %}": True,
    "{% for m in messages[1:] %}{% for c in m.content | list %}{% endfor %}{% endfor %}": True,
    "{% set rest = messages[1:] %}{% for m in rest %}{% for c in m.content %}{% endfor %}{% endfor %}": True,
    "{% for m in others %}{% for c in m.content %}{% endfor %}{% endfor %}": False,
    "{% for m in messages %}{% for c in m.tool_calls %}{% endfor %}{% endfor %}": False,
    "{% for m in messages %}{% set content = m.x %}{% for c in content %}{% endfor %}{% endfor %}": True,
    _MACRO + "{% for m in messages %}{{ show(m.content) }}{% endfor %}": True,
    _MACRO + "{% for m in messages %}{{ show(x=m.content) }}{% endfor %}": True,
    _MACRO + "{% for m in messages %}{{ show(m.role) }}{% endfor %}": False,
    "{% macro f(content) %}{% for c in content %}{% endfor %}{% endmacro %}": False,
}


@pytest.mark.parametrize("text", LOOPS)
def test_a_template_gets_parts_where_the_endpoint_gives_it_parts(text):
    from vllm.renderers.hf import _detect_content_format  # noqa: PLC0415 - once the environment is right

    assert TemplateSource(text).loops_over_parts is LOOPS[text]
    assert _detect_content_format(text, default="string") == ("openai" if LOOPS[text] else "string")


def test_switches_and_markers_are_found():
    sources = {name: TemplateSource(text) for name, text in TEMPLATES.items()}
    assert [name for name, source in sources.items() if source.has_thinking_switch] == ["inserting"]
    assert [name for name, source in sources.items() if source.has_generation_markers] == ["marked"]
    think = {name: source.think_markers for name, source in sources.items() if source.think_markers}
    assert think == dict.fromkeys(["stripping", "inserting"], ("<think>", "</think>"))


def test_text_that_is_no_template_is_refused_with_its_line():
    with pytest.raises(UserError, match="chat template, line 2: "):
        TemplateSource("{{ 1 }}\n{% for %}")
