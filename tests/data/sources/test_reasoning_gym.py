"""reasoning-gym: prompts, demonstrations, few prompts, and settings that are wrong."""

from pathlib import Path
from typing import Any

import pytest

from ebbtide.config import validate
from ebbtide.data.sources.reasoning_gym import ReasoningGymSource
from ebbtide.errors import ConfigError, DataError

TASK = "recipes/quickstart_task.py"
SORTING = {"min_numbers": 5, "max_numbers": 5, "min_decimals": 0, "max_decimals": 0, "min_value": 0, "max_value": 9}


def _source(seed: int = 0, **settings: Any) -> ReasoningGymSource:
    tree = {"task": "number_sorting", "params": SORTING, **settings}
    return ReasoningGymSource(validate(ReasoningGymSource.Config, tree), seed=seed)


def test_a_row_has_the_item_its_prompt_and_where_it_comes_from() -> None:
    row = _source()[0]
    assert row["prompt"] == row["question"]
    assert row["reasoning_gym"] == {"task": "number_sorting", "params": SORTING}
    assert row["metadata"]["source_dataset"] == "number_sorting"


def test_the_quickstart_task_says_the_item_in_six_characters() -> None:
    source = _source(prompt=f"{TASK}:prompt")
    for index in range(50):
        row = source[index]
        digits, direction = row["prompt"][:-1], row["prompt"][-1]
        assert [f"{digit}.0" for digit in digits] == [
            number.lstrip("-") for number in row["metadata"]["original_numbers"]
        ]
        assert direction == {"ascending": "<", "descending": ">"}[row["metadata"]["direction"]]
    assert {source[index]["prompt"][-1] for index in range(50)} == {"<", ">"}


def test_the_quickstart_demonstrations_are_of_mixed_quality() -> None:
    source = _source(prompt=f"{TASK}:prompt", demonstration=f"{TASK}:demonstrate")
    kinds = {"up": 0, "down": 0, "copied": 0, "reversed": 0}
    for index in range(400):
        digits, shown = source[index]["prompt"][:-1], source.demonstration(index)
        kinds["up"] += shown == "".join(sorted(digits))
        kinds["down"] += shown == "".join(sorted(digits))[::-1]
        kinds["copied"] += shown == digits
        kinds["reversed"] += shown == digits[::-1]
    assert all(70 < count < 135 for count in kinds.values()), kinds  # 100 with a standard deviation of 9


def test_a_template_reads_item_and_metadata() -> None:
    row = _source(template="{metadata[direction]}: {metadata[original_numbers][0]}")[0]
    assert row["prompt"] == f"{row['metadata']['direction']}: {row['metadata']['original_numbers'][0]}"


def test_without_a_function_a_demonstration_is_the_answer() -> None:
    source = _source()
    assert source.demonstration(3) == source[3]["answer"]


def test_a_task_without_answers_needs_a_function_for_demonstrations() -> None:
    source = _source(task="graph_color", params={})
    assert source[0]["answer"] is None
    with pytest.raises(DataError, match=r"data.task='graph_color': items have no answer.*Set data.demonstration"):
        source.demonstration(0)


def test_a_prompt_function_may_make_chat_messages(tmp_path: Path) -> None:
    path = tmp_path / "chat.py"
    path.write_text("def prompt(item):\n    return [{'role': 'user', 'content': item['question']}]\n")
    row = _source(prompt=f"{path}:prompt")[0]
    assert row["prompt"] == [{"role": "user", "content": row["question"]}]


def test_seeds_far_apart_and_near_share_no_stretch_of_items() -> None:
    """reasoning-gym makes item i from seed + i, so that seeds 0 and 1 taken as they are would share all but one."""
    questions = [{_source(seed, size=300)[index]["question"] for index in range(300)} for seed in (0, 1, 2)]
    assert all(len(a & b) < 5 for a in questions for b in questions if a is not b)


def test_a_task_of_few_prompts_keeps_them_apart() -> None:
    """Sums of two digits are some 200 prompts; half are held out, and 5,000 rows meet all of the other half."""
    params = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    source = _source(task="chain_sum", params=params, size=5000, eval_fraction=0.5)
    training = {source[index]["prompt"] for index in range(5000)}
    held_out = {row["prompt"] for row in source.held_out(60)}
    assert not training & held_out
    assert len(held_out) == 60


def test_a_single_prompt_cannot_be_on_both_sides() -> None:
    """A template without a field makes one prompt of all items: it is trained on, or held out, and never both."""
    source = _source(template="always the same", size=40, eval_fraction=0.99)
    with pytest.raises(DataError, match=r"row 0: 64 items in a row were prompts that are held out"):
        source[0]
    assert len(source.held_out(1)) == 1
    with pytest.raises(DataError, match="has only 1 different held-out prompts and 2 are wanted"):
        source.held_out(2)


@pytest.mark.parametrize(
    ("settings", "error", "text"),
    [
        ({"task": "number_sortin"}, ConfigError, r"data.task='number_sortin': .*Did you mean 'number_sorting'\?"),
        ({"params": {"min_nums": 3}}, ConfigError, r"data.params=\{'min_nums': 3\}: the task number_sorting refuses"),
        ({"params": {**SORTING, "min_numbers": 0}}, ConfigError, r"min_numbers must be positive"),
        ({"task": "word_ladder", "params": {}}, ConfigError, r"size too large.*or data.size, which is 100000"),
        ({"params": {"seed": 3}}, ConfigError, r"params.seed=3: is set by the source"),
        ({"params": {"size": 3}}, ConfigError, r"params.size=3: is set by the source"),
        ({"prompt": f"{TASK}:prompt", "template": "x"}, ConfigError, r"template='x': contradicts prompt"),
        ({"prompt": f"{TASK}:promt"}, ConfigError, r"has no function 'promt'.*Did you mean 'prompt'\?"),
        ({"prompt": "nowhere.py:prompt"}, ConfigError, r"no such file"),
        ({"template": "{metadta[direction]}"}, ConfigError, r"data.template=.*An item has question, answer, metadata"),
        ({"size": 0}, ConfigError, r"size=0"),
        ({"eval_fraction": 1}, ConfigError, r"eval_fraction"),
    ],
)
def test_wrong_settings_are_named(settings: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        _source(**settings)[0]


def test_functions_that_return_something_else_are_named(tmp_path: Path) -> None:
    path = tmp_path / "wrong.py"
    path.write_text("def prompt(item):\n    return 3\n\n\ndef demonstrate(item, rng):\n    return None\n")
    with pytest.raises(DataError, match=r"data.prompt of item 4=3: a prompt is text"):
        _source(prompt=f"{path}:prompt")[4]
    with pytest.raises(DataError, match=r"row 2: a demonstration must be text"):
        _source(demonstration=f"{path}:demonstrate").demonstration(2)
