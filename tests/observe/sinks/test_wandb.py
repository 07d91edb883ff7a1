import contextlib
import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from ebbtide import config
from ebbtide.errors import ConfigError
from ebbtide.observe.sinks.wandb import WandbSink
from tests.observe.sinks.services import services_end

wandb = pytest.importorskip("wandb", reason="the extra wandb is not installed")

pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore::DeprecationWarning")]


@pytest.fixture(autouse=True)
def _services(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with services_end(monkeypatch):
        yield


def make(folder: Path) -> WandbSink:
    settings = config.validate(WandbSink.Config, {"type": "wandb", "mode": "offline", "project": "tides"})
    return WandbSink(settings, folder=folder, recipe={"name": "ebb", "optim": {"lr": 1e-4}})


def test_an_offline_run_holds_steps_recipe_and_name(tmp_path: Path) -> None:
    from wandb.proto import wandb_internal_pb2

    sink = make(tmp_path)
    sink.write(1, {"reward/mean": 0.5})
    sink.write(2, {"reward/mean": 0.75})
    sink.write(2, {"eval/accuracy": 1.0})
    sink.close()
    wandb.teardown()  # its service writes the file, and may still be at it
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    steps: dict[int, dict[str, float]] = {}
    runs = []
    for data in _log_records(file.read_bytes()):
        record = wandb_internal_pb2.Record.FromString(data)
        if record.HasField("run"):
            runs.append((record.run.project, record.run.display_name, record.run.run_id))
        for item in record.history.item:
            key = item.key or "/".join(item.nested_key)
            if not key.startswith("_"):
                steps.setdefault(record.history.step.num, {})[key] = json.loads(item.value_json)
    assert runs[0] == ("tides", "ebb", (tmp_path / "wandb-id").read_text().strip())
    assert steps == {1: {"reward/mean": 0.5}, 2: {"reward/mean": 0.75, "eval/accuracy": 1.0}}


def _log_records(data: bytes) -> Iterator[bytes]:
    """Records of LevelDB's log format after wandb's header of 7 bytes; one may be spread over blocks of 32 KiB."""
    at, block, record = 7, 32 * 1024, b""
    while at + 7 <= len(data):
        left = block - at % block
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        if kind == 0:
            return
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or its last part
            yield record
            record = b""


def test_a_service_that_died_is_an_oserror(tmp_path: Path) -> None:
    sink = make(tmp_path)
    sink.write(1, {"reward/mean": 0.5})
    sink.write(2, {"reward/mean": 0.5})
    for process in psutil.Process().children():
        if "wandb" in process.name():
            process.kill()
    errors = []
    for step in range(3, 40):  # the first may still find their way into the socket
        try:
            sink.write(step, {"reward/mean": 0.5})
        except OSError as error:
            errors.append(str(error))
        time.sleep(0.01)
    assert any("wandb did not take step" in text for text in errors)
    with contextlib.suppress(OSError):
        sink.close()
    sink.close()


def test_without_an_account_the_run_does_not_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    settings = config.validate(WandbSink.Config, {"type": "wandb"})
    with pytest.raises(ConfigError, match="wandb cannot begin"):
        WandbSink(settings, folder=tmp_path, recipe={})
