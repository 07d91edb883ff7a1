"""The private folder of a listening socket: only its owner can enter it, and it goes with its owner's death.

The owner holds a lock on the folder for as long as it lives. Whoever meets a folder whose lock is free may remove it:
the receiver that saw its sender die, and the next sender that starts.
"""

import fcntl
import os
import shutil
import stat
import tempfile
from pathlib import Path

__all__ = ["PrivateFolder", "remove_if_abandoned"]

_PREFIX = "ebbtide-push-"


class PrivateFolder:
    """A folder of mode 0700 below `base` (the system's temporary folder where None), locked while it lives."""

    def __init__(self, base: Path | None = None) -> None:
        base = base or Path(tempfile.gettempdir())
        for other in base.glob(f"{_PREFIX}*"):
            remove_if_abandoned(other)
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
        self._fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(self._fd, fcntl.LOCK_EX)

    def close(self) -> None:
        """Remove it; calling it again does nothing."""
        if self._fd >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._fd)
            self._fd = -1


def remove_if_abandoned(path: Path) -> bool:
    """Remove a folder of ours whose owner is dead; False where it lives, or is not ours."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        status = os.fstat(fd)
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) != 0o700:
            return False
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path, ignore_errors=True)
        return True
    except OSError:
        return False
    finally:
        os.close(fd)
