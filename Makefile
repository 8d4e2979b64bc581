# Two commands matter to a newcomer: `make demo` and `make test`. Everything else is for people who work on Lockstride:
# `make help` lists it.
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

.PHONY: help demo install test lint typecheck ratchet interpreted pytest test-portable fuzz test-batches test-groups test-long test-serve test-clients test-faults test-kill test-network test-slurm test-slurm-ci test-gpu measure-gpu bench-schedule diagram clean

help:  ## this list
	@sed -nE 's/^([a-z-]+):[^#]*  ## (.*)/\1\t\2/p' Makefile | while IFS="$$(printf '\t')" read -r name text; do \
	  printf '%-16s %s\n' "$$name" "$$text"; done

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

# mypy is one process, and so is most of what is interpreted: side by side no core waits for the other.
test: lint  ## what CI runs
	$(MAKE) --no-print-directory --output-sync -j 2 typecheck interpreted
	$(MAKE) --no-print-directory pytest

lint: $(STAMP)  ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

typecheck: $(STAMP)  ## mypy, strict, over everything
	$(BIN)/mypy

ratchet: $(STAMP)  ## size and words against tests/tools/baseline.json: nothing frozen is worse
	$(BIN)/python tests/tools/measure.py --check tests/tools/baseline.json

interpreted: $(STAMP)  ## kernels of the sampler, of a step's ends, of a prefill's rotation, of forks, of lookups and of draft trees in Triton's interpreter
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -q -n 2 -m gpu tests/gpu/test_sampler_gpu.py tests/gpu/test_step_io_gpu.py tests/gpu/test_window_io_gpu.py tests/gpu/test_draft_kernels_gpu.py tests/gpu/test_fused_rounds_gpu.py tests/gpu/test_rotation.py tests/gpu/test_block_copy_gpu.py tests/gpu/test_ngram_gpu.py tests/gpu/test_trees_gpu.py

# Three workers on two cores: jobs of several ranks, servers and faults wait for one another a quarter of their time.
pytest: $(STAMP)  ## the tests on two cores
	$(BIN)/python -m pytest -n 3 --dist worksteal

test-portable: $(STAMP)  ## what computes floats, as other CPUs would: each vector width, 1 and 4 threads, a busy machine
	$(BIN)/python -m tests.portable

fuzz: $(STAMP)  ## the long form of the scheduler fuzzer: 1,000,000 seeds on every core
	$(BIN)/python -m tests.runtime.schedule.fuzz --seeds 1000000
	$(BIN)/python -m tests.runtime.schedule.session_fuzz --seeds 200000

test-kill: $(STAMP)  ## 300 kills of generate and of sweeps, 20,210 bad lines, 20,000 mutated weight files: ten minutes
	$(BIN)/python -m tests.launch.generate.kill_anywhere --kills 240 --seed 1
	$(BIN)/python -m tests.launch.generate.kill_anywhere --kills 60 --seed 1 --engine real
	$(BIN)/python -m tests.launch.sweep.kill_sweep --kills 150 --seed 1
	$(BIN)/python -m tests.launch.sweep.kill_sweep --kills 150 --seed 1 --under slurm
	$(BIN)/python -m tests.launch.generate.bad_input --generated 20000 --long-line 100
	$(BIN)/python -m tests.models.weights_fuzz --mutations 20000

test-batches: $(STAMP)  ## 1,000 random batches through the whole front end against the plainest engine: ten minutes
	$(BIN)/python -m tests.runtime.engine.random_batches --seeds 1000

test-groups: $(STAMP)  ## data-parallel groups: the lifecycle suite at every depth, 450 random lives: fifteen minutes
	$(BIN)/python -m pytest -n 2 -m long tests/runtime/engine/test_dealt_groups.py tests/runtime/engine/test_groups_lifecycle.py

test-long: $(STAMP)  ## more seeds, sizes and models of what `make test` has, but Slurm: hours
	$(BIN)/python -m pytest -n 2 --dist worksteal -m 'long and not slurm and not gpu and not multigpu'

test-serve: $(STAMP)  ## the server under 50,000 requests, 50,000 clients that leave, 20,000 broken requests, 10,000 at once
	$(BIN)/python -m tests.launch.serve.soak --requests 50000 --aborts 50000 --malformed 20000 --max-queued 500
	$(BIN)/python -m tests.launch.serve.soak --overload 1200 --answers 12 --max-queued 10000
	$(BIN)/python -m tests.launch.serve.soak --engine real --traces 300 --aborts 5000 --overload 2000 --num-blocks 160

test-clients: $(STAMP)  ## real clients and load tools against the server, each in a venv of its own; needs a package index
	$(BIN)/python -m tests.launch.serve.clients

test-faults: $(STAMP)  ## every fault, phase and rank under torchrun; the table of docs/measurements.md
	rm -f out/faults.jsonl
	$(BIN)/python -m tests.faults

measure-gpu:  ## every GPU figure of docs/measurements.md, into out/measure; PARTS="latency-8b ..." for some of them
	$(PYTHON) -m tests.bench.measure --out out/measure $(if $(PARTS),--parts $(PARTS))

test-network: $(STAMP)  ## two nodes over links that are slow, lossy or cut: minutes, as root; the tables of docs/measurements.md
	LOCKSTRIDE_NETWORK_TESTS=required $(BIN)/python -m pytest tests/network
	$(BIN)/python -m tests.network

bench-schedule: $(STAMP)  ## plans a second of the scheduler alone
	$(BIN)/python -m tests.runtime.schedule.bench

# Not part of `make test`: these start a real Slurm and must run one after the other. They skip where Slurm is not
# installed (Debian: apt-get install slurmctld slurmd slurm-client munge iproute2), unless LOCKSTRIDE_SLURM_TESTS=required.
test-slurm: $(STAMP)  ## jobs of slurm/ on a throw-away Slurm: more than 40 ways to run and to end, about ten minutes
	$(BIN)/python -m pytest -m slurm tests/slurm

test-slurm-ci: $(STAMP)  ## those of them that CI has time for, about three minutes
	$(BIN)/python -m pytest -m 'slurm and not long' tests/slurm

test-gpu:  ## on a machine with GPUs; uses the Python that holds its torch
	$(PYTHON) -m pytest -p no:cacheprovider -m 'gpu or multigpu' tests

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
