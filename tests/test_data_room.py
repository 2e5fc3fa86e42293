"""data/shard_plan.py: what the shards may take is known before one is written."""

import pytest

from data.groups import Rendered
from data.shard_plan import check_room
from recipes.errors import UserError
from tests.drafters import tiny_recipe

PROMPTS = [Rendered(f"{number}", [1] * 52) for number in range(1000)]  # and 48 tokens of answers
BYTES = 1000 * 100 * (3 * 256 * 2 + 5)


def check(*overrides: str) -> None:
    check_room(tiny_recipe(*overrides), PROMPTS, hidden_size=256)


def test_shards_fit_to_the_byte():
    check()
    check(f"data.disk_gib={BYTES / 2**30}")
    with pytest.raises(UserError, match=r"may take 0\.144 GiB; .* lower data\.num_prompts to 999"):
        check(f"data.disk_gib={(BYTES - 1) / 2**30}")


def test_fp32_states_take_twice_as_much():
    with pytest.raises(UserError, match=r"lower data\.num_prompts to 500"):
        check(f"data.disk_gib={BYTES / 2**30}", "target.dtype=float32")


def test_a_policy_that_is_not_acted_on_is_refused():
    with pytest.raises(UserError, match="policy rolling is planned with, not acted on yet"):
        check("data.policy=rolling")
