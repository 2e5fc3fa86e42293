"""serve/tree_gdn_kernels.py against serve/tree_gdn.py: interpreted on a CPU, compiled on a GPU."""

import os
import subprocess
import sys
from dataclasses import dataclass, replace

import pytest
import torch

from serve import tree_gdn
from serve.tree_attention import pack_sees
from serve.tree_batch import TreeBatch, grow_trees, see_ancestors
from serve.tree_cache_kernels import stack_caches
from serve.tree_gdn import GdnRows, compute_gates
from serve.tree_gdn_kernels import (
    GateWeights,
    Kept,
    KeptLayers,
    Placement,
    Projected,
    allocate_kept,
    commit_layers_,
    convolve_trees_,
    verify_trees_,
)

IS_CUDA = torch.cuda.is_available()
DEVICE = "cuda" if IS_CUDA else "cpu"  # on a CPU the kernels are interpreted
SLOTS = 15
SHARED_BYTES = 99 * 1024  # that sm_86 gives one block of threads
# Bounds on the largest error over the largest value
FP32 = 2e-5 if IS_CUDA else 1e-6  # tf32x3 leaves out the product of the two smaller parts
BF16 = 2**-8 if IS_CUDA else 2**-7  # a unit in the last place, halved by rounding; the interpreter cuts
COARSE = 1e-3  # what a wrong mask or path must exceed


@dataclass(frozen=True)
class Case:
    rows: int
    batch: int
    key_heads: int = 1
    heads: int = 3
    key_dim: int = 128
    value_dim: int = 128
    dtype: torch.dtype = torch.float32
    state_dtype: torch.dtype = torch.float32
    taps: int = 4
    columns: int = 3
    has_channels_last: bool = True

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.heads * self.value_dim

    @property
    def scale(self) -> float:
        return self.key_dim**-0.5

    def __str__(self) -> str:
        types = "-".join(str(each).removeprefix("torch.") for each in (self.dtype, self.state_dtype))
        return f"R{self.rows}-B{self.batch}-J{self.key_heads}-H{self.heads}-{types}"


BF, FP = torch.bfloat16, torch.float32
CASES = [
    Case(2, 5, 1, 1, 32, 16),
    Case(8, 3, 1, 1, 128, 128, BF, FP),
    Case(16, 2, 1, 3, 128, 32, FP, BF, columns=5),
    Case(16, 5, 1, 1, 64, 32, BF, FP, columns=4),
    Case(17, 4, 2, 2, 64, 48, BF, BF, has_channels_last=False),
    Case(32, 1, 1, 3, 96, 32, taps=2, columns=1),
    Case(64, 2, 1, 1, 128, 64, BF, FP, columns=4),
    Case(64, 1, 1, 1, 128, 32),
]
SOME = CASES[3]


@dataclass(frozen=True)
class Drawn:
    """A step of a layer; rows and slots that are nobody's hold NaN."""

    trees: TreeBatch
    sees_BRR: torch.Tensor
    placement: Placement
    inputs_TC: torch.Tensor
    weight_CW: torch.Tensor
    bias_C: torch.Tensor
    conv_state_SCX: torch.Tensor
    rows: Projected
    gate_weights: GateWeights
    state_SHVK: torch.Tensor

    @property
    def live(self) -> list[tuple[int, slice, int]]:
        """Requests that are not padding: their place, rows and slot."""
        placed = (
            self.placement.first_row_B.tolist(),
            self.placement.num_rows_B.tolist(),
            self.placement.slots_B.tolist(),
        )
        return [
            (request, slice(first, first + count), slot)
            for request, (first, count, slot) in enumerate(zip(*placed, strict=True))
            if count > 0 and slot >= 0
        ]


def draw_trees(generator: torch.Generator, batch: int, budget: int) -> TreeBatch:
    """Different trees; a likely first candidate makes them deep."""
    scores = torch.rand(batch, SLOTS, 4, 4, generator=generator).log()
    scores[..., 0] /= 8
    return grow_trees(scores, budget)


def place(generator: torch.Generator, case: Case) -> Placement:
    """In scrambled order with rows between; of five requests two are padding and one is cut short."""
    batch, rows = case.batch, case.rows
    num_rows_B = torch.full((batch,), rows)
    slots_B = torch.randperm(batch + 2, generator=generator)[:batch]
    if batch > 1:
        num_rows_B[1] = max(1, rows - 3)
    if batch > 3:
        num_rows_B[3] = 0
    if batch > 4:
        slots_B[4] = -1
    first_row_B = 1 + torch.randperm(batch, generator=generator) * (rows + 2)
    return Placement(*(x.to(DEVICE) for x in (first_row_B, num_rows_B, slots_B.int())))


def draw(case: Case, seed: int = 0, layer: int = 0) -> Drawn:
    """Keys of a common direction, so that tokens correct one another; decays from none to nearly all.

    Layers of a seed have the same trees in the same places.
    """
    generator = torch.Generator().manual_seed(seed)
    trees = draw_trees(generator, case.batch, case.rows - 1)
    placement = place(generator, case)
    generator.manual_seed(seed + 100 * layer)
    num_rows, num_slots = case.batch * (case.rows + 2) + 3, case.batch + 2

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    is_tree_T = torch.zeros(num_rows, 1, dtype=torch.bool)
    for first, count in zip(placement.first_row_B.tolist(), placement.num_rows_B.tolist(), strict=True):
        is_tree_T[first : first + count] = True
    key_size = case.key_heads * case.key_dim
    mixed_TC = normal(num_rows, case.channels)
    mixed_TC[:, key_size : 2 * key_size] += normal(key_size)
    inputs_TC, mixed_TC = (
        x.where(is_tree_T, torch.nan).to(DEVICE, case.dtype)
        for x in (normal(num_rows, case.channels), mixed_TC)
    )
    query_TC, key_TC, value_TC = mixed_TC.split([key_size, key_size, case.heads * case.value_dim], dim=1)
    gates_TG = (2 * normal(num_rows, 2 * case.heads)).where(is_tree_T, torch.nan).to(DEVICE, case.dtype)
    a_TH, b_TH = gates_TG.chunk(2, dim=1)
    conv_state = normal(num_slots, case.columns, case.channels)
    conv_state_SCX = conv_state.transpose(1, 2)
    if not case.has_channels_last:
        conv_state_SCX = conv_state_SCX.contiguous()
    return Drawn(
        trees=TreeBatch(**{name: x.to(DEVICE) for name, x in vars(trees).items()}),
        sees_BRR=see_ancestors(trees.parents_BN, SLOTS).to(DEVICE),
        placement=placement,
        inputs_TC=inputs_TC,
        weight_CW=normal(case.channels, case.taps).to(DEVICE, case.dtype),
        bias_C=normal(case.channels).to(DEVICE, case.dtype),
        conv_state_SCX=conv_state_SCX.to(DEVICE, case.dtype),
        rows=Projected(
            query_TC.unflatten(1, (case.key_heads, case.key_dim)),
            key_TC.unflatten(1, (case.key_heads, case.key_dim)),
            value_TC.unflatten(1, (case.heads, case.value_dim)),
            a_TH,
            b_TH,
        ),
        gate_weights=GateWeights(
            (normal(case.heads) - 1).to(DEVICE), normal(case.heads).to(DEVICE, case.dtype)
        ),
        state_SHVK=normal(num_slots, case.heads, case.value_dim, case.key_dim).to(DEVICE, case.state_dtype),
    )


def keep(case: Case, drawn: Drawn) -> Kept:
    return keep_layers(case, drawn, layers=1, batch=case.batch).of_layer(0)


def keep_layers(case: Case, drawn: Drawn, layers: int, batch: int) -> KeptLayers:
    kept = allocate_kept(
        layers,
        batch,
        case.rows,
        case.channels,
        case.key_heads,
        case.heads,
        case.key_dim,
        case.value_dim,
        drawn.inputs_TC,
    )
    for each in vars(kept).values():
        each.fill_(torch.nan)
    return kept


def verify(case: Case, drawn: Drawn, kept: Kept, sees_BRR: torch.Tensor | None = None) -> torch.Tensor:
    """Outputs before they are rounded; NaN where nothing was written."""
    outputs_THV = torch.full_like(drawn.rows.value_THV, torch.nan, dtype=torch.float32)
    words_BR = pack_sees(drawn.sees_BRR if sees_BRR is None else sees_BRR)
    state, weights = drawn.state_SHVK, drawn.gate_weights
    verify_trees_(drawn.rows, weights, state, words_BR, drawn.placement, case.scale, outputs_THV, kept)
    return outputs_THV


def specify(case: Case, drawn: Drawn, request: int, rows: slice, slot: int) -> tree_gdn.VerifiedTrees:
    """What the specification makes of one request, a batch of itself."""
    inputs, weights = drawn.rows, drawn.gate_weights
    gates = compute_gates(inputs.a_TH[rows], inputs.b_TH[rows], weights.a_log_H, weights.dt_bias_H)
    of_request = GdnRows(
        inputs.query_TJK[rows], inputs.key_TJK[rows], inputs.value_THV[rows], gates.log_decay, gates.beta
    ).each(lambda x: x.double()[None])
    count = rows.stop - rows.start
    sees_1RR = drawn.sees_BRR[request, None, :count, :count]
    state_1HKV = drawn.state_SHVK[slot, None].double().mT
    return tree_gdn.verify_trees(of_request, state_1HKV, sees_1RR, case.scale, normalise=True)


def convolve(drawn: Drawn, kept: Kept, bias_C: torch.Tensor | None, use_silu: bool) -> torch.Tensor:
    outputs_TC = torch.full_like(drawn.inputs_TC, torch.nan, dtype=torch.float32)
    convolve_trees_(
        drawn.inputs_TC,
        drawn.conv_state_SCX,
        drawn.weight_CW,
        bias_C,
        drawn.trees.parents_BN,
        drawn.placement,
        outputs_TC,
        kept,
        use_silu,
    )
    return outputs_TC


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference over the largest value."""
    assert found.isfinite().all()
    return float((found.double() - expected.double()).abs().max() / expected.abs().max())


def worst_output(case: Case, drawn: Drawn, outputs_THV: torch.Tensor) -> float:
    return max(
        error(outputs_THV[rows], specify(case, drawn, request, rows, slot).outputs_BRHV[0])
        for request, rows, slot in drawn.live
    )


def path_of(drawn: Drawn, request: int, row: int) -> list[int]:
    """The nodes down to a row, by the parents alone."""
    nodes: list[int] = []
    while row > 0:
        nodes.insert(0, row - 1)
        row = int(drawn.trees.parents_BN[request, row - 1]) + 1
    return nodes


def deepest_paths(drawn: Drawn) -> list[list[int]]:
    """Of each request, among the rows that it has."""
    counts = drawn.placement.num_rows_B.tolist()
    return [
        max((path_of(drawn, request, row) for row in range(max(1, count))), key=len)
        for request, count in enumerate(counts)
    ]


@dataclass(frozen=True)
class Walk:
    path_BL: torch.Tensor
    num_accepted_B: torch.Tensor


def walk_down(paths: list[list[int]], lengths: list[int]) -> Walk:
    path_BL = torch.full((len(paths), SLOTS), -1)
    for request, (path, length) in enumerate(zip(paths, lengths, strict=True)):
        path_BL[request, :length] = torch.tensor(path[:length], dtype=torch.int64)
    return Walk(path_BL.to(DEVICE), torch.tensor(lengths).to(DEVICE))


def commit(drawn: Drawn, kept: Kept, walk: Walk) -> tuple[torch.Tensor, torch.Tensor]:
    """All slots after a step: recurrent state and conv state, the latter in its own layout."""
    kept_layers = KeptLayers(*(each[None] for each in vars(kept).values()))
    return commit_all([drawn], [0], kept_layers, walk)[0]


def commit_all(
    layers: list[Drawn], groups: list[int], kept: KeptLayers, walk: Walk
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    states = [layer.state_SHVK.clone() for layer in layers]
    conv_states = [layer.conv_state_SCX.clone(memory_format=torch.preserve_format) for layer in layers]
    assert conv_states[0].stride() == layers[0].conv_state_SCX.stride()
    slots_of_group = {group: layer.placement.slots_B for group, layer in zip(groups, layers, strict=True)}
    commit_layers_(
        walk.path_BL,
        walk.num_accepted_B,
        layers[0].placement.num_rows_B,
        torch.stack([slots_of_group[group] for group in sorted(slots_of_group)]),
        torch.tensor(groups, device=DEVICE),
        kept,
        stack_caches(states),
        stack_caches(conv_states),
    )
    return list(zip(states, conv_states, strict=True))


def draw_layers(case: Case, groups: list[int], seed: int = 0) -> list[Drawn]:
    """A step of many layers; a request's slot is another one in each group."""
    layers = [draw(case, seed, layer) for layer in range(len(groups))]
    slots_B, num_slots = layers[0].placement.slots_B, case.batch + 2
    return [
        replace(
            layer,
            placement=replace(
                layers[0].placement, slots_B=((slots_B + group) % num_slots).where(slots_B >= 0, -1)
            ),
        )
        for group, layer in zip(groups, layers, strict=True)
    ]


def specify_commit(
    case: Case, drawn: Drawn, walk: Walk, request: int, rows: slice, slot: int
) -> tuple[torch.Tensor, torch.Tensor]:
    verified = specify(case, drawn, request, rows, slot)
    walk_1 = walk.path_BL[request, None], walk.num_accepted_B[request, None]
    state_1HKV = tree_gdn.commit_paths(drawn.state_SHVK[slot, None].double().mT, verified, *walk_1)
    conv_state_1CX = drawn.conv_state_SCX[slot, None]
    conv_state_1CX = tree_gdn.commit_conv(drawn.inputs_TC[None, rows], conv_state_1CX, *walk_1)
    return state_1HKV[0].mT, conv_state_1CX[0]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_row_gets_what_the_specification_gives_it(case):
    drawn = draw(case)
    assert len(drawn.live) == min(case.batch, 3)
    kept = keep(case, drawn)
    outputs_THV = verify(case, drawn, kept)
    for request, rows, slot in drawn.live:
        expected = specify(case, drawn, request, rows, slot)
        own = (request, slice(rows.stop - rows.start))
        assert error(outputs_THV[rows], expected.outputs_BRHV[0]) < FP32
        assert error(kept.corrected_BRHV[own], expected.corrected_BRHV[0]) < FP32
        assert error(kept.log_decay_BRH[own], expected.log_decay_BRH[0]) < FP32
        assert torch.equal(kept.key_BRJK[own], drawn.rows.key_TJK[rows])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_accepted_length_commits_what_the_specification_commits(case):
    drawn, kept = draw(case), keep(case, draw(case))
    verify(case, drawn, kept)
    convolve(drawn, kept, None, use_silu=True)
    paths = deepest_paths(drawn)
    bound = FP32 if case.state_dtype == torch.float32 else BF16
    for longest in range(0, 1 + max(map(len, paths)), len(drawn.live)):
        walk = walk_down(paths, [min(longest + place, len(path)) for place, path in enumerate(paths)])
        state_SHVK, conv_state_SCX = commit(drawn, kept, walk)
        for request, rows, slot in drawn.live:
            state, conv_state = specify_commit(case, drawn, walk, request, rows, slot)
            assert error(state_SHVK[slot], state) < bound
            assert torch.equal(conv_state_SCX[slot], conv_state)


@pytest.mark.parametrize("case", [SOME, CASES[4]], ids=str)
def test_layers_of_many_groups_are_committed_at_once_as_each_alone(case):
    """From what is kept for more requests than there are."""
    groups = [2, 0, 1, 0]
    layers = draw_layers(case, groups)
    kept = keep_layers(case, layers[0], layers=len(groups), batch=case.batch + 2)
    generator = torch.Generator().manual_seed(0)
    for each in vars(kept).values():
        each.copy_(-torch.rand(each.shape, generator=generator))
    paths = deepest_paths(layers[0])
    walk = walk_down(paths, [len(path) for path in paths])
    at_once = commit_all(layers, groups, kept, walk)
    for number, (layer, found) in enumerate(zip(layers, at_once, strict=True)):
        assert layer.live != layers[number - 1].live  # they have other slots
        alone = commit(layer, kept.of_layer(number).of_batch(case.batch), walk)
        before = layer.state_SHVK, layer.conv_state_SCX
        for mine, expected, old in zip(found, alone, before, strict=True):
            assert torch.equal(mine, expected)
            assert not torch.equal(mine, old)


def test_a_chain_is_committed_down_to_its_last_node():
    """As many nodes as a path has slots."""
    case = replace(SOME, batch=1)
    drawn = draw(case)
    drawn.trees.parents_BN.copy_(torch.arange(-1, SLOTS - 1))
    drawn = replace(drawn, sees_BRR=torch.ones_like(drawn.sees_BRR).tril())
    kept = keep(case, drawn)
    verify(case, drawn, kept)
    convolve(drawn, kept, None, use_silu=True)
    walk = walk_down([list(range(SLOTS))], [SLOTS])
    state_SHVK, conv_state_SCX = commit(drawn, kept, walk)
    _, rows, slot = drawn.live[0]
    state, conv_state = specify_commit(case, drawn, walk, 0, rows, slot)
    assert error(state_SHVK[slot], state) < FP32
    assert torch.equal(conv_state_SCX[slot], conv_state)


@pytest.mark.parametrize(
    ("case", "is_full"), [*((case, True) for case in CASES), (SOME, False), (CASES[4], False)], ids=str
)
def test_every_row_is_convolved_as_the_specification_does(case, is_full):
    """In full: with a bias and SiLU."""
    drawn = draw(case)
    kept = keep(case, drawn)
    bias_C = drawn.bias_C if is_full else None
    outputs_TC = convolve(drawn, kept, bias_C, is_full)
    for request, rows, slot in drawn.live:
        count = rows.stop - rows.start
        expected = tree_gdn.convolve_trees(
            drawn.inputs_TC[None, rows].double(),
            drawn.conv_state_SCX[slot, None].double(),
            drawn.weight_CW.double(),
            None if bias_C is None else bias_C.double(),
            drawn.trees.parents_BN[request, None, : count - 1],
            is_full,
        )
        assert error(outputs_TC[rows], expected[0]) < FP32
        assert torch.equal(kept.inputs_BRC[request, :count], drawn.inputs_TC[rows])


def test_nothing_is_written_for_padding():
    drawn = draw(SOME)
    kept = keep(SOME, drawn)
    is_mine_T = torch.zeros(len(drawn.inputs_TC), dtype=torch.bool, device=DEVICE)
    is_mine_BR = torch.zeros(SOME.batch, SOME.rows, dtype=torch.bool, device=DEVICE)
    is_mine_S = torch.zeros(len(drawn.state_SHVK), dtype=torch.bool, device=DEVICE)
    for request, rows, slot in drawn.live:
        is_mine_T[rows], is_mine_S[slot] = True, True
        is_mine_BR[request, : rows.stop - rows.start] = True
    assert not is_mine_T.all()
    assert not is_mine_S.all()
    outputs = verify(SOME, drawn, kept), convolve(drawn, kept, drawn.bias_C, use_silu=True)
    for each in outputs:
        assert torch.equal(each.isfinite().flatten(1).all(1), is_mine_T)
        assert torch.equal(each.isnan().flatten(1).all(1), ~is_mine_T)
    for each in vars(kept).values():
        assert torch.equal(each.isnan().flatten(2).all(2), ~is_mine_BR)
    paths = deepest_paths(drawn)
    committed = commit(drawn, kept, walk_down(paths, [len(path) for path in paths]))
    for after, before in zip(committed, (drawn.state_SHVK, drawn.conv_state_SCX), strict=True):
        assert torch.equal((after != before).flatten(1).any(1), is_mine_S)


def test_until_the_commit_no_state_is_written():
    drawn, again = draw(SOME), draw(SOME)
    kept = keep(SOME, drawn)
    verify(SOME, drawn, kept)
    convolve(drawn, kept, None, use_silu=True)
    assert torch.equal(drawn.state_SHVK, again.state_SHVK)
    assert torch.equal(drawn.conv_state_SCX, again.conv_state_SCX)


def test_results_are_rounded_to_the_types_of_what_they_go_into():
    drawn = draw(SOME)
    wide, narrow = keep(SOME, drawn), keep(SOME, drawn)
    narrow = replace(narrow, corrected_BRHV=narrow.corrected_BRHV.bfloat16())
    expected = verify(SOME, drawn, wide)
    found = torch.full_like(drawn.rows.value_THV, torch.nan)
    words_BR, state, weights = pack_sees(drawn.sees_BRR), drawn.state_SHVK, drawn.gate_weights
    verify_trees_(drawn.rows, weights, state, words_BR, drawn.placement, SOME.scale, found, narrow)
    for request, rows, _ in drawn.live:
        own = (request, slice(rows.stop - rows.start))
        assert error(found[rows], expected[rows]) < BF16
        assert error(narrow.corrected_BRHV[own], wide.corrected_BRHV[own]) < BF16


@pytest.mark.parametrize("rows", [16, 64])
def test_a_chain_of_keys_that_are_all_alike_costs_no_precision(rows):
    """Powers of A would have entries of 1e18 here, and the solution none above 10."""
    case = Case(rows, 1, 1, 1, 128, 32)
    drawn = draw(case)
    drawn.rows.key_TJK.copy_(drawn.rows.key_TJK[1] + 0.01 * drawn.rows.key_TJK)
    drawn.rows.a_TH.fill_(-20.0)
    drawn.rows.b_TH.fill_(9.0)
    drawn = replace(drawn, sees_BRR=torch.ones_like(drawn.sees_BRR).tril())
    assert worst_output(case, drawn, verify(case, drawn, keep(case, drawn))) < FP32


def test_a_token_that_forgets_nearly_all_costs_later_ones_no_precision():
    """Sums of log decays reach -1000 here; their fp32 differences would be off by 3e-5."""
    case = Case(32, 2, 1, 1, 32, 32)
    drawn = draw(case)
    for _, rows, _ in drawn.live:
        drawn.rows.a_TH[rows.start] = 1000 * (-drawn.gate_weights.a_log_H).exp()
    kept = keep(case, drawn)
    assert worst_output(case, drawn, verify(case, drawn, kept)) < FP32
    assert kept.log_decay_BRH[0, 0] < -900


@pytest.mark.parametrize("wrong", ["every row before", "itself alone", "one row too many"])
def test_a_wrong_mask_is_noticed(wrong):
    drawn = draw(SOME)
    sees = drawn.sees_BRR.clone()
    if wrong == "every row before":
        sees = torch.ones_like(sees).tril()
    elif wrong == "itself alone":
        sees = torch.eye(SOME.rows, dtype=torch.bool, device=DEVICE).expand_as(sees)
    else:
        sees[:, -4, 1:-4] = ~sees[:, -4, 1:-4]
    assert worst_output(SOME, drawn, verify(SOME, drawn, keep(SOME, drawn), sees)) > COARSE


@pytest.mark.parametrize("wrong", ["one short", "another last node"])
def test_a_wrong_path_is_noticed(wrong):
    drawn = draw(SOME)
    kept = keep(SOME, drawn)
    verify(SOME, drawn, kept)
    convolve(drawn, kept, None, use_silu=True)
    paths = deepest_paths(drawn)
    right = walk_down(paths, [len(path) for path in paths])
    if wrong == "one short":
        walk = walk_down(paths, [max(0, len(path) - 1) for path in paths])
    else:
        walk = walk_down(
            [path and [*path[:-1], path[-1] - 1] for path in paths], [len(path) for path in paths]
        )
    state_SHVK, conv_state_SCX = commit(drawn, kept, walk)
    request, rows, slot = drawn.live[0]
    assert len(paths[request]) > 1
    state, conv_state = specify_commit(SOME, drawn, right, request, rows, slot)
    assert error(state_SHVK[slot], state) > COARSE
    assert not torch.equal(conv_state_SCX[slot], conv_state)


# On a GPU alone


@pytest.mark.skipif(not IS_CUDA, reason="needs a GPU")
@pytest.mark.parametrize("rows", [16, 64])
def test_a_graph_replays_the_step_of_large_layers_with_other_trees(rows):
    case, groups = Case(rows, 5, 16, 48, 128, 128, BF, FP), [1, 0]
    layers, others = draw_layers(case, groups, seed=1), draw_layers(case, groups, seed=2)
    kept = keep_layers(case, layers[0], layers=2, batch=case.batch + 2)
    words_BR = pack_sees(layers[0].sees_BRR)
    convolved_TC = torch.empty_like(layers[0].inputs_TC)
    outputs_YTHV = [torch.empty_like(layer.rows.value_THV) for layer in layers]
    walk = walk_down([[]] * case.batch, [0] * case.batch)
    group_of_layer_Y = torch.tensor(groups, device=DEVICE)
    states = stack_caches([layer.state_SHVK for layer in layers])
    conv_states = stack_caches([layer.conv_state_SCX for layer in layers])

    def step() -> None:
        for number, layer in enumerate(layers):
            own = kept.of_layer(number).of_batch(case.batch)
            convolve_trees_(
                layer.inputs_TC,
                layer.conv_state_SCX,
                layer.weight_CW,
                None,
                layer.trees.parents_BN,
                layer.placement,
                convolved_TC,
                own,
            )
            verify_trees_(
                layer.rows,
                layer.gate_weights,
                layer.state_SHVK,
                words_BR,
                layer.placement,
                case.scale,
                outputs_YTHV[number],
                own,
            )
        commit_layers_(
            walk.path_BL,
            walk.num_accepted_B,
            layers[0].placement.num_rows_B,
            torch.stack([layers[1].placement.slots_B, layers[0].placement.slots_B]),
            group_of_layer_Y,
            kept,
            states,
            conv_states,
        )

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    copy_all(layers, others)
    words_BR.copy_(pack_sees(others[0].sees_BRR))
    paths = deepest_paths(others[0])
    copy_into(walk, walk_down(paths, [len(path) for path in paths]))
    graph.replay()
    for layer, other, outputs_THV in zip(layers, others, outputs_YTHV, strict=True):
        for request, rows_of_request, slot in other.live:
            expected = specify(case, other, request, rows_of_request, slot)
            assert error(outputs_THV[rows_of_request], expected.outputs_BRHV[0]) < BF16
            state, conv_state = specify_commit(case, other, walk, request, rows_of_request, slot)
            assert error(layer.state_SHVK[slot], state) < FP32
            assert torch.equal(layer.conv_state_SCX[slot], conv_state)
    once = [outputs_THV.clone() for outputs_THV in outputs_YTHV]
    copy_all(layers, others)
    graph.replay()
    for outputs_THV, before in zip(outputs_YTHV, once, strict=True):
        assert torch.equal(outputs_THV.nan_to_num(), before.nan_to_num())


def copy_all(layers: list[Drawn], others: list[Drawn]) -> None:
    for mine, new in zip(layers, others, strict=True):
        copy_into(mine, new)


def copy_into(drawn: object, other: object) -> None:
    """Every tensor of one into the other's, through the dataclasses."""
    for mine, new in zip(vars(drawn).values(), vars(other).values(), strict=True):
        if isinstance(mine, torch.Tensor):
            mine.copy_(new)
        else:
            copy_into(mine, new)


COMPILE = """
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from serve import tree_gdn_kernels as kernels

WIDE = ("state", "a_log", "kept_corrected", "kept_log_decay")
INTEGERS = ("parents", "first_rows", "row_counts", "slots", "words", "path", "accepted_counts")
INTEGERS += ("pointers", "groups")

def type_of(name, narrow):
    if name.endswith("stride") or name == "num_channels":
        return "i32"
    if name == "scale":
        return "fp32"
    return "*i64" if name in INTEGERS else "*fp32" if name in WIDE or not narrow else "*bf16"

def shared_bytes(kernel, capability, warps, narrow, **sizes):
    sizes |= {name: None for name in kernel.arg_names if name == "bias"}
    sizes |= {name: 1 for name in kernel.arg_names if name in ("state_key_stride", "input_channel_stride")}
    signature = {
        name: "constexpr" if name in sizes else type_of(name, narrow) for name in kernel.arg_names
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=sizes)
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(source, target=target, options={"num_warps": warps}).metadata.shared

layer = dict(HEADS_PER_KEY=3, KEY_DIM=128, DOT_TYPE=tl.bfloat16)
for capability in (86, 90):
    cases = [(64, 480, torch.bfloat16)]
    if capability == 86:
        cases += [(16, 48, torch.bfloat16), (64, 48, torch.float32)]  # the latter takes most shared memory
    for rows, heads, dtype in cases:
        tiles = kernels.choose_tiles(rows, heads, 128, 128, dtype)
        sizes = dict(
            TILE_ROWS=tiles.rows, TILE_K=tiles.key_dims, TILE_V=tiles.value_dims, STAGES=tiles.stages
        )
        is_narrow = dtype == torch.bfloat16
        print(shared_bytes(kernels._verify_kernel, capability, tiles.warps, is_narrow, **layer, **sizes))
    sizes = dict(HEADS=48, VALUE_DIM=128, ALIGNMENT=16, TILE_PATH=64, TILE_V=64, TILE_K=128)
    print(shared_bytes(kernels._commit_state_kernel, capability, 4, True, **layer, **sizes))
    sizes = dict(TAPS=4, COLUMNS=3, USE_SILU=True, TILE_ROWS=8, TILE_CHANNELS=128)
    print(shared_bytes(kernels._convolve_kernel, capability, 4, True, **sizes))
    sizes = dict(COLUMNS=3, ALIGNMENT=16, TILE_COLUMNS=4, TILE_CHANNELS=256)
    print(shared_bytes(kernels._commit_conv_kernel, capability, 4, True, **sizes))
"""


def test_the_kernels_compile_for_sm_86_and_sm_90(tmp_path):
    """Triton brings its assembler along, so no GPU is needed, but a process that does not interpret."""
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    compiled = subprocess.run(
        [sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, check=False
    )
    assert compiled.returncode == 0, compiled.stderr
    shared = [int(line) for line in compiled.stdout.split()]
    assert len(shared) == 10
    assert max(shared) <= SHARED_BYTES
