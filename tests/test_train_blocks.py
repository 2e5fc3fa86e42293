"""Slots, positions, labels and visibility, each against the published rule spelt out."""

from dataclasses import replace

import pytest
import torch
from small_training import DRAFTER, make_sequence, untiled
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_mask

from train.batches import pack, worst_case_batch
from train.blocks import (
    anchor_candidates,
    block_places,
    context_places,
    draw_anchors,
    join_places,
    make_blocks,
    visibility,
    visibility_cell_by_cell,
    visible,
)
from train.tiles import Document, attend, cut_tiles

KINDS = ["full_attention", "sliding_attention"]


def test_an_anchor_is_followed_by_a_supervised_token():
    loss_mask = torch.tensor([1, 0, 0, 1, 1, 0, 1], dtype=torch.bool)
    anchors = draw_anchors(loss_mask, num_anchors=99, generator=torch.Generator().manual_seed(0))
    assert anchors.tolist() == [2, 3, 5]


def test_anchors_are_drawn_without_replacement_ascending_and_from_everywhere():
    loss_mask = torch.ones(12, dtype=torch.bool)
    generator = torch.Generator().manual_seed(0)
    draws = [draw_anchors(loss_mask, 4, generator).tolist() for _ in range(200)]
    assert all(draw == sorted(set(draw)) and len(draw) == 4 for draw in draws)
    assert {anchor for draw in draws for anchor in draw} == set(range(11))


def test_every_slot_of_a_three_token_answer_is_supervised_exactly_once_per_anchor():
    tokens = torch.tensor([10, 11, 12, 13, 14], dtype=torch.int32)
    loss_mask = torch.tensor([0, 0, 1, 1, 1], dtype=torch.bool)
    blocks = make_blocks(tokens, loss_mask, torch.tensor([1, 2, 3]), block_size=4, mask_token_id=9)
    assert blocks.input_ids_AK.tolist() == [[11, 9, 9, 9], [12, 9, 9, 9], [13, 9, 9, 9]]
    assert blocks.labels_AK.tolist() == [[0, 12, 13, 14], [0, 13, 14, 0], [0, 14, 0, 0]]
    assert blocks.supervised_AK.int().tolist() == [[0, 1, 1, 1], [0, 1, 1, 0], [0, 1, 0, 0]]


def test_a_slot_outside_the_loss_mask_is_not_supervised_and_no_later_one_is():
    tokens = torch.arange(6, dtype=torch.int32)
    loss_mask = torch.tensor([0, 1, 0, 1, 1, 0], dtype=torch.bool)
    blocks = make_blocks(tokens, loss_mask, torch.tensor([0]), block_size=6, mask_token_id=9)
    assert blocks.supervised_AK.int().tolist() == [[0, 1, 0, 0, 0, 0]]


GAPPED = torch.tensor([0, 0, 1, 1, 0, 0, 0, 1, 1, 1], dtype=torch.bool)


def test_a_block_is_supervised_up_to_the_gap_before_the_next_answer():
    """Anchored before, at the edge of and inside the gap, and so late that blocks end past the document."""
    tokens = torch.arange(20, 30, dtype=torch.int32)
    anchors = torch.tensor([1, 2, 6, 8])
    blocks = make_blocks(tokens, GAPPED, anchors, block_size=7, mask_token_id=9)
    assert blocks.supervised_AK.int().tolist() == [
        [0, 1, 1, 0, 0, 0, 0],  # positions 1 to 7, of which 7 is another answer's
        [0, 1, 0, 0, 0, 0, 0],
        [0, 1, 1, 1, 0, 0, 0],  # the document ends after position 9
        [0, 1, 0, 0, 0, 0, 0],
    ]
    assert blocks.labels_AK.tolist() == [
        [0, 22, 23, 0, 0, 0, 0],
        [0, 23, 0, 0, 0, 0, 0],
        [0, 27, 28, 29, 0, 0, 0],
        [0, 29, 0, 0, 0, 0, 0],
    ]


def test_no_anchor_stands_before_a_gaps_token():
    assert anchor_candidates(GAPPED).tolist() == [1, 2, 6, 7, 8]


def test_no_label_comes_from_beyond_a_packed_documents_end():
    sequences = [make_sequence(0, 20), make_sequence(1, 15)]
    anchors = [anchor_candidates(sequence.loss_mask) for sequence in sequences]
    batch = pack(sequences, anchors, DRAFTER)
    positions = batch.block_positions_Q.view_as(batch.labels_AK)
    lengths = torch.tensor([20] * len(anchors[0]) + [15] * len(anchors[1]))[:, None]
    assert not batch.supervised_AK[positions >= lengths].any()
    assert not batch.labels_AK[positions >= lengths].any()
    assert batch.supervised_AK[:, 1].all()


def rows_of(mask: torch.Tensor) -> list[str]:
    return ["".join("x" if cell else "." for cell in row) for row in mask.tolist()]


def test_visibility_of_one_block_by_hand():
    context, blocks = context_places(0, 7), block_places(0, 0, torch.tensor([6]), block_size=3)
    assert rows_of(visibility("full_attention", 4, context, blocks)) == ["xxxxxx.xxx"] * 3
    assert rows_of(visibility("sliding_attention", 4, context, blocks)) == [
        "...xxx.x..",  # position 6 sees 3, 4, 5 and itself
        "....xx.xx.",
        ".....x.xxx",
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_the_rule_is_a_mask_function_that_a_block_sparse_kernel_can_take(kind):
    context, blocks, _ = two_documents(([0, 2, 9], [3, 4]), 3, (9, 5))
    keys = join_places([context, blocks])

    def mask_function(_batch, _head, query, key):
        return visible(kind, 4, blocks[query], keys[key])

    mask = create_mask(mask_function, 1, 1, len(blocks.position), len(keys.position), device="cpu")
    assert torch.equal(mask[0, 0], visibility(kind, 4, context, blocks))


def two_documents(anchors: tuple[list[int], list[int]], block_size: int, lengths: tuple[int, int]):
    first, second = (torch.tensor(positions) for positions in anchors)
    context = join_places([context_places(0, lengths[0]), context_places(1, lengths[1])])
    blocks = join_places(
        [block_places(0, 0, first, block_size), block_places(1, len(first), second, block_size)]
    )
    boundary = len(first) * block_size
    documents = [
        Document(slice(0, lengths[0]), slice(0, boundary)),
        Document(slice(lengths[0], sum(lengths)), slice(boundary, len(blocks.position))),
    ]
    return context, blocks, documents


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window", [1, 3, 4, 5, 100])
@pytest.mark.parametrize("block_size", [2, 3, 7])
def test_visibility_equals_its_slow_twin(kind, window, block_size):
    context, blocks, _ = two_documents(([0, 1, 2, 9], [3, 4]), block_size, (9, 5))
    fast = visibility(kind, window, context, blocks)
    assert torch.equal(fast, visibility_cell_by_cell(kind, window, context, blocks))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window", [1, 3, 11])
@pytest.mark.parametrize(("tile_rows", "stack_keys"), [(1, 64), (6, 200), (9, 1 << 15), (64, 1 << 15)])
@pytest.mark.parametrize("key_step", [1, 64])
def test_tiles_lose_nothing_of_the_dense_attention(
    kind, window, tile_rows, stack_keys, key_step, monkeypatch
):
    monkeypatch.setattr("train.tiles.TILE_ROWS", tile_rows)
    monkeypatch.setattr("train.tiles.STACK_KEYS", stack_keys)
    monkeypatch.setattr("train.tiles.KEY_STEP", key_step)
    context, blocks, documents = two_documents(([0, 1, 7, 13], [2, 3, 5]), 3, (13, 5))
    tiling = cut_tiles(kind, window, context, blocks, documents, block_size=3)
    generator = torch.Generator().manual_seed(0)
    of_context = [torch.randn(18, 2, 8, generator=generator) for _ in range(2)]
    of_blocks = [torch.randn(21, 2, 8, generator=generator) for _ in range(2)]
    query = torch.randn(21, 4, 8, generator=generator)
    keys, values = (torch.cat(pair).transpose(0, 1) for pair in zip(of_context, of_blocks, strict=True))
    mask = visibility(kind, window, context, blocks)
    expected = F.scaled_dot_product_attention(
        query.transpose(0, 1), keys, values, attn_mask=mask, enable_gqa=True
    ).transpose(0, 1)
    torch.testing.assert_close(attend(query, tuple(of_context), tuple(of_blocks), tiling), expected)
    dense = untiled(mask)
    torch.testing.assert_close(attend(query, tuple(of_context), tuple(of_blocks), dense), expected)


def test_a_packed_batch_holds_each_document_up_to_before_its_last_anchor():
    sequences = [make_sequence(0, 20), make_sequence(1, 15)]
    batch = pack(sequences, [torch.tensor([8, 11]), torch.tensor([6])], DRAFTER)
    assert batch.context_positions_S.tolist() == [*range(11), *range(6)]
    assert torch.equal(batch.taps_SE, torch.cat([sequences[0].hidden[:11], sequences[1].hidden[:6]]))
    assert batch.block_positions_Q.view(3, 4)[:, 0].tolist() == [8, 11, 6]
    assert batch.num_tokens == 35


def test_final_states_are_packed_by_slot_where_the_sequences_have_them():
    sequences = [
        replace(each, final=torch.arange(len(each.token_ids) - 1.0)[:, None] + 100 * number)
        for number, each in enumerate([make_sequence(0, 20), make_sequence(1, 15)])
    ]
    batch = pack(sequences, [torch.tensor([8, 11]), torch.tensor([6])], DRAFTER)
    before = batch.block_positions_Q - 1  # the state that predicts a slot's token
    of_second = torch.arange(12) >= 8
    assert torch.equal(batch.final_QD[:, 0], before + 100.0 * of_second)
    assert (
        pack(sequences[:1], [torch.tensor([8])], DRAFTER).to("cpu", torch.bfloat16).final_QD.dtype
        == torch.bfloat16
    )
    bare = [replace(each, final=None) for each in sequences]
    assert pack(bare, [torch.tensor([8]), torch.tensor([6])], DRAFTER).final_QD is None


def test_no_batch_is_larger_than_the_worst_case():
    worst = worst_case_batch(2, num_tokens=36, num_anchors=5, drafter=DRAFTER, hidden_size=32)
    assert worst.supervised_AK[:, 1].all()
    for index in range(20):
        sequences = [make_sequence(index), make_sequence(index + 1)]
        generator = torch.Generator().manual_seed(index)
        batch = pack(sequences, [draw_anchors(s.loss_mask, 5, generator) for s in sequences], DRAFTER)
        assert batch.input_ids_Q.shape <= worst.input_ids_Q.shape
        assert batch.taps_SE.shape <= worst.taps_SE.shape
