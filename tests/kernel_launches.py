"""Launches of the Triton kernels that have NumPy stand-ins, with odd sizes, drawn from a seed.

A launch is the kernel's grid, its arguments by name, and the tensors among these that it writes.
"""

from dataclasses import dataclass
from typing import Any

import torch

SLOTS = 11  # of the persistent state
MAX_LEN = 40


@dataclass
class Launch:
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    written: list[torch.Tensor]


class Draws:
    """Random tensors of one seed."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=self.generator).to(dtype)

    def logits(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return (3 * torch.randn(shape, generator=self.generator)).to(dtype)

    def slots(self, count: int) -> torch.Tensor:
        return torch.randperm(SLOTS, generator=self.generator)[:count]

    def temperatures(self) -> torch.Tensor:
        return torch.tensor([0.0, 0.7, 1.0, 1.3])[self.integers(0, 4, SLOTS, dtype=torch.int64)]

    def starts(self, count: int, longest: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        lengths = self.integers(1, longest + 1, count, dtype=torch.int64)
        return torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).to(dtype)


def make_scale(draws: Draws) -> Launch:
    rows, vocab = 5, 2051
    logits = draws.logits(rows, vocab)
    arguments = {
        "logits_ptr": logits,
        "logits_stride": vocab,
        "expanded_idx_mapping_ptr": draws.slots(rows),
        "temperature_ptr": draws.temperatures(),
        "vocab_size": vocab,
        "BLOCK_SIZE": 8192,
    }
    return Launch((rows, 1), arguments, [logits])


def make_draw(draws: Draws, dtype: torch.dtype = torch.float32, is_drafting: bool = False) -> Launch:
    rows, vocab = 5, 2051
    tokens = torch.empty(rows, 3, dtype=torch.int64)
    scores = torch.empty(rows, 3)
    arguments = {
        "local_argmax_ptr": tokens,
        "local_argmax_stride": 3,
        "local_max_ptr": scores,
        "local_max_stride": 3,
        "logits_cache_ptr": None,
        "logits_cache_stride_0": 0,
        "logits_cache_stride_1": 0,
        "logits_cache_col_ptr": None,
        "logits_cache_source_ptr": None,
        "logits_cache_source_stride": 0,
        "logits_ptr": draws.logits(rows, vocab, dtype=dtype),
        "logits_stride": vocab,
        "expanded_idx_mapping_ptr": draws.slots(rows),
        "seeds_ptr": draws.integers(-(2**62), 2**62, SLOTS, dtype=torch.int64),
        "pos_ptr": draws.integers(0, 300_000, rows, dtype=torch.int64),
        "temp_ptr": draws.temperatures(),
        "vocab_size": vocab,
        "BLOCK_SIZE": 1024,
        "IS_DRAFTING": is_drafting,
        "APPLY_TEMPERATURE": is_drafting,
        "USE_FP64": False,
        "PER_TOKEN_COL": False,
    }
    return Launch((rows, 3), arguments, [tokens, scores])


def make_draft_draw(draws: Draws) -> Launch:
    return make_draw(draws, torch.bfloat16, is_drafting=True)


def pointers(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.uint64)


def make_map_slots(draws: Draws) -> Launch:
    requests, groups = 4, 3
    tables = [draws.integers(1, 90, SLOTS, width) for width in (7, 5, 7)]
    starts = draws.starts(requests, 9)
    mappings = draws.integers(0, 50, groups, 64, dtype=torch.int64)
    arguments = {
        "max_num_tokens": 64,
        "idx_mapping": draws.slots(requests),
        "query_start_loc": starts,
        "pos": draws.integers(0, 35, 64, dtype=torch.int64),
        "block_table_ptrs": pointers(tables),
        "block_table_strides": torch.tensor([7, 5, 7]),
        "block_sizes": torch.tensor([5, 8, 5], dtype=torch.int32),
        "slot_mapping_enabled": torch.tensor([True, True, False]),
        "dcp_sharded": torch.zeros(groups, dtype=torch.bool),
        "slot_mappings_ptr": mappings,
        "slot_mappings_stride": 64,
        "cp_rank": 0,
        "CP_SIZE": 1,
        "CP_INTERLEAVE": 1,
        "PAD_ID": -1,
        "TRITON_BLOCK_SIZE": 1024,
    }
    return Launch((groups, requests + 1), arguments, [mappings, *tables])


def make_gather(draws: Draws) -> Launch:
    requests, widths = 4, (7, 5)
    sources = [draws.integers(1, 90, SLOTS, width) for width in widths]
    targets = [draws.integers(1, 90, SLOTS, width) for width in widths]
    held = torch.stack([draws.integers(0, width + 1, SLOTS) for width in widths])
    arguments = {
        "batch_idx_to_req_idx": draws.slots(requests),
        "src_block_table_ptrs": pointers(sources),
        "dst_block_table_ptrs": pointers(targets),
        "block_table_strides": torch.tensor(widths),
        "num_blocks_ptr": held,
        "num_blocks_stride": held.stride(0),
        "num_reqs": requests,
        "BLOCK_SIZE": 1024,
    }
    return Launch((2, requests + 2), arguments, [*sources, *targets])


def make_zero(draws: Draws) -> Launch:
    caches = [draws.integers(1, 90, 6 * words) for words in (30, 40)]
    arguments = {
        "seg_addrs_ptr": pointers(caches),
        "seg_block_strides_ptr": torch.tensor([30, 40]),
        "seg_page_sizes_ptr": torch.tensor([25, 40]),
        "block_ids_ptr": torch.tensor([1, 4]),
        "BLOCK_SIZE": 16,
    }
    return Launch((2, 2, 3), arguments, caches)


def make_write(draws: Draws, has_groups: bool = True) -> Launch:
    tables = [draws.integers(1, 90, SLOTS, width) for width in (7, 9)]
    arguments = {
        "output_ptr": pointers(tables) if has_groups else tables[0],
        "output_stride": torch.tensor([7, 9]) if has_groups else 7,
        "write_indices_ptr": torch.tensor([3, 0, 5], dtype=torch.int32),
        "write_starts_ptr": torch.tensor([0, 2, 4], dtype=torch.int32),
        "write_contents_ptr": draws.integers(100, 200, 9),
        "write_cu_lens_ptr": torch.tensor([4, 6, 9], dtype=torch.int32),
        "write_group_ids_ptr": torch.tensor([0, 1, 1], dtype=torch.int32) if has_groups else None,
        "BLOCK_SIZE": 1024,
        "MULTI_GROUP": has_groups,
    }
    return Launch((3,), arguments, tables)


def make_plain_write(draws: Draws) -> Launch:
    return make_write(draws, has_groups=False)


def make_prompt_tokens(draws: Draws) -> Launch:
    requests = 5
    starts = draws.starts(requests, 6)
    input_ids, ahead = draws.integers(0, 9, 40), draws.integers(0, 9, 2, SLOTS)
    tokens = draws.integers(100, 200, SLOTS, MAX_LEN)
    arguments = {
        "input_ids_ptr": input_ids,
        "next_prefill_tokens_ptr": ahead,
        "next_prefill_tokens_stride": SLOTS,
        "num_lookahead": 2,
        "idx_mapping_ptr": draws.slots(requests),
        "query_start_loc_ptr": starts,
        "all_token_ids_ptr": tokens,
        "all_token_ids_stride": MAX_LEN,
        "prefill_lens_ptr": draws.integers(6, 20, SLOTS),
        "num_computed_tokens_ptr": draws.integers(0, 12, SLOTS),
        "BLOCK_SIZE": 1024,
        "LOOKAHEAD_BLOCK": 2,
    }
    return Launch((requests,), arguments, [input_ids, ahead])


def make_places(draws: Draws) -> Launch:
    requests = 5
    positions, lengths = draws.integers(0, 9, 40, dtype=torch.int64), draws.integers(0, 9, SLOTS)
    arguments = {
        "pos_ptr": positions,
        "seq_lens_ptr": lengths,
        "idx_mapping_ptr": draws.slots(requests),
        "query_start_loc_ptr": draws.starts(requests, 6),
        "num_computed_tokens_ptr": draws.integers(0, 12, SLOTS),
        "max_num_reqs": SLOTS,
        "BLOCK_SIZE": 1024,
    }
    return Launch((requests + 1,), arguments, [positions, lengths])


def make_combine(draws: Draws) -> Launch:
    requests, drafts = 5, 3
    logits = draws.starts(requests, drafts + 1)
    queries = logits + 2 * torch.arange(requests + 1, dtype=torch.int32)  # prompts' rows need no logits
    input_ids, indices = draws.integers(0, 9, 40), torch.zeros(int(logits[-1]), dtype=torch.int64)
    arguments = {
        "input_ids_ptr": input_ids,
        "idx_mapping_ptr": draws.slots(requests),
        "last_sampled_tokens_ptr": draws.integers(300, 400, SLOTS, 1, dtype=torch.int64),
        "query_start_loc_ptr": queries,
        "seq_lens_ptr": draws.integers(8, 16, SLOTS),
        "prefill_len_ptr": draws.integers(6, 14, SLOTS),
        "draft_tokens_ptr": draws.integers(500, 600, SLOTS, drafts, dtype=torch.int64),
        "draft_tokens_stride": drafts,
        "cu_num_logits_ptr": logits,
        "logits_indices_ptr": indices,
        "BLOCK_SIZE": 4,
        "NUM_NEW_SAMPLED_TOKENS": 1,
    }
    return Launch((requests,), arguments, [input_ids, indices])


def make_counts(draws: Draws) -> Launch:
    requests = 5
    logits = draws.starts(requests, 4)
    sampled, rejected = draws.integers(1, 2, requests), torch.zeros(requests, dtype=torch.int32)
    arguments = {
        "num_sampled_ptr": sampled,
        "num_rejected_ptr": rejected,
        "seq_lens_ptr": draws.integers(6, 12, SLOTS),
        "cu_num_logits_ptr": logits,
        "idx_mapping_ptr": draws.slots(requests),
        "prefill_len_ptr": draws.integers(6, 12, SLOTS),
    }
    return Launch((requests,), arguments, [sampled, rejected])


def make_commit(draws: Draws) -> Launch:
    requests = 5
    slots = draws.slots(requests)
    slots[2] = -1
    computed, total = draws.integers(3, 9, SLOTS), draws.integers(9, 20, SLOTS)
    last, tokens = draws.integers(0, 9, SLOTS, 1, dtype=torch.int64), draws.integers(0, 9, SLOTS, MAX_LEN)
    counts = draws.integers(0, 3, SLOTS, 60)
    sampled = draws.integers(0, 60, requests, 4, dtype=torch.int64)
    sampled[:, 1] = sampled[:, 0]  # the same token twice in a step is counted twice
    arguments = {
        "idx_mapping_ptr": slots,
        "num_computed_tokens_ptr": computed,
        "last_sampled_tokens_ptr": last,
        "output_bin_counts_ptr": counts,
        "output_bin_counts_stride": 60,
        "sampled_tokens_ptr": sampled,
        "sampled_tokens_stride": 4,
        "num_sampled_ptr": draws.integers(0, 5, requests),
        "num_rejected_ptr": draws.integers(0, 2, requests),
        "query_start_loc_ptr": draws.starts(requests, 4),
        "all_token_ids_ptr": tokens,
        "all_token_ids_stride": MAX_LEN,
        "total_len_ptr": total,
    }
    return Launch((requests,), arguments, [computed, last, counts, tokens, total])


def make_expand(draws: Draws) -> Launch:
    requests = 5
    logits = draws.starts(requests, 4)
    slots, numbers = (torch.zeros(int(logits[-1]), dtype=dtype) for dtype in (torch.int64, torch.int32))
    arguments = {
        "idx_mapping_ptr": draws.slots(requests),
        "expanded_idx_mapping_ptr": slots,
        "expanded_local_pos_ptr": numbers,
        "cu_num_logits_ptr": logits,
        "BLOCK_SIZE": 4,
    }
    return Launch((requests,), arguments, [slots, numbers])


def make_scatter(draws: Draws) -> Launch:
    slots, accepted = draws.slots(5), draws.integers(0, 9, SLOTS)
    slots[3] = -1
    arguments = {
        "idx_mapping_ptr": slots,
        "num_sampled_ptr": draws.integers(0, 4, 5),
        "num_accepted_ptr": accepted,
    }
    return Launch((5,), arguments, [accepted])


def make_drafter(draws: Draws) -> Launch:
    requests, drafts, most_tokens = 4, 3, 64
    starts = draws.starts(requests, 6)
    rejected = torch.minimum(starts.diff() - 1, draws.integers(0, 4, requests))
    out = {
        "out_input_ids_ptr": draws.integers(0, 9, most_tokens),
        "out_query_positions_ptr": draws.integers(0, 9, most_tokens, dtype=torch.int64),
        "out_query_start_loc_ptr": draws.integers(0, 9, SLOTS + 1),
        "out_seq_lens_ptr": draws.integers(0, 9, SLOTS),
        "out_query_slot_mapping_ptr": draws.integers(0, 9, most_tokens, dtype=torch.int64),
        "out_context_positions_ptr": draws.integers(0, 9, most_tokens, dtype=torch.int64),
        "out_context_slot_mapping_ptr": draws.integers(0, 9, most_tokens, dtype=torch.int64),
        "out_sample_indices_ptr": draws.integers(0, 9, SLOTS * drafts, dtype=torch.int64),
        "out_sample_pos_ptr": draws.integers(0, 9, SLOTS * drafts, dtype=torch.int64),
        "out_sample_idx_mapping_ptr": draws.integers(0, 9, SLOTS * drafts, dtype=torch.int64),
        "out_temperature_ptr": draws.temperatures(),
        "out_seeds_ptr": draws.integers(0, 9, SLOTS, dtype=torch.int64),
    }
    arguments = out | {
        "target_positions_ptr": draws.integers(0, MAX_LEN, most_tokens, dtype=torch.int64),
        "target_query_start_loc_ptr": starts,
        "idx_mapping_ptr": draws.slots(requests),
        "last_sampled_ptr": draws.integers(300, 400, SLOTS, 1, dtype=torch.int64),
        "next_prefill_tokens_ptr": draws.integers(500, 600, 1, SLOTS),
        "num_sampled_ptr": draws.integers(0, 2, requests),
        "num_rejected_ptr": rejected,
        "temperature_ptr": draws.temperatures(),
        "seeds_ptr": draws.integers(0, 2**60, SLOTS, dtype=torch.int64),
        "block_table_ptr": draws.integers(0, 5, SLOTS, 8),
        "block_table_stride": 8,
        "parallel_drafting_token_id": 7,
        "block_size": 5,
        "num_query_per_req": drafts + 1,
        "num_speculative_steps": drafts,
        "max_num_reqs": SLOTS,
        "max_num_tokens": most_tokens,
        "max_model_len": MAX_LEN,
        "cp_rank": 0,
        "SAMPLE_FROM_ANCHOR": False,
        "PAD_SLOT_ID": -1,
        "CP_SIZE": 1,
        "CP_INTERLEAVE": 1,
        "BLOCK_SIZE": 16,
    }
    return Launch((requests, 1), arguments, list(out.values()))


def make_log_softmax(draws: Draws) -> Launch:
    rows, vocab, listed = 5, 2051, 3
    out = torch.zeros(rows, listed)
    arguments = {
        "output_ptr": out,
        "logits_ptr": draws.logits(rows, vocab, dtype=torch.bfloat16),
        "logits_stride": vocab,
        "topk_ids_ptr": draws.integers(0, vocab, rows, listed, dtype=torch.int64),
        "topk_ids_stride": listed,
        "topk": listed,
        "vocab_size": vocab,
        "BLOCK_SIZE": 1024,
        "TOPK_BLOCK_SIZE": 4,
    }
    return Launch((rows,), arguments, [out])


def make_ranks(draws: Draws) -> Launch:
    rows, vocab = 5, 2051
    out = torch.zeros(rows, dtype=torch.int64)
    arguments = {
        "output_ptr": out,
        "logits_ptr": draws.logits(rows, vocab),
        "logits_stride": vocab,
        "token_ids_ptr": draws.integers(0, vocab, rows, dtype=torch.int64),
        "vocab_size": vocab,
        "BLOCK_SIZE": 1024,
    }
    return Launch((rows,), arguments, [out])
