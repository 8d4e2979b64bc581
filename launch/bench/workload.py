"""Requests to measure with: random token ids, ShareGPT conversations, or lines of a JSONL file.

Knows: how a dataset becomes prompts and lengths, the same every time for the same seed. Does not know: engines, time.
Random prompts are token ids of an exact length: they need no tokenizer and no download.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from launch.api.parser import BadLine, RequestParser
from launch.errors import BenchError, UsageError
from launch.generate.input_file import FinishedRows, read_requests
from runtime.frontend.chat_template import ChatTemplate
from runtime.frontend.client import PromptRequest
from runtime.frontend.engine_protocol import ModelFacts
from runtime.frontend.tokenizer import Tokenizer
from runtime.schedule.request import SamplingParams

IDS = (100, 150_000)  # token ids lie in [100, 150000), folded below the vocabulary where that ends earlier
_SHORTEST, _LONGEST_PROMPT, _LONGEST = 4, 1024, 2048  # tokens; what vLLM keeps of ShareGPT
_MAX_LINE_BYTES = 1 << 24


def id_range(vocab_size: int) -> range:
    """The token ids that are drawn from."""
    return range(min(IDS[0], vocab_size - 1), min(IDS[1], vocab_size))


def greedy(max_tokens: int) -> SamplingParams:
    """Greedy to an exact length."""
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, seed=0)


def random_prompts(count: int, input_len: int, output_len: int, vocab_size: int, seed: int) -> list[PromptRequest]:
    """``count`` prompts of ``input_len`` ids, uniform in ``id_range``: they need no tokenizer and no download."""
    draw, ids, answer = random.Random(seed), id_range(vocab_size), greedy(output_len)
    return [PromptRequest(tuple(draw.choices(ids, k=input_len)), answer) for _ in range(count)]


def no_file(name: str, path: Path | None) -> str:
    """What is said where ``path`` is no file, or not given, and the dataset needs one."""
    named = "type --dataset-path FILE" if path is None else f"--dataset-path {path} is none"
    return f"--dataset-name {name} needs a file: {named}"


def check_file_is_read(name: str, path: Path | None, of_files: Sequence[str]) -> None:
    """Raises UsageError where a file is given to a dataset that reads none: another one was probably meant."""
    if path is not None and name not in of_files:
        raise UsageError(
            f"--dataset-path {path} is not read by --dataset-name {name}: leave it out, or type --dataset-name "
            f"{', '.join(of_files[:-1])} or {of_files[-1]}"
        )


def sharegpt_prompts(
    path: Path, tokenizer: Tokenizer, count: int, output_len: int | None, max_model_len: int, seed: int
) -> list[PromptRequest]:
    """First question and answer of ``count`` conversations, in an order that ``seed`` draws; answers give lengths.

    Keeps what vLLM's benchmark keeps: 4 tokens or more on both sides (of the answer where ``output_len`` does not say),
    at most 1024 of prompt and 2048 together.
    BenchError when the file is no ShareGPT file or holds too few.
    """
    pairs = list(_conversations(path))
    random.Random(seed).shuffle(pairs)
    prompts: list[PromptRequest] = []
    for question, answer in pairs:
        if len(prompts) == count:
            break
        token_ids = tuple(tokenizer.encode(question))
        length = len(tokenizer.encode(answer, add_special_tokens=False)) if output_len is None else output_len
        together = len(token_ids) + length
        shortest = len(token_ids) if output_len is not None else min(len(token_ids), length)
        if shortest < _SHORTEST or len(token_ids) > _LONGEST_PROMPT:
            continue
        if together <= min(_LONGEST, max_model_len):
            prompts.append(PromptRequest(token_ids, greedy(length)))
    return _enough(prompts, count, path)


def _conversations(path: Path) -> Iterator[tuple[str, str]]:
    try:
        entries = msgspec.json.decode(path.read_bytes(), type=list[_Conversation])
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise BenchError(f"{path} is no ShareGPT file, a list of objects with conversations[].value: {error}") from None
    for entry in entries:
        if len(entry.conversations) >= 2:
            yield entry.conversations[0].value, entry.conversations[1].value


class _Turn(msgspec.Struct):
    value: str


class _Conversation(msgspec.Struct):
    conversations: list[_Turn] = []


def jsonl_prompts(
    path: Path,
    tokenizer: Tokenizer | None,
    chat: ChatTemplate | None,
    count: int,
    output_len: int | None,
    model: ModelFacts,
    seed: int,
) -> list[PromptRequest]:
    """The first ``count`` lines of a file as `generate` reads them. BenchError for a line that cannot be measured."""
    parser = RequestParser(model, tokenizer, chat, max_tokens=output_len, base_seed=seed)
    prompts: list[PromptRequest] = []
    with path.open("rb") as stream:
        for item in itertools.islice(read_requests(stream, parser, FinishedRows(), _MAX_LINE_BYTES), count):
            if isinstance(item, BadLine):
                raise BenchError(f"{path}, line {item.line}: {item.message}")
            if item.answers > 1 or item.sampling.stop:
                raise BenchError(f"{path}, line {item.line}: n > 1, several prompts and stop strings are not measured")
            prompts.append(PromptRequest(item.prompts[0].token_ids, item.sampling, priority=item.priority))
    return _enough(prompts, count, path)


def _enough(prompts: list[PromptRequest], count: int, path: Path) -> list[PromptRequest]:
    if not prompts:
        raise BenchError(f"{path} gives 0 usable prompts: name another file")
    if len(prompts) < count:
        raise BenchError(
            f"{path} gives {len(prompts)} usable prompts, {count} are asked for: type --num-prompts {len(prompts)} or "
            "less"
        )
    return prompts
