"""data/shard_plan.py: what the shards may take is known before one is written."""

import pytest

from data.groups import Rendered
from data.shard_plan import check_room
from recipes.errors import UserError
from tests.drafters import tiny_recipe

PROMPTS = [Rendered(f"{number}", [1] * 52) for number in range(1000)]  # and 48 tokens of answers
BYTES = 1000 * 100 * (4 * 256 * 2 + 5)  # three taps and the final states


def check(*overrides: str) -> None:
    groups = [PROMPTS[start : start + 100] for start in range(0, 1000, 100)]
    check_room(tiny_recipe(*overrides), groups, hidden_size=256)


def test_shards_fit_to_the_byte():
    check()
    check(f"data.disk_gib={BYTES / 2**30}")
    with pytest.raises(UserError, match=r"may take 0\.191 GiB .* lower data\.num_prompts to 999"):
        check(f"data.disk_gib={(BYTES - 1) / 2**30}")


def test_fp32_states_take_twice_as_much():
    with pytest.raises(UserError, match=r"lower data\.num_prompts to 500"):
        check(f"data.disk_gib={BYTES / 2**30}", "target.dtype=float32")


def test_rolling_shards_need_room_for_the_largest_round():
    rolling = ["data.policy=rolling", "rounds.count=4", "rounds.first_share=0.4"]
    check(*rolling, f"data.disk_gib={0.4 * BYTES / 2**30 + 1e-9}")
    with pytest.raises(UserError, match=r"may take 0\.0765 GiB at a time"):
        check(*rolling, f"data.disk_gib={0.39 * BYTES / 2**30}")
    with pytest.raises(UserError, match=r"data\.policy=rolling and a larger rounds\.count"):
        check("rounds.count=4", f"data.disk_gib={0.4 * BYTES / 2**30}")
