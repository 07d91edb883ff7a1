"""What a checkpoint holds beside weights leaves an engine as well, or a model loaded from the export would differ."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from ebbtide.device import Device
from ebbtide.engines.base import EngineSetting
from ebbtide.engines.fsdp import FSDPEngine
from ebbtide.models.build import stored_buffers
from ebbtide.models.export import save_checkpoint
from ebbtide.recipe import ModelSection, OptimSection
from tests.models.zoo import make


@pytest.mark.parametrize("model_type", ["apertus", "glm4_moe"])
def test_stored_buffers_are_exported(tmp_path: Path, model_type: str) -> None:
    path, model = tmp_path / "in", make(model_type, attention="sdpa")
    model.save_pretrained(path)
    buffers = stored_buffers(model)
    assert buffers, "else this shows nothing"
    setting = EngineSetting(ModelSection(path=str(path)), OptimSection(lr=1e-3), Device("cpu"), 0, 1.0, 1, 8)
    engine = FSDPEngine(FSDPEngine.Config(), setting)
    try:
        sent = {name: tensor.clone() for name, tensor in engine.named_weights()}
        save_checkpoint(tmp_path / "out", engine.named_weights(), model.config, None)
    finally:
        engine.close()
    for name, buffer in buffers.items():
        torch.testing.assert_close(sent[name], buffer)
    _, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"]
