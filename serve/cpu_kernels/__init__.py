"""Stand-ins for the Triton kernels that cost most in Triton's interpreter; on a CPU only.

The interpreter runs a kernel's program instances one by one in Python: a decode step of 64 requests spent
4.5 s there.  A stand-in does a whole grid in a few NumPy calls, with the kernel's results bit for bit.
"""

from serve.cpu_kernels import batch, drafting, looking_up, sampling, selecting
from serve.cpu_kernels.launch import install

STAND_INS = [
    *batch.STAND_INS,
    *sampling.STAND_INS,
    *drafting.STAND_INS,
    *selecting.STAND_INS,
    *looking_up.STAND_INS,
]


def install_cpu_kernels() -> None:
    """Idempotent. After the import of vLLM's CPU worker only: it patches what the kernels' modules import."""
    install(STAND_INS)
