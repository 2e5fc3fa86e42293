"""The law of decoding with trees: its texts are distributed as the target's own, whatever the drafter thinks.

Everything of a step but the two networks runs as in an engine on this device: stock sampling of every row,
the verifier, the trees' growth, planting, masks and positions.  Target and drafter are tables over a few
tokens, so that the probability of every text is known, and thousands of requests share a batch, each with
noise of its own.
"""

# S=request slots  B=requests of a step  T=rows of a step  R=rows of a request  N=nodes  L=slots of a block
# E=tokens of a text  V=vocabulary

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")
if not torch.cuda.is_available():
    import vllm.v1.worker.cpu_worker  # noqa: F401  (patches what vLLM's kernels import, so it comes first)

from vllm import SamplingParams
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch
from vllm.v1.worker.gpu.sample import sampler as stock_sampler
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.spec_decode import rejection_sampler
from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator
from vllm.v1.worker.gpu.states import RequestState

from serve.cpu_kernels import sampling
from serve.seam import verifier
from serve.seam.processor import prepare_processor
from serve.seam.runtime import StepLimits, TreeRuntime
from serve.seam.speculator import TreeSpeculator
from serve.tree_attention import unpack_sees
from serve.tree_batch import Topology, WalkBatch, follow_trees

IS_CUDA = torch.cuda.is_available()
if IS_CUDA:
    from serve.seam import cuda_runtime
    from serve.seam.cuda_verifier import CudaTreeVerifier

DEVICE = torch.device("cuda" if IS_CUDA else "cpu")
VOCAB, TEXT_TOKENS, BLOCK_SLOTS = 5, 4, 3
PROMPT = (0, 1)  # of every text; the target looks at the last two tokens
NUM_DRAWS, DRAWS_PER_ROUND = 100_000, 1000
POSITIONS_PER_ROUND = 16  # more than prompt, text and a last tree take: no noise is to be drawn twice
CHUNK_ROWS = 4999  # verified at once; a step of all requests takes several chunks
PLAUSIBLE, IMPOSSIBLE = (
    1e-4,
    1e-6,
)  # with right texts one of 15 comparisons fails for 1 in 670 choices of seeds
LEAST_EXPECTED = 5  # draws of a text that is not pooled with other rare ones


@dataclass(frozen=True)
class Setting:
    """How a request samples."""

    temperature: float
    top_k: int = 0
    top_p: float = 1.0


TEMPERATURES = (0.3, 1.0, 2.0)
SETTINGS = [Setting(t, **each) for t in TEMPERATURES for each in ({}, {"top_k": 3}, {"top_p": 0.85})]
BOTH = [Setting(t, top_k=4, top_p=0.9) for t in TEMPERATURES]
SETTINGS_OF_BUDGET = {1: BOTH, 7: SETTINGS, 15: BOTH}


# Target and drafter


def target_logits() -> torch.Tensor:
    """Of the token after any two. [V, V, V]"""
    return torch.randn(VOCAB, VOCAB, VOCAB, generator=torch.Generator().manual_seed(5))


def drafter_logits() -> torch.Tensor:
    """Of each slot after any two tokens, nearly the target's but blind to the slots before. [V, V, L, V]"""
    probs_VVV = target_logits().softmax(-1)
    pairs = torch.eye(VOCAB**2).view((VOCAB,) * 4)  # after two given tokens, how probable are which last two
    marginals = []
    for _ in range(BLOCK_SLOTS):
        pairs = torch.einsum("xyab,abc->xybc", pairs, probs_VVV)
        marginals.append(pairs.sum(2))
    log_VVLV = torch.stack(marginals, dim=2).log()
    return log_VVLV + 0.7 * torch.randn(log_VVLV.shape, generator=torch.Generator().manual_seed(6))


def text_probs(setting: Setting) -> np.ndarray:
    """Of every text by definition, token after token. [V ** E]"""
    logits_VVV = target_logits().double().numpy()
    probs: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(TEXT_TOKENS):
        probs = {
            (*text, token): before * after
            for text, before in probs.items()
            for token, after in enumerate(token_probs(logits_VVV[(*PROMPT, *text)[-2:]], setting))
        }
    return np.array(list(probs.values()))


def token_probs(logits_V: np.ndarray, setting: Setting) -> np.ndarray:
    """At the temperature; of these the top_k; of these the fewest that hold top_p."""
    weight_V = np.exp(logits_V / setting.temperature)
    kept = np.argsort(-weight_V)[: setting.top_k or VOCAB]
    before = weight_V[kept].cumsum() - weight_V[kept]
    kept = kept[before < setting.top_p * weight_V[kept].sum()]
    probs_V = np.zeros(VOCAB)
    probs_V[kept] = weight_V[kept] / weight_V[kept].sum()
    return probs_V


# An engine whose networks are those tables


class TableDrafter(DFlashSpeculator):
    """vLLM's speculator with a table for its network: `propose` is given the logits of the block."""

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        self.max_num_reqs = vllm_config.scheduler_config.max_num_seqs
        self.num_speculative_steps = vllm_config.speculative_config.num_speculative_tokens

    def compute_draft_logits(self, hidden_states: torch.Tensor, _step: int = 0) -> torch.Tensor:
        return hidden_states

    def propose(self, batch: Any, logits_BLV: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        unread = dict.fromkeys(["sample_src_positions", "temperature", "seeds", "draft_step", "draft_logits"])
        slots = batch.idx_mapping.repeat_interleave(logits_BLV.shape[1])
        chain = self.sample_draft(logits_BLV.flatten(0, 1), idx_mapping=slots, **unread)
        return chain.view(logits_BLV.shape[:2])


class TableSpeculator(TreeSpeculator, TableDrafter):
    """Ours over that."""


@dataclass
class Round:
    """Texts of all request slots on their way, from a position of the round's own on."""

    first_position: int
    tokens: torch.Tensor
    """[S, most tokens]"""
    lengths_S: torch.Tensor

    def last_pair(self, slots_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        last_B = self.lengths_S[slots_B] - 1
        return self.tokens[slots_B, last_B - 1], self.tokens[slots_B, last_B]

    def append(self, slots_B: torch.Tensor, sampled_BR: torch.Tensor, num_sampled_B: torch.Tensor) -> None:
        for place in range(int(num_sampled_B.max())):
            row_B = num_sampled_B > place
            slots = slots_B[row_B]
            self.tokens[slots, self.lengths_S[slots]] = sampled_BR[row_B, place].long()
            self.lengths_S[slots] += 1


def classes_of_device() -> tuple[type[TreeRuntime], type[verifier.TreeVerifier]]:
    return (
        (cuda_runtime.CudaTreeRuntime, CudaTreeVerifier) if IS_CUDA else (TreeRuntime, verifier.TreeVerifier)
    )


class TableEngine:
    """Plays rounds of requests; the request slots take the settings in turn."""

    def __init__(self, budget: int, settings: list[Setting]) -> None:
        self.budget, self.num_settings = budget, len(settings)
        self.num_requests = DRAWS_PER_ROUND * len(settings)
        self.rng = np.random.default_rng(budget)
        self.target_VVV = target_logits().to(DEVICE)
        num_slots = min(BLOCK_SLOTS, budget)
        self.drafter_VVLV = drafter_logits()[:, :, :num_slots].to(DEVICE)
        config = vllm_config(budget, self.num_requests)
        rows = self.num_requests * (1 + budget)
        limits = StepLimits(budget, num_slots, self.num_requests, rows)
        runtime_class, verifier_class = classes_of_device()
        self.runtime = runtime_class(limits, DEVICE)
        self.runtime.reserve({}, num_axes=0)
        self.speculator = TableSpeculator(config, DEVICE, self.runtime)
        sampler = make_sampler(config, settings)
        self.verifier = verifier_class(sampler, config.speculative_config, DEVICE, self.runtime)
        self.num_accepted: list[int] = []
        """Of each verification."""
        self.num_off_spine = 0
        """Accepted paths that are not the first nodes in their order."""

    def draw_texts(self) -> torch.Tensor:
        """[settings, NUM_DRAWS, E]"""
        rounds = [self._play(number * POSITIONS_PER_ROUND) for number in range(NUM_DRAWS // DRAWS_PER_ROUND)]
        return torch.cat(rounds).view(-1, self.num_settings, TEXT_TOKENS).transpose(0, 1)

    def _play(self, first_position: int) -> torch.Tensor:
        """One text of each request. [S, E]"""
        most = len(PROMPT) + TEXT_TOKENS + BLOCK_SLOTS
        tokens = torch.tensor(PROMPT, device=DEVICE).repeat(self.num_requests, 1)
        tokens = torch.nn.functional.pad(tokens, (0, most - len(PROMPT)))
        lengths_S = torch.full((self.num_requests,), len(PROMPT), device=DEVICE)
        texts = Round(first_position, tokens, lengths_S)
        drafts_SN = torch.zeros(self.num_requests, self.budget, dtype=torch.int64, device=DEVICE)
        slots = self.rng.permutation(self.num_requests)
        num_drafts_B = np.zeros_like(slots)  # as after a prefill
        while len(slots):
            self._step(texts, drafts_SN, slots, num_drafts_B)
            lengths = texts.lengths_S.cpu().numpy()
            slots = slots[lengths[slots] < len(PROMPT) + TEXT_TOKENS]
            num_drafts_B = np.minimum(self.rng.integers(0, 2 * self.budget, len(slots)), self.budget)
            drafted_first = np.argsort(num_drafts_B == 0, kind="stable")  # as vLLM sorts a batch
            slots, num_drafts_B = slots[drafted_first], num_drafts_B[drafted_first]
        return texts.tokens[:, len(PROMPT) : len(PROMPT) + TEXT_TOKENS].cpu()

    def _step(
        self, texts: Round, drafts_SN: torch.Tensor, slots: np.ndarray, num_drafts_B: np.ndarray
    ) -> None:
        slots_B = torch.from_numpy(slots).to(DEVICE)
        batch = make_batch(texts, drafts_SN, slots_B, num_drafts_B)
        self.runtime.begin(batch)
        if num_drafts_B.any():
            output = self.verifier(self._target(texts, batch), batch)
            texts.append(slots_B, output.sampled_token_ids, output.num_sampled)
            path_BL = self.runtime.step_of(batch).walk.path_BL
            self.num_accepted += (output.num_sampled - 1).tolist()
            self.num_off_spine += int((path_BL > torch.arange(path_BL.shape[1], device=DEVICE)).any(1).sum())
        logits_BLV = self.drafter_VVLV[texts.last_pair(slots_B)]
        drafts_SN[slots_B] = self.speculator.propose(batch, logits_BLV, None, None, [])

    def _target(self, texts: Round, batch: Any) -> torch.Tensor:
        """What a network gives that sees at each row what the step says it sees, where it says. [T, V]"""
        position_T = self.runtime.move_positions(batch, batch.positions)
        rows_BR, is_row_BR = rows_of(batch, self.budget + 1)
        sees_BRR = self._sees(batch)
        tokens_BR, position_BR = batch.input_ids[rows_BR].long(), position_T[rows_BR]
        is_before_BRR = position_BR[:, None] == position_BR[:, :, None] - 1
        is_parent_BRR = sees_BRR & is_before_BRR & is_row_BR[:, None]
        before_BR = (is_parent_BRR * tokens_BR[:, None]).sum(2)
        before_BR[:, 0] = texts.last_pair(batch.idx_mapping)[0]
        return self.target_VVV[before_BR[is_row_BR], tokens_BR[is_row_BR]]

    def _sees(self, batch: Any) -> torch.Tensor:
        """Who sees whom, as the layers read it. [B, R, R]"""
        if IS_CUDA:
            return unpack_sees(self.runtime._buffers.words_PR[: batch.num_reqs])
        return self.runtime.step_of(batch).trees.sees_BRR


def rows_of(batch: Any, most: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers of each request's rows, [B, R], and which of them there are."""
    starts_B1, numbers_R = batch.query_start_loc.long(), torch.arange(most, device=DEVICE)
    is_row_BR = numbers_R < starts_B1.diff()[:, None]
    return starts_B1[:-1, None] + numbers_R.where(is_row_BR, 0), is_row_BR


def vllm_config(budget: int, num_requests: int) -> Any:
    """What of it is read."""
    return SimpleNamespace(
        speculative_config=SimpleNamespace(
            num_speculative_tokens=budget,
            enable_adaptive_verification=False,
            rejection_sample_method="standard",
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=num_requests),
        reasoning_config=None,
    )


def make_sampler(config: Any, settings: list[Setting]) -> Sampler:
    num_requests = config.scheduler_config.max_num_seqs
    states = RequestState(num_requests, 8, 8, config.speculative_config.num_speculative_tokens, VOCAB, DEVICE)
    states.prefill_len.np[:] = 1
    states.apply_staged_writes()
    sampler = Sampler(config, num_requests, VOCAB, DEVICE, states)
    seeds = np.random.default_rng(0).integers(2**62, size=num_requests).tolist()
    for slot, seed in enumerate(seeds):
        sampler.add_request(slot, SamplingParams(seed=seed, **asdict(settings[slot % len(settings)])))
    sampler.apply_staged_writes()
    return sampler


def make_batch(texts: Round, drafts_SN: torch.Tensor, slots_B: torch.Tensor, num_drafts_B: np.ndarray) -> Any:
    """As vLLM's InputBatch: each request's last token and so many of its drafts, linear."""
    starts = np.concatenate([[0], (1 + num_drafts_B).cumsum()]).astype(np.int32)
    starts_B1 = torch.from_numpy(starts).to(DEVICE)
    request_T = torch.arange(len(slots_B), device=DEVICE).repeat_interleave(starts_B1.diff())
    local_T = torch.arange(len(request_T), device=DEVICE) - starts_B1[request_T]
    tokens_BR = torch.cat([texts.last_pair(slots_B)[1][:, None], drafts_SN[slots_B]], dim=1)
    last_B = texts.first_position + texts.lengths_S[slots_B] - 1
    seq_lens_B = (last_B + starts_B1.diff()).int()
    return SimpleNamespace(
        num_reqs=len(slots_B),
        idx_mapping=slots_B,
        idx_mapping_np=slots_B.cpu().numpy(),
        num_scheduled_tokens=1 + num_drafts_B,
        expanded_idx_mapping=slots_B[request_T],
        expanded_local_pos=local_T.int(),
        num_draft_tokens=int(num_drafts_B.sum()),
        num_draft_tokens_per_req=num_drafts_B if num_drafts_B.any() else None,
        query_start_loc=starts_B1,
        query_start_loc_np=starts,
        cu_num_logits=starts_B1,
        cu_num_logits_np=starts,
        logits_indices=torch.arange(len(request_T), device=DEVICE),
        input_ids=tokens_BR[request_T, local_T].int(),
        positions=last_B[request_T] + local_T,
        seq_lens=seq_lens_B,
        seq_lens_cpu_upper_bound=seq_lens_B.cpu(),
    )


@pytest.fixture(scope="module", autouse=True)
def quick_kernels() -> Iterator[None]:
    """On a CPU what crawls is replaced once more; and verification goes in chunks, as with many requests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rejection_sampler, "MAX_CHUNK_BYTES", 4 * VOCAB * CHUNK_ROWS)
        if IS_CUDA:
            # vLLM's kernel of a GPU leaves out tokens within the top p of so few (of 0.28, 0.21, 0.21, 0.16,
            # 0.13 at 0.9 the last), plainly decoding too
            patch.setattr(stock_sampler, "apply_top_k_top_p", apply_top_k_top_p_pytorch)
        else:
            prepare_processor()
            patch.setattr(rejection_sampler, "gather_draft_sampled", gather_drafts)
            # vLLM draws in blocks of 1024 tokens: with as few as ours there is nothing to fill up
            patch.setattr(sampling, "split_blocks", lambda score_TV, _blocks, _size: score_TV[:, None])
        yield


def gather_drafts(
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    rows_T: torch.Tensor,
    slots_T: torch.Tensor,
    local_T: torch.Tensor,
    prefill_len_S: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `vllm.v1.worker.gpu.spec_decode.rejection_sampler.gather_draft_sampled`."""
    position_T = positions[rows_T]
    is_placeholder_T = (local_T > 0) & (position_T - local_T < prefill_len_S[slots_T])
    return input_ids[rows_T].masked_fill(is_placeholder_T, -1), position_T


# The statistic


def plausibility(texts_DE: torch.Tensor, probs: np.ndarray) -> float:
    """Pearson's chi-square: how probable are draws at least as far from their expectation as these."""
    places_E = VOCAB ** torch.arange(TEXT_TOKENS - 1, -1, -1)
    counts = np.bincount((texts_DE * places_E).sum(1).numpy(), minlength=len(probs))
    expected = probs * len(texts_DE)
    if counts[expected == 0].any():
        return 0.0
    is_rare = expected < LEAST_EXPECTED
    counts = np.append(counts[~is_rare], counts[is_rare].sum())
    expected = np.append(expected[~is_rare], expected[is_rare].sum())
    counts, expected = counts[expected > 0], expected[expected > 0]
    return upper_tail(float(((counts - expected) ** 2 / expected).sum()), len(counts) - 1)


def upper_tail(statistic: float, degrees: int) -> float:
    """Of the chi-square distribution."""
    halves = torch.tensor([degrees / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(*halves))


@pytest.mark.parametrize(
    ("statistic", "degrees", "tail"), [(3.8415, 1, 0.05), (124.342, 100, 0.05), (29.588, 10, 1e-3)]
)
def test_the_statistics_tail_is_that_of_the_tables(statistic, degrees, tail):
    assert upper_tail(statistic, degrees) == pytest.approx(tail, rel=1e-3)


# The law


@dataclass(frozen=True)
class Drawn:
    engine: TableEngine
    texts: dict[Setting, torch.Tensor]


def draw(budget: int, settings: list[Setting]) -> Drawn:
    engine = TableEngine(budget, settings)
    return Drawn(engine, dict(zip(settings, engine.draw_texts(), strict=True)))


@pytest.fixture(scope="module")
def drawn() -> dict[int, Drawn]:
    return {budget: draw(budget, settings) for budget, settings in SETTINGS_OF_BUDGET.items()}


@pytest.mark.parametrize(
    ("budget", "setting"),
    [(budget, setting) for budget, settings in SETTINGS_OF_BUDGET.items() for setting in settings],
    ids=str,
)
def test_texts_with_trees_have_the_targets_distribution(drawn, budget, setting):
    texts_DE = drawn[budget].texts[setting]
    assert texts_DE.shape == (NUM_DRAWS, TEXT_TOKENS)
    assert plausibility(texts_DE, text_probs(setting)) > PLAUSIBLE


def test_noise_alone_decides_and_not_the_budget(drawn):
    for setting in BOTH:
        assert torch.equal(drawn[1].texts[setting], drawn[15].texts[setting])


@pytest.mark.parametrize(("budget", "accepted"), [(1, 0.2), (7, 1), (15, 1.3)])
def test_drafts_were_accepted(drawn, budget, accepted):
    assert np.mean(drawn[budget].engine.num_accepted) > accepted


@pytest.mark.parametrize("budget", [7, 15])
def test_side_branches_were_accepted(drawn, budget):
    engine = drawn[budget].engine
    assert engine.num_off_spine > len(engine.num_accepted) / 4


# Verifiers that break it


BIASED = Setting(1.0)
Takes = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def prefer_drafts(tokens_BN: torch.Tensor, _target_BR: torch.Tensor) -> torch.Tensor:
    """Takes one draft in fifty, whatever the target drew."""
    generator = torch.Generator(DEVICE).manual_seed(tokens_BN.numel())
    return torch.rand(tokens_BN.shape, generator=generator, device=DEVICE) < 0.02


def judge_by_own_row(tokens_BN: torch.Tensor, target_BR: torch.Tensor) -> torch.Tensor:
    """Takes a node for what was drawn at its own row, not at its parent's."""
    return tokens_BN == target_BR[:, 1:]


def bias_targets(
    takes: Takes, trees: Topology, tokens_BN: torch.Tensor, target_BR: torch.Tensor
) -> torch.Tensor:
    """Where a node is taken its parent's row has its token, of two siblings the earlier's. [B, R]"""
    drawn_BR = target_BR.clone()
    takes_BN = takes(tokens_BN, target_BR)
    for node in reversed(range(tokens_BN.shape[1])):
        parent_B1 = trees.parents_BN[:, node, None] + 1
        is_taken_B1 = (takes_BN[:, node] & (node < trees.num_nodes_B))[:, None]
        token_B1 = tokens_BN[:, node, None].where(is_taken_B1, drawn_BR.gather(1, parent_B1))
        drawn_BR.scatter_(1, parent_B1, token_B1)
    return drawn_BR


def bias_verifier(patch: pytest.MonkeyPatch, takes: Takes) -> None:
    def follow(
        trees: Topology, tokens_BN: torch.Tensor, target_BR: torch.Tensor, num_slots: int
    ) -> WalkBatch:
        return follow_trees(trees, tokens_BN, bias_targets(takes, trees, tokens_BN, target_BR), num_slots)

    def walk(
        trees: Topology, drafts_T: torch.Tensor, target_T: torch.Tensor, starts_B1: torch.Tensor, *args: int
    ) -> Any:
        rows_BR, is_row_BR = rows_of(
            SimpleNamespace(query_start_loc=starts_B1), 1 + trees.parents_BN.shape[1]
        )
        drawn_BR = bias_targets(takes, trees, drafts_T[rows_BR[:, 1:]].long(), target_T[rows_BR].long())
        drawn_T = drawn_BR[is_row_BR].to(target_T.dtype)
        return unbiased(trees, drafts_T, drawn_T, starts_B1, *args)

    if IS_CUDA:
        unbiased = cuda_runtime.walk_and_commit
        patch.setattr(cuda_runtime, "walk_and_commit", walk)
    else:
        patch.setattr(verifier, "follow_trees", follow)


@pytest.mark.parametrize("takes", [prefer_drafts, judge_by_own_row])
def test_a_biased_verifier_fails(monkeypatch, takes):
    bias_verifier(monkeypatch, takes)
    texts_DE = draw(7, [BIASED]).texts[BIASED]
    assert plausibility(texts_DE, text_probs(BIASED)) < IMPOSSIBLE


def test_noise_by_row_instead_of_by_depth_fails(monkeypatch):
    """A row's noise is then drawn again at a later token's position."""
    engine = TableEngine(7, [BIASED])
    trees_at = engine.runtime.trees_at

    def trees_at_rows(*args: torch.Tensor) -> Topology:
        trees = trees_at(*args)
        rows_BN = 1 + torch.arange(7, device=DEVICE).expand_as(trees.depths_BN)
        return replace(trees, depths_BN=rows_BN)

    if IS_CUDA:
        monkeypatch.setattr(engine.runtime, "shifts_of_rows", torch.zeros_like)
    else:
        monkeypatch.setattr(engine.runtime, "trees_at", trees_at_rows)
    (texts_DE,) = engine.draw_texts()
    assert plausibility(texts_DE, text_probs(BIASED)) < IMPOSSIBLE
