"""Whether a push ends well whatever breaks: a sender and two receivers in three processes, one fault at a time.

Faults: SIGKILL, SIGSTOP, a closed socket, garbage, truncated, repeated, lost and ten thousand random frames, another
protocol, run, rank or version, and exceptions in load, synchronise, release, map, weights and buffer, before each
frame of the protocol and between pushes.

Figures:
    faults_tried             how many
    faults_ended_well_share  an error on every rank that runs, within the deadline and with the cause named; then a
                             push that succeeds, with another process in place of one that is dead or stopped
    leftovers                descriptors, mappings, folders and shared segments more than before, over all faults
    fault_s                  seconds of one trial, start of its three processes included
"""

import argparse
import logging
import sys
import time
from pathlib import Path

from _record import Run

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the trials are those of the tests

from tests.faults.weightsync.harness import Verdict, all_faults, try_fault


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The protocol's deadline in these trials."""
    parser.add_argument("--deadline", type=float, default=2.0, metavar="S", help="of every wait (default 2 s)")


def main() -> int:
    """Try every fault and report."""
    run = Run("weightsync_faults", __doc__, add_flags)
    logging.disable(logging.WARNING)
    faults = all_faults()
    if run.args.quick:  # those that wait out a deadline take most of the time
        faults = [fault for fault in faults if fault.how not in ("stop", "lose") and fault.where != "Hello"]
    verdicts: list[Verdict] = []
    seconds: list[float] = []
    for fault in faults:
        start = time.perf_counter()
        verdicts.append(try_fault(fault, run.args.deadline))
        seconds.append(time.perf_counter() - start)
        for text in verdicts[-1].problems:
            print(f"{fault}: {text}")
    ended_well = sum(not verdict.problems for verdict in verdicts)
    run.figure("faults_tried", len(verdicts), None if run.args.quick else ">= 100")
    run.figure("faults_ended_well_share", ended_well / len(verdicts), ">= 1")
    run.figure("leftovers", sum(verdict.num_left for verdict in verdicts), "<= 0")
    run.figure("fault_s", seconds)
    return run.finish()


if __name__ == "__main__":
    sys.exit(main())
