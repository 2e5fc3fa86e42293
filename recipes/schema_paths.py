"""The dotted paths of a recipe (`train.optimizer.learning_rate`), and the nearest one to a wrong path.

Items of a list have one path for all: `data.prompts[].weight`.
"""

import re
from collections.abc import Iterator
from difflib import SequenceMatcher
from functools import cache
from typing import get_args, get_origin

from pydantic.fields import FieldInfo

from recipes.schema import Recipe, Section

_SECTION_WEIGHT = (
    0.25  # so that a name spelt right elsewhere beats one that is merely similar in the same section
)


@cache
def schema_fields() -> dict[str, FieldInfo]:
    """Every valid dotted path, sections included, with its field."""
    return dict(_fields_below(Recipe, ""))


def is_section(annotation: object) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Section)


def _fields_below(section: type[Section], prefix: str) -> Iterator[tuple[str, FieldInfo]]:
    for name, field in section.model_fields.items():
        yield prefix + name, field
        if is_section(field.annotation):
            yield from _fields_below(field.annotation, f"{prefix}{name}.")  # type: ignore[arg-type]
        for item in _listed_sections(field.annotation):
            yield from _fields_below(item, f"{prefix}{name}[].")


def _listed_sections(annotation: object) -> list[type[Section]]:
    """Whose items a list has, alone or in a union."""
    lists = [each for each in (annotation, *get_args(annotation)) if get_origin(each) is list]
    return [item for each in lists for item in get_args(each) if is_section(item)]


def _similarity(left: str, right: str) -> float:
    return 1.0 if left == right else SequenceMatcher(None, left, right).ratio()


def nearest_path(wrong: str) -> str:
    """The valid path whose name, and then whose section, is most like those of `wrong`."""
    wrong_section, _, wrong_name = re.sub(r"\[\d+\]", "[]", wrong).rpartition(".")

    def likeness(path: str) -> float:
        section, _, name = path.rpartition(".")
        return _similarity(name, wrong_name) + _SECTION_WEIGHT * _similarity(section, wrong_section)

    return max(schema_fields(), key=likeness)
