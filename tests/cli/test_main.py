import errno
import os
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ebbtide import cli
from ebbtide.cli import main as module
from ebbtide.cli.main import commands, main
from ebbtide.errors import ConfigError, EbbtideError, RunFolderError


class Fake:
    """A command that does what the test says."""

    name = "fake"
    help = "nothing real"

    def __init__(self, run: Callable[[], int]) -> None:
        self._run = run

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("overrides", nargs="*")
        parser.add_argument("--flag")

    def run(self, arguments: Namespace) -> int:
        self.seen = arguments
        return self._run()


def run_fake(monkeypatch: pytest.MonkeyPatch, run: Callable[[], int], *arguments: str) -> tuple[int, Fake]:
    fake = Fake(run)
    monkeypatch.setattr(module, "commands", lambda: [fake])
    return main(["fake", *arguments]), fake


def raising(error: BaseException) -> Callable[[], int]:
    def run() -> int:
        raise error

    return run


def test_the_folder_is_the_list_of_commands() -> None:
    files = {path.stem for path in Path(cli.__path__[0]).glob("*.py")} - {"__init__", "base", "main"}
    assert {command.name for command in commands()} == files
    assert {"config", "doctor", "eval", "export", "report", "train"} <= files
    for command in commands():
        assert command.help
        assert not command.help.endswith(".")


def test_help_names_every_command_and_no_command_is_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    text = capsys.readouterr().out
    for command in commands():
        assert f" {command.name} " in text
        with pytest.raises(SystemExit) as ended:
            main([command.name, "--help"])
        assert ended.value.code == 0
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out.splitlines()[-1].startswith("ebbtide ")


def test_help_loads_nothing_heavy() -> None:
    script = """
import contextlib, io, sys
from ebbtide.cli.main import main
with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
    main(["--help"])
heavy = {"torch", "transformers", "numpy", "pydantic", "rich", "vllm", "ray", "wandb", "mlflow", "psutil"}
sys.exit(", ".join(sorted(heavy & set(sys.modules))) or 0)
"""
    environment = {"PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (ConfigError(["a=1: no.", "b=2: no."]), 2, "error: a=1: no.\nerror: b=2: no.\n"),
        (RunFolderError("runs/x holds a run"), 2, "error: runs/x holds a run\n"),
        (EbbtideError("anything of ours"), 2, "error: anything of ours\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (OSError(errno.ENOSPC, "", "runs/x/final"), 2, "error: no space left on device: 'runs/x/final'\n"),
        (PermissionError(errno.EACCES, "", "/root"), 2, "error: permission denied: '/root'\n"),
        (
            ModuleNotFoundError("No module named 'numpy'"),
            2,
            "error: No module named 'numpy'. `ebbtide doctor` says wha",
        ),
        (MemoryError("32 GiB"), 2, "error: out of memory: 32 GiB. Lower engine.max_tokens_per_microbatch, batch.prom"),
        (torch.OutOfMemoryError("tried 2 GiB"), 2, "error: out of memory on the device: tried 2 GiB. Lower engine."),
    ],
)
def test_what_a_user_can_mend_is_text_and_no_traceback(
    error: BaseException, code: int, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_fake(monkeypatch, raising(error))[0] == code
    assert capsys.readouterr().err.startswith(text)


@pytest.mark.parametrize(
    "error",
    [
        AssertionError("ours"),
        RuntimeError("ours"),
        KeyError("ours"),
        OSError(errno.EIO, ""),
        ImportError("ours", name="ebbtide.x"),
    ],
)
def test_a_bug_of_ours_keeps_its_traceback(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(type(error)):
        run_fake(monkeypatch, raising(error))


@pytest.mark.parametrize("code", [0, 1])
def test_a_commands_code_is_the_process_code(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_fake(monkeypatch, lambda: code)[0] == code


@pytest.mark.parametrize(
    "arguments",
    [["a=1", "b=2", "--flag", "x"], ["--flag", "x", "a=1", "b=2"], ["a=1", "--flag", "x", "b=2"]],
)
def test_settings_may_stand_anywhere(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    _, fake = run_fake(monkeypatch, lambda: 0, *arguments)
    assert (fake.seen.overrides, fake.seen.flag) == (["a=1", "b=2"], "x")


def test_an_unknown_argument_is_refused_and_dashes_before_a_setting_are_explained(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run_fake(monkeypatch, lambda: 0, "--optim.lr=3")
    assert ended.value.code == 2
    assert "unknown argument --optim.lr=3. Settings have no dashes: optim.lr=3" in capsys.readouterr().err
    monkeypatch.undo()
    with pytest.raises(SystemExit):
        main(["doctor", "a=1"])
    assert "unknown argument a=1" in capsys.readouterr().err


def test_a_reader_that_goes_away_ends_the_command_quietly() -> None:
    script = "import sys; from ebbtide.cli.main import main; sys.exit(main(['config', 'explain']))"
    environment = {"PYTHONPATH": ":".join(sys.path)}
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, stdout=writing, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


def test_the_environment_is_prepared_before_torch_is_there() -> None:
    script = """
import os, sys
from ebbtide.cli.main import main
main([])
assert "torch" not in sys.modules
sys.exit(0 if os.environ.get("OMP_WAIT_POLICY") == "PASSIVE" else 1)
"""
    environment = {"PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
