"""The target in transformers, hooks on its tapped layers: the reference for captured states.

Spread by accelerate over the devices there are.  Called by data/shard_check.py.
Shapes: L=tokens of a sequence  W=taps x hidden size
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from data.check_taps import FINAL
from recipes.load import resolve_model
from recipes.schema import Target

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class HookedTarget:
    """Gives the output residual stream of the target's tapped decoder layers, FINAL among them or not."""

    def __init__(self, target: Target, target_layer_ids: Sequence[int]) -> None:
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        self._model = AutoModelForCausalLM.from_pretrained(
            resolve_model(target.model),
            revision=target.revision,
            dtype=_DTYPES[target.dtype],
            device_map="auto",
        ).eval()
        decoder = self._model.get_decoder()
        self._taps: dict[int, torch.Tensor] = dict.fromkeys(target_layer_ids, torch.empty(0))
        for layer in target_layer_ids:
            tapped = decoder.norm if layer == FINAL else decoder.layers[layer]
            tapped.register_forward_hook(self._keep(layer))

    def _keep(self, layer: int) -> Callable[[Any, Any, Any], None]:
        def hook(module: Any, inputs: Any, output: Any) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            self._taps[layer] = hidden[0].cpu()

        return hook

    @torch.inference_mode()
    def compute_taps(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[L, W] for token ids [L], taps as they were asked for."""
        self._model(token_ids.long()[None].to(self._model.device), use_cache=False)
        return torch.cat(list(self._taps.values()), dim=-1)
