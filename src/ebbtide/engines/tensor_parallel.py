"""Tensor parallelism from the plan that transformers ships with each architecture.

Embedding, head and norms are whole on every rank of the `tp` axis (FSDP2 may still shard them along the others); the
matrices of attention and MLP are divided as the plan says. A norm over the heads of one rank, as in Qwen3, sees only
that rank's heads, so that its gradient is a part of the sum: such norms are returned, and nothing warns of them
otherwise, since the loss is right without them.
"""

from fnmatch import fnmatch

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from transformers import PreTrainedModel

from ebbtide.errors import ConfigError, ModelError, problem

__all__ = ["parallelize"]

_PARTIAL = "replicated_with_grad_allreduce"
_WHOLE = ("embedding_rowwise", "sequence_parallel", "activation")  # not divided here


def parallelize(model: PreTrainedModel, mesh: DeviceMesh) -> list[nn.Module]:
    """Divide the model's matrices over the mesh, in place.

    Args:
        model: whole, or one stage of it.
        mesh: the `tp` axis.

    Returns:
        Modules whose gradients are to be summed over the axis.

    Raises:
        ConfigError: the model's heads or widths do not divide.
        ModelError: no plan, or one with a style that is not supported.
    """
    decoder = model.get_decoder()
    plan: dict[str, str] = getattr(decoder.config, "base_model_tp_plan", None) or {}
    if not plan:
        rule = "transformers has no tensor-parallel plan for it"
        raise ModelError(problem("model", model.config.model_type, rule, "Set engine.tp = 1"))
    _check_divides(decoder.config, mesh.size())
    partial: list[nn.Module] = []
    for name, module in list(decoder.named_modules()):
        style = next((style for pattern, style in plan.items() if _matches(name, pattern)), None)
        if style == _PARTIAL:
            partial.append(module)
        elif style is not None and style not in _WHOLE:
            parallelize_module(module, mesh, _style(model, name, style, module))
    return partial


def _matches(name: str, pattern: str) -> bool:
    return name.count(".") == pattern.count(".") and fnmatch(name, pattern)


def _style(model: PreTrainedModel, name: str, style: str, module: nn.Module) -> ParallelStyle:
    styles: dict[str, ParallelStyle] = {
        "colwise": ColwiseParallel(),
        "colwise_gather_output": ColwiseParallel(output_layouts=Replicate()),
        "rowwise": RowwiseParallel(),
        "rowwise_split_input": RowwiseParallel(input_layouts=Replicate()),
    }
    if style not in styles or not isinstance(module, nn.Linear):
        rule = f"its plan divides {name}, a {type(module).__name__}, by {style!r}, which is not supported"
        raise ModelError(problem("model", model.config.model_type, rule, "Set engine.tp = 1"))
    return styles[style]


def _check_divides(config: object, size: int) -> None:
    problems = []
    for field in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        value = getattr(config, field, None)
        if isinstance(value, int) and value % size:
            problems.append(problem("engine.tp", size, f"must divide the model's {field}, {value}"))
    if problems:
        raise ConfigError(problems)
