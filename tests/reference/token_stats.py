"""Token statistics in float64 from whole logits, as the formulas stand in a textbook."""

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Expected", "logits", "token_stats"]


@dataclass(frozen=True)
class Expected:
    """The statistics of N distributions."""

    logprobs: Tensor  # [N]
    entropy: Tensor  # [N]
    topk_ids: Tensor  # [N, K]
    topk_logprobs: Tensor  # [N, K]


def logits(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    softcap: float | None = None,
    logit_scale: float | None = None,
) -> Tensor:
    """[N, V]; all arguments float64."""
    z = hidden @ weight.T
    if bias is not None:
        z = z + bias
    if logit_scale is not None:
        z = z * logit_scale
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    return z


def token_stats(
    z: Tensor,
    targets: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    top_k: int = 0,
    candidates: Tensor | None = None,
) -> Expected:
    """From logits [N, V] in float64; a probability of 0 adds nothing to the entropy."""
    z = z / (temperature.double()[:, None] if isinstance(temperature, Tensor) and temperature.ndim else temperature)
    probs = torch.exp(z - z.amax(1, keepdim=True))
    probs = probs / probs.sum(1, keepdim=True)
    logprobs = z - torch.logsumexp(z, 1, keepdim=True)
    terms = torch.where(probs > 0, probs * torch.where(probs > 0, logprobs, 0.0), 0.0)
    ids = logprobs.topk(top_k, 1).indices if candidates is None else candidates.long()
    return Expected(logprobs.gather(1, targets[:, None])[:, 0], -terms.sum(1), ids, logprobs.gather(1, ids))
