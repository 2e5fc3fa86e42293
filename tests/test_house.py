"""The house rules, read from the sources: who may import whom, and which names a module may bear."""

import ast
import importlib.util
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
ORDER = ["recipes", "serve", "data", "train", "eval"]  # each may import itself and those before it
DISTRIBUTION = "draftsmith"
SEAM = "serve/seam/"
PUBLIC_VLLM_SERVERS = ("vllm.entrypoints.openai", "vllm.entrypoints.launchers")  # 0.32 moved it


@dataclass(frozen=True)
class Import:
    """One imported name: `from a.b import c` is module a.b, name c; `import a.b` has no name."""

    file: str  # relative to the root, in POSIX form
    line: int
    module: str
    name: str | None

    @property
    def top(self) -> str:
        return self.module.split(".")[0]

    def __str__(self) -> str:
        return f"{self.file}:{self.line} imports {self.module}" + (f".{self.name}" if self.name else "")


def absolute_module(file: str, node: ast.ImportFrom) -> str:
    """The module a `from` names, its leading dots resolved against the file's package."""
    if not node.level:
        return node.module or ""
    package = Path(file).parts[:-1]
    kept = package[: len(package) - (node.level - 1)]
    return ".".join([*kept, *([node.module] if node.module else [])])


def find_imports(file: str, source: str) -> Iterator[Import]:
    """Every import of a file, those inside functions and those by a literal name included."""
    for node in ast.walk(ast.parse(source, file)):
        if isinstance(node, ast.Import):
            yield from (Import(file, node.lineno, alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = absolute_module(file, node)
            # `from . import x` at the root names modules, which no package holds
            pairs = [(module, alias.name) if module else (alias.name, None) for alias in node.names]
            yield from (Import(file, node.lineno, *pair) for pair in pairs)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in (
            "import_module",
            "__import__",
        ):
            literal = [arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant)]
            yield from (Import(file, node.lineno, str(module), None) for module in literal)


@cache
def sources() -> dict[str, str]:
    files = [path for package in ORDER for path in sorted((REPOSITORY / package).rglob("*.py"))]
    return {path.relative_to(REPOSITORY).as_posix(): path.read_text() for path in files}


@cache
def all_imports() -> tuple[Import, ...]:
    return tuple(found for file, source in sources().items() for found in find_imports(file, source))


@cache
def public_vllm_names() -> frozenset[str]:
    """What vLLM's top level declares in `__all__`, read without importing it."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    for node in ast.parse(Path(spec.origin).read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return frozenset(ast.literal_eval(node.value))
    raise AssertionError(f"no __all__ in {spec.origin}")


# The rules


def breaks_order(found: Import) -> bool:
    owner = found.file.split("/")[0]
    return found.top in ORDER and ORDER.index(found.top) > ORDER.index(owner)


def leaves_serve(found: Import) -> bool:
    return found.top == "vllm" and not found.file.startswith("serve/")


def reaches_into_vllm(found: Import) -> bool:
    if found.top != "vllm" or found.file.startswith(SEAM):
        return False
    if found.module == "vllm":
        return found.name is not None and found.name not in public_vllm_names()
    return not any(f"{found.module}.".startswith(f"{server}.") for server in PUBLIC_VLLM_SERVERS)


def attributes_of_vllm(file: str, source: str) -> Iterator[str]:
    """Internals reached as attributes, `vllm.config.x` after `import vllm`; the seam may."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "vllm":
            public = node.attr in public_vllm_names() or node.attr == "entrypoints"
            if not public and not file.startswith(SEAM):
                yield f"{file}:{node.lineno} reaches vllm.{node.attr}"


def taken_names() -> frozenset[str]:
    """Names that a module of ours would shadow, once its folder is sys.path[0] of a script."""
    imported = {found.top for found in all_imports()}
    return (
        frozenset(sys.stdlib_module_names)
        | frozenset(metadata.packages_distributions())
        | imported
        | set(ORDER)
    )


def module_names(file: str) -> list[str]:
    """The names a file gives to modules inside its package: `serve/triton_cpu/driver.py` gives two."""
    path = Path(file)
    names = [*path.parts[1:-1], path.stem]
    return [name for name in names if name not in ("__init__", "__main__")]


def is_entry_script(source: str) -> bool:
    tests = [ast.unparse(node.test) for node in ast.parse(source).body if isinstance(node, ast.If)]
    return "__name__ == '__main__'" in tests


def hold_none(breaches: Iterable[object]) -> None:
    lines = [str(breach) for breach in breaches]
    assert not lines, "\n".join(["", *lines])


def test_imports_only_go_down_the_list():
    hold_none(found for found in all_imports() if breaks_order(found))


def test_recipes_import_no_torch():
    hold_none(found for found in all_imports() if found.file.startswith("recipes/") and found.top == "torch")


def test_vllm_is_imported_only_in_serve():
    hold_none(found for found in all_imports() if leaves_serve(found))


def test_vllm_internals_are_imported_only_in_the_seam():
    hold_none(found for found in all_imports() if reaches_into_vllm(found))


def test_vllm_internals_are_reached_as_attributes_only_in_the_seam():
    hold_none(found for file, source in sources().items() for found in attributes_of_vllm(file, source))


def test_deepspeed_is_imported_only_in_train():
    deepspeed = [found for found in all_imports() if found.top == "deepspeed"]
    hold_none(found for found in deepspeed if not found.file.startswith("train/"))


def test_no_module_bears_a_name_that_is_imported_from_elsewhere():
    taken = taken_names()
    hold_none(file for file in sources() if taken.intersection(module_names(file)))


@pytest.mark.parametrize("package", ORDER)
def test_no_foreign_distribution_ships_a_package_of_ours(package):
    assert set(metadata.packages_distributions().get(package, [])) == {DISTRIBUTION}


@pytest.mark.parametrize("package", ORDER)
def test_a_package_is_imported_from_this_repository(package):
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert Path(str(spec.origin)) == REPOSITORY / package / "__init__.py"


def test_entry_scripts_compile():
    scripts = {file: source for file, source in sources().items() if is_entry_script(source)}
    assert scripts
    for file, source in scripts.items():
        compile(source, file, "exec")


# The rules themselves: each bites


def imports_of(file: str, source: str) -> list[Import]:
    return list(find_imports(file, source))


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("recipes/load.py", "import serve"),
        ("serve/run.py", "from data.shards import open_shards"),
        ("serve/deep/run.py", "def f():\n    import train.loop as loop"),
        ("data/shards.py", "from .. import eval"),
        ("data/shards.py", "from ..train import loop"),
        ("data/shards.py", "import importlib\nimportlib.import_module('eval.measure')"),
        ("train/loop.py", "if TYPE_CHECKING:\n    from eval import report"),
    ],
)
def test_an_import_up_the_list_is_found(file, source):
    assert any(breaks_order(found) for found in imports_of(file, source))


@pytest.mark.parametrize(
    "source",
    [
        "from . import shards",
        "from .shards import Shards",
        "import data.shards",
        "import serve.client",
        "import os",
    ],
)
def test_an_import_down_the_list_is_allowed(source):
    assert not any(breaks_order(found) for found in imports_of("data/regenerate.py", source))


@pytest.mark.parametrize(
    "source",
    [
        "from vllm.config import VllmConfig",
        "from vllm import envs",
        "import vllm.v1.worker",
        "from vllm.entrypoints import llm",
        "from vllm.entrypoints.openai_other import x",
    ],
)
def test_internals_of_vllm_are_found_outside_the_seam_and_allowed_in_it(source):
    assert all(reaches_into_vllm(found) for found in imports_of("serve/engine.py", source))
    assert not any(reaches_into_vllm(found) for found in imports_of(SEAM, source))


@pytest.mark.parametrize(
    "source",
    [
        "import vllm",
        "from vllm import LLM, SamplingParams",
        "from vllm.entrypoints.openai.api_server import run_server",
    ],
)
def test_the_public_side_of_vllm_is_open_to_serve_alone(source):
    assert not any(reaches_into_vllm(found) for found in imports_of("serve/engine.py", source))
    assert all(leaves_serve(found) for found in imports_of("data/capture.py", source))


def test_internals_of_vllm_reached_as_attributes_are_found():
    source = "import vllm\nvllm.LLM\nvllm.envs.X\nvllm.entrypoints.openai"
    assert list(attributes_of_vllm("serve/engine.py", source)) == ["serve/engine.py:3 reaches vllm.envs"]
    assert not list(attributes_of_vllm(SEAM, source))


@pytest.mark.parametrize(
    "file", ["data/random.py", "eval/datasets.py", "train/data.py", "serve/yaml/load.py"]
)
def test_a_shadowing_name_is_found(file):
    assert taken_names().intersection(module_names(file))


@pytest.mark.parametrize(
    "file", ["data/shards.py", "recipes/__init__.py", "eval/report.py", "serve/triton_cpu/driver.py"]
)
def test_an_ordinary_name_is_free(file):
    assert not taken_names().intersection(module_names(file))
