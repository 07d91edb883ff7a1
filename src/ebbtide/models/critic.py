"""A policy's backbone with one number in place of a distribution: the value of the state before each trained token."""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ebbtide.models.policy import Policy
from ebbtide.numerics.logprobs import TokenStats

__all__ = ["Critic", "give_value_head"]


class Critic(Policy):
    """Answers with values: they stand where a policy has its log-probs, one for each trained token.

    The model is one that `give_value_head` has changed.
    """

    def _answer(
        self,
        hidden_ND: Tensor,
        targets_N: Tensor,  # noqa: ARG002 a value is of the state, whatever comes next
        temperature: float,  # noqa: ARG002
        want_entropy: bool,  # noqa: ARG002
        entropy_grad: bool,  # noqa: ARG002
    ) -> TokenStats:
        values_N = nn.functional.linear(hidden_ND, self.head().weight).squeeze(1).float()
        return TokenStats(values_N, None, None, None)


def give_value_head(model: PreTrainedModel) -> None:
    """Replace the output projection by one row of zeros, so that every value begins at 0."""
    embedding = model.get_input_embeddings().weight
    head = nn.Linear(embedding.shape[1], 1, bias=False, dtype=embedding.dtype, device=embedding.device)
    with torch.no_grad():
        head.weight.zero_()
    model.config.get_text_config().tie_word_embeddings = False
    model.set_output_embeddings(head)
