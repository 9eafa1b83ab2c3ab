# All a newcomer needs. `make demo` and `make test` set up everything in .venv first; `make help` lists the rest.
#
# PYTHON chooses the interpreter of a new .venv (3.10 or later). The stamps in .venv say what is up to date:
# requirements are installed again when their file changes, the extension is built again when csrc/ or setup.py
# change, or when PYCOMM_CUDA or PYCOMM_CUDA_ARCH ask for another one (ninja compiles only what is affected).

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin
# Tiers, budgets and workers: tests/README.md. One worker more than CI has cores, as many tests wait.
WORKERS := 3
PYTEST := $(RUN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --durations 30
SOURCES := setup.py pyproject.toml pycomm/__init__.py $(shell find csrc -type f 2>/dev/null)
PYTHON_CODE := setup.py $(wildcard pycomm parallel benchmarks examples tests docs/site)
CPP_CODE = $(shell find csrc tests -name '*.h' -o -name '*.cc' -o -name '*.inc' -o -name '*.cu' -o -name '*.cuh')

export PATH := $(CURDIR)/$(RUN):$(PATH)
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo test test-slow test-deep test-faults test-torch test-torch-files test-models test-frameworks test-triton bench lint format gpu-check wheel docs build build-kernels clean help
.DEFAULT_GOAL := help

demo: build                  ## bandwidth table beside Gloo, then a small GPT trained on two ranks; plots in demo/
	$(RUN)/python examples/demo.py

test: build                  ## the quick tests; BASE=REV: all cases of the test files that the change since REV touches
	$(PYTEST) -m "not slow and not torch_suite" $(if $(BASE),--base "$(BASE)")

test-slow: build-kernels     ## the slow tests: more cases of each, more kernels ahead of time, planted faults, stress, random programs
	$(PYTEST) -m slow --timeout 1800

test-deep: build-kernels     ## the slow and the deep tests: every kernel, placement and seed; before a release
	$(RUN)/python -m pip install --quiet ziglang==0.15.1
	$(PYTEST) -m slow --deep --timeout 3600

# coverage records once which tests reach which lines; what it knows lies in build/planted/reach.
test-faults: build           ## plants faults and sees whether a quick test fails; FAULTS=parts of names or files, ONLY=new|missed, LIMIT=seconds each
	$(RUN)/python -m pip install --quiet coverage==7.17.5
	[ -e build/planted/reach ] || $(RUN)/python tests/planted record
	[ -e build/planted/native ] || $(RUN)/python tests/planted record --native
	$(RUN)/python tests/planted run $(FAULTS) $(if $(ONLY),--$(ONLY)) $(if $(LIMIT),--limit $(LIMIT))

test-torch: build            ## PyTorch's own suite for distributed backends, whole
	$(RUN)/python -m pytest tests/test_torch_suite.py

# The files are not in the wheel: a checkout of PyTorch at the tag of the torch in .venv has them.
test-torch-files: build      ## PyTorch's test files for distributed on Gloo and pycomm; PYTORCH=a checkout, FILES=parts of names
	$(RUN)/python -m pip install --quiet expecttest
	$(RUN)/python tests/torch_suite/files.py "$(PYTORCH)" $(FILES)

test-frameworks: build       ## Accelerate, Lightning and DeepSpeed on pycomm; installs requirements-frameworks.txt first
	DS_BUILD_OPS=0 $(RUN)/python -m pip install --quiet --no-build-isolation -r requirements-frameworks.txt
	$(RUN)/python -m pytest -m frameworks

test-models: build build/vision/.stamp  ## 39 families of models under 20 plans against one process; writes docs/models.md
	PYTHONPATH=$(CURDIR)/build/vision OMP_NUM_THREADS=1 $(RUN)/python tests/model_families/table.py

build/vision/.stamp: | $(VENV)/.stamp-deps
	$(RUN)/python -m pip install --quiet --upgrade --no-deps --target $(@D) torchvision==0.28.0 timm==1.0.31
	@touch $@

# Each version in a folder of its own, found before the one in .venv. 3.6 needs a numpy older than 2.4.
TRITONS := 3.6.0 3.8.0 3.9.0
test-triton: build $(TRITONS:%=build/triton-%/.stamp)  ## the fused kernels under other versions of Triton: interpreter, compilation, rules
	set -e; for version in $(TRITONS); do echo "Triton $$version"; \
	PYTHONPATH=$(CURDIR)/build/triton-$$version $(RUN)/python -m pytest -m "not slow" --timeout 1800 \
	tests/fused/test_ptx_check.py tests/fused/test_aot.py tests/fused/test_kernels.py; done

build/triton-%/.stamp: | $(VENV)/.stamp-deps
	$(RUN)/python -m pip install --quiet --upgrade --no-deps --target $(@D) triton==$* $(if $(filter 3.6.%,$*),'numpy<2.4')
	@touch $@

bench: build                 ## all_reduce beside Gloo on two ranks; more with `python -m pycomm.benchmarks --help`
	$(RUN)/python -m pycomm.benchmarks all_reduce --ranks 2 --backends pycomm,gloo

lint: $(VENV)/.stamp-deps    ## ruff, clang-format, types and the rules of layering and style
	$(RUN)/ruff check $(PYTHON_CODE)
	$(RUN)/ruff format --check $(PYTHON_CODE)
	@echo clang-format --dry-run; $(RUN)/clang-format --dry-run -Werror $(CPP_CODE)
	$(RUN)/mypy
	$(RUN)/python -m pytest -q tests/test_layering.py tests/test_style.py

format: $(VENV)/.stamp-deps  ## rewrites the sources as lint wants them
	$(RUN)/ruff check --fix $(PYTHON_CODE)
	$(RUN)/ruff format $(PYTHON_CODE)
	@echo clang-format -i; $(RUN)/clang-format -i $(CPP_CODE)

# With the packages that PYTHON has: its torch must see the GPU, and the extension is built for it, so nothing
# is installed.
gpu-check:                   ## builds for this machine's GPU, checks and measures, writes benchmarks/results/; PART=bench|values|fused|faults
	$(PYTHON) tests/gpu $(if $(PART),--part $(PART))

# Without build isolation: the extension is built for the torch in .venv, and fits that minor version only.
DIST := dist
wheel: build                 ## a wheel and a source distribution in dist/, for the torch version in .venv
	rm -rf build/lib.* build/bdist.*  # setuptools would also take what is left there of files that are gone
	$(RUN)/python -c "import setuptools.build_meta as b; b.build_sdist('$(DIST)')"
	$(RUN)/python -m pip wheel --quiet --no-build-isolation --no-deps --wheel-dir $(DIST) .

docs: build                  ## the documentation site in build/site; installs requirements-docs.txt first
	$(RUN)/python -m pip install --quiet -r requirements-docs.txt
	NO_MKDOCS_2_WARNING=1 $(RUN)/python -m mkdocs build --quiet --strict

build: $(VENV)/.stamp-installed  ## .venv and the extension

# With the kernels for CUDA tensors where nvcc is there: the torch of the tests is built without CUDA, so that
# `build` leaves them out.
NVCC := $(firstword $(shell command -v nvcc) $(wildcard /usr/local/cuda/bin/nvcc))
build-kernels:
	@$(MAKE) --no-print-directory build $(if $(PYCOMM_CUDA),,$(if $(NVCC),PYCOMM_CUDA=1))

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "pycomm needs Python 3.10 or later: make PYTHON=..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.stamp-deps: requirements-test.txt | $(VENV)/bin/python
	@echo "Installing the packages of requirements-test.txt in $(VENV): some minutes."
	$(RUN)/python -m pip install --quiet -r requirements-test.txt
	@touch $@

# What the extension was built for, where it was asked for; asking for something else builds it again.
ASKED := $(subst $() ,-,$(strip $(PYCOMM_CUDA) $(PYCOMM_CUDA_ARCH)))
HAVE := $(shell cat $(VENV)/.stamp-build 2>/dev/null)

$(VENV)/.stamp-build: $(VENV)/.stamp-deps $(SOURCES) $(if $(ASKED),$(if $(filter $(ASKED),$(HAVE)),,FORCE))
	$(RUN)/python setup.py -q build_ext --inplace
	@echo "$(ASKED)" > $@

$(VENV)/.stamp-installed: setup.py pyproject.toml pycomm/__init__.py | $(VENV)/.stamp-build
	$(RUN)/python -m pip install --quiet --no-build-isolation --no-deps -e .
	@touch $@

FORCE:

clean:                       ## removes what was built, not .venv
	rm -rf build demo dist pycomm/_C*.so pycomm/_build_info.py *.egg-info $(VENV)/.stamp-build $(VENV)/.stamp-installed

help:
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## /\1|/' | awk -F'|' '{printf "make %-11s %s\n", $$1, $$2}'
