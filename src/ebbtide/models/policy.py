"""Backbone and log-prob head as one module, so that one forward runs both and the hooks of sharding hold.

`[N, V]` logits are never made: the head's weight goes to `numerics.logprobs` together with the hidden states.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ebbtide.data.microbatch import Microbatch, join, microbatches, spread
from ebbtide.device import Device
from ebbtide.errors import DataError, ModelError, problem
from ebbtide.models.attention import PackedAttention
from ebbtide.models.head import head_options
from ebbtide.models.prefix import PrefixAttention, PrefixLayout
from ebbtide.models.stage import Span, cut_stage
from ebbtide.models.support import context_tokens
from ebbtide.numerics.logprobs import Head, TokenStats, token_stats
from ebbtide.types import TrainBatch

__all__ = ["Layout", "Policy", "batch_logprobs"]


@dataclass(frozen=True, slots=True)
class Layout:
    """What the forward of a batch runs over.

    Attributes:
        tokens: [S] int64, fewer than the batch's where prompts are shared.
        position_ids: [S] int64.
        predictor: [N] int64, for each trained token the forward token that predicts it.
        targets: [N] int64, the trained tokens.
        plan: who attends to whom.
    """

    tokens: Tensor
    position_ids: Tensor
    predictor: Tensor
    targets: Tensor
    plan: PackedAttention | PrefixAttention


class Policy(nn.Module):
    """A causal language model that answers with log-probs instead of logits; or one stage of it.

    Attributes:
        model: the transformers model; its parameter names, less the prefix `model.`, are the checkpoint's.
        span: which of its layers are here.
        tied_name: the embedding's name where it is the head as well; a last stage without embedding has a copy of it.
    """

    def __init__(self, model: PreTrainedModel, *, shares_prompts: bool = True, span: Span | None = None) -> None:
        """Take the model over; a span other than the whole cuts it.

        Args:
            model: whole.
            shares_prompts: compute the prompt of a group once, where that saves enough.
            span: the layers to keep; None keeps all.
        """
        super().__init__()
        self._softcap, self._logit_scale = head_options(model)  # refuses a head that this module cannot reproduce
        self.tied_name = _tied_name(model)
        self._context_tokens = context_tokens(model.config)
        self.model = model
        self.shares_prompts = shares_prompts
        self.span = span or Span.whole(model)
        self._inlet = cut_stage(model, self.span)

    def layout(self, batch: TrainBatch) -> Layout:
        """What the forward of this batch runs over; the same on every stage.

        Raises:
            DataError: a sequence is longer than the model's context, or its first token is to be trained.
        """
        self._check(batch)
        trained_N = batch.loss_mask.nonzero().squeeze(1)
        targets_N, device = batch.tokens[trained_N], batch.tokens.device
        if self.shares_prompts:
            prefix = PrefixLayout.of(batch.to(torch.device("cpu")))
            if prefix.pays:
                source, plan = prefix.source.to(device), PrefixAttention(prefix, device)
                predictor_N = prefix.predictor.to(device)
                return Layout(batch.tokens[source], batch.position_ids[source], predictor_N, targets_N, plan)
        return Layout(batch.tokens, batch.position_ids, trained_N - 1, targets_N, PackedAttention(batch.cu_seqlens))

    def _check(self, batch: TrainBatch) -> None:
        longest = int(batch.lengths.max())
        if longest > self._context_tokens:
            rule = f"a sequence is longer than the model's context of {self._context_tokens} tokens"
            raise DataError(problem("batch.lengths", longest, rule, "Lower sampling.max_tokens or the prompts' limit"))
        if bool(batch.loss_mask[batch.cu_seqlens[:-1].long()].any()):
            rule = "is True on a sequence's first token, which nothing predicts"
            raise DataError(problem("batch.loss_mask", True, rule, "Train only tokens that follow another"))

    def forward(
        self,
        batch: TrainBatch | Layout,
        received: Tensor | None = None,
        *,
        temperature: float = 1.0,
        want_entropy: bool = False,
        entropy_grad: bool = True,
    ) -> TokenStats | Tensor:
        """Statistics of the N trained tokens, in order: each from the hidden state of the token before it.

        Args:
            batch: the batch, or its layout.
            received: [1, S, D] from the stage before; None on the first.
            temperature: of the log-probs.
            want_entropy: whether to compute the entropy.
            entropy_grad: whether it is differentiable.

        Returns:
            The statistics on the last stage; [1, S, D] for the next stage on every other one.
        """
        layout = batch if isinstance(batch, Layout) else self.layout(batch)
        hidden = self._hidden(layout, received)
        if not self.span.is_last:
            return hidden
        predicting_ND = hidden[0].index_select(0, layout.predictor)
        stats = self._answer(predicting_ND, layout.targets, temperature, want_entropy, entropy_grad)
        # Hooks of sharding hang on the result, and an in-place operator on a view would drop them silently.
        return replace(stats, logprobs=stats.logprobs.clone()) if stats.logprobs._is_view() else stats

    def _answer(
        self, hidden_ND: Tensor, targets_N: Tensor, temperature: float, want_entropy: bool, entropy_grad: bool
    ) -> TokenStats:
        return token_stats(
            hidden_ND,
            self.head(),
            targets_N,
            temperature=temperature,
            want_entropy=want_entropy,
            entropy_grad=entropy_grad,
        )

    def _hidden(self, layout: Layout, received: Tensor | None) -> Tensor:
        """[1, S, D]: final hidden states, or on a stage that is not the last what its layers make of `received`."""
        calls = layout.plan.calls
        backbone = self.model.get_decoder()
        entry: dict[str, Tensor] = {}
        if received is None:
            entry["input_ids"] = layout.tokens[None]
        else:
            assert self._inlet is not None, self.span
            self._inlet.received = received
            entry["inputs_embeds"] = received.new_zeros(()).expand(received.shape)
        output = backbone(**entry, position_ids=layout.position_ids[None], use_cache=False, plan=layout.plan)
        if self._inlet is not None:
            self._inlet.received = None
        if layout.plan.calls - calls != self.span.num_layers:
            rule = f"{layout.plan.calls - calls} of {self.span.num_layers} layers attended through the plan"
            remedy = "It cannot be packed; choose another"
            raise ModelError(problem("model", self.model.config.model_type, rule, remedy))
        hidden: Tensor = output.last_hidden_state
        return hidden

    def head(self) -> Head:
        """The output projection as it is now (sharded weights are whole only inside forward)."""
        output = self.model.get_output_embeddings()
        return Head(output.weight, getattr(output, "bias", None), self._softcap, self._logit_scale)


@torch.no_grad()
def batch_logprobs(policy: Policy, batch: TrainBatch, temperature: float, max_tokens: int, device: Device) -> Tensor:
    """[T] float32 on the host, 0 where not trained; at most `max_tokens` a forward."""

    def logprobs() -> Iterator[tuple[Microbatch, Tensor]]:
        for microbatch in microbatches(batch, max_tokens, device.torch, keep_groups=True):
            stats = policy(microbatch.batch, temperature=temperature)
            yield microbatch, spread(stats.logprobs, microbatch.batch.loss_mask)

    return join(batch, logprobs())


def _tied_name(model: PreTrainedModel) -> str | None:
    head = model.get_output_embeddings().weight
    if head is not model.get_input_embeddings().weight:
        return None
    return next(str(name) for name, weight in model.named_parameters() if weight is head)
