"""With each way to keep a graph, or to lose it, put back, the contract's checks go red."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor, nn

from ebbtide.algorithms.base import LossInputs, Needs
from ebbtide.data.microbatch import spread
from ebbtide.engines import base
from ebbtide.engines.base import MicrobatchOutput
from ebbtide.errors import EngineError
from ebbtide.models.policy import Policy
from ebbtide.types import Ratio
from tests.contracts.engines import Mesh, NestedLoss, check_leaves_nothing, equal_batch, make_engine, run, setting
from tests.multiprocess import RankFailedError

MESHES = [Mesh("fsdp", 1), Mesh("pipeline", 2, {"pp": 2})]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_attached_outputs_are_seen(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "seal", lambda output: output)
    with pytest.raises(AssertionError, match="holds"):
        check_leaves_nothing(mesh, (8, 12))


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_a_detach_of_the_top_level_alone_is_seen(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    def shallow(output: MicrobatchOutput) -> MicrobatchOutput:
        entropy = None if output.entropy is None else output.entropy.detach()
        return replace(output, loss=output.loss.detach(), logprobs=output.logprobs.detach(), entropy=entropy)

    monkeypatch.setattr(base, "seal", shallow)
    with pytest.raises(AssertionError, match="holds"):
        check_leaves_nothing(mesh, (8, 12))


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_a_detach_before_the_loss_is_seen(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    original = spread

    def detached(values: Tensor, mask: Tensor) -> Tensor:
        return original(values.detach(), mask)

    monkeypatch.setattr(base, "spread", detached)
    with pytest.raises((EngineError, RankFailedError), match="does not require grad, so its backward would train"):
        check_leaves_nothing(mesh, (2, 3))


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_a_detach_between_weights_and_loss_is_seen(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head still learns, and the loss curve still falls."""
    original = Policy._hidden

    def detached(self: Policy, *args: Any) -> Tensor:
        hidden = original(self, *args)
        return hidden.detach() if self.span.is_last else hidden

    monkeypatch.setattr(Policy, "_hidden", detached)
    with pytest.raises((EngineError, RankFailedError), match="does not reach"):
        check_leaves_nothing(mesh, (2, 3), activation_checkpointing=True)


def test_a_detach_within_an_earlier_stage_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last stage's loss reaches what it received, and would not notice."""
    original = nn.Embedding.forward
    monkeypatch.setattr(nn.Embedding, "forward", lambda self, ids: original(self, ids).detach())
    mesh = Mesh("pipeline", 2, {"pp": 2})
    with pytest.raises(RankFailedError, match=r"stages\[0\].output"):
        check_leaves_nothing(mesh, (2, 3))


def test_an_algorithm_that_detaches_is_named() -> None:
    class Detaching:
        needs = Needs.NOTHING

        def loss(self, inputs: LossInputs) -> tuple[Tensor, Mapping[str, Ratio]]:
            return inputs.policy_logprobs.detach().sum(), {}

    engine = make_engine(Mesh("fsdp", 1), setting())
    with pytest.raises(EngineError, match="the algorithm detached them"):
        engine.forward_backward(equal_batch(2), Detaching())


def test_a_kept_receive_buffer_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """One buffer per microbatch for the whole batch, as torch's own stages keep them."""
    from ebbtide.engines import links

    original = links.Links.take

    def kept(self: Any, message: Any) -> Tensor:
        buffer = original(self, message)
        self.__dict__.setdefault("kept", []).append(buffer)
        return buffer

    monkeypatch.setattr(links.Links, "take", kept)
    with pytest.raises(AssertionError, match=r"holds|keeps receive buffers"):
        check_leaves_nothing(Mesh("pipeline", 2, {"pp": 2}), (8, 12))


@pytest.mark.slow
def test_gradients_are_the_same_whether_outputs_are_sealed_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def norm(_: int) -> float:
        engine = make_engine(Mesh("fsdp", 1), setting())
        engine.forward_backward(equal_batch(4), NestedLoss())
        return engine.optim_step().grad_norm

    sealed = run(Mesh("fsdp", 1), norm)
    monkeypatch.setattr(base, "seal", lambda output: output)
    assert run(Mesh("fsdp", 1), norm) == sealed
