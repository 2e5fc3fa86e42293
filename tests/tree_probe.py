"""Runs engines with draft trees, or without, each in a process of its own, and tells tests what they did.

    python tree_probe.py FOLDER NAMES    reads `specs` there, writes what each of these engines told

An oracle hides the target's own text along a random path of a random tree, so that side branches are really
accepted; nothing else in the engine knows of it.  `Round.control` breaks one thing, for tests to notice.
"""

# B=requests of a step  N=nodes of a tree  L=slots of a block  V=vocabulary  D=head dim

import itertools
import os
import pickle
import random
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import torch

from recipes.schema import Serve, Target
from serve.engine import child_environment, engine_arguments
from serve.tree import ROOT
from serve.tree_batch import TreeBatch
from serve.tree_slots import StepTrees

Drafts = Literal["own", "lifted", "oracle"]
Control = Literal[
    "none",
    "no compaction",
    "no depth positions",
    "no tree mask",
    "no permutation of tap states",
    "no recurrent commit",
    "no chain for penalties",
]
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Round:
    """Requests that an engine is given at once."""

    prompts: Sequence[list[int]]
    max_tokens: int
    texts: Sequence[list[int]] = ()
    """Prompt and the target's own continuation, for drafts that are to be right; longer than max_tokens."""
    sampling: Sequence[dict[str, Any]] = ()
    """Of each request, beside greedy decoding; empty for all."""
    drafts: Drafts = "own"
    """The drafter's; the same with the text's tokens among the best; or an oracle's tree."""
    control: Control = "none"
    is_chain_only: bool = False
    preempted_every: int = 0
    """Steps after which all requests lose their caches; 0: never."""
    keeps_states: bool = False
    """Compares caches with a fresh prefill's."""


@dataclass(frozen=True)
class Spec:
    """One engine."""

    target: str
    ckpt: str
    budget: int | None
    rounds: dict[str, Round]
    serve: dict[str, int] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)
    """Arguments that a recipe does not have."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    has_gpu_runtime: bool = False
    """On a CPU: what a GPU runs, its kernels interpreted (gpu_runtime_on_cpu.py)."""


@dataclass(frozen=True)
class Verified:
    """One verification of one request's drafts."""

    request: int
    length: int
    """Of prompt and text before it."""
    parents: list[int]
    """Of the nodes that were planted; nothing is seen of what a CUDA graph plants."""
    tokens: list[int]
    num_drafts: int
    """So many of them were scheduled."""
    path: list[int]
    """Accepted nodes."""


@dataclass(frozen=True)
class States:
    """What the caches held of one request at the start of its last step, by layer."""

    token_ids: list[int]
    """Computed and committed."""
    target: Tensors
    drafter: Tensors


@dataclass
class Told:
    """What happened in a round."""

    texts: list[list[int]] = field(default_factory=list)
    logprobs: list[list[dict[int, float]]] = field(default_factory=list)
    verified: list[Verified] = field(default_factory=list)
    emitted: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    """How many tokens each request got in each step that gave it some."""
    drafted: dict[int, list[list[int]]] = field(default_factory=lambda: defaultdict(list))
    """What was drafted after each of those steps."""
    states: dict[int, States] = field(default_factory=dict)
    fresh_states: dict[int, States] = field(default_factory=dict)
    """After a prefill of the same tokens."""
    num_preempted: int = 0
    num_cached_tokens: int = 0
    """Of prompts, found in the prefix cache."""
    num_mixed_steps: int = 0
    """In which some rows were drafts and others a prompt's."""


def run_engines(specs: dict[str, Spec], folder: Path) -> dict[str, dict[str, Told]]:
    """Runs each in a process of its own, on a GPU all at once; what each round of each told."""
    (folder / "specs").write_bytes(pickle.dumps(specs))
    parts = [[name] for name in specs] if torch.cuda.is_available() else [list(specs)]
    with ThreadPoolExecutor() as pool:
        for done in pool.map(lambda names: _run_process(folder, names), parts):
            assert done.returncode == 0, done.stderr[-5000:]
    return {name: pickle.loads((folder / f"{name}.told").read_bytes()) for name in specs}


def _run_process(folder: Path, names: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, __file__, str(folder), *names],
        env=os.environ | {"PYTHONPATH": _search_path()},
        capture_output=True,
        text=True,
        check=False,
    )


def _search_path() -> str:
    inherited = os.environ.get("PYTHONPATH")
    return os.pathsep.join([*map(str, Path(__file__).parents[:2]), *([inherited] if inherited else [])])


def main(folder: Path, names: list[str]) -> None:
    os.environ.update(child_environment())
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the worker is looked at from inside
    import vllm  # noqa: F401, PLC0415 - once for all: it takes longer than an engine

    specs = pickle.loads((folder / "specs").read_bytes())
    for name in names:
        child = os.fork()
        if child == 0:
            (folder / f"{name}.told").write_bytes(pickle.dumps(run_engine(specs[name])))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status:
            sys.exit(f"engine {name} failed")


def run_engine(spec: Spec) -> dict[str, Told]:
    from vllm import LLM  # noqa: PLC0415 - it reads the environment

    if spec.has_gpu_runtime:
        import gpu_runtime_on_cpu  # noqa: PLC0415 - it imports vLLM

        gpu_runtime_on_cpu.install()
    settings = {"max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 256, "enforce_eager": True}
    arguments = engine_arguments(
        Target(model=spec.target, dtype=spec.dtype),
        Serve(**settings | spec.serve),
        Path(spec.ckpt),
        spec.budget,
    )
    arguments |= {"skip_tokenizer_init": True, "gpu_memory_utilization": 0.1}
    engine = LLM(**arguments | spec.engine)
    return {name: run_round(engine, each) for name, each in spec.rounds.items()}


def run_round(engine: Any, given: Round) -> Told:
    told = answer(engine, given)
    if given.keeps_states:
        prompts = [states.token_ids for _, states in sorted(told.states.items())]
        computed = [{"skip_reading_prefix_cache": True}] * len(prompts)
        again = answer(engine, Round(prompts, max_tokens=2, sampling=computed, keeps_states=True))
        told.fresh_states = {request: again.states[i] for i, request in enumerate(sorted(told.states))}
    return told


def answer(engine: Any, given: Round) -> Told:
    from vllm import SamplingParams  # noqa: PLC0415

    told = Told()
    greedy = {"temperature": 0.0, "detokenize": False, "ignore_eos": True, "max_tokens": given.max_tokens}
    (runner,) = engine.collective_rpc(lambda worker: worker.model_runner)
    scheduler = engine.llm_engine.engine_core.engine_core.scheduler
    with (
        Watch(runner, given, told).attached(),
        broken(given.control, runner),
        preempting(scheduler, given, told),
    ):
        outputs = engine.generate(
            [{"prompt_token_ids": prompt} for prompt in given.prompts],
            [SamplingParams(**greedy | each) for each in given.sampling or [{}] * len(given.prompts)],
            use_tqdm=False,
        )
    for output in outputs:
        (completion,) = output.outputs
        told.texts.append(list(completion.token_ids))
        told.num_cached_tokens += output.num_cached_tokens or 0
        if completion.logprobs is not None:
            told.logprobs.append(
                [{token: each.logprob for token, each in step.items()} for step in completion.logprobs]
            )
    return told


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
        yield self._speculator.runtime, "plant", self._planting
        yield self._speculator.runtime, "accept", self._accepting
        if self._given.keeps_states:
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
                self._told.num_mixed_steps += bool((batch.num_scheduled_tokens - drafts > 1).any())
            begin(batch)

        return beginning

    def _accepting(self, accept: Callable) -> Callable:
        def accepting(walk: Any) -> None:
            counts = walk.num_accepted_B.tolist()
            for row, slot in enumerate(self._batch.idx_mapping.tolist()):
                num_drafts = int(self._batch.num_draft_tokens_per_req[row])
                if num_drafts:
                    path = walk.path_BL[row, : counts[row]].tolist()
                    length = len(self._so_far(slot))
                    of_tree = (*self._planted[slot], num_drafts, path)
                    self._told.verified.append(Verified(self._request_in(slot), length, *of_tree))
            accept(walk)

        return accepting

    def _keeping(self, preprocess: Callable) -> Callable:
        def preprocess_state(batch: Any, block_tables: Any, config: Any, num_computed: Any) -> None:
            for row, slot in enumerate(batch.idx_mapping.tolist()):
                length = int(num_computed[slot])
                if length >= self._runner.req_states.prompt_len.np[slot]:
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

    def _planting(self, plant: Callable) -> Callable:
        runtime = self._speculator.runtime

        def planting(slots_B: Any, trees: Any, candidates_BLC: Any) -> torch.Tensor:
            slots = slots_B.tolist()
            if self._given.drafts == "oracle":
                hidden = [
                    hide_text(self._rng, self._rest_of(slot), runtime.budget, runtime.num_slots)
                    for slot in slots
                ]
                trees, candidates_BLC = as_tensors(hidden)
            tokens_BN = plant(slots_B, trees, candidates_BLC)
            read = runtime.trees_at(slots_B, torch.full_like(slots_B, runtime.budget, dtype=torch.int64))
            rows = zip(
                slots, read.num_nodes_B.tolist(), read.parents_BN.tolist(), tokens_BN.tolist(), strict=True
            )
            for slot, count, parents, tokens in rows:
                self._planted[slot] = (parents[:count], tokens[:count])
            return tokens_BN

        return planting

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


@dataclass(frozen=True)
class HiddenText:
    """A tree with a part of the text along one of its paths, and a chain that begins with another."""

    parents: list[int]
    depths: list[int]
    tokens: list[int]
    chain: list[int]


def hide_text(rng: random.Random, text: list[int], budget: int, num_slots: int) -> HiddenText:
    """Its right token may also stand under a wrong parent, where it is not to be taken."""
    parents, depths = draw_tree(rng, budget, num_slots)
    right = path_to(rng.randrange(budget), parents)[: len(text)]
    tokens: list[int] = []
    for node, parent in enumerate(parents):
        truth = text[depths[node] - 1 : depths[node]]
        taken = {tokens[other] for other in range(node) if parents[other] == parent}
        may_be_true = parent != ROOT and parent not in right and rng.random() < 0.3
        if node in right or (may_be_true and truth and truth[0] not in taken):
            tokens += truth
        else:
            tokens.append(draw_token(rng, taken | set(truth)))
    num_true = rng.randint(0, num_slots)
    wrong = [draw_token(rng, set(text[slot : slot + 1])) for slot in range(num_slots)]
    return HiddenText(parents, depths, tokens, [*text[:num_true], *wrong[len(text[:num_true]) :]])


def draw_tree(rng: random.Random, budget: int, num_slots: int) -> tuple[list[int], list[int]]:
    """Parents and depths."""
    parents: list[int] = []
    depths: list[int] = []
    for node in range(budget):
        parent = rng.choice([ROOT, *(at for at in range(node) if depths[at] < num_slots)][-6:])
        parents.append(parent)
        depths.append(1 if parent == ROOT else depths[parent] + 1)
    return parents, depths


def path_to(node: int, parents: list[int]) -> list[int]:
    return [] if node == ROOT else [*path_to(parents[node], parents), node]


def draw_token(rng: random.Random, forbidden: set[int]) -> int:
    return next(token for token in iter(lambda: rng.randrange(1, 290), None) if token not in forbidden)


def as_tensors(hidden: list[HiddenText]) -> tuple[TreeBatch, torch.Tensor]:
    """Trees, and the tokens of their candidates: first the chain's, then each node's own. [B, L, 1 + N]"""
    trees = TreeBatch(
        parents_BN=torch.tensor([each.parents for each in hidden]),
        depths_BN=torch.tensor([each.depths for each in hidden]),
        num_nodes_B=torch.tensor([len(each.parents) for each in hidden]),
        candidates_BN=torch.tensor([range(1, 1 + len(each.parents)) for each in hidden]),
        scores_BN=torch.zeros(len(hidden), len(hidden[0].parents)),
    )
    candidates = [
        [[first, *each.tokens] for first in each.chain] for each in hidden
    ]  # a node is at its own depth alone
    return trees, torch.tensor(candidates)


def lift(logits_V: torch.Tensor, token: int, rank: int | None) -> None:
    """Lets so many others stand before a token; in place."""
    if rank is not None:
        logits_V[token] = -torch.inf
        logits_V[token] = logits_V.topk(rank + 1).values[rank] + 1e-2


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
            if hasattr(layer, "commit"):
                states[name] = torch.cat([part[numbers[0]].float().flatten() for part in layer.kv_cache])
                continue
            size = layer.kv_cache.shape[2]
            held = layer.kv_cache[numbers[: -(-length // size)]].transpose(1, 2).flatten(0, 1)[:length]
            window = layer.impl.sliding_window
            states[name] = (held if window < 0 else held[1 - window :]).clone()
    return states


@contextmanager
def preempting(scheduler: Any, given: Round, told: Told) -> Iterator[None]:
    """vLLM's own way to take the caches of running requests, which then begin anew with what they have."""
    schedule = scheduler.schedule
    steps = itertools.count(1)

    def scheduling(*args: Any) -> Any:
        if given.preempted_every and next(steps) % given.preempted_every == 0:
            told.num_preempted += len(scheduler.running)
            scheduler.reset_prefix_cache(reset_running_requests=True)
        return schedule(*args)

    with patch.object(scheduler, "schedule", scheduling):
        yield


@contextmanager
def broken(control: Control, runner: Any) -> Iterator[None]:
    """One part of the engine does nothing."""
    with ExitStack() as stack:
        for owner, name, replacement in breakages(control, runner):
            stack.enter_context(patch.object(owner, name, replacement))
        yield


def breakages(control: Control, runner: Any) -> Iterator[tuple[Any, str, Callable]]:
    """What takes the place of what; every control there is but "none"."""
    if control == "none":
        return
    runtime = runner.speculator.runtime
    if control == "no compaction":
        yield runtime, "tidy_caches", lambda _step: None
    elif control == "no depth positions":
        yield StepTrees, "move_positions", lambda _trees, positions: positions
    elif control == "no permutation of tap states":
        yield runtime, "tidy_states", lambda *_: None
    elif control == "no tree mask":
        yield runtime, "begin", see_all_before(runtime)
    elif control == "no chain for penalties":
        yield runtime, "admit", admit_to_trees(runtime.admit)
    elif control == "no recurrent commit":
        for layer in runtime.recurrent_layers:
            yield layer, "commit", commit_none(layer.commit)


def see_all_before(runtime: Any) -> Callable:
    begin = runtime.begin

    def beginning(batch: Any) -> None:
        begin(batch)
        step = runtime.step_of(batch)
        if step is not None:
            step.trees.sees_BRR[:] = torch.ones_like(step.trees.sees_BRR).tril()

    return beginning


def admit_to_trees(admit: Callable) -> Callable:
    return lambda slot, **_: admit(slot, chain_only=False)


def commit_none(commit: Callable) -> Callable:
    def committing(walk: Any) -> None:
        none = torch.zeros_like(walk.num_accepted_B)
        commit(replace(walk, path_BL=torch.full_like(walk.path_BL, ROOT), num_accepted_B=none))

    return committing


if __name__ == "__main__":
    import tree_probe  # so that what is pickled is known by a name that tests can import

    tree_probe.main(Path(sys.argv[1]), sys.argv[2:])
