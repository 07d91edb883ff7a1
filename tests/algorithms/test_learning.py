"""Each algorithm teaches a table of logits three tokens, from rewards alone: the whole path, without an engine."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ebbtide import plugins
from ebbtide.algorithms.base import Algorithm, LossInputs, Needs, check_batch
from ebbtide.config import validate
from ebbtide.types import Completion, Group, Prompt, StopReason, TrainBatch

TARGET = torch.tensor([2, 0, 3])
NUM_GROUPS, GROUP_SIZE, STEPS = 8, 6, 60
SETTINGS: dict[str, dict[str, Any]] = {
    "sft": {"min_reward": 0.6},
    "rloo": {"reward_kl": {"coef": 0.01}, "correction": {"weight": "sequence"}},
    "reinforce_pp": {"reward_kl": {"coef": 0.01, "target_nats": 1.0}},
    "dapo": {"max_refills": 1, "entropy_coef": 0.001},
    "gspo": {"old_policy": "recomputed", "correction": {"weight": "token"}, "kl": {"coef": 0.001}},
}


@dataclass(frozen=True)
class Table:
    """A policy and a critic over 3 positions and 4 tokens, which know nothing of what came before."""

    logits: Tensor = field(default_factory=lambda: torch.zeros(3, 4, requires_grad=True))
    values: Tensor = field(default_factory=lambda: torch.zeros(3, requires_grad=True))

    def sample(self) -> list[Group]:
        """Scored groups: a completion earns the share of tokens that are right."""
        prompt = Prompt(0, torch.tensor([1]), {"prompt": ""})
        log_probs = self.logits.detach().log_softmax(-1)
        tokens = torch.multinomial(log_probs.exp(), NUM_GROUPS * GROUP_SIZE, replacement=True).T
        rewards = (tokens == TARGET).float().mean(1)
        completions = [
            Completion(i, ids, log_probs[torch.arange(3), ids], torch.zeros(3, dtype=torch.int32), StopReason.EOS)
            for i, ids in enumerate(tokens)
        ]
        starts = range(0, len(completions), GROUP_SIZE)
        return [
            Group(prompt, tuple(completions[s : s + GROUP_SIZE]), rewards=rewards[s : s + GROUP_SIZE]) for s in starts
        ]

    def expected_reward(self) -> float:
        """Mean probability of the right tokens."""
        return float(self.logits.detach().softmax(-1)[torch.arange(3), TARGET].mean())


def pack(groups: Sequence[Group], algorithm: Algorithm) -> TrainBatch:
    """Judged groups, packed, with the log-probs and values that the algorithm needs."""
    judged = algorithm.advantages(groups)
    pairs = [(group, c, g) for g, group in enumerate(groups) for c in range(GROUP_SIZE)]
    batch = TrainBatch.pack(
        [
            (group.prompt.token_ids, group.completions[c].token_ids, group.completions[c].logprobs)
            for group, c, _ in pairs
        ],
        advantages=[judged[g][c] for _, c, g in pairs],
        group_ids=[g for *_, g in pairs],
        rewards=[float(group.rewards[c]) for group, c, _ in pairs if group.rewards is not None],
    )
    uniform_T = torch.where(batch.loss_mask, -torch.log(torch.tensor(4.0)), 0.0)
    return replace(batch, ref_logprobs=uniform_T, old_logprobs=batch.rollout_logprobs)


def learn(algorithm: Algorithm) -> float:
    """Train a table, and say how good it became."""
    table = Table()
    optimizer = torch.optim.Adam([table.logits, table.values], lr=0.1)
    for _ in range(STEPS):
        groups = [group for group in table.sample() if algorithm.keep(group)]
        if not groups:
            continue
        batch = pack(groups, algorithm)
        position_T = (batch.position_ids - 1).clamp(min=0)
        if Needs.VALUES in algorithm.needs:
            batch = replace(batch, values=table.values.detach()[position_T])
        check_batch(batch)
        counts = batch.counts(3)
        batch, _ = algorithm.prepare(batch, counts)
        log_probs_TV = table.logits.log_softmax(-1)[position_T]
        policy_T = log_probs_TV.gather(1, batch.tokens.clamp(max=3)[:, None])[:, 0]
        entropy_T = -(log_probs_TV.exp() * log_probs_TV).sum(-1)
        inputs = LossInputs(batch, counts, policy_T, entropy=entropy_T, values=table.values[position_T])
        loss, _ = algorithm.loss(inputs)
        if Needs.VALUES in algorithm.needs:
            loss = loss + algorithm.critic_loss(inputs)[0]  # type: ignore[attr-defined]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return table.expected_reward()


CASES = [
    *(pytest.param(name, {}, id=name) for name in plugins.names("algorithms") if name != "sft"),
    *(pytest.param(name, settings, id=f"{name}-with-settings") for name, settings in SETTINGS.items()),
]


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_it_learns(name: str, settings: dict[str, Any]) -> None:
    plugin = plugins.load("algorithms", name)
    assert Table().expected_reward() == 0.25
    assert learn(plugin(validate(plugin.Config, {"type": name, **settings}))) > 0.85
