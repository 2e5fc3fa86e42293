"""serve/tree_gdn_commit_kernels.py against serve/tree_gdn.py: interpreted on a CPU, compiled on a GPU."""

from dataclasses import dataclass, replace

import pytest
import torch
from test_serve_tree_gdn_kernels import (
    BF,
    BF16,
    CASES,
    COARSE,
    DEVICE,
    FP,
    FP32,
    IS_CUDA,
    SLOTS,
    SOME,
    Case,
    Drawn,
    convolve,
    draw,
    error,
    keep,
    keep_layers,
    run_compiler,
    specify,
    verify,
)

from serve import tree_gdn
from serve.tree_attention import pack_sees
from serve.tree_cache_kernels import stack_caches
from serve.tree_gdn_commit_kernels import KeptLayers, commit_layers_
from serve.tree_gdn_kernels import Kept, convolve_trees_, verify_trees_

WIDE_KEYS = Case(8, 1, 1, 1, 256, 48, BF, FP)  # a program takes fewer value dims


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


@pytest.mark.parametrize("case", [*CASES, WIDE_KEYS], ids=str)
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


def test_slots_that_are_nobody_s_stay_as_they_are():
    drawn = draw(SOME)
    kept = keep(SOME, drawn)
    verify(SOME, drawn, kept)
    convolve(drawn, kept, drawn.bias_C, use_silu=True)
    is_mine_S = torch.zeros(len(drawn.state_SHVK), dtype=torch.bool, device=DEVICE)
    for _, _, slot in drawn.live:
        is_mine_S[slot] = True
    assert not is_mine_S.all()
    paths = deepest_paths(drawn)
    committed = commit(drawn, kept, walk_down(paths, [len(path) for path in paths]))
    for after, before in zip(committed, (drawn.state_SHVK, drawn.conv_state_SCX), strict=True):
        assert torch.equal((after != before).flatten(1).any(1), is_mine_S)


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


ASSEMBLY = """
import re
from serve import tree_gdn_commit_kernels as kernels

def is_lean(assembly, transfers):
    stores = re.findall("STG[.E0-9]*", assembly)
    registers = 1 + max(int(number) for number in re.findall(r"\\bR([0-9]+)", assembly))
    return (
        stores == ["STG.E.128"] * transfers
        and assembly.count("LDG.E.128") >= transfers
        and registers <= 128
        and not re.search(r"\\b(LDL|STL|LDS|STS|BAR)\\b", assembly)
    )

layer = dict(HEADS=48, HEADS_PER_KEY=3, KEY_DIM=128, VALUE_DIM=128, ALIGNMENT=16)
tiles = dict(TILE_K=128, TILE_V=kernels.choose_value_dims(128, 128))
for capability in (86, 90):
    for state, size in (("*fp32", 4), ("*bf16", 2)):
        built = build(kernels._commit_state_kernel, capability, 1, "*bf16", state, **layer, **tiles)
        print(built.metadata.shared == 0 and is_lean(built.asm["sass"], tiles["TILE_V"] * 128 * size // 512))
    sizes = dict(COLUMNS=3, ALIGNMENT=16, TILE_COLUMNS=4, TILE_CHANNELS=256)
    print(build(kernels._commit_conv_kernel, capability, 4, "*bf16", "*bf16", **sizes).metadata.shared == 0)
"""


def test_compiled_for_sm_86_and_sm_90_a_state_stays_in_registers_and_moves_16_bytes_at_a_time(tmp_path):
    """In at most 128 of them, nothing spilt, no shared memory and no barrier."""
    assert run_compiler(ASSEMBLY, tmp_path) == ["True"] * 6
