"""A tree with every kind of field, for the tests of the configuration."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from ebbtide.config import Choice, Component, Section
from ebbtide.errors import ConfigError, problem

__all__ = ["Inner", "Outer"]


EXACT: Any = {"type": "exact"}


class Inner(Section):
    """Settings of the inner part."""

    rate: float = Field(0.5, ge=0, lt=1)
    """How fast."""
    norm: float | None = 1.0
    """Bound; None leaves it away."""
    label: str | None = None


class Outer(Section):
    """A tree with every kind of field."""

    steps: int = Field(ge=1)
    """How many."""
    lr: float = Field(1e-3, gt=0)
    on: bool = False
    mode: Literal["a", "b"] = "a"
    pair: tuple[float, Annotated[float, Field(le=1)]] = (0.0, 1.0)
    words: tuple[str, ...] = ()
    free: dict[str, Any] = Field(default_factory=dict)
    files: str | tuple[str, ...] = ()
    inner: Inner = Inner()
    maybe: Inner | None = None
    many: tuple[Inner, ...] = ()
    rewards: tuple[Annotated[Component, Choice("rewards")], ...] = ()
    reward: Annotated[Component, Choice("rewards")] = Field(EXACT)

    @model_validator(mode="after")
    def _odd_together(self) -> "Outer":
        if self.steps == 13 and self.on:
            raise ConfigError([problem("steps", 13, "is unlucky"), problem("on", True, "is too much with it")])
        return self
