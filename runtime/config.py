"""EngineConfig: every limit and switch of an engine, resolved once and never changed after.

Knows: the options' names, their defaults by device, and which values make sense together.
Does not know: where a value came from (launch/engine_options.py), the model's own limits, or the machine's memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Final, Literal, get_args

from models.row_buckets import decode_ladder
from runtime.schedule.config import LIMIT_RANGES, SessionPolicy, StepLimits
from runtime.speculative_config import SpeculativeConfig, SpeculativeConfigError, merged_speculation, refuse_synthetic

Fp8Activations = Literal["auto", "never", "always"]
LoadFormat = Literal["safetensors", "dummy"]
DType = Literal["auto", "float32", "bfloat16", "float16"]
Device = Literal["cpu", "cuda"]
PrefillWanted = Literal["auto", "flashinfer", "triton"]
KvCacheDtype = Literal["auto", "bfloat16", "fp8", "fp8_e4m3"]

# A field left at this default is filled in __post_init__, from DEVICE_DEFAULTS or another field: no reader sees
# it unfilled.
_FILLED_IN: Final[Any] = None

DEVICE_DEFAULTS: Final[dict[str, dict[str, int]]] = {
    "max_num_seqs": {"cuda": 256, "cpu": 32},
    "block_size": {"cuda": 64, "cpu": 16},
    "max_prefill_tokens": {"cuda": 8192, "cpu": 1024},
}
CPU_CHAIN_DEPTH: Final = 2  # no step of a CPU is timed: it shares its cores with the host

SLOTS_PER_ROW: Final = 2  # successors are seated while the last tokens of those before them are in flight
ROWS_PER_SPARE_SLOT: Final = 8  # where a slot is megabytes of recurrent state: so many successors at once must do

# The options that are limits of a step, with their names there.
_STEP_LIMITS: Final[dict[str, str]] = {
    "max_num_seqs": "rows",
    "block_size": "block_size",
    "max_model_len": "max_model_len",
    "chain_depth": "depth",
    "width": "width",  # a property
    "max_prefill_tokens": "max_prefill_tokens",
}

# Smallest and largest legal value of each whole-number option; None is "no upper limit".
_RANGES: Final[dict[str, tuple[int, int | None]]] = {
    **{option: LIMIT_RANGES[limit] for option, limit in _STEP_LIMITS.items() if option != "width"},
    "tensor_parallel": (1, None),
    "data_parallel": (1, 240),  # a number each in what they agree on every step (parallel/control/wire/frames.py)
    "num_blocks": (1, None),
    "num_snapshots": (0, None),
    "snapshot_interval": (0, None),
    "max_waiting": (1, None),
    "max_sessions": (0, 65_535),
    "prefill_burst": (1, None),
    "horizon": (0, 64),
    "seed": (0, 2**63 - 1),
}


# Each adds to the one before it; the last, of grammars and other edits of logits, has no penalties.
WARM_KINDS: Final = ("greedy", "random", "filtered", "penalised", "constrained")


class ConfigError(ValueError):
    """An option has a value that cannot work. The text names the option, the values and what to type instead."""


def flag_of(field: str) -> str:
    """The command-line flag that sets an EngineConfig field, as launch/engine_options.py spells it."""
    vllm_names = {
        "tensor_parallel": "tensor-parallel-size",
        "data_parallel": "data-parallel-size",
        "max_prefill_tokens": "max-num-batched-tokens",
    }
    return "--" + vllm_names.get(field, field.replace("_", "-"))


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The same on every rank. Fields whose default depends on the device hold the resolved number after construction.

    model: folder in the Hugging Face layout. load_format "dummy" makes deterministic random weights and reads only
    config.json. dtype "auto" takes the checkpoint's. device "auto" takes cuda where there is a GPU.
    data_parallel: groups of ``tensor_parallel`` ranks, each with separate requests; the experts lie on all ranks.
    expert_parallel: each rank has whole experts, instead of a share of each; on where there are several groups.
    expert_load: file for the tokens that each expert got; expert_map: such a file, from which experts are placed on
    ranks. max_model_len: tokens of prompt and answer together; None takes the model's own limit.
    max_num_seqs: rows, that is, requests that run at once in a group. block_size: tokens a KV block. num_blocks: KV
    blocks without the trash block; None sizes the pool from ``memory_fraction`` of the device's memory.
    max_prefill_tokens: token budget of one prefill step. mixed_steps: prompts are prefilled in the steps of the rows
    that decode, where a step may hold both; without, prefill and decode take turns. itl_target_ms: how long such a step
    may take; None allows seven times what every step costs whatever it holds (runtime/schedule/budget.py), or twice the
    decode step that it replaces, if that is more.
    prefill_burst: prefill steps in a row while others decode, where they take turns. chain_depth: D, steps in flight
    beyond the one that lands (0 is the serial engine); None takes the least that keeps the device busy, by times of
    this machine at start-up (chain_depth.py).
    speculative_config: how tokens are proposed that a step checks several of, as JSON text or a mapping under vLLM's
    keys (speculative_config.py); a SpeculativeConfig or None after construction. speculative_method,
    speculative_model, num_speculative_tokens: its keys method, model and num_speculative_tokens alone.
    decode_buckets: ascending row counts of a decode step; empty takes those of models/row_buckets.py.
    prefill_graphs: on GPUs prefill steps are captured, too, and filled up to a few token counts.
    prefill_attention: whose kernel runs on GPUs; auto takes FlashInfer's where every machine of the job has it built,
    and else our Triton kernel, while FlashInfer's is built for the next start.
    quantization: "fp8" quantises a checkpoint of numbers while it is loaded: every matrix but embeddings, head and
    routers, of drafters, too (vLLM's option). Checkpoints that are quantised need no option.
    kv_cache_dtype: of keys and values in the cache; auto takes that of activations, fp8 is fp8_e4m3 (float8_e4m3fn).
    fp8_activations: whether activations are quantised where weights are FP8: auto quantises them where that is faster
    (on CPUs nowhere), which follows the number of rows; with speculation in every step of decoding.
    deterministic: the same bits for a request whatever shares its steps (docs/determinism.md), by slower kernels.
    num_snapshots: snapshots of recurrent state for prefix caching, of a model that keeps some; None takes a share of
    the memory. snapshot_interval: blocks after which a prompt leaves one; None: as many as a step's token budget holds;
    0: nowhere but at its last full block, and where the prefix ends that it has in common with another.
    max_waiting: requests that may queue. max_sessions: sessions there may be, each with a slot in addition to
    those of other requests. session_policy: what becomes of parked ones when memory is short (SchedulerConfig).
    horizon: L, steps by which the leader announces events ahead; None takes the least that hides what a record takes
    to the slowest rank.
    plan_late: where requests come from another thread or process, a turn waits for them until the step in flight is
    about to end (plan_late.py); on for GPUs, a CPU shares its cores with the host.
    control_timeout_s: seconds after which a silent rank is an error. seed: base of the seeds of requests without one.
    warm: kinds of sampling whose graphs are captured before the first request (WARM_KINDS); others when needed.
    symmetric_all_reduce: small sums and exchanges between GPUs go through memory that they share, not NCCL, where that
    works.
    kernel_cache: folder for the choices of kernels that were measured at start-up.
    bundles: folder where each rank of a job that fails leaves what it knew.
    timeline: file for a trace of every rank's steps. nvtx: name the phases of each step for a profiler.

    Raises ConfigError at construction.
    """

    model: str
    load_format: LoadFormat = "safetensors"
    dtype: DType = "auto"
    device: Device | Literal["auto"] = "auto"
    tensor_parallel: int = 1
    data_parallel: int = 1
    expert_parallel: bool = _FILLED_IN
    expert_load: str | None = None
    expert_map: str | None = None
    max_model_len: int | None = None
    max_num_seqs: int = _FILLED_IN
    block_size: int = _FILLED_IN
    num_blocks: int | None = None
    memory_fraction: float = 0.9
    max_prefill_tokens: int = _FILLED_IN
    prefill_burst: int = 4
    mixed_steps: bool = True
    itl_target_ms: float | None = None
    chain_depth: int | None = None
    speculative_config: SpeculativeConfig | Mapping[str, Any] | str | None = None
    speculative_method: str | None = None
    speculative_model: str | None = None
    num_speculative_tokens: int | None = None
    decode_buckets: tuple[int, ...] = ()
    prefill_graphs: bool = True
    prefill_attention: PrefillWanted = "auto"
    quantization: Literal["fp8"] | None = None
    kv_cache_dtype: KvCacheDtype = "auto"
    fp8_activations: Fp8Activations = "auto"
    prefix_caching: bool = True
    num_snapshots: int | None = None
    snapshot_interval: int | None = None
    deterministic: bool = False
    max_waiting: int = 100_000
    max_sessions: int = 0
    session_policy: SessionPolicy = "evict"
    horizon: int | None = None
    plan_late: bool = _FILLED_IN
    control_timeout_s: float = 10.0
    seed: int = 0
    warm: tuple[str, ...] = ("greedy",)
    symmetric_all_reduce: bool = True
    kernel_cache: str = "~/.cache/lockstride"
    bundles: str = "lockstride-bundles"
    timeline: str | None = None
    nvtx: bool = False

    def __post_init__(self) -> None:
        _check_choice("load_format", self.load_format, get_args(LoadFormat))
        _check_choice("dtype", self.dtype, get_args(DType))
        _check_choice("session_policy", self.session_policy, get_args(SessionPolicy))
        _check_choice("prefill_attention", self.prefill_attention, get_args(PrefillWanted))
        if self.quantization is not None:
            _check_choice("quantization", self.quantization, ("fp8",))
        _check_choice("kv_cache_dtype", self.kv_cache_dtype, get_args(KvCacheDtype))
        _check_choice("fp8_activations", self.fp8_activations, get_args(Fp8Activations))
        _check_no_text("warm", self.warm, WARM_KINDS)
        for kind in self.warm:
            _check_choice("warm", kind, WARM_KINDS)
        _check_choice("device", self.device, ("auto", *get_args(Device)))
        if self.device == "auto":
            object.__setattr__(self, "device", _device_here())
        for name, by_device in DEVICE_DEFAULTS.items():
            if getattr(self, name) is _FILLED_IN:
                object.__setattr__(self, name, by_device[self.device])
        if self.chain_depth is None and self.device == "cpu":
            object.__setattr__(self, "chain_depth", CPU_CHAIN_DEPTH)
        for name, (low, high) in _RANGES.items():
            _check_whole(name, getattr(self, name), low, high)
        if not 0.0 < self.memory_fraction <= 1.0:
            raise ConfigError(
                f"memory_fraction is {self.memory_fraction}, but must lie in (0, 1]: type --memory-fraction 0.9"
            )
        if not 0.0 < self.control_timeout_s < float("inf"):
            raise ConfigError(
                f"control_timeout_s is {self.control_timeout_s}, but must be a positive number of seconds: "
                "type --control-timeout-s 10"
            )
        if self.itl_target_ms is not None and not 0.0 < self.itl_target_ms < float("inf"):
            raise ConfigError(
                f"itl_target_ms is {self.itl_target_ms}, but must be a positive number of milliseconds: type "
                "--itl-target-ms 20, or leave it out"
            )
        if not self.decode_buckets:
            object.__setattr__(self, "decode_buckets", decode_ladder(self.max_num_seqs))
        if self.expert_parallel is _FILLED_IN:
            object.__setattr__(self, "expert_parallel", self.data_parallel > 1)
        if self.plan_late is _FILLED_IN:
            object.__setattr__(self, "plan_late", self.device == "cuda")
        self._merge_speculation()
        self._check_together()

    def _merge_speculation(self) -> None:
        plain = {
            "method": self.speculative_method,
            "model": self.speculative_model,
            "num_speculative_tokens": self.num_speculative_tokens,
        }
        try:
            merged = merged_speculation(self.speculative_config, plain)
        except SpeculativeConfigError as error:
            raise ConfigError(str(error)) from None
        object.__setattr__(self, "speculative_config", merged)
        if merged is not None and merged.probabilistic and self.deterministic:
            raise ConfigError(
                f"deterministic is on, but speculative_config is {merged}: with drawn proposals tokens depend on "
                "which steps were windows, and so on the batch: leave out --deterministic, or draft_sample_method"
            )

    @property
    def speculation(self) -> SpeculativeConfig | None:
        """``speculative_config`` as it is after construction."""
        config = self.speculative_config
        return config if isinstance(config, SpeculativeConfig) else None

    @property
    def width(self) -> int:
        """W: the most tokens that a row may gain in a step."""
        return 1 if self.speculation is None else self.speculation.width

    @property
    def narrower(self) -> tuple[int, ...]:
        """W of windows with fewer tokens, descending. Nothing is measured on a CPU, and groups have one width: there
        only those asked for."""
        if self.speculation is None:
            return ()
        unasked = self.speculation.fewer_speculative_tokens is None
        if unasked and (self.device == "cpu" or self.data_parallel > 1):
            return ()
        return tuple(fewer + 1 for fewer in self.speculation.fewer)

    def _check_together(self) -> None:
        buckets = self.decode_buckets
        if any(low >= high for low, high in zip((0, *buckets), buckets, strict=False)):
            raise ConfigError(
                f"decode_buckets is {_listed(buckets)}, but must ascend from 1 or more: type --decode-buckets "
                f"{_listed(sorted({b for b in buckets if b > 0}) or [self.max_num_seqs])}"
            )
        if buckets[-1] < self.max_num_seqs:
            raise ConfigError(
                f"the largest of decode_buckets is {buckets[-1]}, but max_num_seqs is {self.max_num_seqs}: type "
                f"--decode-buckets {_listed((*buckets, self.max_num_seqs))} or --max-num-seqs {buckets[-1]}"
            )
        if self.data_parallel > 1 and not self.expert_parallel:
            raise ConfigError(
                f"data_parallel is {self.data_parallel}, but expert_parallel is off: groups share the experts, which "
                "then are whole: leave out --no-expert-parallel"
            )
        if self.max_sessions and self.data_parallel > 1:
            raise ConfigError(
                f"max_sessions is {self.max_sessions}, but data_parallel is {self.data_parallel}: verbs of sessions do "
                "not find the group that has one: leave out --data-parallel-size, and type --tensor-parallel-size "
                f"{self.ranks} --expert-parallel for as many ranks; or leave out --max-sessions where no daemon runs"
            )
        if self.data_parallel > 1 and self.speculation is not None and self.speculation.fewer_speculative_tokens:
            raise ConfigError(
                f"fewer_speculative_tokens is {list(self.speculation.fewer_speculative_tokens)}, but data_parallel is "
                f"{self.data_parallel}: groups have graphs for exchanges of two widths, one token and all of a window: "
                "leave one of them out"
            )
        if self.deterministic and self.data_parallel > 1:
            raise ConfigError(
                f"data_parallel is {self.data_parallel}, but deterministic is on: sums between groups are not "
                "batch-invariant: leave out --data-parallel-size or --deterministic"
            )
        if self.deterministic and self.prefill_attention == "flashinfer":
            raise ConfigError(
                "prefill_attention is 'flashinfer', but deterministic is on: its reduction is not batch-invariant: "
                "leave out --prefill-attention or --deterministic"
            )
        if self.expert_map is not None and not self.expert_parallel:
            raise ConfigError(
                f"expert_map is {self.expert_map}, but expert_parallel is off, so that every rank has a share of each "
                "expert: type --expert-parallel, or leave out --expert-map"
            )

    @property
    def serial(self) -> bool:
        """Whether every step is waited for before the next is launched."""
        return self.chain_depth == 0

    @property
    def ranks(self) -> int:
        """Of the whole job."""
        return self.tensor_parallel * self.data_parallel

    @property
    def running_seqs(self) -> int:
        """Requests that run at once, all groups together."""
        return self.max_num_seqs * self.data_parallel

    def step_limits(self, max_model_len: int, depth: int) -> StepLimits:
        """What these options bound a step to, of a model whose sequences end at ``max_model_len`` tokens.

        ``depth``: what memory is sized for where no chain depth is given.
        """
        given = {limit: getattr(self, option) for option, limit in _STEP_LIMITS.items()}
        given |= {"max_model_len": max_model_len, "depth": depth if self.chain_depth is None else self.chain_depth}
        tree = 0 if self.speculation is None else self.speculation.tree_size or 0
        return StepLimits(**given, slots=SLOTS_PER_ROW * self.max_num_seqs + self.max_sessions, tree=tree)

    def with_few_slots(self, limits: StepLimits) -> StepLimits:
        """The same for a model that keeps state in slots: rows and a few more, at least two, and one a session."""
        return replace(limits, slots=state_slots(self.max_num_seqs) + self.max_sessions)

    def describe(self) -> str:
        """Every field as ``name=value`` on one line."""
        return " ".join(f"{f.name}={_shown(getattr(self, f.name))}" for f in fields(self))


def state_slots(max_num_seqs: int) -> int:
    """Slots of a model that keeps state in them, the null slot left out."""
    return max_num_seqs + max(2, max_num_seqs // ROWS_PER_SPARE_SLOT)


def require_real_texts(config: EngineConfig, who: str) -> None:
    """Raises ConfigError where ``who`` would hand out texts that mean nothing: those of synthetic acceptance."""
    try:
        refuse_synthetic(config.speculation, who)
    except SpeculativeConfigError as error:
        raise ConfigError(str(error)) from None


def _device_here() -> Device:
    import torch  # only here: the rest of this file is plain data

    return "cuda" if torch.cuda.is_available() else "cpu"


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(
            f"{name} is {value!r}, but must be one of {', '.join(choices)}: type {flag_of(name)} {choices[0]}"
        )


def _check_no_text(name: str, value: object, choices: tuple[str, ...]) -> None:
    if isinstance(value, str):  # whose letters would be taken for words
        words = tuple(value.replace(" ", "").split(","))
        raise ConfigError(f"{name} is {value!r}, but must be a list of {', '.join(choices)}: type {name}={words}")


def _check_whole(name: str, value: int | None, low: int, high: int | None) -> None:
    if value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"{name} is {value!r}, but must be a whole number: type {flag_of(name)} {low}")
    if value < low:
        raise ConfigError(f"{name} is {value}, but must be at least {low}: type {flag_of(name)} {low}")
    if high is not None and value > high:
        raise ConfigError(f"{name} is {value}, but must be at most {high}: type {flag_of(name)} {high}")


def _listed(numbers: Iterable[int]) -> str:
    return ",".join(str(number) for number in numbers)


def _shown(value: object) -> str:
    return _listed(value) if isinstance(value, tuple) else str(value)
