r"""Trains targets that write Python: Gated-DeltaNet hybrids of the flagship's architecture.

The embedded one (10 M parameters), and one to measure on a GPU (104 M, recipes/hybrid_code_dflash.yaml):

    python train/code_target.py runs/hybrid_code/target --size code --steps 400 --rows 64 --chat-share 0.5 \
        --learning-rate 1.5e-3 --answer-lines 24 --files 4500
    script="python train/code_target.py --rows 64"
    $script runs/1 --steps 1550 --answer-lines 60               # reads code and chats
    $script runs/2 --init runs/1 --steps 1600 --answer-lines 24 --chat-share 0.7 --learning-rate 0.0015
    $script recipes/embedded/target --init runs/2 --steps 1780 --chat-share 0.5 --learning-rate 0.0025

The architecture is that of Qwen3.5/3.6's text model: three Gated-DeltaNet layers to one gated attention
layer, partial rotary embedding, untied embeddings; the embedded one has the smallest widths that vLLM's CPU
kernels take.  The corpus is the Python source that this machine holds (`data/python_source.py`), read
when the script runs; held-out standard-library files are never trained on.  Beside the weights it writes
`training.json`: seed, corpus, losses and samples.  `train/delta_rule.py` does the delta rule's work;
flash-linear-attention 0.6 refuses its backward on Hopper with Triton 3.4 to 3.7.0 (its issue 640).
"""

# R=rows  T=tokens in a row  V=vocabulary

import json
import math
import platform
import random
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3_5ForCausalLM, Qwen3_5TextConfig

from data.python_source import (
    MAX_ANSWER_LINES,
    Chat,
    find_all_chats,
    installed_package_files,
    read_sources,
    standard_library,
    standard_library_files,
)
from train.delta_rule import quick_delta_layers

END_OF_TEXT, TURN_START, TURN_END, MASK = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"
# The mask token never occurs in text: drafters borrow its embedding row.  The others keep their usual ChatML
# places for templates with reasoning and tools.
SPECIAL_TOKENS = [
    END_OF_TEXT,
    TURN_START,
    TURN_END,
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    MASK,
]
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)
# The published split of Qwen2's tokenizer: a word keeps the one character before it, digits stand alone, and
# white space stays apart from the word it indents.
_WORDS = Regex(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class Size:
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_key_value_heads: int
    linear_key_heads: int
    linear_value_heads: int


SIZES = {
    "embedded": Size(4096, 256, 640, 8, 4, 2, 2, 4),
    "code": Size(8192, 768, 2048, 12, 12, 4, 4, 8),
    "tiny": Size(512, 128, 256, 4, 2, 1, 1, 2),  # whether all of it works
}


@dataclass(frozen=True)
class Schedule:
    """What decides the weights, beside the corpus and the architecture."""

    steps: int
    seed: int
    rows: int  # rows in a step
    row_tokens: int
    chat_share: float  # of the rows
    answer_lines: int  # at most, in a chat
    learning_rate: float
    warmup_steps: int
    weight_decay: float


@dataclass(frozen=True)
class Corpus:
    """Token streams on one device: plain source end to end, and rows of whole chats."""

    plain: torch.Tensor  # [tokens] int32
    chats: torch.Tensor  # [rows, row_tokens + 1] int32
    held_out_plain: torch.Tensor
    held_out_chats: torch.Tensor


def architecture(size: Size) -> Qwen3_5TextConfig:
    return Qwen3_5TextConfig(
        vocab_size=size.vocab_size,
        hidden_size=size.hidden_size,
        intermediate_size=size.intermediate_size,
        num_hidden_layers=size.num_layers,
        num_attention_heads=size.num_heads,
        num_key_value_heads=size.num_key_value_heads,
        head_dim=64,
        linear_num_key_heads=size.linear_key_heads,
        linear_num_value_heads=size.linear_value_heads,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1e6,
            "partial_rotary_factor": 0.25,
            "mrope_section": [3, 3, 2],
            "mrope_interleaved": True,
        },
        bos_token_id=None,
        eos_token_id=SPECIAL_TOKENS.index(TURN_END),
        pad_token_id=SPECIAL_TOKENS.index(END_OF_TEXT),
        dtype="float32",
    )


def render_chat(chat: Chat) -> str:
    """CHAT_TEMPLATE's text, without the cost of a template for every chat of a corpus."""
    return f"{TURN_START}user\n{chat.request}{TURN_END}\n{TURN_START}assistant\n{chat.answer}{TURN_END}\n"


def train_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE of so many entries, the special tokens first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(_WORDS, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def read_corpus(
    answer_lines: int, most_files: int | None
) -> tuple[list[str], list[Chat], list[str], list[Chat], dict]:
    """Training texts and chats, held-out texts and chats, and a description of where they came from."""
    held_out = list(read_sources(standard_library_files(held_out=True)))
    held_out_texts = {text for _, text in held_out}
    own_files = set(standard_library_files(held_out=False))
    training_files = (sorted(own_files) + installed_package_files())[:most_files]
    training = [(path, text) for path, text in read_sources(training_files) if text not in held_out_texts]
    held_out_chats = find_all_chats(held_out, answer_lines)
    forbidden = {chat.answer for chat in held_out_chats}
    found = find_all_chats(training, answer_lines)
    chats = list({(c.request, c.answer): c for c in found if c.answer not in forbidden}.values())
    library = standard_library()
    description = {
        "python": platform.python_version(),
        "standard_library_files": sum(path in own_files for path, _ in training),
        "files": len(training),
        "characters": sum(len(text) for _, text in training),
        "chats": len(chats),
        "held_out_files": [path.relative_to(library).as_posix() for path, _ in held_out],
    }
    return [text for _, text in training], chats, [text for _, text in held_out], held_out_chats, description


def encode_stream(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> torch.Tensor:
    """All texts end to end, each closed by the end-of-text token. [tokens] int32"""
    end = SPECIAL_TOKENS.index(END_OF_TEXT)
    pieces: list[np.ndarray] = []
    for start in range(0, len(texts), 1024):
        for encoding in tokenizer.backend_tokenizer.encode_batch_fast(texts[start : start + 1024]):
            pieces.append(np.array([*encoding.ids, end], dtype=np.int32))
    return torch.from_numpy(np.concatenate(pieces))


def pack_chats(tokenizer: PreTrainedTokenizerFast, chats: list[Chat], row_tokens: int) -> torch.Tensor:
    """Rows that begin with a chat and hold as many whole ones as fit. [rows, row_tokens + 1] int32"""
    rows: list[list[int]] = []
    for start in range(0, len(chats), 1024):
        rendered = [render_chat(chat) for chat in chats[start : start + 1024]]
        for encoding in tokenizer.backend_tokenizer.encode_batch_fast(rendered):
            ids = encoding.ids[: row_tokens + 1]
            if not rows or len(rows[-1]) + len(ids) > row_tokens + 1:
                rows.append([])
            rows[-1].extend(ids)
    padding = SPECIAL_TOKENS.index(END_OF_TEXT)
    return torch.tensor([row + [padding] * (row_tokens + 1 - len(row)) for row in rows], dtype=torch.int32)


def draw_rows(corpus: Corpus, schedule: Schedule, generator: torch.Generator) -> torch.Tensor:
    """A step's rows, chats and stretches of plain source. [R, T + 1] int64"""
    num_chat = round(schedule.rows * schedule.chat_share)
    chat_index = torch.randint(len(corpus.chats), (num_chat,), generator=generator)
    start = torch.randint(
        len(corpus.plain) - schedule.row_tokens - 1, (schedule.rows - num_chat,), generator=generator
    )
    offsets = start[:, None] + torch.arange(schedule.row_tokens + 1)
    device = corpus.plain.device
    return torch.cat([corpus.chats[chat_index.to(device)], corpus.plain[offsets.to(device)]]).long()


def token_loss(model: Qwen3_5ForCausalLM, rows_RT: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of the next token, padding left out. Scalar, nats."""
    with torch.autocast(rows_RT.device.type, dtype=torch.bfloat16):
        logits_RTV = model(rows_RT[:, :-1], use_cache=False).logits
    padding = SPECIAL_TOKENS.index(END_OF_TEXT)
    labels = rows_RT[:, 1:].clone()
    labels[(labels == padding) & (rows_RT[:, :-1] == padding)] = -100
    return torch.nn.functional.cross_entropy(
        logits_RTV.flatten(0, 1).float(), labels.flatten(), ignore_index=-100
    )


def learning_rate_at(step: int, schedule: Schedule) -> float:
    """Linear warm-up, then a cosine down to one hundredth."""
    if step < schedule.warmup_steps:
        return schedule.learning_rate * (step + 1) / schedule.warmup_steps
    progress = (step - schedule.warmup_steps) / max(1, schedule.steps - schedule.warmup_steps)
    return schedule.learning_rate * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * progress)))


def train(model: Qwen3_5ForCausalLM, corpus: Corpus, schedule: Schedule) -> list[float]:
    """Trains in place; returns the loss of every step. Raises FloatingPointError on a non-finite loss."""
    generator = torch.Generator().manual_seed(schedule.seed)
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": schedule.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        betas=(0.9, 0.95),
        fused=corpus.plain.is_cuda,
    )
    losses: list[float] = []
    pending: list[torch.Tensor] = []
    began = time.perf_counter()
    for step in range(schedule.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate_at(step, schedule)
        loss = token_loss(model, draw_rows(corpus, schedule, generator))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        pending.append(loss.detach())
        if len(pending) == 20 or step + 1 == schedule.steps:
            losses += torch.stack(pending).tolist()
            if not math.isfinite(losses[-1]):
                raise FloatingPointError(f"the loss is {losses[-1]} at step {step}")
            _print_progress(
                step + 1, schedule, sum(losses[-len(pending) :]) / len(pending), time.perf_counter() - began
            )
            pending.clear()
    return losses


def _print_progress(done: int, schedule: Schedule, loss: float, seconds: float) -> None:
    speed = done * schedule.rows * schedule.row_tokens / seconds
    eta = seconds / done * (schedule.steps - done)
    print(
        f"step {done}/{schedule.steps}  loss {loss:.4f}  {speed / 1e3:.0f}k tokens/s  ETA {eta:.0f} s",
        flush=True,
    )


@torch.no_grad()
def held_out_loss(model: Qwen3_5ForCausalLM, rows: torch.Tensor, rows_at_once: int = 32) -> float:
    """Mean token loss over `rows`, in nats."""
    parts = [token_loss(model, part.long()) for part in rows.split(rows_at_once)]
    return float(torch.stack(parts).mean())


@torch.no_grad()
def continue_texts(
    model: Qwen3_5ForCausalLM, tokenizer: PreTrainedTokenizerFast, prompts: list[str], max_new_tokens: int
) -> list[str]:
    """Greedy continuations of all prompts at once, end tokens left in, padding taken out."""
    batch = tokenizer(
        prompts, padding=True, padding_side="left", return_token_type_ids=False, return_tensors="pt"
    ).to(model.device)
    out = model.generate(**batch, max_new_tokens=max_new_tokens, do_sample=False)
    new = out[:, batch["input_ids"].shape[1] :]
    return [text.replace(END_OF_TEXT, "") for text in tokenizer.batch_decode(new, skip_special_tokens=False)]


@dataclass(frozen=True)
class Prepared:
    """Everything that training needs and that depends on this machine's files alone."""

    tokens: dict[str, torch.Tensor]
    held_out_texts: list[str]
    held_out_chats: list[Chat]
    description: dict


def prepare_corpus(
    schedule: Schedule, vocab_size: int, init: Path | None, cache: Path, most_files: int | None
) -> tuple[PreTrainedTokenizerFast, Prepared]:
    """Reads, tokenizes (with `init`'s tokenizer, if given) and packs; `cache` spares a second time."""
    saved = cache / "corpus.pt"
    if saved.exists():
        return PreTrainedTokenizerFast.from_pretrained(cache), torch.load(saved, weights_only=False)
    rng = random.Random(schedule.seed)
    texts, chats, held_texts, held_chats, description = read_corpus(schedule.answer_lines, most_files)
    rng.shuffle(texts)
    rng.shuffle(chats)
    if init:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(init)
    else:
        words = texts[:6000] + [render_chat(chat) for chat in chats[:20000]]
        tokenizer = train_tokenizer(words, vocab_size)
    held_stream = encode_stream(tokenizer, held_texts)
    width = schedule.row_tokens + 1
    tokens = {
        "plain": encode_stream(tokenizer, texts),
        "chats": pack_chats(tokenizer, chats, schedule.row_tokens),
        "held_out_plain": held_stream[: len(held_stream) // width * width].reshape(-1, width),
        "held_out_chats": pack_chats(tokenizer, held_chats, schedule.row_tokens),
    }
    description |= {"tokens": len(tokens["plain"]), "chat_tokens": tokens["chats"].numel()}
    prepared = Prepared(tokens, held_texts, held_chats, description)
    cache.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(cache)
    torch.save(prepared, saved)
    return tokenizer, prepared


def save(model: Qwen3_5ForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """bf16 weights, tokenizer and template in `out`; generation stops at either end token."""
    model.generation_config.eos_token_id = [SPECIAL_TOKENS.index(TURN_END), SPECIAL_TOKENS.index(END_OF_TEXT)]
    model.generation_config.pad_token_id = SPECIAL_TOKENS.index(END_OF_TEXT)
    model.to(torch.bfloat16)
    model.config.dtype = torch.bfloat16
    model.save_pretrained(out, max_shard_size="10MB")
    tokenizer.save_pretrained(out)


def earlier_schedules(init: Path) -> list[dict]:
    """Of the trainings that made `init`, first to last."""
    record = json.loads((init / "training.json").read_text())
    return [*record["earlier"], record["schedule"]]


def report(
    model: Qwen3_5ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    corpus: Corpus,
    prepared: Prepared,
    seed: int,
) -> dict:
    """Held-out losses, how many chats end by themselves, and samples, which only name their prompt's file."""
    rng = random.Random(seed)
    asked = rng.sample(prepared.held_out_chats, 64)
    answers = continue_texts(
        model,
        tokenizer,
        [f"{TURN_START}user\n{chat.request}{TURN_END}\n{TURN_START}assistant\n" for chat in asked],
        max_new_tokens=256,
    )
    files = rng.sample(range(len(prepared.held_out_texts)), 3)
    beginnings = [prepared.held_out_texts[i][:400] for i in files]
    continuations = continue_texts(model, tokenizer, beginnings, max_new_tokens=96)
    names = prepared.description["held_out_files"]
    return {
        "held_out_loss": {
            "plain": held_out_loss(model, corpus.held_out_plain),
            "chat": held_out_loss(model, corpus.held_out_chats),
        },
        "chats_that_end_within_256_tokens": sum(TURN_END in answer for answer in answers) / len(answers),
        "samples": [
            {"after": f"the first 400 characters of {names[i]}", "text": text}
            for i, text in zip(files, continuations, strict=True)
        ]
        + [
            {"after": f"a chat from {chat.source}", "text": text}
            for chat, text in zip(asked[:3], answers[:3], strict=True)
        ],
    }


def main(  # noqa: PLR0913, PLR0917
    out: Path,
    size: Annotated[str, typer.Option(help=f"one of {', '.join(SIZES)}")] = "embedded",
    steps: Annotated[int, typer.Option(help="optimizer steps")] = 3000,
    rows: Annotated[int, typer.Option(help="rows in a step")] = 128,
    row_tokens: Annotated[int, typer.Option(help="tokens in a row")] = 1024,
    learning_rate: Annotated[float, typer.Option(help="peak learning rate")] = 3e-3,
    seed: Annotated[int, typer.Option(help="seed of the weights and of the data order")] = 0,
    chat_share: Annotated[float, typer.Option(help="share of rows that hold chats")] = 0.35,
    answer_lines: Annotated[int, typer.Option(help="lines of a chat's answer at most")] = MAX_ANSWER_LINES,
    init: Annotated[Path | None, typer.Option(help="go on from these weights, with their tokenizer")] = None,
    cache: Annotated[Path, typer.Option(help="the tokenized corpus is kept here")] = Path("runs/code_corpus"),
    files: Annotated[int | None, typer.Option(help="read at most, for a rehearsal")] = None,
    tells: Annotated[bool, typer.Option(help="held-out losses and samples, a minute of a GPU")] = True,
) -> None:
    warmup_steps = min(200, steps // 10 + 1)
    schedule = Schedule(
        steps,
        seed,
        rows,
        row_tokens,
        chat_share,
        answer_lines,
        learning_rate,
        warmup_steps,
        weight_decay=0.1,
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    began = time.perf_counter()
    if size not in SIZES:
        raise typer.BadParameter(f"{size}: expected one of {', '.join(SIZES)}", param_hint="--size")
    tokenizer, prepared = prepare_corpus(schedule, SIZES[size].vocab_size, init, cache, files)
    print({k: v for k, v in prepared.description.items() if k != "held_out_files"}, flush=True)
    print(f"corpus ready after {time.perf_counter() - began:.0f} s", flush=True)
    corpus = Corpus(**{name: tensor.to(device) for name, tensor in prepared.tokens.items()})
    torch.manual_seed(seed)
    torch.set_float32_matmul_precision("high")
    if init:
        model = Qwen3_5ForCausalLM.from_pretrained(init, dtype="float32").to(device)
    else:
        model = Qwen3_5ForCausalLM(architecture(SIZES[size])).to(device)
    began = time.perf_counter()
    with quick_delta_layers():
        losses = train(model, corpus, schedule)
    seconds = time.perf_counter() - began
    model.eval()
    save(model, tokenizer, out)
    record = {
        "schedule": asdict(schedule),
        "earlier": earlier_schedules(init) if init else [],
        "corpus": prepared.description,
        "parameters": sum(p.numel() for p in model.parameters()),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.machine(),
        "seconds": round(seconds, 1),
        "loss": {"first": losses[0], "last_100": sum(losses[-100:]) / len(losses[-100:])},
        **(report(model, tokenizer, corpus, prepared, seed) if tells else {}),
    }
    (out / "training.json").write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps({k: v for k, v in record.items() if k != "corpus"}, indent=1))


if __name__ == "__main__":
    typer.run(main)
