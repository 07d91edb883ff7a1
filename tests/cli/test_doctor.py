import json
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from ebbtide.cli import doctor as module
from ebbtide.cli.doctor import EXTRAS, _Finding
from ebbtide.cli.main import main

GOOD = {"torch": "2.13.0", "transformers": "5.19.0", "threads": 2, "cuda_build": None, "devices": []}


def probe_gives(monkeypatch: pytest.MonkeyPatch, code: int, output: str, errors: str = "") -> None:
    """What the fresh interpreter answers; companions are not there unless a test puts them there."""
    monkeypatch.setattr(module, "_run", lambda script: (code, output, errors))


@pytest.fixture(autouse=True)
def _no_companions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)  # type: ignore[attr-defined]


def find(findings: list[_Finding], name: str) -> _Finding:
    (found,) = (finding for finding in findings if finding.name == name)
    return found


def test_every_extra_of_the_package_is_examined() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert set(EXTRAS) == set(project["optional-dependencies"]) - {"dev"}
    for extra, (_, distributions) in EXTRAS.items():
        first = project["optional-dependencies"][extra][0]
        assert any(first.startswith(name) for name in distributions)


def test_a_sound_machine_is_ready(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    probe_gives(monkeypatch, 0, json.dumps(GOOD))
    monkeypatch.setattr(module, "_requirements", lambda: iter([_Finding("packages", "ok", "fit")]))
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert text.endswith("\nready to train\n")
    assert "torch 2.13.0 and transformers 5.19.0 can be imported" in text
    assert "cpu, 2 threads; no accelerator" in text
    assert main(["doctor", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["ok"] is True
    assert {"python", "models", "device", "cpu", "memory", "disk", "hub", *EXTRAS} <= {
        row["name"] for row in answer["findings"]
    }


def test_the_real_probe_imports_what_training_needs() -> None:
    code, output, errors = module._run(module._PROBE_MODELS)
    assert code == 0, errors
    assert json.loads(output)["torch"] == metadata.version("torch")


def test_a_missing_extra_comes_with_the_line_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_version", lambda name: "0.31" if name == "wandb" else None)
    findings = list(module._extras())
    assert find(findings, "wandb").state == "ok"
    missing = find(findings, "ray")
    assert (missing.state, missing.remedy) == ("missing", "pip install 'ebbtide[ray]'")
    assert "make setup-vllm" in find(findings, "vllm").remedy


def test_models_that_cannot_be_imported_make_the_machine_unready(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    probe_gives(
        monkeypatch, 1, "", "Traceback\n  File\nModuleNotFoundError: Could not import module 'Qwen3ForCausalLM'"
    )
    assert main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert "broken   models" in text
    assert "transformers' models cannot be imported: ModuleNotFoundError: Could not import module" in text
    assert text.endswith("\nnot ready: mend what is broken\n")


@pytest.mark.parametrize("companion", ["torchvision", "torchaudio", "torchcodec"])
def test_a_package_for_another_torch_is_named_with_the_remedy(companion: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(script: str) -> tuple[int, str, str]:
        return 1, "", f"RuntimeError: operator {companion}::nms does not exist"

    monkeypatch.setattr(module, "_run", run)
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: name == companion or None)  # type: ignore[attr-defined]
    findings = list(module._models())
    found = find(findings, companion)
    assert found.state == "broken"
    assert f"operator {companion}::nms does not exist" in found.text
    assert found.remedy.startswith(f"pip uninstall -y {companion} ")
    assert find(findings, "models").remedy == "Remove what is broken beside it"


def test_a_companion_that_fits_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_run", lambda script: (0, json.dumps(GOOD), ""))
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: name == "torchvision" or None)  # type: ignore[attr-defined]
    assert find(list(module._models()), "torchvision").state == "ok"


def test_a_probe_that_dies_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    code, _, errors = module._run("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert code == -9
    assert module._last_line(errors) == "ended by signal 9"


def test_a_probe_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PROBE_LIMIT_S", 0.2)
    assert module._run("import time; time.sleep(60)") == (1, "", "took longer than 0.2 s")


def test_devices_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    device = {"type": "cuda", "index": 0, "name": "H200", "memory_bytes": 141 << 30, "free_bytes": 140 << 30}
    probe_gives(monkeypatch, 0, json.dumps(GOOD | {"cuda_build": "13.0", "devices": [device]}))
    assert find(list(module._models()), "cuda:0").text == "H200, 141.0 GiB, 140.0 free"


def test_a_driver_without_a_cuda_build_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    probe_gives(monkeypatch, 0, json.dumps(GOOD))
    monkeypatch.setattr(module.shutil, "which", lambda name: "nvidia-smi")  # type: ignore[attr-defined]
    found = find(list(module._models()), "device")
    assert found.state == "missing"
    assert "this torch is built for the CPU" in found.text


@pytest.mark.parametrize(
    ("version", "state"), [(None, "broken"), ("1.0", "broken"), ("2.11.0", "ok"), ("2.13.0+cpu", "ok")]
)
def test_needed_packages_are_held_against_their_ranges(
    version: str | None, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = ["torch>=2.11", "wandb>=0.19; extra == 'wandb'"]
    monkeypatch.setattr(metadata, "requires", lambda name: lines)
    monkeypatch.setattr(module, "_version", lambda name: version if name == "torch" else None)
    findings = list(module._requirements())
    assert next(finding.state for finding in findings if finding.name in ("torch", "packages")) == state
    if state == "broken":
        assert findings[0].remedy == "pip install 'torch>=2.11'"


def test_a_tree_that_is_not_installed_says_how(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> list[str]:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", absent)
    (found,) = module._requirements()
    assert (found.state, found.remedy) == ("broken", "pip install -e .")


def test_a_python_that_is_not_supported_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    class Version(tuple):  # type: ignore[type-arg]
        major, minor, micro = 3, 14, 0

    monkeypatch.setattr(sys, "version_info", Version((3, 14, 0)))
    (found,) = module._python()
    assert (found.state, found.remedy) == ("broken", "ebbtide needs Python 3.11 or 3.12")


def test_the_hub_is_as_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "forbidden" in next(module._hub()).text
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    assert "allowed" in next(module._hub()).text
