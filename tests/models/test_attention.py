"""Attention by hand, against a float64 reference, and what it refuses."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ebbtide.errors import ModelError
from ebbtide.models.attention import AttentionCall, PackedAttention, attend_dense
from tests.models.zoo import make

CALL = AttentionCall(0, torch.empty(0), torch.empty(0), torch.empty(0), scale=1.0, window=None, softcap=None)


def reference(
    query: Tensor, key: Tensor, value: Tensor, *, scale: float, window: int | None, softcap: float | None
) -> Tensor:
    """[q, Hq, d] of [q, Hq, d] over [k, Hkv, d], the queries being the last q tokens; token by token in float64."""
    query, key, value = query.double(), key.double(), value.double()
    per_group, offset = query.shape[1] // key.shape[1], len(key) - len(query)
    rows = []
    for i in range(len(query)):
        position = i + offset
        first = 0 if window is None else max(0, position - window + 1)
        heads = []
        for head in range(query.shape[1]):
            seen = slice(first, position + 1)
            scores = key[seen, head // per_group] @ query[i, head] * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            heads.append(scores.softmax(0) @ value[seen, head // per_group])
        rows.append(torch.stack(heads))
    return torch.stack(rows)


def test_two_tokens_by_hand() -> None:
    """The second token's scores are 0 and log 3, so it takes a quarter of the first value and three of the second."""
    query = torch.tensor([[[9.0]], [[1.0]]])[None]
    key = torch.tensor([[[0.0]], [[math.log(3)]]])[None]
    value = torch.tensor([[[4.0]], [[8.0]]])[None]
    attended = attend_dense(query, key, value, CALL)
    torch.testing.assert_close(attended.flatten(), torch.tensor([4.0, 7.0]))


@pytest.mark.parametrize("num_queries", [1, 4, 9])
@pytest.mark.parametrize("window", [None, 1, 3, 50])
@pytest.mark.parametrize("softcap", [None, 0.5])
def test_windows_softcaps_and_shared_key_heads(num_queries: int, window: int | None, softcap: float | None) -> None:
    query, key, value = torch.randn(2, num_queries, 4, 8), torch.randn(2, 9, 2, 8), torch.randn(2, 9, 2, 6)
    call = AttentionCall(0, query, key, value, scale=0.3, window=window, softcap=softcap)
    attended = attend_dense(query, key, value, call)
    for b in range(2):
        expected = reference(query[b], key[b], value[b], scale=0.3, window=window, softcap=softcap)
        torch.testing.assert_close(attended[b].double(), expected, atol=2e-6, rtol=0)


def test_a_mask_takes_the_place_of_causality() -> None:
    query, key, value = torch.randn(1, 3, 2, 4), torch.randn(1, 3, 2, 4), torch.randn(1, 3, 2, 4)
    only_last = torch.zeros(1, 1, 3, 3, dtype=torch.bool)
    only_last[..., 2] = True
    for softcap in (None, 5.0):
        call = AttentionCall(0, query, key, value, scale=1.0, window=None, softcap=softcap)
        attended = attend_dense(query, key, value, call, only_last)
        torch.testing.assert_close(attended, value[:, 2:].expand_as(attended))


@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("lengths", [[5], [3, 3], [1, 7, 2, 6], [1, 1, 1], [40, 1, 33]])
def test_packed_sequences_attend_each_alone(lengths: list[int], window: int | None) -> None:
    T = sum(lengths)
    query, key, value = torch.randn(T, 4, 8), torch.randn(T, 2, 8), torch.randn(T, 2, 8)
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    plan = PackedAttention(ends)
    attended = plan.attend(AttentionCall(0, query, key, value, scale=0.5, window=window, softcap=None))
    for start, stop in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True):
        part = slice(start, stop)
        expected = reference(query[part], key[part], value[part], scale=0.5, window=window, softcap=None)
        torch.testing.assert_close(attended[part].double(), expected, atol=2e-6, rtol=0)
    assert plan.calls == 1


def forward(model: Any, **others: Any) -> None:
    model.get_decoder()(input_ids=torch.tensor([[3, 4, 5]]), position_ids=torch.arange(3)[None], **others)


def test_a_call_that_would_be_silently_wrong_is_refused() -> None:
    model, plan = make("llama"), PackedAttention(torch.tensor([0, 3], dtype=torch.int32))
    with pytest.raises(ModelError, match=r"LlamaAttention=None: attention was called without a plan"):
        forward(model, use_cache=False)
    with pytest.raises(ModelError, match="no mask and no transformers cache"):
        forward(model, use_cache=False, plan=plan, attention_mask=torch.zeros(1, 1, 3, 3))
    model.train()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    with pytest.raises(ModelError, match=r"=0\.1: attention dropout is not supported"):
        forward(model, use_cache=False, plan=plan)


def test_two_rows_are_refused() -> None:
    model, plan = make("llama"), PackedAttention(torch.tensor([0, 3], dtype=torch.int32))
    with pytest.raises(ModelError, match="takes one row of tokens"):
        model.get_decoder()(input_ids=torch.ones(2, 3, dtype=torch.long), use_cache=False, plan=plan)


@pytest.mark.parametrize("name", ["s_aux", "position_bias"])
def test_what_changes_scores_beside_the_plan_is_refused(name: str) -> None:
    plan = PackedAttention(torch.tensor([0, 3], dtype=torch.int32))
    with pytest.raises(ModelError, match=f"{name}.*attention sinks, position biases"):
        forward(make("llama"), use_cache=False, plan=plan, **{name: torch.ones(4)})


def test_a_bidirectional_layer_and_one_without_a_number_are_refused() -> None:
    plan = PackedAttention(torch.tensor([0, 3], dtype=torch.int32))
    model = make("llama")
    model.model.layers[1].self_attn.is_causal = False
    with pytest.raises(ModelError, match="bidirectional"):
        forward(model, use_cache=False, plan=plan)
    model = make("llama")
    model.model.layers[1].self_attn.layer_idx = None
    with pytest.raises(ModelError, match="have no number"):
        forward(model, use_cache=False, plan=plan)


def test_a_window_that_the_layer_does_not_pass_on_is_refused() -> None:
    plan = PackedAttention(torch.tensor([0, 3], dtype=torch.int32))
    model = make("gemma3_text")
    model.model.layers[2].self_attn.sliding_window = None
    with pytest.raises(ModelError, match="layer 2 has a sliding window in its config and attends without one"):
        forward(model, use_cache=False, plan=plan)


def test_gradient_checkpointing_attends_through_the_same_plan() -> None:
    model = make("llama").train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    plan = PackedAttention(torch.tensor([0, 2, 3], dtype=torch.int32))
    arguments: dict[str, Any] = {"position_ids": torch.tensor([[0, 1, 0]]), "use_cache": False, "plan": plan}
    hidden = model.get_decoder()(input_ids=torch.tensor([[3, 4, 5]]), **arguments).last_hidden_state
    hidden.square().sum().backward()
    with_checkpoints = model.model.layers[0].self_attn.q_proj.weight.grad.clone()
    model.zero_grad()
    model.gradient_checkpointing_disable()
    hidden = model.get_decoder()(input_ids=torch.tensor([[3, 4, 5]]), **arguments).last_hidden_state
    hidden.square().sum().backward()
    torch.testing.assert_close(model.model.layers[0].self_attn.q_proj.weight.grad, with_checkpoints)
    assert isinstance(model, nn.Module)
