"""vLLM's batch-preparing kernels in NumPy: token ids, positions, block tables, the state after a step.

A request has a slot in the persistent state and a row in this step's batch; idx_mapping gives a row's slot.
Shapes: R=requests of the batch  T=tokens of the batch  L=rows of logits
"""

import ctypes

import numpy as np

from serve.cpu_kernels.launch import Arguments, stands_in_for, view_int32

_BLOCK_TABLE = "vllm.v1.worker.gpu.block_table"
_INPUT_BATCH = "vllm.v1.worker.gpu.input_batch"


def number_rows(starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(row of each token, its number in that row) for ascending starts and the end of the last row."""
    lengths = np.diff(starts)
    row_T: np.ndarray = np.repeat(np.arange(len(lengths)), lengths)
    return row_T, np.arange(len(row_T)) - (starts[:-1] - starts[0])[row_T]


@stands_in_for(
    f"{_BLOCK_TABLE}._compute_slot_mappings_kernel",
    "max_num_tokens idx_mapping query_start_loc pos block_table_ptrs block_table_strides block_sizes"
    " slot_mapping_enabled dcp_sharded slot_mappings_ptr slot_mappings_stride cp_rank CP_SIZE"
    " CP_INTERLEAVE PAD_ID TRITON_BLOCK_SIZE",
)
def map_slots(a: Arguments) -> bool | None:
    """Where each token's keys and values go in each group's cache; PAD_ID after the last token."""
    if a.CP_SIZE != 1 or (a.idx_mapping < 0).any():
        return False
    row_T, _ = number_rows(a.query_start_loc[: len(a.idx_mapping) + 1])
    slot_T, position_T = a.idx_mapping[row_T].astype(np.int64), a.pos[: len(row_T)]
    a.slot_mappings_ptr[:, : a.max_num_tokens] = a.PAD_ID
    for group in np.flatnonzero(a.slot_mapping_enabled[: a.grid[0]]):
        stride, size = a.block_table_strides[group], a.block_sizes[group]
        table = view_int32(a.block_table_ptrs[group], (slot_T.max() + 1) * stride)
        block_T = table[slot_T * stride + position_T // size].astype(np.int64)
        a.slot_mappings_ptr[group, : len(row_T)] = block_T * size + position_T % size
    return None


@stands_in_for(
    f"{_BLOCK_TABLE}._gather_block_tables_kernel",
    "batch_idx_to_req_idx src_block_table_ptrs dst_block_table_ptrs block_table_strides num_blocks_ptr"
    " num_blocks_stride num_reqs BLOCK_SIZE",
)
def gather_block_tables(a: Arguments) -> None:
    """Copies each request's block ids from its slot to its row; rows of padding become zero."""
    num_groups, num_rows = a.grid
    slot_R = a.batch_idx_to_req_idx[: a.num_reqs]
    for group in range(num_groups):
        stride = int(a.block_table_strides[group])
        source = view_int32(a.src_block_table_ptrs[group], (slot_R.max() + 1) * stride).reshape(-1, stride)
        target = view_int32(a.dst_block_table_ptrs[group], num_rows * stride).reshape(-1, stride)
        is_held = np.arange(stride) < a.num_blocks_ptr[group, slot_R][:, None]
        np.copyto(target[: a.num_reqs], source[slot_R], where=is_held)
        target[a.num_reqs :] = 0


@stands_in_for(
    "vllm.v1.worker.utils._zero_kv_blocks_kernel",
    "seg_addrs_ptr seg_block_strides_ptr seg_page_sizes_ptr block_ids_ptr BLOCK_SIZE",
)
def zero_blocks(a: Arguments) -> None:
    """Zeroes the pages (in int32 words) of the blocks, in every segment of the KV cache."""
    for address, stride, page in zip(
        a.seg_addrs_ptr.tolist(), a.seg_block_strides_ptr.tolist(), a.seg_page_sizes_ptr.tolist(), strict=True
    ):
        for block in a.block_ids_ptr.tolist():
            ctypes.memset(address + block * stride * 4, 0, page * 4)


@stands_in_for(
    "vllm.v1.worker.gpu.buffer_utils._apply_write_kernel",
    "output_ptr output_stride write_indices_ptr write_starts_ptr write_contents_ptr write_cu_lens_ptr"
    " write_group_ids_ptr BLOCK_SIZE MULTI_GROUP",
)
def write_staged(a: Arguments) -> None:
    """Write i goes into row index[i] from column start[i] on, of its group's table if there are groups."""
    begin = 0
    for number in range(a.grid[0]):
        end = a.write_cu_lens_ptr[number]
        row, start = int(a.write_indices_ptr[number]), int(a.write_starts_ptr[number])
        if a.MULTI_GROUP:
            group = a.write_group_ids_ptr[number]
            offset = (row * int(a.output_stride[group]) + start) * 4
            target = view_int32(int(a.output_ptr[group]) + offset, end - begin)
        else:
            first = row * a.output_stride + start
            target = a.output_ptr.reshape(-1)[first : first + end - begin]
        target[:] = a.write_contents_ptr[begin:end]
        begin = end


@stands_in_for(
    f"{_INPUT_BATCH}._prepare_prefill_inputs_kernel",
    "input_ids_ptr next_prefill_tokens_ptr next_prefill_tokens_stride num_lookahead idx_mapping_ptr"
    " query_start_loc_ptr all_token_ids_ptr all_token_ids_stride prefill_lens_ptr num_computed_tokens_ptr"
    " BLOCK_SIZE LOOKAHEAD_BLOCK",
)
def take_prompt_tokens(a: Arguments) -> None:
    """input_ids of requests in prefill: their next prompt tokens; the ones after them go into look-ahead."""
    computed_R, prefill_R = (x[a.idx_mapping_ptr] for x in (a.num_computed_tokens_ptr, a.prefill_lens_ptr))
    for row in np.flatnonzero(computed_R < prefill_R):
        begin, end = a.query_start_loc_ptr[row : row + 2]
        tokens = a.all_token_ids_ptr[a.idx_mapping_ptr[row]]
        upto = computed_R[row] + end - begin
        a.input_ids_ptr[begin:end] = tokens[computed_R[row] : upto]
        ahead = tokens[upto : min(upto + a.num_lookahead, prefill_R[row])]
        look_ahead = np.pad(ahead, (0, a.num_lookahead - len(ahead)))
        a.next_prefill_tokens_ptr[: a.num_lookahead, a.idx_mapping_ptr[row]] = look_ahead


@stands_in_for(
    f"{_INPUT_BATCH}._prepare_pos_seq_lens_kernel",
    "pos_ptr seq_lens_ptr idx_mapping_ptr query_start_loc_ptr num_computed_tokens_ptr max_num_reqs"
    " BLOCK_SIZE",
)
def place_queries(a: Arguments) -> None:
    """Positions [T] and sequence lengths [R] of this step; lengths after the last request become zero."""
    num_reqs = a.grid[0] - 1
    starts = a.query_start_loc_ptr[: num_reqs + 1]
    computed_R = a.num_computed_tokens_ptr[a.idx_mapping_ptr[:num_reqs]]
    row_T, offset_T = number_rows(starts)
    a.pos_ptr[starts[0] : starts[-1]] = computed_R[row_T] + offset_T
    a.seq_lens_ptr[:num_reqs] = computed_R + np.diff(starts)
    a.seq_lens_ptr[num_reqs : a.max_num_reqs] = 0


@stands_in_for(
    f"{_INPUT_BATCH}._combine_sampled_and_draft_tokens_kernel",
    "input_ids_ptr idx_mapping_ptr last_sampled_tokens_ptr query_start_loc_ptr seq_lens_ptr"
    " prefill_len_ptr draft_tokens_ptr draft_tokens_stride cu_num_logits_ptr logits_indices_ptr BLOCK_SIZE"
    " NUM_NEW_SAMPLED_TOKENS",
)
def combine_tokens(a: Arguments) -> None:
    """input_ids of decoding requests: the last token, its drafts; and which rows of the batch need logits."""
    num_reqs, slot_R = a.grid[0], a.idx_mapping_ptr[: a.grid[0]]
    starts = a.cu_num_logits_ptr[: num_reqs + 1]
    logits_R, end_R = np.diff(starts), a.query_start_loc_ptr[1 : num_reqs + 1].astype(np.int64)
    row_L, offset_L = number_rows(starts)
    a.logits_indices_ptr[starts[0] : starts[-1]] = (end_R - logits_R)[row_L] + offset_L
    seq_len_R, prefill_R = a.seq_lens_ptr[:num_reqs], a.prefill_len_ptr[slot_R]
    if a.NUM_NEW_SAMPLED_TOKENS:
        is_new = (seq_len_R > prefill_R) & (seq_len_R - logits_R >= prefill_R)
        a.input_ids_ptr[(end_R - logits_R)[is_new]] = a.last_sampled_tokens_ptr[slot_R[is_new], 0]
    drafts_R = np.where(seq_len_R > prefill_R, logits_R - a.NUM_NEW_SAMPLED_TOKENS, 0)
    for row in np.flatnonzero(drafts_R > 0):
        drafts = a.draft_tokens_ptr[slot_R[row], : drafts_R[row]]
        a.input_ids_ptr[end_R[row] - len(drafts) : end_R[row]] = drafts


@stands_in_for(
    f"{_INPUT_BATCH}._get_num_sampled_and_rejected_kernel",
    "num_sampled_ptr num_rejected_ptr seq_lens_ptr cu_num_logits_ptr idx_mapping_ptr prefill_len_ptr",
)
def count_sampled(a: Arguments) -> None:
    """num_sampled and num_rejected [R]: both zero while a prompt is only partly computed."""
    rows = slice(0, a.grid[0])
    is_partial = a.seq_lens_ptr[rows] < a.prefill_len_ptr[a.idx_mapping_ptr[rows]]
    a.num_sampled_ptr[rows][is_partial] = 0
    logits_R = np.diff(a.cu_num_logits_ptr[: a.grid[0] + 1])
    a.num_rejected_ptr[rows] = np.where(is_partial, 0, logits_R - a.num_sampled_ptr[rows])


@stands_in_for(
    f"{_INPUT_BATCH}._post_update_kernel",
    "idx_mapping_ptr num_computed_tokens_ptr last_sampled_tokens_ptr output_bin_counts_ptr"
    " output_bin_counts_stride sampled_tokens_ptr sampled_tokens_stride num_sampled_ptr num_rejected_ptr"
    " query_start_loc_ptr all_token_ids_ptr all_token_ids_stride total_len_ptr",
)
def commit_tokens(a: Arguments) -> None:
    """Appends the sampled tokens to each request; its computed length grows by what was not rejected."""
    query_R = np.zeros(a.grid, np.int64) if a.query_start_loc_ptr is None else np.diff(a.query_start_loc_ptr)
    for row in np.flatnonzero(a.idx_mapping_ptr >= 0):
        slot, count = a.idx_mapping_ptr[row], a.num_sampled_ptr[row]
        new, begin = a.sampled_tokens_ptr[row, :count], a.total_len_ptr[slot]
        a.all_token_ids_ptr[slot, begin : begin + count] = new
        a.total_len_ptr[slot] += count
        if count:
            a.last_sampled_tokens_ptr[slot, 0] = new[-1]
        if a.output_bin_counts_ptr is not None:
            np.add.at(a.output_bin_counts_ptr[slot], new, 1)
        a.num_computed_tokens_ptr[slot] += query_R[row] - a.num_rejected_ptr[row]


@stands_in_for(
    f"{_INPUT_BATCH}._expand_idx_mapping_kernel",
    "idx_mapping_ptr expanded_idx_mapping_ptr expanded_local_pos_ptr cu_num_logits_ptr BLOCK_SIZE",
)
def expand_slots(a: Arguments) -> None:
    """The slot [L] of each row of logits, and the row's number inside its request."""
    row_L, offset_L = number_rows(a.cu_num_logits_ptr[: a.grid[0] + 1])
    a.expanded_idx_mapping_ptr[: len(row_L)] = a.idx_mapping_ptr[row_L]
    a.expanded_local_pos_ptr[: len(row_L)] = offset_L


@stands_in_for(
    "vllm.v1.worker.gpu.model_states.mamba_hybrid._scatter_num_accepted_kernel",
    "idx_mapping_ptr num_sampled_ptr num_accepted_ptr",
)
def scatter_accepted(a: Arguments) -> None:
    """num_accepted[slot] = max(num_sampled, 1); rows of slot -1 are left out."""
    slot_R = a.idx_mapping_ptr[: a.grid[0]]
    is_real = slot_R >= 0
    a.num_accepted_ptr[slot_R[is_real]] = np.maximum(a.num_sampled_ptr[: a.grid[0]][is_real], 1)


STAND_INS = [
    *(map_slots, gather_block_tables, zero_blocks, write_staged),
    *(take_prompt_tokens, place_queries, combine_tokens, expand_slots),
    *(count_sampled, commit_tokens, scatter_accepted),
]
