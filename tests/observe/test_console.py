import io
import logging
import re

import pytest
import rich
from rich.console import Console as RichConsole

from ebbtide.observe import console as module
from ebbtide.observe.console import Console, figures, set_up_logging

STEP = {
    "reward/mean": 0.25,
    "reward/accuracy": 0.5,
    "throughput/tokens_per_s": 12_345.0,
    "memory/generate_peak_rss_bytes": 3.0 * 2**20,
    "memory/update_peak_rss_bytes": 5.0 * 2**20,
}


def plain() -> tuple[RichConsole, io.StringIO]:
    text = io.StringIO()
    return RichConsole(file=text, force_terminal=False, width=60), text


def terminal(width: int = 120) -> tuple[RichConsole, io.StringIO]:
    text = io.StringIO()
    return RichConsole(file=text, force_terminal=True, width=width), text


def visible(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def test_the_figures_of_a_step_are_those_that_are_there() -> None:
    assert figures(STEP) == ["reward 0.250", "accuracy 0.500", "12.3k tok/s", "5.0 MiB"]
    assert figures({}) == []
    assert figures({"warmup/loss_nats": 1.5}) == ["loss 1.500"]
    assert figures({"eval/accuracy": 0.25, "eval/greedy_accuracy": 0.5}) == ["held-out 0.250", "held-out greedy 0.500"]
    assert figures(STEP | {"memory/update_peak_allocated_bytes": 7.0 * 2**30})[-1] == "7.0 GiB"


def test_where_there_is_no_terminal_whole_lines_tell_the_course() -> None:
    console, text = plain()
    with Console(console=console).stage("train", 100) as show:
        for step in range(1, 101):
            show(step, STEP)
    lines = text.getvalue().splitlines()
    assert len(lines) == 21
    assert lines[0].startswith("train 1/100  reward 0.250  accuracy 0.500  12.3k tok/s  5.0 MiB  ")
    assert lines[0].endswith(" left")
    assert lines[-1].startswith("train 100/100  ")
    assert "took" in lines[-1]
    assert "\x1b" not in text.getvalue()


def test_a_short_stage_shows_every_step() -> None:
    console, text = plain()
    with Console(console=console).stage("train", 3) as show:
        for step in range(1, 4):
            show(step, {})
    assert [line.split("  ")[0] for line in text.getvalue().splitlines()] == ["train 1/3", "train 2/3", "train 3/3"]


def test_a_resumed_stage_counts_from_where_it_was() -> None:
    console, text = plain()
    with Console(console=console).stage("train", 100, done=90) as show:
        show(91, {})
    assert text.getvalue().startswith("train 91/100")


def test_a_terminal_gets_a_bar_with_figures() -> None:
    console, text = terminal()
    with Console(console=console).stage("train", 4) as show:
        show(3, STEP)
        show(4, STEP)
    last = visible(text.getvalue()).splitlines()[-1]
    assert "4/4" in last
    assert "reward 0.250  accuracy 0.500  12.3k tok/s  5.0 MiB" in last


def test_no_bar_is_drawn_where_none_is_wanted() -> None:
    console, text = terminal()
    with Console(progress=False, console=console).stage("train", 1) as show:
        show(1, STEP)
    assert visible(text.getvalue()).startswith("train 1/1  reward 0.250")


def test_an_exception_in_a_stage_goes_on_and_ends_the_bar() -> None:
    console, text = terminal()

    def interrupted() -> None:
        with Console(console=console).stage("train", 4) as show:
            show(2, STEP)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert "2/4" in visible(text.getvalue())
    assert text.getvalue().count("\x1b[?25h") == 1  # the cursor is shown again


def test_a_table_aligns_its_numbers_and_takes_text_as_it_is() -> None:
    console, text = plain()
    Console(console=console).table("Result", ["", "before", "after"], [["[accuracy]", "0.1", "0.912"]])
    lines = [line.rstrip() for line in text.getvalue().splitlines() if line.strip()]
    assert lines == ["Result", "            before  after", "[accuracy]     0.1  0.912"]


@pytest.fixture
def logger(monkeypatch: pytest.MonkeyPatch) -> logging.Logger:
    logger = logging.getLogger("ebbtide")
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "propagate", True)
    monkeypatch.setattr(logger, "level", logging.NOTSET)
    return logger


def test_messages_go_through_richs_console(monkeypatch: pytest.MonkeyPatch, logger: logging.Logger) -> None:
    console, text = plain()
    monkeypatch.setattr(rich, "get_console", lambda: console)
    set_up_logging()
    set_up_logging()
    child = logging.getLogger("ebbtide.loop.run")
    child.info("step %d of [bold]%s[/]", 3, "many words " * 10)
    child.warning("careful")
    child.debug("unseen")
    logger.manager.disable = 0
    lines = text.getvalue().splitlines()
    assert lines == ["step 3 of [bold]" + "many words " * 10 + "[/]", "warning: careful"]


def test_in_a_terminal_messages_stand_above_the_bar(monkeypatch: pytest.MonkeyPatch, logger: logging.Logger) -> None:
    console, text = terminal()
    monkeypatch.setattr(module.rich, "get_console", lambda: console)  # type: ignore[attr-defined]
    set_up_logging()
    with Console(console=console).stage("train", 2) as show:
        show(1, STEP)
        logging.getLogger("ebbtide.observe").warning("the disk is full")
        show(2, STEP)
    assert "WARNING" in visible(text.getvalue())
    assert "the disk is full" in visible(text.getvalue())
    assert "2/2" in visible(text.getvalue()).splitlines()[-1]
