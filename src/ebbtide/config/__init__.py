"""TOML -> pydantic tree -> dotted overrides -> every problem at once -> resolved dump.

Only the machinery is here; the tree itself is `ebbtide.recipe.Recipe`. A section is a frozen pydantic model whose
fields are described by the string under each. A choice is a table with `type`: the rest of the table is the Config
of the class that the type names. A value must have its field's type: no text is read as a number, no number as a
switch. TOML has no null, so that "none" stands for None where a setting may be None.
"""

from ebbtide.config.explaining import Explanation, explain
from ebbtide.config.loading import differences, dump, flatten, load, parse_override, resolve, validate
from ebbtide.config.sections import Choice, Component, Section

__all__ = [
    "Choice",
    "Component",
    "Explanation",
    "Section",
    "differences",
    "dump",
    "explain",
    "flatten",
    "load",
    "parse_override",
    "resolve",
    "validate",
]
