# One word per habit. `make demo` and `make test` set everything up on a fresh machine by themselves.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
SETUP  := $(VENV)/.ktc-setup

.PHONY: demo test fmt lint setup clean help

help:
	@echo "make demo   compile artifacts/demo to a bundle and generate text from it"
	@echo "make test   lint, type-check and run the tests"
	@echo "make fmt | lint | setup | runtime | asan | tsan | golden-update | clean"

# The native runtime is rebuilt whenever its sources or the package description change.
$(SETUP): pyproject.toml CMakeLists.txt $(wildcard runtime/src/*) $(wildcard runtime/include/ktc/*.h)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@

setup: $(SETUP)

demo: setup
	$(BIN)/ktc compile artifacts/demo --recipe int4.yaml -o demo-int4.ktc --force
	$(BIN)/ktc run demo-int4.ktc -p "ROMEO. " --max-tokens 120 --temperature 0.8 --seed 7

test: setup lint
	$(BIN)/python -m pytest -q

fmt: setup
	$(BIN)/ruff format ktc tests benchmarks artifacts
	$(BIN)/ruff check --fix ktc tests benchmarks artifacts
	git ls-files 'runtime/*.h' 'runtime/*.cpp' | xargs $(BIN)/clang-format -i

lint: setup
	$(BIN)/ruff format --check ktc tests benchmarks artifacts
	$(BIN)/ruff check ktc tests benchmarks artifacts
	$(BIN)/mypy ktc
	git ls-files 'runtime/*.h' 'runtime/*.cpp' | xargs $(BIN)/clang-format --dry-run -Werror

golden-update: setup
	$(BIN)/python -m pytest -q tests/codegen --update-golden
	KTC_UPDATE_GOLDEN=1 $(BIN)/python -m pytest -q tests/plan/test_real_configs.py -k golden

clean:
	rm -rf build $(VENV) *.ktc *.ktc.partial

-include runtime/runtime.mk
