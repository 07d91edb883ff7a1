from pathlib import Path

import pytest

from ebbtide.cli.main import main
from ebbtide.config import Section
from ebbtide.observe.jsonl import MetricsFile
from ebbtide.observe.run_folder import RunFolder


def test_a_runs_page_is_made_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RunFolder.create(tmp_path / "run", Section()) as folder, MetricsFile(folder.metrics) as file:
        file.write(1, {"reward/mean": 0.5})
        assert main(["report", str(folder.path)]) == 0  # while the run goes on
    assert capsys.readouterr().out == f"{folder.report}\n"
    assert folder.report.read_text().startswith("<!doctype html>")


def test_a_folder_of_something_else_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 2
    assert "is not the folder of a run" in capsys.readouterr().err
