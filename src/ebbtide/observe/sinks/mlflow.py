"""MLflow, as the extra `mlflow`."""

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ebbtide import config as configuration
from ebbtide.errors import ConfigError, problem
from ebbtide.observe.sinks.base import SinkConfig, import_extra

__all__ = ["MLflowSink"]

_MAX_PARAMS = 100  # what one request may carry
_MAX_PARAM_CHARACTERS = 6000
_MAX_METRICS = 1000


class MLflowSink:
    """One MLflow run a run folder; a resumed run goes on in the same one.

    Source: `mlflow.MlflowClient`; here the client is used and not the module's functions, which keep one run a process.
    """

    class Config(SinkConfig):
        """Which server and experiment."""

        type: str = "mlflow"
        tracking_uri: str | None = None
        """Server or store; None is what MLflow itself is set to."""
        experiment: str = "ebbtide"
        """The experiment that the run belongs to; made where it is not there."""

    def __init__(self, config: Config, *, folder: Path, recipe: Mapping[str, Any]) -> None:
        self._mlflow = import_extra("mlflow", "mlflow")
        self._folder = folder
        self._recipe = recipe
        try:
            self._client: Any = self._mlflow.MlflowClient(tracking_uri=config.tracking_uri)
            self._run_id: str = self._begin(config.experiment)
        except self._mlflow.exceptions.MlflowException as error:
            rule, uri = f"MLflow cannot begin: {error}", config.tracking_uri
            raise ConfigError(problem("observe.sinks.tracking_uri", uri, rule)) from error
        self._is_closed = False

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """See `Sink.write`."""
        assert not self._is_closed, self._run_id
        now = int(time.time() * 1000)
        rows = [self._mlflow.entities.Metric(key, float(value), now, step) for key, value in metrics.items()]
        try:
            for start in range(0, len(rows), _MAX_METRICS):
                self._client.log_batch(self._run_id, metrics=rows[start : start + _MAX_METRICS])
        except self._mlflow.exceptions.MlflowException as error:
            raise OSError(f"MLflow did not take step {step}: {error}") from error

    def close(self) -> None:
        """See `Sink.close`."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self._client.set_terminated(self._run_id)
        except self._mlflow.exceptions.MlflowException as error:
            raise OSError(f"MLflow did not take the end of the run: {error}") from error

    def _begin(self, experiment: str) -> str:
        id_file = self._folder / "mlflow-id"
        if id_file.is_file():
            run_id = id_file.read_text(encoding="ascii").strip()
            self._client.update_run(run_id, status="RUNNING")
            return run_id
        found = self._client.get_experiment_by_name(experiment)
        experiment_id = found.experiment_id if found else self._client.create_experiment(experiment)
        name = str(self._recipe.get("name", self._folder.name))
        made: str = self._client.create_run(experiment_id, run_name=name).info.run_id
        params = list(self._params())
        for start in range(0, len(params), _MAX_PARAMS):
            self._client.log_batch(made, params=params[start : start + _MAX_PARAMS])
        id_file.write_text(made + "\n", encoding="ascii")
        return made

    def _params(self) -> Iterator[Any]:
        for key, value in configuration.flatten(self._recipe):
            yield self._mlflow.entities.Param(key, str(value)[:_MAX_PARAM_CHARACTERS])
