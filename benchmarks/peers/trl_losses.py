"""TRL's losses on the tensors of a file, for `benchmarks/parity.py`; runs in an environment of its own.

Usage: trl_losses.py INPUTS.safetensors OUTPUTS.safetensors. Tensors are padded: [B, C], completions from the left.
TRL's losses are methods of its trainers; here they run on an object that answers with the log-probs given.
"""

import sys
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from trl import GRPOTrainer, RLOOTrainer


def main(inputs_path: str, outputs_path: str) -> None:
    """Every case of every batch, from `<batch>:<tensor>` to `<batch>:<case>/<part>`."""
    batches: dict[str, dict[str, Tensor]] = {}
    for key, tensor in load_file(inputs_path).items():
        batch, name = key.split(":")
        batches.setdefault(batch, {})[name] = tensor
    outputs = {}
    for batch, x in batches.items():
        for name, tensor in losses(x).items():
            outputs[f"{batch}:{name}"] = tensor.detach().double().contiguous()
    save_file(outputs, outputs_path)


def losses(x: dict[str, Tensor]) -> dict[str, Tensor]:
    """Losses and their gradients."""
    found: dict[str, Tensor] = {}
    sequence = {"importance_sampling_level": "sequence", "epsilon_low": 0.05, "epsilon_high": 0.05}
    corrected = {"use_vllm": True, "importance_sampling_ratio": (x["old"] - x["rollout"]).exp().clamp(max=2.0)}
    cases: dict[str, dict[str, Any]] = {
        "grpo_sequence_mean": {"loss_type": "grpo"},
        "dr_grpo": {"loss_type": "dr_grpo"},
        "dapo": {"loss_type": "dapo", "epsilon_high": 0.28},
        "grpo_dual": {"loss_type": "dapo", "epsilon_high": 0.3, "delta": 1.5},
        "gspo": {"loss_type": "grpo", **sequence},
        "cispo": {"loss_type": "cispo", "epsilon_high": 1.2},
        "grpo_sequence_sum": {"loss_type": "luspo"},
        "grpo_kl": {"loss_type": "dapo", "beta": 0.1},
        "grpo_kl_importance_weighted": {"loss_type": "dapo", "beta": 0.1, "use_bias_correction_kl": True},
        "grpo_entropy": {"loss_type": "dapo", "entropy_coef": 0.01},
        "decoupled": {"loss_type": "dapo", "old": "old", **corrected},
    }
    for name, settings in cases.items():
        found |= grpo(name, x, **settings)
    return found | rloo(x)


def grpo(name: str, x: dict[str, Tensor], **settings: Any) -> dict[str, Tensor]:
    """`GRPOTrainer._compute_loss` and its gradient."""
    policy = x["policy"].clone().requires_grad_()
    trainer = stub(x, policy, **settings)
    inputs = padded(x) | {
        "advantages": x["advantages"],
        "old_per_token_logps": x[settings.get("old", "rollout")],
        "ref_per_token_logps": x["ref"],
        "num_items_in_batch": x["mask"].sum(),
        "importance_sampling_ratio": settings.get("importance_sampling_ratio"),
    }
    loss = GRPOTrainer._compute_loss(trainer, None, inputs)
    return {f"{name}/loss": loss, f"{name}/gradient": torch.autograd.grad(loss, policy)[0]}


def rloo(x: dict[str, Tensor]) -> dict[str, Tensor]:
    """`RLOOTrainer._compute_loss`: only its gradient on-policy, where its ratio of whole completions is 1."""
    policy = x["policy"].clone().requires_grad_()
    trainer = stub(x, policy)
    old = (x["policy"] * x["mask"]).sum(1)
    inputs = padded(x) | {"advantages": x["sequence_advantages"], "old_logps": old}
    loss = RLOOTrainer._compute_loss(trainer, None, inputs)
    return {"rloo/gradient": torch.autograd.grad(loss, policy)[0]}


def padded(x: dict[str, Tensor]) -> dict[str, Tensor]:
    """Ids that nobody reads, and the mask."""
    ids = torch.zeros_like(x["mask"], dtype=torch.long)
    return {"prompt_ids": ids, "prompt_mask": ids, "completion_ids": ids, "completion_mask": x["mask"]}


def stub(x: dict[str, Tensor], policy: Tensor, **settings: Any) -> SimpleNamespace:
    """What the losses read of a trainer."""
    args = SimpleNamespace(
        delta=settings.get("delta"),
        use_bias_correction_kl=settings.get("use_bias_correction_kl", False),
        steps_per_generation=1,
    )
    accelerator = SimpleNamespace(
        num_processes=1,
        sync_gradients=True,
        gather=lambda tensor: tensor,
        gather_for_metrics=lambda tensor: tensor,
        reduce=lambda tensor, **_: tensor,
    )
    return SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (policy, x["entropy"], None),
        _metrics={"train": defaultdict(list)},
        _entropy_bonus_enabled=bool(settings.get("entropy_coef")),
        accelerator=accelerator,
        args=args,
        model=SimpleNamespace(training=True),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level=settings.get("importance_sampling_level", "token"),
        beta=settings.get("beta", 0.0),
        loss_type=settings.get("loss_type"),
        epsilon_low=settings.get("epsilon_low", 0.2),
        epsilon_high=settings.get("epsilon_high", 0.2),
        use_vllm=settings.get("use_vllm", False),
        vllm_importance_sampling_correction=True,
        current_gradient_accumulation_steps=1,
        max_completion_length=int(x["max_tokens"]),
        use_adaptive_entropy=False,
        entropy_coef=settings.get("entropy_coef", 0.0),
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
