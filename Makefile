# Kronoscope. `make` or `make help` lists what there is; `make demo` and `make test` set up everything themselves.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

VENV := .venv
BIN := $(VENV)/bin
PY := $(BIN)/python
STAMP := $(VENV)/.installed
ARCHITECTURES := .architectures
TOOLS := .supply-tools
LOCKS := ops/locks
# compiled modules are kept, whatever the environment says: a run starts hundreds of processes
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(PY) -m pytest
# the first interpreter that is new enough; `make demo PYTHON=/path/to/python3.12` overrides
PYTHON ?= $(shell for p in python3.11 python3 python3.12 python3.13 python; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null && { command -v $$p; break; }; done)

.PHONY: help demo test test-gpu bench-gpu laws mutants check check-format check-lints check-types check-imports check-docstrings format bench picture site wheel soak architectures architectures-list peers schemathesis test-clients test-consumers test-nightly test-docker test-slurm lock audit sbom pin-images env clean

help: ## this list
	@echo "Kronoscope measures the curvature of trained networks, layer by layer."
	@echo
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile

# --- the environment: made once, mended only when its two inputs changed -------------------------------------------

$(STAMP): pyproject.toml constraints.txt
	@[ -n "$(PYTHON)" ] || { echo "No Python 3.11 to 3.13 was found. Install one, or name it: make demo PYTHON=/path/to/python3" >&2; exit 2; }
	@if ! $(PYTHON) -c 'import ensurepip, venv' 2>/dev/null; then \
		if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
			echo "==> $(PYTHON) cannot make environments yet: installing python3-venv"; \
			apt-get update -qq; DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends python3-venv >/dev/null; \
		else \
			echo "$(PYTHON) lacks its venv module. As root: apt-get install python3-venv" >&2; exit 2; \
		fi; \
	fi
	@[ -x $(PY) ] || { echo "==> Making $(VENV) with $(PYTHON)"; $(PYTHON) -m venv $(VENV); }
	@echo "==> Installing the dependencies pinned in constraints.txt into $(VENV) (about 2 minutes the first time)"
	@$(PY) -m pip install $(if $(MAKE_TERMOUT),,--quiet) --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

# --- the two commands of the README --------------------------------------------------------------------------------

demo: $(STAMP) ## start the service, run a job on a small CNN through it, show its layers (ONCE=1 ends there)
	@$(PY) -P examples/demo.py $(if $(filter-out 0,$(ONCE)),--once)

test: $(STAMP) ## every check and every test that needs neither a GPU, Docker nor Slurm; installs PostgreSQL, Redis, Chromium (RECORD=1 holds it to its minutes)
	@echo "==> Servers that the tests need"
	@$(PY) -m tests.servers install
	@$(MAKE) browser
	@$(MAKE) check
	@echo "==> Tests"
	@$(PYTEST) -m "not gpu and not docker and not slurm" --numprocesses=$(or $(PROCESSES),4) --dist=loadfile --no-loadscope-reorder --times=.suite.json $(if $(PART),--part=$(PART)) $(if $(RECORD),--times=benchmarks/results/suite.json --bound-minutes=12)

test-nightly: $(STAMP) ## the same with every test that a landing leaves out
	@$(MAKE) test PART=all

test-gpu: $(STAMP) ## the tests marked gpu (4 minutes; ops/gpu.py runs them on a machine that has no environment)
	@$(PY) ops/gpu.py test

bench-gpu: $(STAMP) ## benchmarks/device.py, section by section (6 minutes)
	@$(PY) ops/gpu.py bench

laws: $(STAMP) ## list what the tests hold: the cases of each law and fault kind in a landing, and in a nightly run
	@$(PY) -m ops.list_laws $(if $(PART),--part=$(PART))

mutants: $(STAMP) ## change ten formulas of the engine, drawn by a seed, and see a landing's tests of their rooms fail (15 minutes)
	@$(PY) -m ops.mutate_formulas

check: $(STAMP) ## formatting, lints, types, import contracts, two at a time
	@$(MAKE) --jobs=2 --output-sync=target check-types check-format check-lints check-imports check-docstrings

check-format:
	@echo "==> ruff format";  $(BIN)/ruff format --check --quiet .

check-lints:
	@echo "==> ruff check";   $(BIN)/ruff check --quiet .

check-types:
	@echo "==> mypy";         $(BIN)/mypy

check-imports:
	@echo "==> lint-imports"; $(BIN)/lint-imports --no-logo

check-docstrings:
	@echo "==> docstrings";   $(PY) ops/measure_source.py --check

format: $(STAMP) ## rewrite the formatting, apply the lints' safe mends
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

bench: $(STAMP) ## run benchmarks/*.py and the conformance table; each writes benchmarks/results/<name>.json
	@mkdir -p benchmarks/results
	@for script in benchmarks/*.py; do \
		[ -e "$$script" ] || { echo "There is no benchmark yet."; break; }; \
		grep -q '__main__' "$$script" || continue; \
		echo "==> $$script"; OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} PYTHONPATH=$(CURDIR)/$(ARCHITECTURES) $(PY) -P -m "benchmarks.$$(basename "$$script" .py)"; \
	done
	@echo "==> benchmarks/conformance"; $(PY) -P -m benchmarks.conformance

picture: $(STAMP) browser ## take the README's picture from the page of a job that has run
	@$(PY) -P examples/demo.py --picture docs/images/job.png

site: $(STAMP) ## build the documentation as a site in .site, strict about links
	@$(PY) -m mkdocs build -q -f website/mkdocs.yml
	@echo "Open .site/index.html"

wheel: $(STAMP) ## build dist/kronoscope-*.whl, whose one package is kronoscope
	@$(PY) -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .
	@ls dist/*.whl

soak: $(STAMP) ## kill every part at every point with the default leases; writes benchmarks/results/soak.json (8 to 10 minutes measured)
	@$(PY) -m tests.servers install
	@OMP_NUM_THREADS=1 $(PY) -m tests.chaos.soak

architectures: $(STAMP) ## what is covered of 280 architectures and how exactly, 110 of them as checkpoints, into docs/architectures.md; installs timm, diffusers, PEFT and torch_geometric beside the environment
	@$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(ARCHITECTURES) -r benchmarks/architecture_cases/requirements.txt
	@OMP_NUM_THREADS=1 PYTHONPATH=$(CURDIR)/$(ARCHITECTURES) $(PY) -P -m benchmarks.architectures

architectures-list: $(STAMP) ## list the architectures of the pinned transformers that a checkpoint may have, for review (3 minutes)
	@OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 PYTHONPATH=$(CURDIR) $(PY) -P -m ops.list_architectures

peers: $(STAMP) ## make .peers, the environment of the libraries that benchmarks compare with
	@benchmarks/conformance/environment.sh .peers $(PYTHON)

schemathesis: $(STAMP) ## ask a service of its own by its OpenAPI document, with valid and invalid data (2 minutes; EXAMPLES=200 for more)
	@[ -x .schemathesis/bin/python ] || { echo "==> Making .schemathesis, an environment of its own"; $(PYTHON) -m venv .schemathesis; }
	@.schemathesis/bin/python -m pip install --quiet --disable-pip-version-check schemathesis==4.32.5
	@OMP_NUM_THREADS=1 $(PY) -m tests.api.contract_check $(CURDIR)/.schemathesis/bin/schemathesis --max-examples $(or $(EXAMPLES),40) $(if $(SEED),--seed $(SEED))

test-clients: $(STAMP) ## generate a Python and a TypeScript client from the API's document, and run a whole job through the first (2 minutes)
	@[ -x .clients/bin/python ] || { echo "==> Making .clients, an environment of its own"; $(PYTHON) -m venv .clients; }
	@.clients/bin/python -m pip install --quiet --disable-pip-version-check openapi-python-client==0.29.1
	@npm install --prefix .clients --no-audit --no-fund --silent openapi-typescript@7.13.0 typescript@5.9.3
	@OMP_NUM_THREADS=1 $(PY) -m tests.api.typed_clients .clients

test-consumers: $(STAMP) ## export factors, and have llmcompressor, PEFT, laplace-torch, kronfluence, MLflow and W&B read them (5 minutes the first time)
	@[ -x .consumers/bin/python ] || { echo "==> Making .consumers, an environment of its own"; $(PYTHON) -m venv .consumers; }
	@.consumers/bin/python -m pip install --quiet --disable-pip-version-check -r tests/consumers/requirements.txt
	@.consumers/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r tests/consumers/consumers.txt
	@OMP_NUM_THREADS=1 $(PY) -m tests.consumers.export_all .consumers/bin/python

test-docker: $(STAMP) ## build the images, bring Compose up, run jobs through it (needs a Docker engine)
	@docker info >/dev/null 2>&1 || { echo "No Docker engine answers; start one, then run this again." >&2; exit 2; }
	@docker compose version >/dev/null || { echo "Compose v2 is missing: install the plugin docker-compose." >&2; exit 2; }
	@$(PYTEST) -m docker tests/docker

test-slurm: $(STAMP) ## start a Slurm of one node on loopback, and run queues through it (installs slurm-wlm as root)
	@if ! command -v slurmctld slurmd sbatch munged >/dev/null; then \
		if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
			echo "==> Installing Slurm and munge (apt)"; \
			apt-get update -qq; DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends slurm-wlm munge >/dev/null; \
		else \
			echo "Slurm is missing. As root: apt-get install slurm-wlm munge" >&2; exit 2; \
		fi; \
	fi
	@$(PY) -m tests.servers install
	@$(PYTEST) -m slurm tests/slurm

lock: $(TOOLS)/.installed ## renew ops/locks from constraints.txt: every file that an image installs, by SHA-256
	@$(PYTHON) ops/write_locks.py $(TOOLS)/bin/uv

audit: $(TOOLS)/.installed ## hold the locked versions against the known vulnerabilities (needs the internet)
	@for image in api worker; do \
		echo "==> $$image"; $(TOOLS)/bin/pip-audit --strict --progress-spinner off --disable-pip --require-hashes -r $(LOCKS)/$$image.txt; \
	done

sbom: $(TOOLS)/.installed ## write dist/sbom-api.json and dist/sbom-worker.json (CycloneDX)
	@mkdir -p dist
	@for image in api worker; do \
		{ cat $(LOCKS)/$$image.txt; [ $$image = api ] || grep '^torch==' constraints.txt; } | \
			$(TOOLS)/bin/cyclonedx-py requirements --pyproject pyproject.toml --output-reproducible -o dist/sbom-$$image.json -; \
	done
	@ls dist/sbom-*.json

pin-images: ## write the digests of the images that Compose takes from a registry into .env, so that it takes no others
	@$(PYTHON) ops/pin_images.py docker-compose*.yml

env: ## write .env with random passwords for Docker Compose, and .secrets from it; an existing .env is kept
	@if [ -e .env ]; then $(MAKE) complete-env; else $(MAKE) .env; fi
	@$(MAKE) secret-files

# --- what the targets above call -----------------------------------------------------------------------------------

$(TOOLS)/.installed: ops/supply-tools.txt
	@$(PYTHON) -m venv $(TOOLS)
	@$(TOOLS)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@

.PHONY: browser
browser:
	@found() { command -v chromium-headless-shell || command -v chromium || command -v chromium-browser || command -v google-chrome || \
		$(PY) -c 'import os, sys; from playwright.sync_api import sync_playwright as s; p = s().start(); e = p.chromium.executable_path; p.stop(); sys.exit(not os.path.exists(e))'; }; \
	with_apt() { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; }; \
	install() { DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$1 >/dev/null 2>&1; }; \
	if command -v chromium-headless-shell >/dev/null; then exit 0; fi; \
	if with_apt; then \
		found >/dev/null 2>&1 || { echo "==> Installing Chromium for the page's tests (apt)"; apt-get update -qq || true; }; \
		if apt-cache show chromium-headless-shell >/dev/null 2>&1; then install chromium-headless-shell || true; fi; \
	fi; \
	if found >/dev/null 2>&1; then exit 0; fi; \
	if with_apt; then install chromium || true; fi; \
	found >/dev/null 2>&1 || { echo "==> Installing Chromium for the page's tests (playwright)"; $(BIN)/playwright install chromium || true; }; \
	found >/dev/null 2>&1 || echo "WARNING: no Chromium was found, and none could be installed: the tests of the page will fail. Install the package 'chromium', then run 'make test' again." >&2

# The folder is its owner's alone; a file's own mode is what a container needs, which sees the file and not the folder.
.PHONY: secret-files
secret-files:
	@umask 077; mkdir -p .secrets; \
	value() { sed -n "s/^$$1=//p" .env | tail -n 1 | sed "s/^[\"']\\(.*\\)[\"']$$/\\1/"; }; \
	keep() { \
		[ -n "$$2" ] || set -- "$$1" "$$(od -An -N24 -tx1 /dev/urandom | tr -d ' \n')"; \
		printf %s "$$2" > .secrets/.part; chmod 0444 .secrets/.part; \
		if cmp -s .secrets/.part ".secrets/$$1"; then rm -f .secrets/.part; else mv -f .secrets/.part ".secrets/$$1"; fi; \
	}; \
	if [ -n "$$(value DATABASE_URL)" ]; then \
		keep worker_database_url "$$(value DATABASE_URL)"; keep redis_url "$$(value REDIS_URL)"; \
	else \
		address=postgres:5432/kronoscope; \
		keep migrate_database_url "postgresql+psycopg://kronoscope:$$(value POSTGRES_PASSWORD)@$$address"; \
		keep api_database_url "postgresql+psycopg://kronoscope_api:$$(value API_PASSWORD)@$$address"; \
		keep worker_database_url "postgresql+psycopg://kronoscope_worker:$$(value WORKER_PASSWORD)@$$address"; \
		keep webhooks_database_url "postgresql+psycopg://kronoscope_webhooks:$$(value WEBHOOKS_PASSWORD)@$$address"; \
		keep redis_url "redis://kronoscope:$$(value REDIS_PASSWORD)@redis:6379/0"; \
		keep migrate_password "$$(value MIGRATE_PASSWORD)"; keep api_password "$$(value API_PASSWORD)"; \
		keep worker_password "$$(value WORKER_PASSWORD)"; keep webhooks_password "$$(value WEBHOOKS_PASSWORD)"; \
		keep webhook_key "$$(value KRONOSCOPE_WEBHOOK_KEY)"; keep redis_password "$$(value REDIS_PASSWORD)"; \
		keep key_secret "$$(value KRONOSCOPE_KEY_SECRET)"; keep metrics_token "$$(value KRONOSCOPE_METRICS_TOKEN)"; \
	fi; \
	echo "==> .secrets holds what the containers read of it; after a change: docker compose up -d --force-recreate"

.PHONY: complete-env
complete-env:
	@umask 077; if grep -q '^DATABASE_URL=' .env; then exit 0; fi; sed -n 's/=change-me$$//p' .env.example | while IFS= read -r name; do \
		grep -q "^$$name=" .env || { \
			[ -z "$$(tail -c 1 .env)" ] || echo >> .env; \
			echo "$$name=$$(od -An -N24 -tx1 /dev/urandom | tr -d ' \n')" >> .env; echo "==> .env lacked $$name, which is added"; }; \
	done
	@echo "==> .env is there already; what it holds is left as it is"

.env:
	@umask 077; while IFS= read -r line; do case "$$line" in \
		*=change-me) echo "$${line%change-me}$$(od -An -N24 -tx1 /dev/urandom | tr -d ' \n')" ;; \
		*) echo "$$line" ;; \
	esac; done < .env.example > .env.part
	@if docker info --format '{{json .Runtimes}}' 2>/dev/null | grep -q '"nvidia"'; then \
		echo "COMPOSE_FILE=docker-compose.yml:docker-compose.gpu.yml" >> .env.part; \
		echo "==> An NVIDIA runtime answers: .env names docker-compose.gpu.yml too"; \
	else \
		echo "==> No NVIDIA runtime answers: Compose will use the CPU"; \
	fi
	@mv .env.part .env
	@echo "==> .env is written, with random passwords and mode 0600; docker compose up -d comes next"

clean: ## remove the environment, the caches and the demo's data; .env and other data stay
	@rm -rf $(VENV) $(ARCHITECTURES) $(TOOLS) .peers .schemathesis .clients .consumers .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis .kronoscope/demo dist build
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
	@echo "==> Removed $(VENV), caches and .kronoscope/demo"
