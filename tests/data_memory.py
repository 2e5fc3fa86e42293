"""Peak memory of reading and rendering prompts: many rows, and one very long conversation; in MiB.

    python tests/data_memory.py [--rows N] [--tokens N]

Each case has a process of its own, which reads a file as a recipe's data phase does: source, mixture, chat
template of the embedded target, groups.  Ends with 1 where one takes more than 2 GB.
"""

import json
import resource
import sys
import tempfile
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import typer
from drafters import EMBEDDED_TARGET
from rich.console import Console
from rich.table import Table
from typer import Option

from data.groups import begin, group_by_shard
from data.mixture import load_conversations
from data.render import load_chat_template
from recipes.schema import Data, Target

LIMIT_BYTES = 2e9
LINE = "def f(x): return x\n"


def main(
    rows: Annotated[int, Option(help="Of the file of many.")] = 100_000,
    tokens: Annotated[int, Option(help="Of the long conversation.")] = 65_536,
) -> None:
    """Measure."""
    table = Table("case", "prompts", "tokens of the longest", "imports, MiB", "peak, MiB", box=None)
    peaks = []
    with tempfile.TemporaryDirectory() as name:
        for case, (write, size, asked) in {
            f"{rows:,} rows, all taken": (write_rows, rows, rows),
            f"{rows:,} rows, 1,000 taken by lot": (write_rows, rows, 1000),
            f"a turn of {tokens:,} tokens": (write_long, tokens, 1),
            f"turns of {tokens:,} tokens together": (write_turns, tokens, 1),
        }.items():
            path = Path(name) / "prompts.jsonl"
            write(path, size)
            data = Data(prompts=[{"path": str(path)}], num_prompts=asked, max_prompt_tokens=10**6)
            count, length, before, peak = measure(data)
            peaks.append(peak)
            mib = (f"{each / 2**20:,.0f}" for each in (before, peak))
            table.add_row(case, f"{count:,}", f"{length:,}", *mib)
    Console(soft_wrap=True).print(table)
    sys.exit(max(peaks) > LIMIT_BYTES)


def write_rows(path: Path, rows: int) -> None:
    """Two turns of 300 characters each."""
    with path.open("w") as file:
        for number in range(rows):
            user = {"role": "user", "content": f"{number} " + LINE * 15}
            answer = {"role": "assistant", "content": LINE * 15}
            print(json.dumps({"messages": [user, answer, user, answer]}), file=file)


def write_long(path: Path, tokens: int) -> None:
    path.write_text(json.dumps({"prompt": repeat(tokens)}))


def write_turns(path: Path, tokens: int) -> None:
    """Eight users' turns and what was answered: all that comes before a turn is rendered again for it."""
    part = repeat(tokens // 16)
    messages = [{"role": role, "content": part} for _ in range(8) for role in ("user", "assistant")]
    path.write_text(json.dumps({"messages": messages}))


def repeat(tokens: int) -> str:
    tokenizer = load_chat_template(Target(model=str(EMBEDDED_TARGET))).tokenizer
    return LINE * -(-tokens // len(tokenizer.encode(LINE, add_special_tokens=False)))


def measure(data: Data) -> tuple[int, int, int, int]:
    """Prompts, tokens of the longest prompt, and bytes: after the imports, and at the most."""
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_read, args=(data, theirs.send))
    process.start()
    theirs.close()
    found: tuple[int, int, int, int] = ours.recv()
    process.join()
    return found


def _read(data: Data, tell: Callable[[Any], None]) -> None:
    before = peak_bytes()
    loaded = load_conversations(data)
    begun = begin(loaded.conversations, load_chat_template(Target(model=str(EMBEDDED_TARGET))), data)
    groups = group_by_shard(begun.prompts, data)
    assert sum(map(len, groups)) == len(begun.prompts)
    most = max(len(prompt.token_ids) + prompt.further_tokens for prompt in begun.prompts)
    tell((len(begun.prompts), most, before, peak_bytes()))


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    typer.run(main)
