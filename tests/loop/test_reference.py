"""The reference policy is the run's first policy, as a second model or as an engine without its adapters."""

from typing import Any

import pytest
import torch

from ebbtide.loop.parts import Parts
from ebbtide.loop.reference import AdapterReference, Reference
from ebbtide.loop.sync import train_step
from tests.loop.running import function_reward, recipe, with_parts


@pytest.mark.parametrize(
    ("changes", "kind"),
    [({}, Reference), ({"engine": {"type": "fsdp", "lora": {"rank": 2}}}, AdapterReference)],
    ids=["second model", "adapters"],
)
def test_stays_where_the_policy_began(changes: dict[str, Any], kind: type) -> None:
    async def work(parts: Parts) -> list[float]:
        assert isinstance(parts.reference, kind)
        first = [weight.clone() for _, weight in parts.engine.named_weights()]
        found = [(await train_step(parts, step)).metrics["policy/ref_kl_nats"] for step in range(4)]
        last = [weight for _, weight in parts.engine.named_weights()]
        assert not all(torch.equal(a, b) for a, b in zip(first, last, strict=True))
        return found

    chosen = recipe(
        rewards=function_reward("distinct"),
        **{"steps": 4, "optim.lr": 1e-2, "optim.schedule": "constant", "algorithm.kl.coef": 0.01},
        **changes,
    )
    found = with_parts(chosen, work)
    assert found[0] == pytest.approx(0.0, abs=1e-6)
    assert found[-1] > 1e-4
