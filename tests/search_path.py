"""Where the processes that tests start find the project and each other."""

import os
from pathlib import Path


def environment() -> dict[str, str]:
    """os.environ, with tests/ and the project before whatever PYTHONPATH says."""
    inherited = os.environ.get("PYTHONPATH")
    paths = [*map(str, Path(__file__).parents[:2]), *([inherited] if inherited else [])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
