# Two commands matter to a newcomer: `make demo` and `make test`. People who work on Lockstride type `make check` after
# each edit and `make test` before a change lands; `make help` lists the rest.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
GPUS := $(shell nvidia-smi -L 2>/dev/null | wc -l)
HAS_GPU := $(filter-out 0,$(GPUS))
DEMO_RANKS := $(if $(filter 1,$(GPUS)),1,2)
comma := ,
EXTRAS := $(if $(HAS_GPU),cuda$(comma)dev$(comma)serve,dev$(comma)serve)
PINNED := $(if $(HAS_GPU),,-c constraints.txt)
# Empty means unset. Without .pyc files each process of a test would compile the tree again, and pytest each assertion.
export PYTHONDONTWRITEBYTECODE :=
# What Triton compiled for tests, by all that it was made of: a kernel that did not change is compiled once.
export LOCKSTRIDE_TEST_CACHE ?= $(CURDIR)/out/cache

# Tests for GPUs that Triton's interpreter can run on a CPU.
INTERPRETED := $(addprefix tests/gpu/test_,sampler_gpu.py token_tables_gpu.py step_io_gpu.py window_io_gpu.py draft_kernels_gpu.py \
  fused_rounds_gpu.py rotation.py block_copy_gpu.py ngram_gpu.py trees_gpu.py)
PART ?= portable fuzz batches long kills faults network serve clients slurm

.PHONY: help demo install check test test-all test-slurm-ci test-gpu measure-gpu diagram clean static quick interpreted pytest trace

help:  ## lists the targets
	@sed -nE 's/^([a-z-]+):[^#]*  ## (.*)/\1\t\2/p' Makefile | while IFS="$$(printf '\t')" read -r name text; do \
	  printf '%-14s %s\n' "$$name" "$$text"; done

demo: $(STAMP)  ## two ranks complete the demo prompts, then again with a drafter: on two GPUs with NCCL, without a GPU with gloo; one GPU runs one rank
	$(BIN)/python -m torch.distributed.run --standalone --nproc-per-node $(DEMO_RANKS) -m launch generate \
	  --model models/demo --input models/demo/prompts.jsonl --output out/demo.jsonl --overwrite --show 3
	$(BIN)/python -m torch.distributed.run --standalone --nproc-per-node $(DEMO_RANKS) -m launch generate \
	  --model models/demo --input models/demo/prompts.jsonl --output out/demo-drafted.jsonl --overwrite \
	  --speculative-config '{"method": "mtp", "model": "models/demo/mtp", "num_speculative_tokens": 3}'

install: $(STAMP)  ## creates the virtual environment .venv with all packages that the other targets need

# --no-compile: most of these modules are never imported, and Python compiles the others at their first import.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --no-compile $(PINNED) torch
	$(BIN)/python -m pip install -q --no-compile $(PINNED) -e '.[$(EXTRAS)]'
	touch $(STAMP)

check: $(STAMP)  ## after every edit: static and quick, in a minute and a half on two cores
	$(MAKE) --no-print-directory --output-sync -j 2 static quick

# BESIDE: other targets to run while pytest does, as .ci/run wants it.
test: $(STAMP)  ## before a change lands, and in CI: static, interpreted, pytest and trace, in ten minutes on two cores
	$(MAKE) --no-print-directory --output-sync -j 3 static interpreted trace
	$(MAKE) --no-print-directory -j 3 pytest $(BESIDE)

static: $(STAMP)  ## ruff, mypy (strict), and the ratchet: size and wording are no worse than tests/tools/baseline.json
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tests/tools/measure.py --check tests/tools/baseline.json
	$(BIN)/mypy

quick: $(STAMP)  ## tests of at most 0.1 s of CPU: the folders and files that tests/budget.py lists
	$(BIN)/python -m pytest -q -n 2 -m quick

interpreted: $(STAMP)  ## small Triton kernels in its interpreter: sampler, start and end of a step, RoPE, block copies, n-grams, draft trees
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -q -n 2 -m gpu $(INTERPRETED)

# Three workers on two cores: tests of several ranks, servers and faults wait a quarter of their time.
pytest: $(STAMP)  ## all tests for CPUs
	$(BIN)/python -m pytest -n 3 --dist worksteal

trace: $(STAMP)  ## the ratchet for one decode turn: files that it runs through, and moves between them
	$(BIN)/python tests/tools/measure.py --trace --check tests/tools/baseline.json

test-all: $(addprefix all-,$(PART))  ## long tests, hours: PART="portable fuzz batches long kills faults network serve clients slurm", or some of them

all-portable: $(STAMP)  # tests that compute floats, as on other CPUs: each vector width; 4 threads on a busy machine
	$(BIN)/python -m tests.portable

all-fuzz: $(STAMP)  # the scheduler's fuzzer, 50,000 seeds on every core, and 50,000 stories of sessions: half an hour
	$(BIN)/python -m tests.runtime.schedule.fuzz --seeds 50000
	$(BIN)/python -m tests.runtime.schedule.session_fuzz --seeds 50000

all-batches: $(STAMP)  # 500 random batches through the whole front end against the serial engine: ten minutes
	$(BIN)/python -m tests.runtime.engine.random_batches --seeds 500

all-long: $(STAMP)  # the tests of `make test` with more seeds, sizes, models and mutants: hours
	$(BIN)/python -m pytest -n 2 --dist worksteal -m 'long and not slurm and not gpu and not multigpu'

all-kills: $(STAMP)  # 300 kills of generate, 150 of sweeps, 20,210 bad lines, 20,000 mutated weight files: ten minutes
	$(BIN)/python -m tests.launch.generate.kill_anywhere --kills 240 --seed 1
	$(BIN)/python -m tests.launch.generate.kill_anywhere --kills 60 --seed 1 --engine real
	$(BIN)/python -m tests.launch.sweep.kill_sweep --kills 75 --seed 1
	$(BIN)/python -m tests.launch.sweep.kill_sweep --kills 75 --seed 1 --under slurm
	$(BIN)/python -m tests.launch.generate.bad_input --generated 20000 --long-line 100
	$(BIN)/python -m tests.models.weights_fuzz --mutations 20000

all-faults: $(STAMP)  # every fault, phase and rank under torchrun: the table goes to out/faults.jsonl
	rm -f out/faults.jsonl
	$(BIN)/python -m tests.faults

all-network: $(STAMP)  # two nodes over links that are slow, lossy or cut: minutes, as root
	LOCKSTRIDE_NETWORK_TESTS=required $(BIN)/python -m pytest tests/network
	$(BIN)/python -m tests.network

all-serve: $(STAMP)  # the server under 20,000 requests, 20,000 clients that leave, 10,000 broken requests, 10,000 at once
	$(BIN)/python -m tests.launch.serve.soak --requests 20000 --aborts 20000 --malformed 10000 --max-queued 500
	$(BIN)/python -m tests.launch.serve.soak --overload 1200 --answers 12 --max-queued 10000
	$(BIN)/python -m tests.launch.serve.soak --engine real --traces 300 --aborts 5000 --overload 2000 --num-blocks 160

all-clients: $(STAMP)  # real clients and load tools against the server, each in a separate venv; needs a package index
	$(BIN)/python -m tests.launch.serve.clients

# These start a real Slurm (Debian: apt-get install slurmctld slurmd slurm-client munge iproute2) and run one after the
# other. They skip where Slurm is not installed, unless LOCKSTRIDE_SLURM_TESTS=required.
all-slurm: $(STAMP)  # jobs of slurm/ on a throw-away Slurm: more than 40 ways to run and to end, ten minutes
	$(BIN)/python -m pytest -m slurm tests/slurm

test-slurm-ci: $(STAMP)  ## six of the jobs of `make test-all PART=slurm`: start, two nodes, array and requeue, signal, serve, resume
	$(BIN)/python -m pytest -m 'slurm and not long' tests/slurm

test-gpu:  ## the tests for GPUs; runs PYTHON (python3), which must have torch with CUDA and pytest
	$(PYTHON) -m pytest -p no:cacheprovider -m 'gpu or multigpu' tests

measure-gpu:  ## benchmarks on this host's GPUs, into out/measure (docs/measurements.md#reproduce); PARTS="latency-8b ..." for some of them
	$(PYTHON) -m tests.bench.measure --out out/measure $(if $(PARTS),--parts $(PARTS))

diagram: $(STAMP)  ## redraws the diagrams and tables of docs/ that come from the code
	$(BIN)/python -m tests.tools.diagrams.scheduling
	$(BIN)/python -m tests.tools.diagrams.speculation
	$(BIN)/python -m tests.tools.diagrams.recurrent
	$(BIN)/python -m tests.tools.diagrams.control
	$(BIN)/python -m tests.tools.diagrams.timeline
	$(BIN)/python -m tests.tools.diagrams.daemon
	$(BIN)/python -m tests.tools.diagrams.embedding

clean:  ## removes what tests and tools wrote: out/ and caches
	rm -rf out .pytest_cache .mypy_cache .ruff_cache
