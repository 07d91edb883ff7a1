"""TRL's GRPOTrainer, one step at a time, for `benchmarks/step.py`; runs in an environment of its own.

Reads a JSON file of settings, answers `ready`, then for each line `step` on standard input
a line when it is done and a line with what was done.
"""

import importlib.util
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ["HF_HUB_OFFLINE"] = "1"

import reasoning_gym
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

MAX_STEPS = 10_000


def main(settings_path: str) -> None:
    """Serve steps until standard input ends."""
    settings = json.loads(Path(settings_path).read_text(encoding="utf-8"))
    torch.set_num_threads(settings["threads"])
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    sys.stdout = sys.stderr  # libraries print; the pipe is for replies
    build_trainer(settings, replies).train()


class StepOnDemand(TrainerCallback):  # type: ignore[misc]
    """Each training step waits for its line, and is answered when its optimizer step is done."""

    def __init__(self, replies: Any, num_samples: int) -> None:
        self.replies = replies
        self.num_samples = num_samples
        self.num_tokens = 0

    def on_step_begin(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        """Wait for a line; the end of input ends the training."""
        if state.global_step == 0:
            self.reply({"ready": True})
        if sys.stdin.readline().strip() != "step":
            sys.exit(0)
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew

    def on_step_end(self, _args: Any, _state: Any, _control: Any, **_: Any) -> None:
        """Say that it is done, which stops the clock, and then what was done."""
        self.reply({"done": True})
        status = Path("/proc/self/status").read_text()
        peak_bytes = 1024 * int(status.partition("VmHWM:")[2].split()[0])
        self.reply({"samples": self.num_samples, "completion_tokens": self.num_tokens, "peak_rss_bytes": peak_bytes})

    def reply(self, value: dict[str, Any]) -> None:
        """One line of JSON."""
        print(json.dumps(value), file=self.replies, flush=True)


def build_trainer(settings: dict[str, Any], replies: Any) -> GRPOTrainer:
    """The trainer with the settings that are fastest for it on a CPU and give the same step."""
    num_samples = settings["num_prompts"] * settings["group_size"]
    rows = [json.loads(line) for line in Path(settings["rows"]).read_text(encoding="utf-8").splitlines()]
    dataset = Dataset.from_list([{"prompt": row["prompt"], "item": json.dumps(row["item"])} for row in rows])
    config = GRPOConfig(
        output_dir=settings["folder"],
        use_cpu=True,
        bf16=False,  # autocast on top of a model that is in its dtype already
        gradient_checkpointing=settings["gradient_checkpointing"],
        per_device_train_batch_size=settings["microbatch"] or num_samples,
        gradient_accumulation_steps=num_samples // (settings["microbatch"] or num_samples),
        num_generations=settings["group_size"],
        max_completion_length=settings["max_tokens"],
        temperature=settings["temperature"],
        learning_rate=settings["lr"],
        lr_scheduler_type="constant",
        beta=0.0,
        loss_type="grpo",
        max_steps=MAX_STEPS,
        logging_steps=MAX_STEPS,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=0,
    )
    callback = StepOnDemand(replies, num_samples)
    return GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(settings["model"], dtype=getattr(torch, settings["dtype"])),
        processing_class=AutoTokenizer.from_pretrained(settings["model"]),
        reward_funcs=reward_function(settings, callback),
        args=config,
        train_dataset=dataset,
        callbacks=[callback],
    )


def reward_function(settings: dict[str, Any], callback: StepOnDemand) -> Callable[..., list[float]]:
    """The task's own scorer, as ebbtide's reward calls it."""
    task = reasoning_gym.create_dataset(settings["task"], size=1, seed=0, **settings["params"])
    answer = load_function(settings["answer"])

    def reward(
        completions: list[Any], completion_ids: list[list[int]], item: list[str], **_columns: Any
    ) -> list[float]:
        callback.num_tokens = sum(map(len, completion_ids))
        texts = [text if isinstance(text, str) else text[0]["content"] for text in completions]
        pairs = zip(texts, map(json.loads, item), strict=True)
        return [float(task.score_answer(answer(text, entry), entry)) for text, entry in pairs]

    return reward


def load_function(reference: str) -> Callable[[str, dict[str, Any]], str]:
    """`file.py:name`."""
    path, _, name = reference.rpartition(":")
    spec = importlib.util.spec_from_file_location("task", path)
    assert spec is not None, reference
    assert spec.loader is not None, reference
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function: Callable[[str, dict[str, Any]], str] = getattr(module, name)
    return function


if __name__ == "__main__":
    main(sys.argv[1])
