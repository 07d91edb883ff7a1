import json
from pathlib import Path

import psutil
import pytest

from ebbtide.observe import environment as module
from ebbtide.observe.environment import environment, machine, versions


def test_everything_is_json_and_names_what_matters() -> None:
    found = json.loads(json.dumps(environment()))
    assert {"torch", "transformers", "pydantic"} <= set(found["versions"])
    assert found["machine"]["num_cores"] > 0
    assert found["machine"]["memory_bytes"] > 2**30
    assert found["machine"]["cpu"]


def test_a_package_that_is_not_there_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PACKAGES", ("numpy", "surely-not-installed"))
    assert list(versions()) == ["numpy"]


def test_a_containers_limits_count(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"cpu.max": ["50000", "100000"], "memory.max": [str(2**20)]}
    monkeypatch.setattr(module, "_cgroup", lambda name: limits[name])
    assert machine().num_cores == 0.5
    assert machine().memory_bytes == 2**20
    monkeypatch.setattr(module, "_cgroup", lambda name: {"cpu.max": ["max", "100000"], "memory.max": ["max"]}[name])
    assert machine().num_cores >= 1
    assert machine().memory_bytes == psutil.virtual_memory().total


def test_a_control_file_that_is_not_there_is_no_limit() -> None:
    assert module._cgroup("no.such.file") == []
    assert Path("/proc/self").exists()
