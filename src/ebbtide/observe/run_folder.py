"""`runs/<name>`: the folder of one run, and who may write it.

A file `.ebbtide-run` marks a run folder. It is locked while the run lives, so that two runs never share a folder, and
without it nothing is ever deleted: `overwrite` cannot take a folder that is something else.
"""

import errno
import fcntl
import json
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from ebbtide import config
from ebbtide.config import Section
from ebbtide.errors import RunFolderError, problem
from ebbtide.observe.environment import environment

__all__ = ["RunFolder", "is_run_folder"]

_MARKER = ".ebbtide-run"


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Where the parts of a run lie.

    Attributes:
        path: the folder.
    """

    path: Path
    _lock: list[int] = field(default_factory=list, repr=False, compare=False)

    @property
    def metrics(self) -> Path:
        """One JSON object a step."""
        return self.path / "metrics.jsonl"

    @property
    def recipe(self) -> Path:
        """The resolved configuration; `ebbtide train` of it repeats the run."""
        return self.path / "recipe.toml"

    @property
    def environment(self) -> Path:
        """Versions and machine."""
        return self.path / "environment.json"

    @property
    def samples(self) -> Path:
        """A few completions, one JSON object a line."""
        return self.path / "samples.jsonl"

    @property
    def report(self) -> Path:
        """The curves, as one page."""
        return self.path / "report.html"

    @property
    def checkpoints(self) -> Path:
        """One folder `step-<n>` a checkpoint."""
        return self.path / "checkpoints"

    @property
    def final(self) -> Path:
        """The checkpoint at the end of the run, as Hugging Face lays it out."""
        return self.path / "final"

    def checkpoint(self, step: int | None = None) -> Path:
        """The weights after a step, as Hugging Face lays them out; those of the end, or else the newest, for None.

        Raises:
            RunFolderError: there are none; says which steps have some.
        """
        if step is None and (self.final / "config.json").is_file():
            return self.final
        found = {int(path.parent.name.removeprefix("step-")): path for path in self.checkpoints.glob("step-*/model")}
        if step is None and found:
            return found[max(found)]
        if step is not None and step in found:
            return found[step]
        known = ", ".join(map(str, sorted(found))) or "none"
        rule = f"there are no weights of this step; steps with weights: {known}"
        remedy = "checkpoint.every_steps keeps some during a run"
        raise RunFolderError(problem(f"{self.path} step", "end" if step is None else step, rule, remedy))

    @staticmethod
    def create(
        path: Path, recipe: Section, *, existing: Literal["refuse", "overwrite", "resume"] = "refuse"
    ) -> "RunFolder":
        """Make the folder, or take an earlier one as told; writes the resolved recipe and the environment.

        Args:
            path: the folder; one that is empty counts as not there.
            recipe: the resolved configuration.
            existing: what to do with the folder of an earlier run. A resumed run keeps all files.

        Raises:
            RunFolderError: it exists and may not be taken, a run is writing it, or there is nothing to resume.
        """
        try:
            _make_way(path, existing)
            path.mkdir(parents=True, exist_ok=True)
            folder = RunFolder(path, [_lock(path)])
            folder.recipe.write_text(config.dump(recipe), encoding="utf-8")
            folder.environment.write_text(json.dumps(environment(), indent=2) + "\n", encoding="utf-8")
        except RunFolderError:
            raise
        except OSError as error:
            raise RunFolderError(problem("run folder", str(path), f"cannot be made: {error.strerror}")) from error
        return folder

    @staticmethod
    def open(path: Path) -> "RunFolder":
        """An existing run folder, to read.

        Raises:
            RunFolderError: it is none.
        """
        if not is_run_folder(path):
            raise RunFolderError(problem("run folder", str(path), "is not the folder of a run"))
        return RunFolder(path)

    def close(self) -> None:
        """Let others write the folder; calling it again does nothing. The end of the process does the same."""
        while self._lock:
            os.close(self._lock.pop())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def is_run_folder(path: Path) -> bool:
    """Whether a run has marked this folder as its own."""
    return (path / _MARKER).is_file()


def _make_way(path: Path, existing: Literal["refuse", "overwrite", "resume"]) -> None:
    """Leave nothing at `path`, or an earlier run's folder that is to be resumed."""
    where = str(path)
    if path.exists() and not path.is_dir():
        raise RunFolderError(problem("run folder", where, "is a file", "Choose another name in the recipe"))
    is_there = path.is_dir() and any(path.iterdir())
    if existing == "resume":
        if not is_run_folder(path):
            rule = "is not the folder of a run" if is_there else "does not exist, so that there is nothing to resume"
            raise RunFolderError(problem("run folder", where, rule, "Leave --resume away to start it"))
        return
    if not is_there:
        return
    if not is_run_folder(path):
        rule = "exists and is not the folder of a run, so that nothing in it may be replaced"
        raise RunFolderError(problem("run folder", where, rule, "Choose another name in the recipe"))
    if existing == "refuse":
        remedy = "Go on with it by --resume, replace it by --overwrite, or choose another name in the recipe"
        raise RunFolderError(problem("run folder", where, "holds an earlier run", remedy))
    if path.is_symlink():
        rule = "is a link, and replacing it might delete what is shared"
        raise RunFolderError(problem("run folder", where, rule, "Give the folder itself"))
    _remove(path)


def _remove(path: Path) -> None:
    """Delete a run folder that no run is writing; out of the way first, so that no half of it is left in place."""
    lock = _lock(path)
    try:
        doomed = path.with_name(f".{path.name}.replaced-{os.getpid()}")
        path.rename(doomed)
        shutil.rmtree(doomed)
    finally:
        os.close(lock)


def _lock(path: Path) -> int:
    """The descriptor that holds the folder's lock; a process's end lets go of it, and its children do not hold it."""
    descriptor = os.open(path / _MARKER, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
            os.close(descriptor)
            rule = f"a run is writing it (process {holder})"
            raise RunFolderError(
                problem("run folder", str(path), rule, "Wait for its end, or choose another name")
            ) from error
        if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP):  # a file system without locks guards nothing
            os.close(descriptor)
            raise
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor
