"""Temperature that costs nothing where it is 1.

Dividing `[N, V]` logits by 1 would take a second tensor of that size to change no bit, so 1 is recognised before it
becomes work: a host scalar always, a tensor wherever it can be read without waiting for a device.
"""

import math

import torch
from torch import Tensor

from ebbtide.errors import DataError, problem

__all__ = ["is_readable", "read_temperature", "scale_logits"]


def is_readable(tensor: Tensor) -> bool:
    """Whether its values can be looked at now: on the host, not fake, not traced. A device would have to be awaited."""
    return tensor.device.type == "cpu" and type(tensor) in (Tensor, torch.nn.Parameter)


def read_temperature(
    temperature: float | Tensor, num_tokens: int, dtype: torch.dtype = torch.float32
) -> float | Tensor | None:
    """None where it is 1, else a host scalar, else a value a token [N].

    Args:
        temperature: a number above 0, or a tensor of one element or of [N].
        num_tokens: N.
        dtype: of the result, where it is a tensor.

    Raises:
        DataError: not finite, not above 0, or of another shape. A tensor on a device is not read, see `is_readable`.

    Example:
        >>> read_temperature(1, 4), read_temperature(torch.ones(4), 4), read_temperature(torch.full((4,), 0.5), 4)
        (None, None, 0.5)
    """
    if not isinstance(temperature, Tensor):
        _check(temperature, temperature)
        return None if temperature == 1 else float(temperature)
    values_N = temperature.detach().reshape(-1).to(dtype)
    if values_N.shape[0] not in (1, num_tokens):
        rule = f"must be a scalar or hold one value for each of {num_tokens} tokens"
        raise DataError(problem("temperature.shape", tuple(temperature.shape), rule))
    if not is_readable(values_N):
        return values_N.expand(num_tokens)
    if values_N.numel() == 0:
        return None
    low, high = (float(value) for value in values_N.aminmax())
    _check(low, low)
    _check(high, high)
    if low == high:
        return None if low == 1 else low
    return values_N


def scale_logits(logits: Tensor, temperature: float | Tensor | None) -> Tensor:
    """Logits [..., V] divided by the temperature, without a second copy of them wherever that is sound.

    The caller gives its logits up: they are divided in place unless autograd would refuse that (a leaf that requires
    grad, a view made inside a custom function), or a hook waits on them, which a change in place would drop without a
    word (FSDP2 hangs the gathering of its parameters on the tensors that a module returns). An operator before this
    one that needs its own output for its gradient makes the backward raise; nothing is computed from changed values.

    Args:
        logits: [..., V].
        temperature: as `read_temperature` returns it; a tensor is [...].
    """
    if temperature is None:
        return logits
    divisor = temperature[..., None].to(logits.dtype) if isinstance(temperature, Tensor) else temperature
    return logits.div_(divisor) if _may_change(logits) else logits / divisor


def _may_change(logits: Tensor) -> bool:
    if not (torch.is_grad_enabled() and logits.requires_grad):
        return not logits.is_inference() or torch.is_inference_mode_enabled()
    if logits.is_leaf or logits._backward_hooks:
        return False
    if not logits._is_view():
        return True
    base = logits._base
    has_plain_origin = torch._C._autograd._get_creation_meta(logits) == torch._C._autograd.CreationMeta.DEFAULT
    return has_plain_origin and base is not None and not base.is_leaf and not base._backward_hooks


def _check(value: float, shown: float) -> None:
    if not 0 < value < math.inf:
        remedy = "Greedy decoding has no log-probs to train on; sample at a temperature above 0"
        raise DataError(problem("temperature", shown, "must be finite and above 0", remedy))
