"""serve/tree_gdn_kernels.py against serve/tree_gdn.py: interpreted on a CPU, compiled on a GPU.

What is drawn, kept and expected here tests/test_serve_tree_gdn_commit_kernels.py takes further.
"""

import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from serve import tree_gdn
from serve.tree_attention import pack_sees
from serve.tree_batch import TreeBatch, grow_trees, see_ancestors
from serve.tree_gdn import GdnRows, compute_gates
from serve.tree_gdn_commit_kernels import KeptLayers, allocate_kept
from serve.tree_gdn_kernels import (
    GateWeights,
    Kept,
    Placement,
    Projected,
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


def test_no_row_is_written_for_padding():
    drawn = draw(SOME)
    kept = keep(SOME, drawn)
    is_mine_T = torch.zeros(len(drawn.inputs_TC), dtype=torch.bool, device=DEVICE)
    is_mine_BR = torch.zeros(SOME.batch, SOME.rows, dtype=torch.bool, device=DEVICE)
    for request, rows, _ in drawn.live:
        is_mine_T[rows] = True
        is_mine_BR[request, : rows.stop - rows.start] = True
    assert not is_mine_T.all()
    outputs = verify(SOME, drawn, kept), convolve(drawn, kept, drawn.bias_C, use_silu=True)
    for each in outputs:
        assert torch.equal(each.isfinite().flatten(1).all(1), is_mine_T)
        assert torch.equal(each.isnan().flatten(1).all(1), ~is_mine_T)
    for each in vars(kept).values():
        assert torch.equal(each.isnan().flatten(2).all(2), ~is_mine_BR)


def test_no_state_is_written():
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


COMPILER = """
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

FP32 = ("a_log", "kept_corrected", "kept_log_decay")
INTEGERS = ("parents", "first_rows", "row_counts", "slots", "words", "path", "accepted_counts")
INTEGERS += ("pointers", "groups")
ADJACENT = ("state_key_stride", "input_channel_stride")

def type_of(name, rows, state):
    if name.endswith("stride") or name == "num_channels":
        return "i32"
    if name in ("state", "conv_state", "like"):
        return state
    return "fp32" if name == "scale" else "*i64" if name in INTEGERS else "*fp32" if name in FP32 else rows

def build(kernel, capability, warps, rows, state, **sizes):
    sizes |= {name: None for name in kernel.arg_names if name == "bias"}
    sizes |= {name: 1 for name in kernel.arg_names if name in ADJACENT}
    signature = {
        name: "constexpr" if name in sizes else type_of(name, rows, state) for name in kernel.arg_names
    }
    variables = [place for place, name in enumerate(kernel.arg_names) if name not in (*sizes, "scale")]
    divisible = {(place,): [["tt.divisibility", 16]] for place in variables}
    source = ASTSource(fn=kernel, signature=signature, constexprs=sizes, attrs=divisible)
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(source, target=target, options={"num_warps": warps})
"""


def run_compiler(script: str, cache: Path) -> list[str]:
    """What a script prints that goes on from `COMPILER`, by words.

    Triton brings its assembler along, so no GPU is needed, but a process that does not interpret.
    """
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)}
    compiled = subprocess.run(
        [sys.executable, "-c", COMPILER + script],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert compiled.returncode == 0, compiled.stderr
    return compiled.stdout.split()


SHARED = """
from serve import tree_gdn_kernels as kernels

layer = dict(HEADS_PER_KEY=3, KEY_DIM=128, DOT_TYPE=tl.bfloat16)
for capability in (86, 90):
    cases = [(64, 48, torch.bfloat16)]
    if capability == 86:
        cases += [(16, 48, torch.bfloat16), (64, 48, torch.float32)]  # the latter takes most shared memory
    for rows, heads, dtype in cases:
        tiles = kernels.choose_tiles(rows, heads, 128, 128, dtype)
        sizes = dict(
            TILE_ROWS=tiles.rows, TILE_K=tiles.key_dims, TILE_V=tiles.value_dims, STAGES=tiles.stages
        )
        element = "*bf16" if dtype == torch.bfloat16 else "*fp32"
        built = build(kernels._verify_kernel, capability, tiles.warps, element, "*fp32", **layer, **sizes)
        print(built.metadata.shared)
    sizes = dict(TAPS=4, COLUMNS=3, USE_SILU=True, TILE_ROWS=8, TILE_CHANNELS=128)
    print(build(kernels._convolve_kernel, capability, 4, "*bf16", "*bf16", **sizes).metadata.shared)
"""


def test_the_kernels_compile_for_sm_86_and_sm_90(tmp_path):
    shared = [int(word) for word in run_compiler(SHARED, tmp_path)]
    assert len(shared) == 6
    assert max(shared) <= SHARED_BYTES
