"""Which tokens of a given conversation its assistant said, where nobody generated it: for texts as they are.

The mask is known from the template's generation markers, or from how the text grows turn by turn.  Where
neither tells it, the text is refused: a mask that is guessed trains on the wrong tokens and shows nowhere.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from data.conversations import Conversation, Message
from data.render import ChatTemplate
from recipes.errors import UserError
from recipes.schema import Thinking

Span = tuple[int, int]
"""[start, end) of tokens."""


@dataclass(frozen=True)
class GivenText:
    """A conversation whose answers are taken as they are."""

    token_ids: list[int]
    spans: list[Span]
    """Of the assistant's turns, each up to and with its end-of-turn token; ascending."""

    def loss_mask(self) -> torch.Tensor:
        """[tokens] bool, neither all set nor none."""
        mask = torch.zeros(len(self.token_ids), dtype=torch.bool)
        for start, end in self.spans:
            mask[start:end] = True
        return mask


def mask_given_text(
    conversation: Conversation,
    template: ChatTemplate,
    end_ids: Collection[int],
    thinking: Thinking = "template",
) -> GivenText:
    """end_ids: the tokens that end a turn, as in the target's generation_config.json.

    Raises UserError, which names the conversation and the reason, where no mask is sound: a turn without its
    end, a history that the template rewrites, text of the template's own within an answer.
    """
    reader = _Reader(conversation, template, frozenset(end_ids), thinking)
    try:
        return reader.read_marked() if reader.has_markers else reader.read_by_prefixes()
    except UserError as reason:
        raise UserError(f"conversation {conversation.id}: no sound loss mask: {reason}") from reason


@dataclass(frozen=True)
class _Reader:
    conversation: Conversation
    template: ChatTemplate
    end_ids: frozenset[int]
    thinking: Thinking

    @property
    def has_markers(self) -> bool:
        return self.template.source(self.conversation.tools).has_generation_markers

    @property
    def turns(self) -> list[int]:
        """Where the assistant's messages stand."""
        said = self.conversation.messages
        return [index for index, message in enumerate(said) if message["role"] == "assistant"]

    def read_marked(self) -> GivenText:
        token_ids, marks = self.template.render_marked(
            self.conversation.messages, self.conversation.tools, self.thinking
        )
        found = [self._end(token_ids, *span) for span in _find_spans(marks)]
        if len(found) != len(self.turns):
            raise UserError(
                f"the template marks {len(found)} turns as generated, and the assistant has {len(self.turns)}"
            )
        for turn, span in zip(self.turns, found, strict=True):
            self._check_text(self.conversation.messages[turn], token_ids[slice(*span)])
        return self._finish(token_ids, found)

    def read_by_prefixes(self) -> GivenText:
        said, tools, mode = self.conversation.messages, self.conversation.tools, self.thinking
        token_ids = self.template.render_whole(said, tools, mode)
        found = []
        for turn in self.turns:
            head = self.template.render(said[:turn], tools, mode) if turn else []
            through = self.template.render_whole(said[: turn + 1], tools, mode)
            if token_ids[: len(head)] != head or token_ids[: len(through)] != through:
                raise UserError(
                    "the template has no generation markers and renders message"
                    f" {turn} otherwise once more is said, or without the head that a served turn has"
                )
            span = self._end(token_ids, len(head), len(through))
            self._check_text(said[turn], token_ids[slice(*span)])
            found.append(span)
        return self._finish(token_ids, found)

    def _end(self, token_ids: Sequence[int], start: int, end: int) -> Span:
        """Cut after the end of the turn, which a marker may leave out and what follows it not."""
        ends = [
            place for place in range(start, min(end + 1, len(token_ids))) if token_ids[place] in self.end_ids
        ]
        if not ends:
            raise UserError(f"no end-of-turn token ends what is said in tokens {start} to {end}")
        return start, ends[0] + 1

    def _check_text(self, message: Message, span_ids: Sequence[int]) -> None:
        """What the author wrote and nothing else; calls and reasoning stand in the template's own frame."""
        text = self.template.tokenizer.decode(span_ids[:-1], clean_up_tokenization_spaces=False)
        content = message.get("content") or ""
        if message.get("tool_calls") or message.get("reasoning_content"):
            if content.strip() not in text:
                raise UserError(f"the template leaves out part of the answer {content!r:.40}")
        elif text.strip() != content.strip():
            raise UserError(f"the template makes {text!r:.60} of the answer {content!r:.40}")

    def _finish(self, token_ids: list[int], spans: list[Span]) -> GivenText:
        if not spans:
            raise UserError("the assistant says nothing")
        if empty := [turn for turn in self.turns if _is_empty(self.conversation.messages[turn])]:
            raise UserError(f"message {empty[0]} of the assistant's is empty")
        if sum(end - start for start, end in spans) == len(token_ids):
            raise UserError("every token would be the assistant's")
        return GivenText(token_ids, spans)


def _is_empty(message: Message) -> bool:
    return not any(message.get(part) for part in ("content", "reasoning_content", "tool_calls"))


def _find_spans(marks: Sequence[bool]) -> Iterator[Span]:
    edges = [place for place, (left, right) in enumerate(pairwise([False, *marks, False])) if left != right]
    return zip(edges[::2], edges[1::2], strict=True)
