"""Imports go down only; what stands on one row meets only through a `base.py`."""

import pytest

from tests.repo.sources import SOURCE, Import, imports, modules

# From the top. Whatever is not listed may not exist.
ROWS = (
    ("cli",),
    ("loop",),
    ("cluster",),
    ("engines", "rollout", "weightsync", "algorithms", "teacher", "rewards"),
    ("models",),
    ("numerics", "memory", "profiling", "data"),
    ("observe",),
    ("recipe",),
    ("config",),
    ("plugins",),
    ("types", "device"),
    ("env", "errors", "units"),
)
ROW = {name: row for row, names in enumerate(ROWS) for name in names}


def test_every_part_has_its_row() -> None:
    parts = {path.relative_to(SOURCE).with_suffix("").parts[0] for path in modules()} - {"__init__", "__main__"}
    assert parts <= set(ROW), f"no row for {sorted(parts - set(ROW))}: a part is entered in ROWS of this file"


def test_imports_go_down_only() -> None:
    broken = [
        f"{item.importer}:{item.line}: {why}"
        for path in modules()
        for item in imports(path)
        if (why := _objection(item))
    ]
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize(
    ("importer", "module", "is_allowed"),
    [
        ("engines/fsdp.py", "ebbtide.numerics.logprobs", True),
        ("engines/fsdp.py", "ebbtide.engines.policy", True),
        ("engines/fsdp.py", "ebbtide.rollout.base", True),
        ("engines/fsdp.py", "ebbtide.rollout.inprocess", False),
        ("numerics/kl.py", "ebbtide.engines.base", False),
        ("errors.py", "ebbtide.units", False),
        ("types.py", "ebbtide.errors", True),
        ("loop/sync.py", "ebbtide.cli.main", False),
        ("loop/sync.py", "ebbtide.misc", False),
        ("__init__.py", "ebbtide.errors", False),
        ("__main__.py", "ebbtide.cli.main", True),
    ],
)
def test_the_rule_itself(importer: str, module: str, is_allowed: bool) -> None:
    objection = _objection(Import(f"src/ebbtide/{importer}", 1, module, "x"))
    assert (objection == "") == is_allowed, objection


def _objection(item: Import) -> str:
    here = item.importer.removeprefix("src/ebbtide/").removesuffix(".py").split("/")[0]
    there, *rest = item.module.split(".")[1:] or [""]
    if not there or here == there or here == "__main__":
        return ""
    if here == "__init__":
        return "the package itself imports nothing"
    if there not in ROW:
        return f"{item.module} has no row"
    if ROW[there] > ROW[here] or (ROW[there] == ROW[here] and rest[-1:] == ["base"]):
        return ""
    what = "a sibling, to be met through its base.py" if ROW[there] == ROW[here] else "above"
    return f"{here} imports {item.module}, which is {what}"
