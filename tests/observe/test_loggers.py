from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ebbtide import plugins
from ebbtide.config import Component
from ebbtide.errors import ConfigError
from ebbtide.observe.loggers import Loggers


class Recording:
    """A logger that remembers what happened to all of its kind, and fails as told."""

    events: list[str]
    fails: set[str]

    class Config(Component):
        type: str = "recording"

    def __init__(self, config: Config, *, folder: Path, recipe: Mapping[str, Any]) -> None:
        if config.type in self.fails:
            raise ConfigError(f"{config.type} cannot begin")
        self.name = config.type

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self.events.append(f"{self.name} {step}")
        if f"{self.name} {step}" in self.fails:
            raise ConnectionError("no route to host")

    def close(self) -> None:
        self.events.append(f"{self.name} closed")
        if f"{self.name} closed" in self.fails:
            raise ConnectionError("no route to host")


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> type[Recording]:
    Recording.events, Recording.fails = [], set()
    monkeypatch.setattr(plugins, "load", lambda kind, name: Recording)
    return Recording


def make(*names: str) -> Loggers:
    return Loggers([Recording.Config(type=name) for name in names], Path("run"), {})


def test_every_logger_gets_every_step_and_is_closed_once(recording: type[Recording]) -> None:
    loggers = make("a", "b")
    loggers.write(1, {})
    loggers.close()
    loggers.close()
    assert recording.events == ["a 1", "b 1", "b closed", "a closed"]


def test_one_that_fails_is_reported_once_and_the_others_go_on(
    recording: type[Recording], caplog: pytest.LogCaptureFixture
) -> None:
    recording.fails = {"a 1", "a 2", "a 4", "a closed"}
    loggers = make("a", "b")
    for step in range(1, 5):
        loggers.write(step, {})
    loggers.close()
    assert [event for event in recording.events if event.startswith("b")] == ["b 1", "b 2", "b 3", "b 4", "b closed"]
    assert caplog.text.count("a (observe.sinks.0) cannot write, and training goes on: no route to host") == 2
    assert caplog.text.count("could not write its last steps") == 1


def test_one_that_cannot_begin_closes_those_that_have(recording: type[Recording]) -> None:
    recording.fails = {"b"}
    with pytest.raises(ConfigError, match="b cannot begin"):
        make("a", "b")
    assert recording.events == ["a closed"]
