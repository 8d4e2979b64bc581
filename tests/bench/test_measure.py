"""The runner of the GPU measurements, without a GPU: limits, logs, what is not begun."""

from __future__ import annotations

import itertools
import json
import random
import shlex
import sys
import tarfile
from pathlib import Path

import pytest

from launch.bench.options import BenchCommand
from launch.bench.session import open_session
from launch.cli import parse
from runtime.engine import Engine
from tests.bench import archives, measure
from tests.bench.measure import PARTS, Part


def scripted(name: str, seconds: int, source: str) -> Part:
    return Part(name, 1, seconds, f"-c {shlex.quote(source)}")


@pytest.mark.slow
def test_parts_run_to_their_end_or_their_limit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "logs").mkdir()
    parts = [
        scripted("well", 60, "print('figure',42)"),
        scripted("badly", 60, "raise(SystemExit(3))"),
        scripted("too-long", 10_000, "print('never')"),
        scripted("forever", 1, "while(1):pass"),
    ]
    outcome = measure.run_all(parts, tmp_path, ["0"], seconds=600)
    assert [(one.name, one.code) for one in outcome.ran] == [("well", 0), ("badly", 3), ("forever", 124)]
    assert (outcome.late, outcome.too_large) == (["too-long"], [])
    assert (tmp_path / "logs" / "well.log").read_text() == "figure 42\n"
    assert "| badly | 3 | 0 | - |" in (tmp_path / "summary.md").read_text()
    assert "figure 42" in capsys.readouterr().out


def test_an_unknown_part_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["measure", "--out", "out", "--parts", "latency-8c"])
    with pytest.raises(SystemExit):
        measure.main()
    assert "no part latency-8c: choose from doctor" in capsys.readouterr().err


def test_an_archive_has_few_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "PARTS", (scripted("one", 60, "print(1)"), scripted("two", 60, "print(2)")))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    words = ["--out", str(tmp_path / "out"), "--archive", str(tmp_path / "small"), "--caches", "--parts", "one", "two"]
    words += ["--gpus", "2"]
    monkeypatch.setattr(sys, "argv", ["measure", *words])
    assert measure.main() == 0
    packed = sorted(path.name for path in (tmp_path / "small").iterdir())
    assert packed == ["caches.tar.gz", "logs.tar.gz", "results.tar.gz", "summary.md"]
    with tarfile.open(tmp_path / "small" / "logs.tar.gz") as tar:
        assert {"logs/one.log", "logs/two.log"} <= set(tar.getnames())


def test_a_file_that_changes_while_it_is_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts that still run write beside the one that ended."""
    gone, cut, whole = (tmp_path / name for name in ("gone", "cut", "whole"))
    for file in (cut, whole):
        file.write_text("a line\n")
    described = tarfile.TarFile.gettarinfo

    def cut_behind_its_back(self: tarfile.TarFile, name: Path, arcname: str) -> tarfile.TarInfo:
        entry = described(self, name, arcname)
        if name == cut:
            cut.write_text("a")
        return entry

    monkeypatch.setattr(tarfile.TarFile, "gettarinfo", cut_behind_its_back)
    [archive] = archives.pack(tmp_path / "packed.tar.gz", tmp_path, [gone, cut, whole])
    with tarfile.open(archive) as tar:
        tar.extractall(tmp_path / "out", filter="data")
    assert {file.name: file.read_text() for file in (tmp_path / "out").iterdir()} == {"cut": "a", "whole": "a line\n"}


def test_compiled_kernels_reach_the_next_machine_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what is read again travels; FlashInfer's module comes to where no ninja asks how old its sources are."""
    monkeypatch.setattr(archives, "PIECE", 1000)
    first, second, package = (tmp_path / name for name in ("first", "second", "flashinfer"))
    built = ".cache/flashinfer/0.6.13/90a/cached_ops/prefill"
    kept = {".triton/cache/ABC/k.cubin", ".triton/cache/ABC/k.json", ".triton/cache/DEF/launcher.so"}
    kept |= {f"{built}/prefill.so", ".cache/lockstride/kernels/gpu-torch.json"}
    for name in (*kept, ".triton/cache/ABC/k.ptx", f"{built}/prefill.cuda.o", f"{built}/build.ninja"):
        (first / name).parent.mkdir(parents=True, exist_ok=True)
        (first / name).write_bytes(random.Random(name).randbytes(600))
    second.mkdir()
    pieces = archives.pack_kernels(tmp_path, first)
    assert [piece.name for piece in pieces] == [f"caches.tar.gz.{number}" for number in range(len(pieces))]
    assert len(pieces) > 2
    assert all(piece.stat().st_size <= 1000 for piece in pieces)
    assert archives.unpack_kernels(tmp_path, second, package) == len(kept)
    for name in kept:
        assert (second / name).read_bytes() == (first / name).read_bytes()
    there = {str(path.relative_to(second)) for path in second.rglob("*") if path.is_file()}
    assert there == kept
    ready = package / "data" / "aot" / "prefill" / "prefill.so"
    assert ready.read_bytes() == (first / built / "prefill.so").read_bytes()
    (first / ".triton/cache/DEF/launcher.so").unlink()
    monkeypatch.setattr(archives, "PIECE", 1 << 20)
    assert [path.name for path in archives.pack_kernels(tmp_path, first)] == ["caches.tar.gz"]
    assert not list(tmp_path.glob("caches.tar.gz.*")), "pieces of an older archive are not left"


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_commands_name_what_is_there(part: Part) -> None:
    """A typing error would cost a machine's minutes."""
    words = shlex.split(part.command.format(out="out"))
    assert missing(words) == []
    if words[:2] != ["-m", "launch"]:
        return
    command = parse([*words[2:], "--device", "cuda"] if "latency" in words else words[2:])
    if isinstance(command, BenchCommand) and command.subcommand == "latency":
        environ = dict.fromkeys(("RANK", "LOCAL_RANK", "GROUP_RANK"), "0")
        environ |= dict.fromkeys(("LOCAL_WORLD_SIZE", "WORLD_SIZE"), str(part.gpus))
        environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
        session = open_session(command, environ if part.torchrun else {}, open_engine=never_opened)
        assert session.ranks == part.gpus


@pytest.mark.parametrize(
    ("command", "found"),
    [
        ("-m tests.bench.gone --out out", ["tests/bench/gone.py"]),
        ("-m tests.bench.sampler --variant", ["--variant"]),
        ("-m pytest tests/gpu/test_gone.py", ["tests/gpu/test_gone.py"]),
        ("-m launch bench latency --model qwen3-9b", ["models/shapes/qwen3-9b/config.json"]),
        ("-m tests.bench.sampler --variants", []),
    ],
)
def test_what_is_not_there_is_found(command: str, found: list[str]) -> None:
    assert missing(command.split()) == found


def missing(words: list[str]) -> list[str]:
    """Files, and options of our own programs, that the words of a command name and that are not there."""
    named = [word for word in words if word.startswith("tests/")]
    source = ""
    for option, word in itertools.pairwise(words):
        if option == "-m" and word.startswith("tests."):
            named.append(f"{word.replace('.', '/')}.py")
            source = (measure.ROOT / named[-1]).read_text() if (measure.ROOT / named[-1]).is_file() else ""
        if option == "--model":
            named.append(f"models/shapes/{word}/config.json")
        if option == "--speculative-config":
            named.append(f"{json.loads(word)['model']}/config.json")
    options = [word for word in words if source and word.startswith("--") and f'"{word}"' not in source]
    return [path for path in named if not (measure.ROOT / path).is_file()] + options


def never_opened(*_: object) -> Engine:
    raise AssertionError("only the command line is looked at here")
