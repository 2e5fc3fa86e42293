"""Scores of a slot's candidates given the token before: a file beside a drafter, and the table trees grow on.

A block-diffusion drafter scores each slot without knowing which token the slot before took.  A pairwise head
adds a low-rank term of the two tokens, mixed with the slot's hidden state.  Its file lies in a folder of its
own below the checkpoint, where stock loaders, which take every weights file of the checkpoint itself, do not
look.  Pure but for that file; `train/pairwise.py` trains one.
"""

# B=requests  L=drafted slots (1..L)  P=parents of a slot  C=candidates of a slot
# D=hidden  V=vocabulary  r=rank
#
# q = the drafter's distribution at a slot, h its state there, p the parent: the token of the slot before
#
# m(h, p)  = parents[p] * (1 + gate h)
# x(c)     = log q(c) + m children[c]                                  c among the slot's C candidates
# x(rest)  = log (1 - sum of q over the candidates) + m rest           all other tokens
# s(p, c)  = x(c) - log (sum of exp x over candidates and rest)        a log-probability, so a tree's score

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch.nn import functional as F

from recipes.errors import UserError
from serve.drafter_config import PAIRWISE_NAME, pairwise_tensors
from serve.tensor_file import TensorParts, write_tensors

_VERSION = "1"
_VERSION_KEY = "draftsmith_pairwise"
LEAST_REST = 1e-6
"""Of a probability: about what fp32 leaves of 1 - 1."""


@dataclass(frozen=True)
class PairwiseTables:
    """All that a server needs; on one device, in one dtype."""

    parents_Vr: torch.Tensor
    children_Vr: torch.Tensor
    gate_rD: torch.Tensor
    rest_r: torch.Tensor

    @property
    def rank(self) -> int:
        return len(self.rest_r)

    @classmethod
    def without_effect(cls, vocab_size: int, hidden_size: int, rank: int, **like: Any) -> "PairwiseTables":
        """Scores are the drafter's own then, as near as fp32 goes.  like: device and dtype."""
        shapes = pairwise_tensors(vocab_size, hidden_size, rank)
        return cls(**{name: torch.zeros(shape, **like) for name, shape in shapes.items()})

    def copy_(self, other: "PairwiseTables | None") -> None:
        """In place, where graphs look; `other` has at most this rank.  None: without effect."""
        for own in vars(self).values():
            own.zero_()
        if other is not None:
            rank = other.rank
            self.parents_Vr[:, :rank].copy_(other.parents_Vr)
            self.children_Vr[:, :rank].copy_(other.children_Vr)
            self.gate_rD[:rank].copy_(other.gate_rD)
            self.rest_r[:rank].copy_(other.rest_r)


@dataclass(frozen=True)
class Scores:
    """Log-probabilities given a parent, fp32; over candidates and rest they sum to one."""

    candidates_BLPC: torch.Tensor
    rest_BLP: torch.Tensor


def mix(tables: PairwiseTables, hidden_BLD: torch.Tensor, parents_BLP: torch.Tensor) -> torch.Tensor:
    """m of every parent of every slot, fp32. [B, L, P, r]"""
    gate_BLr = F.linear(hidden_BLD.to(tables.gate_rD.dtype), tables.gate_rD).float()
    return F.embedding(parents_BLP, tables.parents_Vr).float() * (1 + gate_BLr[:, :, None])


def score_after(
    tables: PairwiseTables,
    hidden_BLD: torch.Tensor,
    parents_BLP: torch.Tensor,
    tokens_BLC: torch.Tensor,
    log_probs_BLC: torch.Tensor,
) -> Scores:
    """s of each slot's candidates after each parent.

    hidden_BLD: the drafter's, after its final norm, slots 1..L.  log_probs_BLC: fp32, log q of candidates.
    """
    mixed_BLPr = mix(tables, hidden_BLD, parents_BLP)
    children_BLCr = F.embedding(tokens_BLC, tables.children_Vr).float()
    x_BLPC = log_probs_BLC[:, :, None] + mixed_BLPr @ children_BLCr.transpose(-1, -2)
    rest_BL = (1 - log_probs_BLC.exp().sum(-1)).clamp_min(LEAST_REST).log()
    rest_BLP = rest_BL[:, :, None] + mixed_BLPr @ tables.rest_r.float()
    scores_BLPC = torch.cat([x_BLPC, rest_BLP[..., None]], dim=-1).log_softmax(-1)
    return Scores(scores_BLPC[..., :-1], scores_BLPC[..., -1])


def fill_table(
    tables: PairwiseTables,
    hidden_BLD: torch.Tensor,
    anchors_B: torch.Tensor,
    tokens_BLC: torch.Tensor,
    log_probs_BLC: torch.Tensor,
) -> torch.Tensor:
    """What `serve.tree.grow_tree` takes for each request. [B, L, C, C] fp32

    A slot's parents are the candidates of the slot before; those of slot 1 are the committed token, in every
    row.  Arguments as in `score_after`.
    """
    first_B1C = anchors_B[:, None, None].expand(-1, 1, tokens_BLC.shape[-1])
    parents_BLC = torch.cat([first_B1C, tokens_BLC[:, :-1]], dim=1)
    return score_after(tables, hidden_BLD, parents_BLC, tokens_BLC, log_probs_BLC).candidates_BLPC


def walk_chain(scores_BLCC: torch.Tensor) -> torch.Tensor:
    """The greedy chain: each slot's best candidate after that of the slot before, the lower of equals. [B, L]

    Scores as `serve.tree.grow_tree` takes them.
    """
    at_B11 = torch.zeros_like(scores_BLCC[:, 0, :1, :1], dtype=torch.int64)
    chain = []
    for scores_BCC in scores_BLCC.unbind(1):
        at_B11 = scores_BCC.take_along_dim(at_B11, 1).argmax(-1, keepdim=True)
        chain.append(at_B11[:, 0])
    return torch.cat(chain, dim=1)


# The file


def write_pairwise(ckpt: Path, tables: PairwiseTables) -> Path:
    """In bf16, whole or not at all."""
    path = ckpt / PAIRWISE_NAME
    path.parent.mkdir(exist_ok=True)
    parts = {
        name: TensorParts(torch.bfloat16, tuple(each.shape), [each.detach().to("cpu", torch.bfloat16)])
        for name, each in vars(tables).items()
    }
    write_tensors(path, parts, {_VERSION_KEY: _VERSION})
    return path


def read_pairwise(ckpt: Path, hidden_size: int, vocab_size: int) -> PairwiseTables | None:
    """A checkpoint's head on the CPU; None where it has none.  UserError for one that does not fit."""
    path = ckpt / PAIRWISE_NAME
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            version = (file.metadata() or {}).get(_VERSION_KEY)
            found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{path}: no safetensors file ({error}); make it again, or remove its folder"
        ) from None
    if version != _VERSION:
        raise UserError(f"{path}: a pairwise head of version {version}, expected {_VERSION}")
    _check(path, found, hidden_size, vocab_size)
    return PairwiseTables(**found)


def _check(path: Path, found: dict[str, torch.Tensor], hidden_size: int, vocab_size: int) -> None:
    rank = found["rest_r"].shape[0] if found.get("rest_r") is not None and found["rest_r"].ndim else 0
    expected = pairwise_tensors(vocab_size, hidden_size, rank)
    shapes = {name: tuple(each.shape) for name, each in found.items()}
    if not rank or shapes != expected:
        raise UserError(
            f"{path}: tables of {shapes}, expected {expected}; this head is of another target or drafter"
        )
    for name, each in found.items():
        if not each.isfinite().all():
            raise UserError(f"{path}: {name} holds a number that is not finite")
