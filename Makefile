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
# Empty means unset: every process of a test would compile the tree, and pytest rewrite each assertion, again and again.
export PYTHONDONTWRITEBYTECODE :=

# What Triton's interpreter can run of the tests for GPUs.
INTERPRETED := $(addprefix tests/gpu/test_,sampler_gpu.py step_io_gpu.py window_io_gpu.py draft_kernels_gpu.py \
  fused_rounds_gpu.py rotation.py block_copy_gpu.py ngram_gpu.py trees_gpu.py)
PART ?= portable fuzz batches long kills faults network serve clients slurm

.PHONY: help demo install check test test-all test-slurm-ci test-gpu measure-gpu diagram clean static quick interpreted pytest trace

help:  ## this list
	@sed -nE 's/^([a-z-]+):[^#]*  ## (.*)/\1\t\2/p' Makefile | while IFS="$$(printf '\t')" read -r name text; do \
	  printf '%-14s %s\n' "$$name" "$$text"; done

demo: $(STAMP)  ## two ranks complete the demo prompts, then again with a drafter: on two GPUs with NCCL, on a CPU with gloo; one GPU is one rank
	$(BIN)/python -m torch.distributed.run --standalone --nproc-per-node $(DEMO_RANKS) -m launch generate \
	  --model models/demo --input models/demo/prompts.jsonl --output out/demo.jsonl --overwrite --show 3
	$(BIN)/python -m torch.distributed.run --standalone --nproc-per-node $(DEMO_RANKS) -m launch generate \
	  --model models/demo --input models/demo/prompts.jsonl --output out/demo-drafted.jsonl --overwrite \
	  --speculative-config '{"method": "mtp", "model": "models/demo/mtp", "num_speculative_tokens": 3}'

install: $(STAMP)  ## a virtual environment in .venv with everything that the others need

# Python compiles a module when it is first imported, which most of what comes here never is.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --no-compile $(PINNED) torch
	$(BIN)/python -m pip install -q --no-compile $(PINNED) -e '.[$(EXTRAS)]'
	touch $(STAMP)

check: $(STAMP)  ## for every edit: lint, types, the ratchet and quick tests, in a minute and a half
	$(MAKE) --no-print-directory --output-sync -j 2 static quick

test: $(STAMP)  ## for every change that lands, and what CI runs: check, all tests, interpreted kernels, the trace of a turn
	$(MAKE) --no-print-directory --output-sync -j 2 static interpreted
	$(MAKE) --no-print-directory pytest trace

static: $(STAMP)  ## ruff, mypy (strict) and the ratchet: nothing frozen in tests/tools/baseline.json is worse
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tests/tools/measure.py --check tests/tools/baseline.json
	$(BIN)/mypy

quick: $(STAMP)  ## tests of at most 0.1 s, in the rooms that tests/budget.py lists
	$(BIN)/python -m pytest -q -n 2 -m quick

interpreted: $(STAMP)  ## small kernels in Triton's interpreter: the sampler, ends of a step, rotation, forks, lookups, draft trees
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -q -n 2 -m gpu $(INTERPRETED)

# Three workers on two cores: jobs of several ranks, servers and faults wait for one another a quarter of their time.
pytest: $(STAMP)  ## the tests on two cores
	$(BIN)/python -m pytest -n 3 --dist worksteal

trace: $(STAMP)  ## files and stays of a decode turn against the ratchet's baseline
	$(BIN)/python tests/tools/measure.py --trace --check tests/tools/baseline.json

test-all: $(addprefix all-,$(PART))  ## long forms, hours: PART="portable fuzz batches long kills faults network serve clients slurm", or some of them

all-portable: $(STAMP)  # what computes floats, as other CPUs would: each vector width, 1 and 4 threads, a busy machine
	$(BIN)/python -m tests.portable

all-fuzz: $(STAMP)  # the scheduler's fuzzer: 1,000,000 seeds on every core
	$(BIN)/python -m tests.runtime.schedule.fuzz --seeds 1000000
	$(BIN)/python -m tests.runtime.schedule.session_fuzz --seeds 200000

all-batches: $(STAMP)  # 1,000 random batches through the whole front end against the plainest engine: ten minutes
	$(BIN)/python -m tests.runtime.engine.random_batches --seeds 1000

all-long: $(STAMP)  # more seeds, sizes, models and mutants of what `make test` has: hours
	$(BIN)/python -m pytest -n 2 --dist worksteal -m 'long and not slurm and not gpu and not multigpu'

all-kills: $(STAMP)  # 300 kills of generate and of sweeps, 20,210 bad lines, 20,000 mutated weight files: ten minutes
	$(BIN)/python -m tests.launch.generate.kill_anywhere --kills 240 --seed 1
	$(BIN)/python -m tests.launch.generate.kill_anywhere --kills 60 --seed 1 --engine real
	$(BIN)/python -m tests.launch.sweep.kill_sweep --kills 150 --seed 1
	$(BIN)/python -m tests.launch.sweep.kill_sweep --kills 150 --seed 1 --under slurm
	$(BIN)/python -m tests.launch.generate.bad_input --generated 20000 --long-line 100
	$(BIN)/python -m tests.models.weights_fuzz --mutations 20000

all-faults: $(STAMP)  # every fault, phase and rank under torchrun: the table goes to out/faults.jsonl
	rm -f out/faults.jsonl
	$(BIN)/python -m tests.faults

all-network: $(STAMP)  # two nodes over links that are slow, lossy or cut: minutes, as root
	LOCKSTRIDE_NETWORK_TESTS=required $(BIN)/python -m pytest tests/network
	$(BIN)/python -m tests.network

all-serve: $(STAMP)  # the server under 50,000 requests, 50,000 clients that leave, 20,000 broken requests, 10,000 at once
	$(BIN)/python -m tests.launch.serve.soak --requests 50000 --aborts 50000 --malformed 20000 --max-queued 500
	$(BIN)/python -m tests.launch.serve.soak --overload 1200 --answers 12 --max-queued 10000
	$(BIN)/python -m tests.launch.serve.soak --engine real --traces 300 --aborts 5000 --overload 2000 --num-blocks 160

all-clients: $(STAMP)  # real clients and load tools against the server, each in a venv of its own; needs a package index
	$(BIN)/python -m tests.launch.serve.clients

# These start a real Slurm (Debian: apt-get install slurmctld slurmd slurm-client munge iproute2) and run one after the
# other. They skip where Slurm is not installed, unless LOCKSTRIDE_SLURM_TESTS=required.
all-slurm: $(STAMP)  # jobs of slurm/ on a throw-away Slurm: more than 40 ways to run and to end, ten minutes
	$(BIN)/python -m pytest -m slurm tests/slurm

test-slurm-ci: $(STAMP)  ## six of the jobs of `make test-all PART=slurm`: start, two nodes, array and requeue, signal, serve, resume
	$(BIN)/python -m pytest -m 'slurm and not long' tests/slurm

test-gpu:  ## on a machine with GPUs; uses the Python that holds its torch
	$(PYTHON) -m pytest -p no:cacheprovider -m 'gpu or multigpu' tests

measure-gpu:  ## every GPU figure of docs/measurements.md, into out/measure; PARTS="latency-8b ..." for some of them
	$(PYTHON) -m tests.bench.measure --out out/measure $(if $(PARTS),--parts $(PARTS))

diagram: $(STAMP)  ## redraws what the documents show of the code
	$(BIN)/python -m tests.tools.diagrams.scheduling
	$(BIN)/python -m tests.tools.diagrams.speculation
	$(BIN)/python -m tests.tools.diagrams.recurrent
	$(BIN)/python -m tests.tools.diagrams.control
	$(BIN)/python -m tests.tools.diagrams.timeline
	$(BIN)/python -m tests.tools.diagrams.daemon
	$(BIN)/python -m tests.tools.diagrams.embedding

clean:  ## what tests and tools have left
	rm -rf out .pytest_cache .mypy_cache .ruff_cache
