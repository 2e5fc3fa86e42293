"""vLLM's kernels of chain drafting and verification in NumPy: DFlash's inputs and the rejection sampler.

What no recipe asks for (draft logits, block verification, watermarks, synthetic rates) is left to them.
Shapes: L=rows of logits  R=requests  D=drafts of a request  Q=slots of a block  K=blocks of the vocabulary
"""

import numpy as np
import torch

from serve.cpu_kernels.launch import Arguments, stands_in_for
from serve.cpu_kernels.sampling import Draw, draw_blocks, greatest_of_blocks, split_blocks, to_fp32

_REJECTION = "vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils"
_U32_MAX = 0xFFFFFFFF
_LEAST_UNIFORM = np.float32(4.6566127342e-10)


@stands_in_for(
    "vllm.v1.worker.gpu.spec_decode.dflash.speculator._prepare_dflash_inputs_kernel",
    "out_input_ids_ptr out_query_positions_ptr out_query_start_loc_ptr out_seq_lens_ptr"
    " out_query_slot_mapping_ptr out_context_positions_ptr out_context_slot_mapping_ptr"
    " out_sample_indices_ptr out_sample_pos_ptr out_sample_idx_mapping_ptr out_temperature_ptr"
    " out_seeds_ptr target_positions_ptr target_query_start_loc_ptr idx_mapping_ptr last_sampled_ptr"
    " next_prefill_tokens_ptr num_sampled_ptr num_rejected_ptr temperature_ptr seeds_ptr block_table_ptr"
    " block_table_stride parallel_drafting_token_id block_size num_query_per_req num_speculative_steps"
    " max_num_reqs max_num_tokens max_model_len cp_rank SAMPLE_FROM_ANCHOR PAD_SLOT_ID CP_SIZE"
    " CP_INTERLEAVE BLOCK_SIZE",
)
def prepare_drafter(a: Arguments) -> bool | None:
    """The context (the target's tokens, rejected ones emptied) and the block [last token, mask ...]."""
    if a.CP_SIZE != 1 or a.SAMPLE_FROM_ANCHOR:
        return False
    starts = a.target_query_start_loc_ptr[: a.grid[0] + 1]
    end_R = starts[1:] - a.num_rejected_ptr[: a.grid[0]]
    next_R = a.target_positions_ptr[end_R - 1].astype(np.int64) + 1
    for row in range(a.grid[0]):
        _place_context(a, row, slice(starts[row], starts[row + 1]), end_R[row])
    _place_block(a, next_R)
    _place_samples(a, next_R)
    slot_R = a.idx_mapping_ptr[: a.grid[0]]
    a.out_temperature_ptr[slot_R] = a.temperature_ptr[slot_R]
    a.out_seeds_ptr[slot_R] = a.seeds_ptr[slot_R]
    return None


def _find_slots(a: Arguments, row: int | np.ndarray, position: np.ndarray) -> np.ndarray:
    """Places in the drafter's cache; block 0 is nobody's."""
    column = np.minimum(position // a.block_size, a.block_table_stride - 1)
    block = a.block_table_ptr[row, column].astype(np.int64)
    return np.where(block != 0, block * a.block_size + position % a.block_size, a.PAD_SLOT_ID)


def _place_context(a: Arguments, row: int, span: slice, valid_end: int) -> None:
    position = a.target_positions_ptr[span.start : valid_end]
    a.out_context_positions_ptr[span] = 0
    a.out_context_slot_mapping_ptr[span] = a.PAD_SLOT_ID
    a.out_context_positions_ptr[span.start : valid_end] = position
    a.out_context_slot_mapping_ptr[span.start : valid_end] = _find_slots(a, row, position)


def _place_block(a: Arguments, next_R: np.ndarray) -> None:
    num_reqs, slots = a.grid[0], a.num_query_per_req
    row_R, slot_R = np.arange(num_reqs), a.idx_mapping_ptr[: a.grid[0]]
    is_sampled = a.num_sampled_ptr[:num_reqs] > 0
    last_R, prefill_R = (x.reshape(-1)[slot_R] for x in (a.last_sampled_ptr, a.next_prefill_tokens_ptr))
    id_RQ = np.full((num_reqs, slots), a.parallel_drafting_token_id)
    id_RQ[:, 0] = np.where(is_sampled, last_R, prefill_R)
    position_RQ = next_R[:, None] + np.arange(slots)
    a.out_input_ids_ptr[: id_RQ.size] = id_RQ.ravel()
    a.out_query_positions_ptr[: id_RQ.size] = np.minimum(position_RQ, a.max_model_len - 1).ravel()
    a.out_query_slot_mapping_ptr[: a.max_num_tokens] = a.PAD_SLOT_ID
    a.out_query_slot_mapping_ptr[: id_RQ.size] = _find_slots(a, row_R[:, None], position_RQ).ravel()
    a.out_query_start_loc_ptr[:num_reqs] = row_R * slots
    a.out_query_start_loc_ptr[num_reqs : a.max_num_reqs + 1] = id_RQ.size
    a.out_seq_lens_ptr[:num_reqs] = np.minimum(next_R + slots, a.max_model_len)
    a.out_seq_lens_ptr[num_reqs : a.max_num_reqs] = 0


def _place_samples(a: Arguments, next_R: np.ndarray) -> None:
    """Each mask slot is drawn from at its own position; unused rows point nowhere."""
    row_R1 = np.arange(a.grid[0])[:, None]
    ahead_D: np.ndarray = 1 + np.arange(a.num_speculative_steps)
    slot_RD = np.repeat(a.idx_mapping_ptr[: a.grid[0], None], a.num_speculative_steps, axis=1)
    upto, all_rows = slot_RD.size, a.max_num_reqs * a.num_speculative_steps
    for out, value_RD, unused in (
        (a.out_sample_indices_ptr, row_R1 * a.num_query_per_req + ahead_D, 0),
        (a.out_sample_pos_ptr, next_R[:, None] + ahead_D, 0),
        (a.out_sample_idx_mapping_ptr, slot_RD, -1),
    ):
        out[:upto], out[upto:all_rows] = value_RD.ravel(), unused


@stands_in_for(
    f"{_REJECTION}._compute_local_logits_stats_kernel",
    "target_local_argmax_ptr target_local_argmax_stride target_local_max_ptr target_local_max_stride"
    " target_local_sumexp_ptr target_local_sumexp_stride draft_local_max_ptr draft_local_max_stride"
    " draft_local_sumexp_ptr draft_local_sumexp_stride target_logits_ptr target_logits_stride"
    " draft_logits_ptr draft_logits_stride_0 draft_logits_stride_1 expanded_idx_mapping_ptr"
    " expanded_local_pos_ptr temp_ptr vocab_size num_speculative_steps BLOCK_SIZE HAS_DRAFT_LOGITS",
)
def summarise_logits(a: Arguments) -> bool | None:
    """[L, K]: each block's greatest logit, its token, and the sum of exp(logit - greatest)."""
    if a.HAS_DRAFT_LOGITS:
        return False
    logit_LKB = split_blocks(to_fp32(a.target_logits_ptr)[:, : a.vocab_size], a.grid[1], a.BLOCK_SIZE)
    a.target_local_argmax_ptr[:], greatest_LK = greatest_of_blocks(logit_LKB)
    a.target_local_max_ptr[:] = greatest_LK
    hot_L = np.flatnonzero(a.temp_ptr[a.expanded_idx_mapping_ptr])
    if hot_L.size:
        a.target_local_sumexp_ptr[hot_L] = np.exp(logit_LKB[hot_L] - greatest_LK[hot_L, :, None]).sum(axis=2)
    return None


@stands_in_for(
    f"{_REJECTION}._rejection_kernel",
    "sampled_ptr sampled_stride rejected_steps_ptr target_rejected_logsumexp_ptr"
    " draft_rejected_logsumexp_ptr target_logits_ptr target_logits_stride target_local_argmax_ptr"
    " target_local_argmax_stride target_local_max_ptr target_local_max_stride target_local_sumexp_ptr"
    " target_local_sumexp_stride draft_sampled_ptr draft_logits_ptr draft_logits_stride_0"
    " draft_logits_stride_1 draft_local_max_ptr draft_local_max_stride draft_local_sumexp_ptr"
    " draft_local_sumexp_stride cu_num_logits_ptr idx_mapping_ptr temp_ptr seed_ptr pos_ptr"
    " synthetic_conditional_rates_ptr cumulative_log_p_ptr local_residual_mass_ptr"
    " local_residual_mass_stride vocab_num_blocks PADDED_VOCAB_NUM_BLOCKS HAS_DRAFT_LOGITS SYNTHETIC_MODE"
    " USE_BLOCK_VERIFICATION",
)
def verify_chain(a: Arguments) -> bool | None:
    """How many drafts each request keeps."""
    if a.HAS_DRAFT_LOGITS or a.SYNTHETIC_MODE or a.USE_BLOCK_VERIFICATION:
        return False
    for row, slot in enumerate(a.idx_mapping_ptr):
        rows = range(a.cu_num_logits_ptr[row], a.cu_num_logits_ptr[row + 1] - 1)
        is_greedy = a.temp_ptr[slot] == 0
        accepted, logsumexp = (
            _keep_likeliest(a, row, rows)
            if is_greedy
            else _keep_by_chance(a, row, rows, int(a.seed_ptr[slot]))
        )
        a.rejected_steps_ptr[row] = accepted
        a.target_rejected_logsumexp_ptr[row], a.draft_rejected_logsumexp_ptr[row] = logsumexp, 0
    return None


def _keep_likeliest(a: Arguments, row: int, rows: range) -> tuple[int, np.float32]:
    """T = 0: keeps draft x while x is the target's argmax, and puts that argmax where one is refused."""
    for step, logit in enumerate(rows):
        best = a.target_local_argmax_ptr[logit, a.target_local_max_ptr[logit].argmax()]
        a.sampled_ptr[row, step] = best
        if a.draft_sampled_ptr[logit + 1] != best:
            return step, np.float32(0)
    return len(rows), np.float32(0)


def _keep_by_chance(a: Arguments, row: int, rows: range, seed: int) -> tuple[int, np.float32]:
    """Keeps draft x while log p(x) > log u (its own probability being 1); -1 marks no draft."""
    logsumexp = np.float32(0)
    for step, logit in enumerate(rows):
        draft = a.draft_sampled_ptr[logit + 1]
        if draft < 0:
            return step, logsumexp
        logsumexp = _logsumexp(a.target_local_max_ptr[logit], a.target_local_sumexp_ptr[logit])
        a.sampled_ptr[row, step] = draft
        u = philox_uniform(seed, int(a.pos_ptr[logit]))
        if not np.float32(float(a.target_logits_ptr[logit, draft])) - logsumexp > np.log(u):
            return step, logsumexp
    return len(rows), logsumexp


def _logsumexp(max_K: np.ndarray, sumexp_K: np.ndarray) -> np.float32:
    greatest = max_K.max()
    return greatest + np.log((sumexp_K * np.exp(max_K - greatest)).sum())


def philox_uniform(seed: int, offset: int) -> np.float32:
    """Triton's `tl.rand(seed, offset)` for a 64-bit offset: Philox 4x32 of 10 rounds, never 0."""
    c0, c1, c2, c3 = offset & _U32_MAX, (offset >> 32) & _U32_MAX, 0, 0
    k0, k1 = seed & _U32_MAX, (seed >> 32) & _U32_MAX
    for _ in range(10):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b & _U32_MAX, (a >> 32) ^ c3 ^ k1, a & _U32_MAX
        k0, k1 = (k0 + 0x9E3779B9) & _U32_MAX, (k1 + 0xBB67AE85) & _U32_MAX
    distance = c0 if c0 < 1 << 31 else _U32_MAX - c0  # of the signed number from 0 or -1
    return max(np.float32(distance) * _LEAST_UNIFORM, _LEAST_UNIFORM)


@stands_in_for(
    f"{_REJECTION}._resample_kernel",
    "resampled_local_argmax_ptr resampled_local_argmax_stride resampled_local_max_ptr"
    " resampled_local_max_stride target_logits_ptr target_logits_stride target_rejected_logsumexp_ptr"
    " draft_logits_ptr draft_logits_stride_0 draft_logits_stride_1 draft_rejected_logsumexp_ptr"
    " rejected_step_ptr cu_num_logits_ptr expanded_idx_mapping_ptr draft_sampled_ptr temp_ptr seed_ptr"
    " pos_ptr cumulative_log_p_ptr contexts_ptr contexts_stride watermarking_ptr"
    " watermarking_skip_mask_ptr watermark_key_0 watermark_key_1 vocab_size BLOCK_SIZE HAS_DRAFT_LOGITS"
    " USE_FP64 USE_BLOCK_VERIFICATION CONTEXT_WIDTH WATERMARK DEDUPLICATE_CONTEXTS",
)
def draw_replacements(a: Arguments) -> bool | None:
    """Per request, the draw [R, K] after its last kept draft; the refused draft's token is left out."""
    if a.HAS_DRAFT_LOGITS or a.USE_FP64 or a.USE_BLOCK_VERIFICATION or a.WATERMARK:
        return False
    bounds = a.cu_num_logits_ptr[: a.grid[0] + 1].astype(np.int64)
    row_R = bounds[:-1] + a.rejected_step_ptr[: a.grid[0]]
    score_RV = to_fp32(torch.as_tensor(a.target_logits_ptr)[torch.from_numpy(row_R), : a.vocab_size])
    refused_R = np.flatnonzero(row_R != bounds[1:] - 1)
    token_R = a.draft_sampled_ptr[row_R[refused_R] + 1]
    score_RV[refused_R[token_R >= 0], token_R[token_R >= 0]] = -np.inf
    slot_R = a.expanded_idx_mapping_ptr[row_R]
    draw = Draw(
        temperature=a.temp_ptr[slot_R],
        seed=a.seed_ptr[slot_R].astype(np.int64),
        position=a.pos_ptr[row_R].astype(np.int64),
    )
    token_RK, score_RK = draw_blocks(score_RV, draw, a.grid[1], a.BLOCK_SIZE)
    a.resampled_local_argmax_ptr[:], a.resampled_local_max_ptr[:] = token_RK, score_RK
    return None


@stands_in_for(
    f"{_REJECTION}._insert_resampled_kernel",
    "sampled_ptr sampled_stride num_sampled_ptr resampled_local_argmax_ptr resampled_local_argmax_stride"
    " resampled_local_max_ptr resampled_local_max_stride resample_num_blocks cu_num_logits_ptr"
    " expanded_idx_mapping_ptr temp_ptr PADDED_RESAMPLE_NUM_BLOCKS",
)
def insert_replacements(a: Arguments) -> None:
    """Appends each request's draw to its kept drafts; a greedy refusal has the target's token already."""
    rows = slice(0, a.grid[0])
    bounds, kept_R = a.cu_num_logits_ptr[: a.grid[0] + 1], a.num_sampled_ptr[rows].copy()
    logit_R = bounds[:-1] + kept_R
    is_drawn = (a.temp_ptr[a.expanded_idx_mapping_ptr[logit_R]] != 0) | (logit_R == bounds[1:] - 1)
    score_RK = a.resampled_local_max_ptr[rows, : a.resample_num_blocks]
    best_R = np.where(np.isnan(score_RK), -np.inf, score_RK).argmax(axis=1)
    drawn_R = np.flatnonzero(is_drawn)
    a.sampled_ptr[drawn_R, kept_R[drawn_R]] = a.resampled_local_argmax_ptr[drawn_R, best_R[drawn_R]]
    a.num_sampled_ptr[rows] += 1


STAND_INS = [prepare_drafter, summarise_logits, verify_chain, draw_replacements, insert_replacements]
