"""Which prompts make which shard: rendered by the target's chat template, too long ones left out, in order.

A shard's prompts are known before any is answered, so a shard made again is the same shard.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from data.prompts import Prompt
from recipes.schema import Data


@dataclass(frozen=True)
class Rendered:
    """A prompt as the target reads it."""

    id: str
    token_ids: list[int]
    """Up to and with the head of the assistant's turn."""

    @property
    def seed(self) -> int:
        """Of its answer's sampling: 60 bits of the id."""
        return int(self.id[:15], 16)


def render(prompts: Iterable[Prompt], tokenizer: Any) -> list[Rendered]:
    return [Rendered(prompt.id, _render_one(prompt, tokenizer)) for prompt in prompts]


def _render_one(prompt: Prompt, tokenizer: Any) -> list[int]:
    messages = [dict(message) for message in prompt.messages]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def group_by_shard(prompts: Sequence[Rendered], data: Data) -> list[list[Rendered]]:
    """Consecutive prompts; a group is closed once its longest possible sequences hold shard_tokens tokens."""
    groups: list[list[Rendered]] = []
    room = 0
    for prompt in prompts:
        if room <= 0:
            groups.append([])
            room = data.shard_tokens
        groups[-1].append(prompt)
        room -= len(prompt.token_ids) + data.sampling.max_tokens
    return groups
