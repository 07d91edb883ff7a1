"""What a model makes of its final hidden states.

Logits are made whole only to draw a token or to compare models; training does without (`ebbtide.numerics.logprobs`).
"""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ebbtide.errors import ModelError, problem

__all__ = ["head_options", "logits_of"]


def head_options(model: PreTrainedModel) -> tuple[float | None, float | None]:
    """Soft-cap and factor that the model applies to its logits.

    Raises:
        ModelError: the model does something else to them.
    """
    config = model.config.get_text_config()
    softcap = getattr(config, "final_logit_softcapping", None)
    scale = getattr(config, "logit_scale", None)
    divisor = getattr(config, "logits_scaling", None)
    if divisor is not None:
        scale = 1.0 / divisor
    if not isinstance(model.get_output_embeddings(), nn.Linear):
        rule = f"its head is a {type(model.get_output_embeddings()).__name__}, not a linear layer"
        raise ModelError(problem("model", config.model_type, rule, "Choose a causal language model"))
    return softcap, None if scale in (None, 1.0) else float(scale)


def logits_of(model: PreTrainedModel, hidden_ND: Tensor) -> Tensor:
    """[N, V] logits of final hidden states, in the model's dtype."""
    softcap, logit_scale = head_options(model)
    logits: Tensor = model.get_output_embeddings()(hidden_ND)
    if logit_scale is not None:
        logits = logits * logit_scale
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    return logits
