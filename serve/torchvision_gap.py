"""Lets a torchvision built for CUDA import beside a CPU build of torch.

PyPI's torchvision cannot load its extension there, and its import then fails on two operators that the
extension would have declared ("operator torchvision::nms does not exist").  vLLM's Qwen3.5 module and
peft import torchvision without calling those operators, so declaring their schemas is enough.

`python -m serve.torchvision_gap` writes a `.pth` line into the environment, so that every process of it,
children included, closes the gap on torchvision's first import.  Where the extension loads, nothing happens.
"""

import importlib.util
import sys
import sysconfig
from importlib.abc import MetaPathFinder
from pathlib import Path

PTH_NAME = "draftsmith_torchvision_gap.pth"
_SCHEMAS = ("nms", "qnms")


def _extension_loads() -> bool:
    import torch  # noqa: PLC0415 - this module is imported at every start of Python, torch costs a second

    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return True
    for library in Path(spec.origin).parent.glob("_C*.so"):
        try:
            torch.ops.load_library(str(library))
        except OSError:
            return False
    return True


def _declare_operators() -> None:
    import torch  # noqa: PLC0415 - as above

    library = torch.library.Library("torchvision", "DEF")
    for name in _SCHEMAS:
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    sys.modules[__name__].__dict__["_library"] = library  # the schemas live as long as this object


class TorchvisionGap(MetaPathFinder):
    """Runs once, just before torchvision is first imported, and finds nothing itself."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname != "torchvision":
            return None
        sys.meta_path.remove(self)
        if not _extension_loads():
            _declare_operators()
        return None


def watch() -> None:
    """Arm the finder; called by the `.pth` line, which `site` may read more than once in one start."""
    if not any(isinstance(finder, TorchvisionGap) for finder in sys.meta_path):
        sys.meta_path.insert(0, TorchvisionGap())


def main() -> None:
    path = Path(sysconfig.get_paths()["purelib"]) / PTH_NAME
    # find_spec first: the line must stay silent in an environment that draftsmith has left
    path.write_text(
        "import importlib.util as u; u.find_spec('serve') and u.find_spec('serve.torchvision_gap')"
        " and __import__('serve.torchvision_gap', fromlist=['watch']).watch()\n"
    )
    print(f"wrote {path.name}: torchvision imports beside a CPU build of torch")


if __name__ == "__main__":
    main()
