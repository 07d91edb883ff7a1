"""Packed and prompt-sharing forwards against the model's own, one sequence at a time."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from ebbtide.device import Device
from ebbtide.errors import DataError, ModelError
from ebbtide.models.attention import PackedAttention
from ebbtide.models.head import head_options
from ebbtide.models.policy import Policy, batch_logprobs
from ebbtide.models.prefix import PrefixAttention
from ebbtide.models.support import PROVEN
from ebbtide.numerics.logprobs import TokenStats
from ebbtide.types import TrainBatch
from tests.models.zoo import make, own_logprobs, packed

WITH_GRADIENTS = (
    "cohere",
    "gemma2",
    "gemma3_text",
    "granite",
    "llama",
    "mistral",
    "olmo2",
    "phi3",
    "qwen2",
    "qwen3",
    "qwen3_moe",
)
# transformers' sdpa leaves soft-caps out, without an error.
OWN_ATTENTION = {"gemma2": "eager"}
GROUPED = packed([(9, 7), (9, 12), (9, 1), (9, 8), (2, 3), (2, 1), (2, 11), (2, 4)], per_group=4)
LOOSE = packed([(3, 9), (1, 1), (12, 4), (6, 14), (1, 2)])


def logprobs(model: Any, batch: TrainBatch, *, share: bool, temperature: float = 1.0) -> Tensor:
    policy = Policy(model, shares_prompts=share)
    stats = policy(policy.layout(batch), temperature=temperature)
    assert isinstance(stats, TokenStats)
    return stats.logprobs


def gradients(model: nn.Module, logprobs_N: Tensor) -> dict[str, Tensor]:
    """Of a sum in which every token weighs differently."""
    model.zero_grad()
    (logprobs_N * torch.arange(1.0, len(logprobs_N) + 1).cos()).sum().backward()
    return {name: item.grad.clone() for name, item in model.named_parameters() if item.grad is not None}


@pytest.mark.parametrize("model_type", sorted(PROVEN))
def test_every_proven_type_gives_its_own_logprobs(model_type: str) -> None:
    model, own = make(model_type), make(model_type, attention=OWN_ATTENTION.get(model_type, "sdpa"))
    with torch.no_grad():
        for batch in (GROUPED, LOOSE):
            expected = own_logprobs(own, batch)
            assert float(expected.std()) > 0.2, "weights too small for the comparison to say anything"
            for share in (False, True):
                torch.testing.assert_close(logprobs(model, batch, share=share), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("model_type", WITH_GRADIENTS)
def test_gradients_are_the_models_own(model_type: str) -> None:
    model, own = make(model_type).train(), make(model_type, attention=OWN_ATTENTION.get(model_type, "sdpa")).train()
    expected = gradients(own, own_logprobs(own, GROUPED, temperature=0.7))
    for share in (False, True):
        found = gradients(model, logprobs(model, GROUPED, share=share, temperature=0.7))
        assert found.keys() == expected.keys()
        for name, grad in found.items():
            size = float(expected[name].abs().max())
            torch.testing.assert_close(grad, expected[name], atol=2e-5 * max(size, 1e-3), rtol=0, msg=name)


@cache
def one_layer() -> Any:
    return make("gemma3_text", num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"])


@st.composite
def batches(draw: st.DrawFn) -> TrainBatch:
    """Groups with a common prompt or not, one-token completions, masks with holes, sequences that are not trained."""
    lengths, groups = [], draw(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 4)), min_size=1, max_size=4))
    group_ids = []
    for g, (num_prompt, size) in enumerate(groups):
        for _ in range(size):
            lengths.append((num_prompt, draw(st.integers(1, 10))))
            group_ids.append(g if draw(st.booleans()) else 0)
    batch = packed(lengths, seed=draw(st.integers(0, 99)))
    tokens, mask = batch.tokens.clone(), batch.loss_mask.clone()
    starts = batch.cu_seqlens.tolist()
    b = 0
    for num_prompt, size in groups:
        for member in range(size):
            start, stop = starts[b], starts[b + 1]
            if draw(st.booleans()):  # otherwise its prompt is its own, under an id that others may have
                first = starts[b - member]
                tokens[start : start + num_prompt] = tokens[first : first + num_prompt]
            for t in range(start + num_prompt, stop):
                mask[t] = draw(st.integers(0, 3)) > 0
            b += 1
    return replace(batch, tokens=tokens, loss_mask=mask, group_ids=torch.tensor(group_ids, dtype=torch.int32))


@settings(max_examples=40, deadline=None)
@given(batches())
def test_sharing_prompts_changes_neither_logprobs_nor_gradients(batch: TrainBatch) -> None:
    model = one_layer()
    plain = logprobs(model, batch, share=False)
    shared = logprobs(model, batch, share=True)
    torch.testing.assert_close(shared, plain, atol=1e-5, rtol=0)
    if not batch.loss_mask.any():
        assert shared.shape == (0,)
        return
    expected, found = gradients(model, plain), gradients(model, shared)
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, atol=3e-5 * max(float(grad.abs().max()), 0.1), rtol=0, msg=name)


@settings(max_examples=20, deadline=None)
@given(batches())
def test_a_sequence_never_sees_its_neighbour(batch: TrainBatch) -> None:
    model = one_layer()
    with torch.no_grad():
        together = logprobs(model, batch, share=True)
        alone = [logprobs(model, batch.select([b]), share=True) for b in range(batch.num_sequences)]
    torch.testing.assert_close(together, torch.cat(alone), atol=1e-5, rtol=0)


def test_prompts_are_shared_where_that_saves_an_eighth() -> None:
    policy = Policy(one_layer())
    layout = policy.layout(GROUPED)
    assert isinstance(layout.plan, PrefixAttention)
    # Prompts of 9 and 2 once; each completion without its last token: 28 - 4 and 19 - 4.
    assert len(layout.tokens) == 11 + 24 + 15
    assert isinstance(policy.layout(LOOSE).plan, PackedAttention)
    assert isinstance(Policy(one_layer(), shares_prompts=False).layout(GROUPED).plan, PackedAttention)


def test_batch_logprobs_are_placed_and_do_not_depend_on_the_microbatch() -> None:
    policy, cpu = Policy(one_layer()), Device("cpu")
    whole = batch_logprobs(policy, GROUPED, 0.9, 10_000, cpu)
    assert whole.shape == (GROUPED.num_tokens,)
    assert not whole.requires_grad
    assert float(whole[~GROUPED.loss_mask].abs().max()) == 0
    with torch.no_grad():
        expected = logprobs(one_layer(), GROUPED, share=False, temperature=0.9)
    torch.testing.assert_close(whole[GROUPED.loss_mask], expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(batch_logprobs(policy, GROUPED, 0.9, 24, cpu), whole, atol=1e-5, rtol=0)


def test_what_a_model_does_to_its_logits_is_read_from_its_config() -> None:
    assert head_options(make("llama")) == (None, None)
    assert head_options(make("gemma2"))[0] == 30.0
    assert head_options(make("cohere", logit_scale=0.0625))[1] == 0.0625
    assert head_options(make("granite"))[1] == 0.5
    odd = make("llama")
    odd.set_output_embeddings(nn.Sequential(odd.get_output_embeddings()))
    with pytest.raises(ModelError, match="its head is a Sequential"):
        Policy(odd)


def test_a_batch_that_would_be_silently_wrong_is_refused() -> None:
    policy = Policy(make("llama", max_position_embeddings=16))
    first = packed([(2, 3), (2, 3)])
    mask = first.loss_mask.clone()
    mask[5] = True
    with pytest.raises(DataError, match="first token, which nothing predicts"):
        policy.layout(replace(first, loss_mask=mask))
    with pytest.raises(DataError, match=r"batch\.lengths=17: a sequence is longer than the model's context of 16"):
        policy.layout(packed([(2, 3), (10, 7)]))
    policy.layout(packed([(2, 3), (10, 6)]))
