"""`report.html`: the course of a run on one self-contained page, made from the run's folder alone.

It is made again whenever it is asked for, also of a run that still goes on or broke off. Nothing is loaded from
elsewhere when the page is opened.
"""

import html
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from ebbtide.observe.charts import Chart, draw, is_constant
from ebbtide.observe.curves import curves
from ebbtide.observe.interval import wilson_interval
from ebbtide.observe.record import Run, finite, memory_kind, read_run
from ebbtide.observe.run_folder import RunFolder
from ebbtide.units import format_bytes, format_count, format_seconds

__all__ = ["render", "write_report"]

_MAX_SAMPLES = 8


def write_report(folder: RunFolder) -> Path:
    """Make the page of a run; an earlier one is replaced when the new one is complete.

    Raises:
        DataError: `metrics.jsonl` holds something else than metrics.
        OSError: the page cannot be written.
    """
    unfinished = folder.report.with_name(f".{folder.report.name}.{os.getpid()}")
    try:
        unfinished.write_text(render(read_run(folder)), encoding="utf-8")
        unfinished.replace(folder.report)
    finally:
        unfinished.unlink(missing_ok=True)
    return folder.report


def render(run: Run) -> str:
    """The page as HTML."""
    recipe = run.recipe
    name = str(recipe.get("name", "run"))
    status, state = _status(run, recipe)
    charts = list(curves(run))
    drawn = "".join(draw(chart) for chart in charts if not is_constant(chart))
    page = Template(_asset("report.html"))
    return page.substitute(
        title=html.escape(f"{name} - ebbtide"),
        name=html.escape(name),
        css=_asset("report.css"),
        script=_asset("report.js"),
        status=html.escape(status),
        state=state,
        facts="".join(f"<span>{html.escape(fact)}</span>" for fact in _facts(run, recipe)),
        tiles="".join(_tiles(run, recipe)),
        charts=drawn or '<p class="meta">There is no step to draw yet.</p>',
        sections=_constants(charts) + _evaluations(run) + _time(run) + _examples(run) + _settings(run),
        footer=html.escape(_footer(run)),
    )


def _asset(name: str) -> str:
    return resources.files("ebbtide.observe").joinpath("page", name).read_text(encoding="utf-8")


def _status(run: Run, recipe: Mapping[str, Any]) -> tuple[str, str]:
    done, wanted = int(run.rows[-1]["step"]) if run.rows else 0, int(recipe.get("steps", 0))
    if run.rows and done >= wanted and "eval/accuracy" in run.rows[-1]:
        return f"{done} steps, complete", "done"
    return f"{done} of {wanted} steps", "open"


def _facts(run: Run, recipe: Mapping[str, Any]) -> Iterator[str]:
    model = recipe.get("model", {})
    architecture = model.get("architecture", {})
    yield str(model.get("path") or f"{architecture.get('model_type', 'model')} from random weights")
    data, algorithm = recipe.get("data", {}), recipe.get("algorithm", {})
    yield " ".join(str(data[key]) for key in ("type", "task", "path") if data.get(key))
    yield str(algorithm.get("type", ""))
    machine = run.environment.get("machine", {})
    if machine:
        yield f"{machine['num_cores']:g} cores, {format_bytes(machine['memory_bytes'])}, {machine['cpu']}"
    if "started" in run.environment:
        yield str(run.environment["started"]).replace("T", " ").replace("+00:00", " UTC")


def _tiles(run: Run, recipe: Mapping[str, Any]) -> Iterator[str]:
    evaluated = [row for row in run.rows if "eval/accuracy" in row]
    if evaluated:
        first, last = evaluated[0], evaluated[-1]
        change = f"{_percent(first['eval/accuracy']).removesuffix(' %')} &rarr; " if len(evaluated) > 1 else ""
        note = f"held-out prompts, &plusmn; {_half_width(last):.1f} points" if _half_width(last) else "held-out prompts"
        yield _tile("Accuracy", f"{change}{_percent(last['eval/accuracy'])}", note)
    rewards = finite(run.column("reward/mean")[1])
    if rewards:
        edge = max(1, len(rewards) // 20)
        first_mean, last_mean = sum(rewards[:edge]) / edge, sum(rewards[-edge:]) / edge
        yield _tile("Reward", f"{first_mean:.2f} &rarr; {last_mean:.2f}", "mean of the first and the last steps")
    batch = recipe.get("batch", {})
    steps, seconds = run.column("time/step_s")
    if steps:
        note = f"{batch.get('prompts', '?')} prompts &times; {batch.get('group_size', '?')} completions"
        yield _tile("Steps", str(int(run.rows[-1]["step"])), note)
        yield _tile("A step takes", format_seconds(_median(seconds)), f"median; {format_seconds(_total(run))} in all")
    _, speeds = run.column("throughput/tokens_per_s")
    if speeds:
        yield _tile("Speed", f"{format_count(_median(speeds))} tok/s", "prompts and completions, median")
    peaks = _peaks(run)
    if peaks:
        where, most = max(peaks.items(), key=lambda item: item[1])
        yield _tile("Peak memory", format_bytes(most), f"in {html.escape(where)}")


def _tile(name: str, value: str, note: str) -> str:
    return f'<dl class="tile"><dt>{name}</dt><dd>{value}<small>{note}</small></dd></dl>'


def _peaks(run: Run) -> dict[str, float]:
    """Phase -> the most bytes it ever took."""
    ending = f"_peak_{memory_kind(run)[0]}_bytes"
    found: dict[str, float] = {}
    for row in run.rows:
        for key, value in row.items():
            if key.startswith("memory/") and key.endswith(ending) and math.isfinite(value):
                name = key.removeprefix("memory/").removesuffix(ending)
                found[name] = max(found.get(name, 0.0), value)
    return found


def _constants(charts: Sequence[Chart]) -> str:
    """The figures that never moved, as a sentence in the place of their charts."""
    parts = []
    for chart in filter(is_constant, charts):
        values = [(item.name, found[0]) for item in chart.series if (found := finite(item.values))]
        text = ", ".join(f"{name} {value:.4g}" for name, value in values)
        parts += [f"{chart.title.lower()} ({text})"] if values else []
    return f'<p class="constant">The same throughout: {html.escape("; ".join(parts))}.</p>' if parts else ""


def _evaluations(run: Run) -> str:
    rows = [row for row in run.rows if "eval/accuracy" in row]
    if not rows:
        return ""
    shown = [rows[0], rows[-1]] if len(rows) > 1 else rows
    lines = [
        ("Accuracy, sampled", [_percent(row["eval/accuracy"]) + _interval(row) for row in shown]),
        ("Accuracy, greedy", [_percent(row.get("eval/greedy_accuracy", math.nan)) for row in shown]),
        ("Mean reward", [_number(row.get("eval/reward_mean", math.nan)) for row in shown]),
        ("Tokens a completion", [_number(row.get("eval/completion_mean_tokens", math.nan)) for row in shown]),
        ("Ended at the token limit", [_percent(row.get("eval/truncated_ratio", math.nan)) for row in shown]),
    ]
    head = "".join(f'<th class="num">step {row["step"]:.0f}</th>' for row in shown)
    body = "".join(
        f"<tr><td>{name}</td>{''.join(f'<td class=num>{value}</td>' for value in values)}</tr>"
        for name, values in lines
    )
    count = int(shown[-1].get("eval/num_prompts", 0))
    title = f"Before and after, on {count} held-out prompts" if len(shown) > 1 else f"On {count} held-out prompts"
    return f'<div class="pair">{_panel(title, f"<table><tr><th></th>{head}</tr>{body}</table>")}'


def _time(run: Run) -> str:
    """Opens its own pair of panels where no evaluation did."""
    totals = {name: sum(finite(run.column(f"time/{name}_s")[1])) for name in run.phases()}
    whole = sum(totals.values())
    opening = "" if any("eval/accuracy" in row for row in run.rows) else '<div class="pair">'
    if not whole:
        return f"{opening}</div>"
    body = "".join(
        f'<tr><td>{html.escape(name)}</td><td class="num">{format_seconds(seconds)}</td>'
        f'<td class="num">{100 * seconds / whole:.1f} %</td>'
        f'<td><div class="bar"><i style="width:{100 * seconds / whole:.1f}%"></i></div></td></tr>'
        for name, seconds in totals.items()
    )
    return f"{opening}{_panel('Where the time went', f'<table>{body}</table>')}</div>"


def _examples(run: Run) -> str:
    """Answers to the same prompts at the first and at the last step that has any."""
    steps = sorted({int(row["step"]) for row in run.samples if isinstance(row.get("step"), int)})
    if not steps:
        return ""
    shown = [steps[0], steps[-1]] if len(steps) > 1 else steps
    answers: dict[str, dict[int, Mapping[str, Any]]] = {}
    for row in run.samples:
        answers.setdefault(_text(row.get("prompt", "")), {})[row["step"]] = row
    complete = [(prompt, found) for prompt, found in answers.items() if shown[-1] in found][:_MAX_SAMPLES]
    head = "".join(f'<th>step {step}</th><th class="num">reward</th>' for step in shown)
    body = "".join(
        f'<tr><td class="text">{html.escape(prompt)}</td>{"".join(_answer(found.get(step)) for step in shown)}</tr>'
        for prompt, found in complete
    )
    return _panel("Some answers", f'<table class="answers"><tr><th>prompt</th>{head}</tr>{body}</table>')


def _answer(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return "<td></td><td></td>"
    reward = _number(float(row["reward"])) if isinstance(row.get("reward"), int | float) else ""
    return f'<td class="text">{html.escape(str(row.get("completion", "")))}</td><td class="num">{reward}</td>'


def _text(prompt: Any) -> str:
    """A prompt as text; chat messages one below the other."""
    if isinstance(prompt, list):
        return "\n".join(
            f"{turn.get('role', '')}: {turn.get('content', '')}" for turn in prompt if isinstance(turn, dict)
        )
    return str(prompt)


def _settings(run: Run) -> str:
    versions = run.environment.get("versions", {})
    rows = [
        ("python", run.environment.get("python", "")),
        *versions.items(),
        *run.environment.get("machine", {}).items(),
    ]
    body = "".join(
        f"<tr><td>{html.escape(str(key))}</td><td>{html.escape(str(value))}</td></tr>" for key, value in rows
    )
    return _folded("Resolved recipe", f"<pre>{html.escape(run.recipe_text)}</pre>") + _folded(
        "Versions and machine", f"<table>{body}</table>"
    )


def _panel(title: str, content: str) -> str:
    return f'<section class="panel"><h2>{title}</h2>{content}</section>'


def _folded(title: str, content: str) -> str:
    return f'<section class="panel"><details><summary>{title}</summary>{content}</details></section>'


def _footer(run: Run) -> str:
    version = run.environment.get("versions", {}).get("ebbtide", "")
    return f"ebbtide {version}. Made from metrics.jsonl; `ebbtide report` makes it again."


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %" if math.isfinite(value) else "&ndash;"


def _number(value: float) -> str:
    return f"{value:.3g}" if math.isfinite(value) else "&ndash;"


def _interval(row: Mapping[str, float]) -> str:
    count = int(row.get("eval/num_prompts", 0))
    if not count:
        return ""
    low, high = wilson_interval(row["eval/accuracy"] * count, count)
    return f" <small>({100 * low:.0f} to {100 * high:.0f})</small>"


def _half_width(row: Mapping[str, float]) -> float:
    """Half the 95 % interval in points of a hundred; 0 where the number of prompts is unknown."""
    count = int(row.get("eval/num_prompts", 0))
    low, high = wilson_interval(row["eval/accuracy"] * count, count) if count else (0.0, 0.0)
    return 50 * (high - low)


def _total(run: Run) -> float:
    """Seconds of all phases of all steps."""
    return sum(sum(finite(run.column(f"time/{name}_s")[1])) for name in run.phases())


def _median(values: Sequence[float]) -> float:
    ordered = sorted(finite(values))
    return ordered[len(ordered) // 2] if ordered else math.nan
