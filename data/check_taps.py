"""Whether captured tap states are those of the transformers model, token by token.

The comparison is pure; the reference runs the target in transformers with hooks on the tapped layers, spread
by accelerate over the devices there are.  Called before the first shard of a run is written.
Shapes: L=tokens of a sequence  P=taps  H=hidden size  W=P x H
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from data import shards
from recipes.errors import MachineError
from recipes.load import resolve_model
from recipes.schema import Target

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class NamedSequence:
    """A sequence and how to call it in a message."""

    name: str
    sequence: shards.Sequence


class HookedTarget:
    """The target in transformers; gives the output residual stream of its tapped decoder layers."""

    def __init__(self, target: Target, target_layer_ids: Sequence[int]) -> None:
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        self._model = AutoModelForCausalLM.from_pretrained(
            resolve_model(target.model),
            revision=target.revision,
            dtype=_DTYPES[target.dtype],
            device_map="auto",
        ).eval()
        layers = self._model.get_decoder().layers
        self._taps: dict[int, torch.Tensor] = {}
        for layer in target_layer_ids:
            layers[layer].register_forward_hook(self._keep(layer))

    def _keep(self, layer: int) -> Callable[[Any, Any, Any], None]:
        def hook(module: Any, inputs: Any, output: Any) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            self._taps[layer] = hidden[0].cpu()

        return hook

    @torch.inference_mode()
    def compute_taps(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[L, W] for token ids [L], taps ascending."""
        self._model(token_ids.long()[None].to(self._model.device), use_cache=False)
        return torch.cat([self._taps[layer] for layer in sorted(self._taps)], dim=-1)


def check_taps(
    sequences: Sequence[NamedSequence],
    compute_taps: Callable[[torch.Tensor], torch.Tensor],
    target_layer_ids: Sequence[int],
    least_cosine: float,
) -> dict[int, float]:
    """Layer -> the least cosine found there.

    Raises MachineError for the first sequence whose states are not those of `compute_taps`.  No user's
    mistake: the recipe names the layers for both sides, so the engine and transformers disagree.
    """
    least = dict.fromkeys(target_layer_ids, 1.0)
    for each in sequences:
        expected = compute_taps(each.sequence.token_ids)[:-1]
        for layer, cosine_L in zip(target_layer_ids, _compare(each, expected, len(least)), strict=True):
            position = int(cosine_L.argmin())
            cosine = float(cosine_L[position])
            least[layer] = min(least[layer], cosine)
            if not cosine >= least_cosine:
                raise MachineError(
                    f"the captured states are not the transformers model's: cosine {cosine:.6f} at the tap"
                    f" after layer {layer}, sequence {each.name}, position {position}; data.check_cosine"
                    f" asks for {least_cosine}; no shard was written"
                )
    return least


def _compare(each: NamedSequence, expected: torch.Tensor, num_taps: int) -> torch.Tensor:
    """[P, L - 1] cosines; two zero states agree (the embedding of a padding token is zero)."""
    found = each.sequence.hidden
    assert found.shape == expected.shape, f"{each.name}: {found.shape} states, expected {expected.shape}"
    if not found.isfinite().all():
        position = int((~found.isfinite()).any(dim=-1).nonzero()[0])
        raise MachineError(f"a captured state is not finite: sequence {each.name}, position {position}")
    found_LPH, expected_LPH = (x.float().unflatten(-1, (num_taps, -1)) for x in (found, expected))
    cosine_LP = torch.cosine_similarity(found_LPH, expected_LPH, dim=-1)
    both_zero_LP = ~(found_LPH.any(dim=-1) | expected_LPH.any(dim=-1))
    return cosine_LP.masked_fill(both_zero_LP, 1.0).T
