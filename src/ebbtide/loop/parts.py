"""Everything a loop works with, built from a recipe."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

from transformers import PreTrainedTokenizerBase

from ebbtide import plugins
from ebbtide.algorithms.base import Algorithm, Needs
from ebbtide.data.prompts import Prompts
from ebbtide.data.sampler import Sampler
from ebbtide.data.sources.base import Source
from ebbtide.device import Device
from ebbtide.engines.base import AdapterEngine, EngineSetting, TrainEngine
from ebbtide.errors import ConfigError, problem
from ebbtide.loop.reference import AdapterReference, Reference, ScoresReference
from ebbtide.loop.step import RequestCounter
from ebbtide.memory.ledger import Ledger
from ebbtide.models.build import eos_ids, load_config, load_tokenizer, torch_dtype
from ebbtide.models.support import context_tokens
from ebbtide.recipe import ModelSection, Recipe
from ebbtide.rewards.scoring import Rewards
from ebbtide.rollout.base import RolloutBackend, RolloutSetting
from ebbtide.types import Prompt, SamplingParams
from ebbtide.weightsync.base import WeightTransport
from ebbtide.weightsync.inprocess import InProcessTransport

__all__ = ["Data", "Parts", "build", "build_data", "build_engine", "build_rollout", "sampling_params"]


@dataclass(frozen=True, slots=True)
class Data:
    """What does not depend on weights."""

    device: Device
    model_config: Any
    tokenizer: PreTrainedTokenizerBase
    eos_ids: tuple[int, ...]
    prompts: Prompts
    held_out: Sequence[Prompt]

    def decode(self, completions: Sequence[Sequence[int]]) -> list[str]:
        """Token ids to texts, without special tokens."""
        texts: list[str] = self.tokenizer.batch_decode(completions, skip_special_tokens=True)
        return texts

    def decode_one(self, token_ids: list[int]) -> str:
        """Token ids to text, without special tokens."""
        return self.decode([token_ids])[0]

    def encode(self, text: str) -> list[int]:
        """Text of a completion to token ids."""
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids


@dataclass(frozen=True, slots=True)
class Parts:
    """What a loop drives."""

    recipe: Recipe
    data: Data
    sampler: Sampler
    counter: RequestCounter
    sampling: SamplingParams
    algorithm: Algorithm
    engine: TrainEngine
    critic: TrainEngine | None
    reference: ScoresReference | None
    rollout: RolloutBackend
    transport: WeightTransport
    rewards: Rewards
    ledger: Ledger

    async def close(self) -> None:
        """Release everything, in the order of use."""
        await self.rollout.close()
        await self.transport.close()
        self.engine.close()
        if self.critic is not None:
            self.critic.close()
        if self.reference is not None:
            self.reference.close()


def build_data(recipe: Recipe) -> Data:
    """Tokenizer, prompts and held-out prompts.

    Raises:
        ConfigError: the completion's limit leaves no room for a prompt in the model's context.
    """
    config = load_config(recipe.model)
    tokenizer = load_tokenizer(recipe.model)
    room = context_tokens(config) - recipe.sampling.max_tokens
    if room < 1:
        rule = f"the model's context of {context_tokens(config)} tokens leaves no room for a prompt beside it"
        raise ConfigError(problem("sampling.max_tokens", recipe.sampling.max_tokens, rule, "Lower it"))
    source: Source = plugins.load("data.sources", recipe.data.type)(recipe.data, seed=recipe.seed)
    prompts = Prompts(
        source,
        tokenizer,
        chat_template=recipe.model.chat_template,
        max_tokens=min(room, recipe.batch.max_prompt_tokens or room),
        long_prompts=recipe.batch.long_prompts,
    )
    ends = eos_ids(config, tokenizer)
    if not ends:
        raise ConfigError(problem("model", recipe.model.path, "neither tokenizer nor config names an end token"))
    held_out = prompts.held_out(recipe.eval.prompts)
    return Data(Device.of(recipe.device), config, tokenizer, ends, prompts, held_out)


def build_engine(
    recipe: Recipe,
    device: Device,
    model: ModelSection,
    num_steps: int,
    *,
    answer: Literal["logprob", "value"] = "logprob",
) -> TrainEngine:
    """The recipe's engine on some weights; with values as its answers it is a critic."""
    setting = EngineSetting(
        model=model,
        optim=recipe.optim,
        device=device,
        seed=recipe.seed,
        temperature=recipe.sampling.temperature,
        num_steps=num_steps,
        max_completion_tokens=recipe.sampling.max_tokens,
        answer=answer,
    )
    engine: TrainEngine = plugins.load("engines", recipe.engine.type)(recipe.engine, setting)
    return engine


def build_rollout(recipe: Recipe, data: Data) -> RolloutBackend:
    """The recipe's rollout, without weights."""
    setting = RolloutSetting(
        model_config=data.model_config,
        dtype=torch_dtype(recipe.model.compute_dtype or recipe.model.dtype),
        device=data.device,
        eos_ids=data.eos_ids,
        decode=data.decode_one,
    )
    rollout: RolloutBackend = plugins.load("rollout", recipe.rollout.type)(recipe.rollout, setting)
    return rollout


def build(recipe: Recipe, data: Data, model: ModelSection, rewards: Rewards, ledger: Ledger) -> Parts:
    """A whole run on the weights of `model`, which are the recipe's or those of the warm-up."""
    algorithm: Algorithm = plugins.load("algorithms", recipe.algorithm.type)(recipe.algorithm)
    engine = build_engine(recipe, data.device, model, recipe.steps)
    return Parts(
        recipe=recipe,
        data=data,
        sampler=Sampler(len(data.prompts), recipe.batch.prompts, recipe.seed),
        counter=RequestCounter(recipe.seed),
        sampling=sampling_params(recipe),
        algorithm=algorithm,
        engine=engine,
        critic=_critic(recipe, data.device, model),
        reference=_reference(recipe, algorithm, engine, model),
        rollout=build_rollout(recipe, data),
        transport=InProcessTransport(),
        rewards=rewards,
        ledger=ledger,
    )


def _critic(recipe: Recipe, device: Device, model: ModelSection) -> TrainEngine | None:
    if recipe.critic is None:
        return None
    optim = recipe.optim.model_copy(update={"lr": recipe.critic.lr})
    own = recipe.model_copy(update={"optim": optim})
    return build_engine(own, device, model, recipe.steps, answer="value")


def _reference(
    recipe: Recipe, algorithm: Algorithm, engine: TrainEngine, model: ModelSection
) -> ScoresReference | None:
    """The initial policy, where the loss wants it; under adapters it is the engine itself without them."""
    if Needs.REF_LOGPROBS not in algorithm.needs:
        return None
    if getattr(recipe.engine, "lora", None) is not None:
        return AdapterReference(cast(AdapterEngine, engine))
    return Reference(
        model,
        engine.setting.device,
        seed=recipe.seed,
        temperature=recipe.sampling.temperature,
        max_tokens=engine.max_tokens,
    )


def sampling_params(recipe: Recipe, *, temperature: float | None = None) -> SamplingParams:
    """The recipe's sampling; an evaluation at another temperature samples from the whole distribution."""
    sampling = recipe.sampling
    whole = SamplingParams(max_tokens=sampling.max_tokens, temperature=sampling.temperature, stop=sampling.stop)
    if temperature is not None:
        return replace(whole, temperature=temperature)
    return replace(whole, top_k=sampling.top_k, top_p=sampling.top_p, min_p=sampling.min_p)
