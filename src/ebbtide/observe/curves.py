"""Which curves a report shows, and in which order."""

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate

from ebbtide.observe.charts import Chart, Series
from ebbtide.observe.interval import wilson_interval
from ebbtide.observe.record import Run, memory_kind

__all__ = ["curves"]

_OFTEN = 0.2  # a phase that fewer steps have than this share is no part of the usual step


def curves(run: Run) -> Iterator[Chart]:
    """In the order in which a person asks: does it learn, is it healthy, how does it answer, what does it cost."""
    yield from _learning(run)
    yield from _health(run)
    yield Chart(
        "Completion length",
        "tokens",
        "Mean over a step, with the shortest and the longest.",
        [_band(run, "completion/mean_tokens", "mean", "completion/min_tokens", "completion/max_tokens")],
        bounds=(0.0, None),
    )
    yield from _cost(run)


def _learning(run: Run) -> Iterator[Chart]:
    named = _keys(run, "reward/", "_mean")
    parts = [_smooth(run, key, key[7:-5], faint=False) for key in named] if len(named) > 1 else []
    rewards = [*_smooth(run, "reward/mean", "sum" if parts else "reward"), *(item for part in parts for item in part)]
    yield Chart("Reward", "", "Mean over the completions of a step.", rewards)
    yield Chart(
        "Accuracy",
        "ratio",
        "Share of right completions; held-out prompts with their 95 % interval.",
        [*_smooth(run, "reward/accuracy", "training"), *_held_out(run)],
        bounds=(0.0, 1.0),
    )


def _health(run: Run) -> Iterator[Chart]:
    entropy = _smooth(run, "policy/entropy_nats", "entropy")
    yield Chart("Entropy", "nats", "Of the policy over the tokens that it is trained on.", entropy, bounds=(0.0, None))
    ratio = _band(run, "policy/ratio_mean", "mean", "policy/ratio_min", "policy/ratio_max")
    text = "Of a token's probability under the policy to that at sampling; mean, lowest and highest."
    yield Chart("Ratio", "", text, [ratio])
    divergences = [key for key in _keys(run, "policy/", "_nats") if key != "policy/entropy_nats"]
    text = "Of the policy from the weights that sampled, or from the reference."
    yield Chart("Divergence", "nats", text, [_line(run, key, _words(key[7:-5])) for key in divergences])
    bounded = [_line(run, key, _words(key[7:-6])) for key in _keys(run, "policy/", "_ratio")]
    text = "Share of trained tokens to which a bound of the loss applied."
    yield Chart("Bounded", "ratio", text, bounded, bounds=(0.0, None))
    yield Chart("Loss", "", "What is minimised.", _smooth(run, "loss/total", "loss"))
    norm = _smooth(run, "optim/grad_norm", "norm")
    yield Chart("Gradient norm", "", "Before it is scaled down.", norm, bounds=(0.0, None))
    yield Chart("Learning rate", "", "Of the optimizer.", [_line(run, "optim/lr", "lr")], bounds=(0.0, None))
    uniform = _smooth(run, "group/uniform_ratio", "uniform")
    text = "Share of prompts whose completions all earned the same reward."
    yield Chart("Groups without contrast", "ratio", text, uniform, bounds=(0.0, 1.0))


def _cost(run: Run) -> Iterator[Chart]:
    speeds = [
        *_smooth(run, "throughput/generated_tokens_per_s", "generated"),
        *_smooth(run, "throughput/trained_tokens_per_s", "trained"),
    ]
    yield Chart("Speed", "tokens/s", "Tokens over the seconds of their own phase.", speeds, bounds=(0.0, None))
    phases = _usual_phases(run)
    seconds = [_line(run, f"time/{name}_s", name) for name in phases]
    text = "What a step spends its time on."
    yield Chart("Seconds by phase", "s", text, seconds, is_stacked=True, bounds=(0.0, None))
    kind, words = memory_kind(run)
    peaks = [_line(run, f"memory/{name}_peak_{kind}_bytes", name) for name in phases]
    yield Chart("Memory by phase", "bytes", f"The most that was {words} in each phase of a step.", peaks)


def _line(run: Run, key: str, name: str) -> Series:
    steps, values = run.column(key)
    return Series(name, steps, values)


def _band(run: Run, key: str, name: str, low: str, high: str) -> Series:
    rows = [row for row in run.rows if key in row]
    has_band = all(low in row and high in row for row in rows)
    return Series(
        name,
        [row["step"] for row in rows],
        [row[key] for row in rows],
        [row[low] for row in rows] if has_band else (),
        [row[high] for row in rows] if has_band else (),
    )


def _smooth(run: Run, key: str, name: str, *, faint: bool = True) -> list[Series]:
    """The values as they are, faint, and their mean over a window of a twentieth of the run."""
    steps, values = run.column(key)
    window = len(values) // 20
    if window < 2:
        return [Series(name, steps, values)]
    means = _running_means(values, window // 2)
    return ([Series(name, steps, values, style="faint")] if faint else []) + [Series(name, steps, means)]


def _running_means(values: Sequence[float], reach: int) -> list[float]:
    """Mean of the finite values up to `reach` places away; no number where the value itself is none."""
    sums = [0.0, *accumulate(value if math.isfinite(value) else 0.0 for value in values)]
    counts = [0, *accumulate(int(math.isfinite(value)) for value in values)]
    means = []
    for number, value in enumerate(values):
        low, high = max(0, number - reach), min(len(values), number + reach + 1)
        is_number = math.isfinite(value)
        means.append((sums[high] - sums[low]) / (counts[high] - counts[low]) if is_number else math.nan)
    return means


def _held_out(run: Run) -> Iterator[Series]:
    rows = [row for row in run.rows if "eval/accuracy" in row]
    edges = [wilson_interval(row["eval/accuracy"] * (n := row.get("eval/num_prompts", 0)), int(n)) for row in rows]
    yield Series(
        "held-out",
        [row["step"] for row in rows],
        [row["eval/accuracy"] for row in rows],
        [low for low, _ in edges],
        [high for _, high in edges],
        style="points",
    )
    steps, values = run.column("eval/greedy_accuracy")
    yield Series("held-out, greedy", steps, values, style="points")


def _usual_phases(run: Run) -> list[str]:
    """Phases of most steps, at most seven of them, the longest first."""
    num_steps = max(1, len(run.column("time/step_s")[0]))
    return [name for name in run.phases() if len(run.column(f"time/{name}_s")[0]) >= _OFTEN * num_steps][:7]


def _keys(run: Run, begin: str, end: str) -> list[str]:
    """Keys with a name between the two, in the order in which they first came."""
    keys = dict.fromkeys(key for row in run.rows for key in row)
    return [key for key in keys if key.startswith(begin) and key.endswith(end) and len(key) > len(begin) + len(end)]


def _words(name: str) -> str:
    return name.replace("_", " ")
