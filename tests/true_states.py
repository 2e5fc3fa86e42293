"""Whether shards hold the target's own states, by the transformers model, beside the product's own checks."""

from collections.abc import Iterable

import torch
from transformers import AutoModelForCausalLM

from data.shards import Sequence
from tests.drafters import EMBEDDED_TARGET, tiny_recipe

TAPS = tiny_recipe().drafter.target_layer_ids


def check_states(sequences: Iterable[Sequence]) -> None:
    """Fails where a tap of a token has a cosine of 0.999 or less."""
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED_TARGET, dtype=torch.bfloat16)
    for sequence in sequences:
        with torch.inference_mode():
            states = model(sequence.token_ids.long()[None], output_hidden_states=True).hidden_states
        expected = torch.cat([states[layer + 1][0, :-1] for layer in TAPS], dim=-1).unflatten(-1, (3, -1))
        found = sequence.hidden.unflatten(-1, (3, -1))
        assert found.shape == expected.shape
        assert torch.cosine_similarity(found.float(), expected.float(), dim=-1).min() > 0.999
