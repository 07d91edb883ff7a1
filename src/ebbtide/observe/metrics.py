"""The one table of metric keys: what may be logged, in which unit, and what it means.

A key is `area/name_unit`. A `*` in a pattern stands for a name that the recipe or the loop gives: a reward, a phase.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache

from ebbtide.errors import DataError, did_you_mean, problem

__all__ = ["METRICS", "Metric", "check", "describe"]


@dataclass(frozen=True, slots=True)
class Metric:
    """One row of the table.

    Attributes:
        pattern: the key, or a pattern with one `*`.
        unit: what a value counts; "" for plain numbers such as a reward, "ratio" for shares of 1.
        sentence: what it says.
    """

    pattern: str
    unit: str
    sentence: str


METRICS: tuple[Metric, ...] = (
    # What the policy earns.
    Metric("reward/mean", "", "Mean training reward over the step's completions: the weighted sum of all rewards."),
    Metric("reward/std", "", "Standard deviation of the training reward over the step's completions."),
    Metric("reward/min", "", "Lowest training reward of the step."),
    Metric("reward/max", "", "Highest training reward of the step."),
    Metric("reward/accuracy", "ratio", "Share of the step's completions whose reward is at least eval.correct_at."),
    Metric("reward/group_std", "", "Standard deviation of the reward within a group, averaged over groups."),
    Metric("reward/*_mean", "", "Mean of one reward, before its weight."),
    Metric("reward/*_std", "", "Standard deviation of one reward, before its weight."),
    Metric("reward/num_failed", "", "Completions whose reward failed, and whose group was left out of training."),
    Metric("eval/accuracy", "ratio", "Share of held-out prompts answered correctly at eval.temperature."),
    Metric("eval/greedy_accuracy", "ratio", "Share of held-out prompts answered correctly by greedy decoding."),
    Metric("eval/reward_mean", "", "Mean training reward on held-out prompts at eval.temperature."),
    Metric("eval/completion_mean_tokens", "tokens", "Mean length of the completions of held-out prompts."),
    Metric("eval/truncated_ratio", "ratio", "Share of held-out completions that ended at their token limit."),
    Metric("eval/num_prompts", "", "Held-out prompts that were answered."),
    # Groups and advantages.
    Metric("group/num_kept", "", "Groups that were trained on."),
    Metric("group/num_dropped", "", "Groups that the algorithm left out, for example for lack of any contrast."),
    Metric("group/uniform_ratio", "ratio", "Share of groups whose completions all earned the same reward."),
    Metric("advantage/mean", "", "Mean advantage over trained tokens."),
    Metric("advantage/std", "", "Standard deviation of the advantage over trained tokens."),
    Metric("advantage/min", "", "Lowest advantage of the batch."),
    Metric("advantage/max", "", "Highest advantage of the batch."),
    Metric("advantage/abs_mean", "", "Mean absolute advantage over trained tokens."),
    # Lengths.
    Metric("prompt/mean_tokens", "tokens", "Mean length of the step's prompts."),
    Metric("prompt/max_tokens", "tokens", "Longest prompt of the step."),
    Metric("prompt/num_too_long", "", "Prompts dropped so far because they leave no room in the model's context."),
    Metric("completion/mean_tokens", "tokens", "Mean length of the step's completions."),
    Metric("completion/min_tokens", "tokens", "Shortest completion of the step."),
    Metric("completion/max_tokens", "tokens", "Longest completion of the step."),
    Metric("completion/truncated_ratio", "ratio", "Share of completions that ended at their token limit."),
    # The update.
    Metric("loss/total", "", "What was minimised."),
    Metric("loss/*", "", "One part of the loss, with its coefficient."),
    Metric("policy/entropy_nats", "nats", "Mean entropy of the policy's distribution over trained tokens."),
    Metric("policy/kl_nats", "nats", "Estimated KL divergence of the policy from the weights that sampled."),
    Metric("policy/ref_kl_nats", "nats", "Estimated KL divergence of the policy from the reference policy."),
    Metric("policy/ratio_mean", "", "Mean probability ratio of the policy to the weights that sampled."),
    Metric("policy/ratio_min", "", "Lowest such ratio."),
    Metric("policy/ratio_max", "", "Highest such ratio."),
    Metric("policy/*_ratio", "ratio", "Share of trained tokens, or sequences, to which a bound of the loss applied."),
    Metric("policy/*_nats", "nats", "A mean difference of log-probs over trained tokens."),
    Metric("policy/reward_kl_coef", "", "Factor of the KL cost in the reward during this step."),
    Metric("critic/loss", "", "What the critic minimised."),
    Metric("critic/grad_norm", "", "Norm of the critic's gradient before it was scaled down."),
    Metric("critic/value_mean", "", "Mean value that the critic gives to the states of trained tokens."),
    Metric("critic/error_square_mean", "", "Mean squared error of the critic's values."),
    Metric("critic/clipped_ratio", "ratio", "Share of values that moved further than the bound of the critic's loss."),
    Metric("correction/ratio_mean", "", "Mean probability ratio of the trained policy to the rollout's, as weighed."),
    Metric("correction/ratio_square_mean", "", "Mean square of that ratio; ratio_mean^2 over it is the useful share."),
    Metric("correction/effective_sample_ratio", "ratio", "Effective samples among the batch's tokens, as corrected."),
    Metric("correction/truncated_ratio", "ratio", "Share of trained tokens whose weight was truncated."),
    Metric("correction/rejected_ratio", "ratio", "Share of trained tokens that were left out for their ratio."),
    Metric("correction/kl_nats", "nats", "Estimated KL divergence of the trained policy from the rollout's."),
    Metric("consistency/*_nats", "nats", "Difference of log-probs between rollout and engine under the same weights."),
    Metric("staleness/mean", "", "Mean count of policy versions from the weights that sampled to those updated."),
    Metric("staleness/max", "", "The same, of the oldest token."),
    Metric("optim/lr", "", "Learning rate of this update."),
    Metric("optim/grad_norm", "", "Norm of the gradient before it was scaled down to optim.max_grad_norm."),
    Metric("optim/num_skipped", "", "Updates left out so far because loss or gradient was not finite."),
    Metric("optim/num_microbatches", "", "Microbatches of this update, on the busiest rank."),
    Metric("warmup/loss_nats", "nats", "Mean loss per token of the supervised warm-up's last step."),
    Metric("warmup/*", "", "Another figure of the supervised warm-up."),
    # Speed, time, memory.
    Metric("throughput/generated_tokens_per_s", "tokens/s", "Generated tokens over the seconds of generation."),
    Metric("throughput/trained_tokens_per_s", "tokens/s", "Prompt and completion tokens over the update's seconds."),
    Metric("throughput/tokens_per_s", "tokens/s", "Prompt and completion tokens over the whole step's seconds."),
    Metric("throughput/samples_per_s", "samples/s", "Completions over the whole step's seconds."),
    Metric("time/step_s", "s", "The whole step, what lies between its phases included."),
    Metric("time/*_clean_up_s", "s", "The clean-up at a phase's exit, which is part of the phase."),
    Metric("time/*_s", "s", "One phase of the step; a phase inside another is named outer.inner."),
    Metric("memory/*_peak_rss_bytes", "bytes", "The most that was resident on the host during a phase."),
    Metric("memory/*_exit_rss_bytes", "bytes", "What was resident on the host when a phase ended."),
    Metric("memory/*_peak_allocated_bytes", "bytes", "The most that tensors held on the device during a phase."),
    Metric("memory/*_exit_allocated_bytes", "bytes", "What tensors held on the device when a phase ended."),
    Metric("memory/*_peak_reserved_bytes", "bytes", "The most that the allocator held of the device in a phase."),
    Metric("memory/*_exit_reserved_bytes", "bytes", "What the allocator kept of the device when a phase ended."),
    Metric("memory/*_clean_up_freed_bytes", "bytes", "What the clean-up at a phase's exit gave back, host and device."),
    # A user's plugin.
    Metric("own/*", "", "A figure of a plugin of yours."),
)  # fmt: skip


@cache
def describe(key: str) -> Metric:
    """The table's row for a key; the first that matches.

    Raises:
        DataError: no row does; the nearest key is named.

    Example:
        >>> describe("time/generate_s").unit
        's'
    """
    found = next((metric for metric in METRICS if fnmatchcase(key, metric.pattern)), None)
    if found is None:
        remedy = did_you_mean(key, [metric.pattern for metric in METRICS])
        rule = "no metric has this key"
        raise DataError(problem("metric", key, rule, remedy or "A plugin of yours names its metrics own/<name>"))
    return found


def check(keys: Iterable[str]) -> None:
    """Refuse keys that are not in the table; costs about 0.1 us a key once it was seen.

    Raises:
        DataError: with every unknown key.
    """
    problems = []
    for key in keys:
        try:
            describe(key)
        except DataError as error:
            problems.append(str(error))
    if problems:
        raise DataError("\n".join(problems))
