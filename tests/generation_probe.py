"""Answers with capture while trees and chains are drafted, in an engine of its own, for a test.

python generation_probe.py OUT.pt        {way: answers}, and what a misfit drafter was told
"""

import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from drafters import EMBEDDED_TARGET, write_random_drafter
from transformers import AutoTokenizer

from data.groups import render
from data.prompts import load_prompts
from recipes.errors import MachineError
from recipes.schema import Sampling, Serve, Target
from serve.engine import child_environment
from serve.generation import CapturingEngine, Drafting, Request

REFERENCE = EMBEDDED_TARGET.parent / "drafter"
TAPS = [1, 3, 5, 6]
TARGET = Target(model=str(EMBEDDED_TARGET), dtype="float32")
SERVE = Serve(max_model_len=256, max_num_seqs=3, max_num_batched_tokens=100, enforce_eager=True)
WAYS = {
    "greedy": (Sampling(temperature=0.0, max_tokens=32), False),
    "sampled": (Sampling(temperature=0.8, top_p=0.95, max_tokens=32), False),
    "chain": (Sampling(temperature=0.0, max_tokens=32), True),
}


def main(out: str) -> None:
    import torch  # noqa: PLC0415 - it reads the environment

    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_TARGET)
    prompts = render(load_prompts("stdlib:heldout", 5), tokenizer)
    requests = [Request(prompt.token_ids, prompt.seed) for prompt in prompts]
    told: dict[str, object] = {"prompts": [prompt.token_ids for prompt in prompts]}
    with TemporaryDirectory() as folder:
        misfit = write_random_drafter(Path(folder) / "misfit")
        engine = CapturingEngine(TARGET, SERVE, TAPS, Path(folder) / "spool", Drafting(REFERENCE, 15))
        for way, (sampling, is_chain) in WAYS.items():
            told[way] = engine.answer(requests, sampling, lambda *_: None, is_chain=is_chain)
        try:
            engine.swap(misfit)
        except MachineError as refusal:
            told["refusal"] = str(refusal)
        engine.swap(REFERENCE)
        told["after"] = engine.answer(requests, *WAYS["greedy"][:1], lambda *_: None)
    torch.save(told, out)


if __name__ == "__main__":
    if "OMP_NUM_THREADS" not in os.environ or os.environ.get("TRITON_INTERPRET") != "1":
        os.execve(sys.executable, [sys.executable, *sys.argv], child_environment())
    main(sys.argv[1])
