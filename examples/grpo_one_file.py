"""GRPO in one file, for reading: nothing of ebbtide is used, and nothing is hidden.

    python examples/grpo_one_file.py

A small model learns to sort five digits. It first sees demonstrations of mixed quality, so that it knows the form of an
answer but not which one is wanted; then each step samples a group of answers a prompt, scores them, and makes those
likelier that beat their group's mean. `ebbtide train recipes/quickstart.toml` does the same with packed batches, shared
prompts, continuous batching and memory kept low; for the same seed and weights both give the same losses.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

EOS, ALPHABET = 0, "_0123456789>"  # token 0 ends an answer
MASK, GOLDEN = (1 << 64) - 1, 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class Settings:
    """What a step needs to know."""

    group_size: int = 8
    max_tokens: int = 6
    temperature: float = 1.0
    clip: float = 0.2
    max_grad_norm: float = 1.0
    eos: int = EOS
    seed: int = 0


@dataclass(frozen=True)
class Sample:
    """One completion: its tokens, and the log-probs that they were drawn with."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]


# Sampling: a draw depends on the request's number and the token's number alone.


def mixed(value: int) -> int:
    """The finaliser of SplitMix64: 64 bits in, 64 well-stirred bits out."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def uniform(request: int, seed: int, number: int) -> float:
    """A number in [0, 1)."""
    stream = mixed((seed * GOLDEN + request) & (MASK >> 1))
    return (mixed((stream + (number + 1) * GOLDEN) & MASK) >> 12) * 2.0**-52


def padded(rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """[B, L] token ids and [B] lengths; pads stand at the end, where causal attention never looks back from."""
    lengths = torch.tensor([len(row) for row in rows])
    tokens = torch.zeros(len(rows), int(lengths.max()), dtype=torch.long)
    for b, row in enumerate(rows):
        tokens[b, : len(row)] = torch.tensor(row)
    return tokens, lengths


@torch.no_grad()
def generate(model: PreTrainedModel, prompts: Sequence[list[int]], first: int, settings: Settings) -> list[Sample]:
    """One completion a prompt; request numbers count up from `first`. The past is computed anew for every token."""
    done = [Sample(prompt, [], []) for prompt in prompts]
    running = list(range(len(prompts)))
    for number in range(settings.max_tokens):
        tokens, lengths = padded([done[b].prompt + done[b].tokens for b in running])
        logits = model(input_ids=tokens).logits[torch.arange(len(running)), lengths - 1]
        logprobs = torch.log_softmax(logits.float() / settings.temperature, dim=-1)
        cumulative = logprobs.double().exp().cumsum(-1)
        levels = torch.tensor([uniform(first + b, settings.seed, number) for b in running], dtype=torch.float64)
        drawn = torch.searchsorted(cumulative, levels[:, None] * cumulative[:, -1:], right=True).squeeze(1)
        for row, b in enumerate(running):
            done[b].tokens.append(int(drawn[row]))
            done[b].logprobs.append(float(logprobs[row, drawn[row]]))
        running = [b for b in running if done[b].tokens[-1] != settings.eos]
        if not running:
            break
    return done


# Learning.


def advantages(rewards: Tensor, group_size: int) -> Tensor:
    """[B], by how many standard deviations a reward beats its group's mean."""
    groups = rewards.double().view(-1, group_size)
    deviation = groups - groups.mean(1, keepdim=True)
    return (deviation / (groups.std(1, keepdim=True) + 1e-6)).flatten().float()


def token_logprobs(model: PreTrainedModel, samples: Sequence[Sample], temperature: float) -> tuple[Tensor, Tensor]:
    """[B, L-1] log-probs of each next token, and the mask of those that belong to completions."""
    tokens, lengths = padded([sample.prompt + sample.tokens for sample in samples])
    logits = model(input_ids=tokens).logits[:, :-1].float() / temperature
    logprobs = torch.log_softmax(logits, dim=-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
    prompt_lengths = torch.tensor([len(sample.prompt) for sample in samples])
    position = torch.arange(1, tokens.shape[1])
    mask = (position >= prompt_lengths[:, None]) & (position < lengths[:, None])
    return logprobs, mask


def grpo_loss(policy: Tensor, old: Tensor, advantage: Tensor, mask: Tensor, clip: float) -> Tensor:
    """DeepSeekMath, arXiv:2402.03300, eq. 3, without KL and averaged over all tokens of the batch."""
    ratio = torch.exp(policy - old)
    surrogate = torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)
    return -(surrogate * mask).sum() / mask.sum()


def apply(model: PreTrainedModel, optimizer: torch.optim.Optimizer, loss: Tensor, max_grad_norm: float) -> None:
    """Backward, clip, step."""
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def train_step(
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    prompts: Sequence[list[int]],
    reward: Callable[[list[int], list[int]], float],
    first_request: int,
    settings: Settings,
) -> tuple[float, float]:
    """Generate, score, judge, update; the loss and the mean reward."""
    repeated = [prompt for prompt in prompts for _ in range(settings.group_size)]
    samples = generate(model, repeated, first_request, settings)
    rewards = torch.tensor([reward(sample.prompt, sample.tokens) for sample in samples])
    policy, mask = token_logprobs(model, samples, settings.temperature)
    old = torch.zeros_like(policy)
    for b, sample in enumerate(samples):
        start = len(sample.prompt) - 1
        old[b, start : start + len(sample.tokens)] = torch.tensor(sample.logprobs)
    loss = grpo_loss(policy, old, advantages(rewards, settings.group_size)[:, None], mask, settings.clip)
    apply(model, optimizer, loss, settings.max_grad_norm)
    return float(loss.detach()), float(rewards.mean())


# The task: "57061>" asks for "01567".


def make_prompt(rng: random.Random) -> list[int]:
    """Five digits and the mark, as token ids."""
    return [ALPHABET.index(rng.choice("0123456789")) for _ in range(5)] + [ALPHABET.index(">")]


def is_sorted(prompt: list[int], tokens: list[int]) -> float:
    """1 for the prompt's digits in ascending order and then the end, else 0."""
    return float(tokens == [*sorted(prompt[:5]), EOS])


def demonstration(prompt: list[int], rng: random.Random) -> list[int]:
    """The right answer, or one of three wrong ones."""
    digits = prompt[:5]
    return [*rng.choice([sorted(digits), sorted(digits, reverse=True), digits, digits[::-1]]), EOS]


def warm_up(
    model: PreTrainedModel, rng: random.Random, steps: int = 300, examples: int = 128, lr: float = 3e-3
) -> None:
    """Supervised training on demonstrations."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    for _ in range(steps):
        prompts = [make_prompt(rng) for _ in range(examples)]
        shown = [Sample(prompt, demonstration(prompt, rng), []) for prompt in prompts]
        logprobs, mask = token_logprobs(model, shown, 1.0)
        apply(model, optimizer, -(logprobs * mask).sum() / mask.sum(), 1.0)
        schedule.step()


def main(steps: int = 200, num_prompts: int = 32, lr: float = 4e-4) -> None:
    """Warm up, then reinforce; prints the mean reward as it goes."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    rng, settings = random.Random(0), Settings()
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(ALPHABET),
            hidden_size=64,
            intermediate_size=192,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=64,
            tie_word_embeddings=True,
        )
    )
    warm_up(model, rng)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    for step in range(steps):
        prompts = [make_prompt(rng) for _ in range(num_prompts)]
        first = step * num_prompts * settings.group_size
        loss, reward = train_step(model, optimizer, prompts, is_sorted, first, settings)
        schedule.step()
        if step % 20 == 0 or step == steps - 1:
            print(f"step {step:3d}  loss {loss:+.4f}  reward {reward:.2f}", flush=True)


if __name__ == "__main__":
    main()
