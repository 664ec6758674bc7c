# make demo   8 ranks of a traced MoE pipeline; says what it saw and where the trace is
# make test   every check: lint, types, format, tests (what .ci/run calls)
# make test-python, make test-native, make test-browser   one lane of the tests alone; native: what needs a compiler
# make soak   the long counts of the same tests, with a transfer engine that asserts its rule (csrc/fabric/rule.hpp)
# make gpu-check  on a machine with GPUs and its own torch: what only a GPU can show, in 20 minutes at most; no virtual
#             environment, no network
# make docs   the documentation with the Python API as a site, in build/docs
# make lint   ruff, mypy, clang-format
# make clean  removes everything that was built, .venv too
#
# All but gpu-check work in their own virtual environment, .venv. PYTHON=python3.12 picks another interpreter for it.

PYTHON ?= python3
BIN := .venv/bin
# pip and the compilers side by side.
TOGETHER = @$(MAKE) --no-print-directory -j 2
BUILD = $(BIN)/python setup.py --quiet build_ext --inplace
CSRC := $(shell find csrc -type f)
CXX_FILES = $(shell find csrc examples tests benchmarks -name '*.cpp' -o -name '*.h' -o -name '*.hpp' -o -name '*.cu' -o -name '*.cuh')

.DEFAULT_GOAL := test
# Without it an installation whose extension cannot be compiled reads captures and is no failure.
export TRACEKERN_EXTENSION := 1
DEMO = run moe --ranks 8 --variant balanced --tokens 64 --hidden 2048 --experts 64 --topk 6 --dtype bf16 \
    --routing zipf --iterations 3 --seed 7 -o demo-capture

LANES := test-python test-native test-browser

.PHONY: demo test $(LANES) soak gpu-check docs lint clean asked

demo:
	$(TOGETHER) .venv/core .venv/demo
	@$(BIN)/tracekern $(DEMO)

test $(LANES):
	$(TOGETHER) .venv/extensions .venv/test
	$(if $(LANE),,@$(MAKE) --no-print-directory lint)
	@.ci/tests $(LANE)

$(LANES): LANE = -m "$(@:test-%=%) and not soak"

soak:
	$(TOGETHER) .venv/extensions .venv/test
	TRACEKERN_CHECKED=1 TRACEKERN_PARTS=fabric $(BUILD) --force --build-temp build/checked
	$(BIN)/python -m pytest -n 2 --dist worksteal --hypothesis-profile ci --all
	TRACEKERN_ALL_KERNELS=1 $(BIN)/python -m pytest -m "soak or compilers or hypothesis" --hypothesis-profile soak \
	    --timeout 3600 --all
	$(BIN)/python -m pytest -n 2 --rehearse efa -m "not soak" tests/fabric
	rm -f tracekern/_fabric*.so

gpu-check:
	$(PYTHON) benchmarks/gpu_all.py

docs: .venv/docs
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo "build/docs/index.html; with search: $(BIN)/python -m http.server -d build/docs"

lint: .venv/test
	$(BIN)/ruff check
	@if $(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then echo $(BIN)/mypy; $(BIN)/mypy; else \
	    echo "mypy left out: the types are written for a numpy that needs Python 3.11"; fi
	$(BIN)/clang-format --dry-run --Werror $(CXX_FILES)

clean:
	rm -rf .venv build *.egg-info demo-capture .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -f tracekern/_*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The files .venv/* below say that a step is done; each is newer than what the step was made from.

ifneq ($(origin PYTHON),file)
.venv/created: | asked
endif
# An interpreter that was asked for must be the one that .venv has.
asked:
	@.ci/venv $(PYTHON)

.venv/created:
	@.ci/venv $(PYTHON)
	@touch $@

.venv/tools: .venv/created requirements/build.txt pyproject.toml
	@.ci/pip -r requirements/build.txt
	@TRACEKERN_PARTS=none $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps \
	    --editable .
	@touch $@

.venv/demo: .venv/tools requirements/demo.txt
	@.ci/pip -r requirements/demo.txt
	@touch $@

# What the demo runs; any other part is built when a command needs it (tracekern/compiled.py).
.venv/core: .venv/tools setup.py $(CSRC)
	@TRACEKERN_PARTS=core,p2p $(BUILD)
	@touch $@

.venv/extensions: .venv/tools .venv/headers setup.py $(CSRC)
	@$(BUILD)
	@touch $@

# The transfer engine is built where libfabric's headers are.
.venv/headers: .venv/created
	@.ci/packages optional libfabric-dev
	@touch $@

.venv/test: .venv/demo requirements/test.txt requirements/docs.txt .venv/packages
	@.ci/pip -r requirements/test.txt
	@touch $@

.venv/docs: .venv/created requirements/docs.txt
	@.ci/pip -r requirements/docs.txt
	@touch $@

.venv/packages: .venv/created
	@.ci/packages optional clang-19 lld-19 chromium
	@touch $@
