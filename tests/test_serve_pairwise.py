"""A pairwise head's file beside a drafter, and its table; the definition is in test_train_pairwise.py."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from recipes.errors import UserError
from serve.drafter_config import PAIRWISE_NAME
from serve.pairwise import PairwiseTables, fill_table, read_pairwise, score_after, walk_chain, write_pairwise

HIDDEN, VOCAB, RANK, SLOTS, COUNT = 8, 29, 3, 4, 5


def make_tables(seed: int = 0) -> PairwiseTables:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((VOCAB, RANK), (VOCAB, RANK), (RANK, HIDDEN), (RANK,))
    return PairwiseTables(*(torch.randn(shape, generator=generator).bfloat16() for shape in shapes))


def test_what_is_written_is_read(tmp_path):
    tables = make_tables()
    write_pairwise(tmp_path, tables)
    found = read_pairwise(tmp_path, HIDDEN, VOCAB)
    assert found is not None
    assert found.rank == RANK
    assert all(torch.equal(vars(found)[name], each) for name, each in vars(tables).items())


def test_loaders_of_a_checkpoints_own_weights_do_not_see_it(tmp_path):
    write_pairwise(tmp_path, make_tables())
    assert list(tmp_path.glob("*.safetensors")) == []  # as vLLM looks for weights


def test_a_checkpoint_without_one_has_none(tmp_path):
    assert read_pairwise(tmp_path, HIDDEN, VOCAB) is None


@pytest.mark.parametrize(("hidden_size", "vocab_size"), [(HIDDEN + 1, VOCAB), (HIDDEN, VOCAB - 1)])
def test_a_head_of_another_drafter_is_refused(tmp_path, hidden_size, vocab_size):
    write_pairwise(tmp_path, make_tables())
    with pytest.raises(UserError, match="this head is of another target or drafter"):
        read_pairwise(tmp_path, hidden_size, vocab_size)


def test_a_damaged_file_is_refused(tmp_path):
    path = write_pairwise(tmp_path, make_tables())
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"pairwise/head\.safetensors: no safetensors file"):
        read_pairwise(tmp_path, HIDDEN, VOCAB)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda tensors: tensors["gate_rD"].view(-1)[3:4].fill_(torch.nan), "gate_rD holds a number"),
        (lambda tensors: tensors.pop("rest_r"), "expected"),
    ],
)
def test_a_head_with_a_fault_is_refused(tmp_path, change, complaint):
    path = write_pairwise(tmp_path, make_tables())
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"draftsmith_pairwise": "1"})
    with pytest.raises(UserError, match=complaint):
        read_pairwise(tmp_path, HIDDEN, VOCAB)


def test_a_file_of_another_kind_is_refused(tmp_path):
    path = tmp_path / PAIRWISE_NAME
    path.parent.mkdir()
    save_file({"a": torch.zeros(1)}, path)
    with pytest.raises(UserError, match="a pairwise head of version None, expected 1"):
        read_pairwise(tmp_path, HIDDEN, VOCAB)


def test_a_rows_parent_is_the_candidate_of_the_slot_before_and_the_firsts_the_anchor():
    tables, generator = make_tables(), torch.Generator().manual_seed(1)
    hidden_BLD = torch.randn(2, SLOTS, HIDDEN, generator=generator).bfloat16()
    tokens_BLC = torch.randint(0, VOCAB, (2, SLOTS, COUNT), generator=generator)
    log_probs_BLC = torch.randn(2, SLOTS, VOCAB, generator=generator).log_softmax(-1)[..., :COUNT]
    anchors_B = torch.tensor([3, 17])
    table_BLCC = fill_table(tables, hidden_BLD, anchors_B, tokens_BLC, log_probs_BLC)
    for slot in range(SLOTS):
        for row in range(COUNT):
            parents_B = anchors_B if slot == 0 else tokens_BLC[:, slot - 1, row]
            parents_BL1 = parents_B[:, None, None].expand(-1, SLOTS, 1)
            scores = score_after(tables, hidden_BLD, parents_BL1, tokens_BLC, log_probs_BLC)
            expected_BC = scores.candidates_BLPC[:, slot, 0]
            torch.testing.assert_close(table_BLCC[:, slot, row], expected_BC, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("rank", [1, RANK])
def test_tables_copied_into_wider_ones_give_the_same_scores_and_none_the_drafters_own(rank):
    wide = PairwiseTables.without_effect(VOCAB, HIDDEN, RANK + 2, dtype=torch.bfloat16)
    tables = PairwiseTables(*(each[..., :rank] for each in vars(make_tables()).values()))
    tables = PairwiseTables(
        tables.parents_Vr, tables.children_Vr, make_tables().gate_rD[:rank], tables.rest_r
    )
    generator = torch.Generator().manual_seed(2)
    log_probs_BLC = torch.randn(1, SLOTS, VOCAB, generator=generator).log_softmax(-1)[..., :COUNT]
    drafted = (
        torch.randn(1, SLOTS, HIDDEN, generator=generator).bfloat16(),
        torch.tensor([5]),
        torch.randint(0, VOCAB, (1, SLOTS, COUNT), generator=generator),
        log_probs_BLC,
    )
    wide.copy_(make_tables(3))  # whose traces must go
    wide.copy_(tables)
    torch.testing.assert_close(fill_table(wide, *drafted), fill_table(tables, *drafted), rtol=1e-6, atol=1e-6)
    wide.copy_(None)
    marginals = log_probs_BLC[:, :, None].expand(-1, -1, COUNT, -1)
    torch.testing.assert_close(fill_table(wide, *drafted), marginals, rtol=0, atol=2e-6)


def test_a_chain_takes_the_best_after_what_it_took_and_the_lower_of_equals():
    scores_BLCC = -torch.randint(1, 4, (64, SLOTS, COUNT, COUNT), generator=torch.Generator().manual_seed(4))
    for request, found in zip(scores_BLCC.float(), walk_chain(scores_BLCC.float()).tolist(), strict=True):
        at, expected = 0, []
        for of_slot in request.tolist():
            at = of_slot[at].index(max(of_slot[at]))
            expected.append(at)
        assert found == expected
