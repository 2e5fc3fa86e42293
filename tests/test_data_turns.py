"""data/turns.py and data/given_text.py: who answers where, what is supervised, and when a text is refused."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_targets import END_OF_TURN, TEMPLATES, Endpoint, write_chat_target
from hypothesis import given
from hypothesis import strategies as st

from data.conversations import Conversation, make_conversation
from data.given_text import mask_given_text
from data.render import ChatTemplate, load_chat_template
from data.turns import Event, find_turns, join_events, read_answer, say_before
from recipes.errors import UserError
from recipes.schema import Target, Thinking

THREE_TURNS = make_conversation(
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "given", "reasoning_content": "given"},
        {"role": "user", "content": "second"},
        {"role": "assistant", "content": "given"},
        {"role": "user", "content": "third"},
    ]
)
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "3", "tool_call_id": "c"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("targets")
    return {name: write_chat_target(root / name, text) for name, text in TEMPLATES.items()}


@pytest.fixture(scope="module")
def templates(folders) -> dict[str, ChatTemplate]:
    return {name: load_chat_template(Target(model=str(folder))) for name, folder in folders.items()}


def chat(*said: str) -> Conversation:
    """u, a, t, s: who says something; c: an assistant's call."""
    roles = {"u": "user", "a": "assistant", "t": "tool", "s": "system"}
    messages = [CALLING if letter == "c" else {"role": roles[letter], "content": letter} for letter in said]
    return make_conversation(messages)


def ids_of(template: ChatTemplate, text: str) -> list[int]:
    ids: list[int] = template.tokenizer.encode(text, add_special_tokens=False)
    return ids


def answer_all(
    conversation: Conversation,
    template: ChatTemplate,
    emitted: Sequence[str],
    thinking: Thinking = "template",
) -> list[Event]:
    """What the target would make of it, answering with these texts."""
    turns, said, events = find_turns(conversation), [], []
    for number, text in enumerate(emitted):
        messages = say_before(conversation, turns, said, number)
        prompt_ids = template.render(messages, conversation.tools, thinking)
        events.append(Event(prompt_ids, [*ids_of(template, text), END_OF_TURN]))
        said.append(read_answer(events[-1], template.tokenizer, template.source()))
    return events


# Which turns are answered


@pytest.mark.parametrize(
    "said, expected",
    [
        ("u", [1]),
        ("ua", [1]),
        ("sua", [2]),
        ("uauau", [1, 3, 5]),
        ("uaua", [1, 3]),
        ("uct", [3]),  # the call stays, what follows its result is the target's
        ("ucta", [3]),
        ("ucttau", [4, 6]),
        ("uctcta", [5]),
        ("uc", [1]),  # a call without results
        ("ucu", [1, 3]),
        ("s", []),
        ("sa", []),
        ("au", [2]),
        ("uaau", [1, 4]),
        ("uua", [2]),
    ],
)
def test_the_target_answers_after_users_and_tools_unless_a_call_has_results(said, expected):
    assert find_turns(chat(*said)) == expected


def test_earlier_answers_stand_in_their_places_and_nothing_of_the_given_ones_is_left():
    turns = find_turns(THREE_TURNS)
    own = [{"role": "assistant", "content": text} for text in ("one", "two")]
    given = THREE_TURNS.messages
    assert say_before(THREE_TURNS, turns, [], 0) == list(given[:2])
    assert say_before(THREE_TURNS, turns, own[:1], 1) == [*given[:2], own[0], given[3]]
    assert say_before(THREE_TURNS, turns, own, 2) == [*given[:2], own[0], given[3], own[1], given[5]]


def test_calls_with_results_stay_between_answers():
    conversation = make_conversation([*chat("u", "a", "u").messages, CALLING, RESULT, *chat("a").messages])
    own = {"role": "assistant", "content": "own"}
    said = say_before(conversation, find_turns(conversation), [own], 1)
    assert said == [conversation.messages[0], own, conversation.messages[2], CALLING, RESULT]


# What the history holds of an answer


@pytest.mark.parametrize(
    "head, text, expected",
    [
        ("", "Hi <b>", {"content": "Hi <b>"}),
        ("", " \nHi\n", {"content": " \nHi\n"}),
        ("", "<think>\nwhy\n</think>\n\nHi", {"content": "\n\nHi", "reasoning_content": "\nwhy\n"}),
        ("", "\n<think>why</think>Hi", {"content": "Hi", "reasoning_content": "why"}),
        ("<think>\n", "why</think>Hi", {"content": "Hi", "reasoning_content": "why"}),
        ("<think>\n\n</think>\n\n", "Hi", {"content": "Hi"}),
        ("", "why</think>Hi", None),  # where did it begin?
        ("", "<think>why", None),
        ("<think>\n", "why", None),
        ("<think>\n", "<think>why</think>Hi", None),
        ("", "Hi <think>why</think>", None),
        ("", "<think>why</think>Hi<think>why</think>", None),
        ("", "<think>why</think>Hi</think>", None),
        ("", "Hi<tool_call>x</tool_call>", None),
        ("", "<|im_start|>Hi", None),
    ],
)
def test_an_answer_is_split_at_the_markers_or_not_read_at_all(templates, head, text, expected):
    template = templates["inserting"]
    event = Event(ids_of(template, "<|im_start|>assistant\n" + head), [*ids_of(template, text), END_OF_TURN])
    found = read_answer(event, template.tokenizer, template.source())
    assert found == (None if expected is None else {"role": "assistant"} | expected)


def test_think_markers_mean_nothing_good_to_a_template_that_does_not_know_them(templates):
    template = templates["plain"]
    event = Event([1], [*ids_of(template, "<think>why</think>Hi"), END_OF_TURN])
    assert read_answer(event, template.tokenizer, template.source()) is None


# Events against the endpoint


SAID = {
    "plain": ["one", "two", "three"],
    "marked": ["one", "two", "three"],
    "parts": ["one", "two", "three"],
    "stripping": ["<think>why</think>one", "two", "<think>so</think>three"],
    "inserting": ["<think>\nwhy\n</think>\n\none", "two", "<think>so</think>three"],
}
HISTORY: dict[str, list[dict[str, str]]] = {
    name: [{"content": "one"}, {"content": "two"}] for name in ("plain", "marked", "parts")
} | {
    "stripping": [{"content": "one", "reasoning_content": "why"}, {"content": "two"}],
    "inserting": [{"content": "\n\none", "reasoning_content": "\nwhy\n"}, {"content": "two"}],
}


@pytest.mark.parametrize("name", SAID)
def test_three_turns_give_three_events_whose_prompts_are_the_endpoints(folders, templates, name):
    events = answer_all(THREE_TURNS, templates[name], SAID[name])
    endpoint = Endpoint(folders[name])
    system, first, _, second, _, third = THREE_TURNS.messages
    one, two = ({"role": "assistant"} | said for said in HISTORY[name])
    chats = [[system, first], [system, first, one, second], [system, first, one, second, two, third]]
    assert [event.prompt_ids for event in events] == [endpoint.render(messages) for messages in chats]


@pytest.mark.parametrize(
    "name, mode, emitted, expected",
    [
        ("plain", "template", SAID["plain"], [(0, 2)]),
        ("stripping", "template", SAID["stripping"], [(0, 0), (1, 2)]),
        (
            "stripping",
            "template",
            ["<think>why</think>one", "<think>a</think>two", "three"],
            [(0, 0), (1, 1), (2, 2)],
        ),
        ("stripping", "template", ["one", "two", "three"], [(0, 2)]),
        ("inserting", "off", ["one", "two", "three"], [(0, 0), (1, 1), (2, 2)]),
        ("inserting", "template", ["<think>\nwhy\n</think>\n\none", "two", "three"], [(0, 2)]),
    ],
)
def test_events_are_joined_exactly_where_the_history_keeps_every_token(
    templates, name, mode, emitted, expected
):
    events = answer_all(THREE_TURNS, templates[name], emitted, mode)
    assert [(joined.first, joined.last) for joined in join_events(events)] == expected


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 3), st.integers(1, 3)), max_size=6))
def test_each_emitted_token_is_supervised_once_and_no_other_is(shape):
    events: list[Event] = []
    for goes_on, asked, said in shape:
        before = events[-1].token_ids if events and goes_on else []
        emitted = [1000 * len(events) + place for place in range(said)]
        events.append(Event([*before, *[7] * asked, -len(events)], emitted))
    joined = join_events(events)
    supervised = [torch.tensor(each.token_ids)[each.loss_mask()].tolist() for each in joined]
    assert [token for each in supervised for token in each] == [
        token for event in events for token in event.emitted_ids
    ]
    assert [number for each in joined for number in range(each.first, each.last + 1)] == list(
        range(len(events))
    )
    texts = [each.token_ids for each in joined]
    assert all(after[: len(before)] != before for before, after in pairwise(texts))


# By hand: an answer of three tokens


@pytest.mark.parametrize("name", [name for name in TEMPLATES if name != "strict"])
def test_of_a_three_token_answer_these_three_are_supervised(templates, name):
    template = templates[name]
    conversation = make_conversation([{"role": "user", "content": "a"}])
    (event,) = answer_all(conversation, template, [":)"])
    (sequence,) = join_events([event])
    colon, bracket = (template.tokenizer.convert_tokens_to_ids(text) for text in ":)")
    assert event.emitted_ids == [colon, bracket, END_OF_TURN]
    length = len(event.prompt_ids)
    assert sequence.spans == [(length, length + 3)]
    assert sequence.loss_mask().tolist() == [False] * length + [True] * 3
    assert template.tokenizer.decode(sequence.token_ids[:length]).endswith("assistant\n")


def test_of_three_turns_in_one_sequence_every_answer_is_supervised_to_its_end(templates):
    template = templates["plain"]
    (sequence,) = join_events(answer_all(THREE_TURNS, template, [":)", ":", ")"]))
    ids, text = sequence.token_ids, template.tokenizer.decode(sequence.token_ids)
    assert [template.tokenizer.decode(ids[start:end]) for start, end in sequence.spans] == [
        f"{said}<|im_end|>" for said in (":)", ":", ")")
    ]
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nfirst<|im_end|>\n"
        "<|im_start|>assistant\n:)<|im_end|>\n<|im_start|>user\nsecond<|im_end|>\n"
        "<|im_start|>assistant\n:<|im_end|>\n<|im_start|>user\nthird<|im_end|>\n<|im_start|>assistant\n)<|im_end|>"
    )


# Given texts


def given_chat(*said: Any) -> Conversation:
    """Assistants' messages, each after a user's."""
    return make_conversation(
        message
        for each in said
        for message in (
            {"role": "user", "content": "a"},
            {"role": "assistant"} | ({"content": each} if isinstance(each, str) else each),
        )
    )


def supervised_of(
    template: ChatTemplate, conversation: Conversation, thinking: Thinking = "template"
) -> list[str]:
    found = mask_given_text(conversation, template, [END_OF_TURN], thinking)
    assert found.token_ids == template.render_whole(conversation.messages, conversation.tools, thinking)
    assert 0 < int(found.loss_mask().sum()) < len(found.token_ids)
    return [template.tokenizer.decode(found.token_ids[start:end]) for start, end in found.spans]


@pytest.mark.parametrize("name", ["plain", "marked", "parts", "stripping", "tools"])
def test_given_answers_are_supervised_to_their_end_by_markers_or_prefixes(templates, name):
    expected = [":)<|im_end|>", ":<|im_end|>"]
    assert supervised_of(templates[name], given_chat(":)", ":")) == expected


def test_a_given_three_token_answer_is_these_three(templates):
    for name in ("plain", "marked", "parts", "stripping", "tools"):
        found = mask_given_text(given_chat(":)"), templates[name], [END_OF_TURN])
        head = templates[name].render([{"role": "user", "content": "a"}])
        assert found.spans == [(len(head), len(head) + 3)], name
        assert found.token_ids[len(head) + 2] == END_OF_TURN


def test_given_reasoning_of_the_last_turn_is_supervised_too(templates):
    said = {"content": "Hi", "reasoning_content": "why"}
    assert supervised_of(templates["stripping"], given_chat(":", said))[1] == "<think>why</think>Hi<|im_end|>"


def test_given_calls_are_supervised_in_the_templates_frame(templates):
    (found,) = supervised_of(
        templates["tools"], make_conversation([{"role": "user", "content": "a"}, CALLING])
    )
    assert found == '<tool_call>{"arguments": {}, "name": "f"}</tool_call>c<|im_end|>'


def without_ends(text: str) -> str:
    return text.replace("<|im_end|>", "")


SPOILED: dict[str, Callable[[], str]] = {
    "no markers where the mask is": lambda: TEMPLATES["marked"].replace("'assistant'", "'nobody'"),
    "the head within the markers": lambda: TEMPLATES["marked"].replace(
        "{% generation %}{{ ", "{% generation %}{{ 'so: ' + "
    ),
    "no end of the turn": lambda: without_ends(TEMPLATES["plain"]),
}


@pytest.mark.parametrize("name", SPOILED)
def test_a_template_that_tells_no_sound_mask_is_refused(tmp_path, name):
    template = load_chat_template(Target(model=str(write_chat_target(tmp_path / "target", SPOILED[name]()))))
    with pytest.raises(UserError, match="no sound loss mask: "):
        mask_given_text(given_chat(":)"), template, [END_OF_TURN])


def test_rewritten_history_without_markers_is_refused_by_name(templates):
    conversation = given_chat({"content": "Hi", "reasoning_content": "why"}, "Hi")
    expected = (
        rf"conversation {conversation.id}: no sound loss mask: .* renders message 1 otherwise once more"
    )
    with pytest.raises(UserError, match=expected):
        mask_given_text(conversation, templates["stripping"], [END_OF_TURN])


def test_an_inserted_block_is_never_supervised(templates):
    template = templates["inserting"]
    assert supervised_of(template, given_chat("Hi"), "off") == ["Hi<|im_end|>"]
    with pytest.raises(UserError, match=r"the template makes '<think>.* of the answer 'Hi'"):
        mask_given_text(given_chat("Hi"), template, [END_OF_TURN])


def test_a_conversation_without_an_answer_is_refused(templates):
    for name in ("plain", "marked"):
        with pytest.raises(UserError, match="no sound loss mask: the assistant says nothing"):
            mask_given_text(chat("u"), templates[name], [END_OF_TURN])
