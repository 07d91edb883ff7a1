"""Loggers that start a process of their own: it is ended and waited for after each test."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

__all__ = ["services_end"]


@contextlib.contextmanager
def services_end(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Around a test. wandb itself never waits for its service, which Python reports when the handle goes away."""
    opened: list[subprocess.Popen[Any]] = []

    class Recorded(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            opened.append(self)

    monkeypatch.setattr(subprocess, "Popen", Recorded)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # the one store that needs no server and no database package
    yield
    if wandb := sys.modules.get("wandb"):
        with contextlib.suppress(OSError):
            wandb.teardown()
    for process in opened:
        process.wait(timeout=20)
