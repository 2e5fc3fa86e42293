"""Captures under everything that makes a request's rows come in pieces, in an engine of its own, for a test.

    python capture_probe.py DRAFTER OUT.pt

A drafter whose drafts are refused, prompts computed in chunks, and a cache too small for all requests, so
that some are preempted and computed again.  Saves (prompt, text, captured rows) of each request, and how
often rows came a second time.
"""

import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR", "TRITON_INTERPRET": "1"}

import torch
from vllm import LLM, SamplingParams

import serve.capture
from serve.capture import capture_options
from serve.spool import Spool, _HostStep, read_spooled
from tests.drafters import EMBEDDED_TARGET, tiny_recipe

PROMPT_TOKENS, MAX_TOKENS, CHUNK = 620, 36, 300
BLOCKS = 88  # of the cache: enough for the prompts, too few once three requests grow past 640 tokens


class CountingSpool(Spool):
    repeated = 0

    def _add_rows(self, step: _HostStep, row: int) -> None:
        held = self._rows.get(step.request_ids[row])
        first = step.positions[step.starts[row]]
        CountingSpool.repeated += held is not None and first < held.count
        super()._add_rows(step, row)


def main(drafter: str, out: str) -> None:
    serve.capture.Spool = CountingSpool
    llm = LLM(
        model=str(EMBEDDED_TARGET),
        dtype="bfloat16",
        enforce_eager=True,
        enable_prefix_caching=False,
        max_model_len=1024,
        max_num_seqs=3,
        max_num_batched_tokens=CHUNK,
        kv_cache_memory_bytes=1 << 30,
        num_gpu_blocks_override=BLOCKS,
        additional_config=capture_options(tiny_recipe().drafter.target_layer_ids),
        speculative_config={"method": "dflash", "model": drafter, "num_speculative_tokens": 7},
    )
    generator = torch.Generator().manual_seed(3)
    prompts = [
        torch.randint(300, 4000, (PROMPT_TOKENS + 7 * i,), generator=generator).tolist() for i in range(3)
    ]
    with TemporaryDirectory() as spool:
        llm.collective_rpc("start_capture", args=(spool,))
        sampling = SamplingParams(temperature=0.7, seed=1, max_tokens=MAX_TOKENS, ignore_eos=True)
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
        llm.collective_rpc("flush_capture")
        captured = [
            (
                output.prompt_token_ids,
                list(output.outputs[0].token_ids),
                *read_spooled(Path(spool), output.request_id),
            )
            for output in outputs
        ]
    torch.save({"captured": captured, "repeated": CountingSpool.repeated}, out)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
