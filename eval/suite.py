"""The held-out prompts of a measurement, kept apart from the training prompts."""

from collections.abc import Sequence

from data.prompts import Prompt, load_prompts
from recipes.errors import UserError
from recipes.schema import Data


def load_suite(suite: str, count: int, training: Data | None) -> list[Prompt]:
    """The suite's first `count` prompts.

    Raises UserError where one of them is among the prompts that `training` names; ids tell, which are made
    from the messages.
    """
    prompts = load_prompts(suite, count)
    if training is not None:
        _refuse_overlap(suite, prompts, training)
    return prompts


def _refuse_overlap(suite: str, prompts: Sequence[Prompt], training: Data) -> None:
    trained = {prompt.id for prompt in load_prompts(training.prompts, training.num_prompts)}
    shared = [prompt for prompt in prompts if prompt.id in trained]
    if shared:
        raise UserError(
            f"suite {suite} shares {len(shared)} of its {len(prompts)} prompts with the training prompts"
            f" {training.prompts}, first {shared[0].messages[-1]['content']!r:.60}: a drafter looks better on"
            " what it was trained on; name a suite of held-out prompts (eval.suite or --suite)"
        )
