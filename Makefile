# Each target sets up what it needs: a .venv in this checkout with flexcp installed. Only Python 3.11+ and pip are assumed.
PYTHON ?= python3
BIN := .venv/bin

# Tests start hundreds of Python processes: bytecode is kept whatever the environment says.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test tests test-all loops kernels lint docs screenshots pictures counts verify-all planning trees trees-exact simulator-speed training-thread auto groups regimes swap memory multimodal models experiments papers published trainers axolotl box kernel-fit hypergraph properties data fuzz fuzz-plans fuzz-readers families mutants planted faults soak coverage clean

demo: .venv/ready
	$(BIN)/flexcp demo

# pip has work for one core: on the other the loops are compiled meanwhile. Then ruff and mypy run beside the tests.
test:
	$(MAKE) --jobs 3 --output-sync .venv/ready loops .venv/browser
	$(MAKE) --jobs 2 lint tests

# Three processes share the test files, the longest first, each with its own pool of ranks: tests that wait for a time limit or for a
# process leave a core to the others.
tests: .venv/ready
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

# All tests, also those that make tests leaves out (tests/long_tests.py).
test-all: .venv/ready
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder --long

# The planners' loops, compiled before tests in several processes would each begin to. They need nothing but Numba.
loops: .venv/numba
	PYTHONPATH=src $(BIN)/python -m flexcp warmup

# The CuTe kernels compiled for sm90 without a GPU; their compiler (flexcp[cute]) is 200 MB that make test does without.
kernels: .venv/ready
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[cute]"
	$(BIN)/python -m pytest tests/executor/kernels/test_kernels_cute.py tests/executor/kernels/test_kernels_hopper.py

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The docs as a site in build/site, warnings are errors.
docs: .venv/ready
	$(BIN)/mkdocs build --strict

# Pictures of the report for the docs, taken by the tests' browser run.
screenshots: .venv/ready .venv/browser
	$(BIN)/python -m pytest tests/report/test_browser.py --screenshots docs/pictures

# The main results as plots, drawn from the tables in docs/results; writes docs/pictures/*-light.svg and *-dark.svg.
pictures:
	$(PYTHON) benchmarks/pictures.py --write docs/pictures

# Pages, words, names, longest function, wide lines. BEFORE=../other: of another checkout beside this one.
counts:
	$(PYTHON) tests/counts.py $(BEFORE)

# Every strategy x mask x number of ranks x head arrangement on real processes; writes docs/results/verified.md.
verify-all: .venv/ready
	$(BIN)/python benchmarks/verify_all.py --write docs/results/verified.md

# Bytes, balance and planning time on fixed batches; writes docs/results/planning.md.
planning: .venv/ready
	$(BIN)/python benchmarks/planning.py --write docs/results/planning.md

# Bytes, balance and planning time of trees; writes docs/results/trees.md.
trees: .venv/ready
	$(BIN)/python benchmarks/tree_planning.py --write docs/results/trees.md

# 200 batches of random trees beside independent sequences, on gloo ranks in float64; long; writes docs/results/trees-exact.md.
trees-exact: .venv/ready
	$(BIN)/python benchmarks/trees.py --write docs/results/trees-exact.md

# How long simulating a plan takes; writes docs/results/simulator-speed.md.
simulator-speed: .venv/ready
	$(BIN)/python benchmarks/simulator_speed.py --write docs/results/simulator-speed.md

# What a planned batch costs the training thread; writes docs/results/training-thread.md.
training-thread: .venv/ready
	$(BIN)/python benchmarks/training_thread.py --write docs/results/training-thread.md

# auto against static methods: gains, share of the gap closed, planning time; simulated, half an hour; writes docs/results/auto.md.
auto: .venv/ready
	$(BIN)/python benchmarks/auto.py --write docs/results/auto.md

# groups against fixed grids of CP x DP, simulated, and its planning time; writes docs/results/groups.md.
groups: .venv/ready
	$(BIN)/python benchmarks/groups.py --write docs/results/groups.md

# auto against the best static method by regime, simulated; writes docs/results/regimes.md.
regimes: .venv/ready
	$(BIN)/python benchmarks/regimes.py --write docs/results/regimes.md

# auto in a layout that it may not change, against static methods in it, simulated; writes docs/results/swap.md.
swap: .venv/ready
	$(BIN)/python benchmarks/swap.py --write docs/results/swap.md

# What attention needs of a rank's memory, from plans; writes docs/results/memory.md.
memory: .venv/ready
	$(BIN)/python benchmarks/memory.py --write docs/results/memory.md

# What other systems published beside simulations of them; writes docs/results/experiments.md. QUICK=1 draws fewer batches.
experiments: .venv/ready
	$(BIN)/python benchmarks/experiments.py --write docs/results/experiments.md $(if $(QUICK),--quick)

# Published figures beside simulated ones, with errors; writes docs/results/published.md. Ten minutes.
published: .venv/ready
	$(BIN)/python benchmarks/published.py --write docs/results/published.md

# The three papers figure by figure, with their planners and with auto; writes docs/results/papers.md. QUICK=1: fewer batches and sizes.
papers: .venv/ready
	$(BIN)/python benchmarks/papers.py --write docs/results/papers.md $(if $(QUICK),--quick)

# Predicted beside measured steps on ranks with slow ports; writes docs/results/box.md. Root, two idle cores, a quarter of an hour.
box: .venv/ready
	$(BIN)/python benchmarks/box_error.py --write docs/results/box.md

# How well cost models fit an H200's kernels, from raw times in benchmarks/h200.json; prints a table and states the errors.
kernel-fit: .venv/ready
	$(BIN)/python benchmarks/kernel_fit.py --record

# Every model family x strategy x layout x ranks over 50 steps against one process; writes docs/results/models.md.
models: .venv/ready
	$(BIN)/python benchmarks/models.py --write docs/results/models.md

# Vision-language batches under static layouts and ours, predicted and measured; writes docs/results/multimodal.md.
multimodal: .venv/ready
	$(BIN)/python benchmarks/multimodal.py --write docs/results/multimodal.md

# hypergraph beside blocks: bytes, balance and seconds; writes docs/results/planning-hypergraph.md.
hypergraph: .venv/ready
	$(BIN)/python benchmarks/hypergraph.py --write docs/results/planning-hypergraph.md

# The data pipeline's promises: kills, slow planning, a million lengths, mutated plan files; writes docs/results/data.md.
data: .venv/ready
	$(BIN)/python benchmarks/data.py --write docs/results/data.md

# 100,000 mutated plan files, read and watched.
fuzz-plans: .venv/ready
	$(BIN)/python benchmarks/fuzz_plans.py

# Random cases through planners, checks, simulator, files, reports and loader until 20,000 are plans, and 1,000 on real ranks; on 16 cores
# ten minutes. What they did and found is in build/.
fuzz: .venv/ready
	mkdir -p build
	$(BIN)/flexcp fuzz --cases 26000 --seed 100 --ranks-share 0 --jobs 0 --folder build --write build/fuzz-plans.json
	$(BIN)/flexcp fuzz --cases 1600 --seed 200 --ranks-share 1 --most-ranks 4 --jobs 2 --folder build --write build/fuzz-ranks.json

# 50,000 changed files of every kind that a user can hand over.
fuzz-readers: .venv/ready
	$(BIN)/python benchmarks/fuzz_readers.py

# Every change of a config.json with every family of models, read and compared with a small model of Transformers; minutes.
families: .venv/ready
	$(BIN)/python -m pytest tests/models/test_families.py tests/models/test_text_parts.py --long --all-changes

# 200 automatically made mutants of the sources, and how many of them the tests notice; writes docs/results/mutants.md.
mutants: .venv/ready
	$(BIN)/python benchmarks/mutants.py --count 200 --jobs $$(nproc) --page docs/results/mutants.md

# A bug put into each area, and how soon the fuzzer finds it; writes docs/results/planted.md.
planted: .venv/ready
	$(BIN)/python benchmarks/planted.py --page docs/results/planted.md

# Every fault of docs/trust.md on real ranks, processes and files.
FAULTS := tests/executor/exchange/test_failures.py tests/executor/exchange/test_transports.py \
  tests/executor/exchange/test_plan_agreement.py tests/telemetry/test_sample.py tests/measure/test_ranks.py \
  tests/data/test_planning_pool.py tests/data/test_failing_reads.py tests/data/test_resume.py tests/cli/test_interrupt.py tests/cli/test_port_in_use.py \
  tests/io/test_atomic_files.py tests/arrays/test_jit.py tests/test_clocks.py tests/fuzz/test_readers.py
faults: .venv/ready
	$(BIN)/python -m pytest --long $(FAULTS)

# 5,000 steps of changing batches in one process group: nothing may grow; writes docs/results/soak.md, where a run on a GPU
# (benchmarks/soak.py --device cuda) has its section too.
soak: .venv/ready
	$(BIN)/python benchmarks/soak.py --steps 5000 --write benchmarks/soak_cpu.json
	$(BIN)/python benchmarks/soak.py --page benchmarks/soak_cpu.json $(wildcard benchmarks/soak_h200.json)

# Which lines of the sources tests run, processes and ranks that they start included; two to three times as long as make tests.
# TESTS="tests/plan tests/io" runs some of them. Writes build/coverage.json; docs/results/coverage.md has the last result.
coverage: .venv/ready
	$(BIN)/pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e ".[coverage]"
	mkdir -p build
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder --long --cov --cov-report= --cov-report=json:build/coverage.json $(TESTS)
	$(BIN)/python benchmarks/covered.py build/coverage.json --tests "$(if $(TESTS),$(TESTS),all tests)" --page docs/results/coverage.md

# The tests that the table of trainers stands on, the examples over 20 steps (CI runs 4); writes docs/trainers.md.
trainers: .venv/ready .venv-axolotl/ready
	$(BIN)/python benchmarks/trainers.py --write docs/trainers.md

# The example of axolotl on two ranks and on one process, in an environment with the versions that axolotl pins.
axolotl: .venv-axolotl/ready
	.venv-axolotl/bin/python -m pytest tests/frameworks/test_axolotl.py

# Every strategy on thousands of random batches, masks and machines, against a count by hand.
properties: .venv/ready
	$(BIN)/python -m pytest tests/planners/test_properties.py tests/planners/test_communication.py --hypothesis-profile=thousands --hypothesis-show-statistics

# Packages are compiled to bytecode where they are imported, which few of their files are.
.venv/ready: .venv/numba pyproject.toml constraints.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e ".[dev]"
	touch $@

.venv-axolotl/ready: examples/axolotl_requirements.txt
	$(PYTHON) -m venv .venv-axolotl
	.venv-axolotl/bin/pip install --quiet --disable-pip-version-check --no-compile -r examples/axolotl_requirements.txt -e . pytest hypothesis
	.venv-axolotl/bin/pip install --quiet --disable-pip-version-check --no-compile --no-deps axolotl==0.19.0 axolotl-contribs-lgpl==0.0.7 axolotl-contribs-mit==0.0.6
	touch $@

# What `flexcp warmup` needs.
.venv/numba:
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt numba numpy rich typer
	touch $@

# Chromium for the tests of the report, where it is missing and may be installed; without it they are skipped and say so.
.venv/browser:
	@command -v chromium chromium-browser google-chrome >/dev/null 2>&1 \
	  || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get update -qq && apt-get install -y -qq chromium >/dev/null; } \
	  || echo "no Chromium, and it cannot be installed here: tests of the report in a browser will be skipped"
	@mkdir -p .venv && touch $@

clean:
	rm -rf .venv .venv-axolotl .mypy_cache .ruff_cache dist
