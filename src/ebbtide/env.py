"""The only module that reads or writes environment variables.

`prepare()` must run before torch is imported: OpenMP reads its wait policy once.
"""

import os
from pathlib import Path

__all__ = ["is_hub_offline", "prepare", "runs_dir"]


def prepare() -> None:
    """Set process defaults that torch and tokenizers read at import; what the user has set stays.

    Spinning OpenMP threads slow a shared CPU by up to twenty times, and a tokenizer's thread pool does not survive
    a fork.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def is_hub_offline() -> bool:
    """Whether the user has forbidden model hubs (`HF_HUB_OFFLINE`)."""
    return os.environ.get("HF_HUB_OFFLINE", "0").lower() not in ("", "0", "false", "no")


def runs_dir() -> Path:
    """Where run folders go when the recipe names none (`EBBTIDE_RUNS`, else `runs` in the working directory)."""
    return Path(os.environ.get("EBBTIDE_RUNS", "runs"))
