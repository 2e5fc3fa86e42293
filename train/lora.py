"""Low-rank adapters on the drafter's projections, put around it by peft: the only module that knows peft.

Every other weight is frozen.  Published checkpoints hold the merged weights under the ordinary names, so that
nothing that reads one knows of adapters.  Source: arXiv 2106.09685.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from recipes.schema import Lora

_ADAPTER = "default"  # peft's name for the only one
_BASE = ".base_layer."


@dataclass(frozen=True)
class PublishedWeight:
    """A tensor of the published checkpoint, as it follows from parameters of the model."""

    name: str
    parameters: list[nn.Parameter]
    """What `read` reads; where they are partitioned they must be gathered before."""
    read: Callable[[], torch.Tensor]


def adapt(drafter: nn.Module, lora: Lora) -> None:
    """Wraps the projections in place and freezes everything but the adapters, which change nothing yet."""
    from peft import LoraConfig, inject_adapter_in_model  # noqa: PLC0415 - seconds, which few runs need

    config = LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=list(lora.targets))
    inject_adapter_in_model(config, drafter, _ADAPTER)


def published_weights(model: nn.Module) -> Iterator[PublishedWeight]:
    """Of a drafter with adapters or without, under the names that it has without."""
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        if _BASE in name:
            projection, _, rest = name.partition(_BASE)
            down, up = (parameters[f"{projection}.lora_{side}.{_ADAPTER}.weight"] for side in "AB")
            scale = model.get_submodule(projection).scaling[_ADAPTER]
            merged = _Merged(parameter, down, up, scale)
            yield PublishedWeight(f"{projection}.{rest}", [parameter, down, up], merged)
        elif ".lora_" not in name:
            yield PublishedWeight(name, [parameter], parameter.detach)


@dataclass(frozen=True)
class _Merged:
    """W + scale B A, in fp32."""

    base: nn.Parameter
    down: nn.Parameter
    up: nn.Parameter
    scale: float

    def __call__(self) -> torch.Tensor:
        base, down, up = (each.detach().float() for each in (self.base, self.down, self.up))
        return base + self.scale * (up @ down)
