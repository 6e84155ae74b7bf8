# Targets for people; CI runs `make test`. `make` alone lists them.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed

.DEFAULT_GOAL := help
.PHONY: bench bench-guard chaos docs faults faults-long faults-page help model reference runbook screenshots setup run test test-fast check secured servers simulate sizing test-pythons clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## make the virtual environment and install toc into it

# Written last, so that an install that broke off is repeated; older than pyproject.toml, it is as well.
$(STAMP): pyproject.toml scripts/setup
	scripts/setup "$(PYTHON)" "$(VENV)"
	touch $(STAMP)

run: $(STAMP) ## the demo: everything embedded, no server to install
	$(BIN)/toc demo

check: $(STAMP) ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

servers: ## as root on Debian: install the servers that tests need; else say which are missing
	scripts/servers

# Most tests wait: all of them together want nine minutes of a processor, and those of four at a time would leave
# half of two processors idle. Each process has servers of its own.
AT_ONCE := 8

# mypy takes half a minute of one core where it has not run before: it runs beside the first tests, and what it says
# comes last.
test: $(STAMP) servers ## everything: servers, check, all tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@$(BIN)/mypy >$(VENV)/mypy.log 2>&1 & mypy=$$!; \
		[ -d .pytest_cache ] || $(BIN)/pytest --collect-only -q >/dev/null; \
		$(BIN)/pytest -n $(AT_ONCE) --dist loadfile --no-loadscope-reorder; tests=$$?; \
		wait $$mypy; types=$$?; cat $(VENV)/mypy.log; [ $$tests = 0 ] && [ $$types = 0 ]

# Not among them: what starts servers of its own to break, cut off or mistrust them (the rest of integration/queue,
# test_backup, test_local_servers, test_demo, ...); test_tls, whose servers are secured in any case.
SECURED := tests/integration/system tests/contract tests/integration/coordination tests/integration/store \
	tests/integration/index/test_transitions.py tests/integration/index/test_wake.py \
	tests/integration/test_cli.py tests/integration/test_doctor.py \
	tests/integration/gateway/test_calls.py tests/integration/gateway/test_targets.py \
	tests/integration/gateway/test_pulls_http.py
secured: $(STAMP) servers ## tests of whatever talks to servers over TLS, with the accounts of deploy/ alone
	TOC_TEST_SECURED=1 $(BIN)/pytest $(or $(ARGS),-n 2 --dist loadfile $(SECURED))

# Besides the table's: what no other target runs in full. Outages of Redis seen from within, life without one, a
# server that comes back from its backup, toc in a bare environment, the site, every form of the console in a
# browser. Then the contract with ZooKeeper, and what other programs make of alerts and types.
AS_LONG := tests/integration/system/test_without_redis.py tests/integration/system/test_database_alone.py \
	tests/integration/test_backup.py tests/integration/test_install.py tests/browser
faults: $(STAMP) servers ## every fault that toc must survive, and the table of what became of each
	$(if $(ARGS),,rm -f .faults/lines.jsonl)
	$(BIN)/pytest tests/fault $(AS_LONG) -m "not chaos" --measure $(ARGS)
	$(if $(ARGS),,$(BIN)/pytest tests/contract tests/unit -m slow)

faults-long: $(STAMP) servers ## the tests that take several minutes each, most of them of faults
	$(BIN)/pytest tests -m chaos --measure $(ARGS)

runbook: $(STAMP) servers ## the recipes of docs/run.md as they are written, under load
	$(BIN)/pytest tests/fault/test_runbook.py -m chaos --measure -s $(ARGS)

faults-page: $(STAMP) ## put the table of the last faults and soaks into evidence/faults.md
	PYTHONPATH=tests $(BIN)/python -m fault.kit.table

reference: $(STAMP) ## write the lists of docs/reference.md that the code tells
	PYTHONPATH=tests $(BIN)/python -m reference_page

# Sphinx is installed by the first `make docs`, for most never build the site. A warning, such as of a link that leads
# nowhere, fails the build; only what is read warns, so all pages are read each time.
$(VENV)/docs: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --group docs
	touch $@

docs: $(VENV)/docs ## the pages and the docstrings as a site that needs no server: build/docs/index.html
	rm -rf build
	$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going -c docs -d build/doctrees . build/docs

$(VENV)/screenshots: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --group screenshots
	touch $@

screenshots: $(VENV)/screenshots servers ## take the pictures of the console in docs/images anew
	PYTHONPATH=tests $(BIN)/python -m screenshots

MINUTES ?= 5
chaos: $(STAMP) servers ## random faults over a local cluster: SEED=7 MINUTES=5 TASKS=100000
	PYTHONPATH=tests $(BIN)/python -m fault.chaos --record .faults/soaks.jsonl --minutes $(MINUTES) $(if $(SEED),--seed $(SEED)) $(if $(TASKS),--tasks $(TASKS)) $(ARGS)
model: $(STAMP) servers ## every search of the model of the protocol, and the long state machines; the quick ones are part of `make test`
	$(BIN)/pytest tests/spec tests/property -m "not chaos" $(ARGS)

test-fast: $(STAMP) ## the unit tests
	$(BIN)/pytest -n 4 tests/unit

PYTHONS ?= 3.11 3.12 3.13 3.14
test-pythons: $(STAMP) ## the unit tests on each version of Python that is here: PYTHONS="3.12 3.13"
	scripts/pythons $(PYTHONS)

# The distribution's Python, as production runs it. One that was built without profile-guided optimization, as
# pyenv does by default, is a quarter slower, whatever it runs.
BENCH_PYTHON ?= $(shell /usr/bin/python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	&& echo /usr/bin/python3 || echo $(PYTHON))
BENCH_VENV := .bench/python
BENCH_STAMP := $(BENCH_VENV)/installed

$(BENCH_STAMP): pyproject.toml scripts/setup
	scripts/setup "$(BENCH_PYTHON)" "$(BENCH_VENV)"
	touch $(BENCH_STAMP)

bench: $(BENCH_STAMP) ## measure toc beside its peers; ARGS="toc BullMQ --repeat 3"
	scripts/bench $(BENCH_VENV)/bin/python $(ARGS)

bench-guard: $(STAMP) servers ## toc's cost as a multiple of a bare Redis loop, and in calls of Python
	$(BIN)/python -m benchmarks.guard
	$(BIN)/python -m benchmarks.calls

simulate: $(STAMP) ## what a system of a given size would do: ARGS="--hosts 100 --fires 20000"
	$(BIN)/python -m benchmarks.simulate $(ARGS)

sizing: $(STAMP) servers ## what a cluster takes of memory, disk and connections
	$(BIN)/python -m benchmarks.sizing

clean: ## remove what was built; leaves .toc, which holds data
	rm -rf $(VENV) .bench build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
