"""YAML as recipes use it: the core schema of YAML 1.2, with repeated keys found and named.

PyYAML speaks YAML 1.1, where `1e-3` is text, `010` is eight and `no` is false.  Here a number is a number,
only `true` and `false` are truth values, and there are no dates, sets or tags.  Called by `recipes.load`.
"""

import re
from collections.abc import Iterator
from typing import Any

import yaml

from recipes.errors import UserError

_TAG = "tag:yaml.org,2002:"
_INT = re.compile(r"[-+]?[0-9]+(_[0-9]+)*$")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(_[0-9]+)*(\.[0-9]*)?)([eE][-+]?[0-9]+)?$")
_BOOL = re.compile(r"(true|True|TRUE|false|False|FALSE)$")
_NULL = re.compile(r"(~|null|Null|NULL|)$")
_NUMBER_STARTS = list("-+.0123456789")


class CoreLoader(yaml.SafeLoader):
    """Resolves scalars by the core schema and constructs nothing else."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012  PyYAML's own way; starts from nothing, not SafeLoader's
    yaml_constructors: dict[str, Any] = {}  # noqa: RUF012


class CoreDumper(yaml.SafeDumper):
    """Writes what CoreLoader reads back: text that looks like a number in either YAML is quoted."""


for _name, _pattern, _starts in (
    ("int", _INT, _NUMBER_STARTS),
    ("float", _FLOAT, _NUMBER_STARTS),
    ("bool", _BOOL, list("tTfF")),
    ("null", _NULL, ["~", "n", "N", ""]),
):
    CoreLoader.add_implicit_resolver(_TAG + _name, _pattern, _starts)
    CoreDumper.add_implicit_resolver(_TAG + _name, _pattern, _starts)

CoreLoader.add_constructor(None, yaml.SafeLoader.construct_undefined)  # any other tag is an error
CoreLoader.add_constructor(_TAG + "int", lambda loader, node: int(loader.construct_scalar(node)))
CoreLoader.add_constructor(_TAG + "float", lambda loader, node: float(loader.construct_scalar(node)))
CoreLoader.add_constructor(
    _TAG + "bool", lambda loader, node: loader.construct_scalar(node).lower() == "true"
)
CoreLoader.add_constructor(_TAG + "null", lambda loader, node: None)
CoreLoader.add_constructor(_TAG + "str", lambda loader, node: loader.construct_scalar(node))
CoreLoader.add_constructor(_TAG + "seq", lambda loader, node: loader.construct_sequence(node, deep=True))
CoreLoader.add_constructor(_TAG + "map", lambda loader, node: loader.construct_mapping(node, deep=True))


def parse_yaml(text: str) -> tuple[Any, list[str]]:
    """The data, and one line for every key given twice (the last one counts in the data).

    Raises UserError with one line for text that is no YAML, or uses more of YAML than recipes do.
    """
    try:
        loader = CoreLoader(text)
        node = loader.get_single_node()
        data = None if node is None else loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise UserError(f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}") from error
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(" ".join(str(error).split())) from error
    return data, list(_repeated_keys(node, ""))


def _repeated_keys(node: yaml.Node | None, path: str) -> Iterator[str]:
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield from _repeated_keys(item, f"{path}[{index}]")
    if not isinstance(node, yaml.MappingNode):
        return
    first_lines: dict[str, int] = {}
    for key, value in node.value:
        dotted = f"{path}.{key.value}" if path else key.value
        line = key.start_mark.line + 1
        if dotted in first_lines:
            yield f"{dotted}: expected once, found on lines {first_lines[dotted]} and {line}; keep one"
        first_lines.setdefault(dotted, line)
        yield from _repeated_keys(value, dotted)


def format_yaml(data: Any) -> str:
    """The same data in YAML, in the order given; short lists stay on one line."""
    return yaml.dump(
        data, Dumper=CoreDumper, sort_keys=False, default_flow_style=None, width=110, allow_unicode=True
    )
