"""Stands at the seams of a worker: plants what a round asks for, and writes down what passes."""

# B=requests of a step  N=nodes of a tree  L=slots of a block  V=vocabulary  D=head dim

import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from tree_oracle import as_tensors, hide_text, lift
from tree_rounds import Round, States, Tensors, Told, Verified


class Watch:
    """Stands at the seams of a worker: plants what the round asks for, and writes down what passes."""

    def __init__(self, runner: Any, given: Round, told: Told) -> None:
        self._runner, self._given, self._told = runner, given, told
        self._speculator = runner.speculator
        self._requests = {tuple(prompt): number for number, prompt in enumerate(given.prompts)}
        self._rng = random.Random(0)
        self._batch: Any = None
        self._planted: dict[int, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))

    @contextmanager
    def attached(self) -> Iterator[None]:
        with ExitStack() as stack:
            for owner, name, watch in self._seams():
                stack.enter_context(patch.object(owner, name, watch(getattr(owner, name))))
            yield

    def _seams(self) -> Iterator[tuple[Any, str, Callable]]:
        yield self._runner, "finish_requests", self._finishing
        yield self._runner, "postprocess_sampled", self._emitting
        if self._speculator is None:
            return
        yield self._speculator, "propose", self._drafting
        if self._given.drafts == "lifted":
            yield self._speculator, "compute_draft_logits", self._lifting
        if not hasattr(self._speculator, "runtime"):  # a stock chain
            return
        yield self._speculator.runtime, "admit", self._admitting
        yield self._speculator.runtime, "begin", self._beginning
        yield self._speculator.runtime, "accept", self._accepting
        if self._given.keeps_states != "no":
            yield self._runner.model_state, "preprocess_state", self._keeping

    # What passes

    def _finishing(self, finish: Callable) -> Callable:
        def finish_requests(scheduled: Any) -> None:
            self._told.num_preempted += len(scheduled.preempted_req_ids or ())
            finish(scheduled)

        return finish_requests

    def _emitting(self, postprocess: Callable) -> Callable:
        def postprocess_sampled(slots_B: Any, tokens: Any, num_sampled_B: Any, *args: Any) -> None:
            for slot, count in zip(slots_B.tolist(), num_sampled_B.tolist(), strict=True):
                if count:
                    self._told.emitted[self._request_in(slot)].append(count)
            postprocess(slots_B, tokens, num_sampled_B, *args)

        return postprocess_sampled

    def _drafting(self, propose: Callable) -> Callable:
        def proposing(batch: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
            tokens = propose(batch, *args, **kwargs)
            if hasattr(self._speculator, "runtime"):
                tokens = self._plant(batch.idx_mapping, tokens)
            num_sampled_B = args[4]
            rows = zip(batch.idx_mapping.tolist(), num_sampled_B.tolist(), tokens.tolist(), strict=True)
            for slot, count, drafts in rows:
                if count:
                    self._told.drafted[self._request_in(slot)].append(drafts)
            return tokens

        return proposing

    def _beginning(self, begin: Callable) -> Callable:
        def beginning(batch: Any) -> None:
            self._batch = batch
            drafts = batch.num_draft_tokens_per_req
            if drafts is not None and drafts.any():
                scheduled, offered = int(batch.num_scheduled_tokens.sum()), int(drafts.sum())
                self._told.chosen.append((scheduled - offered, offered, int(batch.num_draft_tokens)))
                self._told.num_mixed_steps += bool((batch.num_scheduled_tokens - drafts > 1).any())
            begin(batch)

        return beginning

    def _accepting(self, accept: Callable) -> Callable:
        def accepting(walk: Any) -> None:
            counts = walk.num_accepted_B.tolist()
            drafts = (self._batch.cu_num_logits.diff() - 1).tolist()
            for row, slot in enumerate(self._batch.idx_mapping.tolist()):
                num_drafts = drafts[row]
                if num_drafts:
                    path = walk.path_BL[row, : counts[row]].tolist()
                    length = len(self._so_far(slot))
                    is_placeholder = bool(self._batch.is_prefilling_np[row])
                    of_tree = (*self._planted[slot], num_drafts, path, is_placeholder)
                    self._told.verified.append(Verified(self._request_in(slot), length, *of_tree))
            accept(walk)

        return accepting

    def _keeping(self, preprocess: Callable) -> Callable:
        def preprocess_state(batch: Any, block_tables: Any, config: Any, num_computed: Any) -> None:
            for row, slot in enumerate(batch.idx_mapping.tolist()):
                length, prompt = int(num_computed[slot]), int(self._runner.req_states.prompt_len.np[slot])
                if length == prompt or (length > prompt and self._given.keeps_states == "of the end"):
                    blocks = [table[row].tolist() for table in block_tables]
                    states = read_states(self._runner, blocks, config.kv_cache_groups, length)
                    drafter = {name: states.pop(name) for name in self._speculator.draft_attn_layer_names}
                    token_ids = self._so_far(slot)[:length]
                    self._told.states[self._request_in(slot)] = States(token_ids, states, drafter)
            preprocess(batch, block_tables, config, num_computed)

        return preprocess_state

    # What is put in

    def _admitting(self, admit: Callable) -> Callable:
        def admitting(slot: int, *, chain_only: bool) -> None:
            admit(slot, chain_only=chain_only or self._given.is_chain_only)

        return admitting

    def _plant(self, slots_B: torch.Tensor, tokens_BN: torch.Tensor) -> torch.Tensor:
        """Looks at what was planted, by a CUDA graph too; the oracle's trees take its place."""
        runtime = self._speculator.runtime
        slots = slots_B.tolist()
        if self._given.drafts == "oracle":
            hidden = [
                hide_text(self._rng, self._rest_of(slot), runtime.budget, runtime.num_slots) for slot in slots
            ]
            tokens_BN = runtime.plant(slots_B, *as_tensors(hidden, slots_B.device))
        read = runtime.trees_at(slots_B, torch.full_like(slots_B, runtime.budget, dtype=torch.int64))
        rows = zip(
            slots, read.num_nodes_B.tolist(), read.parents_BN.tolist(), tokens_BN.tolist(), strict=True
        )
        for slot, count, parents, tokens in rows:
            self._planted[slot] = (parents[:count], tokens[:count])
        return tokens_BN

    def _lifting(self, compute: Callable) -> Callable:
        def compute_draft_logits(*args: Any) -> torch.Tensor:
            logits_BLV = compute(*args).clone().unflatten(0, (-1, self._speculator.num_speculative_steps))
            slots_BL = self._speculator.sample_idx_mapping[: logits_BLV[..., 0].numel()].view(
                logits_BLV.shape[:2]
            )
            for logits_LV, slot in zip(logits_BLV, slots_BL[:, 0].tolist(), strict=True):
                rng = random.Random(f"{self._request_in(slot)} {len(self._so_far(slot))}")
                for logits_V, token in zip(logits_LV, self._rest_of(slot), strict=False):
                    lift(logits_V, token, rng.choice([0, 0, 0, 0, 1, 2, None]))
            return logits_BLV.flatten(0, 1)

        return compute_draft_logits

    # Who is where

    def _request_in(self, slot: int) -> int:
        length = int(self._runner.req_states.prompt_len.np[slot])
        return self._requests[tuple(self._so_far(slot)[:length])]

    def _so_far(self, slot: int) -> list[int]:
        states = self._runner.req_states
        return states.all_token_ids.gpu[slot, : int(states.total_len.gpu[slot])].tolist()

    def _rest_of(self, slot: int) -> list[int]:
        """What the target would go on with; nothing once it has gone another way."""
        so_far, text = self._so_far(slot), self._given.texts[self._request_in(slot)]
        return text[len(so_far) :] if text[: len(so_far)] == so_far else []


def read_states(runner: Any, blocks: list[list[int]], groups: Any, length: int) -> Tensors:
    """What each layer's cache holds of one request, whose blocks are given for each group.

    Keys and values [length, heads, 2D], of sliding layers those that the next token sees; of recurrent layers
    the flattened states.
    """
    layers = runner.vllm_config.compilation_config.static_forward_context
    states = {}
    for group, numbers in zip(groups, blocks, strict=True):
        for name in group.layer_names:
            layer = layers[name]
            if isinstance(layer.kv_cache, tuple | list):
                states[name] = torch.cat([part[numbers[0]].float().flatten() for part in layer.kv_cache])
                continue
            size = layer.kv_cache.shape[2]
            held = layer.kv_cache[numbers[: -(-length // size)]].transpose(1, 2).flatten(0, 1)[:length]
            window = visible_before(layer.impl.sliding_window)
            states[name] = (held if window is None else held[-window:]).clone()
    return states


def visible_before(window: int | tuple[int, int]) -> int | None:
    """How many tokens the next one sees; a CPU's layers count it too, FlashAttention's do not."""
    tokens = window[0] if isinstance(window, tuple) else window - 1
    return tokens if tokens >= 0 else None
