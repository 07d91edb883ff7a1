"""Outputs as bytes and back."""

import torch

from ebbtide.engines.base import MicrobatchOutput
from ebbtide.engines.outputs import decode, encode
from ebbtide.types import Ratio


def output(number: int, num_tokens: int, *, has_entropy: bool) -> MicrobatchOutput:
    one = torch.tensor(1.0)
    return MicrobatchOutput(
        sequences=tuple(range(number, number + 2)),
        loss=torch.tensor(0.5 * number),
        logprobs=torch.arange(num_tokens) * -0.25,
        entropy=torch.rand(num_tokens) if has_entropy else None,
        metrics={"b/second_ratio": Ratio(one, one), "a/first_nats": Ratio(torch.tensor(3), torch.tensor(4.0).double())},
    )


def test_everything_comes_back_in_its_order_and_dtype() -> None:
    """Eleven of them, so that an order of texts would show; two metrics share one tensor."""
    sent = [output(number, number + 1, has_entropy=number % 2 == 0) for number in range(11)]
    received = decode(encode(sent), torch.device("cpu"))
    assert [item.sequences for item in received] == [item.sequences for item in sent]
    for new, old in zip(received, sent, strict=True):
        assert torch.equal(new.loss, old.loss)
        assert torch.equal(new.logprobs, old.logprobs)
        assert (new.entropy is None) == (old.entropy is None)
        assert list(new.metrics) == ["b/second_ratio", "a/first_nats"]
        for name, ratio in old.metrics.items():
            assert torch.equal(new.metrics[name].total, ratio.total)
            assert new.metrics[name].total.dtype == ratio.total.dtype
            assert new.metrics[name].count.dtype == ratio.count.dtype


def test_none_at_all() -> None:
    assert decode(encode([]), torch.device("cpu")) == []
