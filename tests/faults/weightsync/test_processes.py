"""A process breaks at every moment of a push, in every way; those that wait out a deadline are for the slow run."""

import pytest

from tests.faults.weightsync.harness import Fault, all_faults, try_fault

DEADLINE_S = 2.0
IN_EVERY_RUN = {
    "receiver0-run-Hello",
    "receiver0-close-Loaded",
    "receiver1-garbage-Loaded",
    "receiver1-flood-Ready",
    "receiver1-truncated-Released",
    "receiver0-stop-Loaded",
    "receiver0-garbage-Closed-free",
    "sender-close-Plan",
    "sender-flood-Bucket",
    "sender-garbage-Commit",
    "sender-lose-Bucket",
    "sender-version-Plan",
    "sender-stop-Bucket",
}


def _is_slow(fault: Fault) -> bool:
    is_quick = fault.how in ("kill", "raise") and fault.who != "receiver 1" and fault.where != "Hello"
    return not is_quick and str(fault) not in IN_EVERY_RUN


def test_the_faults_named_here_exist() -> None:
    assert {str(fault) for fault in all_faults()} >= IN_EVERY_RUN


@pytest.mark.parametrize(
    "fault", [pytest.param(f, id=str(f), marks=[pytest.mark.slow] if _is_slow(f) else []) for f in all_faults()]
)
def test_it_ends_well(fault: Fault) -> None:
    verdict = try_fault(fault, DEADLINE_S)
    assert verdict.problems == []
    assert verdict.num_left == 0
