from collections.abc import Iterator
from pathlib import Path

import pytest

from ebbtide import config
from ebbtide.errors import ConfigError
from ebbtide.observe.sinks.mlflow import MLflowSink
from tests.observe.sinks.services import services_end

mlflow = pytest.importorskip("mlflow", reason="the extra mlflow is not installed")

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@pytest.fixture(autouse=True)
def _services(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with services_end(monkeypatch):
        yield


def make(folder: Path, uri: str) -> MLflowSink:
    settings = config.validate(MLflowSink.Config, {"type": "mlflow", "tracking_uri": uri, "experiment": "tides"})
    return MLflowSink(settings, folder=folder, recipe={"name": "ebb", "optim": {"lr": 1e-4}})


def test_a_run_holds_steps_and_recipe_and_a_resumed_one_goes_on(tmp_path: Path) -> None:
    uri = f"file://{tmp_path}/mlruns"
    for first in (1, 3):
        sink = make(tmp_path, uri)
        for step in (first, first + 1):
            sink.write(step, {"reward/mean": step / 4})
        sink.close()
    client = mlflow.MlflowClient(tracking_uri=uri)
    (run,) = client.search_runs([client.get_experiment_by_name("tides").experiment_id])
    assert run.info.run_name == "ebb"
    assert run.info.status == "FINISHED"
    assert run.data.params == {"name": "ebb", "optim.lr": "0.0001"}
    history = client.get_metric_history(run.info.run_id, "reward/mean")
    assert sorted((item.step, item.value) for item in history) == [(1, 0.25), (2, 0.5), (3, 0.75), (4, 1.0)]


def test_a_server_that_is_not_there_is_said_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "2")
    with pytest.raises(ConfigError, match="MLflow cannot begin"):
        make(tmp_path, "http://127.0.0.1:9")
