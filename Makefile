# make demo and make test are each enough by themselves on a fresh Linux machine with Python 3.10 or newer,
# a C++ compiler and make. Everything they install goes into .venv, everything they build into the checkout.
#
# VENV= (empty) installs nothing and takes PYTHON's own packages, torch included:
#   make gpu-report PYTHON=python3 VENV=

SHELL := bash
.SHELLFLAGS := -eo pipefail -c

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
NVCC ?= nvcc
BENCH ?= benchmarks/host.py

ifeq ($(strip $(VENV)),)
PY := $(PYTHON)
STAMPS := build/stamps
else
PY := $(VENV)/bin/python
STAMPS := $(VENV)/stamps
endif

SOURCES := setup.py $(wildcard csrc/*.* csrc/*/*.*)
CLANG_FORMAT_FILES := $(filter %.h %.cpp %.cu %.cuh,$(SOURCES))
# Of a compiler's line, the number and the source.
BRIEF := sed -u -E 's/^(\[[0-9]+\/[0-9]+\]) .* -c (\S+) -o .*/\1 \2/'

KERNELS := $(wildcard csrc/cuda/*.cu)
KERNEL_ARCHS := 80 90a
KERNEL_OBJECTS := $(foreach arch,$(KERNEL_ARCHS),$(KERNELS:csrc/cuda/%.cu=build/kernels/sm_$(arch)/%.o))

.PHONY: help demo test lint kernels kernel-objects bench gpu-report clean
.DELETE_ON_ERROR:

help:
	@echo 'make demo        four questions to a small real model, through two slots; the model, 270 MB in'
	@echo '                 ~/.cache/minivllm ($$MINIVLLM_CACHE, where that is set), is made once'
	@echo 'make test        the tests'
	@echo 'make lint        ruff, mypy, clang-format'
	@echo 'make kernels     each CUDA file by nvcc alone, warnings as errors'
	@echo 'make bench       a benchmark: BENCH=benchmarks/host.py (the default) or another, BENCH_ARGS='
	@echo 'make gpu-report  on a machine with a card: the GPU tests, written down in tests/gpu_report.json'
	@echo 'make clean       everything that was built or installed here; the demo model stays'

# Threads that wait by spinning crawl where there are more of them than free cores.
demo test: export OMP_WAIT_POLICY ?= passive
demo: $(STAMPS)/installed
	$(PY) examples/demo_model.py
	$(PY) examples/quickstart.py

test: $(STAMPS)/dev
	$(PY) -m pytest $(PYTEST_ARGS)

lint: $(STAMPS)/dev
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(dir $(PY))clang-format --dry-run -Werror $(CLANG_FORMAT_FILES)

bench: $(STAMPS)/installed
	$(PY) $(BENCH) $(BENCH_ARGS)

# The card's machine may reach no registry: this takes the torch, pytest and transformers of PYTHON.
gpu-report:
	MINIVLLM_CUDA=1 $(PYTHON) setup.py -q build_ext --inplace
	$(PYTHON) tests/gpu_report.py

kernels:
	@if command -v $(NVCC) >/dev/null; then \
	  $(MAKE) --no-print-directory -j2 --output-sync kernel-objects && \
	  echo 'kernels: $(words $(KERNELS)) files compile for $(KERNEL_ARCHS:%=sm_%) without a warning'; \
	else echo 'kernels: skipped, there is no $(NVCC) here'; fi

kernel-objects: $(KERNEL_OBJECTS)

define kernel_rule
build/kernels/sm_$(1)/%.o: csrc/cuda/%.cu $(filter %.h %.cuh %.inc,$(SOURCES))
	@mkdir -p $$(@D)
	$(NVCC) -Werror all-warnings -O3 -std=c++17 -gencode arch=compute_$(1),code=sm_$(1) -c $$< -o $$@
endef
$(foreach arch,$(KERNEL_ARCHS),$(eval $(call kernel_rule,$(arch))))

# torch first and by itself: the extension is compiled against it.
$(VENV)/stamps/torch:
	@$(PYTHON) -c 'import sys; sys.exit("minivllm needs Python 3.10 or newer; this is " + sys.version.split()[0] \
	  + " (make PYTHON=...)" if sys.version_info < (3, 10) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install $(TORCH) numpy 'setuptools>=77' wheel ninja
	@mkdir -p $(@D) && touch $@

ifeq ($(strip $(VENV)),)
$(STAMPS)/built: $(SOURCES)
	$(PY) setup.py -q build_ext --inplace | $(BRIEF)
	@mkdir -p $(@D) && touch $@

$(STAMPS)/installed $(STAMPS)/dev: $(STAMPS)/built
	@touch $@
else
$(STAMPS)/built: $(SOURCES) $(STAMPS)/torch
	$(PY) setup.py -q build_ext --inplace | $(BRIEF)
	@touch $@

# --no-build-isolation: the objects that were just built serve again.
$(STAMPS)/packages: pyproject.toml $(STAMPS)/built
	$(PY) -m pip install -qq --no-build-isolation -e '.[gguf]'
	@touch $@

$(STAMPS)/dev-packages: pyproject.toml $(STAMPS)/built
	$(PY) -m pip install -qq --no-build-isolation -e '.[dev]'
	@touch $@ $(STAMPS)/packages

$(STAMPS)/installed: $(STAMPS)/built $(STAMPS)/packages
	@touch $@

$(STAMPS)/dev: $(STAMPS)/built $(STAMPS)/dev-packages
	@touch $@
endif

clean:
	rm -rf build dist minivllm/*.so minivllm/_build_info.py minivllm.egg-info $(VENV)
