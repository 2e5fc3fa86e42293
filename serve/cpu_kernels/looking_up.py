"""vLLM's drafts from a request's own text in NumPy: one kernel crawls, one is an interpreter's error.

There a mask that is spread over a row is no boolean any more (Triton 3.9).  A match of n tokens at p is the
integer n * (L + 1) + p + 1, so that the longest is the greatest, and of equals the last.
Shapes: B=requests  K=drafts  N=blocks of a text  P=places of a text
"""

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from serve.cpu_kernels.launch import Arguments, stands_in_for

_NGRAM = "vllm.v1.worker.gpu.spec_decode.ngram.speculator"


@stands_in_for(
    f"{_NGRAM}._ngram_scan_kernel",
    "token_ids_ptr token_ids_stride idx_mapping_ptr total_len_ptr num_sampled_ptr scratch_ptr scratch_stride"
    " L MIN_N MAX_N MAX_N_PO2 BLOCK_L",
)
def find_matches(a: Arguments) -> None:
    """The best in each block of places; 0 where there is none."""
    count, num_blocks = a.grid
    for row, slot in enumerate(a.idx_mapping_ptr[:count]):
        match_P = np.zeros(num_blocks * a.BLOCK_L, np.int64)
        if a.num_sampled_ptr[row] > 0:
            _match(a.token_ids_ptr[slot, : a.total_len_ptr[slot]], a, match_P)
        a.scratch_ptr[row, :num_blocks] = match_P.reshape(num_blocks, a.BLOCK_L).max(axis=1)


def _match(text_P: np.ndarray, a: Arguments, match_P: np.ndarray) -> None:
    """With the text's last tokens, at every place before them."""
    for length in range(a.MIN_N, min(a.MAX_N, len(text_P) - 1) + 1):
        is_alike = (sliding_window_view(text_P[:-1], length) == text_P[-length:]).all(axis=1)
        place = np.flatnonzero(is_alike)
        match_P[place] = length * (a.L + 1) + place + 1


@stands_in_for(
    f"{_NGRAM}._ngram_finalize_kernel",
    "token_ids_ptr token_ids_stride idx_mapping_ptr total_len_ptr num_sampled_ptr last_sampled_ptr"
    " scratch_ptr scratch_stride drafts_ptr L N_BLOCKS K K_PO2 N_BLOCKS_PO2",
)
def copy_continuations(a: Arguments) -> None:
    """What followed the best match; where there is none, or the text ends, the last token."""
    (count,) = a.grid
    slot_B = a.idx_mapping_ptr[:count]
    best_B = a.scratch_ptr[:count, : a.N_BLOCKS].max(axis=1)
    length_B, place_B = np.divmod(best_B - 1, a.L + 1)
    from_BK = (place_B + length_B)[:, None] + np.arange(a.K)
    is_found_B = (best_B > 0) & (a.num_sampled_ptr[:count] > 0)
    is_text_BK = is_found_B[:, None] & (from_BK < a.total_len_ptr[slot_B][:, None])
    texts_BK = a.token_ids_ptr[slot_B[:, None], np.where(is_text_BK, from_BK, 0)]
    a.drafts_ptr[:count] = np.where(is_text_BK, texts_BK, a.last_sampled_ptr[slot_B][:, None])


STAND_INS = [find_matches, copy_continuations]
