"""tests/train_speed.py counts what a step computes."""

import pytest
import torch
from drafters import tiny_recipe
from train_speed import count_pairs

from data.shards import Sequence
from train.batches import pack
from train.blocks import block_places, context_places, visibility
from train.feed import MicroBatch, Visit


@pytest.mark.parametrize("window", [1, 3, 7, 64])
@pytest.mark.parametrize("kind", ["full_attention", "sliding_attention"])
def test_pairs_are_those_that_see_each_other(kind, window):
    drafter = tiny_recipe(f"drafter.sliding_window={window}", "drafter.block_size=5").drafter
    anchors_A = torch.tensor([0, 1, 4, 9, 17])
    sequence = Sequence(torch.arange(20).int(), torch.ones(20, dtype=torch.bool), torch.zeros(19, 6))
    micro = MicroBatch((Visit(0, 0),), pack([sequence], [anchors_A], drafter))
    context, blocks = context_places(0, 17), block_places(0, 0, anchors_A, 5)
    seen = visibility(kind, window, context, blocks)
    assert count_pairs(micro, drafter, kind) == int(seen.sum())
