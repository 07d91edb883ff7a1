"""What the policy-gradient algorithms share: rewards judged, log ratios taken, terms added, metrics counted.

A subclass says how rewards become advantages (`_judge`) and what a token's objective is (`_objective`).
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field
from torch import Tensor

from ebbtide.algorithms import judgement
from ebbtide.algorithms.base import AlgorithmConfig, LossInputs, Needs
from ebbtide.algorithms.penalty import LOG_RATIO_BOUND, LossKL, estimate, loss_kl
from ebbtide.algorithms.reduction import Aggregation, Packed
from ebbtide.errors import CheckpointError, EngineError, problem
from ebbtide.types import Group, Ratio, TrainBatch

__all__ = ["Metrics", "PolicyGradient", "Tokens"]

Metrics = dict[str, Ratio]


@dataclass(frozen=True, slots=True)
class Tokens:
    """What a token's objective is made of; every tensor is 0 where not trained.

    Attributes:
        packed: the layout.
        logprobs: [T] with gradient, the policy's.
        log_ratio: [T] with gradient, log policy - log old policy, bounded.
        advantages: [T].
    """

    packed: Packed
    logprobs: Tensor
    log_ratio: Tensor
    advantages: Tensor


class PolicyGradient(ABC):
    """Base of the algorithms that weigh log-probs by advantages."""

    class Config(AlgorithmConfig):
        """What all of them can be told."""

        aggregation: Aggregation = "token_mean"
        """Each token weighs the same (token_mean), each sequence (sequence_mean), or each token over the constant
        sequences x sampling.max_tokens (constant)."""
        old_policy: Literal["rollout", "recomputed"] = "rollout"
        """Whose log-probs are the old policy's: those the rollout sampled with, or the engine's, recomputed before the
        update, which costs one forward pass."""
        kl: LossKL = LossKL()
        """KL to the reference policy in the loss."""
        entropy_coef: float = Field(0.0, ge=0)
        """Factor of the entropy bonus; 0 switches it off, and then no entropy is computed."""

    config: Config

    def __init__(self, config: Config) -> None:
        self.config = config

    @property
    def needs(self) -> Needs:
        """Log-probs of the old and reference policy and the entropy, as far as the configuration uses them."""
        needs = Needs.NOTHING
        if self.config.old_policy == "recomputed":
            needs |= Needs.OLD_LOGPROBS
        if self.config.kl.coef:
            needs |= Needs.REF_LOGPROBS
        if self.config.entropy_coef:
            needs |= Needs.ENTROPY
        return needs

    @property
    def max_refills(self) -> int:
        """0: no group is dropped."""
        return 0

    def keep(self, group: Group) -> bool:  # noqa: ARG002
        """Every group is trained on."""
        return True

    def advantages(self, groups: Sequence[Group]) -> list[list[Tensor]]:
        """One scalar a completion, from the rewards of all groups."""
        rewards_B, group_ids_B = judgement.flatten(groups)
        return judgement.split(self._judge(rewards_B, group_ids_B), groups)

    def prepare(self, batch: TrainBatch) -> tuple[TrainBatch, Metrics]:
        """The batch as it is."""
        return batch, {}

    def loss(self, inputs: LossInputs) -> tuple[Tensor, Metrics]:
        """The objective, plus KL, minus entropy; each aggregated alike."""
        batch, config = inputs.batch, self.config
        packed = Packed.of(batch)
        log_ratio_T = packed.trained(inputs.policy_logprobs - self._old_logprobs(batch))
        tokens = Tokens(
            packed,
            logprobs=packed.trained(inputs.policy_logprobs),
            log_ratio=log_ratio_T.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND),
            advantages=packed.trained(batch.advantages),
        )
        loss_T, metrics = self._objective(tokens)
        metrics["policy/old_kl_nats"] = packed.mean(estimate(-tokens.log_ratio.detach(), "k3"))
        if config.kl.coef:
            log_ratio_to_ref_T = packed.trained(inputs.policy_logprobs - _given(batch.ref_logprobs, "ref_logprobs"))
            kl_T = loss_kl(config.kl, log_ratio_to_ref_T, log_ratio_T)
            loss_T = loss_T + config.kl.coef * kl_T
            metrics["policy/ref_kl_nats"] = packed.mean(estimate(log_ratio_to_ref_T.detach(), config.kl.estimator))
        if config.entropy_coef:
            entropy_T = packed.trained(_given(inputs.entropy, "entropy"))
            loss_T = loss_T - config.entropy_coef * entropy_T
            metrics["policy/entropy_nats"] = packed.mean(entropy_T)
        return packed.share_of_loss(loss_T, inputs.counts, config.aggregation), metrics

    def state(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Nothing to continue from.

        Raises:
            CheckpointError: the state is another algorithm's.
        """
        if state:
            rule = f"{type(self).__name__} keeps no state"
            raise CheckpointError(problem("algorithm.state", sorted(state), rule, "Resume with the run's own recipe"))

    @abstractmethod
    def _judge(self, rewards_B: Tensor, group_ids_B: Tensor) -> Tensor:
        """[B] float64 advantages from [B] float64 rewards and their groups."""

    @abstractmethod
    def _objective(self, tokens: Tokens) -> tuple[Tensor, Metrics]:
        """[T], what each token adds to the loss, 0 where not trained; and metrics."""

    def _old_logprobs(self, batch: TrainBatch) -> Tensor:
        if self.config.old_policy == "rollout":
            return batch.rollout_logprobs
        return _given(batch.old_logprobs, "old_logprobs")


def _given(tensor: Tensor | None, name: str) -> Tensor:
    if tensor is None:
        raise EngineError(problem(name, None, "the algorithm's needs name it, and the batch lacks it"))
    return tensor
