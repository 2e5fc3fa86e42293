"""The held-out prompts of a measurement, kept apart from the training prompts."""

from collections.abc import Sequence

from data.conversations import Message
from data.mixture import digest_first_turn, load_conversations
from data.prompts import Prompt, load_suite_prompts, make_prompt
from recipes.errors import UserError
from recipes.schema import Data


def load_suite(suite: str, count: int, training: Data | None) -> list[Prompt]:
    """The suite's first `count` prompts; `data:heldout` is what `training` holds out.

    Raises UserError where one of them begins as one of those that `training` names does, up to the end of the
    user's first turn; white space and case apart, but where it names one source alone.
    """
    prompts = load_suite_prompts(suite, count, training)
    if training is not None:
        _refuse_overlap(suite, prompts, training)
    return prompts


def _refuse_overlap(suite: str, prompts: Sequence[Prompt], training: Data) -> None:
    tell = _name_beginning if isinstance(training.prompts, str) else digest_first_turn
    trained = {tell(each.messages) for each in load_conversations(training).conversations}
    shared = [prompt for prompt in prompts if tell(prompt.messages) in trained]
    if shared:
        raise UserError(
            f"suite {suite} shares {len(shared)} of its {len(prompts)} prompts with the training prompts"
            f" {training.named_prompts}, first {shared[0].messages[-1]['content']!r:.60}: a drafter looks"
            " better on what it was trained on; name a suite of held-out prompts (eval.suite or --suite)"
        )


def _name_beginning(messages: Sequence[Message]) -> str:
    roles = [message["role"] for message in messages]
    return make_prompt(messages[: roles.index("user") + 1]).id
