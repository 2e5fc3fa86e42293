"""Each NumPy stand-in gives its Triton kernel's results bit for bit, on odd sizes.

A case builds a launch (tests/kernel_launches.py) from a seed, twice: once for the interpreted kernel, once
for the stand-in.  The tensors that the kernel writes must be equal afterwards.
"""

import importlib
from collections.abc import Callable
from typing import Any

import kernel_launches
import pytest
import torch
from kernel_launches import SLOTS, Draws, Launch

pytest.importorskip("vllm")
if torch.cuda.is_available():
    pytest.skip("the stand-ins are for Triton's interpreter", allow_module_level=True)

import vllm.v1.worker.cpu_worker  # noqa: F401  (patches what the kernels' modules import, so it comes first)

from serve.cpu_kernels import STAND_INS, batch, drafting, looking_up, sampling, selecting
from serve.cpu_kernels.launch import HostKernel, StandIn, install
from serve.seam.checks import SeamError

CASES: list[tuple[StandIn, Callable[[Draws], Launch]]] = [
    (sampling.scale_by_temperature, kernel_launches.make_scale),
    (sampling.draw_tokens, kernel_launches.make_draw),
    (sampling.draw_tokens, kernel_launches.make_draft_draw),
    (sampling.take_log_softmax, kernel_launches.make_log_softmax),
    (sampling.rank_tokens, kernel_launches.make_ranks),
    (batch.map_slots, kernel_launches.make_map_slots),
    (batch.gather_block_tables, kernel_launches.make_gather),
    (batch.zero_blocks, kernel_launches.make_zero),
    (batch.write_staged, kernel_launches.make_write),
    (batch.write_staged, kernel_launches.make_plain_write),
    (batch.take_prompt_tokens, kernel_launches.make_prompt_tokens),
    (batch.place_queries, kernel_launches.make_places),
    (batch.combine_tokens, kernel_launches.make_combine),
    (batch.count_sampled, kernel_launches.make_counts),
    (batch.commit_tokens, kernel_launches.make_commit),
    (batch.expand_slots, kernel_launches.make_expand),
    (batch.scatter_accepted, kernel_launches.make_scatter),
    (drafting.prepare_drafter, kernel_launches.make_drafter),
]


def interpreted(stand_in: StandIn) -> Any:
    module, _, name = stand_in.kernel.rpartition(".")
    found = getattr(importlib.import_module(module), name)
    return found.kernel if isinstance(found, HostKernel) else found


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(("stand_in", "make"), CASES, ids=[make.__name__ for _, make in CASES])
def test_stand_in_equals_its_kernel(stand_in, make, seed):
    expected, found = make(Draws(seed)), make(Draws(seed))
    kernel = interpreted(stand_in)
    assert stand_in.function(HostKernel(kernel, stand_in).bind(found.grid, **found.arguments)) is not False
    kernel[expected.grid](**expected.arguments)
    for wanted, got in zip(expected.written, found.written, strict=True):
        assert torch.equal(wanted, got)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rejection_sampling_gives_the_kernels_tokens(monkeypatch, seed, dtype):
    module = importlib.import_module("vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils")

    def run(draws: Draws) -> tuple[torch.Tensor, torch.Tensor]:
        requests, drafts, vocab = 6, 3, 9001  # two blocks of the vocabulary
        bounds = draws.starts(requests, drafts + 1)
        rows, slots = int(bounds[-1]), draws.slots(requests)
        row_of, number = batch.number_rows(bounds.numpy())
        logits = draws.logits(rows, vocab, dtype=dtype)
        likely = logits.argmax(-1).roll(1)  # the target's own choice of the row before
        drafted = torch.where(draws.integers(0, 4, rows) > 0, likely, draws.integers(-1, vocab, rows))
        return module.rejection_sample(
            target_logits=logits * 5,
            draft_logits=None,
            draft_sampled=drafted.to(torch.int32),
            cu_num_logits=bounds,
            pos=draws.integers(0, 300_000, rows, dtype=torch.int64),
            idx_mapping=slots,
            expanded_idx_mapping=slots[torch.from_numpy(row_of)],
            expanded_local_pos=torch.from_numpy(number).to(torch.int32),
            temperature=draws.temperatures(),
            seed=draws.integers(0, 2**62, SLOTS, dtype=torch.int64),
            num_speculative_steps=drafts,
        )

    for stand_in in drafting.STAND_INS[1:]:
        monkeypatch.setattr(module, stand_in.kernel.rpartition(".")[2], interpreted(stand_in))
    tokens, counts = run(Draws(seed))
    for stand_in in drafting.STAND_INS[1:]:
        replaced = HostKernel(interpreted(stand_in), stand_in)
        monkeypatch.setattr(module, stand_in.kernel.rpartition(".")[2], replaced)
    quick_tokens, quick_counts = run(Draws(seed))
    assert counts.tolist() == quick_counts.tolist()
    for row, count in enumerate(counts.tolist()):
        assert tokens[row, :count].tolist() == quick_tokens[row, :count].tolist()


def test_ranks_of_bf16_logits_are_those_of_their_values():
    launch = kernel_launches.make_ranks(Draws(0))
    logits = launch.arguments["logits_ptr"].bfloat16()
    arguments = launch.arguments | {"logits_ptr": logits}
    kernel = HostKernel(interpreted(sampling.rank_tokens), sampling.rank_tokens)
    kernel[launch.grid](**arguments)
    own = logits.gather(1, arguments["token_ids_ptr"][:, None])
    assert torch.equal(launch.written[0], (logits >= own).sum(dim=1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_grammars_masks_forbid_what_they_do_not_name(dtype):
    """The kernel itself is an error in the interpreter, so cell by cell."""
    draws, vocab, words, stride = Draws(0), 70, 3, 4
    bounds = torch.tensor([0, 1, 4, 6], dtype=torch.int32)
    logits = draws.logits(6, vocab, dtype=dtype)
    places = torch.tensor(
        [1 * stride + 2, 0, 2 * stride + 3, 1 * stride], dtype=torch.int32
    )  # one is not there
    masks = draws.integers(-(2**31), 2**31, 4, words, dtype=torch.int32)
    expected = logits.clone()
    for mask, place in zip(masks.tolist(), places.tolist(), strict=True):
        request, row = divmod(place, stride)
        for token in range(vocab):
            is_allowed = mask[token // 32] >> token % 32 & 1
            if not is_allowed and row < int(bounds[request + 1] - bounds[request]):
                expected[int(bounds[request]) + row, token] = -torch.inf
    kernel = HostKernel(interpreted(sampling.forbid_tokens), sampling.forbid_tokens)
    sizes = {"MASK_STRIDE": stride, "BLOCK_SIZE": 8192}
    kernel[4, 1](logits, vocab, places, bounds, masks, words, vocab, **sizes)
    assert torch.equal(logits, expected)
    assert expected.isinf().any()


@pytest.mark.parametrize("seed", range(3))
def test_a_walk_takes_what_the_selector_likes_best_after_what_it_took(seed):
    """This kernel, too, is an error in the interpreter, so slot by slot."""
    draws, requests, slots, count = Draws(seed), 5, 3, 6
    scores = draws.integers(-3, 3, requests, slots, count, count).float()  # many are equal
    candidates = draws.integers(0, 2051, requests, slots, count, dtype=torch.int64)
    state = draws.slots(requests).repeat_interleave(slots)
    state[-slots:] = -1  # padding
    tokens = torch.full((SLOTS, slots), -7)
    realized = torch.full((SLOTS, slots, count), -7.0)
    wanted_tokens, wanted_realized = tokens.clone(), realized.clone()
    for request in range(requests - 1):
        at = 0
        for slot in range(slots):
            row = scores[request, slot, at].tolist()
            wanted_realized[request, slot] = torch.tensor(row)
            at = row.index(max(row))
            wanted_tokens[request, slot] = candidates[request, slot, at]
    unread = (
        torch.zeros(requests * slots, dtype=torch.int64),
        state,
        draws.temperatures(),
        draws.slots(SLOTS),
    )
    sizes = {
        "num_steps": slots,
        "top_k": count,
        "BLOCK_K": 8,
        "SAMPLE_PROBABILISTIC": False,
        "USE_FP64": False,
    }
    kernel = HostKernel(interpreted(selecting.walk_selected), selecting.walk_selected)
    kernel[(requests,)](scores, candidates, *unread, tokens, realized, num_warps=1, **sizes)
    assert tokens.equal(wanted_tokens)
    assert realized.equal(wanted_realized)


@pytest.mark.parametrize("seed", range(4))
def test_matches_are_the_kernels(seed):
    """In texts of three words, some too short; what lies behind a text's end matches, and is none of it."""
    draws, longest, requests = Draws(seed), 50, 6
    texts = draws.integers(0, 3, SLOTS, longest)
    sampled = torch.tensor([1, 1, 2, 0, 1, 1], dtype=torch.int32)
    lengths = draws.integers(1, longest + 1, SLOTS)
    named = {
        "token_ids_ptr": texts,
        "token_ids_stride": longest,
        "idx_mapping_ptr": draws.slots(requests),
        "total_len_ptr": lengths,
        "num_sampled_ptr": sampled,
        "scratch_stride": 5,
    }
    sizes = {"L": longest, "MIN_N": 2, "MAX_N": 5, "MAX_N_PO2": 8, "BLOCK_L": 16}
    kernel = interpreted(looking_up.find_matches)
    wanted, found = torch.full((2, SLOTS, 5), -7)
    kernel[requests, 4](**named, scratch_ptr=wanted, **sizes)
    HostKernel(kernel, looking_up.find_matches)[requests, 4](**named, scratch_ptr=found, **sizes)
    assert torch.equal(wanted, found)
    assert found.any()


def test_what_followed_a_match_is_drafted_up_to_the_end_of_the_text():
    """This kernel, too, is an error in the interpreter.  A match of n tokens at p is n * (L + 1) + p + 1."""
    longest = 40
    texts = torch.arange(SLOTS * longest, dtype=torch.int32).view(SLOTS, longest)
    slots, num_drafts = torch.tensor([4, 0, 9, 7, 2]), 3
    lengths = torch.full((SLOTS,), longest)
    lengths[0] = 7
    best = torch.tensor([[0, 2], [0, 2], [0, 0], [1, 3], [0, 0]])  # tokens that agree, in each block
    places = torch.tensor([[0, 11], [0, 3], [0, 0], [30, 9], [0, 0]])
    scores = torch.where(best > 0, best * (longest + 1) + places + 1, 0)
    last, sampled = torch.arange(1000, 1000 + SLOTS), torch.tensor([1, 1, 1, 2, 0], dtype=torch.int32)
    drafts = torch.full((5, num_drafts), -7)
    kernel = HostKernel(interpreted(looking_up.copy_continuations), looking_up.copy_continuations)
    strides = {"token_ids_stride": longest, "scratch_stride": 2}
    sizes = {"L": longest, "N_BLOCKS": 2, "K": num_drafts, "K_PO2": 4, "N_BLOCKS_PO2": 2} | strides
    tensors = {"token_ids_ptr": texts, "idx_mapping_ptr": slots, "total_len_ptr": lengths}
    tensors |= {"num_sampled_ptr": sampled, "last_sampled_ptr": last}
    kernel[(5,)](**tensors, scratch_ptr=scores, drafts_ptr=drafts, **sizes)
    assert drafts.tolist() == [
        [4 * longest + 13, 4 * longest + 14, 4 * longest + 15],
        [5, 6, 1000],  # its text has 7 tokens
        [1009] * 3,
        [7 * longest + 12, 7 * longest + 13, 7 * longest + 14],  # the longer match, not the later
        [1002] * 3,
    ]


def test_every_stand_in_is_compared():
    alone = [
        *drafting.STAND_INS[1:],
        sampling.forbid_tokens,
        selecting.walk_selected,
        *looking_up.STAND_INS,
    ]
    compared = {stand_in.kernel for stand_in, _ in CASES} | {stand_in.kernel for stand_in in alone}
    assert compared == {stand_in.kernel for stand_in in STAND_INS}


def test_a_kernel_with_other_arguments_is_refused_by_name():
    changed = StandIn(batch.scatter_accepted.kernel, ("idx_mapping_ptr",), batch.scatter_accepted.function)
    with pytest.raises(SeamError, match="_scatter_num_accepted_kernel"):
        install([changed])
