"""DeepSpeed around the drafter: the only module that knows its keys, save those of its files (`reshard`).

The loop owns accumulation and schedule: it calls `engine.backward` for each micro-batch with a loss that is
already a share of the step's, then `take_step` with that step's learning rate.
"""

import logging
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.runtime import bf16_optimizer
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.utils import ZERO_SUPPORTED_OPTIMIZERS
from torch import nn

from recipes.schema import Train
from train.adamw import AdamW
from train.lora import published_weights
from train.ranks import Ranks

# Without this DeepSpeed compiles a C++ op at its first start on a CPU (20 s and more), for an all-reduce
# between ranks that gloo does as well.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
bf16_optimizer.see_memory_usage = lambda *_, **_named: None  # it prints
ZERO_SUPPORTED_OPTIMIZERS.append(AdamW)

TORCH_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
OWN_ADAMW_ON = {"cuda"}
"""Where the fp32 masters of bf16 weights step by `train.adamw`."""


def engine_config(train: Train, device_type: str) -> dict[str, Any]:
    """DeepSpeed's configuration for a recipe's train section."""
    is_bf16 = train.precision == "bfloat16"
    config = {
        "train_micro_batch_size_per_gpu": train.micro_batch_sequences,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,  # backward as often as one likes, then step
        "gradient_clipping": 0.0 if _clips_itself(train, device_type) else train.optimizer.gradient_clipping,
        "bf16": {"enabled": is_bf16},
        "zero_optimization": _zero(train),
        "steps_per_print": None,
    }
    if is_bf16 and train.zero_stage > 0:
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    if train.zero_stage == 1:  # sums go between ranks, once a step: they are not rounded for it
        config["communication_data_type"] = "fp32"
    if not _is_own(train, device_type):
        config["optimizer"] = {"type": "AdamW", "params": _stock_adam(train, device_type)}
    return config


def _is_own(train: Train, device_type: str) -> bool:
    """The optimizer is `train.adamw`'s."""
    return train.precision == "bfloat16" and not train.offload_optimizer and device_type in OWN_ADAMW_ON


def _clips_itself(train: Train, device_type: str) -> bool:
    """Gradients are clipped as they are read for the step; at stages 0 and 3 DeepSpeed multiplies them before
    in any case."""
    return _is_own(train, device_type) and train.zero_stage in (1, 2)


def _adam(train: Train) -> dict[str, Any]:
    optimizer = train.optimizer
    return {
        "lr": optimizer.learning_rate,
        "betas": list(optimizer.betas),
        "eps": 1e-8,
        "weight_decay": optimizer.weight_decay,
    }


def _stock_adam(train: Train, device_type: str) -> dict[str, Any]:
    """torch's AdamW, which needs no compiler, except where optimizer states on the host feed a GPU: there
    DeepSpeed's own vectorised one earns its compilation.  On a GPU fused, or it copies the masters."""
    on_gpu = device_type == "cuda"
    is_torchs = not (train.offload_optimizer and on_gpu)
    adam = _adam(train) | {"torch_adam": is_torchs}
    return adam | ({"fused": True} if is_torchs and on_gpu else {})


def _zero(train: Train) -> dict[str, Any]:
    offload = {"offload_optimizer": {"device": "cpu"}} if train.offload_optimizer else {}
    return {"stage": train.zero_stage, "overlap_comm": False, **offload}


def start_engine(drafter: nn.Module, train: Train, ranks: Ranks) -> deepspeed.DeepSpeedEngine:
    """Moves the drafter to its device and precision; fp32 masters are DeepSpeed's."""
    device_type = ranks.device.type
    parameters = [each for each in drafter.parameters() if each.requires_grad]
    engine, *_ = deepspeed.initialize(
        model=drafter,
        model_parameters=parameters,
        optimizer=AdamW(parameters, **_adam(train)) if _is_own(train, device_type) else None,
        config=engine_config(train, device_type),
        dist_init_required=False,
    )
    if _clips_itself(train, device_type):
        limit = train.optimizer.gradient_clipping
        engine.basic_optimizer.scale = partial(_clip_factor, engine.optimizer, limit)
    if isinstance(engine.optimizer, BF16_Optimizer):
        _sum_as_they_come(engine.optimizer)
    if isinstance(engine.optimizer, FP16_UnfusedOptimizer):
        _undo_first_step(engine.optimizer)
    return engine


def _undo_first_step(optimizer: FP16_UnfusedOptimizer) -> None:
    """Of ZeRO-0 in bf16: DeepSpeed makes its moments by a step on zeros, which decays weights and counts."""
    for masters, weights in zip(optimizer.fp32_groups, optimizer.fp16_groups, strict=True):
        for master, weight in zip(masters, weights, strict=True):
            master.data.copy_(weight)
    for state in optimizer.state.values():
        state["step"].zero_()


def _sum_as_they_come(optimizer: BF16_Optimizer) -> None:
    """Of ZeRO-1 in bf16: each gradient is added to its fp32 sum as soon as it is there, and let go.

    DeepSpeed would hold all of them to the end of the backward pass, and make each fp32 first.
    """

    def add(parameter: torch.Tensor, group: int, index: int) -> None:
        optimizer.fp32_groups_gradients[group][index].add_(parameter.grad.view(-1))
        optimizer.fp32_groups_has_gradients[group][index] = True
        parameter.grad = None

    for group, parameters in enumerate(optimizer.bf16_groups):
        for index, parameter in enumerate(parameters):
            parameter.register_post_accumulate_grad_hook(partial(add, group=group, index=index))


def _clip_factor(optimizer: ZeROOptimizer, limit: float) -> torch.Tensor:
    """What DeepSpeed would multiply gradients by, of the norm that it has just found; on their device."""
    return (limit / (optimizer._global_grad_norm + 1e-6)).clamp(max=1)


def take_step(engine: deepspeed.DeepSpeedEngine, learning_rate: float) -> float | None:
    """One optimizer step on the gradients accumulated so far. Their norm before clipping; None at stage 0 in
    fp32, where DeepSpeed does not tell."""
    for group in engine.optimizer.param_groups:
        group["lr"] = learning_rate
    engine.step()
    norm = engine.get_global_grad_norm()
    return None if norm is None else float(norm)


def save_state(engine: deepspeed.DeepSpeedEngine, folder: Path) -> None:
    """Weights, masters and optimizer of every rank under `folder`; all ranks call it."""
    engine.save_checkpoint(str(folder.parent), tag=folder.name, save_latest=False)


def load_state(engine: deepspeed.DeepSpeedEngine, folder: Path) -> None:
    """The reverse, with as many ranks (else `train.reshard`) and the same ZeRO settings; all call it."""
    path, _ = engine.load_checkpoint(str(folder.parent), tag=folder.name, load_lr_scheduler_states=False)
    assert path is not None, f"DeepSpeed found no state in {folder}"
    if engine.zero_optimization():  # a file brings the limit of who wrote it, who may have clipped elsewhere
        engine.optimizer.clip_grad = engine.gradient_clipping()


def gather_weights(engine: deepspeed.DeepSpeedEngine, ranks: Ranks) -> dict[str, torch.Tensor]:
    """The weights to publish in bf16 on the CPU, on the main rank; empty on the others. All ranks call it."""
    weights = {}
    for weight in published_weights(engine.module):
        with deepspeed.zero.GatheredParameters(
            weight.parameters, enabled=engine.zero_optimization_partition_weights()
        ):
            if ranks.is_main:
                weights[weight.name] = weight.read().to("cpu", torch.bfloat16, copy=True).contiguous()
    return weights
