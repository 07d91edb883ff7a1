"""Weights & Biases, as the extra `wandb`."""

import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from ebbtide.errors import ConfigError, problem
from ebbtide.observe.sinks.base import SinkConfig, import_extra

__all__ = ["WandbSink"]


class WandbSink:
    """One wandb run a run folder; a resumed run goes on in the same one.

    Source: wandb's `init` and `Run.log`; here a failure becomes an OSError, which does not end the training run.
    """

    class Config(SinkConfig):
        """Which project, and how."""

        type: str = "wandb"
        project: str = "ebbtide"
        """The project that the run belongs to."""
        entity: str | None = None
        """User or team; None takes the account's own."""
        group: str | None = None
        """Runs of one group are shown together; None leaves it alone."""
        tags: tuple[str, ...] = ()
        """Labels of the run."""
        mode: Literal["online", "offline"] = "online"
        """`offline` writes below the run's folder, for `wandb sync` later."""

    def __init__(self, config: Config, *, folder: Path, recipe: Mapping[str, Any]) -> None:
        self._wandb = import_extra("wandb", "wandb")
        self._id_file = folder / "wandb-id"
        try:
            self._run: Any = self._wandb.init(
                project=config.project,
                entity=config.entity,
                group=config.group,
                tags=list(config.tags),
                mode=config.mode,
                name=str(recipe.get("name", folder.name)),
                id=self._run_id(),
                resume="allow" if config.mode == "online" else None,
                dir=str(folder),
                config=dict(recipe),
                settings=self._wandb.Settings(silent=True, console="off", x_disable_stats=True),
            )
        except self._wandb.errors.Error as error:
            remedy = "Log in by `wandb login`, or set mode = 'offline'"
            raise ConfigError(
                problem("observe.sinks.mode", config.mode, f"wandb cannot begin: {error}", remedy)
            ) from error
        self._pending: tuple[int, dict[str, float]] | None = None

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """See `Sink.write`. wandb takes each step once, so that a step is sent when the next one comes."""
        assert self._run is not None, self._id_file
        if self._pending is not None and self._pending[0] == step:
            self._pending[1].update(metrics)
            return
        self._send()
        self._pending = (step, dict(metrics))

    def close(self) -> None:
        """See `Sink.close`."""
        if self._run is None:
            return
        try:
            self._send()
        finally:
            run, self._run = self._run, None
            try:
                run.finish()
            except Exception as error:  # as in _send
                raise OSError(f"wandb did not take the end of the run: {error!r}") from error

    def _send(self) -> None:
        if self._pending is None:
            return
        (step, metrics), self._pending = self._pending, None
        try:
            self._run.log(metrics, step=step)
        except Exception as error:  # its service is another process, whose death shows as private classes
            raise OSError(f"wandb did not take step {step}: {error!r}") from error

    def _run_id(self) -> str:
        if self._id_file.is_file():
            return self._id_file.read_text(encoding="ascii").strip()
        made = uuid.uuid4().hex[:8]
        self._id_file.write_text(made + "\n", encoding="ascii")
        return made
