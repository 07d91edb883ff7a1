"""The entry point: finds the commands, and is the one place where errors become text and an exit code.

0 done | 1 the answer is "no", or a bug of ours with its traceback | 2 something the user can mend | 130 interrupted
"""

import argparse
import errno
import importlib
import inspect
import os
import pkgutil
import sys
from collections.abc import Sequence
from typing import cast

import ebbtide
from ebbtide import cli, env
from ebbtide.cli.base import Command
from ebbtide.errors import EbbtideError

__all__ = ["commands", "main"]

# What the machine refuses and the user can mend; other errors of the system are bugs until shown otherwise.
_OF_THE_MACHINE = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.EISDIR, errno.ENOTDIR}
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the console script's exit code.

    Args:
        arguments: as typed after `ebbtide`; those of the process where not given.
    """
    env.prepare()
    parser = _parser()
    given = _parse(parser, arguments)
    if given.command is None:
        parser.print_help()
        return 0
    command: Command = given.command
    try:
        code = command.run(given)
        sys.stdout.flush()  # here, where a reader that has gone is noticed without a message at the interpreter's end
    except EbbtideError as error:
        return _refused(str(error))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output has gone, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except ImportError as error:
        if (error.name or "").split(".")[0] == "ebbtide":
            raise
        return _refused(f"{error}. `ebbtide doctor` says what is missing or broken.")
    except (OSError, MemoryError, RuntimeError) as error:
        text = _of_the_machine(error)
        if text is None:
            raise
        return _refused(text)
    return code


def commands() -> list[Command]:
    """One of each command, by name."""
    found: list[Command] = []
    for module in pkgutil.iter_modules(cli.__path__):
        if module.name in ("base", "main") or module.name.startswith("_"):
            continue
        loaded = importlib.import_module(f"{cli.__name__}.{module.name}")
        classes = [getattr(loaded, name) for name in loaded.__all__]
        (command,) = (item for item in classes if inspect.isclass(item) and item.__module__ == loaded.__name__)
        found.append(cast(Command, command()))
    return sorted(found, key=lambda command: command.name)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ebbtide",
        description="Post-train language models by reinforcement learning and on-policy distillation.",
    )
    parser.add_argument("--version", action="version", version=f"ebbtide {ebbtide.__version__}")
    parser.set_defaults(command=None)
    choices = parser.add_subparsers(title="commands", metavar="COMMAND")
    for command in commands():
        chosen = choices.add_parser(command.name, help=command.help, description=command.help)
        command.add_arguments(chosen)
        chosen.set_defaults(command=command)
    return parser


def _parse(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """The arguments, with settings (key=value) wherever they stand; argparse alone wants them before every option."""
    given, rest = parser.parse_known_args(arguments)
    takes_settings = hasattr(given, "overrides")
    strange = next((item for item in rest if item.startswith("-") or not takes_settings), None)
    if strange is not None:
        hint = f". Settings have no dashes: {strange.lstrip('-')}" if "=" in strange and takes_settings else ""
        parser.error(f"unknown argument {strange}{hint}")
    if rest:
        given.overrides = [*given.overrides, *rest]
    return given


def _refused(text: str) -> int:
    for line in text.splitlines():
        print(f"error: {line}", file=sys.stderr)
    return 2


def _of_the_machine(error: Exception) -> str | None:
    """What to say where memory, disk or permissions are the matter; None for everything else."""
    if isinstance(error, OSError) and error.errno in _OF_THE_MACHINE:
        where = f" {error.filename!r}" if error.filename else ""
        return f"{os.strerror(error.errno).lower()}:{where or ' ' + str(error)}"
    torch = sys.modules.get("torch")
    is_device = torch is not None and isinstance(error, torch.OutOfMemoryError)
    if is_device or isinstance(error, MemoryError):
        remedy = "Lower engine.max_tokens_per_microbatch, batch.prompts or sampling.max_tokens"
        return f"out of memory{' on the device' if is_device else ''}: {error}. {remedy}."
    return None
