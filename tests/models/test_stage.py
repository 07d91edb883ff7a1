"""Models cut by layers: names stay, weights go, and the stages one after another are the model."""

from typing import Any

import pytest
import torch

from ebbtide.errors import ConfigError, ModelError
from ebbtide.models.build import build_model
from ebbtide.models.policy import Policy
from ebbtide.models.stage import Span, cut_stage, decoder_layers, spans
from ebbtide.recipe import ModelSection
from ebbtide.types import TrainBatch
from tests.conftest import ALPHABET, TINY


def model(model_type: str = "qwen3", **fields: Any) -> Any:
    described = {"model_type": model_type, **TINY, "num_hidden_layers": 4, **fields}
    architecture = {name: value for name, value in described.items() if value is not ...}
    return build_model(ModelSection(architecture=architecture, alphabet=ALPHABET), dtype=torch.float32, seed=0)


@pytest.mark.parametrize(
    ("total", "num", "expected"),
    [(4, 1, [(0, 4)]), (4, 2, [(0, 2), (2, 4)]), (5, 2, [(0, 3), (3, 5)]), (7, 4, [(0, 2), (2, 4), (4, 6), (6, 7)])],
)
def test_layers_are_shared_out_evenly(total: int, num: int, expected: list[tuple[int, int]]) -> None:
    found = spans(total, num)
    assert [(span.start, span.stop) for span in found] == expected
    assert [span.is_first for span in found] == [True] + [False] * (num - 1)
    assert [span.is_last for span in found] == [False] * (num - 1) + [True]


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ConfigError, match="each stage needs one"):
        spans(2, 3)


def test_the_whole_is_left_alone() -> None:
    whole = model()
    names = [name for name, _ in whole.named_parameters()]
    assert cut_stage(whole, Span.whole(whole)) is None
    assert [name for name, _ in whole.named_parameters()] == names


@pytest.mark.parametrize("tie", [True, False])
def test_stages_have_every_weight_once_under_its_name(tie: bool) -> None:
    expected = {name for name, _ in model(tie_word_embeddings=tie).named_parameters()}
    found: list[str] = []
    for span in spans(4, 3):
        part = model(tie_word_embeddings=tie)
        cut_stage(part, span)
        assert len(decoder_layers(part)) == 4, "layers keep their numbers"
        found += [name for name, _ in part.named_parameters()]
    assert len(found) == len(set(found))
    assert set(found) - expected == ({"lm_head.weight"} if tie else set())
    assert expected <= set(found)


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("qwen3", {}),
        ("gemma2", {}),  # scales its embeddings within the decoder, and attends in two ways by a layer's number
        ("gemma3_text", {}),  # turns positions in two ways by a layer's number
        ("granite", {"head_dim": ..., "embedding_multiplier": 3.0}),
    ],
)
@pytest.mark.parametrize("num", [2, 3])
def test_stages_one_after_another_are_the_model(model_type: str, fields: dict[str, Any], num: int) -> None:
    sequence = (torch.tensor([1, 2, 3]), torch.tensor([4, 5, 6, 7]), torch.zeros(4))
    batch = TrainBatch.pack([sequence, (*sequence[:1], torch.tensor([9, 8]), torch.zeros(2))])
    whole = Policy(model(model_type, **fields))
    received = None
    with torch.no_grad():
        expected = whole(batch, want_entropy=True)
        for span in spans(4, num):
            stage = Policy(model(model_type, **fields), span=span)
            received = stage(stage.layout(batch), received, want_entropy=True)
    assert received is not None
    assert torch.equal(received.logprobs, expected.logprobs)
    assert torch.equal(received.entropy, expected.entropy)


def test_a_model_without_a_plan_is_refused() -> None:
    part = model()
    part.get_decoder().config.base_model_pp_plan = None
    with pytest.raises(ModelError, match="does not say how its layers are cut"):
        cut_stage(part, Span(0, 2, 4))
