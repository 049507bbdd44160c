# The two commands of the README, and what keeps the code in order. Each makes .venv when it is missing.
PYTHON ?= python3
BIN := .venv/bin
TORCH := $(shell sed -n 's/^torch==//p' constraints.txt)

.PHONY: demo demo-finetune tutorial first-hour test test-all test-slow test-faults test-rdma test-kill test-fuzz test-torch-suite benchmarks reference site lint format clean
demo: .venv/ready
	$(BIN)/hetctl train

# A random model is taught answers, and asked for them: examples/finetune
demo-finetune: .venv/ready
	$(BIN)/python examples/finetune/demo.py

# Three tests a core side by side, since most of their time is waiting; a file's tests stay together, for what they
# share, and files are begun in the order that tests/conftest.py gives them. Compiled sources are kept even where the
# environment says otherwise: each test's processes import them anew.
PYTEST = PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
WORKERS ?= auto

# What one runs often: all but what is marked slow (pyproject.toml says what that is)
test: .venv/ready
	$(PYTEST) -m 'not slow'

# MINUTES=20: those that can begin within them, other ones at each commit
test-slow: .venv/ready
	$(PYTEST) -m slow $(if $(MINUTES),--minutes $(MINUTES))

test-all: .venv/ready
	$(PYTEST)

# PyTorch's own distributed tests over het, beside gloo on this machine: two hours. The files come from its repository at
# the installed version's tag; TORCH_TESTS=FOLDER names a `test/distributed` that is here already. torchcomms' are among
# them where `make build/torchcomms` came first
TORCH_TESTS ?= build/pytorch/test/distributed
OTHERS = $(CURDIR)/build/torchft:$(CURDIR)/build/torchcomms
test-torch-suite: .venv/ready build/torchft
	$(BIN)/python -c 'import expecttest, parameterized' 2>/dev/null || $(BIN)/pip install --no-deps expecttest parameterized
	test -d $(TORCH_TESTS) || { git clone --quiet --depth 1 --filter=blob:none --sparse https://github.com/pytorch/pytorch \
	  --branch v$$($(BIN)/python -c 'import torch; print(torch.__version__.partition("+")[0])') build/pytorch && \
	  git -C build/pytorch sparse-checkout set test/distributed; }
	PYTHONPATH=$(OTHERS) $(BIN)/python -m tests.torch_suite gloo --tests $(TORCH_TESTS)
	PYTHONPATH=$(OTHERS) $(BIN)/python -m tests.torch_suite het --tests $(TORCH_TESTS)

# In a folder of its own; without its torch, which is the one that is here
build/torchft: .venv/ready
	rm -rf $@
	$(BIN)/pip install -q --target $@ parameterized opentelemetry-api opentelemetry-sdk opentelemetry-exporter-otlp-proto-http
	$(BIN)/pip install -q --target $@ --no-deps torchft

# Built of its source, since nobody packages it; what it needs of Debian, and how to spare the fetching, is said there
build/torchcomms: .venv/ready
	PYTHON=$(CURDIR)/$(BIN)/python tests/rigs/build_torchcomms.sh $@

# Faults planted into runs on namespaced hosts: what is detected, stopped, left
test-faults: .venv/ready
	$(BIN)/python -m tests.faults

# The doctor and the bridge over RDMA, between two virtual machines with Soft-RoCE: Debian as root, qemu-system-x86
# debootstrap busybox-static cpio e2fsprogs, 6 GB of disk, 8 of memory. Builds their image first (five minutes; delete
# build/rdma to build it anew, build/rdma/disk.img after installing hetctl[nixl,mooncake]); the tests take half an hour
SITE = $(shell $(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
test-rdma: .venv/ready
	test -e build/rdma/disk.img || tests/rdma/build_image.sh build/rdma $(SITE)
	HETCTL_RDMA=1 $(BIN)/python -m pytest tests/rdma -v

# A peer killed, stopped or partitioned at 50 random moments of all-reduces: ten minutes; root for partitions
test-kill: .venv/ready
	$(BIN)/python -m tests.bench.kill --moments 50

# A million changed inputs over all that reads files and hosts' words: hours; TARGETS='plan cluster' for some, SEED=2
# for others. What fails is kept in tests/fuzz/corpus, and is a case of `make test` from then on
MUTATIONS ?= 1000000
SEED ?= 1
test-fuzz: .venv/ready
	$(BIN)/python -m tests.fuzz $(TARGETS) --count $(MUTATIONS) --seed $(SEED)

# docs/benchmarks.md and its plots, made of the records in docs/benchmarks/*.json
benchmarks: .venv/ready
	$(BIN)/python -m tests.bench.benchmark_tables

# The pages that are made from the code: files, commands, checks, variables, exit codes, models, devices, recordings
reference: .venv/ready
	$(BIN)/python -m tests.reference

# docs/ as pages to read without a network, in build/site: open index.html. Fails on a link that leads nowhere
site: .venv/ready
	$(BIN)/python -c 'import material' 2>/dev/null || $(BIN)/pip install -q -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# What docs/tutorial.md shows, from two namespaced hosts, and the plans of examples/*/README.md: root, openssh-server, iproute2
tutorial: .venv/ready
	HETCTL_TUTORIAL=write $(BIN)/python -m pytest -q tests/test_tutorial.py tests/test_examples.py -k 'not demo'

# README's lines under a fresh account, with a stopwatch: a new environment, so pip downloads
first-hour: .venv/ready
	$(BIN)/python -m tests.first_hour

lint: .venv/ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: .venv/ready
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf .venv build *.egg-info runs

# Without a GPU: a CPU build that pip finds at hand, otherwise PyTorch's CPU index; never the CUDA packages.
# With one: the build for it, from PyPI (NVIDIA); on AMD install torch for your ROCm into .venv first.
.venv/ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "hetctl needs Python 3.11 or newer; name one with: make PYTHON=python3.11"; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(BIN)/python -c 'import torch' 2>/dev/null || \
	if [ -e /dev/nvidiactl ]; then \
	  echo "installing torch for NVIDIA"; $(BIN)/pip install -q 'torch>=2.11'; \
	elif [ -e /dev/kfd ]; then \
	  echo "install torch >= 2.11 for your ROCm into .venv first: see https://pytorch.org/get-started"; exit 2; \
	else \
	  echo "installing torch $(TORCH) for CPU"; \
	  $(BIN)/pip install -q --no-index --no-deps torch==$(TORCH) 2>/dev/null || \
	  $(BIN)/pip install -q --index-url https://download.pytorch.org/whl/cpu torch==$(TORCH); \
	fi
	@if $(BIN)/python -c 'import torch, sys; sys.exit(torch.version.cuda is not None)' 2>/dev/null; then \
	  $(BIN)/pip install -q -c constraints.txt -e '.[dev]'; \
	else \
	  grep -v '^torch==' constraints.txt > .venv/constraints.txt; \
	  $(BIN)/pip install -q -c .venv/constraints.txt -e '.[dev]'; \
	fi
	@touch $@
