"""`generate`: a file of prompts in, a file of answers out, on any number of ranks.

Knows: what surrounds the leader's loop (ranks, model folder, files, the report at the end, exit codes), and in what
order it stops. Does not know: what a line may say (parser.py), how rows are kept (output_file.py), how an engine works.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from itertools import combinations
from pathlib import Path
from typing import BinaryIO

from launch.api.parser import BadLine, LineId, PreparedRequest, RequestParser
from launch.api.response import answer_row, error_row
from launch.api.sampling_defaults import settled
from launch.errors import UsageError
from launch.generate.input_file import count_lines, read_requests
from launch.generate.options import Command, GenerateOptions
from launch.generate.output_file import ResultsFile, ResultsWriteError, name_of
from launch.generate.read_ahead import ReadAhead
from launch.generate.summary import Progress, Summary
from launch.ranks.process_group import joined
from launch.ranks.rendezvous import Rendezvous
from launch.ranks.signals import Interrupts
from launch.serve.parsers.detect import calls_of, reasoning_of
from launch.serve.parsers.reasoning_grammar import marks_of
from runtime.config import EngineConfig
from runtime.frontend.chat_template import ChatTemplate
from runtime.frontend.client import EngineClient, PromptRequest
from runtime.frontend.engine_protocol import EngineProtocol
from runtime.frontend.outputs import RequestOutput
from runtime.frontend.tokenizer import Tokenizer, no_tokenizer
from runtime.schedule.request import FinishReason, SamplingParams

Arrival = tuple[float, PreparedRequest | BadLine]  # time.perf_counter() when it was read, and what it was

_HURRIED_SECONDS = 2.0  # for cancelled requests to come back
_IDLE_SECONDS = 0.05  # longest wait for the reader before the engine is asked again


class BatchRun:
    """``run`` once. Afterwards ``summary`` says what happened, and ``shown`` holds the first ``show`` requests.

    After a signal nothing more is admitted: what has no token yet is handed back, what has begun may take
    ``drain_seconds`` to finish. What is not finished then has no row, and a later run does it.
    """

    def __init__(
        self,
        client: EngineClient,
        source: ReadAhead[Arrival],
        results: ResultsFile,
        interrupts: Interrupts,
        *,
        drain_seconds: float = 20.0,
        show: int = 0,
    ) -> None:
        self.summary = Summary()
        self.shown: dict[LineId, list[RequestOutput]] = {}
        self._client = client
        self._source: ReadAhead[Arrival] | None = source  # None: all lines are read
        self._results = results
        self._interrupts = interrupts
        self._drain_seconds = drain_seconds
        self._show = show
        self._running: dict[
            Hashable, tuple[PreparedRequest, dict[Hashable, RequestOutput]]
        ] = {}  # by key, a prompt each
        self._held: Arrival | None = None  # read, but there is no room for it yet
        self._progress: Progress | None = None

    def run(self, progress: Progress | None = None) -> None:
        """Until every line has its row or, after a signal, what had begun does."""
        self._progress = progress
        while self._more():
            self._feed()
            self._advance()
        if self._interrupts.signal is not None:
            self._drain()
        self.summary.stop_clock()
        self._client.close()

    def _advance(self) -> None:
        """One turn of the engine, and what follows from it."""
        finished = self._client.turn().finished
        for output in finished:
            self._finish(output)
        if finished and self._progress is not None:
            self._progress.show(self.summary)

    def _more(self) -> bool:
        if self._interrupts.signal is not None:
            return False
        if not self._running and self._held is None:
            self._client.wait(self._arrived, _IDLE_SECONDS)
        return bool(self._running) or self._held is not None or self._source is not None

    def _arrived(self, timeout: float) -> bool:
        self._held = self._take(timeout)
        return self._held is not None or self._source is None

    def _take(self, timeout: float = 0.0) -> Arrival | None:
        """The next line, if one is read within ``timeout`` seconds."""
        if self._source is None:
            return None
        arrival = self._source.take(timeout)
        if self._source.exhausted:
            self._source = None
        return arrival

    def _feed(self) -> None:
        """Hand requests over while there is room; bad lines on the way get their rows."""
        while (arrival := self._held or self._take()) is not None:
            self._held = None
            read_at, item = arrival
            if isinstance(item, BadLine):
                self._fail(item)
            elif not self._client.has_room(item.answers):  # it waits here, where stopping costs less
                self._held = arrival
                return
            else:
                self._add(item, read_at)

    def _add(self, prepared: PreparedRequest, read_at: float) -> None:
        outputs: dict[Hashable, RequestOutput] = {}
        for at, prompt in enumerate(prepared.prompts):
            key = (prepared.id, at)
            self._client.submit(
                PromptRequest(
                    prompt.token_ids,
                    prepared.sampling,
                    key=key,
                    priority=prepared.priority,
                    text=prompt.text,
                    arrived_at=read_at,
                )
            )
            self._running[key] = prepared, outputs
        if len(self.shown) < self._show:
            self.shown[prepared.id] = []

    def _finish(self, output: RequestOutput) -> None:
        prepared, outputs = self._running.pop(output.key)
        outputs[output.key] = output
        if len(outputs) < len(prepared.prompts):
            return
        ordered = [outputs[prepared.id, at] for at in range(len(outputs))]
        if any(c.finish_reason is FinishReason.CANCELLED for output in ordered for c in output.completions):
            self.summary.unfinished += 1  # only we cancel, to end soon: no row, so that a later run does it
            return
        self._results.write(answer_row(prepared, ordered, self._client.tokenizer, int(time.time())), prepared.id)
        if all(output.failed is None for output in ordered):
            self.summary.add(*ordered)
        else:
            self.summary.failed += 1
        if prepared.id in self.shown:
            self.shown[prepared.id] = ordered

    def _fail(self, bad: BadLine) -> None:
        self._results.write(error_row(bad), name_of(bad.id, bad.line))
        self.summary.failed += 1

    def _drain(self) -> None:
        """Let what has begun finish, for a while; then end it and wait for it to be back, for a shorter while."""
        self._client.cancel_all(unbegun=True)
        began = self._interrupts.at or time.monotonic()
        self._step_until(began + self._drain_seconds)
        self._client.cancel_all()
        self._step_until(time.monotonic() + _HURRIED_SECONDS, even_in_a_hurry=True)
        self.summary.unfinished += len({prepared.id for prepared, _ in self._running.values()})

    def _step_until(self, deadline: float, *, even_in_a_hurry: bool = False) -> None:
        while self._running and time.monotonic() < deadline:
            if self._interrupts.hurry and not even_in_a_hurry:
                return
            self._advance()


OpenEngine = Callable[[EngineConfig, Rendezvous], AbstractContextManager[EngineProtocol]]

SOME_FAILED = 1
_LINE = "-" * 80

log = logging.getLogger("lockstride")


def run(command: Command, environ: Mapping[str, str], open_engine: OpenEngine) -> int:
    """The whole command on this rank; returns its exit code.

    Raises UsageError, ConfigError, ModelConfigError, RendezvousError, TokenizerError or ResultsFileError before any
    work is done when it cannot be, ResultsFileError later when the disk fails, and whatever the engine raises.
    """
    (rendezvous, config, defaults), options = settled(command, environ), command.options
    if not rendezvous.topology.is_leader:
        with joined(rendezvous, config.device), open_engine(config, rendezvous) as engine:
            return _follow(engine)
    check_paths(config, options)
    texts = load_texts(Path(config.model))
    with ResultsFile(options.output, overwrite=options.overwrite, retry_errors=options.retry_errors) as results:
        log.info("%s", config.describe())
        lines = count_lines(options.input)  # now: later, the other ranks wait for this one
        with joined(rendezvous, config.device), open_engine(config, rendezvous) as engine:
            return _lead(engine, options, results, lines, defaults, *texts)


def _follow(engine: EngineProtocol) -> int:
    with Interrupts() as interrupts:  # the leader drains for all: a signal to this rank changes only its exit code
        engine.follow()
        return interrupts.exit_code


def _lead(
    engine: EngineProtocol,
    options: GenerateOptions,
    results: ResultsFile,
    lines: int,
    defaults: SamplingParams,
    tokenizer: Tokenizer | None,
    chat: ChatTemplate | None,
) -> int:
    parser = RequestParser(
        engine.model_config,
        tokenizer,
        chat,
        defaults=defaults,
        max_tokens=options.max_tokens,
        base_seed=engine.config.seed,
        model_name=Path(engine.config.model).resolve().name,  # OpenAI's type of an answer wants a text
        reasoning=_reasoning(tokenizer, chat),
    )
    client = EngineClient(engine, tokenizer, text=tokenizer is not None)
    done_before = len(results.finished.ids) + len(results.finished.errors)
    if done_before or results.repaired_bytes:
        log.info("going on: %d rows are there, %d torn bytes cut off", done_before, results.repaired_bytes)
    with Interrupts() as interrupts:
        with (
            options.input.open("rb") as stream,
            closing(ReadAhead(_arrivals(stream, parser, results, options), options.look_ahead)) as source,
            closing(Progress(lines, done_before)) as progress,
        ):
            batch = BatchRun(
                client, source, results, interrupts, drain_seconds=options.drain_seconds, show=options.show
            )
            batch.summary.skipped = done_before
            batch.run(progress)
        results.close()
        report(batch, engine.counters, tokenizer, options.summary)
    if interrupts.signal is not None:
        log.warning("interrupted: run the same command again to go on")
        return interrupts.exit_code
    return SOME_FAILED if batch.summary.failed or results.finished.errors else 0


def report(
    batch: BatchRun, counters: Mapping[str, int | float], tokenizer: Tokenizer | None, summary: Path | None
) -> None:
    """What a person sees at the end, on stdout, and the summary file."""
    print(readable(batch.shown, tokenizer), end="")
    print(batch.summary.text(counters), flush=True)
    if summary is not None:
        try:
            batch.summary.write_json(summary, counters)
        except OSError as error:
            raise ResultsWriteError(f"--summary {summary} cannot be written: {error}; all rows are there") from error


def check_paths(config: EngineConfig, options: GenerateOptions) -> None:
    """Raises UsageError when the files of a command line cannot be what they are asked to be."""
    model = Path(config.model)
    if not model.is_dir():
        raise UsageError(f"--model {model}: there is no such folder")
    if not options.input.is_file():
        raise UsageError(f"--input {options.input}: there is no such file")
    if options.output.is_dir():
        raise UsageError(f"--output {options.output} is a folder: name a file in it")
    if options.output.exists() and not options.output.is_file():  # reading a pipe or device back might never end
        raise UsageError(
            f"--output {options.output} is a pipe or a device, but what is there is read back to go on: name a file"
        )
    if options.output.exists() and options.output.samefile(options.input):
        raise UsageError(f"--input and --output are both {options.input}: answers would overwrite the prompts")
    named = {
        "--input": options.input,
        "--output": options.output,
        "--summary": options.summary,
        "--timeline": config.timeline,
        "--expert-load": config.expert_load,
    }
    given = [(name, Path(path)) for name, path in named.items() if path is not None]
    for (name, path), (other, second) in combinations(given, 2):
        both = path.exists() and second.exists()
        same = path.samefile(second) if both else os.path.realpath(path) == os.path.realpath(second)
        if same:
            raise UsageError(f"{name} and {other} are both {path}: one would overwrite the other")
    if options.summary is None:
        return
    if options.summary.is_dir():
        raise UsageError(f"--summary {options.summary} is a folder: name a file in it")
    try:  # now: it is written when all work is done
        options.summary.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--summary {options.summary} cannot be written: {error}") from error


def load_texts(model: Path) -> tuple[Tokenizer | None, ChatTemplate | None]:
    """The folder's tokenizer and chat template, where it has them. Raises TokenizerError."""
    if not (model / "tokenizer.json").is_file():
        log.warning("%s", no_tokenizer(model))
        return None, None
    return Tokenizer.from_folder(model), ChatTemplate.from_folder(model)


def _reasoning(tokenizer: Tokenizer | None, chat: ChatTemplate | None) -> tuple[str, str] | None:
    """The marks around reasoning, as the chat template renders a sample."""
    if tokenizer is None or chat is None:
        return None
    tokens = tokenizer.added_ids.values()
    return marks_of(reasoning_of(chat, {}, tokens, calls_of(chat, {}, tokens)))


def readable(shown: Mapping[LineId, Sequence[RequestOutput]], tokenizer: Tokenizer | None) -> str:
    """The first answers for a person to read: prompt and text as one, under a line with the id."""
    pieces = []
    for line_id, output in ((line_id, output) for line_id, outputs in shown.items() for output in outputs):
        prompt = output.prompt
        if prompt is None:
            prompt = tokenizer.decode(output.prompt_token_ids) if tokenizer is not None else ""
        for completion in output.completions:
            reason = f"{completion.finish_reason.label}{': ' if completion.detail else ''}{completion.detail}"
            title = f"{line_id}: {len(completion.token_ids)} tokens, {reason}"
            pieces.append(f"{_LINE}\n{title}\n{_LINE}\n{prompt}{completion.text}\n")
    return "".join(pieces) + (f"{_LINE}\n" if pieces else "")


def _arrivals(
    stream: BinaryIO, parser: RequestParser, results: ResultsFile, options: GenerateOptions
) -> Iterator[Arrival]:
    for item in read_requests(stream, parser, results.finished, options.max_line_bytes):
        yield time.perf_counter(), item
