# Variables, on the command line or from the environment:
#   PYTHON          interpreter for a new environment; otherwise the first of CANDIDATES that runs and is new enough
#   VENV            folder of the environment
#   CONSTRAINTS     file of the exact versions that are installed; empty for the newest that pyproject.toml allows
#   JAX_VERSION     an exact jax for a new environment, e.g. 0.11.2; otherwise that of CONSTRAINTS
#   DEVICELESS_JAX  the jax that steps are compiled with for chips that are not here
#   PYTEST_ARGS     more arguments for pytest, e.g. PYTEST_ARGS="-k pages"
#   MUTANTS         which faults `make mutants` tries, by name or area; all without
#   RUNS            how often `make test-repeat` runs the tests
#   JAXSERVE_TEST_CACHE  folder of the tests' compiled steps; otherwise one below ~/.cache/jaxserve/tests
#   JOBS            processes that run the tests: 8 at most, by default three for two cores
VENV       ?= .venv
CANDIDATES := python3.12 python3.13 python3
OLDEST_JAX := 0.11.2
DEVICELESS_JAX ?= $(OLDEST_JAX)
# A third of their time tests wait: for processes that they start, for timers, for peers.
JOBS           ?= $(shell expr $$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN) \* 3 / 2)
CONSTRAINTS    ?= constraints.txt
RUNS           ?= 2
DEVICELESS := .venv-deviceless-$(DEVICELESS_JAX)
LM_EVAL    := .venv-lm-eval
CLUSTER    := .venv-cluster
AGENTS     := .venv-agents

# What an older jax may do otherwise: compile, shard, sample, lower kernels, read its cache, load.
DIFFERS_BY_JAX := $(addprefix tests/,sharding pallas_kernels jaxserve/engine/device \
  jaxserve/engine/test_engine_oracle.py jaxserve/engine/test_families_on_meshes.py \
  jaxserve/engine/test_speculation.py jaxserve/models/test_decoder_golden.py \
  jaxserve/cpu_kernels jaxserve/models/test_summed_last.py \
  jaxserve/cli jaxserve/test_generate.py jaxserve/loading/test_convert.py)
PACKAGES := jaxserve sharding pallas_kernels checkpoints
PROTOS   := jaxserve/v1/*.proto jaxserve/cluster/v1/*.proto
# Tests of a file in one process. One that crashes ends the run: pytest-xdist 3.8 would wait for ever for the process it
# starts instead (pytest-xdist#1327).
# Files in their order, not by their number of tests: those that take long come early.
SPREAD   := -n $(JOBS) --maxprocesses 8 --dist loadfile --no-loadscope-reorder --max-worker-restart 0
SLOWEST  := --durations 40 --durations-min 1
PIN      := $(if $(JAX_VERSION),jax==$(JAX_VERSION) jaxlib==$(JAX_VERSION))
RUN      := $(VENV)/bin/python -m
# A uv on the PATH installs, if it runs (a pyenv shim may refuse to); otherwise one in the environment.
UV       := $(or $(shell uv --version >/dev/null 2>&1 && echo uv),$(VENV)/bin/uv)
CREATE    = $(if $(filter uv,$(UV)),uv venv --quiet --seed --python "$$python","$$python" -m venv) $(VENV)
# Another jax has other companions.
PINS     := $(if $(JAX_VERSION),/^\(jax\|jaxlib\|jax-cuda[^=]*\|libtpu\)==/d)
INSTALL   = sed '$(PINS)' $(or $(CONSTRAINTS),/dev/null) >$(VENV)/constraints.txt && \
  $(if $(PIN),printf '%s\n' $(PIN) >>$(VENV)/constraints.txt &&) \
  $(UV) pip install --quiet --python $(VENV)/bin/python --constraints $(VENV)/constraints.txt \
    --build-constraints $(VENV)/constraints.txt --editable

# Every process that a test starts would compile each module again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test test-repeat mutants test-slow test-lm-eval test-agents test-oldest test-kernels test-cluster support-matrix feature-pairs deviceless deviceless-full soak check protos completions wheel lock fmt clean links

help: ## list these targets
	@sed -n 's/^\([a-z-]*\):.*## /\1|/p' Makefile | while IFS='|' read -r name text; do \
	  printf 'make %-16s %s\n' "$$name" "$$text"; done

demo: $(VENV)/.runtime ## a sum and a story from the bundled model
	$(RUN) jaxserve.generate --chat --temperature 0.5 --seed 3 --max-tokens 300 \
	  --prompt "What is 7 plus 5?" --prompt "Tell me a story about a fox."

test: $(VENV)/.dev ## run the tests
	$(RUN) pytest -q $(SPREAD) $(SLOWEST) $(PYTEST_ARGS)

test-repeat: $(VENV)/.dev ## run the tests RUNS times in random order, every second time on a busy machine
	$(RUN) tests.repeat --runs $(RUNS) -- $(SPREAD) $(PYTEST_ARGS)

mutants: $(VENV)/.dev ## put faults into the sources, one after the other: the tests have to notice
	$(RUN) tests.mutants $(MUTANTS)

test-slow: $(VENV)/.dev ## more cases of what they show with some: an hour and a half
	$(RUN) pytest -q $(SPREAD) -m "slow and not random_kernels and not matrix and not deviceless" $(PYTEST_ARGS)

test-lm-eval: $(VENV)/.dev $(LM_EVAL)/.installed ## lm_eval through a server and through transformers, in an environment of its own
	$(RUN) pytest -q tests/jaxserve/server/test_lm_eval.py -m "" --lm-eval $(LM_EVAL)/bin/lm_eval $(PYTEST_ARGS)

test-agents: $(VENV)/.dev $(AGENTS)/.installed ## Codex, Claude Code and opencode at work, unmodified, told to by a scripted model
	JAXSERVE_AGENTS=$(abspath $(AGENTS)) $(RUN) pytest -q tests/jaxserve/server/http/agents/test_agents.py $(PYTEST_ARGS)

test-oldest: ## run the tests of what may differ on the oldest jax, in an environment of its own
	@$(MAKE) --no-print-directory test VENV=.venv-oldest JAX_VERSION=$(OLDEST_JAX) \
	  PYTEST_ARGS="$(DIFFERS_BY_JAX) $(PYTEST_ARGS)"

test-kernels: $(VENV)/.dev ## kernels in their interpreters on many random cases: an hour
	$(RUN) pytest -q tests/pallas_kernels -m kernels $(PYTEST_ARGS)

test-cluster: ## jaxserve.ray on a Ray cluster of simulated nodes, and its types, in an environment of its own
	@$(MAKE) --no-print-directory $(CLUSTER)/.cluster VENV=$(CLUSTER)
	$(CLUSTER)/bin/python -m pyright --pythonpath $(CLUSTER)/bin/python jaxserve/ray examples/ray_*.py benchmarks/ray_data.py
	RAY_AUTH_MODE=disabled $(CLUSTER)/bin/python -m pytest -q -W default -m cluster tests/cluster $(PYTEST_ARGS)

support-matrix: $(VENV)/.dev ## every family on every mesh; writes the table in docs/support.md
	$(RUN) pytest -q tests/jaxserve/engine/test_families_on_meshes.py -m "" --support-matrix docs/support.md $(PYTEST_ARGS)

feature-pairs: $(VENV)/.dev ## every two features together; writes the table in docs/features.md
	$(RUN) pytest -q tests/jaxserve/engine/test_feature_pairs.py -m "" --feature-pairs docs/features.md $(PYTEST_ARGS)

deviceless: ## compile small steps for TPUs and an H200 that are not here, in an environment of its own
	@$(MAKE) --no-print-directory $(DEVICELESS)/.compilers VENV=$(DEVICELESS) JAX_VERSION=$(DEVICELESS_JAX)
	$(DEVICELESS)/bin/python -m pytest -q -n 2 tests/deviceless -m "" $(PYTEST_ARGS)

deviceless-full: ## the same for whole published models: hours; writes benchmarks/results/deviceless.md
	@$(MAKE) --no-print-directory $(DEVICELESS)/.compilers VENV=$(DEVICELESS) JAX_VERSION=$(DEVICELESS_JAX)
	$(DEVICELESS)/bin/python -m benchmarks.deviceless --out benchmarks/results/deviceless.json

soak: $(VENV)/.dev ## half an hour of mixed traffic against two servers: nothing may grow, no answer may change
	$(RUN) benchmarks.soak

check: $(VENV)/.dev ## check style, format and types
	$(RUN) ruff check
	$(RUN) ruff format --check
	$(VENV)/bin/buf lint
	$(VENV)/bin/buf breaking --against tests/golden/jaxserve_v1.binpb
	$(RUN) pyright --pythonpath $(VENV)/bin/python

protos: $(VENV)/.dev ## generate *_pb2* and docs/api.md from the .proto files
	$(RUN) grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. $(PROTOS)
	rm jaxserve/v1/common_pb2_grpc.py # has no service
	$(VENV)/bin/python docs/make_api.py

completions: $(VENV)/.dev ## write deploy/completions, by which shells complete the flags
	$(VENV)/bin/python deploy/completions/make.py

wheel: $(VENV)/.runtime ## build the wheel and the source distribution, in dist/
	rm -rf dist && $(UV) build --quiet --python $(VENV)/bin/python --out-dir dist

lock: $(VENV)/.runtime ## write constraints.txt: the newest versions that pyproject.toml allows
	echo hatchling | $(UV) pip compile --quiet --universal --upgrade --python-version 3.12 --extra dev --extra compilers --extra ray \
	  --no-annotate --custom-compile-command "make lock" --output-file constraints.txt pyproject.toml -

fmt: $(VENV)/.dev ## fix what can be fixed, and format
	$(RUN) ruff check --fix
	$(RUN) ruff format

clean: ## remove caches and build output (not the environments: remove .venv* by hand)
	rm -rf build dist .pytest_cache .hypothesis .ruff_cache benchmarks/tmp
	find $(wildcard $(PACKAGES) training tests benchmarks) -name __pycache__ -prune -exec rm -rf {} +

# An editable installation compiles these.
KERNELS := hatch_build.py $(wildcard jaxserve/cpu_kernels/*.cc jaxserve/cpu_kernels/*.h)

# Stamps: an environment is brought up to date whenever pyproject.toml, the constraints or the kernels are newer.
$(VENV)/.runtime: pyproject.toml $(CONSTRAINTS) $(KERNELS) | links $(VENV)/bin/python $(filter-out uv,$(UV))
	$(INSTALL) . $(PIN)
	@touch $@

$(VENV)/.dev: pyproject.toml $(CONSTRAINTS) $(KERNELS) | links $(VENV)/bin/python $(filter-out uv,$(UV))
	$(INSTALL) '.[dev]' $(PIN)
	@touch $(VENV)/.runtime $@

$(VENV)/.compilers: $(VENV)/.dev
	$(INSTALL) '.[compilers]' $(PIN)
	@touch $@

$(VENV)/.cluster: $(VENV)/.dev
	$(INSTALL) '.[dev,ray]' $(PIN)
	@touch $@

$(LM_EVAL)/.installed: tests/jaxserve/server/lm_eval/requirements.txt
	@$(MAKE) --no-print-directory $(LM_EVAL)/bin/python VENV=$(LM_EVAL)
	$(LM_EVAL)/bin/python -m pip install --quiet --disable-pip-version-check --requirement $<
	@touch $@

$(AGENTS)/.installed: Makefile
	npm install --no-audit --no-fund --prefix $(AGENTS) @openai/codex@0.171.0 @anthropic-ai/claude-code@2.1.332 opencode-ai@1.18.33
	cd $(AGENTS)/node_modules/@anthropic-ai/claude-code && node install.cjs
	@touch $@

$(VENV)/bin/uv: | $(VENV)/bin/python
	$(RUN) pip install --quiet --disable-pip-version-check uv

links:
	@test -d jaxserve/sharding || { echo "jaxserve/sharding is no link to a folder: clone with git config core.symlinks \
	true, or unpack with a program that keeps links" >&2; exit 1; }

# A name on PATH proves nothing (a pyenv shim may refuse to run): every candidate is asked for its version.
$(VENV)/bin/python:
	@for python in $(or $(PYTHON),$(CANDIDATES)); do \
	  if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; then \
	    echo "creating $(VENV) with $$python"; exec $(CREATE); \
	  fi; \
	done; \
	echo "No Python >= 3.12 among: $(or $(PYTHON),$(CANDIDATES)). Get one, then run make again:" >&2; \
	echo "  uv python install 3.12 | pyenv install 3.12 | apt install python3.12-venv | brew install python@3.12" >&2; \
	echo "or name one: make PYTHON=/path/to/python3.12 ..." >&2; \
	exit 1
