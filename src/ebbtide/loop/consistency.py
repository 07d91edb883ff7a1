"""The gate before the first update: rollout and engine must give the same tokens the same log-probs.

Where they do not, the probability ratio of every later step is wrong, and training goes on all the same.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ebbtide.engines.base import TrainEngine
from ebbtide.errors import ConsistencyError, problem
from ebbtide.recipe import Recipe
from ebbtide.rollout.base import Awake, RolloutState
from ebbtide.types import TrainBatch

__all__ = ["Agreement", "check_agreement", "compare"]

# Mean absolute difference in nats that rounding explains, with room for other kernels.
_BOUNDS = {"float32": 1e-4, "bfloat16": 5e-2, "float16": 1e-2}


@dataclass(frozen=True, slots=True)
class Agreement:
    """How far apart the log-probs of the trained tokens are, in nats."""

    mean_abs_nats: float
    max_abs_nats: float

    def metrics(self) -> dict[str, float]:
        """Under their keys."""
        return {"consistency/mean_abs_nats": self.mean_abs_nats, "consistency/max_abs_nats": self.max_abs_nats}


def compare(engine_T: Tensor, rollout_T: Tensor, mask_T: Tensor) -> Agreement:
    """Both [T] float32; mask_T [T] bool."""
    apart = (engine_T - rollout_T)[mask_T].abs()
    return Agreement(float(apart.mean()), float(apart.max()))


def check_agreement(batch: TrainBatch, engine: TrainEngine, state: RolloutState, recipe: Recipe) -> Agreement:
    """Compare the first batch, before anything is trained.

    Raises:
        ConsistencyError: beyond the bound; the message gives the likeliest causes.
    """
    engine_T = engine.logprobs(batch)
    found = compare(engine_T, batch.rollout_logprobs, batch.loss_mask)
    dtype = recipe.model.compute_dtype or recipe.model.dtype
    bound = recipe.consistency.max_mean_abs_diff or _BOUNDS[dtype]
    if found.mean_abs_nats <= bound:
        return found
    rule = f"rollout and engine disagree by more than {bound} nats a token on the first batch"
    causes = "; ".join(_causes(batch, engine_T, state, recipe, bound))
    raise ConsistencyError(problem("consistency.mean_abs_nats", found.mean_abs_nats, rule, f"Likely causes: {causes}"))


def _causes(batch: TrainBatch, engine_T: Tensor, state: RolloutState, recipe: Recipe, bound: float) -> list[str]:
    causes = []
    sampling, mask_T = recipe.sampling, batch.loss_mask
    is_cut = {"top_k": sampling.top_k > 0, "top_p": sampling.top_p < 1, "min_p": sampling.min_p > 0}
    cuts = ", ".join(f"sampling.{name}={getattr(sampling, name)}" for name, is_active in is_cut.items() if is_active)
    if cuts:
        causes.append(
            f"{cuts} cuts the distribution that is sampled, while the loss is over the whole one: switch it off"
        )
    slope = _slope(engine_T[mask_T], batch.rollout_logprobs[mask_T])
    if abs(slope - 1) > 0.05 and not cuts:
        spread = f"the rollout's log-probs vary {slope:.2f} times as much as the engine's"
        causes.append(f"temperature: {spread} at sampling.temperature={sampling.temperature}")
    versions = batch.token_versions[mask_T].unique().tolist()
    if not isinstance(state, Awake) or versions != [state.version]:
        causes.append(f"weights: tokens come from versions {versions} and the rollout is {state}")
    causes.append("weights: the rollout holds others than the engine")
    dtypes = f"model.dtype={recipe.model.dtype!r} and model.compute_dtype={recipe.model.compute_dtype!r}"
    causes.append(
        f"dtype: {dtypes} round differently; raise consistency.max_mean_abs_diff above {bound} if that is all"
    )
    return causes


def _slope(x: Tensor, y: Tensor) -> float:
    """Of y over x by least squares; 1 where x does not vary."""
    x, y = x.double() - x.double().mean(), y.double() - y.double().mean()
    variance = float(torch.dot(x, x))
    return float(torch.dot(x, y)) / variance if variance else 1.0
