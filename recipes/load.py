"""YAML file + dotted overrides -> Recipe, and the resolved recipe back to YAML beside the results.

Every problem of a recipe is told at once, one line each.  `check_against_target` adds what only the target's
config.json can tell; no weights are read and nothing here needs torch.  Called by every entry script.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from recipes.errors import UserError
from recipes.manifest import provenance, write_json, write_text
from recipes.problems import describe_found, describe_problem, dotted_path
from recipes.schema import Recipe, Source
from recipes.schema_paths import is_section, nearest_path, schema_fields
from recipes.target_config import check_against_target, resolve_model
from recipes.yaml_text import format_yaml, parse_yaml

__all__ = ["check_against_target", "load_recipe", "resolve_model", "write_resolved"]

_KINDS: dict[Any, str] = {
    **{int: "an integer", float: "a number", str: "text", Path: "a path"},
    str | list[Source]: "text or a list of sources",
}


def load_recipe(path: Path | str, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe in `path` with `section.field=value` overrides applied in order; values are YAML.

    Raises UserError with a line for every problem found.
    """
    tree, problems = _read_tree(Path(path))
    for override in overrides:
        problems += _apply_override(tree, override)
    try:
        # by way of JSON: strict JSON takes a list for a tuple and text for a path, but not "400" for 400
        recipe = Recipe.model_validate_json(json.dumps(tree), strict=True)
    except ValidationError as error:
        problems += _describe(error.errors())
    if problems:
        raise UserError(_list_problems(path, problems))
    return recipe


def write_resolved(recipe: Recipe, directory: Path) -> None:
    """recipe.yaml (every field, defaults included) and provenance.json, in `directory`, made if missing."""
    directory.mkdir(parents=True, exist_ok=True)
    write_text(directory / "recipe.yaml", format_yaml(recipe.model_dump(mode="json")))
    write_json(directory / "provenance.json", provenance())


def _list_problems(path: Path | str, problems: list[str]) -> str:
    if len(problems) == 1:
        return f"{path}: {problems[0]}"
    return "\n  ".join([f"{path}: {len(problems)} problems", *problems])


def _read_tree(path: Path) -> tuple[dict[str, Any], list[str]]:
    try:
        tree, problems = parse_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        ours = ", ".join(sorted(str(found) for found in Path(__file__).parent.glob("*.yaml")))
        raise UserError(f"{path}: cannot read the recipe ({error.strerror}); ours are {ours}") from error
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path}: expected a recipe in UTF-8, found bytes that are not ({error.reason})"
        ) from error
    except UserError as error:
        raise UserError(f"{path}: expected YAML, found an error at {error}") from error
    if not isinstance(tree, dict):
        raise UserError(f"{path}: expected a mapping of sections, found {describe_found(tree)}")
    return tree, problems


def _apply_override(tree: dict[str, Any], override: str) -> list[str]:
    """Changes `tree` in place; returns the problems, after which `tree` is unchanged."""
    path, equals, text = override.partition("=")
    if not equals or not path.strip():
        return [f"override {override!r}: expected section.field=value"]
    try:
        value, problems = parse_yaml(text)
    except UserError as error:
        return [f"override {override!r}: expected YAML after the =, found an error at {error}"]
    *sections, name = path.strip().split(".")
    return problems + _place(tree, sections, name, value)


def _place(tree: dict[str, Any], sections: list[str], name: str, value: Any) -> list[str]:
    for depth, section in enumerate(sections):
        inner = tree.get(section, {})
        if not isinstance(inner, dict):
            path = ".".join(sections[: depth + 1])
            return [f"override {path}.{name}: {path} has no fields, found {describe_found(inner)} there"]
        tree[section] = dict(inner)  # a copy: YAML aliases share one mapping between sections
        tree = tree[section]
    tree[name] = value
    return []


def _describe(errors: Sequence[ErrorDetails]) -> Iterator[str]:
    unknown = [dotted_path(error["loc"]) for error in errors if error["type"] == "extra_forbidden"]
    nearest = {path: nearest_path(path) for path in unknown}
    for error in errors:
        path, line = dotted_path(error["loc"]), describe_problem(error)
        if path in nearest:
            yield f"{line}; the nearest valid path is {nearest[path]}"
        elif error["type"] != "missing":
            yield line
        elif path not in nearest.values():  # else the line above has already said where it went
            yield line + _describe_expected(path)


def _describe_expected(path: str) -> str:
    """What a missing field should hold; nothing for a path inside a value (the second of a pair)."""
    field = schema_fields().get(path)
    if field is None:
        return ""
    if is_section(field.annotation):
        required = [name for name, inner in field.annotation.model_fields.items() if inner.is_required()]  # type: ignore[union-attr]
        return f"; expected a section with at least {', '.join(required)}"
    meaning = f" ({' '.join(field.description.split())})" if field.description else ""
    return f"; expected {_KINDS.get(field.annotation, 'a list')}{meaning}"
