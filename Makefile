# Every target makes its own set-up; `make quickstart` and `make test` are all a new user needs.
SHELL := /bin/bash
PYTHON := .venv/bin/python
TODAY := .venv-today/bin/python
NEWER := .venv-3.13/bin/python
PRIME_RL := .venv-prime-rl/bin/python
# Most tests wait for sandboxes and servers: four files at a time take less than half as long on two cores.
# In the order of their folders, so that the long files of tests/e2e do not come last, when the others have nothing to do.
AT_ONCE := -n 4 --dist loadfile --no-loadscope-reorder
export LITELLM_LOCAL_MODEL_COST_MAP := True
# Where this is set, every process compiles every library anew.
export PYTHONDONTWRITEBYTECODE :=
# The plugin's tests, which every `make test` also runs on today's verifiers and harbor.
PLUGIN := tests/environment tests/e2e/test_plugin.py
# What else calls verifiers or harbor: `make test-long` runs it on today's pair.
ON_TODAY := tests/harbor_compat tests/trials tests/tasks $(shell grep -lE '(from|import) harbor(\.| import)' tests/sandbox/test_*.py) \
	$(filter-out tests/e2e/test_plugin.py,$(wildcard tests/e2e/test_outcomes*.py tests/e2e/test_plugin*.py)) \
	tests/e2e/test_hostile_artifacts.py

.PHONY: help setup setup-today quickstart quickstart-prime-rl demo check test test-long long test-prime-rl python-3.13 kills mutations parity lint unit plugin-today \
	prime-rl-where-it-can drift today bench docs clean

help:
	@echo "make quickstart   train a tiny policy on real Harbor trials, in minutes, on a CPU"
	@echo "make quickstart-prime-rl  the same on Prime-RL: its trainer and orchestrator, on a CPU with stubs (docs/prime-rl.md)"
	@echo "make demo         a real pretrained model (SmolLM2-135M) on such trials, in a quarter of an hour, on two cores"
	@echo "make check        lint, types, prose, and the tests that start no process: under a minute; ROOM=trials for one package"
	@echo "make test         lint, types, unit tests and end-to-end tests without Docker, the plugin's on both pairs of verifiers and harbor"
	@echo "make test-long    what takes longer: Docker, whole runs beside vLLM's API and on a quantized base, today's pair,"
	@echo "                  Python 3.13, Prime-RL's real orchestrator and trainer, every broken file, the site"
	@echo "make parity       each feature of Harbor's, in Docker too and by Harbor's own trial (half an hour)"
	@echo "make drift        what the newest releases of verifiers, harbor, renderers, transformers and peft would break"
	@echo "make kills        kill a run at random moments and look for what was left or lost (wants a quiet machine)"
	@echo "make test-prime-rl  the tests against Prime-RL at its pin, in an environment that it makes"
	@echo "make lint         ruff, ty, import-linter and the prose check"
	@echo "make docs         these pages as a site, with every key and command, in site/index.html"
	@echo "make bench        the benchmarks (some minutes each)"

setup:
	@tools/setup

setup-today: setup
	@UV_PROJECT_ENVIRONMENT=.venv-today .tools/uv sync --quiet --frozen --no-default-groups --group dev --group pair-today

# The file has no run.name, so that runs do not collide; here the README names the folder, and a new run replaces the last.
quickstart: setup
	$(PYTHON) -m src.train --config configs/quickstart.toml --run.name quickstart --clean true

demo: setup
	$(PYTHON) tools/demo.py
	$(PYTHON) -m src.train --config configs/laptop.toml

# Prime-RL evaluates before step 1, and before each step that the interval divides, here after the last one.
quickstart-prime-rl: setup
	@tools/prime-rl .venv-prime-rl
	$(PYTHON) tools/prime_rl_cpu/train_on_cpu.py --config configs/quickstart.toml --run.name quickstart-prime-rl \
		--orchestrator.eval.interval 11 --clean true

lint: setup
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/ty check
	.venv/bin/lint-imports --no-logo
	.venv/bin/python tools/check_prose.py

# The edit loop: `make check` before each commit, `make check ROOM=trials` while you work on one package.
# Pure tests wait for nothing: more processes than cores would only import more.
check: AT_ONCE := $(if $(ROOM),$(AT_ONCE),-n auto --dist loadfile --no-loadscope-reorder)
check: lint
	$(PYTHON) -m pytest $(AT_ONCE) $(if $(ROOM),tests/$(ROOM),-m pure tests)

unit: setup
	$(PYTHON) -m pytest $(AT_ONCE) tests

plugin-today: setup-today
	$(TODAY) -m pytest $(AT_ONCE) $(PLUGIN)

# FREE: packages whose version requirements are ignored, where the newest releases exclude one another.
drift: setup
	@tools/drift $(FREE)

today: setup-today
	$(TODAY) -m pytest $(AT_ONCE) --long $(ON_TODAY)

test: lint unit plugin-today

# What an interpreter can break: imports and syntax (every pure test), and one trial in each sandbox (the sample tasks).
# A machine without Python 3.13 prints that and goes on. (pyenv hides what is not pinned.)
python-3.13: export PYENV_VERSION := 3.13
# Pure tests wait for nothing, and `make test-long` runs Prime-RL's tests beside them.
python-3.13: AT_ONCE += -n 2
python-3.13:
	@if found=$$(.tools/uv python find --no-project 3.13 2>/dev/null); then \
	  UV_PROJECT_ENVIRONMENT=.venv-3.13 .tools/uv sync --quiet --frozen --extra local --python "$$found" && \
	  $(NEWER) -m pytest $(AT_ONCE) -m pure tests && $(NEWER) -m pytest --long tests/e2e/test_sample_tasks.py; \
	else echo "python-3.13: no such interpreter on this machine, so its tests are skipped"; fi

# The submodule is fetched where it is empty; HARBORTRAINER_PRIME_RL names another checkout.
# Two files at a time, the longest first: they mostly wait for programs to start and for the faults' timeouts.
test-prime-rl: LONGEST := tests/prime_rl/test_run_on_cpu.py
test-prime-rl: setup
	@tools/prime-rl .venv-prime-rl
	HARBORTRAINER_PRIME_PYTHON=$(PRIME_RL) $(PYTHON) -m pytest $(AT_ONCE) -n 2 $(LONGEST) \
		$(filter-out $(LONGEST),$(wildcard tests/prime_rl/test_*.py))

kills: setup
	$(PYTHON) benchmarks/kills.py --kills 6 --longest 60

# Every broken run file, override and task; `make unit` runs a sample of them.
mutations: setup
	$(PYTHON) -m pytest --all-mutations tests/config/test_mutations.py tests/tasks/test_task_mutations.py

# The features of Harbor against Harbor itself; docs/harbor.md holds the table.
# test-long compares our containers with what Harbor's own trial did when the table was written; `make parity` plays both.
# In one process, which plays eight at once: trials are named by their features, and two of one name make way for each other.
test-long: export PLAYED := -k "test_container_gives_recorded_result and docker]"
parity: setup
	$(PYTHON) -m pytest --long --in-containers $(PLAYED) tests/parity

# What `make unit` leaves out: tests that are marked `long`, and every container.
long: setup
	$(PYTHON) -m pytest $(AT_ONCE) --long -m long tests

# Prime-RL's tests mostly wait, in two processes: the targets of one and two processes run beside them. Each target's output
# is printed when it ends.
test-long: setup long today
	$(MAKE) --no-print-directory -j 2 $(if $(filter output-sync,$(.FEATURES)),--output-sync=target) \
		prime-rl-where-it-can python-3.13 mutations parity docs

prime-rl-where-it-can: setup
	@if tools/prime-rl --can; then $(MAKE) --no-print-directory test-prime-rl; fi

bench: setup
	$(PYTHON) benchmarks/trials.py
	$(PYTHON) benchmarks/episodes.py --arms local
	.tools/uv run --frozen --extra local --group bench benchmarks/engine.py

# An environment of its own, so that no other target installs what only the site needs.
# A warning is an error; with --quiet none would be.
docs: export NO_MKDOCS_2_WARNING := 1
docs: setup
	@UV_PROJECT_ENVIRONMENT=.venv-docs .tools/uv sync --quiet --frozen --no-default-groups --group docs --group pair-prime
	.venv-docs/bin/mkdocs build --strict
	@echo "site/index.html; with the search: $(PYTHON) -m http.server --bind 127.0.0.1 --directory site"

clean:
	rm -rf .venv .venv-today .venv-drift .venv-3.13 .venv-prime-rl .venv-docs .tools outputs site
