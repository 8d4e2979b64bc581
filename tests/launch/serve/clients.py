"""Real clients against the server on models/demo: `python -m tests.launch.serve.clients [NAME ...]`.

Knows: each client's package, what it is asked to do, and what it must bring back. Does not know: the server's inside.

Each has a venv of its own under out/clients, made with pip: their requirements exclude each other. What they brought
back is docs/lab/clients.md. CI has the openai package alone (test_served.py).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.launch.serve import soak

ROOT = Path(__file__).resolve().parents[3]
PATIENCE = 900.0

# What a model without sense can fill in within few tokens.
PERSON = """
from typing import Literal
import pydantic

class Person(pydantic.BaseModel):
    name: Literal["Ann", "Bob"]
    age: int = pydantic.Field(ge=0, le=99)

WHO = [{"role": "user", "content": "who?"}]
"""
OPENAI = """
import openai
url = URL + "/v1"
client = openai.OpenAI(base_url=url, api_key="none", max_retries=0, _strict_response_validation=True)
assert [model.id for model in client.models.list()] == ["demo"]
chat = dict(model="demo", messages=[{"role": "user", "content": "a queue"}], max_tokens=12, temperature=0)
whole = client.chat.completions.create(**chat)
chunks = list(client.chat.completions.create(**chat, stream=True, stream_options={"include_usage": True}))
assert "".join(c.choices[0].delta.content for c in chunks[:-1]) == whole.choices[0].message.content
assert chunks[-1].usage == whole.usage and len(chunks) == 13
assert client.completions.create(model="demo", prompt=["a", "b"], n=2, max_tokens=3).choices[3].index == 3
for error, body in ((openai.NotFoundError, dict(model="x")), (openai.BadRequestError, dict(model="demo", top_p=5))):
    try:
        client.completions.create(prompt="a", **body)
        raise SystemExit("no error")
    except error:
        pass
asked = dict(model="demo", messages=WHO, temperature=2, max_tokens=400)
parsed = client.chat.completions.parse(**asked, response_format=Person).choices[0].message.parsed
assert isinstance(parsed, Person), parsed
tools = [openai.pydantic_function_tool(Person)]
for choice in ("required", {"type": "function", "function": {"name": "Person"}}):
    (call,) = client.chat.completions.parse(
        **asked, tools=tools, tool_choice=choice, parallel_tool_calls=False).choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Person), call
    with client.chat.completions.stream(**asked, tools=tools, tool_choice=choice, parallel_tool_calls=False) as events:
        for event in events:
            pass
        (call,) = events.get_final_completion().choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Person), call
with client.chat.completions.stream(**asked, response_format=Person) as events:
    for event in events:
        pass
    assert isinstance(events.get_final_completion().choices[0].message.parsed, Person)
answer = client.responses.parse(model="demo", input="who?", temperature=2, max_output_tokens=400, text_format=Person)
assert isinstance(answer.output_parsed, Person), answer
"""
LITELLM = """
import os
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
import litellm
for provider in ("openai", "hosted_vllm"):
    asked = dict(model=f"{provider}/demo", api_base=URL + "/v1", api_key="none", max_tokens=8, temperature=0,
                 messages=[{"role": "user", "content": "a queue"}])
    whole = litellm.completion(**asked)
    pieces = [c.choices[0].delta.content or "" for c in litellm.completion(**asked, stream=True)]
    assert "".join(pieces) == whole.choices[0].message.content, pieces
    assert whole.usage.completion_tokens == 8
    asked |= dict(messages=WHO, max_tokens=400, temperature=2)
    formed = litellm.completion(**asked, response_format=Person)
    assert Person.model_validate_json(formed.choices[0].message.content)
"""
LANGCHAIN = """
from langchain_openai import ChatOpenAI
model = ChatOpenAI(model="demo", base_url=URL + "/v1", api_key="none", max_tokens=8, temperature=0, stream_usage=True)
whole = model.invoke("a queue")
pieces = list(model.stream("a queue"))
assert "".join(piece.content for piece in pieces) == whole.content
assert whole.usage_metadata["output_tokens"] == 8
assert [piece.usage_metadata for piece in pieces if piece.usage_metadata][-1]["output_tokens"] == 8
model = ChatOpenAI(model="demo", base_url=URL + "/v1", api_key="none", max_tokens=400, temperature=2)
for method in ("json_schema", "function_calling"):
    assert isinstance(model.with_structured_output(Person, method=method).invoke("who?"), Person), method
"""
INSTRUCTOR = """
import instructor, openai
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    client = instructor.from_openai(openai.OpenAI(base_url=URL + "/v1", api_key="none"), mode=mode)
    found = client.chat.completions.create(
        model="demo", messages=WHO, response_model=Person, temperature=2, max_tokens=400, max_retries=0)
    assert isinstance(found, Person), found
"""
LM_EVAL = """
import json, math, pathlib, subprocess, sys, tempfile
TEXTS = ["def gcd(a, b):", "class Queue:", "for i in range(10):", "import math"]
ENDS = ["\\n    return a", "\\n    pass", "\\n    print(i)", "\\nimport sys"]
with tempfile.TemporaryDirectory() as folder:
    folder = pathlib.Path(folder)
    rows = [{"question": t, "choices": ENDS, "answer": i} for i, t in enumerate(TEXTS)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in rows))
    (folder / "task.yaml").write_text(f'''
task: demo_ends
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/rows.jsonl}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_target: answer
doc_to_choice: choices
target_delimiter: ""
metric_list: [{{metric: acc}}]
''')
    arguments = f"model=demo,base_url={URL}/v1/completions,tokenizer=MODEL,tokenizer_backend=huggingface"
    command = str(pathlib.Path(sys.executable).with_name("lm-eval"))
    subprocess.run([command, "run", "--model", "local-completions", "--model_args", arguments, "--tasks", "demo_ends",
        "--include_path", str(folder), "--output_path", str(folder / "out"), "--log_samples"], check=True)
    (samples,) = (folder / "out").rglob("samples*.jsonl")
    scored = [json.loads(line) for line in samples.read_text().splitlines()]
    told = {(row["doc"]["question"], end): float(r[0][0] if isinstance(r[0], list) else r[0])
            for row in scored for end, r in zip(ENDS, row["resps"])}
print("RESULT", json.dumps([[t, e, v] for (t, e), v in told.items()]))
"""
GUIDELLM = """
import subprocess, sys, pathlib, tempfile, json
with tempfile.TemporaryDirectory() as folder:
    for path in ("/v1/completions", "/v1/chat/completions"):
        command = str(pathlib.Path(sys.executable).with_name("guidellm"))
        subprocess.run([command, "run",
            "--backend", "kind=openai_http,target=" + URL + ",model=demo,request_format=" + path,
            "--tokenizer", "kind=hf_auto,model=MODEL",
            "--data", "kind=synthetic_text,prompt_tokens=20,output_tokens=8",
            "--profile", "kind=concurrent,streams=4",
            "--constraint", "kind=max_requests,count=20",
            "--output", "kind=json,path=" + folder + "/out.json"], check=True)
"""
AIPERF = """
import json, pathlib, subprocess, sys, tempfile
with tempfile.TemporaryDirectory() as folder:
    for extra in ([], ["--request-cancellation-rate", "50", "--request-cancellation-delay", "0.05"]):
        command = str(pathlib.Path(sys.executable).with_name("aiperf"))
        subprocess.run([command, "profile", "--model", "demo", "--url", URL, "--endpoint-type", "chat", "--streaming",
            "--tokenizer", "models/demo", "--concurrency", "4", "--request-count", "24",
            "--synthetic-input-tokens-mean", "20", "--output-tokens-mean", "8", "--ui", "none",
            "--artifact-dir", folder, *extra], check=True)
"""

VLLM = """
import json, os, pathlib, subprocess, sys, tempfile
os.environ["HF_HUB_OFFLINE"] = "1"
with tempfile.TemporaryDirectory() as folder:
    for backend, path in (("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")):
        subprocess.run([str(pathlib.Path(sys.executable).with_name("vllm")), "bench", "serve", "--backend", backend,
            "--base-url", URL, "--endpoint", path, "--model", "demo", "--tokenizer", "MODEL",
            "--dataset-name", "random", "--random-input-len", "20", "--random-output-len", "32", "--ignore-eos",
            "--num-prompts", "24", "--max-concurrency", "8", "--save-result", "--save-detailed",
            "--result-dir", folder, "--result-filename", backend + ".json"], check=True)
        found = json.loads(pathlib.Path(folder, backend + ".json").read_text())
        assert (found["completed"], found.get("failed", 0)) == (24, 0), found
        assert found["total_output_tokens"] == 24 * 32, found["total_output_tokens"]
        assert [len(gaps) for gaps in found["itls"]] == [31] * 24, [len(gaps) for gaps in found["itls"]]
        assert all(gap >= 0 for gaps in found["itls"] for gap in gaps)
        print(backend, {key: found[key] for key in ("mean_ttft_ms", "mean_itl_ms", "output_throughput")})
"""
# torchvision's wheel on PyPI is built for CUDA's torch; SGLang imports it, and its load tool needs nothing of it.
TORCHVISION_WITHOUT_KERNELS = """
import importlib.util, pathlib
folder = pathlib.Path(importlib.util.find_spec("torchvision").origin).parent
(folder / "_meta_registrations.py").write_text("")
"""
SGLANG = """
import json, os, pathlib, subprocess, sys, tempfile
os.environ["HF_HUB_OFFLINE"] = "1"
with tempfile.TemporaryDirectory() as folder:
    for backend in ("sglang-oai", "sglang-oai-chat", "vllm"):
        out = folder + "/" + backend + ".jsonl"
        subprocess.run([sys.executable, "-m", "sglang.benchmark.serving", "--backend", backend, "--base-url", URL,
            "--model", "demo", "--tokenizer", "MODEL", "--dataset-name", "random-ids", "--random-input-len", "20",
            "--random-output-len", "32", "--random-range-ratio", "1", "--num-prompts", "24", "--max-concurrency", "8",
            "--output-file", out, "--output-details"], check=True)
        found = json.loads(pathlib.Path(out).read_text().splitlines()[-1])
        assert found["completed"] == 24, found
        assert found["total_output_tokens"] == 24 * 32, found["total_output_tokens"]
        print(backend, {key: found[key] for key in ("mean_ttft_ms", "mean_itl_ms", "output_throughput")})
"""


@dataclass(frozen=True)
class RealClient:
    """``script`` is run by the venv's Python after ``URL = ...``, with MODEL replaced by the model's folder.

    ``alone`` are packages that are installed without what they require: load tools that come with an engine.
    ``mend`` is run once by the venv's Python after that.
    """

    packages: tuple[str, ...]
    script: str
    alone: tuple[str, ...] = ()
    mend: str = ""


CLIENTS = {
    "openai2": RealClient(("openai==2.54.0",), PERSON + OPENAI),
    "openai3": RealClient(("openai==3.54.0",), PERSON + OPENAI),
    "litellm": RealClient(("litellm==1.106.2",), PERSON + LITELLM),
    "langchain": RealClient(("langchain-openai==1.7.3",), PERSON + LANGCHAIN),
    "instructor": RealClient(("instructor==1.17.0",), PERSON + INSTRUCTOR),
    "lmeval": RealClient(("lm-eval[api]==0.4.13", "transformers"), LM_EVAL),
    "guidellm": RealClient(("torch", "guidellm==0.8.1"), GUIDELLM),
    "aiperf": RealClient(("aiperf==0.13.0",), AIPERF),
    "vllm": RealClient(
        (
            *("torch==2.13.0", "numpy", "transformers", "regex", "cachetools", "psutil", "aiohttp", "tqdm", "pydantic"),
            *("msgspec", "cloudpickle", "pyyaml", "pillow", "pybase64", "requests", "openai<3", "fastapi", "pyzmq"),
            *("prometheus_client", "einops", "blake3", "cbor2", "py-cpuinfo", "openai-harmony", "uvloop", "llguidance"),
            *("xgrammar", "uvicorn", "watchfiles", "partial-json-parser", "model-hosting-container-standards"),
        ),
        VLLM,
        ("vllm==0.25.1",),
    ),
    "sglang": RealClient(
        (
            *("torch==2.13.0", "triton", "numpy", "transformers", "aiohttp", "tqdm", "requests", "pydantic", "psutil"),
            *("pyzmq", "orjson", "pillow", "packaging", "huggingface_hub", "ipython", "uvloop", "fastapi", "dill"),
            *("pybase64", "setproctitle", "msgspec", "einops", "datasets", "apache-tvm-ffi", "sentencepiece"),
            *("compressed_tensors", "gguf"),
        ),
        SGLANG,
        ("sglang==0.5.23", "torchvision==0.28.0"),
        TORCHVISION_WITHOUT_KERNELS,
    ),
}


def venv(folder: Path, client: RealClient) -> Path:
    """Its Python, installed once."""
    python = folder / "bin" / "python"
    done = folder / ".installed"
    if not done.exists():
        if not python.exists():
            subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "-q", *client.packages], check=True)
        if client.alone:
            subprocess.run([str(python), "-m", "pip", "install", "-q", "--no-deps", *client.alone], check=True)
        if client.mend:
            subprocess.run([str(python), "-c", client.mend], check=True)
        done.touch()
    return python


def close_to_transformers(output: str) -> None:
    """lm-eval's log-likelihoods against those that transformers computes itself: within 1e-3."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    told = json.loads(next(line for line in output.splitlines() if line.startswith("RESULT"))[6:])
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "models/demo")
    model = AutoModelForCausalLM.from_pretrained(ROOT / "models/demo", dtype=torch.float32)
    for text, end, value in told:
        begin, whole = (tokenizer(part, return_tensors="pt").input_ids for part in (text, text + end))
        with torch.no_grad():
            scores = model(whole).logits.log_softmax(-1)[0, :-1].gather(-1, whole[0, 1:, None])[:, 0]
        expected = float(scores[begin.shape[1] - 1 :].sum())
        assert abs(expected - value) < 1e-3, (text, end, expected, value)


async def run(names: list[str], folder: Path) -> dict[str, str]:
    """What became of each. The server must be at rest after each of them."""
    told = {}
    formats = "--tool-call-parser", "hermes"  # the model's template has none
    async with soak.target("real", "--served-model-name", "demo", *formats) as server:
        for name in names:
            client = CLIENTS[name]
            python = await asyncio.to_thread(venv, folder / name, client)
            script = f"URL = 'http://127.0.0.1:{server.port}'\n" + client.script.replace(
                "MODEL", str(ROOT / "models/demo")
            )
            environ = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "HF_HUB_OFFLINE")}
            words = [str(python), "-c", script]
            ran = await asyncio.to_thread(
                subprocess.run, words, env=environ, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE
            )
            told[name] = (
                "ok" if ran.returncode == 0 else f"exit code {ran.returncode}: {(ran.stdout + ran.stderr)[-2500:]}"
            )
            if name == "lmeval" and ran.returncode == 0:
                close_to_transformers(ran.stdout)
            await server.at_rest()
            print(f"{name}: {told[name]}", flush=True)
    return told


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="clients")
    parser.add_argument("names", nargs="*", choices=[*CLIENTS, []], default=[])
    parser.add_argument("--venvs", type=Path, default=ROOT / "out/clients")
    given = parser.parse_args(words)
    given.venvs.mkdir(parents=True, exist_ok=True)
    told = asyncio.run(run(given.names or list(CLIENTS), given.venvs))
    return 0 if set(told.values()) == {"ok"} else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
