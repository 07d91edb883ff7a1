"""One push from the loop's side: the sender and the rollout run together, and neither outlives the other's failure."""

import asyncio
from collections.abc import Iterable
from typing import Protocol

from ebbtide.errors import WeightSyncError
from ebbtide.weightsync.base import NamedTensor, PushReport, WeightReceiver, WeightTransport

__all__ = ["TakesWeights", "push"]


class TakesWeights(Protocol):
    """What a push needs of a rollout."""

    async def receive_weights(self, version: int, source: WeightReceiver) -> None:
        """Replace all weights by those of `version`."""
        ...


async def push(
    engine_weights: Iterable[NamedTensor], transport: WeightTransport, rollout: TakesWeights, version: int
) -> PushReport:
    """Send the weights while the rollout receives them; returns when the rollout has every one.

    Args:
        engine_weights: read once, in order; at most a bucket of them is alive at a time.
        transport: both halves; the rollout is given it as its source.
        rollout: who receives.
        version: the policy version that these weights are.

    Raises:
        WeightSyncError: the push broke off; the rollout's weights are torn until the next complete push.
        Exception: the rollout refused before the push began (asleep, say); its error is raised as it is.
    """
    try:
        async with asyncio.TaskGroup() as group:
            sending = group.create_task(transport.send(engine_weights, version), name=f"send weights {version}")
            group.create_task(rollout.receive_weights(version, transport), name=f"receive weights {version}")
    except BaseExceptionGroup as failures:
        raise _root(failures) from _root(failures).__cause__
    return sending.result()


def _root(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """The failure that explains the others: one that is not the transport's echo of the other side, if there is one."""
    errors = failures.exceptions
    return next((error for error in errors if not isinstance(error, WeightSyncError)), errors[0])
