"""Prefill and decode, token by token, against the packed forward over the whole sequence."""

from typing import Any

import pytest
import torch
from torch import Tensor

from ebbtide.models.attention import AttentionPlan, PackedAttention
from ebbtide.models.cache import DecodeAttention, KeyValueCache, PrefillAttention
from ebbtide.models.support import PROVEN
from tests.models.zoo import VOCABULARY, make

PROMPTS = [torch.tensor([5, 6, 7, 8, 9, 10, 11]), torch.tensor([12]), torch.tensor([13, 14, 15])]
OWNERS = [0, 0, 1, 2]  # the prompt of each row


def hidden(model: Any, tokens: Tensor, positions: Tensor, plan: AttentionPlan) -> Tensor:
    output = model.get_decoder()(input_ids=tokens[None], position_ids=positions[None], use_cache=False, plan=plan)
    found: Tensor = output.last_hidden_state[0]
    return found


def ends(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def prefill(model: Any, cache: KeyValueCache, prompts: list[Tensor], owners: list[int], first_row: int = 0) -> None:
    positions = torch.cat([torch.arange(len(prompt)) for prompt in prompts])
    plan = PrefillAttention(cache, [len(prompt) for prompt in prompts], owners, first_row)
    hidden(model, torch.cat(prompts), positions, plan)
    assert plan.calls == model.config.get_text_config().num_hidden_layers


def whole(model: Any, sequence: Tensor) -> Tensor:
    return hidden(model, sequence, torch.arange(len(sequence)), PackedAttention(ends([len(sequence)])))


@torch.no_grad()
@pytest.mark.parametrize("model_type", sorted(PROVEN))
def test_decoding_gives_the_hidden_states_of_the_whole_sequence(model_type: str) -> None:
    """Past the sliding window of 5, from prompts of several lengths, one of them shared."""
    model = make(model_type)
    drawn = torch.randint(3, VOCABULARY, (4, 6))
    cache = KeyValueCache(num_rows=4, num_tokens=7 + 6)
    prefill(model, cache, PROMPTS, OWNERS)
    starts = torch.tensor([len(PROMPTS[owner]) for owner in OWNERS])
    steps = []
    for step in range(6):
        plan = DecodeAttention(cache, starts + step)
        steps.append(hidden(model, drawn[:, step], starts + step, plan))
        assert plan.calls == model.config.get_text_config().num_hidden_layers
    found = torch.stack(steps, dim=1)
    for row, owner in enumerate(OWNERS):
        expected = whole(model, torch.cat([PROMPTS[owner], drawn[row]]))[-6:]
        torch.testing.assert_close(found[row], expected, atol=2e-5, rtol=0)


@torch.no_grad()
def test_level_rows_are_the_same_as_uneven_ones() -> None:
    """Rows of one length take a path without a mask."""
    model, prompt = make("llama"), torch.tensor([5, 6, 7])
    cache = KeyValueCache(num_rows=2, num_tokens=8)
    prefill(model, cache, [prompt], [0, 0])
    drawn = torch.tensor([8, 9])
    level = hidden(model, drawn, torch.tensor([3, 3]), DecodeAttention(cache, torch.tensor([3, 3])))
    for row in range(2):
        expected = whole(model, torch.cat([prompt, drawn[row : row + 1]]))[-1]
        torch.testing.assert_close(level[row], expected, atol=2e-5, rtol=0)


@torch.no_grad()
def test_rows_move_and_newcomers_take_what_is_free() -> None:
    model = make("gemma3_text")
    cache = KeyValueCache(num_rows=4, num_tokens=8)
    prefill(model, cache, PROMPTS, [0, 1, 2])
    cache.move([2], [1])
    newcomer = torch.arange(3, 14)
    cache.reserve(len(newcomer) + 1)
    assert cache.num_tokens == 12, "at least by half, so that growth is rare"
    prefill(model, cache, [newcomer], [0, 0], first_row=2)
    past = [PROMPTS[0], PROMPTS[2], newcomer, newcomer]
    positions, drawn = torch.tensor([len(part) for part in past]), torch.tensor([30, 31, 32, 33])
    found = hidden(model, drawn, positions, DecodeAttention(cache, positions))
    for row in range(4):
        expected = whole(model, torch.cat([past[row], drawn[row : row + 1]]))[-1]
        torch.testing.assert_close(found[row], expected, atol=2e-5, rtol=0)


def test_room_grows_by_half_at_least_and_never_shrinks() -> None:
    cache = KeyValueCache(num_rows=1, num_tokens=10)
    cache.reserve(5)
    assert cache.num_tokens == 10
    cache.reserve(11)
    assert cache.num_tokens == 15
    cache.reserve(100)
    assert cache.num_tokens == 100
    cache.move([], [])
