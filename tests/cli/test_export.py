import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from ebbtide.cli.main import main


def test_the_export_is_the_runs_weights_and_loads(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "model"
    capsys.readouterr()
    assert main(["export", str(run_folder), str(target), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["source"] == str(run_folder / "final")
    assert answer["bytes"] == sum(path.stat().st_size for path in target.iterdir())
    mine, theirs = (load_file(folder / "model.safetensors") for folder in (target, run_folder / "final"))
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    model = AutoModelForCausalLM.from_pretrained(target)
    tokenizer = AutoTokenizer.from_pretrained(target)
    tokens = tokenizer("31524>", return_tensors="pt")
    with torch.no_grad():
        assert model(input_ids=tokens["input_ids"]).logits.isfinite().all()


def test_a_step_in_another_dtype(run_folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "model"
    assert main(["export", str(run_folder), str(target), "--step", "1", "--dtype", "bfloat16"]) == 0
    mine = load_file(target / "model.safetensors")
    theirs = load_file(run_folder / "checkpoints" / "step-1" / "model" / "model.safetensors")
    assert all(torch.equal(mine[name], theirs[name].bfloat16()) for name in theirs)
    assert AutoModelForCausalLM.from_pretrained(target).dtype == torch.bfloat16


def test_a_checkpoint_of_several_files_is_converted_whole(run_folder: Path, tmp_path: Path) -> None:
    split, target = tmp_path / "run" / "final", tmp_path / "model"
    shutil.copytree(run_folder, split.parent)
    model = AutoModelForCausalLM.from_pretrained(split)
    (split / "model.safetensors").unlink()
    model.save_pretrained(split, max_shard_size="40KB")
    assert len(list(split.glob("*.safetensors"))) > 1
    assert main(["export", str(split.parent), str(target), "--dtype", "bfloat16"]) == 0
    found = AutoModelForCausalLM.from_pretrained(target)
    assert found.dtype == torch.bfloat16
    theirs = model.state_dict()
    assert all(torch.equal(tensor, theirs[name].bfloat16()) for name, tensor in found.state_dict().items())
    index = json.loads((target / "model.safetensors.index.json").read_text())
    held = [tensor for file in target.glob("*.safetensors") for tensor in load_file(file).values()]
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in held)


def test_a_target_that_holds_something_is_kept(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "model"
    arguments = ["export", str(run_folder), str(target)]
    assert main(arguments) == 0
    assert main(arguments) == 2
    assert "holds a checkpoint. Replace it by --overwrite." in capsys.readouterr().err
    assert main([*arguments, "--overwrite"]) == 0
    other = tmp_path / "thesis"
    other.mkdir()
    (other / "thesis.tex").write_text("years of work")
    assert main(["export", str(run_folder), str(other), "--overwrite"]) == 2
    assert "exists and is no checkpoint" in capsys.readouterr().err
    assert (other / "thesis.tex").read_text() == "years of work"


@pytest.mark.parametrize("target", ["final", ""])
def test_the_runs_own_weights_are_never_replaced(
    target: str, run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(run_folder), str(run_folder / target), "--overwrite"]) == 2
    assert "holds the weights that are to be exported" in capsys.readouterr().err


def test_a_folder_of_something_else_and_a_step_that_is_not_there_are_refused(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(tmp_path), str(tmp_path / "model")]) == 2
    assert "is not the folder of a run" in capsys.readouterr().err
    assert main(["export", str(run_folder), str(tmp_path / "model"), "--step", "9"]) == 2
    assert "steps with weights: 1, 2" in capsys.readouterr().err
