import json
import os
from pathlib import Path
from typing import Literal

import pytest

from ebbtide.config import Section, load
from ebbtide.errors import RunFolderError
from ebbtide.observe.run_folder import RunFolder, is_run_folder


class Small(Section):
    steps: int = 3


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "quick"


def make(path: Path, existing: Literal["refuse", "overwrite", "resume"] = "refuse") -> RunFolder:
    return RunFolder.create(path, Small(), existing=existing)


def test_a_new_folder_holds_recipe_and_environment(path: Path) -> None:
    with make(path) as folder:
        assert load(Small, folder.recipe) == Small()
        assert "torch" in json.loads(folder.environment.read_text())["versions"]
        assert is_run_folder(path)
        assert RunFolder.open(path) == folder


def test_an_earlier_run_is_kept_unless_told_otherwise(path: Path) -> None:
    with make(path) as folder:
        folder.metrics.write_text("kept")
    with pytest.raises(RunFolderError, match=r"holds an earlier run. Go on with it by --resume, replace it by --overw"):
        make(path)
    assert folder.metrics.read_text() == "kept"
    with make(path, "resume"):
        assert folder.metrics.read_text() == "kept"
    with make(path, "overwrite"):
        assert not folder.metrics.exists()
    assert sorted(item.name for item in path.parent.iterdir()) == ["quick"]


def test_an_empty_folder_counts_as_not_there(path: Path) -> None:
    path.mkdir(parents=True)
    make(path).close()
    assert is_run_folder(path)


@pytest.mark.parametrize("existing", ["refuse", "overwrite", "resume"])
def test_a_folder_of_something_else_is_never_touched(
    path: Path, existing: Literal["refuse", "overwrite", "resume"]
) -> None:
    path.mkdir(parents=True)
    (path / "thesis.tex").write_text("years of work")
    with pytest.raises(RunFolderError, match="is not the folder of a run"):
        make(path, existing)
    assert [item.name for item in path.iterdir()] == ["thesis.tex"]


def test_a_link_is_not_overwritten(path: Path, tmp_path: Path) -> None:
    target = tmp_path / "elsewhere" / "real"
    make(target).close()
    (target / "old").write_text("old")
    path.parent.mkdir(parents=True)
    path.symlink_to(target)
    with pytest.raises(RunFolderError, match="is a link"):
        make(path, "overwrite")
    assert (target / "old").read_text() == "old"


def test_a_file_in_its_place_is_named(path: Path) -> None:
    path.parent.mkdir(parents=True)
    path.write_text("a file")
    with pytest.raises(RunFolderError, match="is a file"):
        make(path, "overwrite")


def test_nothing_to_resume_is_said(path: Path) -> None:
    with pytest.raises(RunFolderError, match="nothing to resume"):
        make(path, "resume")
    assert not path.exists()


def test_opening_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="is not the folder of a run"):
        RunFolder.open(tmp_path)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("in the way")
    with pytest.raises(RunFolderError, match="cannot be made"):
        make(tmp_path / "runs" / "quick")


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")  # the child touches files alone
@pytest.mark.parametrize("existing", ["overwrite", "resume"])
def test_a_folder_that_a_live_run_writes_is_left_alone(path: Path, existing: Literal["overwrite", "resume"]) -> None:
    """The lock is a process's, so that the other run must be another process."""
    with make(path) as folder:
        folder.metrics.write_text("alive")
        child = os.fork()
        if child == 0:
            try:
                make(path, existing)
            except RunFolderError as error:
                os._exit(0 if f"a run is writing it (process {os.getppid()})" in str(error) else 1)
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert folder.metrics.read_text() == "alive"
    make(path, existing).close()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")  # the child touches files alone
def test_a_child_does_not_hold_its_parents_lock(path: Path) -> None:
    folder = make(path)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writing)
        os.read(reading, 1)  # lives until the parent closes the pipe
        os._exit(0)
    os.close(reading)
    folder.close()
    grandchild = os.fork()
    if grandchild == 0:
        try:
            make(path, "resume")
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(grandchild, 0)[1]) == 0
    os.close(writing)
    os.waitpid(child, 0)
