"""FSDP2 over a device mesh; on one device nothing is sharded and the same code runs without a process group."""

from collections.abc import Iterator

from torch import Tensor, nn

from ebbtide.algorithms.base import Needs
from ebbtide.data.microbatch import Microbatch, Microbatches, spread
from ebbtide.engines.base import EngineSetting, Finish
from ebbtide.engines.mesh_engine import MeshConfig, MeshEngine

__all__ = ["FSDPEngine"]


class FSDPEngine(MeshEngine):
    """The whole model on every group of ranks, sharded within it."""

    class Config(MeshConfig):
        """`[engine] type = "fsdp"`."""

        type: str = "fsdp"

    def __init__(self, config: "FSDPEngine.Config", setting: EngineSetting) -> None:
        super().__init__(config, setting)
        (self._policy,) = self._parts

    def _run_microbatches(self, microbatches: Microbatches, finish: Finish, needs: Needs) -> None:
        temperature, want_entropy = self.setting.temperature, Needs.ENTROPY in needs
        with self._watching_weights():
            for microbatch in microbatches:
                self._sync_gradients(self._policy, is_last=microbatch.index == len(microbatches) - 1)
                # Nothing names the statistics or the loss, so that both die with their graph before the next forward.
                stats = self._policy(microbatch.batch, temperature=temperature, want_entropy=want_entropy)
                loss = finish(microbatch, stats)
                del stats
                loss.backward()
                del loss

    def _score(self, pieces: Microbatches) -> Iterator[tuple[Microbatch, Tensor]]:
        for microbatch in pieces:
            stats = self._policy(microbatch.batch, temperature=self.setting.temperature)
            yield microbatch, spread(stats.logprobs, microbatch.batch.loss_mask)

    def _trained_weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self._weights_in_forward[0].trained()
