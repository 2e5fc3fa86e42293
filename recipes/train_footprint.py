"""How much memory the trainer takes: DeepSpeed's bytes of a parameter, and the worst batch's activations.

The former are exact, the latter an estimate whose assumptions stand beside it.  Without torch, as
`recipes.footprint`.
"""

# b=bytes of an element  D=hidden  F=intermediate  V=vocabulary  Q=block rows  R=supervised rows  S=context

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby, pairwise

from recipes.footprint import DTYPE_BYTES, FP32, key_size, query_size, tap_bytes
from recipes.schema import Drafter, LayerType, PairwiseCompanion, Train

BUCKET_ELEMENTS = 500_000_000
"""DeepSpeed's reduce_bucket_size, allocated whole."""
GATHERED_ELEMENTS = 1_000_000_000
"""DeepSpeed's stage3_max_live_parameters."""


@dataclass(frozen=True)
class ZeroBytes:
    """Bytes of a parameter in DeepSpeed 0.19.8, between a backward pass and its step.

    `whole` on every rank; `split` divided among the ranks; `host` in host memory, divided among the ranks.
    """

    whole: int
    split: int
    host: int

    def on_device(self, ranks: int) -> float:
        return self.whole + self.split / ranks


def zero_bytes(train: Train) -> ZeroBytes:
    """Weights and gradients in train.precision, fp32 sums of gradients, fp32 masters and two moments."""
    weight = DTYPE_BYTES[train.precision]
    gradient, sums = weight, FP32 if weight < FP32 else 0
    masters, moments = FP32, 2 * FP32
    host = masters + FP32 + moments  # of an offloaded optimizer: gradients of its own too
    by_stage = {  # stage, offloaded; without ZeRO fp32 weights are their own masters
        (0, False): ZeroBytes(weight + gradient + moments + (masters if sums else 0), 0, 0),
        (1, False): ZeroBytes(weight + (sums or gradient), masters + moments, 0),
        (2, False): ZeroBytes(weight, FP32 + masters + moments, 0),
        (3, False): ZeroBytes(0, weight + FP32 + masters + moments, 0),
        (1, True): ZeroBytes(weight + gradient + sums, 0, host + weight),
        (2, True): ZeroBytes(weight, FP32, host + weight),
        (3, True): ZeroBytes(0, weight, host + FP32),
    }
    stage = train.zero_stage
    return by_stage[stage, train.offload_optimizer and stage > 0]


def bucket_bytes(train: Train, num_trained: int, num_parameters: int) -> int:
    """What DeepSpeed reduces gradients in, a copy of what it holds, and at stage 3 the gathered weights.

    num_trained: parameters with gradients.
    """
    if train.zero_stage == 0 or (train.zero_stage == 1 and not train.offload_optimizer):
        return 0
    weight = DTYPE_BYTES[train.precision]
    gradient = FP32 if train.zero_stage == 1 else weight
    gathered = min(GATHERED_ELEMENTS, num_parameters) * weight if train.zero_stage == 3 else 0
    return (BUCKET_ELEMENTS + min(BUCKET_ELEMENTS, num_trained)) * gradient + gathered


def step_bytes(train: Train, num_parameters: int, ranks: int) -> float:
    """The rank's gradients once more, in one piece, at the optimizer step; ZeRO-1's fp32 sums are one."""
    has_one_sum = train.zero_stage == 1 and train.precision == "bfloat16"
    is_copied = train.zero_stage in {1, 2} and not has_one_sum and not train.offload_optimizer
    return FP32 * num_parameters / ranks if is_copied else 0


def saved_bytes(train: Train) -> tuple[int, int]:
    """Of a parameter on the disk: in a published checkpoint, and in the state that resuming needs."""
    return 2, DTYPE_BYTES[train.precision] + 3 * FP32


TILE_ROWS, STACK_KEYS, KEY_STEP = 64, 1 << 15, 64
"""Those of `train.tiles`."""
BATCHES_AHEAD = 2
"""As `train.sending` and `train.loop` send them."""
CHUNK_LOGITS = {"cpu": 1 << 23, "cuda": 1 << 29}
"""That of `train.head`."""


@dataclass(frozen=True)
class StackShape:
    """Attention tiles in one shape."""

    tiles: int
    rows: int
    keys: int


@dataclass(frozen=True)
class WorstBatch:
    """The largest batch of a recipe on one rank, as `train.batches.worst_case_batch` packs it."""

    sequences: int
    tokens: int
    """Of each."""
    anchors: int
    """Of each; they are the last that have a token after them."""
    block_size: int

    @property
    def first_anchor(self) -> int:
        return self.tokens - 1 - self.anchors

    @property
    def context_rows(self) -> int:
        return self.sequences * (self.tokens - 2)

    @property
    def block_rows(self) -> int:
        return self.sequences * self.anchors * self.block_size

    @property
    def supervised_rows(self) -> int:
        drafts = self.block_size - 1
        return self.sequences * sum(min(drafts, after) for after in range(1, self.anchors + 1))

    def stacks(self, kind: LayerType, window: int) -> Iterator[StackShape]:
        """`train.tiles.cut_tiles`, in numbers."""
        most = max(1, TILE_ROWS // self.block_size)
        runs = math.ceil(self.anchors / most)
        bounds = [self.anchors * run // runs for run in range(runs + 1)]
        tiles = [self._tile(first, end, kind, window) for first, end in pairwise(bounds)]
        alike = sorted(tiles * self.sequences, key=_rounded_keys)
        for size, group in groupby(alike, key=_rounded_keys):
            members, count = list(group), max(1, STACK_KEYS // size)
            for start in range(0, len(members), count):
                stack = members[start : start + count]
                rows, keys = max(tile.rows for tile in stack), max(tile.keys for tile in stack)
                yield StackShape(len(stack), rows, keys)

    def _tile(self, first: int, end: int, kind: LayerType, window: int) -> StackShape:
        """Of blocks first..end-1: all context that any of them may see, and their own rows."""
        rows = (end - first) * self.block_size
        lowest = max(0, self.first_anchor + first - window + 1) if kind == "sliding_attention" else 0
        return StackShape(1, rows, max(self.first_anchor + end - 1, lowest) - lowest + rows)


def _rounded_keys(tile: StackShape) -> int:
    return math.ceil(tile.keys / KEY_STEP) * KEY_STEP


def worst_batch(train: Train, block_size: int, num_tokens: int) -> WorstBatch:
    anchors = max(1, min(train.num_anchors, num_tokens - 1))
    return WorstBatch(train.micro_batch_sequences, num_tokens, anchors, block_size)


@dataclass(frozen=True)
class Activations:
    """What the trainer holds at the peak of the worst batch's backward pass, parameters left out.

    Assumed: on a GPU norms and attention keep what they read and write (`train.pointwise`,
    `train.attention`).  On a CPU norms keep fp32 copies, and attention copies each tile's keys and values in
    fp32 for every query head, as torch's math path does, to which a boolean mask with grouped heads may fall
    back; a fused one takes less.
    """

    drafter: Drafter
    hidden_size: int
    vocab_size: int
    batch: WorstBatch
    dtype_bytes: int
    recompute: bool
    on_gpu: bool
    final_states: bool = False
    """Whether the objective reads the target's final states."""

    def peak_bytes(self) -> int:
        """With the loss's rows while it is computed, then with the gradients of one layer after another."""
        kept = [self._layer_bytes(kind) for kind in self.drafter.layer_types]
        inputs = len(kept) * self.batch.block_rows * self.hidden_size * self.dtype_bytes
        at_loss = inputs + (0 if self.recompute else sum(kept)) + self._loss_bytes()
        in_layers = inputs + (max(kept) if self.recompute else sum(kept)) + self._gradient_bytes()
        return self._shared_bytes() + max(at_loss, in_layers)

    @property
    def ahead_bytes(self) -> int:
        """Inputs of batches that are on their way to a GPU: the next, and the first of the next step."""
        D, S, Q = self.hidden_size, self.batch.context_rows, self.batch.block_rows
        final = Q * D * self.dtype_bytes if self.final_states else 0
        taps = S * tap_bytes(self.drafter, D, self.dtype_bytes)
        return BATCHES_AHEAD * (taps + final) if self.on_gpu else 0

    def _shared_bytes(self) -> int:
        """Tap states, masks, embedded blocks, and the context that all layers read with its norm's copies."""
        D, S, Q = self.hidden_size, self.batch.context_rows, self.batch.block_rows
        masks = sum(stack.tiles * stack.rows * stack.keys for stack in self._all_stacks())
        taps = S * tap_bytes(self.drafter, D, self.dtype_bytes)
        return taps + masks + S * D * (self.dtype_bytes + self._norm_bytes()) + Q * D * self.dtype_bytes

    def _norm_bytes(self) -> int:
        """What a norm keeps of an element: its input, or that and its quotient in fp32."""
        return self.dtype_bytes if self.on_gpu else 2 * FP32

    def _layer_bytes(self, kind: LayerType) -> int:
        """What one layer keeps for its backward pass."""
        D, F = self.hidden_size, self.drafter.intermediate_size
        Q, S = self.batch.block_rows, self.batch.context_rows
        queries, keys = query_size(self.drafter), key_size(self.drafter)
        residuals = 1 if self.on_gpu else 2  # the first norm reads the layer's input
        norms = (residuals * Q * D + Q * queries + (S + Q) * keys) * self._norm_bytes()
        products = 3 if self.recompute else 2  # gate and up, of which `train.pointwise` makes the third again
        inputs = Q * (2 * D + queries + products * F) * self.dtype_bytes  # of the matrix products
        return norms + inputs + self._attention_bytes(kind)

    def _attention_bytes(self, kind: LayerType) -> int:
        """Beside its output: queries, keys, values and a number for each query and head; or tiles."""
        if not self.on_gpu:
            return sum(map(self._stack_bytes, self._stacks(kind)))
        Q, heads = self.batch.block_rows, self.drafter.num_attention_heads
        return self._query_and_key_bytes() + Q * heads * FP32

    def _query_and_key_bytes(self) -> int:
        Q, S = self.batch.block_rows, self.batch.context_rows
        return (Q * query_size(self.drafter) + 2 * (S + Q) * key_size(self.drafter)) * self.dtype_bytes

    def _stack_bytes(self, stack: StackShape) -> int:
        """Queries, keys and values of every head, and the probabilities."""
        wide = (stack.rows + 2 * stack.keys) * self.drafter.head_dim + stack.rows * stack.keys
        return stack.tiles * self.drafter.num_attention_heads * wide * FP32

    def _loss_bytes(self) -> int:
        """The final norm's copies, the supervised rows with their gradients, and the head's."""
        D, Q, R, b = self.hidden_size, self.batch.block_rows, self.batch.supervised_rows, self.dtype_bytes
        return Q * D * (self._norm_bytes() + 2 * b) + 2 * R * D * b + self._head_bytes()

    def _head_bytes(self) -> int:
        """A chunk of logits, which on a CPU is worked on in fp32, or of two, and the final states."""
        D, V, Q, drafts = self.hidden_size, self.vocab_size, self.batch.block_rows, self.batch.block_size - 1
        most = CHUNK_LOGITS["cuda" if self.on_gpu else "cpu"] // V // drafts * drafts
        logits = min(self.batch.supervised_rows, max(drafts, most)) * V
        models = 2 if self.final_states else 1
        work = 0 if self.on_gpu else (2 * models - 1) * FP32
        return logits * (models * self.dtype_bytes + work) + (models - 1) * Q * D * self.dtype_bytes

    def _gradient_bytes(self) -> int:
        """Under way in one layer: of its widest rows and a weight between them, or of its attention."""
        D, F = self.hidden_size, self.drafter.intermediate_size
        widest = (self.batch.block_rows * (2 * F + 4 * D) + F * D) * self.dtype_bytes
        return max(widest, self._query_and_key_bytes(), *map(self._stack_bytes, self._all_stacks()))

    def _all_stacks(self) -> list[StackShape]:
        """None on a GPU, which needs no masks."""
        kinds = () if self.on_gpu else set(self.drafter.layer_types)
        return [stack for kind in kinds for stack in self._stacks(kind)]

    def _stacks(self, kind: LayerType) -> list[StackShape]:
        return list(self.batch.stacks(kind, self.drafter.sliding_window))


HEAD_BLOCKS, HEAD_ROW_NUMBERS = 512, 1 << 26
"""Those of `train.pairwise_learner` and `train.pairwise`."""
RANKED_LOGITS = {"cpu": 1 << 23, "cuda": 1 << 28}
"""Those of `train.pairwise`."""


@dataclass(frozen=True)
class CompanionBytes:
    """What a pairwise head that learns beside the drafter takes of a rank's memory.

    Its blocks' states wait for the end of the step; the work comes then, when activations are gone.
    """

    settings: PairwiseCompanion
    hidden_size: int
    vocab_size: int
    blocks: int
    """Of the rank, in a step."""
    block_size: int
    dtype_bytes: int
    on_gpu: bool
    with_final: bool
    """The target's final states wait with the drafter's."""

    @property
    def num_parameters(self) -> int:
        """Two projections of the target's rows, the gate, and what all other tokens share."""
        return (3 * self.hidden_size + 1) * self.settings.rank

    @property
    def state_bytes(self) -> int:
        return self.blocks * self.block_size * self.hidden_size * self.dtype_bytes

    @property
    def lasting_bytes(self) -> int:
        """Parameters, gradients and two moments in fp32, and the states."""
        return 4 * FP32 * self.num_parameters + self.state_bytes * (1 + self.with_final)

    @property
    def work_bytes(self) -> int:
        """Beside these: the states in one piece, then a chunk of logits or the loss's own."""
        return self.state_bytes + max(self._ranking_bytes(), self._loss_bytes())

    def _ranking_bytes(self) -> int:
        """On a CPU in fp32 too."""
        most = RANKED_LOGITS["cuda" if self.on_gpu else "cpu"]
        logits = min(self.blocks * (self.block_size - 1) * self.vocab_size, max(most, self.vocab_size))
        return logits * (self.dtype_bytes + (0 if self.on_gpu else FP32))

    def _loss_bytes(self) -> int:
        """Two tables of the vocabulary with some of the target's rows in fp32, of which they are made; or one
        table's gradient, and the states and the candidates' vectors and gradients of a chunk of blocks."""
        D, V, r = self.hidden_size, self.vocab_size, self.settings.rank
        rows = min(HEAD_BLOCKS, self.blocks) * (self.block_size - 1)
        made = 2 * V * r + min(V * D, HEAD_ROW_NUMBERS)
        scored = V * r + rows * (D + 2 * self.settings.candidates * r)
        return max(made, scored) * FP32
