"""What pydantic found wrong, in one line each: the dotted path, what is expected, what was found."""

from pydantic_core import ErrorDetails

_LONGEST_FOUND = 80  # characters of a wrong value that a message repeats
_WORDING = (
    ("Input should be greater", "expected a number greater"),
    ("Input should be less", "expected a number less"),
    ("Input should be", "expected"),
    ("an object", "a mapping"),
)


def dotted_path(location: tuple[int | str, ...]) -> str:
    """`("drafter", "layer_types", 0)` -> `drafter.layer_types[0]`"""
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in location]
    return "".join(parts).removeprefix(".")


def describe_found(value: object) -> str:
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= _LONGEST_FOUND else text[: _LONGEST_FOUND - 3] + "..."


def describe_problem(details: ErrorDetails) -> str:
    """One line for one pydantic error."""
    path = dotted_path(details["loc"])
    if details["type"] == "value_error":  # our own validators say what was found
        return f"{path}: {details['ctx']['error']}" if path else str(details["ctx"]["error"])
    if details["type"] == "missing":
        return f"{path}: missing"
    if details["type"] == "extra_forbidden":
        return f"{path}: unknown key, found {describe_found(details['input'])}"
    expected = details["msg"]
    for theirs, ours in _WORDING:
        expected = expected.replace(theirs, ours)
    return f"{path}: {expected}, found {describe_found(details['input'])}"
