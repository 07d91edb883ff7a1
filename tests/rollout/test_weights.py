"""Whose memory the weights are in, and what stays when they go."""

from typing import Any

import pytest
import torch

from ebbtide.errors import WeightSyncError
from ebbtide.rollout.weights import LoadedModel
from tests.models.zoo import make, tiny_config

CPU = torch.device("cpu")


def push(loaded: LoadedModel, source: Any, *, may_share: bool = True) -> None:
    loaded.begin()
    known = {name for name, _ in source.named_parameters(remove_duplicate=False)}
    stored = [(name, item) for name, item in source.state_dict().items() if name not in known]
    for pair in [*source.named_parameters(), *stored]:
        loaded.load([pair], may_share=may_share)
    loaded.finish(1)


@pytest.mark.parametrize("is_tied", [True, False])
def test_shared_weights_are_the_engines_own_and_follow_its_updates(is_tied: bool) -> None:
    source = make("llama", tie_word_embeddings=is_tied)
    loaded = LoadedModel(source.config, torch.float32, CPU)
    push(loaded, source)
    for name, item in source.named_parameters():
        mine = loaded.model.get_parameter(name)
        assert mine.data_ptr() == item.data_ptr(), name
        assert mine is not item, "the engine's gradients and devices are its own"
        assert not mine.requires_grad
    with torch.no_grad():
        source.model.norm.weight.fill_(3.0)
    assert float(loaded.model.model.norm.weight[0]) == 3.0
    assert (loaded.model.lm_head.weight is loaded.model.model.embed_tokens.weight) == is_tied


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_owned_weights_own_their_storage_and_keep_it_from_push_to_push(dtype: torch.dtype) -> None:
    source = make("llama", tie_word_embeddings=True)
    loaded = LoadedModel(source.config, dtype, CPU)
    push(loaded, source, may_share=False)
    places = {name: item.data_ptr() for name, item in loaded.model.named_parameters()}
    assert not set(places.values()) & {item.data_ptr() for item in source.parameters()}
    with torch.no_grad():
        source.model.norm.weight.fill_(3.0)
    assert float(loaded.model.model.norm.weight[0]) == 1.0
    push(loaded, source, may_share=False)
    assert float(loaded.model.model.norm.weight[0]) == 3.0
    assert places == {name: item.data_ptr() for name, item in loaded.model.named_parameters()}
    assert {item.dtype for item in loaded.model.parameters()} == {dtype}
    assert loaded.model.lm_head.weight is loaded.model.model.embed_tokens.weight


def test_another_dtype_is_never_shared() -> None:
    source = make("llama")
    loaded = LoadedModel(source.config, torch.bfloat16, CPU)
    push(loaded, source, may_share=True)
    mine, theirs = loaded.model.model.norm.weight, source.model.norm.weight
    assert mine.dtype == torch.bfloat16
    assert mine.data_ptr() != theirs.data_ptr()
    again = mine.data_ptr()
    push(loaded, source, may_share=True)
    assert loaded.model.model.norm.weight.data_ptr() == again


def test_what_was_shared_is_not_written_to_when_copies_come() -> None:
    first, second = make("llama"), make("llama")
    with torch.no_grad():
        second.model.norm.weight.fill_(5.0)
    loaded = LoadedModel(first.config, torch.float32, CPU)
    push(loaded, first, may_share=True)
    push(loaded, second, may_share=False)
    assert float(first.model.norm.weight.detach()[0]) == 1.0
    assert float(loaded.model.model.norm.weight[0]) == 5.0


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "deepseek_v3", "apertus"])
@pytest.mark.parametrize("may_share", [True, False])
def test_dropped_weights_leave_buffers_and_a_push_brings_all_back(model_type: str, may_share: bool) -> None:
    """Tied weights too: each module lets go of its own, and they are one again after the push."""
    source = make(model_type, tie_word_embeddings=True)
    with torch.no_grad():
        for name, buffer in source.named_buffers():
            if "e_score" in name or "act_fn" in name:
                buffer.add_(0.5)
    loaded = LoadedModel(source.config, torch.float32, CPU)
    push(loaded, source, may_share=may_share)
    buffers = {name: item.clone() for name, item in loaded.model.named_buffers()}
    loaded.drop()
    assert {item.device.type for item in loaded.model.parameters()} == {"meta"}
    for name, item in loaded.model.named_buffers():
        assert torch.equal(item, buffers[name]), name
    push(loaded, source, may_share=may_share)
    assert loaded.model.lm_head.weight is loaded.model.model.embed_tokens.weight
    expected = source.state_dict()
    for name, item in loaded.model.state_dict().items():
        assert torch.equal(item, expected[name]), name


def test_what_is_missing_unknown_or_of_another_shape_is_named() -> None:
    source = make("llama")
    loaded = LoadedModel(source.config, torch.float32, CPU)
    loaded.begin()
    for name, item in list(source.named_parameters())[1:]:
        loaded.load([(name, item)], may_share=True)
    with pytest.raises(WeightSyncError, match=r"version 7 lacked 1 weights") as caught:
        loaded.finish(7)
    assert "model.embed_tokens.weight" in str(caught.value)
    for bad in ("model.layers.9.mlp.up_proj.weight", "model.norm.bias", "weight"):
        with pytest.raises(WeightSyncError, match=f"rollout.weights.{bad}.*no such weight"):
            loaded.load([(bad, torch.zeros(2))], may_share=True)
    with pytest.raises(WeightSyncError, match=r"has shape \(32,\) there"):
        loaded.load([("model.norm.weight", torch.zeros(2))], may_share=True)


def test_a_push_must_bring_stored_buffers() -> None:
    """The bias of a router is no parameter, and without it other experts answer."""
    source = make("deepseek_v3")
    loaded = LoadedModel(source.config, torch.float32, CPU)
    loaded.begin()
    for pair in source.named_parameters():
        loaded.load([pair], may_share=True)
    with pytest.raises(WeightSyncError, match="e_score_correction_bias"):
        loaded.finish(0)


def test_moving_leaves_shared_weights_to_their_owner() -> None:
    source = make("llama")
    loaded = LoadedModel(tiny_config("llama"), torch.float32, CPU)
    push(loaded, source, may_share=True)
    loaded.move_owned(torch.device("meta"))
    assert {item.device.type for item in loaded.model.parameters()} == {"cpu"}
    push(loaded, source, may_share=False)
    loaded.move_owned(torch.device("meta"))
    assert {item.device.type for item in loaded.model.parameters()} == {"meta"}
    assert {item.device.type for item in source.parameters()} == {"cpu"}
