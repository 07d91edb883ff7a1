"""TensorBoard: `tensorboard --logdir runs` shows all runs."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ebbtide import config as configuration
from ebbtide.observe.sinks.base import SinkConfig, import_extra

__all__ = ["TensorBoardSink"]


class TensorBoardSink:
    """Writes event files below the run's folder.

    Source: torch.utils.tensorboard; here the writer is opened at the first step, so that a resumed run hides what an
    earlier part had logged beyond it.
    """

    class Config(SinkConfig):
        """Where and how often."""

        type: str = "tensorboard"
        folder: str = "tensorboard"
        """Below the run's folder."""
        flush_s: int = 10
        """Seconds after which what was logged is on disk at the latest."""

    def __init__(self, config: Config, *, folder: Path, recipe: Mapping[str, Any]) -> None:
        import_extra("tensorboard", "tensorboard")
        self._writer_class = import_extra("torch.utils.tensorboard", "tensorboard").SummaryWriter
        self._config = config
        self._folder = folder / config.folder
        self._recipe = recipe
        self._writer: Any = None
        self._is_closed = False

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """See `Sink.write`."""
        assert not self._is_closed, self._folder
        if self._writer is None:
            self._writer = self._writer_class(str(self._folder), purge_step=step, flush_secs=self._config.flush_s)
            rows = [f"| {key} | `{value!r}` |" for key, value in configuration.flatten(self._recipe)]
            self._writer.add_text("recipe", "\n".join(["| key | value |", "| --- | --- |", *rows]), step)
        for key, value in metrics.items():
            self._writer.add_scalar(key, value, step)

    def close(self) -> None:
        """See `Sink.close`."""
        self._is_closed = True
        if self._writer is not None:
            self._writer.close()
            self._writer = None
