"""serve/tree_gdn.py: every node against the recurrence along its own path; what is committed too."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch.nn import functional as F
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_recurrent_gated_delta_rule
from vllm import _custom_ops

from serve.tree_batch import TreeBatch, WalkBatch, follow_trees, grow_trees, see_ancestors
from serve.tree_gdn import (
    GdnRows,
    commit_conv,
    commit_paths,
    compute_gates,
    convolve_chain,
    convolve_trees,
    run_chain,
    run_chain_by_tokens,
    verify_trees,
)

# Bounds on the largest error over the largest value
TIGHT = 1e-13  # fp64
FP32 = 2e-6  # 5e-7 was seen, of the recurrence itself too
BF16 = 2**-7
COARSE = 1e-3  # what a wrong mask or path must exceed
SLOTS = 15


@dataclass(frozen=True)
class Case:
    budget: int
    batch: int
    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    normalise: bool = True

    @property
    def scale(self) -> float:
        return self.key_dim**-0.5


CASES = [
    Case(1, 1, 1, 1, 8, 8),
    Case(4, 3, 1, 2, 16, 24),
    Case(15, 2, 2, 2, 128, 128),
    Case(31, 5, 2, 4, 24, 16),
    Case(63, 3, 1, 4, 64, 40),
    Case(63, 1, 4, 4, 128, 64),
    Case(15, 4, 2, 2, 24, 8, normalise=False),
]


@dataclass(frozen=True)
class Drawn:
    trees: TreeBatch
    sees_BRR: torch.Tensor
    rows: GdnRows
    state_BHKV: torch.Tensor


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Tensors are so small here that threads only wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def draw_trees(generator: torch.Generator, batch: int, budget: int) -> TreeBatch:
    """Different trees, some narrow and deep; of several requests the first has a chain of 3, then padding."""
    sharpness_B111 = 0.3 + 3 * torch.rand(batch, 1, 1, 1, generator=generator)
    scores = torch.rand(batch, SLOTS, 4, 4, generator=generator).log() * sharpness_B111
    scores[..., 0] /= 8  # a likely first candidate makes deep trees
    if batch > 1:
        scores[0, 3:] = -torch.inf
        scores[0, :, :, 1:] = -torch.inf
    return grow_trees(scores, budget)


def draw_rows(
    generator: torch.Generator, leading: tuple[int, ...], case: Case, dtype: torch.dtype
) -> GdnRows:
    """Keys of a common direction, so that tokens correct one another; decays from none to nearly all."""
    common = torch.randn(case.key_heads, case.key_dim, generator=generator)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*leading, *shape, generator=generator)

    query, key = draw(case.key_heads, case.key_dim), draw(case.key_heads, case.key_dim) + common
    if not case.normalise:
        key = key / (2 * case.key_dim) ** 0.5  # longer ones would make the recurrence itself diverge
    rows = GdnRows(
        query=query,
        key=key,
        value=draw(case.heads, case.value_dim),
        log_decay=-(2.0 ** (3 * draw(case.heads) - 2)),
        beta=draw(case.heads).sigmoid(),
    )
    return rows.each(lambda x: x.to(dtype))


def cut(rows: GdnRows, first: int, end: int) -> GdnRows:
    return rows.each(lambda x: x[first:end])


def draw_state(generator: torch.Generator, case: Case, dtype: torch.dtype, batch: int) -> torch.Tensor:
    shape = (batch, case.heads, case.key_dim, case.value_dim)
    return torch.randn(*shape, generator=generator).to(dtype)


def draw(case: Case, dtype: torch.dtype = torch.float64, seed: int = 0) -> Drawn:
    generator = torch.Generator().manual_seed(seed)
    trees = draw_trees(generator, case.batch, case.budget)
    return Drawn(
        trees,
        see_ancestors(trees.parents_BN, SLOTS),
        draw_rows(generator, (case.batch, 1 + case.budget), case, dtype),
        draw_state(generator, case, dtype, case.batch),
    )


def verify(case: Case, drawn: Drawn, sees_BRR: torch.Tensor | None = None):
    sees_BRR = drawn.sees_BRR if sees_BRR is None else sees_BRR
    return verify_trees(drawn.rows, drawn.state_BHKV, sees_BRR, case.scale, case.normalise)


def rows_above(trees: TreeBatch, request: int, row: int) -> list[int]:
    """A row's path from the committed token down, by the parents alone."""
    found = [row]
    while found[0]:
        found.insert(0, int(trees.parents_BN[request, found[0] - 1]) + 1)
    return found


def leaves(trees: TreeBatch, request: int) -> list[int]:
    """Rows without children: their paths go through every row."""
    count = int(trees.num_nodes_B[request])
    inner = {int(parent) + 1 for parent in trees.parents_BN[request, :count]}
    return [row for row in range(1 + count) if row not in inner]


def recur(case: Case, drawn: Drawn, request: int, path: list[int]):
    """The recurrence along a path, in fp64."""
    rows = drawn.rows.each(lambda x: x[request, path].double())
    return run_chain_by_tokens(rows, drawn.state_BHKV[request].double(), case.scale, case.normalise)


def recur_everywhere(case: Case, drawn: Drawn) -> list[torch.Tensor]:
    """For each request its rows' outputs, padding left out; [rows, H, V]"""
    everywhere = []
    for request in range(case.batch):
        count = int(drawn.trees.num_nodes_B[request])
        outputs = torch.full((1 + count, case.heads, case.value_dim), torch.nan, dtype=torch.float64)
        for leaf in leaves(drawn.trees, request):
            path = rows_above(drawn.trees, request, leaf)
            outputs[path] = recur(case, drawn, request, path).outputs_THV
        assert not outputs.isnan().any()
        everywhere.append(outputs)
    return everywhere


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference over the largest value."""
    return float((found.double() - expected.double()).abs().max() / expected.abs().max())


def errors(outputs_BRHV: torch.Tensor, expected: list[torch.Tensor]) -> list[float]:
    return [error(outputs_BRHV[i, : len(rows)], rows) for i, rows in enumerate(expected)]


def walk_somewhere(trees: TreeBatch, seed: int) -> WalkBatch:
    """The target agrees with a node of each tree, all the way down to it; the first request's with none."""
    generator = torch.Generator().manual_seed(seed)
    batch, budget = trees.parents_BN.shape
    target_tokens = torch.full((batch, 1 + budget), -1)
    for request in range(1 if batch > 1 else 0, batch):
        row = int(torch.randint(1 + int(trees.num_nodes_B[request]), (), generator=generator))
        path = rows_above(trees, request, row)
        target_tokens[request, path[:-1]] = torch.tensor(path[1:], dtype=torch.int64) - 1
    node_tokens = torch.arange(budget).expand(batch, budget)
    return follow_trees(trees, node_tokens, target_tokens, SLOTS)


def path_rows(walks: WalkBatch, request: int) -> list[int]:
    count = int(walks.num_accepted_B[request])
    return [0, *(walks.path_BL[request, :count] + 1).tolist()]


def recur_walks(case: Case, drawn: Drawn, walks: WalkBatch) -> torch.Tensor:
    states = [recur(case, drawn, i, path_rows(walks, i)).state_HKV for i in range(case.batch)]
    return torch.stack(states)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, TIGHT), (torch.float32, FP32)])
def test_every_node_has_the_output_of_the_recurrence_along_its_own_path(case, dtype, bound):
    drawn = draw(case, dtype)
    assert max(errors(verify(case, drawn).outputs_BRHV, recur_everywhere(case, drawn))) < bound


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, TIGHT), (torch.float32, FP32)])
def test_the_committed_state_is_the_recurrences_after_the_accepted_path(case, dtype, bound):
    drawn = draw(case, dtype)
    verified = verify(case, drawn)
    lengths = set()
    for seed in range(3):
        walks = walk_somewhere(drawn.trees, seed)
        lengths.update(walks.num_accepted_B.tolist())
        state = commit_paths(drawn.state_BHKV, verified, walks.path_BL, walks.num_accepted_B)
        assert state.dtype == dtype
        assert error(state, recur_walks(case, drawn, walks)) < bound
    assert case.budget == 1 or len(lengths) > 1


def test_the_trees_are_a_fair_sample():
    drawn = draw(CASES[3])
    assert len({tuple(parents) for parents in drawn.trees.parents_BN.tolist()}) == CASES[3].batch
    depths = drawn.trees.depths_BN.max(1).values
    assert depths[1:].min() >= 3
    assert (drawn.trees.num_nodes_B < CASES[3].budget).any()
    assert all(len(leaves(drawn.trees, request)) > 3 for request in range(1, CASES[3].batch))
    decay = drawn.rows.log_decay.exp()
    assert decay.min() < 0.01
    assert decay.max() > 0.99


def test_verifying_changes_nothing_it_was_given():
    case = CASES[3]
    drawn, again = draw(case), draw(case)
    verified = verify(case, drawn)
    walks = walk_somewhere(drawn.trees, 0)
    commit_paths(drawn.state_BHKV, verified, walks.path_BL, walks.num_accepted_B)
    assert torch.equal(drawn.state_BHKV, again.state_BHKV)
    assert torch.equal(drawn.rows.key, again.rows.key)
    assert torch.equal(verified.corrected_BRHV, verify(case, again).corrected_BRHV)


def test_padding_reaches_no_other_row_whatever_finite_it_holds():
    case = CASES[3]
    drawn = draw(case, torch.float32)
    is_padding = torch.arange(1 + case.budget) > drawn.trees.num_nodes_B[:, None]
    assert is_padding.any()

    def spoil(x: torch.Tensor) -> torch.Tensor:
        return x.where(~is_padding.reshape(*is_padding.shape, *[1] * (x.dim() - 2)), -1e4)

    clean, spoilt = verify(case, drawn), verify(case, replace(drawn, rows=drawn.rows.each(spoil)))
    assert spoilt.outputs_BRHV.isfinite().all()
    assert torch.equal(clean.outputs_BRHV[~is_padding], spoilt.outputs_BRHV[~is_padding])
    walks = walk_somewhere(drawn.trees, 0)
    committed = [
        commit_paths(drawn.state_BHKV, verified, walks.path_BL, walks.num_accepted_B)
        for verified in (clean, spoilt)
    ]
    assert torch.equal(*committed)


@pytest.mark.parametrize("wrong", ["every row before", "itself alone", "one row too many"])
def test_a_wrong_mask_is_noticed(wrong):
    case = CASES[3]
    drawn = draw(case)
    sees = drawn.sees_BRR.clone()
    if wrong == "every row before":
        sees = torch.ones_like(sees).tril()
    elif wrong == "itself alone":
        sees = torch.eye(sees.shape[1], dtype=torch.bool).expand_as(sees)
    else:
        sees[1:, 5] |= sees[1:, 4]
        assert not torch.equal(sees, drawn.sees_BRR)
    assert max(errors(verify(case, drawn, sees).outputs_BRHV, recur_everywhere(case, drawn))) > COARSE


@pytest.mark.parametrize("wrong", ["one short", "another last node", "the committed token left out"])
def test_a_wrong_path_is_noticed(wrong):
    case = CASES[4]
    drawn = draw(case)
    walks = walk_somewhere(drawn.trees, 0)
    expected = recur_walks(case, drawn, walks)
    request = int(walks.num_accepted_B.argmax())
    count = int(walks.num_accepted_B[request])
    assert count > 1
    path_BL, num_accepted_B = walks.path_BL.clone(), walks.num_accepted_B.clone()
    verified = verify(case, drawn)
    if wrong == "one short":
        num_accepted_B[request] -= 1
    elif wrong == "another last node":
        path_BL[request, count - 1] += 1 if path_BL[request, count - 1] + 1 < case.budget else -1
    else:
        verified.corrected_BRHV[request, 0] = 0
    state = commit_paths(drawn.state_BHKV, verified, path_BL, num_accepted_B)
    assert error(state[request], expected[request]) > COARSE


def test_a_token_that_forgets_nearly_all_costs_later_ones_no_precision():
    """Sums of log decays reach -1000 here; their fp32 differences would be off by 3e-5."""
    case = Case(31, 2, 1, 2, 32, 32)
    drawn = draw(case, torch.float32)
    forgets = replace(drawn.rows, log_decay=drawn.rows.log_decay.index_fill(1, torch.tensor([0]), -1000.0))
    drawn = replace(drawn, rows=forgets)
    verified = verify(case, drawn)
    assert max(errors(verified.outputs_BRHV, recur_everywhere(case, drawn))) < FP32
    walks = walk_somewhere(drawn.trees, 1)
    state = commit_paths(drawn.state_BHKV, verified, walks.path_BL, walks.num_accepted_B)
    assert error(state, recur_walks(case, drawn, walks)) < FP32


def test_decays_off_the_path_may_be_as_steep_as_they_like():
    case = Case(15, 3, 1, 1, 8, 8)
    drawn = draw(case)
    drawn = replace(drawn, rows=replace(drawn.rows, log_decay=500 * drawn.rows.log_decay))
    assert max(errors(verify(case, drawn).outputs_BRHV, recur_everywhere(case, drawn))) < TIGHT


def test_bf16_inputs_are_rounded_at_the_end_alone():
    case = CASES[3]
    coarse = draw(case, torch.bfloat16)
    drawn = replace(coarse, rows=coarse.rows.each(torch.Tensor.float), state_BHKV=coarse.state_BHKV.float())
    found, expected = verify(case, coarse), verify(case, drawn)
    assert torch.equal(found.outputs_BRHV, expected.outputs_BRHV.bfloat16())
    assert torch.equal(found.corrected_BRHV, expected.corrected_BRHV)
    walks = walk_somewhere(drawn.trees, 0)
    state = commit_paths(coarse.state_BHKV, found, walks.path_BL, walks.num_accepted_B)
    full = commit_paths(drawn.state_BHKV, expected, walks.path_BL, walks.num_accepted_B)
    assert torch.equal(state, full.bfloat16())


def test_nothing_is_read_back_to_the_host():
    """A meta tensor has no values: reading one raises."""
    case = CASES[3]
    drawn = draw(case, torch.bfloat16)
    walks = walk_somewhere(drawn.trees, 0)
    path, count, parents = (
        x.to("meta") for x in (walks.path_BL, walks.num_accepted_B, drawn.trees.parents_BN)
    )
    state = drawn.state_BHKV.to("meta")
    rows = drawn.rows.each(lambda x: x.to("meta"))
    verified = verify_trees(rows, state, drawn.sees_BRR.to("meta"), case.scale, case.normalise)
    assert commit_paths(state, verified, path, count).shape == drawn.state_BHKV.shape
    inputs, conv_state = torch.empty(5, 32, 6, device="meta"), torch.empty(5, 6, 3, device="meta")
    convolve_trees(inputs, conv_state, torch.empty(6, 4, device="meta"), None, parents, use_silu=True)
    assert commit_conv(inputs, conv_state, path, count).shape == (5, 6, 3)


# The convolution


@dataclass(frozen=True)
class Conv:
    inputs_BRC: torch.Tensor
    state_BCX: torch.Tensor
    weight_CW: torch.Tensor
    bias_C: torch.Tensor | None
    use_silu: bool


def draw_conv(batch: int, budget: int, taps: int, spare: int, dtype: torch.dtype, full: bool) -> Conv:
    generator = torch.Generator().manual_seed(budget)
    return Conv(
        torch.randn(batch, 1 + budget, 7, generator=generator).to(dtype),
        torch.randn(batch, 7, taps - 1 + spare, generator=generator).to(dtype),
        torch.randn(7, taps, generator=generator).to(dtype),
        torch.randn(7, generator=generator).to(dtype) if full else None,
        full,
    )


def convolve(conv: Conv, trees: TreeBatch) -> torch.Tensor:
    return convolve_trees(
        conv.inputs_BRC, conv.state_BCX, conv.weight_CW, conv.bias_C, trees.parents_BN, conv.use_silu
    )


def convolve_path(conv: Conv, request: int, path: list[int]):
    inputs_TC = conv.inputs_BRC[request, path]
    return convolve_chain(inputs_TC, conv.state_BCX[request], conv.weight_CW, conv.bias_C, conv.use_silu)


CONVS = [(4, 0, True), (4, 0, False), (4, 2, True), (2, 0, True), (1, 1, False)]


@pytest.mark.parametrize(("taps", "spare", "full"), CONVS)
@pytest.mark.parametrize(("batch", "budget"), [(1, 1), (3, 4), (5, 15), (2, 63)])
def test_every_node_is_convolved_with_its_own_ancestors(batch, budget, taps, spare, full):
    trees = draw_trees(torch.Generator().manual_seed(budget), batch, budget)
    conv = draw_conv(batch, budget, taps, spare, torch.float64, full)
    found = convolve(conv, trees)
    for request in range(batch):
        for leaf in leaves(trees, request):
            path = rows_above(trees, request, leaf)
            expected = convolve_path(conv, request, path).outputs_TC
            assert torch.allclose(found[request, path], expected, rtol=0, atol=TIGHT)
    assert found.isfinite().all()


@pytest.mark.parametrize(("taps", "spare", "full"), CONVS)
@pytest.mark.parametrize(("batch", "budget"), [(1, 1), (3, 4), (5, 15), (2, 63)])
def test_the_committed_inputs_are_the_last_of_the_accepted_path(batch, budget, taps, spare, full):
    trees = draw_trees(torch.Generator().manual_seed(budget), batch, budget)
    conv = draw_conv(batch, budget, taps, spare, torch.bfloat16, full)
    for seed in range(3):
        walks = walk_somewhere(trees, seed)
        state = commit_conv(conv.inputs_BRC, conv.state_BCX, walks.path_BL, walks.num_accepted_B)
        for request in range(batch):
            expected = convolve_path(conv, request, path_rows(walks, request)).conv_state_CX
            assert torch.equal(state[request], expected)


def test_a_wrong_parent_or_path_reaches_the_convolution():
    trees = draw_trees(torch.Generator().manual_seed(3), 3, 15)
    conv = draw_conv(3, 15, 4, 0, torch.float64, full=True)
    walks = walk_somewhere(trees, 0)
    request = int(walks.num_accepted_B.argmax())
    assert walks.num_accepted_B[request] > 1
    as_chain = replace(trees, parents_BN=torch.arange(-1, 14).expand(3, 15))
    assert not torch.allclose(convolve(conv, trees), convolve(conv, as_chain), atol=COARSE)
    states = [
        commit_conv(conv.inputs_BRC, conv.state_BCX, walks.path_BL, walks.num_accepted_B - shorter)[request]
        for shorter in (0, 1)
    ]
    assert not torch.allclose(*states, atol=COARSE)


def test_a_chains_convolution_is_torchs():
    conv = draw_conv(1, 12, 4, 0, torch.float64, full=True)
    line_CS = torch.cat([conv.state_BCX[0], conv.inputs_BRC[0].mT], dim=1)
    expected = F.silu(F.conv1d(line_CS, conv.weight_CW[:, None], conv.bias_C, groups=7)).mT
    assert torch.allclose(convolve_path(conv, 0, list(range(13))).outputs_TC, expected, rtol=0, atol=TIGHT)


# Chains, and the conventions of others


CHAIN = Case(0, 1, 2, 4, 24, 40)


@pytest.mark.parametrize(
    ("tokens", "chunk"), [(1, 64), (2, 1), (63, 64), (64, 64), (65, 64), (150, 64), (37, 5)]
)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, TIGHT), (torch.float32, FP32)])
def test_a_chain_in_chunks_is_the_recurrence(tokens, chunk, dtype, bound):
    generator = torch.Generator().manual_seed(tokens)
    rows = draw_rows(generator, (tokens,), CHAIN, dtype)
    state = draw_state(generator, CHAIN, dtype, 1)[0]
    found = run_chain(rows, state, CHAIN.scale, normalise=True, chunk=chunk)
    expected = run_chain_by_tokens(
        rows.each(torch.Tensor.double), state.double(), CHAIN.scale, normalise=True
    )
    assert error(found.outputs_THV, expected.outputs_THV) < bound
    assert error(found.state_HKV, expected.state_HKV) < bound


def test_a_chain_continued_is_the_chain_in_one():
    generator = torch.Generator().manual_seed(0)
    rows = draw_rows(generator, (90,), CHAIN, torch.float64)
    state = draw_state(generator, CHAIN, torch.float64, 1)[0]
    whole = run_chain(rows, state, CHAIN.scale, normalise=True)
    head = run_chain(cut(rows, 0, 41), state, CHAIN.scale, normalise=True)
    tail = run_chain(cut(rows, 41, 90), head.state_HKV, CHAIN.scale, normalise=True)
    assert error(torch.cat([head.outputs_THV, tail.outputs_THV]), whole.outputs_THV) < TIGHT
    assert error(tail.state_HKV, whole.state_HKV) < TIGHT


@pytest.mark.parametrize("run", [run_chain, run_chain_by_tokens])
@pytest.mark.parametrize("normalise", [True, False])
def test_a_chain_is_what_transformers_computes(run, normalise):
    case = Case(0, 1, 4, 4, 32, 48, normalise)
    generator = torch.Generator().manual_seed(1)
    rows = draw_rows(generator, (100,), case, torch.float32)
    state = draw_state(generator, case, torch.float32, 1)
    outputs, final_state = torch_recurrent_gated_delta_rule(
        *(x[None] for x in (rows.query, rows.key, rows.value, rows.log_decay, rows.beta)),
        initial_state=state,
        output_final_state=True,
        use_qk_l2norm_in_kernel=normalise,
    )
    found = run(rows, state[0], case.scale, normalise)
    assert error(found.outputs_THV, outputs[0]) < FP32
    assert error(found.state_HKV, final_state[0]) < FP32


def test_gates_heads_scale_and_state_layout_are_those_of_vllms_cpu_kernel():
    """To bf16: the kernel rounds on the way."""
    case = Case(0, 1, 2, 4, 64, 64)
    generator = torch.Generator().manual_seed(2)
    rows = draw_rows(generator, (3,), case, torch.bfloat16)
    a, b = torch.randn(2, 3, case.heads, generator=generator).bfloat16()
    a_log, dt_bias = torch.randn(2, case.heads, generator=generator)
    dt_bias = dt_bias.bfloat16()
    gates = compute_gates(a, b, a_log, dt_bias)
    gated = replace(rows, log_decay=gates.log_decay, beta=gates.beta)
    cache = draw_state(generator, case, torch.float32, 3)
    one_token_each = [(cut(gated, request, request + 1), cache[request]) for request in range(3)]
    found = [run_chain(token, state, case.scale, normalise=True) for token, state in one_token_each]
    outputs = _custom_ops.fused_sigmoid_gating_delta_rule_update_cpu(
        A_log=a_log,
        dt_bias=dt_bias,
        q=rows.query[None],
        k=rows.key[None],
        v=rows.value[None],
        a=a,
        b=b,
        initial_state_source=cache,  # written in place
        initial_state_indices=torch.arange(3, dtype=torch.int32),
        cu_seqlens=torch.arange(4, dtype=torch.int32),
        use_qk_l2norm_in_kernel=True,
    )
    assert error(torch.stack([one.outputs_THV for one in found]).view_as(outputs), outputs) < BF16
    assert error(torch.stack([one.state_HKV for one in found]), cache) < BF16
