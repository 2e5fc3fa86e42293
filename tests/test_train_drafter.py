"""The drafter against the authors' own (PyPI dflash 0.1.0), and what a block must not depend on."""

from dataclasses import replace

import pytest
import torch
from dflash.model import DFlashDraftModel
from small_training import DRAFTER, HIDDEN, MASK_ID, TAPS_SIZE, VOCAB, make_sequence, untiled
from transformers import Qwen3Config

from serve.checkpoint import published_config
from train.batches import pack
from train.blocks import Places, block_places, context_places, visibility
from train.drafter import DFlashDrafter

WINDOW, BLOCK = DRAFTER.sliding_window, DRAFTER.block_size
TARGET_CONFIG = {"hidden_size": HIDDEN, "vocab_size": VOCAB, "num_hidden_layers": 8}
S, F = "sliding_attention", "full_attention"


def make_drafter(seed: int = 0, **changes) -> DFlashDrafter:
    """Random norms too, so that a norm in the wrong place shows."""
    torch.manual_seed(seed)
    drafter = DFlashDrafter(DRAFTER.model_copy(update=changes), HIDDEN)
    for parameter in drafter.parameters():
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, mean=1.0, std=0.2)
    return drafter.eval()


def authors_twin(drafter: DFlashDrafter) -> DFlashDraftModel:
    twin = DFlashDraftModel(Qwen3Config(**published_config(drafter.shape, TARGET_CONFIG))).float().eval()
    twin.load_state_dict(drafter.state_dict())
    return twin


def shifted(places: Places, by: int) -> Places:
    return replace(places, position=places.position + by, anchor=places.anchor + by)


def draft(drafter: DFlashDrafter, taps_SE, block_KD, first_position: int = 0, gap: int = 0) -> torch.Tensor:
    """One block, `gap` positions beyond the end of the context that begins at `first_position`. [K, D]"""
    context = shifted(context_places(0, len(taps_SE)), first_position)
    anchor = torch.tensor([len(taps_SE)])
    blocks = shifted(block_places(0, 0, anchor, len(block_KD)), first_position + gap)
    views = {
        kind: untiled(visibility(kind, drafter.shape.sliding_window, context, blocks)) for kind in (S, F)
    }
    with torch.no_grad():
        return drafter(taps_SE, context.position, block_KD, blocks.position, views)


def draft_by_authors(twin: DFlashDraftModel, taps_SE, block_KD, first_position: int = 0) -> torch.Tensor:
    positions = torch.arange(first_position, first_position + len(taps_SE) + len(block_KD))
    with torch.no_grad():
        return twin(
            position_ids=positions[None], noise_embedding=block_KD[None], target_hidden=taps_SE[None]
        )[0]


def random_inputs(num_context: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    taps_SE = torch.randn(num_context, TAPS_SIZE, generator=generator)
    return taps_SE, torch.randn(BLOCK, HIDDEN, generator=generator)


@pytest.mark.parametrize("layer_types", [[S, S, S], [F, F, F], [S, F, S]])
@pytest.mark.parametrize("num_context", [0, 1, WINDOW - BLOCK, WINDOW - 1, WINDOW, WINDOW + 1, 40])
@pytest.mark.parametrize("first_position", [0, 1, 5000])
def test_forward_equals_the_authors(layer_types, num_context, first_position):
    drafter = make_drafter(layer_types=layer_types)
    inputs = random_inputs(num_context)
    ours = draft(drafter, *inputs, first_position)
    torch.testing.assert_close(
        ours, draft_by_authors(authors_twin(drafter), *inputs, first_position), atol=2e-5, rtol=1e-4
    )


def test_the_authors_weights_load_into_ours():
    theirs = authors_twin(make_drafter(seed=3))
    ours = make_drafter(seed=4)
    ours.load_state_dict(theirs.state_dict())
    inputs = random_inputs(9)
    torch.testing.assert_close(draft(ours, *inputs), draft_by_authors(theirs, *inputs), atol=2e-5, rtol=1e-4)


def differs(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return float((ours - theirs).abs().max()) > 1e-3


@pytest.mark.parametrize("off_by", [-1, 1])
def test_a_window_off_by_one_is_seen(off_by):
    inputs = random_inputs(WINDOW + 3)
    twin = authors_twin(make_drafter())
    wrong = make_drafter(sliding_window=WINDOW + off_by)
    assert differs(draft(wrong, *inputs), draft_by_authors(twin, *inputs))


@pytest.mark.parametrize("off_by", [-1, 1])
def test_a_block_one_position_off_is_seen(off_by):
    inputs = random_inputs(20)
    drafter = make_drafter(layer_types=[F, F, F])
    assert differs(draft(drafter, *inputs, first_position=1, gap=off_by), draft(drafter, *inputs))


def test_another_tap_is_seen():
    taps_SE, block_KD = random_inputs(9)
    drafter = make_drafter()
    other = taps_SE.clone()
    other[:, :HIDDEN] = torch.randn(9, HIDDEN, generator=torch.Generator().manual_seed(7))
    swapped = taps_SE.roll(HIDDEN, dims=1)
    expected = draft_by_authors(authors_twin(drafter), taps_SE, block_KD)
    assert differs(draft(drafter, other, block_KD), expected)
    assert differs(draft(drafter, swapped, block_KD), expected)


def test_context_shifted_by_one_token_is_seen():
    taps_SE, block_KD = random_inputs(9)
    drafter = make_drafter()
    expected = draft_by_authors(authors_twin(drafter), taps_SE[:-1], block_KD)
    assert differs(draft(drafter, taps_SE[1:], block_KD), expected)
    assert differs(draft(drafter, taps_SE, block_KD), expected)


def test_another_mask_id_is_seen():
    embedding = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(2))
    taps_SE, _ = random_inputs(9)
    drafter = make_drafter()
    right, wrong = (embedding[[5] + [mask_id] * (BLOCK - 1)] for mask_id in (MASK_ID, MASK_ID - 1))
    assert differs(draft(drafter, taps_SE, wrong), draft_by_authors(authors_twin(drafter), taps_SE, right))


# What a block must not depend on

ANCHORS = [torch.tensor([7, 9, 10, 15]), torch.tensor([6, 11])]
EMBEDDING = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(2))


def hidden_of_blocks(drafter: DFlashDrafter, sequences, anchors=ANCHORS) -> torch.Tensor:
    """[A, K, D]"""
    batch = pack(sequences, anchors, drafter.shape)
    with torch.no_grad():
        hidden_QD = drafter(
            batch.taps_SE.float(),
            batch.context_positions_S,
            EMBEDDING[batch.input_ids_Q],
            batch.block_positions_Q,
            batch.views,
        )
    return hidden_QD.unflatten(0, (-1, BLOCK))


def two_sequences():
    return [make_sequence(0, 20), make_sequence(1, 15)]


def changed_from(sequence, position: int):
    """Other tokens after `position`, other features from `position` on."""
    token_ids, hidden = sequence.token_ids.clone(), sequence.hidden.clone()
    token_ids[position + 1 :] = (token_ids[position + 1 :] + 17) % 90
    hidden[position:] += 3.0
    return replace(sequence, token_ids=token_ids, hidden=hidden)


@pytest.mark.parametrize("block", range(4))
def test_nothing_at_or_after_its_anchor_changes_a_block(block):
    drafter, (first, second) = make_drafter(), two_sequences()
    before = hidden_of_blocks(drafter, [first, second])
    after = hidden_of_blocks(drafter, [changed_from(first, int(ANCHORS[0][block])), second])
    assert torch.equal(before[: block + 1], after[: block + 1])
    assert not torch.equal(before[block + 1 : 4], after[block + 1 : 4]) or block == 3


def test_the_feature_just_before_an_anchor_does_change_its_block():
    drafter, (first, second) = make_drafter(), two_sequences()
    before = hidden_of_blocks(drafter, [first, second])
    after = hidden_of_blocks(drafter, [changed_from(first, int(ANCHORS[0][0]) - 1), second])
    assert not torch.equal(before[0], after[0])


def test_another_document_changes_nothing():
    drafter, (first, second) = make_drafter(), two_sequences()
    before = hidden_of_blocks(drafter, [first, second])
    after = hidden_of_blocks(drafter, [changed_from(first, 0), second])
    assert torch.equal(before[4:], after[4:])


def test_the_inputs_of_other_blocks_change_nothing():
    drafter = make_drafter()
    batch = pack(two_sequences(), ANCHORS, drafter.shape)
    inputs_QD = EMBEDDING[batch.input_ids_Q].requires_grad_()
    taps_SE = batch.taps_SE.float().requires_grad_()
    hidden_QD = drafter(taps_SE, batch.context_positions_S, inputs_QD, batch.block_positions_Q, batch.views)
    for block in range(6):
        rows = slice(block * BLOCK, (block + 1) * BLOCK)
        by_inputs, by_taps = torch.autograd.grad(
            hidden_QD[rows].square().sum(), (inputs_QD, taps_SE), retain_graph=True
        )
        own = torch.zeros(len(by_inputs), dtype=torch.bool)
        own[rows] = True
        assert torch.equal(by_inputs.ne(0).any(1), own)
        assert torch.equal(by_taps.ne(0).any(1), context_before(batch, block))


def context_before(batch, block: int) -> torch.Tensor:
    document = 0 if block < 4 else 1
    mine = torch.zeros(len(batch.taps_SE), dtype=torch.bool)
    mine[batch.documents[document].context] = True
    return mine & (batch.context_positions_S < int(torch.cat(ANCHORS)[block]))


def test_packed_documents_give_what_each_gives_alone():
    drafter, sequences = make_drafter(), two_sequences()
    together = hidden_of_blocks(drafter, sequences)
    alone = [
        hidden_of_blocks(drafter, [sequence], [anchors])
        for sequence, anchors in zip(sequences, ANCHORS, strict=True)
    ]
    torch.testing.assert_close(together, torch.cat(alone), atol=1e-5, rtol=1e-5)


def test_recomputing_the_layers_changes_no_gradient():
    gradients = []
    for recompute in (False, True):
        drafter = make_drafter()
        drafter.recompute_layers = recompute
        batch = pack(two_sequences(), ANCHORS, drafter.shape)
        inputs = (batch.taps_SE.float(), batch.context_positions_S, EMBEDDING[batch.input_ids_Q])
        drafter(*inputs, batch.block_positions_Q, batch.views).square().sum().backward()
        gradients.append([parameter.grad for parameter in drafter.parameters()])
    for plain, recomputed in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, recomputed)


def test_the_kernels_of_a_gpu_give_the_gradients_of_a_cpus_tiles():
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # where kernels are interpreted
    batch = pack(two_sequences(), ANCHORS, DRAFTER).to(device, torch.float32)
    tilings = {kind: tiling.to(device) for kind, tiling in batch.cut_tiles().items()}
    embedded_QD, gradients = EMBEDDING.to(device)[batch.input_ids_Q], []
    for views in (batch.layouts, tilings):
        drafter = make_drafter().to(device)
        inputs = (batch.taps_SE, batch.context_positions_S, embedded_QD, batch.block_positions_Q)
        drafter(*inputs, views).square().sum().backward()
        gradients.append([parameter.grad for parameter in drafter.parameters()])
    for by_kernels, by_tiles in zip(*gradients, strict=True):
        torch.testing.assert_close(by_kernels, by_tiles, atol=5e-4, rtol=1e-4)
