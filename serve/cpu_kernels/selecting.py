"""vLLM's walk over a DFlash2 drafter's candidates in NumPy: its kernel is an error in Triton's interpreter.

There a mask that is spread over a row is no boolean any more (Triton 3.9).  Walks that draw at random, which
no recipe asks for, are left to the kernel.  Shapes: B=requests  L=slots  C=candidates of a slot
"""

import numpy as np

from serve.cpu_kernels.launch import Arguments, stands_in_for


@stands_in_for(
    "vllm.v1.worker.gpu.spec_decode.dflash2.speculator._selector_walk_kernel",
    "scores_ptr candidate_ptr sample_pos_ptr req_state_ptr temperature_ptr seeds_ptr tokens_ptr"
    " realized_scores_ptr num_steps top_k BLOCK_K SAMPLE_PROBABILISTIC USE_FP64",
)
def walk_selected(a: Arguments) -> bool | None:
    """Each slot's best candidate after that of the slot before, the first of equals; padding stays."""
    if a.SAMPLE_PROBABILISTIC or a.USE_FP64:
        return False
    row_B = np.flatnonzero(a.req_state_ptr[: a.grid[0] * a.num_steps : a.num_steps] >= 0)
    scores_BLCC = a.scores_ptr.reshape(-1, a.num_steps, a.top_k, a.top_k)
    tokens_BLC = a.candidate_ptr.reshape(-1, a.num_steps, a.top_k)
    out_BL = a.tokens_ptr.reshape(-1, a.num_steps)
    at_B = np.zeros_like(row_B)
    for slot in range(a.num_steps):
        scores_BC = scores_BLCC[row_B, slot, at_B]
        a.realized_scores_ptr[row_B, slot] = scores_BC
        at_B = scores_BC.argmax(axis=1)
        out_BL[row_B, slot] = tokens_BLC[row_B, slot, at_B]
    return None


STAND_INS = [walk_selected]
