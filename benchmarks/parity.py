"""ebbtide's advantages and losses against verl's and TRL's, on the same tensors: the largest difference of each.

Each peer runs in an environment of its own (`make bench-peers`); one that is not there gives null. The functions
compared are those meant to agree; where ebbtide means something else, docs/algorithms.md says what and why.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from _record import ROOT, Run
from safetensors.torch import load_file, save_file
from torch import Tensor

from ebbtide import plugins
from ebbtide.algorithms.base import LossInputs
from ebbtide.algorithms.correction import Correction, correct, effective_sample_ratio
from ebbtide.algorithms.reduction import Packed
from ebbtide.config import validate
from ebbtide.types import BatchCounts, TrainBatch

PEERS = {"verl": "verl_losses.py", "trl": "trl_losses.py"}
KL_COEF = 0.1
MAX_TOKENS = 32


@dataclass(frozen=True)
class Case:
    """The same batch, packed for ebbtide and padded for the peers.

    Attributes:
        batch: packed, in float64.
        padded: [B, C] or [B] each.
        token_index: [T] int64, where each token of the packed batch stands in a flattened [B, C]; -1 for prompts.
    """

    batch: TrainBatch
    padded: dict[str, Tensor]
    token_index: Tensor

    def pack(self, name: str) -> Tensor:
        """[T] of a padded [B, C], 0 on prompts."""
        return torch.where(self.token_index >= 0, self.padded[name].flatten()[self.token_index.clamp(min=0)], 0.0)

    def pad(self, values_T: Tensor) -> Tensor:
        """[B, C] float64 of a packed [T], 0 where not trained."""
        flat = torch.zeros(self.padded["mask"].numel(), dtype=torch.float64)
        trained_T = self.batch.loss_mask
        flat[self.token_index[trained_T]] = values_T.detach()[trained_T].double()
        return flat.view_as(self.padded["mask"])


def main() -> int:
    """Compare over several random batches."""
    run = Run("parity", __doc__, add_flags)
    num_batches = 2 if run.args.quick else 10
    differences: dict[str, dict[str, list[float]]] = {peer: {} for peer in PEERS}
    cases = [make_case(seed) for seed in range(num_batches)]
    mine = [ours(case) for case in cases]
    for peer, script in PEERS.items():
        if not is_installed(run.args.peers_python, peer):
            continue
        for key, theirs in ask(run.args.peers_python, script, cases).items():
            seed, name = key.split(":")
            differences[peer].setdefault(name, []).append(float((mine[int(seed)][name] - theirs).abs().max()))
    print_table(differences)
    for peer, found in differences.items():
        worst = [max(found[name][seed] for name in found) for seed in range(num_batches)] if found else None
        run.figure(f"max_abs_diff_{peer}", worst, "<= 1e-6")
        run.figure(f"num_functions_{peer}", len(found) if found else None)
    return run.finish()


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The peers' interpreter."""
    default = ROOT / ".venv-peers" / "bin" / "python"
    parser.add_argument("--peers-python", default=str(default), help="an interpreter that has verl and TRL")


def is_installed(python: str, peer: str) -> bool:
    """Whether the interpreter exists and knows the package."""
    if not Path(python).exists():
        return False
    command = [python, "-c", f"import importlib.util, sys; sys.exit(importlib.util.find_spec({peer!r}) is None)"]
    return subprocess.run(command, check=False).returncode == 0


def ask(python: str, script: str, cases: Sequence[Case]) -> dict[str, Tensor]:
    """What the peer makes of the batches, as `<batch>:<case>/<part>`."""
    with tempfile.TemporaryDirectory() as folder:
        inputs, outputs = Path(folder) / "inputs.safetensors", Path(folder) / "outputs.safetensors"
        batches = {
            f"{seed}:{name}": x.contiguous() for seed, case in enumerate(cases) for name, x in case.padded.items()
        }
        save_file(batches, inputs)
        command = [python, str(ROOT / "benchmarks" / "peers" / script), str(inputs), str(outputs)]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{script} failed:\n{done.stderr[-4000:]}")
        return load_file(outputs)


def print_table(differences: Mapping[str, Mapping[str, list[float]]]) -> None:
    """One row a function and part."""
    names = sorted({name for found in differences.values() for name in found})
    print(f"{'function / part':<40} " + " ".join(f"{peer:>10}" for peer in differences))
    for name in names:
        cells = (f"{max(found[name]):.1e}" if name in found else "-" for found in differences.values())
        print(f"{name:<40} " + " ".join(f"{cell:>10}" for cell in cells))


def make_case(seed: int, num_groups: int = 6, group_size: int = 4) -> Case:
    """Random log-probs, values and rewards of completions of 1 to 24 tokens; some tokens inside are not trained."""
    generator = torch.Generator().manual_seed(seed)
    B, C = num_groups * group_size, 24

    def field(mean: float, spread: float) -> Tensor:
        return mean + spread * torch.randn(B, C, generator=generator, dtype=torch.float64)

    lengths = torch.randint(1, C + 1, (B,), generator=generator)
    mask = (torch.arange(C) < lengths[:, None]) & (torch.rand(B, C, generator=generator) > 0.1)
    mask[:, 0] = True
    # Rewards are never 0, and no group agrees: what verl's GPG counts is then what the paper counts.
    rewards = 1 + torch.rand(B, generator=generator, dtype=torch.float64).float().double()
    last = torch.where(mask, torch.arange(C), -1).max(1).values
    token_rewards = torch.zeros(B, C, dtype=torch.float64)
    token_rewards[torch.arange(B), last] = rewards
    advantages_B = torch.randn(B, generator=generator, dtype=torch.float64)
    old = field(-2.0, 0.5)
    padded = {
        "mask": mask.double(),
        "policy": old + field(0.0, 0.3),
        "old": old,
        "rollout": old + field(0.0, 0.2),
        "ref": old + field(0.0, 0.4),
        "values": field(1.5, 0.4),
        "old_values": field(1.5, 0.4),
        "returns": field(1.5, 0.4),
        "entropy": field(1.0, 0.1),
        "advantages": advantages_B[:, None] * mask,
        "sequence_advantages": advantages_B,
        "token_rewards": token_rewards,
        "groups": torch.arange(B) // group_size,
        "max_tokens": torch.tensor(MAX_TOKENS),
    }
    return packed_case(padded, mask, last + 1, rewards)


def packed_case(padded: dict[str, Tensor], mask: Tensor, lengths: Tensor, rewards: Tensor) -> Case:
    """The packed twin: each completion, cut at its last trained token, after a prompt of one token."""
    B, C = mask.shape
    tokens = torch.ones(1, dtype=torch.long)
    sequences = [(tokens, torch.ones(n, dtype=torch.long), torch.zeros(n)) for n in lengths.tolist()]
    batch = TrainBatch.pack(sequences, group_ids=padded["groups"].tolist(), rewards=rewards.tolist())
    index_T = torch.cat([torch.cat([torch.tensor([-1]), b * C + torch.arange(int(lengths[b]))]) for b in range(B)])
    case = Case(batch, padded, index_T)
    batch = replace(
        batch,
        loss_mask=case.pack("mask") > 0,
        rollout_logprobs=case.pack("rollout"),
        old_logprobs=case.pack("old"),
        ref_logprobs=case.pack("ref"),
        values=case.pack("old_values"),
        returns=case.pack("returns"),
        advantages=case.pack("advantages"),
    )
    return Case(batch, padded, index_T)


def ours(case: Case) -> dict[str, Tensor]:
    """The same cases under the same names."""
    reward_kl = {"coef": KL_COEF}
    found = {
        **judged(case, "grpo", "grpo"),
        **judged(case, "dr_grpo", "dr_grpo"),
        **judged(case, "gpg", "gpg"),
        **judged(case, "reinforce_pp_baseline", "reinforce_pp_baseline"),
        **judged(case, "rloo", "rloo"),
        **judged(case, "rloo_kl", "rloo", reward_kl=reward_kl),
        **judged(case, "reinforce_pp", "reinforce_pp"),
        **judged(case, "reinforce_pp_discounted", "reinforce_pp", gamma=0.9),
        **judged(case, "reinforce_pp_kl", "reinforce_pp", reward_kl=reward_kl),
        **judged(case, "ppo", "ppo", lam=0.95),
        **judged(case, "ppo_discounted", "ppo", lam=0.95, gamma=0.9),
        **judged(case, "ppo_kl", "ppo", lam=0.95, reward_kl=reward_kl),
        **lost(case, "grpo_dual", "grpo", clip_high=0.3, clip_dual=1.5),
        **lost(case, "grpo_sequence_mean", "grpo", aggregation="sequence_mean"),
        **lost(case, "grpo_sequence_sum", "grpo", aggregation="sequence_sum"),
        **lost(case, "dr_grpo", "dr_grpo"),
        **lost(case, "dapo", "dapo"),
        **lost(case, "gspo", "gspo", clip_low=0.05, clip_high=0.05),
        **lost(case, "cispo", "cispo", max_ratio=1.2),
        **lost(case, "gpg", "gpg"),
        **lost(case, "grpo_kl", "grpo", clip_high=0.2, kl={"coef": 0.1}),
        **lost(case, "grpo_kl_importance_weighted", "grpo", kl={"coef": 0.1, "gradient": "importance_weighted"}),
        **lost(case, "grpo_entropy", "grpo", entropy_coef=0.01),
        **lost(case, "bypass_weighed", "rloo", correction={"weight": "token"}),
        **critic(case),
        **corrections(case),
    }
    for name, settings in {
        "kl_k1": {"estimator": "k1"},
        "kl_k2": {"estimator": "k2"},
        "kl_k3": {},
        "kl_k3_straight_through": {"gradient": "straight_through"},
    }.items():
        alone = replace(case, batch=replace(case.batch, advantages=torch.zeros_like(case.batch.advantages)))
        found |= lost(alone, name, "grpo", kl={"coef": 1.0, **settings})
    on_policy = replace(case, batch=replace(case.batch, rollout_logprobs=case.pack("policy")))
    found["rloo/gradient"] = lost(on_policy, "rloo", "rloo")["rloo/gradient"]
    return found


def make(name: str, settings: Mapping[str, Any]) -> Any:
    """An algorithm from its name and settings."""
    plugin = plugins.load("algorithms", name)
    return plugin(validate(plugin.Config, {"type": name, **settings}))


def counts_of(case: Case) -> BatchCounts:
    """Of the batch as the global one."""
    return case.batch.counts(MAX_TOKENS)


def judged(case: Case, name: str, algorithm_name: str, **settings: Any) -> dict[str, Tensor]:
    """Advantages, and returns where there is a critic."""
    algorithm, batch = make(algorithm_name, settings), case.batch
    judge = algorithm._judge(batch.rewards.double(), batch.group_ids.long()).float()
    prepared, _ = algorithm.prepare(replace(batch, advantages=judge[batch.sequence_ids]), counts_of(case))
    found = {f"{name}/advantages": case.pad(prepared.advantages)}
    if algorithm_name == "ppo":
        found[f"{name}/returns"] = case.pad(prepared.returns)
    return found


def lost(case: Case, name: str, algorithm_name: str, **settings: Any) -> dict[str, Tensor]:
    """Loss and gradient."""
    policy_T = case.pack("policy").requires_grad_()
    inputs = LossInputs(case.batch, counts_of(case), policy_T, entropy=case.pack("entropy"))
    return with_gradient(case, name, make(algorithm_name, settings).loss(inputs)[0], policy_T)


def critic(case: Case) -> dict[str, Tensor]:
    """The critic's loss and gradient."""
    values_T = case.pack("values").requires_grad_()
    inputs = LossInputs(case.batch, counts_of(case), case.pack("policy"), values=values_T)
    return with_gradient(case, "critic", make("ppo", {}).critic_loss(inputs)[0], values_T)


def corrections(case: Case) -> dict[str, Tensor]:
    """Weights, effective samples, and a decoupled loss."""
    packed, found = Packed.of(case.batch), {}
    log_ratio_T = packed.trained(case.pack("old") - case.pack("rollout"))
    for name, config in {
        "token": Correction(weight="token"),
        "sequence": Correction(weight="sequence"),
        "masked": Correction(weight="token", max_weight=1.25, reject="token", reject_below=0.8, reject_above=1.25),
    }.items():
        weights_T, _ = correct(log_ratio_T, packed, config)
        found[f"correction_{name}/weights"] = case.pad(weights_T)
        found[f"correction_{name}/effective"] = torch.tensor(effective_sample_ratio(weights_T, packed).value)
    algorithm = make("grpo", {"old_policy": "recomputed", "correction": {"weight": "token"}})
    prepared, _ = algorithm.prepare(case.batch, counts_of(case))
    policy_T = case.pack("policy").requires_grad_()
    loss, _ = algorithm.loss(LossInputs(prepared, counts_of(case), policy_T))
    return found | with_gradient(case, "decoupled", loss, policy_T)


def with_gradient(case: Case, name: str, loss: Tensor, leaf_T: Tensor) -> dict[str, Tensor]:
    """The loss and its gradient, padded."""
    (gradient_T,) = torch.autograd.grad(loss, leaf_T)
    return {f"{name}/loss": loss.detach(), f"{name}/gradient": case.pad(gradient_T)}


if __name__ == "__main__":
    sys.exit(main())
