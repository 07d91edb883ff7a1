import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer


@pytest.mark.parametrize("model_type", ["qwen3", "qwen2", "llama", "gemma3_text"])
def test_tiny_checkpoints_load_as_any_other(make_checkpoint: Callable[..., Path], model_type: str) -> None:
    folder = make_checkpoint(model_type)
    assert make_checkpoint(model_type) == folder
    assert json.loads((folder / "config.json").read_text())["model_type"] == model_type
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert tokenizer.decode(tokenizer("31<")["input_ids"]) == "31<"
    assert model.get_input_embeddings().num_embeddings == len(tokenizer)


def test_the_hub_is_off() -> None:
    assert os.environ["HF_HUB_OFFLINE"] == "1"
