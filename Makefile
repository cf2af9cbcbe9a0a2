# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin

# With a fixed order of sets, as with fixed seeds (tests/support/randomness.py), each run does the same.
PYTEST := PYTHONHASHSEED=0 $(BIN)/python -m pytest
# How many: tests/support/ordering.py; whoever is done takes from the end of another. What halts: tests/support/watching.py.
SPREAD := -n logical --dist worksteal
HERE   := -m "not cluster and not browser and not packaging"

# With a cache of their own, they leave the list for test-skipped as it is. In the lab, everything is installed.
ON_CLUSTER = $(PYTEST) -o cache_dir=.pytest_cache/cluster $(if $(ELASTICCTL_TEST_LAB),--no-skips) tests/on_cluster

# What is worth making faster: tests/on_cluster run one after the other.
SLOWEST := --durations 30 --durations-min 5

# Where images go, and what builds and pushes them: docker, podman or buildah.
BUILD  ?= docker
TAG    ?= $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
target  = $(or $(REGISTRY),$(error say where images go: make images REGISTRY=registry.example/team))/elasticctl-$(1):$(TAG)

# Where it is set, each process that the tests start compiles our modules again, and each of those that run them the tests.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo quick test test-skipped lint types unit torch soak coverage test-page test-packaging test-cluster test-cluster-short docs cli-page startup recording quickstart
.PHONY: images controller-image trainer-image dashboard-image install clean

demo: $(VENV)/.demo  ## the main job on the local cluster: lose a worker, scale up, finish
	$(BIN)/python examples/digits/demo.py $(if $(EPOCHS),--epochs $(EPOCHS))

quick: $(VENV)/.dev  ## the tests that start no process and no server, with fewer examples: a minute
	$(PYTEST) $(SPREAD) -m "not slow and not cluster and not browser"

test: lint  ## everything that needs no cluster, no browser and no package index: eleven minutes on two cores
	$(MAKE) --no-print-directory --jobs 2 types unit

lint: $(VENV)/.dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports

types: $(VENV)/.dev  ## beside the tests, which come first
	nice $(BIN)/mypy

unit: $(VENV)/.dev
	$(PYTEST) $(SPREAD) $(HERE)

test-skipped: $(VENV)/.dev  ## what the last `make test` has skipped, on a machine where everything is installed
	$(PYTEST) $(SPREAD) $(HERE) --skipped --no-skips

# Another release of PyTorch before everything that is installed; of the CPU builds with PIP_INDEX_URL.
OTHER   = $(VENV)/torch-$(or $(TORCH),$(error say which release: make torch TORCH=2.6.0))
SITE   := import sysconfig; print(sysconfig.get_path("purelib"))
torch: $(VENV)/.dev  ## the tests of training with another release of PyTorch: docs/training.md; make torch TORCH=2.6.0
	$(BIN)/python -m venv $(OTHER)
	$(OTHER)/bin/pip install --quiet torch==$(TORCH)
	echo "import site; site.addsitedir('$$($(BIN)/python -c '$(SITE)')')" > "$$($(OTHER)/bin/python -c '$(SITE)')/rest.pth"
	PATH="$(CURDIR)/$(BIN):$$PATH" PYTHONHASHSEED=0 CUDA_VISIBLE_DEVICES= $(OTHER)/bin/python -m pytest $(SPREAD) tests/train tests/launcher

soak: $(VENV)/.dev  ## search with new seeds in the randomized tests: make soak MINUTES=120; or make soak SEED=7 TEST=tests/test_x.py::test_y
	$(if $(SEED),PYTHONHASHSEED=$(SEED) $(BIN)/python -m pytest -m randomized --seed=$(SEED),$(BIN)/python -m tests.soak $(or $(MINUTES),60)) $${TEST:+"$$TEST"}

coverage: $(VENV)/.dev  ## the same tests, and which lines none of them reaches
	$(PYTEST) $(SPREAD) $(HERE) --cov --cov-report=term:skip-covered

test-page: $(VENV)/.dev  ## the dashboard in Chromium: /usr/bin/chromium, or the one that $CHROMIUM names
	$(PYTEST) tests/dashboard -m browser

test-packaging: $(VENV)/.dev  ## the client, the controller and the trainer, each installed alone: needs a package index
	$(PYTEST) -m packaging tests/test_packaging.py

test-cluster: $(VENV)/.dev  ## what needs a Kubernetes cluster: the one that $KUBECONFIG points at
	$(ON_CLUSTER) $(SLOWEST)

test-cluster-short: $(VENV)/.dev  ## those of them that show what depends on the release of Kubernetes: two minutes
	$(ON_CLUSTER) -m each_release

docs: $(VENV)/.dev  ## the documentation as a site, in site/
	$(BIN)/mkdocs build --strict

cli-page: $(VENV)/.dev  ## put the help of every verb into docs/cli.md
	$(BIN)/python -m tests.support.cli_page

startup: $(VENV)/.dev  ## how long the command line takes to answer
	$(BIN)/python -m benchmarks.command_line startup

recording: $(VENV)/.dev  ## the demo on a terminal, as a moving picture in docs/images
	$(BIN)/python -m benchmarks.recording

quickstart: $(VENV)/.dev  ## put what the quickstart's commands print into its page
	UPDATE_QUICKSTART=1 $(PYTEST) tests/test_docs.py -k quickstart

images: controller-image trainer-image  ## build both images and push them: make images REGISTRY=registry.example/team BUILD=podman

controller-image: DOCKERFILE := controller/Dockerfile
trainer-image: DOCKERFILE := training_lib/Dockerfile
dashboard-image: DOCKERFILE := Dockerfile

controller-image trainer-image dashboard-image:  ## one of them; the dashboard's, for clusters, is the command line's
	$(BUILD) build $(BUILD_OPTIONS) -f $(DOCKERFILE) -t $(call target,$(@:-image=)) .
	$(BUILD) push $(PUSH_OPTIONS) $(call target,$(@:-image=))

install: images $(VENV)/.client  ## images, controller, and jobs' image, from this checkout: make install CONTEXT=prod REGISTRY=...
	$(BIN)/elasticctl install --context $(CONTEXT) --image $(call target,controller)
	$(BIN)/elasticctl config set-context $(CONTEXT) --image $(call target,trainer)

clean:
	rm -rf $(VENV) site .mypy_cache .ruff_cache .pytest_cache .coverage

$(VENV)/.pip:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "elasticctl needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	@touch $@

$(VENV)/.client: $(VENV)/.pip pyproject.toml constraints.txt
	$(BIN)/pip install --quiet -c constraints.txt -e .
	@touch $@

$(VENV)/.demo: $(VENV)/.pip pyproject.toml constraints.txt
	@echo "installing into $(VENV) (PyTorch is the large part) ..."
	$(BIN)/pip install --quiet -c constraints.txt -e '.[train,examples]'
	@touch $@

$(VENV)/.dev: $(VENV)/.pip pyproject.toml constraints.txt
	@echo "installing into $(VENV) (PyTorch is the large part) ..."
	$(BIN)/pip install --quiet -c constraints.txt -e '.[controller,train,examples,dev]'
	@touch $@ $(VENV)/.demo
