"""The compiler half: present because Triton asks for one, never used."""

from triton.backends.compiler import BaseBackend, GPUTarget

_INTERPRETED = "the interpreted cpu backend compiles nothing; set TRITON_INTERPRET=1 before importing triton"


class InterpretedCpuBackend(BaseBackend):
    """Refuses to compile: kernels run in Triton's interpreter."""

    @staticmethod
    def supports_target(target: GPUTarget) -> bool:
        return target.backend == "cpu"

    def hash(self) -> str:
        return "interpreted-cpu"

    def parse_options(self, options: dict) -> object:
        raise NotImplementedError(_INTERPRETED)

    def add_stages(self, stages: dict, options: object, language: object) -> None:
        raise NotImplementedError(_INTERPRETED)

    def load_dialects(self, context: object) -> None:
        raise NotImplementedError(_INTERPRETED)

    def get_module_map(self) -> dict:
        raise NotImplementedError(_INTERPRETED)
