"""The contract of a command."""

from argparse import ArgumentParser, Namespace
from typing import ClassVar, Protocol

__all__ = ["Command"]


class Command(Protocol):
    """One file of this folder with one public class; the folder is the list of commands.

    Its module imports nothing heavy, for `ebbtide --help` imports all of them; what a command needs it imports as it
    runs.
    """

    name: ClassVar[str]
    """What is typed."""
    help: ClassVar[str]
    """One line for the list of commands."""

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Declare its arguments."""
        ...

    def run(self, arguments: Namespace) -> int:
        """Do it.

        Returns:
            The exit code: 0, or 1 where the answer is "no".

        Raises:
            EbbtideError: becomes text and exit code 2.
        """
        ...
