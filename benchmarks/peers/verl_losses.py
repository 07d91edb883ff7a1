"""verl's advantages and losses on the tensors of a file, for `benchmarks/parity.py`; runs in an environment of its own.

Usage: verl_losses.py INPUTS.safetensors OUTPUTS.safetensors. Tensors are padded: [B, C], completions from the left.
"""

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask
from verl.workers.config import ActorConfig, PolicyLossConfig

KL_COEF = 0.1


def main(inputs_path: str, outputs_path: str) -> None:
    """Every case of every batch, from `<batch>:<tensor>` to `<batch>:<case>/<part>`."""
    batches: dict[str, dict[str, Tensor]] = {}
    for key, tensor in load_file(inputs_path).items():
        batch, name = key.split(":")
        batches.setdefault(batch, {})[name] = tensor
    outputs = {}
    for batch, x in batches.items():
        for name, tensor in (advantages(x) | losses(x) | corrections(x)).items():
            outputs[f"{batch}:{name}"] = tensor.detach().double().contiguous()
    save_file(outputs, outputs_path)


def advantages(x: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rewards to advantages."""
    mask, groups = x["mask"], x["groups"].numpy()
    rewards = x["token_rewards"]
    charged = core_algos.compute_rewards(rewards, x["rollout"], x["ref"], KL_COEF)
    charged = charged * mask
    found = {
        "grpo/advantages": core_algos.compute_grpo_outcome_advantage(rewards, mask, groups)[0],
        "dr_grpo/advantages": core_algos.compute_grpo_outcome_advantage(
            rewards, mask, groups, norm_adv_by_std_in_grpo=False
        )[0],
        "rloo/advantages": core_algos.compute_rloo_outcome_advantage(rewards, mask, groups)[0],
        "rloo_kl/advantages": core_algos.compute_rloo_outcome_advantage(charged, mask, groups)[0],
        "gpg/advantages": core_algos.compute_gpg_outcome_advantage(rewards, mask, groups)[0],
        "reinforce_pp_baseline/advantages": core_algos.compute_reinforce_plus_plus_baseline_outcome_advantage(
            rewards, mask, groups
        )[0],
    }
    for name, token_rewards, gamma in (("", rewards, 1.0), ("_discounted", rewards, 0.9), ("_kl", charged, 1.0)):
        config = SimpleNamespace(gamma=gamma)
        plus = core_algos.compute_reinforce_plus_plus_outcome_advantage(token_rewards, mask, config=config)
        found[f"reinforce_pp{name}/advantages"] = plus[0]
        gae, returns = core_algos.compute_gae_advantage_return(token_rewards, x["old_values"], mask, gamma, 0.95)
        found[f"ppo{name}/advantages"], found[f"ppo{name}/returns"] = gae * mask, returns * mask
    return found


def losses(x: dict[str, Tensor]) -> dict[str, Tensor]:
    """Losses and their gradients."""
    mask, old, given = x["mask"], x["rollout"], x["advantages"]

    def policy_loss(mode: str, aggregation: str, **settings: Any) -> Callable[[Tensor], Tensor]:
        config = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **settings)
        config.global_batch_info["loss_scale_factor"] = int(x["max_tokens"])
        function = core_algos.get_policy_loss_fn(mode)
        return lambda policy: function(old, policy, given, mask, aggregation, config)[0]

    def kl(estimator: str) -> Callable[[Tensor], Tensor]:
        def loss(policy: Tensor) -> Tensor:
            return core_algos.agg_loss(core_algos.kl_penalty(policy, x["ref"], estimator), mask, "token-mean")

        return loss

    cases: dict[str, Callable[[Tensor], Tensor]] = {
        "grpo_dual": policy_loss("vanilla", "token-mean", clip_ratio_high=0.3, clip_ratio_c=1.5),
        "grpo_sequence_mean": policy_loss("vanilla", "seq-mean-token-mean", clip_ratio_c=1e9),
        "grpo_sequence_sum": policy_loss("vanilla", "seq-mean-token-sum", clip_ratio_c=1e9),
        "dr_grpo": policy_loss("vanilla", "seq-mean-token-sum-norm", clip_ratio_c=1e9),
        "dapo": policy_loss("vanilla", "token-mean", clip_ratio_high=0.28, clip_ratio_c=1e9),
        "gspo": policy_loss("gspo", "seq-mean-token-mean", clip_ratio_low=0.05, clip_ratio_high=0.05),
        "cispo": policy_loss("cispo", "token-mean", clip_ratio_low=1.0, clip_ratio_high=0.2),
        "gpg": policy_loss("gpg", "token-mean"),
        **{f"kl_{name}": kl(name) for name in ("k1", "k2", "k3")},
        "kl_k3_straight_through": kl("k3+"),
        "bypass_weighed": policy_loss(
            "bypass_mode",
            "seq-mean-token-sum",
            policy_loss=PolicyLossConfig(
                loss_mode="bypass_mode", rollout_correction={"loss_type": "reinforce", "rollout_is": "token"}
            ),
        ),
    }
    found = {}
    for name, case in cases.items():
        found |= with_gradient(name, case, x["policy"])

    def critic(values: Tensor) -> Tensor:
        return core_algos.compute_value_loss(values, x["returns"], x["old_values"], mask, 0.2)[0]

    return found | with_gradient("critic", critic, x["values"])


def corrections(x: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights for a rollout policy other than the old one, and what is made of them."""
    found = {}
    for name, level, threshold in (
        ("token", "token", 2.0),
        ("sequence", "sequence", 2.0),
        ("masked", "token", "0.8_1.25"),
    ):
        weights, _, metrics = compute_rollout_correction_and_rejection_mask(
            x["old"], x["rollout"], x["mask"], rollout_is=level, rollout_is_threshold=threshold
        )
        assert weights is not None
        found[f"correction_{name}/weights"] = weights.batch["rollout_is_weights"] * x["mask"]
        found[f"correction_{name}/effective"] = torch.tensor(metrics["rollout_corr/rollout_is_eff_sample_size"])
    config = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, clip_ratio_c=1e9)
    weights_BC = found["correction_token/weights"]

    def decoupled(policy: Tensor) -> Tensor:
        function = core_algos.get_policy_loss_fn("vanilla")
        return function(x["old"], policy, x["advantages"], x["mask"], "token-mean", config, weights_BC)[0]

    return found | with_gradient("decoupled", decoupled, x["policy"])


def with_gradient(name: str, loss: Callable[[Tensor], Tensor], leaf: Tensor) -> dict[str, Tensor]:
    """The loss at the leaf, and its gradient."""
    leaf = leaf.clone().requires_grad_()
    value = loss(leaf)
    return {f"{name}/loss": value, f"{name}/gradient": torch.autograd.grad(value, leaf)[0]}


if __name__ == "__main__":
    main(*sys.argv[1:])
