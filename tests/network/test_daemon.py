"""`daemon` on two hosts with two ranks each: sessions say what requests of one rank say, and all ranks end with it."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
from pathlib import Path

import pytest

from runtime.daemon.client import SlotClient
from tests.faults.zygote import Zygote
from tests.network.hosts import TwoHosts
from tests.network.jobs import PATIENCE, TwoNodeJob, answers_alone, write_files

pytestmark = pytest.mark.multiprocess

PROMPT, SAID = [3, 14, 15, 92, 65], [35, 89, 79]


def asked_alone(folder: Path, prompt: list[int], tokens: int) -> list[int]:
    """What one rank answers to a request."""
    line = {"id": "r", "prompt_token_ids": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 0.0}
    (folder / "in.jsonl").write_text(json.dumps(line) + "\n")
    found: list[int] = answers_alone(folder)["r"]["token_ids"]
    return found


def leader_of(path: Path) -> int:
    """The process that listens at ``path``."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.connect(str(path))
        found: int = struct.unpack("3i", asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
        return found


def test_sessions_on_two_nodes_say_what_one_rank_says(hosts: TwoHosts, zygotes: list[Zygote], tmp_path: Path) -> None:
    """Quanta, another turn, a fork and a probe, agreed over ZeroMQ."""
    write_files(tmp_path, 1, 1)
    first = asked_alone(tmp_path, PROMPT, 7)
    second = asked_alone(tmp_path, [*PROMPT, *first, *SAID], 6)
    job = TwoNodeJob(hosts, zygotes, tmp_path)
    with job:
        path = job.sockets / "slots.sock"
        more = ("--socket", str(path), "--max-sessions", "4", "--control-timeout-s", "60")
        job.start(*more, command="daemon")
        job.wait_until_it_listens(path)
        with SlotClient(path, timeout=PATIENCE) as client:
            chat = client.start(PROMPT, max_tokens=7, quantum=3, keep=True, temperature=0, ignore_eos=True)
            assert chat.tokens() == first
            fork = chat.fork()
            chat.extend(SAID, max_tokens=6, quantum=2)
            list(chat.frames())
            probed = client.command("SCHED_PROBE")
            assert (probed["sessions"], probed["tokens"], probed["mismatches"]) == (1, 2, 0)
            chat.proceed()
            assert second[2:] == chat.tokens()
            fork.extend(SAID, max_tokens=6)
            assert fork.tokens() == second
            endless = client.start(PROMPT, max_tokens=100, quantum=100, ignore_eos=True)
            endless.close()
        os.kill(leader_of(path), signal.SIGTERM)
        outcome = job.outcome()
    assert outcome.codes == (1, 0), "\n".join(outcome.said)  # torchrun's 1 for rank 0's 143; the others followed it
    assert outcome.left == ()
    assert not path.exists()
