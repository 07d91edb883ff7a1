"""The tree of a recipe: what `ebbtide train` reads. Defaults live here, on their fields, and nowhere else."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from ebbtide.config import Choice, Component, Section
from ebbtide.errors import ConfigError, problem

__all__ = [
    "BatchSection",
    "CheckpointSection",
    "ConsistencySection",
    "CriticSection",
    "EvalSection",
    "ModelSection",
    "ObserveSection",
    "OptimSection",
    "Recipe",
    "SamplingSection",
    "WarmupSection",
]

Algorithm = Annotated[Component, Choice("algorithms")]
Engine = Annotated[Component, Choice("engines")]
Reward = Annotated[Component, Choice("rewards")]
Rollout = Annotated[Component, Choice("rollout")]
Sink = Annotated[Component, Choice("observe.sinks")]
Source = Annotated[Component, Choice("data.sources")]
_FSDP: Any = {"type": "fsdp"}
_INPROCESS: Any = {"type": "inprocess"}
Rate = Annotated[float, Field(ge=0, lt=1)]


class ModelSection(Section):
    """Which model is trained: a checkpoint, or an architecture with random weights."""

    path: str | None = None
    """Folder or hub id of a Hugging Face checkpoint with its tokenizer; None builds `architecture`."""
    architecture: dict[str, Any] | None = None
    """`model_type` and other fields of the model's transformers config, for random initial weights."""
    alphabet: str | None = None
    """Characters of a character tokenizer, one token each; goes with `architecture`."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """What the policy's weights are stored in; the optimizer works on them."""
    compute_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """What forward, backward and generation compute in; None means `dtype`."""
    chat_template: bool = True
    """Apply the tokenizer's chat template to prompts; False feeds the prompt's text as it is."""

    @model_validator(mode="after")
    def _one_of_two(self) -> "ModelSection":
        problems = []
        if (self.path is None) == (self.architecture is None):
            rule = "exactly one of path and architecture must be given"
            problems.append(problem("path", self.path, rule, "A path loads a checkpoint, an architecture makes one"))
        if (self.architecture is None) != (self.alphabet is None):
            problems.append(problem("alphabet", self.alphabet, "goes with architecture, and is needed there"))
        if self.architecture is not None and "model_type" not in self.architecture:
            problems.append(problem("architecture", self.architecture, "needs model_type", "For example 'qwen3'"))
        if problems:
            raise ConfigError(problems)
        return self


class BatchSection(Section):
    """How much one step generates and trains."""

    prompts: int = Field(32, ge=1)
    """Prompts (groups) a step."""
    group_size: int = Field(8, ge=1)
    """Completions a prompt."""
    max_prompt_tokens: int | None = Field(None, ge=1)
    """Longest prompt in tokens; None means what the model's context leaves beside the completion."""
    long_prompts: Literal["error", "drop"] = "error"
    """What to do with a prompt that is too long."""


class SamplingSection(Section):
    """How completions are drawn during training."""

    max_tokens: int = Field(ge=1)
    """New tokens a completion at most."""
    temperature: float = Field(1.0, gt=0)
    """Divides the logits; the loss uses the same value."""
    top_k: int = Field(0, ge=0)
    """Keep the k likeliest tokens; 0 keeps all."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Keep the smallest set of likeliest tokens with this mass; 1 keeps all."""
    min_p: float = Field(0.0, ge=0, lt=1)
    """Drop tokens less likely than this share of the likeliest; 0 keeps all."""
    stop: tuple[str, ...] = ()
    """Strings that end a completion."""


class OptimSection(Section):
    """AdamW and its schedule."""

    lr: float = Field(gt=0)
    """Peak learning rate."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate falls after its warm-up, over the steps of the run."""
    warmup_steps: int = Field(0, ge=0)
    """Steps over which the learning rate rises linearly from 0; fewer than the run has."""
    min_lr_ratio: float = Field(0.0, ge=0, le=1)
    """Where `linear` and `cosine` end, as a share of `lr`; no effect with `constant`."""
    betas: tuple[Rate, Rate] = (0.9, 0.999)
    """AdamW's decay rates, each from 0 to below 1."""
    eps: float = Field(1e-8, gt=0)
    """AdamW's epsilon."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay, on weights of two dimensions and more."""
    max_grad_norm: float | None = Field(1.0, gt=0)
    """Gradients are scaled down to this norm; None leaves them."""
    max_skipped_steps: int = Field(5, ge=1)
    """The run stops after this many steps in a row with a loss or gradient that is not finite."""

    @model_validator(mode="after")
    def _has_effect(self) -> "OptimSection":
        if self.schedule == "constant" and self.min_lr_ratio:
            raise ConfigError(problem("min_lr_ratio", self.min_lr_ratio, "has no effect with schedule='constant'"))
        return self


class CriticSection(Section):
    """The critic of an algorithm that has one: a second model like the policy, with a value head that begins at 0."""

    lr: float = Field(gt=0)
    """Peak learning rate; the rest of its optimizer is as in `optim`."""


class WarmupSection(Section):
    """Supervised training on the source's demonstrations before reinforcement."""

    steps: int = Field(ge=1)
    """Optimizer steps."""
    examples: int = Field(64, ge=1)
    """Demonstrations a step."""
    lr: float = Field(1e-3, gt=0)
    """Peak learning rate, falling linearly to 0."""


class EvalSection(Section):
    """Accuracy on held-out prompts, which are never trained on."""

    prompts: int = Field(256, ge=1)
    """How many held-out prompts."""
    every_steps: int = Field(0, ge=0)
    """Evaluate after this many steps, besides the start and the end; 0 means only then."""
    temperature: float = Field(1.0, ge=0)
    """How the policy answers; 0 is greedy. The first and last evaluation report greedy accuracy as well."""
    correct_at: float = Field(0.99, gt=0)
    """A completion whose reward is at least this is correct."""


class ConsistencySection(Section):
    """Rollout and engine must agree on the first batch before anything is trained."""

    max_mean_abs_diff: float | None = Field(None, gt=0)
    """Bound on the mean absolute difference of log-probs in nats; None takes the bound of the compute dtype."""


class CheckpointSection(Section):
    """What is kept on disk while the run goes on."""

    every_steps: int = Field(0, ge=0)
    """Save the weights after this many steps; 0 saves at the end alone."""


class ObserveSection(Section):
    """Where metrics go besides the console and `metrics.jsonl`, which are always written."""

    sinks: tuple[Sink, ...] = ()
    """More loggers, each a table with `type`."""
    progress: bool = True
    """Draw a progress bar where the output is a terminal."""


class Recipe(Section):
    """A whole run."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """The run's folder is runs/<name>; letters, digits and . _ - between them."""
    seed: int = Field(0, ge=0)
    """Fixes weights, data order and sampling."""
    steps: int = Field(ge=1)
    """Policy updates."""
    mode: Literal["sync"] = "sync"
    """How generation and training alternate."""
    device: Literal["auto", "cpu", "cuda", "npu"] = "auto"
    """Where policy and rollout live; auto takes an accelerator where there is one."""
    threads: int | None = Field(None, ge=1)
    """CPU threads of torch; None leaves torch's choice. Models under a million weights run fastest on one."""
    model: ModelSection
    data: Source
    """Where prompts come from."""
    batch: BatchSection = BatchSection()
    sampling: SamplingSection
    rewards: tuple[Reward, ...] = Field(min_length=1)
    """Each a table with `type`; the training reward is their weighted sum."""
    algorithm: Algorithm
    """How rewards become a loss."""
    optim: OptimSection
    engine: Engine = Field(_FSDP)
    """What trains the policy."""
    rollout: Rollout = Field(_INPROCESS)
    """What samples completions."""
    critic: CriticSection | None = None
    """Needed by an algorithm with a critic, and refused by the others."""
    warmup: WarmupSection | None = None
    """Supervised start; None starts from the model as it is."""
    eval: EvalSection = EvalSection()
    consistency: ConsistencySection = ConsistencySection()
    checkpoint: CheckpointSection = CheckpointSection()
    observe: ObserveSection = ObserveSection()

    @model_validator(mode="after")
    def _no_contradiction(self) -> "Recipe":
        minimum = getattr(self.algorithm, "min_group_size", 1)
        problems = []
        if self.batch.group_size < minimum:
            rule = f"algorithm.type={self.algorithm.type!r} compares the completions of one prompt"
            problems.append(problem("batch.group_size", self.batch.group_size, f"{rule} and needs at least {minimum}"))
        if self.optim.warmup_steps >= self.steps:
            rule = f"the learning rate would never arrive, as the run has steps={self.steps}"
            problems.append(problem("optim.warmup_steps", self.optim.warmup_steps, rule, "It must be below steps"))
        if not any(getattr(reward, "weight", 1.0) for reward in self.rewards):
            rule = "every reward has weight=0, so that there is nothing to learn from"
            problems.append(problem("rewards", len(self.rewards), rule, "Give at least one of them a weight"))
        has_critic = getattr(self.algorithm, "has_critic", False)
        if has_critic != (self.critic is not None):
            what = "needs a critic" if has_critic else "has no critic"
            remedy = "Give the recipe [critic] with lr" if has_critic else "Take [critic] out"
            problems.append(problem("critic", self.critic, f"algorithm.type={self.algorithm.type!r} {what}", remedy))
        if problems:
            raise ConfigError(problems)
        return self
