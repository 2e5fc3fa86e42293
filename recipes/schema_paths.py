"""The dotted paths of a recipe (`train.optimizer.learning_rate`), and the nearest one to a wrong path."""

from collections.abc import Iterator
from difflib import SequenceMatcher
from functools import cache

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


def _similarity(left: str, right: str) -> float:
    return 1.0 if left == right else SequenceMatcher(None, left, right).ratio()


def nearest_path(wrong: str) -> str:
    """The valid path whose name, and then whose section, is most like those of `wrong`."""
    wrong_section, _, wrong_name = wrong.rpartition(".")

    def likeness(path: str) -> float:
        section, _, name = path.rpartition(".")
        return _similarity(name, wrong_name) + _SECTION_WEIGHT * _similarity(section, wrong_section)

    return max(schema_fields(), key=likeness)
