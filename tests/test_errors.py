import doctest
import inspect
import pickle

import pytest

from ebbtide import errors
from ebbtide.errors import ConfigError, EbbtideError, MissingExtraError, RunFolderError, did_you_mean, problem

CLASSES = [item for item in vars(errors).values() if inspect.isclass(item) and issubclass(item, EbbtideError)]


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_every_error_crosses_a_process_boundary_and_is_a_standard_one(kind: type[EbbtideError]) -> None:
    error = pickle.loads(pickle.dumps(kind("what went wrong")))
    assert type(error) is kind
    assert str(error) == "what went wrong"
    assert kind is EbbtideError or any(base.__module__ == "builtins" for base in kind.__mro__[1:-3])


def test_several_problems_stay_several() -> None:
    error = pickle.loads(pickle.dumps(ConfigError(["a=1: no.", "b=2: no."])))
    assert error.problems == ("a=1: no.", "b=2: no.")
    assert str(error) == "a=1: no.\nb=2: no."


def test_callers_may_catch_the_standard_type() -> None:
    assert issubclass(ConfigError, ValueError)
    assert issubclass(RunFolderError, OSError)
    assert issubclass(MissingExtraError, ImportError)


def test_a_problem_is_one_sentence_or_two_with_one_stop_each() -> None:
    assert problem("a", 1, "must be 2.", "Try 2.") == "a=1: must be 2. Try 2."
    assert problem("a", "x", "must be y") == "a='x': must be y."
    assert problem("a", "x", "no", "Did you mean 'y'?") == "a='x': no. Did you mean 'y'?"


def test_a_value_that_would_fill_the_screen_is_cut_in_the_middle() -> None:
    text = problem("a", "x" * 5000, "is too long")
    assert len(text) < 400
    assert text.startswith("a='xxx")
    assert text.endswith("xxx': is too long.")
    assert "..." in text


def test_a_word_that_is_near_none_gets_no_guess() -> None:
    assert did_you_mean("zebra", ["vllm", "inprocess"]) == ""
    assert did_you_mean("x", []) == ""


def test_examples_in_the_text_hold() -> None:
    assert doctest.testmod(errors).failed == 0
