"""What the policy-gradient algorithms share: rewards judged, log ratios taken, terms added, metrics counted.

A subclass says how rewards become advantages (`_judge`) and what a token's objective is (`_objective`).
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from ebbtide.algorithms import judgement
from ebbtide.algorithms.base import AlgorithmConfig, LossInputs, Needs, check_groups, refuse_state
from ebbtide.algorithms.correction import Correction, correct, effective_sample_ratio
from ebbtide.algorithms.penalty import LOG_RATIO_BOUND, LossKL, estimate, loss_kl
from ebbtide.algorithms.reduction import Aggregation, Packed
from ebbtide.errors import ConfigError, EngineError, problem
from ebbtide.types import BatchCounts, Group, Ratio, TrainBatch

__all__ = ["Metrics", "PolicyGradient", "Tokens", "given"]

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

        weighs_by_ratio: ClassVar[bool] = False

        aggregation: Aggregation = "token_mean"
        """token_mean: each token weighs the same. sequence_mean: each sequence does. sequence_sum: a sequence weighs
        what its tokens add up to. constant: the same over sampling.max_tokens."""
        old_policy: Literal["rollout", "recomputed"] = "rollout"
        """Whose log-probs are the old policy's: those the rollout sampled with, or the engine's, recomputed before the
        update, which costs one forward pass."""
        kl: LossKL = LossKL()
        """KL to the reference policy in the loss."""
        correction: Correction = Correction()
        """What is done where the rollout's policy is not the one that is trained on."""
        entropy_coef: float = Field(0.0, ge=0)
        """Factor of the entropy bonus; 0 switches it off, and then no entropy is computed."""

        @model_validator(mode="after")
        def _correction_has_its_place(self) -> Self:
            if self.old_policy == "recomputed":
                return self
            problems = []
            if self.correction.normalize:
                rule = "the weights of the whole batch are known before the loss only with old_policy='recomputed'"
                problems.append(problem("correction.normalize", True, rule))
            if self.weighs_by_ratio and self.correction.weight != "none":
                rule = "the objective weighs by policy / rollout already, and a weight would count it twice"
                remedy = "Set old_policy='recomputed', or use correction.reject"
                problems.append(problem("correction.weight", self.correction.weight, rule, remedy))
            if problems:
                raise ConfigError(problems)
            return self

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
        """One scalar a completion, from the rewards of all groups.

        Raises:
            DataError: a group has too few completions, or rewards that are missing or not finite.
        """
        check_groups(groups, self.config.min_group_size)
        rewards_B, group_ids_B = judgement.flatten(groups)
        return judgement.split(self._judge(rewards_B, group_ids_B), groups)

    def prepare(self, batch: TrainBatch, counts: BatchCounts) -> tuple[TrainBatch, Metrics]:  # noqa: ARG002
        """Weigh the advantages by the rollout correction, where the old policy is not the rollout's."""
        if self.config.old_policy == "rollout":
            return batch, {}
        packed = Packed.of(batch)
        log_ratio_T = packed.trained(self._old_logprobs(batch) - batch.rollout_logprobs)
        weights_T, metrics = correct(log_ratio_T, packed, self.config.correction)
        if self.config.correction.normalize:
            weights_T = weights_T / (weights_T.sum() / packed.loss_mask.sum()).clamp(
                min=torch.finfo(torch.float32).tiny
            )
        metrics["correction/effective_sample_ratio"] = effective_sample_ratio(weights_T, packed)
        return replace(batch, advantages=packed.trained(batch.advantages) * weights_T), metrics

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
        if config.old_policy == "rollout" and config.correction.is_active:
            weights_T, diagnostics = correct(tokens.log_ratio, packed, config.correction)
            loss_T, metrics = loss_T * weights_T, metrics | diagnostics
        metrics["policy/kl_nats"] = packed.mean(estimate(-tokens.log_ratio.detach(), "k3"))
        if config.kl.coef:
            log_ratio_to_ref_T = packed.trained(inputs.policy_logprobs - given(batch.ref_logprobs, "ref_logprobs"))
            kl_T = loss_kl(config.kl, log_ratio_to_ref_T, log_ratio_T)
            loss_T = loss_T + config.kl.coef * kl_T
            metrics["policy/ref_kl_nats"] = packed.mean(estimate(log_ratio_to_ref_T.detach(), config.kl.estimator))
        if config.entropy_coef:
            entropy_T = packed.trained(given(inputs.entropy, "entropy"))
            loss_T = loss_T - config.entropy_coef * entropy_T
            metrics["policy/entropy_nats"] = packed.mean(entropy_T)
        return packed.share_of_loss(loss_T, inputs.counts, config.aggregation), metrics

    def state(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Nothing to continue from."""
        refuse_state(self, state)

    def _judge(self, rewards_B: Tensor, group_ids_B: Tensor) -> Tensor:  # noqa: ARG002
        """[B] float64 advantages from [B] float64 rewards and their groups; zeros where `prepare` tells instead."""
        return torch.zeros_like(rewards_B)

    @abstractmethod
    def _objective(self, tokens: Tokens) -> tuple[Tensor, Metrics]:
        """[T], what each token adds to the loss, 0 where not trained; and metrics."""

    def _old_logprobs(self, batch: TrainBatch) -> Tensor:
        if self.config.old_policy == "rollout":
            return batch.rollout_logprobs
        return given(batch.old_logprobs, "old_logprobs")


def given(tensor: Tensor | None, name: str) -> Tensor:
    """The tensor that the algorithm's needs promised.

    Raises:
        EngineError: the caller did not add it.
    """
    if tensor is None:
        raise EngineError(problem(name, None, "the algorithm's needs name it, and the batch lacks it"))
    return tensor
