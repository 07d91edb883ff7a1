"""What importing costs: the package alone loads nothing heavy, and no module of it loads an extra."""

import json
import os
import subprocess
import sys

from tests.repo.sources import SOURCE, modules

EXTRAS = ("gguf", "mlflow", "peft", "ray", "tensorboard", "vllm", "wandb")
HEAVY = ("datasets", "numpy", "pydantic", "reasoning_gym", "torch", "transformers", *EXTRAS)


def test_importing_the_package_loads_nothing_heavy() -> None:
    assert not _loaded_by(["ebbtide"]) & set(HEAVY)


def test_no_module_loads_an_extra() -> None:
    names = [".".join(path.relative_to(SOURCE.parent).with_suffix("").parts) for path in modules()]
    loaded = _loaded_by([name.removesuffix(".__init__") for name in names if not name.endswith("__main__")])
    assert not loaded & set(EXTRAS)


def _loaded_by(names: list[str]) -> set[str]:
    code = (
        "import importlib, json, sys\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
        "print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    )
    environment = {**os.environ, "PYTHONPATH": str(SOURCE.parent)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))
