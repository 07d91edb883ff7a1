"""What every algorithm must hold, over all files of the folder and over the settings that change its path."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ebbtide import plugins
from ebbtide.algorithms.base import Algorithm, LossInputs, Needs, check_groups
from ebbtide.config import validate
from ebbtide.errors import CheckpointError, DataError
from ebbtide.observe import metrics as metric_table
from ebbtide.types import BatchCounts, Ratio, TrainBatch
from tests.algorithms.cases import MAX_TOKENS, batch_of, group_of, random_batch

NAMES = plugins.names("algorithms")
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sequence_mean": {"aggregation": "sequence_mean"},
    "constant": {"aggregation": "constant"},
    "regularized": {"kl": {"coef": 0.1}, "entropy_coef": 0.01},
    "reward_kl": {"reward_kl": {"coef": 0.1, "target_nats": 0.1}},
    "decoupled": {"old_policy": "recomputed", "correction": {"weight": "sequence_mean", "reject": "token"}},
    "bypass_rejection": {"correction": {"reject": "sequence_mean", "reject_above": 1.2, "veto_below": 0.5}},
}


def _cases() -> list[Any]:
    """Each algorithm with each variant whose settings it has."""
    found = []
    for name in NAMES:
        known = plugins.load("algorithms", name).Config.model_fields
        for variant, settings in VARIANTS.items():
            if set(settings) <= set(known) and not (name == "sft" and variant == "constant"):
                found.append(pytest.param(name, settings, id=f"{name}-{variant}"))
    return found


every_case = pytest.mark.parametrize(("name", "settings"), _cases())
every_name = pytest.mark.parametrize("name", NAMES)


def make(name: str, settings: Mapping[str, Any] | None = None) -> Algorithm:
    plugin = plugins.load("algorithms", name)
    algorithm: Algorithm = plugin(validate(plugin.Config, {"type": name, **(settings or {})}))
    return algorithm


@dataclass(frozen=True)
class Outcome:
    """A whole step's loss, its gradients in the packed order of the batch, and its metrics."""

    loss: Tensor
    gradients: dict[str, Tensor]
    metrics: dict[str, Ratio]


def run(
    algorithm: Algorithm, batch: TrainBatch, policy: Tensor, parts: Sequence[Sequence[int]] | None = None
) -> Outcome:
    """Prepare the batch, then take it in the given parts; policy, entropy and values each have a gradient."""
    counts = batch.counts(MAX_TOKENS)
    prepared, metrics = algorithm.prepare(batch, counts)
    found = dict(metrics)
    leaves = {"policy": policy.detach().clone().requires_grad_()}
    if Needs.ENTROPY in algorithm.needs:
        leaves["entropy"] = (0.5 * policy.detach() ** 2).requires_grad_()
    if Needs.VALUES in algorithm.needs:
        assert batch.values is not None
        leaves["values"] = (batch.values + 0.1).requires_grad_()
    total = torch.zeros((), dtype=policy.dtype)
    for part in parts or [range(batch.num_sequences)]:
        for share, share_metrics in shares(algorithm, prepared, counts, leaves, list(part)):
            total = total + share
            for key, ratio in share_metrics.items():
                found[key] = found[key] + ratio if key in found else ratio
    gradients = torch.autograd.grad(total, list(leaves.values()))
    return Outcome(total.detach(), dict(zip(leaves, gradients, strict=True)), found)


def shares(
    algorithm: Algorithm, batch: TrainBatch, counts: BatchCounts, leaves: Mapping[str, Tensor], part: Sequence[int]
) -> list[tuple[Tensor, Mapping[str, Ratio]]]:
    """The losses of one microbatch: the policy's, and the critic's where there is one."""

    def selected(leaf: Tensor) -> Tensor:
        return replace(batch, advantages=leaf).select(part).advantages

    picked = {name: selected(leaf) for name, leaf in leaves.items()}
    inputs = LossInputs(batch.select(part), counts, picked["policy"], entropy=picked.get("entropy"))
    found = [algorithm.loss(inputs)]
    if "values" in picked:
        found.append(algorithm.critic_loss(replace(inputs, values=picked["values"])))  # type: ignore[attr-defined]
    return found


def assert_same(found: Outcome, expected: Outcome) -> None:
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-10, atol=1e-12)
    for name, gradient in expected.gradients.items():
        torch.testing.assert_close(found.gradients[name], gradient, rtol=1e-10, atol=1e-12)
    assert found.metrics.keys() == expected.metrics.keys()
    for key, ratio in expected.metrics.items():
        assert found.metrics[key].value == pytest.approx(ratio.value, rel=1e-9, abs=1e-12), key


@every_name
def test_the_file_is_a_plugin(name: str) -> None:
    plugin = plugins.load("algorithms", name)
    assert plugin.Config().type == name
    assert "Source:" in (plugin.__doc__ or "")
    algorithm = make(name)
    assert algorithm.max_refills >= 0
    assert isinstance(algorithm.keep(group_of([0.0, 1.0])), bool)


@every_case
def test_metrics_are_in_the_table(name: str, settings: dict[str, Any]) -> None:
    batch, policy = random_batch()
    outcome = run(make(name, settings), batch, policy)
    metric_table.check(outcome.metrics)
    assert all(ratio.value is None or math.isfinite(ratio.value) for ratio in outcome.metrics.values())
    assert not any(ratio.total.requires_grad or ratio.count.requires_grad for ratio in outcome.metrics.values())


@every_case
def test_the_loss_is_a_live_scalar(name: str, settings: dict[str, Any]) -> None:
    batch, policy = random_batch()
    outcome = run(make(name, settings), batch, policy)
    assert outcome.loss.shape == ()
    assert outcome.loss.isfinite()
    for gradient in outcome.gradients.values():
        assert gradient.isfinite().all()
        assert gradient[batch.loss_mask].any()
        assert not gradient[~batch.loss_mask].any()


@every_case
def test_untrained_tokens_change_nothing(name: str, settings: dict[str, Any]) -> None:
    batch, policy = random_batch()  # NaN stands there
    expected = run(make(name, settings), batch, policy)
    other: dict[str, Tensor] = {}
    for item in fields(batch):
        value = getattr(batch, item.name)
        if isinstance(value, Tensor) and value.is_floating_point() and len(value) == batch.num_tokens:
            other[item.name] = torch.where(batch.loss_mask, value, 123.0)
    tokens = torch.where(batch.loss_mask, batch.tokens, batch.tokens + 7)
    other_policy = torch.where(batch.loss_mask, policy.detach(), -77.0)
    assert_same(run(make(name, settings), replace(batch, tokens=tokens, **other), other_policy), expected)


@every_case
def test_the_order_of_sequences_changes_nothing(name: str, settings: dict[str, Any]) -> None:
    batch, policy = random_batch()
    expected = run(make(name, settings), batch, policy)
    order = torch.randperm(batch.num_sequences).tolist()
    moved = replace(batch, advantages=torch.arange(batch.num_tokens)).select(order).advantages
    outcome = run(make(name, settings), batch.select(order), policy.detach()[moved])
    back = {
        key: torch.empty_like(gradient).index_copy(0, moved, gradient) for key, gradient in outcome.gradients.items()
    }
    assert_same(replace(outcome, gradients=back), expected)


@every_case
@pytest.mark.parametrize("num_parts", [2, 7])
def test_microbatches_change_nothing(name: str, settings: dict[str, Any], num_parts: int) -> None:
    batch, policy = random_batch()
    parts = [range(batch.num_sequences)[start::num_parts] for start in range(num_parts)]
    expected = run(make(name, settings), batch, policy)
    assert_same(run(make(name, settings), batch, policy, parts), expected)


@every_case
def test_packing_changes_nothing(name: str, settings: dict[str, Any]) -> None:
    batch, policy = random_batch()
    expected = run(make(name, settings), batch, policy)
    alone = [[b] for b in range(batch.num_sequences)]
    assert_same(run(make(name, settings), batch, policy, alone), expected)


@every_case
def test_ranks_change_nothing(name: str, settings: dict[str, Any]) -> None:
    """Each rank sums its own microbatches under the global counts; gradients and metrics are then added."""
    batch, policy = random_batch()
    expected = run(make(name, settings), batch, policy)
    counts = batch.counts(MAX_TOKENS)
    algorithm = make(name, settings)
    prepared, metrics = algorithm.prepare(batch, counts)
    middle = batch.num_sequences // 2
    found: dict[str, Ratio] = dict(metrics)
    gradients: list[dict[str, Tensor]] = []
    losses = []
    for rank in (range(middle), range(middle, batch.num_sequences)):
        leaves = {"policy": policy.detach().clone().requires_grad_()}
        if "entropy" in expected.gradients:
            leaves["entropy"] = (0.5 * policy.detach() ** 2).requires_grad_()
        if "values" in expected.gradients:
            assert batch.values is not None
            leaves["values"] = (batch.values + 0.1).requires_grad_()
        replica = make(name, settings)  # a rank has an object of its own, which never saw `prepare`
        pieces = [
            piece for part in (rank[0::2], rank[1::2]) for piece in shares(replica, prepared, counts, leaves, part)
        ]
        total = torch.stack([share for share, _ in pieces]).sum()
        losses.append(total.detach())
        gradients.append(dict(zip(leaves, torch.autograd.grad(total, list(leaves.values())), strict=True)))
        for _, share_metrics in pieces:
            for key, ratio in share_metrics.items():
                found[key] = found[key] + ratio if key in found else ratio
    summed = {key: gradients[0][key] + gradients[1][key] for key in expected.gradients}
    assert_same(Outcome(losses[0] + losses[1], summed, found), expected)


@every_case
def test_equal_rewards_give_no_advantage(name: str, settings: dict[str, Any]) -> None:
    if name == "sft":
        pytest.skip("a demonstration is learned whatever the others earn")
    algorithm = make(name, {key: value for key, value in settings.items() if key != "reward_kl"})
    groups = [group_of([0.1] * 3, index=g) for g in range(2)]
    judged = [a for group in algorithm.advantages(groups) for a in group]
    assert not any(a.any() for a in judged)
    batch, _ = random_batch(lengths=(1,) * 6)
    values_T = torch.where(batch.loss_mask, 0.1, 0.0)  # a critic that foresees this reward
    batch = replace(
        batch,
        rewards=torch.full((6,), 0.1),
        advantages=torch.stack(judged)[batch.sequence_ids],
        old_logprobs=batch.rollout_logprobs,
        values=values_T,
    )
    prepared, _ = algorithm.prepare(batch, batch.counts(MAX_TOKENS))
    assert prepared.advantages[batch.loss_mask].tolist() == pytest.approx([0.0] * 6, abs=1e-12)


@every_case
@pytest.mark.parametrize("lengths", [(1, 1, 1), (1,), (1, 0, 1), (0, 0, 3), (200, 1, 0)])
def test_short_and_empty_completions(name: str, settings: dict[str, Any], lengths: tuple[int, ...]) -> None:
    batch, policy = random_batch(lengths=lengths)
    outcome = run(make(name, settings), batch, policy)
    assert outcome.loss.isfinite()
    assert all(gradient.isfinite().all() for gradient in outcome.gradients.values())
    assert all(ratio.value is None or math.isfinite(ratio.value) for ratio in outcome.metrics.values())


@every_case
def test_an_empty_completion_changes_nothing(name: str, settings: dict[str, Any]) -> None:
    batch, policy = random_batch(lengths=(3, 1, 4, 0))
    expected = run(make(name, settings), batch.select([0, 1, 2]), policy.detach()[: int(batch.cu_seqlens[3])])
    outcome = run(make(name, settings), batch, policy)
    cut = {key: gradient[: int(batch.cu_seqlens[3])] for key, gradient in outcome.gradients.items()}
    assert_same(replace(outcome, gradients=cut), expected)


@every_case
@pytest.mark.parametrize("distance", [30.0, -30.0, 1e4, -1e4])
def test_extreme_ratios_stay_finite(name: str, settings: dict[str, Any], distance: float) -> None:
    batch, _ = random_batch()
    single = {
        item.name: getattr(batch, item.name).float()
        for item in fields(batch)
        if isinstance(getattr(batch, item.name), Tensor) and getattr(batch, item.name).is_floating_point()
    }
    batch = replace(batch, **single)
    assert batch.old_logprobs is not None
    old_T = batch.old_logprobs
    outcome = run(make(name, settings), replace(batch, rollout_logprobs=old_T - distance / 3), old_T + distance)
    assert outcome.loss.isfinite()
    assert all(gradient.isfinite().all() for gradient in outcome.gradients.values())
    assert all(ratio.value is None or math.isfinite(ratio.value) for ratio in outcome.metrics.values())


@every_case
def test_the_loss_neither_waits_for_its_device_nor_leaves_it(name: str, settings: dict[str, Any]) -> None:
    """On tensors without values, asking for a value and mixing with the host's tensors both raise."""
    algorithm = make(name, settings)
    host_batch, _ = random_batch()
    counts = host_batch.counts(MAX_TOKENS)
    prepared, _ = algorithm.prepare(host_batch, counts)
    batch = prepared.to(torch.device("meta"))
    leaf = torch.zeros(batch.num_tokens, device="meta", requires_grad=True)
    losses = [algorithm.loss(LossInputs(batch, counts, leaf, entropy=leaf))]
    if Needs.VALUES in algorithm.needs:
        losses.append(algorithm.critic_loss(LossInputs(batch, counts, leaf, values=leaf)))  # type: ignore[attr-defined]
    for loss, metrics in losses:
        assert all(gradient.is_meta for gradient in torch.autograd.grad(loss, leaf))
        assert all(ratio.total.is_meta and ratio.count.is_meta for ratio in metrics.values())


@every_name
def test_one_advantage_a_completion(name: str) -> None:
    groups = [group_of([1.0, 0.0, 2.0], lengths=[2, 5, 1]), group_of([0.0, 0.0])]
    plugin = plugins.load("algorithms", name)
    check_groups(groups, plugin.Config.min_group_size)
    found = make(name).advantages(groups)
    assert [len(group) for group in found] == [3, 2]
    for group, judged in zip(groups, found, strict=True):
        for completion, advantage in zip(group.completions, judged, strict=True):
            assert advantage.dtype == torch.float32
            assert advantage.shape in ((), completion.token_ids.shape)
    assert make(name).advantages([]) == []


@every_name
def test_bad_groups_are_refused(name: str) -> None:
    minimum = plugins.load("algorithms", name).Config.min_group_size
    for reward in (math.nan, math.inf):
        with pytest.raises(DataError, match=r"groups\[1\]\.rewards=.*finite"):
            make(name).advantages([group_of([1.0, 0.0]), group_of([1.0, reward])])
    with pytest.raises(DataError, match=r"groups\[0\]\.rewards=None"):
        make(name).advantages([replace(group_of([1.0, 0.0]), rewards=None)])
    if minimum > 1:
        with pytest.raises(DataError, match=rf"groups\[0\]\.completions=1: needs at least {minimum}"):
            make(name).advantages([group_of([1.0])])


@every_case
def test_the_resolved_configuration_says_the_same(name: str, settings: dict[str, Any]) -> None:
    plugin = plugins.load("algorithms", name)
    given = validate(plugin.Config, {"type": name, **settings})
    assert validate(plugin.Config, given.model_dump(mode="json")) == given


@every_name
def test_a_group_does_not_reach_another(name: str) -> None:
    if name == "gpg":
        pytest.skip("its scale counts the groups that have contrast, which is a fact of the batch")
    first = make(name).advantages([group_of([1.0, 0.0])])[0]
    both = make(name).advantages([group_of([1.0, 0.0]), group_of([9.0, -9.0, 4.0])])[0]
    assert [float(a) for a in both] == pytest.approx([float(a) for a in first])


@every_case
def test_state_goes_through_a_checkpoint(name: str, settings: dict[str, Any]) -> None:
    algorithm = make(name, settings)
    batch, policy = random_batch()
    run(algorithm, batch, policy)
    state = algorithm.state()
    assert all(isinstance(value, int | float | str) for value in state.values())
    resumed = make(name, settings)
    resumed.load_state(state)
    assert resumed.state() == state
    with pytest.raises(CheckpointError, match=r"algorithm\.state"):
        resumed.load_state({"foreign": 1.0})


@every_case
def test_the_batch_given_is_not_written_to(name: str, settings: dict[str, Any]) -> None:
    batch, policy = random_batch()
    names = [item.name for item in fields(batch) if isinstance(getattr(batch, item.name), Tensor)]
    before = {item: getattr(batch, item).clone() for item in names}
    run(make(name, settings), batch, policy)
    for item, value in before.items():
        assert torch.equal(getattr(batch, item).nan_to_num(), value.nan_to_num()), item


def test_a_positive_advantage_raises_the_log_prob() -> None:
    """On-policy, each algorithm's gradient pushes a praised token up and a blamed one down."""
    for name in NAMES:
        batch = batch_of([[-1.0], [-1.0]], advantages=[1.0, 1.0 if name == "sft" else -1.0])
        policy = batch.rollout_logprobs.clone().requires_grad_()
        loss, _ = make(name).loss(LossInputs(batch, batch.counts(MAX_TOKENS), policy))
        (gradient,) = torch.autograd.grad(loss, policy)
        up, down = gradient[batch.loss_mask].tolist()
        assert up < 0, name
        assert (down > 0) == (name != "sft"), name
