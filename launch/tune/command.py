"""`tune`: the kernels of a model's shapes, measured on the GPU at hand, into a table that later starts find.

Knows: what surrounds the measuring: what is refused, the files, compilation beforehand, time, the report, exit codes.
Does not know: how a choice is made (tuner.py), what runs on the GPU (gpu_runner.py), how all-reduces are timed
(all_reduce.py).
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from launch.bench.session import model_folder
from launch.errors import UsageError
from launch.ranks.process_group import joined, local_device
from launch.ranks.rendezvous import Rendezvous, discover
from launch.ranks.signals import Interrupts
from launch.tune import all_reduce
from launch.tune.compile import compile_all, default_workers
from launch.tune.journal import Journal, Measured, TuneWriteError, opened, summary, table
from launch.tune.options import TuneCommand
from launch.tune.plan import Task, plan
from launch.tune.shapes import RankShare, asked_attention, asked_products, buckets_of
from launch.tune.tuner import DeviceLost, Tuner, save
from models.config import DTYPES
from models.fp8_load import quantised_at_load
from models.kernels.matmul import choice_table
from models.kernels.matmul.choice_table import ChoiceTable, Gemv, LinearShape, Skinny, Wide
from models.kernels.traits import traits_of
from models.registry import config_from_folder, model_class

log = logging.getLogger("lockstride")

FAILED = 1
_COMPILING = 0.4  # of the budget at most
_KERNELS = Path(choice_table.__file__).parents[1]
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Files:
    """What a run writes, by the GPU's name, in ``folder``."""

    folder: Path
    gpu_name: str

    @property
    def table(self) -> Path:
        return choice_table.tuned_file(self.folder, self.gpu_name)

    @property
    def journal(self) -> Path:
        """Every candidate's times, and why the others did not run."""
        return self._beside("tune.jsonl")

    @property
    def report(self) -> Path:
        return self._beside("tune.md")

    def _beside(self, ending: str) -> Path:
        return self.table.with_name(f"{choice_table.file_name(self.gpu_name)}.{ending}")


def run(command: TuneCommand, environ: Mapping[str, str], say: Say = print) -> int:
    """The whole command on this rank; returns its exit code.

    Raises UsageError, RendezvousError or ModelConfigError where it cannot be done, each saying what to type.
    """
    began = time.monotonic()
    rendezvous = discover(environ)
    share = rank_share(command, rendezvous)
    device = gpu_of(rendezvous, environ)
    if not rendezvous.topology.is_leader:
        if "all-reduce" in command.parts:
            _time_all_reduces(rendezvous, share)
        return 0
    files = Files(command.out.expanduser(), torch.cuda.get_device_name(device))
    identity = identity_of(files.gpu_name)
    with Interrupts() as interrupts, opened(files.journal, identity, fresh=command.fresh) as journal:
        if journal.put_aside is not None:
            log.info("what %s holds was measured with other kernels or another torch: starting anew", journal.put_aside)
        found = choice_table.recall(files.table)
        found.gpu = traits_of(device)
        try:
            if rendezvous.topology.world > 1 and "all-reduce" in command.parts:
                share = _choose_limits(rendezvous, share, found, files, say)
            Session(command, share, device, files, journal, found, interrupts, began).run(say)
        except DeviceLost as error:
            log.error("a candidate broke this process's use of the GPU (%s)", error)
            log.error("%s says which, and it is left out from now on: type the same command to go on", files.journal)
            return FAILED
        except TuneWriteError as error:
            log.error("%s", error)
            return FAILED
        return interrupts.exit_code


def rank_share(command: TuneCommand, rendezvous: Rendezvous) -> RankShare:
    """One rank's share of the model. Raises UsageError or ModelConfigError."""
    topology, asked = rendezvous.topology, command.tensor_parallel
    if topology.nodes > 1:
        raise UsageError(f"{topology.nodes} nodes were started, but one is measured: start launch tune on one of them")
    if topology.world > 1 and asked not in (None, topology.world):
        raise UsageError(
            f"--tensor-parallel-size is {asked}, but {topology.world} ranks were started: leave it out, or start one "
            "rank (python -m launch tune ...), which measures one rank's share"
        )
    config = quantised_at_load(config_from_folder(model_folder(command.model)), command.quantization)
    dtype = config.dtype if command.dtype == "auto" else DTYPES[command.dtype]
    try:
        model_class(config.architecture)
        return RankShare.of(config, asked or topology.world, dtype, whole_experts=command.expert_parallel)
    except ValueError as error:
        raise UsageError(f"--model {command.model}: {error}") from error


def gpu_of(rendezvous: Rendezvous, environ: Mapping[str, str]) -> torch.device:
    """This rank's GPU. Raises UsageError where there is none, or none that our kernels run on."""
    if not torch.cuda.is_available():
        why = f"torch {torch.__version__} is built without CUDA" if torch.version.cuda is None else "torch sees none"
        visible = environ.get("CUDA_VISIBLE_DEVICES")
        hidden = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible})"
        raise UsageError(
            f"launch tune measures on a GPU, and {why}{hidden}: run it on the machine that is to serve, and look at "
            "python -m launch doctor there"
        )
    device = local_device(rendezvous, "cuda")
    try:
        from models.ops.nvidia import unsupported
    except ImportError as error:
        raise UsageError(f"the kernels need Triton ({error}): pip install 'lockstride[cuda]'") from error
    if (reason := unsupported(device)) is not None:
        raise UsageError(f"launch tune cannot measure on {device}: {reason}; engines run plain torch there")
    torch.cuda.set_device(device)
    return device


def identity_of(gpu_name: str) -> dict[str, Any]:
    """What measurements depend on: with another GPU, library or kernel they mean nothing."""
    import triton

    sources = blake2b(digest_size=8)
    for path in sorted(_KERNELS.rglob("*.py")):
        sources.update(path.read_bytes())
    return {"gpu": gpu_name, "torch": torch.__version__, "triton": triton.__version__, "kernels": sources.hexdigest()}


class Session:
    """Products and attention of one share of a model, on one GPU."""

    def __init__(
        self,
        command: TuneCommand,
        share: RankShare,
        device: torch.device,
        files: Files,
        journal: Journal,
        table: ChoiceTable,
        interrupts: Interrupts,
        began: float,
    ) -> None:
        self._command, self._share, self._device, self._files = command, share, device, files
        self._journal, self._table, self._interrupts, self._began = journal, table, interrupts, began

    def run(self, say: Say) -> None:
        command = self._command
        tasks = tasks_of(command, self._share)
        if not tasks:
            save(self._files.table, self._table)
            return
        left = [task for task in tasks if task.key not in self._journal.done]
        kernels = self._kernels()
        minutes = sum(task.estimate for task in left) / 60
        budget = "" if command.budget_minutes is None else f", of which {command.budget_minutes:g} are allowed"
        known = f" ({len(tasks) - len(left)} of them measured before)" if len(left) < len(tasks) else ""
        say(
            f"{command.model}, one rank of {self._share.ranks}, {str(self._share.dtype).removeprefix('torch.')}, on "
            f"{self._files.gpu_name}: {len(tasks)} choices at {len({task.rows for task in tasks})} row counts{known}, "
            f"by estimate {minutes:.1f} minutes{budget}"
        )
        self._compile(kernels, left)
        left = self._tune(kernels, tasks)
        self._report(tasks, left, say)

    def _kernels(self) -> Any:
        """NvidiaOps with the choices that an engine would start with."""
        from models.ops.nvidia import NvidiaOps

        kernels = NvidiaOps(self._device, prefill="triton")
        kernels.matmul.choices.update(self._table)
        kernels.matmul.choices.fill(choice_table.recall(choice_table.cache_file(self._files.folder, self._device)))
        return kernels

    def _compile(self, kernels: Any, tasks: Sequence[Task]) -> None:
        workers = self._command.compile_workers
        workers = default_workers(os.cpu_count() or 1) if workers is None else workers
        whole = {task.what: task.key for task in tasks if task.whole and isinstance(task.what, LinearShape)}
        work = [
            (shape, choice)
            for shape, key in whole.items()
            for choice in kernels.matmul.candidates(shape)
            if isinstance(choice, Gemv | Skinny | Wide) and choice not in self._journal.avoided.get(key, {})
        ]
        if not workers or not work:
            return
        began, seconds = time.monotonic(), self._remaining() * _COMPILING
        with _bar("compiling", len(set(work))) as bar:
            compiled = compile_all(
                work,
                workers,
                seconds=seconds,
                stop=lambda: self._interrupts.signal is not None,
                show=lambda done: _advance(bar, done),
            )
        for shape, choice, why in compiled.refused:
            self._journal.avoid(whole[shape], choice, why)
        log.info(
            "%d kernels compiled by %d processes in %.0f s; %d are refused, %d left for later",
            compiled.ran,
            workers,
            time.monotonic() - began,
            len(compiled.refused),
            compiled.left,
        )

    def _remaining(self) -> float:
        minutes = self._command.budget_minutes
        return float("inf") if minutes is None else max(0.0, 60 * minutes - (time.monotonic() - self._began))

    def _tune(self, kernels: Any, tasks: Sequence[Task]) -> list[Task]:
        from launch.tune.gpu_runner import GpuRunner

        minutes = self._command.budget_minutes
        with _bar("measuring", len(tasks)) as bar:
            rows: list[int] = []

            def progress(task: Task, measured: Measured | None) -> None:
                done = sum(one.key in self._journal.done for one in tasks)
                told = f"{tuner.remaining(tasks) / 60:.1f} min left"
                _advance(bar, done)
                bar.set_postfix_str(f"x{task.rows}, {told}", refresh=False)
                if bar.disable and rows[-1:] != [task.rows]:
                    rows.append(task.rows)
                    log.info("x%d: %d of %d choices, %s", task.rows, done, len(tasks), told)

            tuner = Tuner(
                GpuRunner(self._share, kernels),
                self._journal,
                self._table,
                self._files.table,
                now=time.monotonic,
                began=self._began,
                budget=None if minutes is None else 60 * minutes,
                stop=lambda: self._interrupts.signal is not None,
                progress=progress,
            )
            return tuner.run(tasks)

    def _report(self, tasks: Sequence[Task], left: Sequence[Task], say: Say) -> None:
        found = [self._journal.done[task.key] for task in tasks if task.key in self._journal.done]
        failed = sum(len(one.failed) for one in found)
        whole = f"# {self._files.gpu_name}, {self._command.model}, one rank of {self._share.ranks}\n\n{table(found)}\n"
        try:
            self._files.report.write_text(whole + f"\n{summary(found, failed)}\n")
        except OSError as error:
            log.warning("%s cannot be written (%s): the journal has every time", self._files.report, error)
        changed = [one for one in found if one.changed]
        if changed:
            say(table(changed))
        say(summary(found, failed))
        say(f"table: {self._files.table}; every shape: {self._files.report}; every time: {self._files.journal}")
        if left:
            why = "interrupted" if self._interrupts.signal is not None else "out of budget"
            say(f"{len(left)} of {len(tasks)} choices are left ({why}): type the same command to go on")
        if self._command.out != TuneCommand(model="").out:
            say(f"start engines with --kernel-cache {self._command.out}")


def tasks_of(command: TuneCommand, share: RankShare) -> list[Task]:
    """Everything that the command asks for, in the order of its worth. Raises UsageError for rows of no bucket."""
    buckets = buckets_of(command.max_num_seqs, command.max_prefill_tokens)
    chosen = buckets if command.rows is None else command.rows
    unknown = sorted(set(chosen) - set(buckets))
    if unknown:
        raise UsageError(
            f"--rows {','.join(map(str, unknown))}: no step has so many rows; choose from {','.join(map(str, buckets))}"
        )
    asked = asked_products(share, chosen, command.max_num_seqs)
    return plan(asked, asked_attention(share, 1), command.max_num_seqs, command.parts, command.seconds)


def _time_all_reduces(rendezvous: Rendezvous, share: RankShare) -> tuple[list[all_reduce.Times], str | None]:
    """Every rank calls this."""
    with joined(rendezvous, "cuda") as device:
        group = torch.distributed.group.WORLD
        assert group is not None
        found = all_reduce.measure(group, device, share.config.hidden_size, share.dtype)
        torch.cuda.synchronize(device)
        gc.collect()  # graphs hold the group that is about to be destroyed
    return found


def _choose_limits(rendezvous: Rendezvous, share: RankShare, found: ChoiceTable, files: Files, say: Say) -> RankShare:
    """``share`` with the limits that were found, which decide where products have a norm in front."""
    times, reason = _time_all_reduces(rendezvous, share)
    if reason is not None:
        say(f"all-reduces are not measured: {reason}")
        return replace(share, limits=None)
    before = found.all_reduce.get(share.ranks, share.limits)
    limits = all_reduce.limits_from(times)
    if before is not None:
        limits = all_reduce.widened(limits, times, before)
    say(all_reduce.table(times, share.ranks, before, limits))
    found.all_reduce[share.ranks] = limits
    save(files.table, found)
    return replace(share, limits=limits)


def _bar(what: str, total: int) -> tqdm[Any]:
    return tqdm(total=total, desc=what, unit="", leave=False, disable=not sys.stderr.isatty())


def _advance(bar: tqdm[Any], done: int) -> None:
    bar.update(done - bar.n)
