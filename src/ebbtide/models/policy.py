"""Backbone and log-prob head as one module, so that one forward runs both and the hooks of sharding hold.

`[N, V]` logits are never made: the head's weight goes to `numerics.logprobs` together with the hidden states.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ebbtide.data.microbatch import Microbatch, join, microbatches, spread
from ebbtide.device import Device
from ebbtide.errors import ModelError, problem
from ebbtide.models.attention import PackedAttention
from ebbtide.models.prefix import PrefixAttention, PrefixLayout
from ebbtide.numerics.logprobs import Head, TokenStats, token_stats
from ebbtide.types import TrainBatch

__all__ = ["Policy", "batch_logprobs", "head_options"]


class Policy(nn.Module):
    """A causal language model that answers with log-probs instead of logits.

    Attributes:
        model: the transformers model; its parameter names, less the prefix `model.`, are the checkpoint's.
    """

    def __init__(self, model: PreTrainedModel, *, shares_prompts: bool = True) -> None:
        """shares_prompts: compute the prompt of a group once, where that saves enough."""
        super().__init__()
        self.model = model
        self.shares_prompts = shares_prompts
        self._num_layers = int(model.config.get_text_config().num_hidden_layers)
        head_options(model)  # refuses a head that this module cannot reproduce

    def forward(
        self,
        batch: TrainBatch,
        *,
        temperature: float = 1.0,
        want_entropy: bool = False,
        entropy_grad: bool = True,
    ) -> TokenStats:
        """Statistics of the batch's N trained tokens, in order: each from the hidden state of the token before it."""
        trained_N = batch.loss_mask.nonzero().squeeze(1)
        source, predictor_N, plan = self._layout(batch, trained_N)
        hidden_SD = self.hidden(batch.tokens[source], batch.position_ids[source], plan)
        if plan.calls % self._num_layers or not plan.calls:
            rule = f"{plan.calls} of {self._num_layers} layers attended through the plan"
            raise ModelError(
                problem("model", self.model.config.model_type, rule, "It cannot be packed; choose another")
            )
        stats = token_stats(
            hidden_SD.index_select(0, predictor_N),
            self.head(),
            batch.tokens[trained_N],
            temperature=temperature,
            want_entropy=want_entropy,
            entropy_grad=entropy_grad,
        )
        # Hooks of sharding hang on the result, and an in-place operator on a view would drop them silently.
        return replace(stats, logprobs=stats.logprobs.clone()) if stats.logprobs._is_view() else stats

    def _layout(
        self, batch: TrainBatch, trained_N: Tensor
    ) -> tuple[Tensor | slice, Tensor, PackedAttention | PrefixAttention]:
        """The packed tokens that the forward runs over, where each trained one is predicted, and who sees whom."""
        if self.shares_prompts:
            layout = PrefixLayout.of(batch.to(torch.device("cpu")))
            if layout.pays:
                device = batch.tokens.device
                return layout.source.to(device), layout.predictor.to(device), PrefixAttention(layout, device)
        return slice(None), trained_N - 1, PackedAttention(batch.cu_seqlens)

    def hidden(self, tokens: Tensor, position_ids: Tensor, plan: Any) -> Tensor:
        """[T, D] final hidden states of tokens [T] at position_ids [T]."""
        backbone = self.model.get_decoder()
        output = backbone(input_ids=tokens[None], position_ids=position_ids[None], use_cache=False, plan=plan)
        hidden: Tensor = output.last_hidden_state
        return hidden[0]

    def head(self) -> Head:
        """The output projection as it is now (sharded weights are whole only inside forward)."""
        output = self.model.get_output_embeddings()
        softcap, logit_scale = head_options(self.model)
        return Head(output.weight, getattr(output, "bias", None), softcap, logit_scale)


@torch.no_grad()
def batch_logprobs(policy: nn.Module, batch: TrainBatch, temperature: float, max_tokens: int, device: Device) -> Tensor:
    """[T] float32 on the host, 0 where not trained; at most `max_tokens` a forward."""

    def logprobs() -> Iterator[tuple[Microbatch, Tensor]]:
        for microbatch in microbatches(batch, max_tokens, device.torch, keep_groups=True):
            stats: TokenStats = policy(microbatch.batch, temperature=temperature)
            yield microbatch, spread(stats.logprobs, microbatch.batch.loss_mask)

    return join(batch, logprobs())


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
