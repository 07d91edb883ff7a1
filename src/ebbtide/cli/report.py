"""`ebbtide report`: the page of a run, also of one that still goes on or broke off."""

from argparse import ArgumentParser, Namespace
from pathlib import Path

__all__ = ["Report"]


class Report:
    """Makes a run's `report.html` from what its folder holds."""

    name = "report"
    help = "make a run's report.html again, at any time"

    def add_arguments(self, parser: ArgumentParser) -> None:
        """See `Command.add_arguments`."""
        parser.add_argument("run", type=Path, help="the run's folder")

    def run(self, arguments: Namespace) -> int:
        """See `Command.run`."""
        from ebbtide.observe.report import write_report
        from ebbtide.observe.run_folder import RunFolder

        print(write_report(RunFolder.open(arguments.run)))
        return 0
