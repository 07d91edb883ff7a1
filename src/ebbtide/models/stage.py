"""One stage of a model cut by its layers: the model itself, with what belongs to other stages taken out.

Layers keep their numbers, so that names are the checkpoint's and whatever the model looks up by a layer's number
stays right. What a stage receives enters through the last absent layer before its own: the model may do what it likes
to its embeddings before, it is not used.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from ebbtide.errors import ConfigError, ModelError, problem

__all__ = ["Inlet", "Span", "cut_stage", "decoder_layers", "spans"]


@dataclass(frozen=True, slots=True)
class Span:
    """The layers `start` to `stop` of a model that has `total`."""

    start: int
    stop: int
    total: int

    @staticmethod
    def whole(model: PreTrainedModel) -> "Span":
        """All layers."""
        total = len(decoder_layers(model))
        return Span(0, total, total)

    @property
    def num_layers(self) -> int:
        """Layers here."""
        return self.stop - self.start

    @property
    def is_first(self) -> bool:
        """Whether the embedding is here."""
        return self.start == 0

    @property
    def is_last(self) -> bool:
        """Whether the last norm and the head are here."""
        return self.stop == self.total


def spans(total: int, num_stages: int) -> list[Span]:
    """The layers cut into stages; the last stage, which has the head too, is never among the longer ones.

    Raises:
        ConfigError: fewer layers than stages.

    Example:
        >>> [(span.start, span.stop) for span in spans(7, 3)]
        [(0, 3), (3, 5), (5, 7)]
    """
    if num_stages > total:
        rule = f"the model has {total} layers, and each stage needs one"
        raise ConfigError(problem("engine.pp * engine.virtual_stages", num_stages, rule, "Lower it"))
    short, num_long = divmod(total, num_stages)
    stops = [sum(short + (k < num_long) for k in range(stage + 1)) for stage in range(num_stages)]
    return [Span(start, stop, total) for start, stop in zip([0, *stops[:-1]], stops, strict=True)]


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The layers of the model's decoder, in order.

    Raises:
        ModelError: it keeps them somewhere unknown.
    """
    decoder = model.get_decoder()
    layers = getattr(decoder, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        rule = f"its decoder {type(decoder).__name__} has no list of layers"
        raise ModelError(problem("model", model.config.model_type, rule, "Choose a decoder-only language model"))
    return layers


class Inlet(nn.Module):
    """Stands for a layer of another stage; the last one before this stage gives out what was received.

    Attributes:
        received: [1, S, D], set for the duration of one forward.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.received: Tensor | None = None
        # Models read settings off their layers, the kind of attention for one.
        plain = {name: value for name, value in vars(layer).items() if not name.startswith("_")}
        self.__dict__.update({name: value for name, value in plain.items() if name not in self.__dict__})

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """What was received; the hidden states as they are, where nothing was."""
        del args, kwargs
        return hidden_states if self.received is None else self.received


def cut_stage(model: PreTrainedModel, span: Span) -> Inlet | None:
    """Take out of the model, in place, what is not in the span; where its input enters, None on the first stage.

    Raises:
        ModelError: the model does not say what stands before and behind its layers.
    """
    if span.is_first and span.is_last:
        return None
    decoder, layers = model.get_decoder(), decoder_layers(model)
    before, behind = _ends(model, decoder)
    for index in range(len(layers)):
        if not span.start <= index < span.stop:
            layers[index] = Inlet(layers[index])
    if not span.is_first:
        _drop(decoder, before)
    if not span.is_last:
        _drop(decoder, behind)
        head = model.get_output_embeddings()
        _drop(model, [name for name, module in model.named_children() if module is head])
    inlet = None if span.is_first else layers[span.start - 1]
    assert inlet is None or isinstance(inlet, Inlet), inlet
    return inlet


def _ends(model: PreTrainedModel, decoder: nn.Module) -> tuple[Sequence[str], Sequence[str]]:
    """Names of the decoder's modules before and behind its layers."""
    plan = getattr(decoder.config, "base_model_pp_plan", None) or {}
    names = list(plan)
    if "layers" not in names:
        rule = "transformers does not say how its layers are cut into stages"
        raise ModelError(problem("model", model.config.model_type, rule, "Use engine.type='fsdp'"))
    at = names.index("layers")
    return names[:at], names[at + 1 :]


def _drop(module: nn.Module, names: Sequence[str]) -> None:
    """Put a module without weights in each place."""
    for name in names:
        setattr(module, name, nn.Identity())
