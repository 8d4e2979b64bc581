"""GPU tests and benchmarks of docs/measurements.md from one command: each part in a separate process, with a limit.

    python3 -m tests.bench.measure --out FOLDER                 # the parts for this many GPUs, most wanted first
    python3 -m tests.bench.measure --out FOLDER --parts engine-tests latency-8b --seconds 540
    python3 -m tests.bench.measure --out FOLDER --gpus 1        # one after the other: the host to itself
    python3 -m tests.bench.measure --out FOLDER --restore SMALL --archive SMALL --caches
    python3 -m tests.bench.measure --list

Knows: which commands there are, on how many GPUs each runs and how long it may take, what is kept of it.
Does not know: what they measure, or how they share the host's GPUs (lanes.py): parts that need fewer than there are run
side by side. A part that fails or runs out of time does not keep the others from running; one for which too little of
``--seconds`` or too few GPUs are left is not begun, and named at the end.

FOLDER gets summary.md (what ran, exit codes, seconds, what ran beside it: they share the host's cores), a log of each
part, and the benchmarks' own files. SMALL, for a machine from which few files come back, gets the summary, logs.tar.gz
and results.tar.gz after each part and, with --caches, at the end caches.tar.gz: compiled kernels, which --restore puts
where the next machine looks for them.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.bench.archives import pack, pack_kernels, unpack_kernels
from tests.bench.lanes import Job, Outcome, Ran, run_jobs
from tests.bench.round_commands import round_commands

ROOT = Path(__file__).resolve().parents[2]
LAST_LINES = 40
_BENCH = "-m launch bench"
_TESTS = " ".join(
    f"tests/gpu/test_{name}.py"
    for name in (
        "generate_gpu",
        "observe_gpu",
        "prompt_logprobs_gpu",
        "device_gpu",
        "sampler_gpu",
        "models",
        "doctor_gpu",
    )
)
_KERNEL_TESTS = " ".join(
    f"tests/gpu/test_{name}.py" for name in ("kernels", "balanced_attention", "expert_kernels", "rotation")
)
_PYTEST = "-m pytest -p no:cacheprovider -q -W ignore --durations 10"
_OF_TWO, _OF_FOUR = (f"-m multigpu -k {ranks}-ranks" for ranks in ("two", "four"))
_BOTH = "--num-warmups 1 --num-iters 3 --roofline --result-dir {out}/results"
_PROFILE = "--batch-size 1,32,256 --num-warmups 1 --num-iters 1 --profile --result-dir {out}/results"
_FEW = "--decode-buckets 1,8,32,128,256"  # graphs for the measured batches only
# The requests that the other engines of docs/peers.json were measured with.
_LOAD = "--max-num-seqs 256 --result-dir {out}/results"
_MIXED = f"--no-prefix-caching --num-prompts 1024 --seed 5 {_LOAD}"
_CLOSED = f"--no-prefix-caching --max-concurrency 16,64,256 --seed 6 {_LOAD}"
_LONG = "--no-prefix-caching --dataset-name random --input-len 32000 --output-len 512 --num-prompts 64 --num-warmups 1"
_LONG_TTFT = "--batch-size 1,8 --input-len 32000 --output-len 65 --max-model-len 32768 --num-iters 2"
_PREFIX = "--dataset-name prefix --prefix-len 1900 --suffix-len 148 --num-prefixes 1 --num-prompts 64"
_EXPERTS = f"{_BENCH} {{}} --model qwen3-30b-a3b --expert-parallel"
_TILES = "-m tests.bench.experts --out {out}/results --compile-workers 13"
_GROUPS = f"{_BENCH} latency --model qwen3-30b-a3b --data-parallel-size 2"
_THREE = "--decode-buckets 1,32,256"
_ROUNDS = {
    name: f"{_BENCH} latency {words.replace('{', '{{').replace('}', '}}')} --result-dir {{out}}/results"
    for name, words in round_commands().items()
}


@dataclass(frozen=True, slots=True)
class Part:
    """``command`` is what Python is given. ``seconds``: its limit. ``torchrun``: it is one rank of ``gpus``."""

    name: str
    gpus: int
    seconds: int
    command: str
    torchrun: bool = False

    def argv(self, out: Path) -> list[str]:
        words = shlex.split(self.command.format(out=out))
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(self.gpus)]
        return [sys.executable, *(launcher if self.torchrun else ()), *words]


PARTS = (
    # one GPU
    Part("doctor", 1, 60, "-m launch doctor"),
    Part("engine-tests", 1, 240, f"{_PYTEST} -m gpu tests/gpu/test_engine_gpu.py tests/gpu/test_stall.py"),
    Part("latency-8b", 1, 120, f"{_BENCH} latency --model qwen3-8b {_FEW} {_BOTH}"),
    Part("latency-0.6b", 1, 80, f"{_BENCH} latency --model qwen3-0.6b {_FEW} {_BOTH}"),
    Part("mixed-8b", 1, 150, f"{_BENCH} serve --model qwen3-8b {_MIXED}"),
    Part("mixed-0.6b", 1, 120, f"{_BENCH} serve --model qwen3-0.6b {_MIXED}"),
    Part("closed-8b", 1, 200, f"{_BENCH} serve --model qwen3-8b --num-prompts 384 {_CLOSED}"),
    Part("closed-8b-2048", 1, 540, f"{_BENCH} serve --model qwen3-8b {_CLOSED}"),
    Part("paced-8b", 1, 500, f"{_BENCH} serve --model qwen3-8b --no-prefix-caching --request-rate 8,16,24,32 {_LOAD}"),
    Part("long-8b", 1, 300, f"{_BENCH} serve --model qwen3-8b {_LONG} {_LOAD}"),
    Part("long-ttft-8b", 1, 200, f"{_BENCH} latency --model qwen3-8b {_LONG_TTFT} --result-dir {{out}}/results"),
    Part("ragged-8b", 1, 300, f"{_BENCH} serve --model qwen3-8b --no-prefix-caching --dataset-name long {_LOAD}"),
    Part("prefix-8b", 1, 120, f"{_BENCH} serve --model qwen3-8b {_PREFIX} {_LOAD}"),
    Part("profile-8b", 1, 90, f"{_BENCH} latency --model qwen3-8b {_THREE} {_PROFILE}"),
    Part("generate", 1, 280, f"{_PYTEST} -s -m gpu tests/gpu/test_generate_gpu.py"),
    Part(
        "observe-tests", 1, 150, f"{_PYTEST} -m gpu tests/gpu/test_observe_gpu.py tests/gpu/test_prompt_logprobs_gpu.py"
    ),
    Part("kernel-tests", 1, 240, f"{_PYTEST} -n 8 -m gpu {_KERNEL_TESTS}"),
    Part("prefill-tests", 1, 200, f"{_PYTEST} -n 8 -m gpu -k not(flashinfer) tests/gpu/test_prefill_kernels.py"),
    Part("prefill-tests-flashinfer", 1, 240, f"{_PYTEST} -n 4 -m gpu -k flashinfer tests/gpu/test_prefill_kernels.py"),
    Part("gpu-tests", 1, 240, f"{_PYTEST} -n 4 -m gpu {_TESTS}"),
    Part("device-tests", 1, 150, f"{_PYTEST} -m gpu tests/gpu/test_device_gpu.py tests/gpu/test_sampler_gpu.py"),
    Part("model-tests", 1, 240, f"{_PYTEST} -m gpu tests/gpu/test_models.py tests/gpu/test_doctor_gpu.py"),
    Part("experts", 1, 160, f"{_TILES} --rows 1 8 --tiles 32 128 256"),
    Part("experts-mixtral", 1, 160, f"{_TILES} --shape mixtral-8x7b --rows 1 8 --tiles 32 128 256 2048"),
    Part("experts-kernels", 1, 90, f"{_TILES} --kernels --rows 1 2 4 8 12 256 1024 2048 4096 8192"),
    Part(
        "mixtral-kernels", 1, 90, f"{_TILES} --shape mixtral-8x7b --kernels --rows 1 2 4 512 1024 2048 3000 4096 8192"
    ),
    Part("latency-30b-a3b", 1, 240, f"{_BENCH} latency --model qwen3-30b-a3b {_FEW} {_BOTH}"),
    Part("startup-8b", 1, 90, f"{_BENCH} latency --model qwen3-8b --batch-size 1 --num-iters 1 --num-warmups 0"),
    Part("cold-8b", 1, 120, "-m tests.bench.cold_start --out {out}"),
    Part("prefill-attention", 1, 100, "-m tests.bench.prefill --out {out}/results"),
    Part("host", 1, 120, "-m tests.runtime.engine.bench_host --device cuda"),
    Part("filters", 1, 90, "-m tests.bench.sampler"),
    Part("sampler", 1, 120, "-m tests.bench.sampler --variants"),
    *(  # each leaves a table, which merge_choices.py takes over; what is cut off goes on in the next run
        Part(
            f"tune-{model}{f'-tp{ranks}' if ranks > 1 else ''}",
            1,
            530,
            f"-m launch tune --model qwen3-{model} --tensor-parallel-size {ranks} --budget-minutes 8 "
            f"--out {{out}}/results/tune-{model}-tp{ranks}",
        )
        for model, ranks in (
            *(("8b", 1), ("0.6b", 1), ("30b-a3b", 1), ("32b", 1)),
            *((model, ranks) for model in ("8b", "32b") for ranks in (2, 4, 8)),
        )
    ),
    Part("windows-in-layer", 1, 240, "-m tests.bench.window_attention --lengths 1150 --out {out}/results"),
    Part("symmetric-shared", 1, 240, f"{_PYTEST} -m gpu tests/gpu/test_symmetric.py"),
    Part("exchange-shared", 1, 240, f"{_PYTEST} -m gpu tests/gpu/test_exchange_gpu.py"),
    *(Part(name, 1, 120, command) for name, command in _ROUNDS.items()),
    # two GPUs
    Part("all-reduce", 2, 90, "-m tests.bench.all_reduce --out {out}/results", True),
    Part(
        "tune-all-reduce",
        2,
        90,
        "-m launch tune --model qwen3-8b --parts all-reduce --out {out}/results/tune-all-reduce-2",
        True,
    ),
    Part("exchange", 2, 120, "-m tests.bench.exchange --out {out}/results", True),
    Part("exchange-tests", 2, 120, f"{_PYTEST} -m multigpu tests/gpu/test_exchange_gpu.py"),
    Part("symmetric", 2, 90, f"{_PYTEST} -m multigpu tests/gpu/test_symmetric.py"),
    Part("pushed", 2, 150, f"{_PYTEST} {_OF_TWO} tests/gpu/test_pushed_all_reduce_gpu.py"),
    Part("engine-tests-tp2", 2, 120, f"{_PYTEST} -s {_OF_TWO} tests/gpu/test_engine_ranks_gpu.py"),
    Part("generate-tp2", 2, 280, f"{_PYTEST} -s {_OF_TWO} tests/gpu/test_generate_gpu.py"),
    Part("models-tp2", 2, 120, f"{_PYTEST} -m multigpu tests/gpu/test_models.py"),
    Part("experts-tests", 2, 180, f"{_PYTEST} {_OF_TWO} tests/gpu/test_experts_gpu.py"),
    Part("latency-8b-tp2", 2, 120, f"{_BENCH} latency --model qwen3-8b {_FEW} {_BOTH}", True),
    Part("profile-8b-tp2", 2, 90, f"{_BENCH} latency --model qwen3-8b {_THREE} {_PROFILE}", True),
    Part("profile-30b-ep2", 2, 120, f"{_EXPERTS.format('latency')} {_THREE} {_PROFILE}", True),
    Part("latency-30b-ep2", 2, 130, f"{_EXPERTS.format('latency')} {_FEW} {_BOTH}", True),
    Part("mixed-30b-ep2", 2, 240, f"{_EXPERTS.format('serve')} {_MIXED}", True),
    Part(
        "latency-30b-dp2",
        2,
        120,
        f"{_GROUPS} --batch-size 32,256 --max-num-seqs 128 --decode-buckets 16,128 {_BOTH}",
        True,
    ),
    Part("faults-nccl", 2, 200, f"{_PYTEST} -s {_OF_TWO} tests/gpu/test_faults_gpu.py"),
    Part("agreement", 2, 100, "-m tests.bench.agreement --out {out}/results/agreement.json"),
    Part("latency-32b-tp2", 2, 240, f"{_BENCH} latency --model qwen3-32b {_FEW} {_BOTH}", True),
    *(Part(f"{name}-tp2", 2, 150, command, True) for name, command in _ROUNDS.items()),
    # four and eight
    Part("all-reduce-4", 4, 90, "-m tests.bench.all_reduce --out {out}/results", True),
    Part(
        "tune-all-reduce-4",
        4,
        90,
        "-m launch tune --model qwen3-8b --parts all-reduce --out {out}/results/tune-all-reduce-4",
        True,
    ),
    Part("exchange-4", 4, 120, "-m tests.bench.exchange --out {out}/results", True),
    Part("exchange-tests-4", 4, 150, f"{_PYTEST} -m multigpu tests/gpu/test_exchange_gpu.py"),
    Part("symmetric-4", 4, 120, f"{_PYTEST} -m multigpu tests/gpu/test_symmetric.py"),
    Part("engine-tests-tp4", 4, 150, f"{_PYTEST} -s {_OF_FOUR} tests/gpu/test_engine_ranks_gpu.py"),
    Part("generate-tp4", 4, 280, f"{_PYTEST} -s {_OF_FOUR} tests/gpu/test_generate_gpu.py"),
    Part("experts-tests-4", 4, 180, f"{_PYTEST} {_OF_FOUR} tests/gpu/test_experts_gpu.py"),
    Part("faults-4", 4, 150, f"{_PYTEST} -s {_OF_FOUR} tests/gpu/test_faults_gpu.py"),
    Part("pushed-4", 4, 150, f"{_PYTEST} {_OF_FOUR} tests/gpu/test_pushed_all_reduce_gpu.py"),
    Part("symmetric-8", 8, 150, f"{_PYTEST} -m multigpu tests/gpu/test_symmetric.py"),
    Part("exchange-8", 8, 150, "-m tests.bench.exchange --out {out}/results", True),
    *(
        Part(f"latency-{model}-tp{gpus}", gpus, 240, f"{_BENCH} latency --model qwen3-{model} {_FEW} {_BOTH}", True)
        for gpus in (4, 8)
        for model in ("8b", "32b")
    ),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for what comes of it")
    parser.add_argument("--parts", nargs="+", metavar="NAME", help="which, in this order (default: for these GPUs)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="in all, begun parts included")
    parser.add_argument(
        "--gpus", type=int, metavar="N", help="use N (default: all of this host; 1 where none is found)"
    )
    parser.add_argument("--archive", type=Path, metavar="SMALL", help="folder for the same as a few archives")
    parser.add_argument("--caches", action="store_true", help="compiled kernels into the archive, too")
    parser.add_argument("--restore", type=Path, metavar="SMALL", help="take over its compiled kernels first")
    parser.add_argument("--list", action="store_true", help="print the parts and leave")
    args = parser.parse_args()
    if args.list:
        for part in PARTS:
            print(f"{part.name:20} {part.gpus} GPU(s)  {part.seconds:4} s at most  {part.command}")
        return 0
    if args.out is None:
        parser.error("--out is needed: where results go")
    if args.caches and args.archive is None:
        parser.error("--caches go into an archive: name its folder with --archive")
    known = {part.name: part for part in PARTS}
    unknown = [name for name in args.parts or () if name not in known]
    if unknown:
        parser.error(f"there is no part {', '.join(unknown)}: choose from {', '.join(known)}")
    twice = sorted({name for name in args.parts or () if args.parts.count(name) > 1})
    if twice:
        parser.error(f"named more than once: {', '.join(twice)}; a part has one log")
    try:
        gpus = gpu_names(args.gpus)
    except ValueError as error:
        parser.error(str(error))
    parts = [known[name] for name in args.parts] if args.parts else [p for p in PARTS if p.gpus == len(gpus)]
    out = args.out.resolve()
    (out / "logs").mkdir(parents=True, exist_ok=True)
    (out / "results").mkdir(exist_ok=True)
    if args.restore is not None:
        print(f"restored: {unpack_kernels(args.restore, Path.home())} files of compiled kernels", flush=True)
    outcome = run_all(parts, out, gpus, args.seconds, args.archive)
    if args.caches:
        args.archive.mkdir(parents=True, exist_ok=True)
        pack_kernels(args.archive, Path.home())
    if outcome.late:
        print(f"not begun, too late: --parts {' '.join(outcome.late)}")
    if outcome.too_large:
        print(f"not begun, more GPUs needed than the {len(gpus)} in use: --parts {' '.join(outcome.too_large)}")
    return int(bool(outcome.late or outcome.too_large) or any(one.code for one in outcome.ran))


def run_all(
    parts: Sequence[Part], out: Path, gpus: Sequence[str], seconds: float, archive: Path | None = None
) -> Outcome:
    """What ran on ``gpus``, and what was not begun and why. All files grow with each part that ends."""
    summary = out / "summary.md"
    summary.write_text("| part | exit code | s | ran beside it |\n| --- | ---: | ---: | --- |\n")

    def began(job: Job, its: Sequence[str]) -> None:
        print(f"==> {job.name} on GPU {','.join(its)}", flush=True)

    def ended(job: Job, one: Ran) -> None:
        lines = job.log.read_text(errors="replace").replace("\r", "\n").splitlines()[-LAST_LINES:]
        last = f"<== {one.name}: exit code {one.code}, {one.seconds:.0f} s"
        print("\n".join([f"--- last lines of {one.name}", *lines, last]), flush=True)
        with summary.open("a") as file:
            file.write(f"| {one.name} | {one.code} | {one.seconds:.0f} | {', '.join(one.beside) or '-'} |\n")
        if archive is not None:
            archive.mkdir(parents=True, exist_ok=True)
            shutil.copy(summary, archive)
            for folder in ("logs", "results"):
                pack(archive / f"{folder}.tar.gz", out, sorted((out / folder).rglob("*")))

    jobs = [
        Job(part.name, part.gpus, part.seconds, part.argv(out), out / "logs" / f"{part.name}.log") for part in parts
    ]
    path = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    environ = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    return run_jobs(jobs, gpus, seconds, ROOT, environ, began, ended)


def gpu_names(asked: int | None) -> list[str]:
    """The GPUs to use, as CUDA_VISIBLE_DEVICES names them: those it names already, else by number as nvidia-smi counts.

    Raises ValueError for fewer than one, and for more than CUDA_VISIBLE_DEVICES names.
    """
    if asked is not None and asked < 1:
        raise ValueError(f"--gpus is {asked}: at least 1 is needed")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not visible:
        return [str(number) for number in range(asked or _gpus_here() or 1)]
    names = visible.split(",")
    if asked is not None and asked > len(names):
        raise ValueError(
            f"--gpus is {asked}, but CUDA_VISIBLE_DEVICES={visible} names {len(names)}: unset it, or ask less"
        )
    return names[:asked]


def _gpus_here() -> int:
    if shutil.which("nvidia-smi") is None:
        return 0
    found = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return sum(line.startswith("GPU ") for line in found.stdout.splitlines())


if __name__ == "__main__":
    sys.exit(main())
