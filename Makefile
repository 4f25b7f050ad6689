# Two commands: `make demo` and `make test`. Each makes .venv, installs what it needs and runs.
# TORCH=existing uses the torch, and the lmdeploy if there is one, of the calling Python instead of installing them.
PYTHON ?= python3
TORCH  ?= constraints
VENV   := .venv
BIN    := $(VENV)/bin
JOBS   ?= 2
# Flags of the demo, e.g. DEMO=--store
DEMO   ?=

export CUTE_DSL_ARCH ?= sm_90a

ifeq ($(TORCH),existing)
CONSTRAINT :=
LMDEPLOY   :=
else
CONSTRAINT := -c constraints-cpu.txt
LMDEPLOY   := tests/integration/requirements.txt
endif

.PHONY: demo test lint test-deep clean
.DEFAULT_GOAL := test

$(VENV)/.installed: pyproject.toml constraints-cpu.txt tests/integration/requirements.txt
	$(PYTHON) -m venv $(VENV)
ifeq ($(TORCH),existing)
# The packages of the calling Python, which may itself be a virtual environment, stand behind those of .venv.
	$(PYTHON) -c "import sysconfig, torch; print(sysconfig.get_path('purelib'))" > .existing.pth
	mv .existing.pth "$$($(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/existing.pth"
endif
	$(BIN)/python -m pip install -q --upgrade "pip>=25.1"
	$(BIN)/python -m pip install -q $(CONSTRAINT) -e . --group dev
	$(if $(LMDEPLOY),$(BIN)/python -m pip install -q --no-deps -r $(LMDEPLOY))
	touch $@

demo: $(VENV)/.installed
	$(BIN)/compact-state demo $(DEMO)

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(foreach package,pool cute_kernels.configs autotune integration,-p compact_state.$(package))

test: lint
	$(BIN)/python -m pytest -q -n $(JOBS) --dist loadfile tests
	$(BIN)/compact-state demo --out out/demo

test-deep: $(VENV)/.installed
	COMPACT_STATE_SEARCH=10 $(BIN)/python -m pytest -q -s tests/pool/test_model.py tests/pool/test_capacity.py
	COMPACT_STATE_STORE_FAULTS=40 $(BIN)/python -m pytest -q -s tests/pool/test_mooncake_random.py

clean:
	rm -rf $(VENV) build out *.egg-info
