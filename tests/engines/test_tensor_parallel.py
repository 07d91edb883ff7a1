"""Plans of tensor parallelism: what is divided, what is not, and what is refused."""

import pytest
import torch
from torch.distributed.tensor import DTensor

from ebbtide.device import Device
from ebbtide.engines.mesh import Axes, Ranks
from ebbtide.engines.tensor_parallel import parallelize
from ebbtide.errors import ModelError
from ebbtide.models.build import build_model
from tests.contracts.engines import setting
from tests.multiprocess import forked


def test_matrices_are_divided_and_norms_over_heads_are_named() -> None:
    def fn(_: int) -> tuple[dict[str, tuple[int, ...]], int]:
        ranks = Ranks(Device("cpu"), Axes(tp=2), needs_mesh=True)
        model = build_model(setting().model, dtype=torch.float32, seed=0)
        assert ranks.mesh is not None
        norms = parallelize(model, ranks.mesh["tp"])
        divided = {
            name.partition("layers.0.")[2]: tuple(weight.to_local().shape)
            for name, weight in model.named_parameters()
            if isinstance(weight, DTensor) and "layers.0." in name
        }
        assert not any(isinstance(weight, DTensor) for norm in norms for weight in norm.parameters())
        return divided, len(norms)

    for divided, num_norms in forked(fn, 2):
        assert divided == {
            "self_attn.q_proj.weight": (16, 32),
            "self_attn.k_proj.weight": (8, 32),
            "self_attn.v_proj.weight": (8, 32),
            "self_attn.o_proj.weight": (32, 16),
            "mlp.gate_proj.weight": (32, 32),
            "mlp.up_proj.weight": (32, 32),
            "mlp.down_proj.weight": (32, 32),
        }
        assert num_norms == 4, "two a layer"


@pytest.mark.parametrize(("model_type", "message"), [("qwen3_moe", "'moe_tp_experts', which is not supported")])
def test_a_plan_with_an_unknown_style_is_refused(model_type: str, message: str) -> None:
    def fn(_: int) -> str:
        ranks = Ranks(Device("cpu"), Axes(tp=2), needs_mesh=True)
        how = setting(model_type, head_dim=...)
        model = build_model(how.model, dtype=torch.float32, seed=0)
        assert ranks.mesh is not None
        with pytest.raises(ModelError) as raised:
            parallelize(model, ranks.mesh["tp"])
        return str(raised.value)

    assert all(message in found for found in forked(fn, 2))
