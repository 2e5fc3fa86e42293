"""vLLM's sampling kernels (`vllm.v1.worker.gpu.sample`) in NumPy: the same arithmetic, so the same tokens.

Shapes: T=rows of logits  V=vocabulary  K=blocks of the vocabulary  B=entries of a block
"""

from dataclasses import dataclass

import numpy as np
import torch

from serve.cpu_kernels.launch import Arguments, stands_in_for

_DRAFT_NOISE_SALT = 1 << 30
_U32 = np.uint32
_GUMBEL = "vllm.v1.worker.gpu.sample.gumbel"
_LOGPROB = "vllm.v1.worker.gpu.sample.logprob"


@dataclass(frozen=True)
class Draw:
    """What one token per row is drawn with: [T] each. No noise at temperature 0."""

    temperature: np.ndarray
    seed: np.ndarray
    position: np.ndarray


def to_fp32(values: torch.Tensor | np.ndarray) -> np.ndarray:
    """A copy, for bf16 logits as well."""
    return torch.as_tensor(values).to(torch.float32, copy=True).numpy()


@stands_in_for(
    f"{_GUMBEL}._temperature_kernel",
    "logits_ptr logits_stride expanded_idx_mapping_ptr temperature_ptr vocab_size BLOCK_SIZE",
)
def scale_by_temperature(a: Arguments) -> None:
    """logits /= temperature, in place; a temperature of 0 leaves them."""
    temperature_T = a.temperature_ptr[a.expanded_idx_mapping_ptr].astype(np.float32)
    temperature_T[temperature_T == 0] = 1
    scaled_TV = to_fp32(a.logits_ptr) / temperature_T[:, None]
    torch.as_tensor(a.logits_ptr).copy_(torch.from_numpy(scaled_TV))


@stands_in_for(
    f"{_GUMBEL}._gumbel_sample_kernel",
    "local_argmax_ptr local_argmax_stride local_max_ptr local_max_stride logits_cache_ptr"
    " logits_cache_stride_0 logits_cache_stride_1 logits_cache_col_ptr logits_cache_source_ptr"
    " logits_cache_source_stride logits_ptr logits_stride expanded_idx_mapping_ptr seeds_ptr pos_ptr"
    " temp_ptr vocab_size BLOCK_SIZE IS_DRAFTING APPLY_TEMPERATURE USE_FP64 PER_TOKEN_COL",
)
def draw_tokens(a: Arguments) -> bool | None:
    """The greatest logit + Gumbel noise of each block [T, K], and its token."""
    slot_T = a.expanded_idx_mapping_ptr
    if a.USE_FP64 or a.logits_cache_ptr is not None or (slot_T < 0).any():
        return False
    temperature_T = a.temp_ptr[slot_T].astype(np.float32)
    score_TV = to_fp32(a.logits_ptr)
    if a.APPLY_TEMPERATURE:
        score_TV /= np.where(temperature_T == 0, np.float32(1), temperature_T)[:, None]
    position_T = a.pos_ptr.astype(np.int64) + (_DRAFT_NOISE_SALT if a.IS_DRAFTING else 0)
    draw = Draw(temperature_T, a.seeds_ptr[slot_T].astype(np.int64), position_T)
    a.local_argmax_ptr[:], a.local_max_ptr[:] = draw_blocks(score_TV, draw, a.grid[1], a.BLOCK_SIZE)
    return None


def draw_blocks(
    score_TV: np.ndarray, draw: Draw, num_blocks: int, block_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """(token [T, K], score [T, K]) of the greatest score + noise of each block; adds the noise in place."""
    hot_T = np.flatnonzero(draw.temperature)
    if hot_T.size:
        score_TV[hot_T] += gumbel_noise(draw.seed[hot_T], draw.position[hot_T], score_TV.shape[1])
    return greatest_of_blocks(split_blocks(score_TV, num_blocks, block_size))


def split_blocks(score_TV: np.ndarray, num_blocks: int, block_size: int) -> np.ndarray:
    """[T, K, B], filled up with -inf."""
    rows, vocab_size = score_TV.shape
    padding = ((0, 0), (0, num_blocks * block_size - vocab_size))
    return np.pad(score_TV, padding, constant_values=-np.inf).reshape(rows, num_blocks, block_size)


def greatest_of_blocks(score_TKB: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(token [T, K], score [T, K]); the first of equals."""
    best_TK = score_TKB.argmax(axis=2)
    greatest_TK = np.take_along_axis(score_TKB, best_TK[..., None], 2)[..., 0]
    return best_TK + np.arange(score_TKB.shape[1]) * score_TKB.shape[2], greatest_TK


def gumbel_noise(seed_T: np.ndarray, position_T: np.ndarray, vocab_size: int) -> np.ndarray:
    """fp32 [T, V]: -log(-log(1 - u)), u in (0, 1) hashed from (seed, position, token)."""
    bits_TV = _murmur3(seed_T, position_T, np.arange(vocab_size, dtype=np.uint32))
    high, low = (bits_TV >> _U32(16)).astype(np.float32), (bits_TV & _U32(0xFFFF)).astype(np.float32)
    u = high * np.float32(2**-16) + (low + np.float32(0.5)) * np.float32(2**-32)
    return -np.log(-_log_one_minus(u))


def _log_one_minus(u: np.ndarray) -> np.ndarray:
    """fp32 log(1 - u): below 0.25, where 1 - u would round, its series to the 8th power."""
    polynomial = np.float32(1 / 8)
    for degree in range(7, 0, -1):
        polynomial = np.float32(1 / degree) + u * polynomial
    direct = np.log(np.maximum(np.float32(1) - u, np.float32(2**-24)))
    return np.where(u < np.float32(0.25), -u * polynomial, direct)


def _murmur3(seed_T: np.ndarray, position_T: np.ndarray, token_V: np.ndarray) -> np.ndarray:
    """uint32 [T, V]: murmur3's 32-bit hash of the four words (seed low, seed high, position, token)."""
    hashed: np.ndarray = np.zeros((len(seed_T), 1), np.uint32)
    for word in (seed_T, seed_T >> 32, position_T):
        hashed = _mix(hashed, (word & 0xFFFFFFFF).astype(np.uint32)[:, None])
    hashed = _mix(hashed, token_V[None]) ^ _U32(16)
    hashed = (hashed ^ (hashed >> _U32(16))) * _U32(0x85EBCA6B)
    hashed = (hashed ^ (hashed >> _U32(13))) * _U32(0xC2B2AE35)
    return hashed ^ (hashed >> _U32(16))


def _mix(hashed: np.ndarray, word: np.ndarray) -> np.ndarray:
    word = _rotate(word * _U32(0xCC9E2D51), 15) * _U32(0x1B873593)
    return _rotate(hashed ^ word, 13) * _U32(5) + _U32(0xE6546B64)


def _rotate(word: np.ndarray, shift: int) -> np.ndarray:
    return (word << _U32(shift)) | (word >> _U32(32 - shift))


def _as_blocks(a: Arguments) -> np.ndarray:
    """fp32 [T, K, B] of the rows a kernel runs on."""
    num_blocks = -(-a.vocab_size // a.BLOCK_SIZE)
    return split_blocks(to_fp32(a.logits_ptr)[: a.grid[0], : a.vocab_size], num_blocks, a.BLOCK_SIZE)


@stands_in_for(
    f"{_LOGPROB}._topk_log_softmax_kernel",
    "output_ptr logits_ptr logits_stride topk_ids_ptr topk_ids_stride topk vocab_size BLOCK_SIZE"
    " TOPK_BLOCK_SIZE",
)
def take_log_softmax(a: Arguments) -> None:
    """log p of each row's listed tokens; exponentials are summed block by block, as the kernel does."""
    logit_TKB = _as_blocks(a)
    greatest_T = logit_TKB.max(axis=(1, 2))
    sum_TK = np.exp(logit_TKB - greatest_T[:, None, None]).sum(axis=2)
    log_sum_T = np.log(np.add.accumulate(sum_TK, axis=1)[:, -1])
    listed = np.take_along_axis(logit_TKB.reshape(len(logit_TKB), -1), a.topk_ids_ptr[:, : a.topk], 1)
    a.output_ptr[:, : a.topk] = listed - greatest_T[:, None] - log_sum_T[:, None]


@stands_in_for(
    f"{_LOGPROB}._ranks_kernel",
    "output_ptr logits_ptr logits_stride token_ids_ptr vocab_size BLOCK_SIZE",
)
def rank_tokens(a: Arguments) -> None:
    """How many logits of a row are at least its token's; Triton's interpreter compares bf16 ones wrongly."""
    logit_TV = _as_blocks(a).reshape(a.grid[0], -1)
    own_T1 = np.take_along_axis(logit_TV, a.token_ids_ptr[: a.grid[0], None], 1)
    a.output_ptr[: a.grid[0]] = (logit_TV >= own_T1).sum(axis=1)


@stands_in_for(
    "vllm.v1.worker.gpu.structured_outputs._apply_grammar_bitmask_kernel",
    "logits_ptr logits_stride logits_indices_ptr cu_num_logits_ptr bitmask_ptr bitmask_stride vocab_size"
    " MASK_STRIDE BLOCK_SIZE",
)
def forbid_tokens(a: Arguments) -> None:
    """Logits of tokens that a grammar does not allow become -inf, in place.

    A mask, int32 [masks, V / 32], belongs to a request and one of its rows; the kernel itself is an error in
    the interpreter (3.9).
    """
    num_masks = a.grid[0]
    request_M, row_M = np.divmod(a.logits_indices_ptr[:num_masks], a.MASK_STRIDE)
    first_M = a.cu_num_logits_ptr[request_M]
    is_there_M = row_M < a.cu_num_logits_ptr[request_M + 1] - first_M
    bytes_MX = np.ascontiguousarray(a.bitmask_ptr[:num_masks][is_there_M]).view(np.uint8)
    allowed_MV = np.unpackbits(bytes_MX, axis=1, bitorder="little")[:, : a.vocab_size].astype(bool)
    logits_TV = torch.as_tensor(a.logits_ptr)
    for row, allowed_V in zip((first_M + row_M)[is_there_M], allowed_MV, strict=True):
        logits_TV[row, : a.vocab_size].masked_fill_(torch.from_numpy(~allowed_V), -torch.inf)


STAND_INS = [scale_by_temperature, draw_tokens, take_log_softmax, rank_tokens, forbid_tokens]
