"""train/code_target.py: the targets that measurements are made on."""

from dataclasses import replace

import pytest
import torch
from transformers import Qwen3_5ForCausalLM

from data.python_source import find_all_chats, read_sources, standard_library_files
from recipes.load import load_recipe
from recipes.target_config import check_against_target
from train.code_target import (
    SIZES,
    SPECIAL_TOKENS,
    Corpus,
    Schedule,
    architecture,
    encode_stream,
    pack_chats,
    train,
    train_tokenizer,
)

HYBRID = "recipes/hybrid_code_dflash.yaml"
ROW_TOKENS = 64
SCHEDULE = Schedule(
    steps=6,
    seed=0,
    rows=4,
    row_tokens=ROW_TOKENS,
    chat_share=0.5,
    answer_lines=8,
    learning_rate=3e-3,
    warmup_steps=1,
    weight_decay=0.1,
)


def count_parameters(size: str) -> int:
    with torch.device("meta"):
        return sum(each.numel() for each in Qwen3_5ForCausalLM(architecture(SIZES[size])).parameters())


def test_the_targets_are_as_large_as_is_said():
    assert count_parameters("embedded") == pytest.approx(9.74e6, rel=0.01)
    assert count_parameters("code") == pytest.approx(104e6, rel=0.02)


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    sources = list(read_sources(standard_library_files(held_out=False)[:12]))
    texts, chats = [text for _, text in sources], find_all_chats(sources, SCHEDULE.answer_lines)
    tokenizer = train_tokenizer(texts, SIZES["tiny"].vocab_size)
    assert tokenizer.convert_tokens_to_ids(SPECIAL_TOKENS) == list(range(len(SPECIAL_TOKENS)))
    rows = pack_chats(tokenizer, chats, ROW_TOKENS)
    return Corpus(encode_stream(tokenizer, texts), rows, rows[:2], rows[:2])


def test_a_target_learns(corpus):
    torch.manual_seed(0)
    model = Qwen3_5ForCausalLM(architecture(SIZES["tiny"]))
    losses = train(model, corpus, SCHEDULE)
    assert len(losses) == SCHEDULE.steps
    assert losses[-1] < losses[0] - 0.2


def test_a_loss_that_is_not_finite_stops_the_training(corpus):
    torch.manual_seed(0)
    model = Qwen3_5ForCausalLM(architecture(SIZES["tiny"]))
    with torch.no_grad():
        model.lm_head.weight[5] = torch.nan
    with pytest.raises(FloatingPointError, match="loss is nan at step"):
        train(model, corpus, replace(SCHEDULE, steps=1))


def test_the_hybrid_recipe_fits_its_target(tmp_path):
    config = architecture(SIZES["code"])
    config.architectures = ["Qwen3_5ForCausalLM"]
    config.save_pretrained(tmp_path)
    recipe = load_recipe(HYBRID, [f"target.model={tmp_path}"])
    check_against_target(recipe)
    assert recipe.drafter.mask_token_id == SPECIAL_TOKENS.index("<|mask|>")
