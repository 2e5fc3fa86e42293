"""Which prompts make which shard: rendered by the target's chat template, too long ones left out, in order.

A shard's prompts are known before any is answered, so a shard made again has the same ones in the same order.
Its answers may part from the earlier ones at near-ties: they had other company in the engine's batch.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from data.conversations import Conversation
from data.given_text import GivenText, Span, mask_given_text
from data.prompts import Prompt
from data.render import ChatTemplate
from data.shapes import RowError
from data.turns import find_turns
from recipes.errors import UserError
from recipes.schema import Data, Thinking


@dataclass(frozen=True)
class Rendered:
    """A prompt as the target reads it."""

    id: str
    token_ids: list[int]
    """Up to and with the head of the assistant's turn, the first that is answered."""
    conversation: Conversation | None = None
    """Where further turns are answered."""
    turns: tuple[int, ...] = (0,)
    """As `data.turns.find_turns`; only their number counts where there is one."""
    thinking: Thinking = "template"
    further_tokens: int = 0
    """The most that the prompts of further turns have."""
    source: str = ""
    """The name of where it comes from."""
    spans: tuple[Span, ...] = ()
    """Of a given text, which is only read: what its assistant says.  token_ids is all of it then."""

    @property
    def seed(self) -> int:
        """Of its first answer's sampling: 60 bits of the id."""
        return int(self.id[:15], 16)

    @property
    def num_turns(self) -> int:
        return len(self.turns)

    def fits(self, data: Data) -> bool:
        return len(self.token_ids) <= (data.longest if self.spans else data.max_prompt_tokens)

    def most_tokens(self, data: Data) -> int:
        """Of its sequences, where none goes on in another."""
        if self.spans:
            return len(self.token_ids)
        emitted = self.num_turns * data.sampling_of(self.source).max_tokens
        return len(self.token_ids) + self.further_tokens + emitted


@dataclass(frozen=True)
class Begun:
    """Conversations up to their first turn."""

    prompts: list[Rendered]
    refused: list[tuple[Conversation, RowError]]
    """Those that have no such turn, and why."""

    @property
    def left_out(self) -> Counter[str]:
        """Reason -> conversations."""
        return Counter(why.reason for _, why in self.refused)


def render(prompts: Iterable[Prompt], tokenizer: Any) -> list[Rendered]:
    """Each with the answer that follows its last message."""
    template = ChatTemplate(tokenizer)
    return [Rendered(prompt.id, template.render(prompt.messages, prompt.tools)) for prompt in prompts]


def begin(
    conversations: Iterable[Conversation],
    template: ChatTemplate,
    data: Data,
    end_ids: Collection[int] = (),
) -> Begun:
    """In order; of each the target answers every turn that `find_turns` finds, or it reads the given answers.

    end_ids: the tokens that end a turn.
    """
    begun = Begun([], [])
    for conversation in conversations:
        if data.answers_of(conversation.source) == "given":
            try:
                begun.prompts.append(_take_given(conversation, template, data, end_ids))
            except UserError as refusal:
                begun.refused.append((conversation, RowError("no_sound_mask", str(refusal))))
            continue
        turns = tuple(find_turns(conversation))
        if not turns:
            begun.refused.append((conversation, RowError("nothing_to_answer", "nobody asks the target")))
            continue
        try:
            begun.prompts.append(_begin_one(conversation, turns, template, data))
        except UserError as refusal:
            begun.refused.append((conversation, RowError("refused_by_template", str(refusal))))
    return begun


def _take_given(
    conversation: Conversation, template: ChatTemplate, data: Data, end_ids: Collection[int]
) -> Rendered:
    """Raises UserError where no mask is sound."""
    thinking = data.choose_thinking(conversation.id, conversation.source)
    text = mask_given_text(conversation, template, end_ids, thinking)
    if data.keep_truncated and text.spans[0][0] < data.longest:
        text = cut_text(text, data.longest)
    return Rendered(conversation.id, text.token_ids, source=conversation.source, spans=tuple(text.spans))


def cut_text(text: GivenText, length: int) -> GivenText:
    """Its first tokens, of which something is said by the assistant."""
    spans = [(start, min(end, length)) for start, end in text.spans if start < length]
    return GivenText(text.token_ids[:length], spans)


def _begin_one(
    conversation: Conversation, turns: tuple[int, ...], template: ChatTemplate, data: Data
) -> Rendered:
    """Raises UserError where the template refuses it."""
    source = conversation.source
    thinking = data.choose_thinking(conversation.id, source)
    first, *further = [
        template.render(conversation.messages[:turn], conversation.tools, thinking) for turn in turns
    ]
    if not further:
        return Rendered(conversation.id, first, source=source)
    # the target's answers may be longer than the given ones, but no prompt is longer than is allowed
    max_tokens = data.sampling_of(source).max_tokens
    lengths = [len(ids) + number * max_tokens for number, ids in enumerate(further, start=1)]
    most = sum(min(length, data.max_prompt_tokens) for length in lengths)
    return Rendered(conversation.id, first, conversation, turns, thinking, most, source)


def group_by_shard(prompts: Sequence[Rendered], data: Data) -> list[list[Rendered]]:
    """Consecutive prompts; a group is closed once its longest possible sequences hold shard_tokens tokens."""
    groups: list[list[Rendered]] = []
    room = 0
    for prompt in prompts:
        if room <= 0:
            groups.append([])
            room = data.shard_tokens
        groups[-1].append(prompt)
        room -= prompt.most_tokens(data)
    return groups
