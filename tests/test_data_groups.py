"""data/groups.py: which prompts make which shard."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from data.groups import Rendered, group_by_shard, render
from data.prompts import make_prompt
from recipes.schema import Data, DataSampling, Sampling
from tests.drafters import EMBEDDED_TARGET


def data(shard_tokens: int, max_tokens: int) -> Data:
    sampling = DataSampling(max_tokens=max_tokens)
    return Data(prompts="p", num_prompts=1, sampling=sampling, shard_tokens=shard_tokens)


def prompts_of(lengths: list[int]) -> list[Rendered]:
    return [Rendered(f"{number:016x}", [1] * length) for number, length in enumerate(lengths)]


@given(st.lists(st.integers(1, 50)), st.integers(1, 200), st.integers(1, 40))
def test_groups_keep_every_prompt_in_order_and_none_is_empty(lengths, shard_tokens, max_tokens):
    prompts = prompts_of(lengths)
    groups = group_by_shard(prompts, data(shard_tokens, max_tokens))
    assert [prompt for group in groups for prompt in group] == prompts
    assert all(groups)


@given(st.lists(st.integers(1, 50), min_size=1), st.integers(1, 200), st.integers(1, 40))
def test_a_group_is_closed_by_the_prompt_that_fills_it(lengths, shard_tokens, max_tokens):
    for group in group_by_shard(prompts_of(lengths), data(shard_tokens, max_tokens))[:-1]:
        longest = [len(prompt.token_ids) + max_tokens for prompt in group]
        assert sum(longest[:-1]) < shard_tokens <= sum(longest)


def test_a_prompt_ends_with_the_head_of_the_assistants_turn():
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_TARGET)
    (rendered,) = render([make_prompt([{"role": "user", "content": "f(): adds"}])], tokenizer)
    text = "<|im_start|>user\nf(): adds<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(rendered.token_ids) == text


def test_seeds_differ_and_fit_63_bits():
    first, second = Rendered("f" * 16, []), Rendered("f" * 14 + "0f", [])
    assert first.seed != second.seed
    assert 0 <= first.seed < 2**63


def test_each_temperature_of_a_list_gets_its_share_of_the_prompts():
    prompts = [make_prompt([{"role": "user", "content": f"f{number}(): adds"}]) for number in range(3000)]
    sampling = DataSampling(temperature=[0.0, 0.7, 0.7, 1.0], top_k=5)
    taken = Counter(sampling.choose(Rendered(prompt.id, []).seed) for prompt in prompts)
    shares = {temperature: taken[Sampling(temperature=temperature, top_k=5)] for temperature in (0, 0.7, 1)}
    expected = {0: (750, 75), 0.7: (1500, 90), 1: (750, 75)}
    assert shares == {t: pytest.approx(count, abs=by) for t, (count, by) in expected.items()}
