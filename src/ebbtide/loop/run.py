"""A whole run: data, warm-up, the loop, evaluations, checkpoints, and a readable folder however it ends."""

import asyncio
import json
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from ebbtide.errors import CheckpointError, NonFiniteError, problem
from ebbtide.loop.evaluate import Evaluation, evaluate
from ebbtide.loop.parts import Data, Parts, build, build_data, build_engine, sampling_params
from ebbtide.loop.sync import StepReport, train_step
from ebbtide.loop.warmup import warm_up
from ebbtide.loop.watch import Watch
from ebbtide.memory.ledger import Ledger
from ebbtide.models.export import save_checkpoint
from ebbtide.observe.run_folder import RunFolder
from ebbtide.recipe import ModelSection, Recipe
from ebbtide.rewards.scoring import Rewards
from ebbtide.weightsync.push import push

__all__ = ["RunResult", "train"]


@dataclass(frozen=True, slots=True)
class RunResult:
    """What a finished run achieved.

    Attributes:
        folder: of the run.
        before: the sampled and the greedy evaluation before the first update.
        after: the same after the last.
        seconds: of the whole run.
    """

    folder: Path
    before: tuple[Evaluation, Evaluation]
    after: tuple[Evaluation, Evaluation]
    seconds: float


def train(recipe: Recipe, path: Path, *, existing: Literal["refuse", "overwrite", "resume"] = "refuse") -> RunResult:
    """Run a recipe in the folder `path`.

    Args:
        recipe: what to do.
        path: the run's folder.
        existing: what to do with the folder of an earlier run.

    Raises:
        EbbtideError: of the kind that says what is wrong; the folder stays readable.
        KeyboardInterrupt: the user stopped the run; likewise.
    """
    if recipe.threads is not None:
        torch.set_num_threads(recipe.threads)
    data = build_data(recipe)  # first: what is wrong with it costs no earlier run, and rewards share what it imports
    with Rewards(recipe.rewards) as rewards, RunFolder.create(path, recipe, existing=existing) as folder:
        saved = _newest_checkpoint(folder) if existing == "resume" else None
        keep_through_step = -1 if saved is None else saved.step  # a run begun anew writes its steps anew
        with (
            Watch(recipe, folder, data.decode_one, keep_through_step=keep_through_step) as watch,
            _immediate_interrupts(),
        ):
            return asyncio.run(_Run(recipe, folder, data, rewards, watch).run(saved))


@contextmanager
def _immediate_interrupts() -> Iterator[None]:
    """Ctrl-C stops a step in its middle; asyncio's own handler would wait until the step awaits something."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(_signal: int, _frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class _Run:
    """One run in progress."""

    def __init__(self, recipe: Recipe, folder: RunFolder, data: Data, rewards: Rewards, watch: Watch) -> None:
        self.recipe = recipe
        self.folder = folder
        self.data = data
        self.rewards = rewards
        self.watch = watch
        self.started = time.monotonic()

    async def run(self, saved: "_Checkpoint | None") -> RunResult:
        ledger = Ledger(self.data.device)
        parts = build(self.recipe, self.data, self._start_model(ledger), self.rewards, ledger)
        try:
            first_step = 0
            if saved is not None:
                first_step = _restore(parts, saved)
            await push(parts.engine.named_weights(), parts.transport, parts.rollout, first_step)
            before = await self._evaluate_both(parts, first_step)
            with self.watch.stage("reinforce", self.recipe.steps, done=first_step):
                await self._steps(parts, first_step)
            after = await self._evaluate_both(parts, self.recipe.steps)
            self._export(parts, self.folder.final)
        finally:
            await parts.close()
        result = RunResult(self.folder.path, before, after, time.monotonic() - self.started)
        self.watch.finished(before, after, result.seconds)
        return result

    def _start_model(self, ledger: Ledger) -> ModelSection:
        """The weights that reinforcement starts from: the recipe's, or those that its warm-up makes of them."""
        recipe, data, warmup = self.recipe, self.data, self.recipe.warmup
        target = self.folder.path / "warmup"
        if warmup is None:
            return recipe.model
        if not target.is_dir():
            optim = recipe.optim.model_copy(update={"lr": warmup.lr, "schedule": "linear", "warmup_steps": 0})
            supervised = recipe.model_copy(update={"optim": optim})
            engine = build_engine(supervised, data.device, recipe.model, warmup.steps)
            with ledger.phase("warmup"), self.watch.stage("warm-up", warmup.steps):
                loss = warm_up(warmup, engine, data.prompts, recipe.seed, data.encode, data.eos_ids[0], self.watch.show)
            self.watch.write(0, {"warmup/loss_nats": loss} | ledger.step_metrics())
            save_checkpoint(target, engine.named_weights(), data.model_config, data.tokenizer)
            engine.close()
        return recipe.model.model_copy(update={"path": str(target), "architecture": None, "alphabet": None})

    async def _steps(self, parts: Parts, first_step: int) -> None:
        num_skipped = num_skipped_in_row = 0
        every_eval, every_save = self.recipe.eval.every_steps, self.recipe.checkpoint.every_steps
        for step in range(first_step, self.recipe.steps):
            begin = time.perf_counter()
            report = await train_step(parts, step)
            seconds = time.perf_counter() - begin
            num_skipped += report.is_skipped
            num_skipped_in_row = num_skipped_in_row + 1 if report.is_skipped else 0
            done, is_last = step + 1, step + 1 == self.recipe.steps
            metrics = report.metrics | {"optim/num_skipped": float(num_skipped)}
            if every_eval and done % every_eval == 0 and not is_last:
                metrics |= (await self._evaluate(parts, self.recipe.eval.temperature)).metrics()
            metrics |= parts.ledger.step_metrics()
            for message in report.messages:
                self.watch.warn(message)
            self.watch.write(done, metrics | _speed(report, seconds, metrics))
            self._stop_if_broken(parts, done, num_skipped_in_row)
            if every_save and done % every_save == 0:
                self._save(parts, done)

    async def _evaluate(self, parts: Parts, temperature: float) -> Evaluation:
        with parts.ledger.phase("eval"):
            return await evaluate(
                parts.rollout,
                parts.data.held_out,
                sampling_params(self.recipe, temperature=temperature),
                parts.rewards,
                parts.data.decode,
                correct_at=self.recipe.eval.correct_at,
                seed=self.recipe.seed + 1,
            )

    async def _evaluate_both(self, parts: Parts, step: int) -> tuple[Evaluation, Evaluation]:
        """As the policy samples, and greedy."""
        with self.watch.stage("evaluate", 2):
            sampled = await self._evaluate(parts, self.recipe.eval.temperature)
            self.watch.show(1, sampled.metrics())
            greedy = await self._evaluate(parts, 0.0)
            self.watch.show(2, {"eval/greedy_accuracy": greedy.accuracy})
        metrics = sampled.metrics() | {"eval/greedy_accuracy": greedy.accuracy} | parts.ledger.step_metrics()
        self.watch.write(step, metrics)
        self.watch.samples(step, sampled)
        return sampled, greedy

    def _stop_if_broken(self, parts: Parts, step: int, num_skipped_in_row: int) -> None:
        limit = self.recipe.optim.max_skipped_steps
        if num_skipped_in_row < limit:
            return
        kept = self.folder.checkpoints / f"step-{step}"
        self._export(parts, kept / "model")  # skipped steps changed nothing: these are the last good weights
        rule = f"loss or gradient was not finite for {num_skipped_in_row} steps in a row, up to step {step}"
        remedy = (
            f"The last good weights are in {kept / 'model'}. Lower optim.lr, or look at the rewards of metrics.jsonl"
        )
        raise NonFiniteError(problem("optim.max_skipped_steps", limit, rule, remedy))

    def _export(self, parts: Parts, path: Path) -> None:
        save_checkpoint(path, parts.engine.named_weights(), parts.data.model_config, parts.data.tokenizer)

    def _save(self, parts: Parts, step: int) -> None:
        """A checkpoint to resume from; it gets its name when it is complete."""
        target = self.folder.checkpoints / f"step-{step}"
        unfinished = self.folder.checkpoints / f".step-{step}.unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        parts.engine.save(unfinished / "engine")
        if parts.critic is not None:
            parts.critic.save(unfinished / "critic")
        self._export(parts, unfinished / "model")
        state = {
            "step": step,
            "sampler": parts.sampler.state(),
            "next_request": parts.counter.next_id,
            "algorithm": parts.algorithm.state(),
        }
        (unfinished / "state.json").write_text(json.dumps(state) + "\n", encoding="utf-8")
        unfinished.rename(target)


@dataclass(frozen=True, slots=True)
class _Checkpoint:
    path: Path
    step: int
    state: dict[str, Any]


def _newest_checkpoint(folder: RunFolder) -> _Checkpoint | None:
    """None where the run had not come to its first; it then begins anew in the same folder."""
    found = []
    for path in folder.checkpoints.glob("step-*"):
        file = path / "state.json"
        if file.is_file():
            state = json.loads(file.read_text(encoding="utf-8"))
            found.append(_Checkpoint(path, state["step"], state))
    return max(found, key=lambda item: item.step, default=None)


def _restore(parts: Parts, saved: _Checkpoint) -> int:
    """Continue from a checkpoint; the step that comes next."""
    if saved.step > parts.recipe.steps:
        rule = f"the newest checkpoint is of step {saved.step}"
        raise CheckpointError(problem("steps", parts.recipe.steps, rule, "Raise steps, or start with --overwrite"))
    parts.engine.load(saved.path / "engine")
    if parts.critic is not None:
        parts.critic.load(saved.path / "critic")
    parts.sampler.load_state(saved.state["sampler"])
    parts.counter.next_id = saved.state["next_request"]
    parts.algorithm.load_state(saved.state["algorithm"])
    return saved.step


def _speed(report: StepReport, seconds: float, metrics: dict[str, float]) -> dict[str, float]:
    completions = [completion for group in report.groups for completion in group.completions]
    generated = sum(completion.token_ids.shape[0] for completion in completions)
    prompts = sum(group.prompt.token_ids.shape[0] * len(group.completions) for group in report.groups)
    return {
        "time/step_s": seconds,
        "throughput/generated_tokens_per_s": generated / max(metrics.get("time/generate_s", 0.0), 1e-9),
        "throughput/trained_tokens_per_s": (generated + prompts) / max(metrics.get("time/update_s", 0.0), 1e-9),
        "throughput/tokens_per_s": (generated + prompts) / seconds,
        "throughput/samples_per_s": len(completions) / seconds,
    }
