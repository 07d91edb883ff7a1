import subprocess
import sys

import pytest

from ebbtide import config
from tests.config.tree import Outer


def test_a_section_cannot_be_changed() -> None:
    section = config.validate(Outer, {"steps": 1})
    with pytest.raises(ValueError, match="frozen"):
        section.steps = 2  # type: ignore[misc]


def test_reading_the_configuration_machinery_loads_no_heavy_package() -> None:
    script = """
import sys
import ebbtide, ebbtide.config, ebbtide.recipe, ebbtide.plugins, ebbtide.errors, ebbtide.units, ebbtide.env
heavy = {"torch", "transformers", "numpy", "vllm", "ray", "wandb", "mlflow", "tensorboard", "datasets", "reasoning_gym"}
sys.exit(", ".join(sorted(heavy & set(sys.modules))) or 0)
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={"PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
