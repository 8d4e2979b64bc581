"""The whole server on two ranks: torchrun, API process, HTTP; the openai package as its client, and what goes wrong."""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import io
import json
import os
import re
import runpy
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import openai
import pydantic
import pytest

from tests.parallel.control.ranks import short_folder
from tests.torchrun import Running, started, started_alone

pytestmark = pytest.mark.multiprocess
PATIENCE = 120.0
KEY = "secret-of-the-test"


class Server:
    """A running server and the processes behind it."""

    def __init__(self, running: Running, port: int) -> None:
        self.running = running
        self.port = port
        self._clients: list[openai.OpenAI] = []

    def get(self, path: str, timeout: float = 10.0) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            body = response.read()
            is_json = response.getheader("content-type", "").startswith("application/json")
            return response.status, json.loads(body) if is_json else body.decode()
        finally:
            connection.close()

    def metric(self, name: str) -> float:
        page = self.get("/metrics")[1]
        return float(next(line.rpartition(" ")[2] for line in page.splitlines() if line.startswith(name)))

    @property
    def client(self) -> openai.OpenAI:
        return self.client_with(_strict_response_validation=True)

    def client_with(self, **options: Any) -> openai.OpenAI:
        url = f"http://127.0.0.1:{self.port}/v1"
        self._clients.append(openai.OpenAI(**{"base_url": url, "api_key": KEY, "max_retries": 0, **options}))
        return self._clients[-1]

    def close(self) -> None:
        for client in self._clients:
            client.close()

    def api_process(self) -> int:
        """Its process id; that of rank 0 is its parent's."""
        ranks = {pid for pid, (parent, _) in processes().items() if parent == self.running.pid}
        found = [
            pid
            for pid, (parent, words) in processes().items()
            if parent in ranks and b"launch.serve.api_process" in words
        ]
        assert len(found) == 1, found
        return found[0]

    def follower(self) -> int:
        """The process id of rank 1."""
        everything = processes()
        leader = everything[self.api_process()][0]
        words = everything[leader][1]  # forked from one process, ranks look alike
        (found,) = (
            pid
            for pid, (parent, its) in everything.items()
            if parent == self.running.pid and its == words and pid != leader
        )
        return found


def processes() -> dict[int, tuple[int, list[bytes]]]:
    """Process id -> its parent's, and its command line."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            found[int(folder.name)] = parent, (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:  # it has ended
            continue
    return found


def until(condition: Callable[[], bool], what: str, patience: float = PATIENCE) -> None:
    ends = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < ends, what
        time.sleep(0.05)


@contextmanager
def serving(folder: Path, *options: str, **environ: str) -> Iterator[Server]:
    address = folder / "address"
    words: tuple[str, ...] = (
        "serve",
        "--model",
        "models/demo",
        "--device",
        "cpu",
        "--port",
        "0",
        "--address-file",
        str(address),
    )
    words += ("--served-model-name", "demo", "alias", "--bundles", str(folder / "bundles"), "--max-num-seqs", "8")
    with started(2, "launch", *words, *options, **environ) as running:
        until(lambda: address.exists() or running.ended, "it does not begin to serve")
        assert address.exists(), running.wait().said
        server = Server(running, int(address.read_text().rpartition(":")[2]))
        until(lambda: server.get("/ready")[0] == 200, "it does not become ready")
        try:
            yield server
        finally:
            server.close()


def tokens_that_a_request_names_are_drawn_or_not(client: openai.OpenAI) -> None:
    """On two ranks, each of which draws from its half of the vocabulary."""

    def ids(**fields: Any) -> list[int]:
        extra = {"return_token_ids": True, **fields.pop("extra", {})}
        asked = {"model": "demo", "prompt": "def gcd(a, b):", "max_tokens": 6, "temperature": 0, **fields}
        (choice,) = client.completions.create(**asked, extra_body=extra).choices
        found: list[int] = getattr(choice, "token_ids")  # noqa: B009 (vLLM's field; the package does not know it)
        return found

    plain = ids()
    assert ids(logit_bias={"300": 100}) == [300] * 6
    assert plain[0] not in ids(logit_bias={str(plain[0]): -100})
    assert set(ids(extra={"allowed_token_ids": [40, 300]})) <= {40, 300}
    asked: dict[str, Any] = {"model": "demo", "prompt": "def gcd(a, b):", "max_tokens": 12, "temperature": 0}
    text = client.completions.create(**asked).choices[0].text
    word = max(text.split(), key=len)
    other = client.completions.create(**asked, extra_body={"bad_words": [word]}).choices[0].text
    assert other != text
    with pytest.raises(openai.BadRequestError, match="logit_bias"):
        ids(logit_bias={"5": 101})


class Person(pydantic.BaseModel):
    name: Literal["Ann", "Bob"]
    age: int = pydantic.Field(ge=0, le=99)


def answers_have_the_form_that_was_asked_for(client: openai.OpenAI) -> None:
    """On two ranks, whole and streamed, beside answers of any form; and what cannot be asked for."""
    if importlib.util.find_spec("llguidance") is None:
        return
    schema = {
        "type": "object",
        "properties": {"name": {"enum": ["Ann", "Bob"]}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    asked: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "who?"}], "temperature": 2}
    form: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema, "strict": True}}
    asked["response_format"] = form
    answer = client.chat.completions.create(**asked, max_tokens=400)
    assert answer.choices[0].finish_reason == "stop"
    found = json.loads(answer.choices[0].message.content or "")
    assert found["name"] in ("Ann", "Bob")
    assert 0 <= found["age"] <= 99
    chunks = client.chat.completions.create(**asked, max_tokens=400, stream=True)
    assert json.loads("".join(chunk.choices[0].delta.content or "" for chunk in chunks)).keys() == {"name", "age"}
    cut = client.chat.completions.create(**asked, max_tokens=3)
    assert cut.choices[0].finish_reason == "length"
    del asked["response_format"]
    parsed = client.chat.completions.parse(**asked, response_format=Person, max_tokens=400).choices[0].message.parsed
    assert isinstance(parsed, Person)
    tool = openai.pydantic_function_tool(Person)
    asked |= {"tools": [tool], "max_tokens": 400}
    called = client.chat.completions.parse(**asked, tool_choice="required", parallel_tool_calls=False).choices[0]
    (call,) = called.message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Person)
    assert called.finish_reason == "tool_calls"
    named: Any = {"type": "function", "function": {"name": "Person"}}
    pieces = [
        delta.function.arguments or ""
        for chunk in client.chat.completions.create(**asked, tool_choice=named, stream=True)
        for delta in chunk.choices[0].delta.tool_calls or ()
        if delta.function
    ]
    assert Person.model_validate_json("".join(pieces))
    asked = {name: value for name, value in asked.items() if name not in ("tools", "max_tokens")}
    extra = {"structured_outputs": {"choice": ["yes", "no"]}}
    several = client.completions.create(model="demo", prompt="so", n=3, max_tokens=20, extra_body=extra)
    assert {choice.text for choice in several.choices} <= {"yes", "no"}
    form["json_schema"] = {"name": "n", "schema": {"properties": {"a": {"not": {}}}}}
    asked["response_format"] = form
    with pytest.raises(openai.BadRequestError, match=r"schema\.properties\.a: keyword 'not'") as refused:
        client.chat.completions.create(**asked)
    assert refused.value.param == "response_format"


def responses_come_whole_and_streamed(client: openai.OpenAI) -> None:
    """/v1/responses: text, as a stream the same, and where llguidance is a parsed text and a call."""
    asked: dict[str, Any] = {"model": "demo", "input": "who?", "temperature": 0, "max_output_tokens": 12}
    whole = client.responses.create(**asked)
    events = list(client.responses.create(**asked, stream=True))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    assert (whole.status, events[-1].type) == ("incomplete", "response.incomplete")
    if importlib.util.find_spec("llguidance") is None:
        return
    asked |= {"temperature": 2, "max_output_tokens": 400}
    assert isinstance(client.responses.parse(**asked, text_format=Person).output_parsed, Person)
    closed = Person.model_json_schema() | {"additionalProperties": False}  # else chance may never end it
    tool: Any = {"type": "function", "name": "Person", "parameters": closed, "strict": False}
    (item,) = client.responses.create(**asked, tools=[tool], tool_choice="required", parallel_tool_calls=False).output
    assert item.type == "function_call"
    assert Person.model_validate_json(item.arguments)


def test_the_openai_client_and_the_ends_of_a_server(tmp_path: Path) -> None:
    key_file = tmp_path / "keys"
    key_file.write_text(KEY + "\n")
    formats = "--tool-call-parser", "hermes"  # the model's template has none
    with serving(tmp_path, "--api-key-file", str(key_file), "--drain-seconds", "60", *formats) as server:
        client = server.client
        models_are_listed(client)
        completions_come_whole_and_streamed(client, server.client_with())
        chats_come_whole_and_streamed(client)
        log_probabilities_are_the_model_s(server.client_with())
        tokens_that_a_request_names_are_drawn_or_not(client)
        answers_have_the_form_that_was_asked_for(client)
        responses_come_whole_and_streamed(client)
        the_document_s_example_runs(server, tmp_path)
        errors_are_the_client_s_own_classes(server)
        the_client_s_own_disconnect_cancels(server)
        an_api_process_that_dies_is_started_again(server)
        a_drain_lets_streams_end(server)
        ended = server.running.wait(PATIENCE)
    assert "Traceback" not in ended.said, ended.said


def models_are_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["demo", "alias"]
    assert client.models.retrieve("alias").object == "model"


def completions_come_whole_and_streamed(client: openai.OpenAI, loose: openai.OpenAI) -> None:
    """``loose`` does not validate: the package's type wants a finish_reason in every chunk."""
    asked: dict[str, Any] = {"model": "demo", "prompt": "def gcd(a, b):", "max_tokens": 24, "temperature": 0}
    whole = client.completions.create(**asked)
    assert whole.choices[0].finish_reason in ("stop", "length")
    assert whole.usage is not None
    assert whole._request_id is not None
    chunks = list(loose.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == whole.choices[0].text
    assert len(chunks) - 1 == whole.usage.completion_tokens
    assert chunks[-1].usage == whole.usage
    several = client.completions.create(
        **{**asked, "prompt": ["def f(x):", "def g(x):"], "temperature": 1, "n": 2, "seed": 7}
    )
    again = client.completions.create(
        **{**asked, "prompt": ["def f(x):", "def g(x):"], "temperature": 1, "n": 2, "seed": 7}
    )
    assert [choice.text for choice in several.choices] == [choice.text for choice in again.choices]
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    stopped = client.completions.create(**asked, stop=["a % b", "while"])
    assert stopped.choices[0].text in whole.choices[0].text


def chats_come_whole_and_streamed(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": "demo", "messages": [{"role": "user", "content": "a queue"}], "max_completion_tokens": 16,
        "temperature": 0,
    }  # fmt: skip
    whole = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
    assert whole.choices[0].logprobs is not None
    assert whole.choices[0].logprobs.content is not None
    assert len(whole.choices[0].logprobs.content) == 16
    assert all(len(entry.top_logprobs) == 2 for entry in whole.choices[0].logprobs.content)
    stream = client.chat.completions.create(**asked, stream=True, logprobs=True)
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == "length"
    scores = [chunk.choices[0].logprobs for chunk in chunks]
    assert all(score is not None and score.content is not None and len(score.content) == 1 for score in scores)


def log_probabilities_are_the_model_s(loose: openai.OpenAI) -> None:
    """As lm-eval asks: echo, one token more, and the sum over the continuation."""
    ids = [[311, 437, 4046, 12], [311, 437]]
    scored = loose.completions.create(
        model="demo", prompt=ids, echo=True, logprobs=1, max_tokens=1, temperature=0, seed=1234
    )
    for prompt, choice in zip(ids, scored.choices, strict=True):
        logprobs = choice.logprobs
        assert logprobs is not None
        assert logprobs.token_logprobs is not None
        assert logprobs.top_logprobs is not None
        assert len(logprobs.token_logprobs) == len(prompt) + 1
        first: float | None = logprobs.token_logprobs[0]  # its type says float; the API's convention is null
        assert first is None
        assert logprobs.token_logprobs[-1] == max(logprobs.top_logprobs[-1].values()), "greedy, by the same float"


def the_document_s_example_runs(server: Server, folder: Path) -> None:
    document = (Path(__file__).parents[3] / "docs/serving.md").read_text()
    (example,) = re.findall(r"^```python\n(.*?)^```$", document, re.MULTILINE | re.DOTALL)
    assert "127.0.0.1:8000" in example
    assert 'api_key="none"' in example
    script = folder / "example.py"
    script.write_text(example.replace(":8000", f":{server.port}").replace('"none"', f'"{KEY}"'))
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        runpy.run_path(str(script))["client"].close()
    assert "GCD" in shown.getvalue()


def errors_are_the_client_s_own_classes(server: Server) -> None:
    client = server.client
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="other", prompt="a")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model="demo", prompt="a", temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="demo", prompt=[5] * 5000)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.AuthenticationError):
        server.client_with(api_key="wrong").models.list()
    for header in (b"b" * 200_000 + b"\r\n", b"b" * 80_000 + b"\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as raw:
            raw.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n" + b"a: " + header)
            assert raw.recv(100).startswith(b"HTTP/1.1 431")
    assert server.get("/health")[0] == 200


def long_stream(client: openai.OpenAI) -> Any:
    return client.chat.completions.create(
        model="demo", messages=[{"role": "user", "content": "x"}], max_tokens=1500, stream=True,
        extra_body={"ignore_eos": True},
    )  # fmt: skip


def the_client_s_own_disconnect_cancels(server: Server) -> None:
    stream = long_stream(server.client)
    next(iter(stream))
    stream.close()
    until(
        lambda: server.metric('lockstride:finished_total{engine="0",model_name="demo",reason="cancelled"}') == 1,
        "no cancel",
    )
    until(lambda: server.metric("vllm:kv_cache_usage_perc") == 0, "blocks are held")


def an_api_process_that_dies_is_started_again(server: Server) -> None:
    stream = iter(long_stream(server.client))
    next(stream)
    before = server.api_process()
    os.kill(before, signal.SIGKILL)
    with pytest.raises(Exception, match=r"(?i)closed|connection|incomplete|reset|peer"):
        list(stream)
    until(lambda: server.get("/ready", timeout=60)[0] == 200, "no new API process")
    assert server.api_process() != before
    until(lambda: server.metric("lockstride:api_process_restarts_total") == 1, "it is not counted")
    until(lambda: server.metric("vllm:kv_cache_usage_perc") == 0, "blocks are held")
    assert server.metric("vllm:prompt_tokens_total") > 0, "the counts of the one before are kept"
    assert server.client.completions.create(model="demo", prompt="a", max_tokens=2).choices


def a_drain_lets_streams_end(server: Server) -> None:
    texts: list[str] = []

    def read() -> None:
        stream = server.client.chat.completions.create(
            model="demo", messages=[{"role": "user", "content": "x"}], max_tokens=200, stream=True,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        texts.extend(chunk.choices[0].delta.content or "" for chunk in stream)

    until(lambda: server.metric("vllm:num_requests_running") == 0, "a request before it runs on")
    reader = threading.Thread(target=read)
    reader.start()
    until(lambda: server.metric("vllm:num_requests_running") == 1 or not reader.is_alive(), "it does not begin")
    os.kill(server.running.pid, signal.SIGTERM)
    reader.join(PATIENCE)
    assert len(texts) == 200


def test_a_stopped_rank_is_seen_in_health_and_in_the_stream(tmp_path: Path) -> None:
    with (
        short_folder() as temporary,
        serving(tmp_path, "--control-timeout-s", "6", TMPDIR=str(temporary)) as server,
    ):
        failures: list[Exception] = []

        def read() -> None:
            try:
                list(long_stream(server.client))
            except openai.APIError as error:
                failures.append(error)

        reader = threading.Thread(target=read)
        reader.start()
        until(lambda: server.metric("vllm:num_requests_running") == 1, "it does not begin")
        follower = server.follower()
        os.kill(follower, signal.SIGSTOP)
        stopped_at = time.monotonic()
        try:
            until(lambda: server.get("/health")[0] == 503, "health does not see it")
            reason = server.get("/health")[1]["reason"]
            assert "no progress" in reason or "rank 1" in reason, reason
            assert "vllm:num_requests_running" in server.get("/metrics")[1]
            reader.join(PATIENCE)
        finally:
            if Path(f"/proc/{follower}").exists() and time.monotonic() - stopped_at > PATIENCE:
                os.kill(follower, signal.SIGCONT)
        (failure,) = failures
        assert "rank 1" in str(failure)
        assert server.running.wait(PATIENCE).returncode != 0
        assert not any(temporary.glob("lockstride-serve-*")), "the watchdog ended rank 0, and a file of it stayed"


def test_a_sigterm_while_the_model_loads_leaves_no_file() -> None:
    """Of one rank, which has no watchdog. It listens from just before it loads."""
    with short_folder() as folder:
        uds, words = folder / "serve.sock", ("--model", "models/demo", "--device", "cpu")
        with started_alone("launch", "serve", *words, "--uds", str(uds), TMPDIR=str(folder)) as running:
            until(lambda: uds.exists() or running.ended, "it does not begin to load")
            os.kill(running.pid, signal.SIGTERM)
            ran = running.wait(PATIENCE)
        assert (ran.returncode, list(folder.iterdir())) == (143, []), ran.said
