"""`slurm/serve.sbatch` on a real Slurm: where it can be reached, and what becomes of streams when its time is over."""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.slurm.cluster import Cluster, wait_until
from tests.slurm.jobs import ROOT, SMALL, environment

pytestmark = pytest.mark.slurm

BODY = {"prompt": "def add(a, b):", "temperature": 0, "max_tokens": 100, "ignore_eos": True, "stream": True}


@dataclass
class ServeJob:
    """One job in a folder of its own."""

    cluster: Cluster
    folder: Path
    id: str = ""

    def submit(self, launcher: str) -> None:
        variables = {"LOCKSTRIDE_INTERFACE": "lo", "LOCKSTRIDE_RANKS_PER_NODE": "2", "LOCKSTRIDE_LAUNCHER": launcher}
        words = ["sbatch", "--parsable", "--output=job.out", str(ROOT / "slurm/serve.sbatch"), *SMALL]
        words += ["--drain-seconds", "25"]  # the cluster's KillWait is short
        self.id = self.cluster.run(*words, environment=environment(**variables), cwd=self.folder).strip()

    @property
    def said(self) -> str:
        files = [self.folder / "job.out", *sorted((self.folder / "slurm-logs").rglob("*.log"))]
        return "\n".join(f"==> {path.name} <==\n{path.read_text()}" for path in files if path.exists())

    def address(self, start: int) -> tuple[str, int]:
        """Of its start of that number, once it serves."""
        file = self.folder / f"slurm-logs/{self.id}.{start}/address"
        wait_until(file.exists, f"an address: {self.said}", 180)
        parts = urlsplit(file.read_text().strip())
        assert parts.port is not None
        return "127.0.0.1", parts.port  # it listens on all interfaces

    @property
    def key(self) -> str:
        named = re.search(r"the key is in (\S+)", (self.folder / "job.out").read_text())
        assert named is not None, self.said
        return Path(named[1]).read_text().strip()


@pytest.fixture
def job(cluster: Cluster, tmp_path: Path) -> Iterator[ServeJob]:
    cluster.wait_until_idle()
    job = ServeJob(cluster, tmp_path)
    yield job
    if job.id:
        cluster.run("scancel", job.id)


def asked(job: ServeJob, start: int, key: str) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    """A stream whose status has come."""
    connection = http.client.HTTPConnection(*job.address(start), timeout=120)
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(BODY), headers)
    return connection, connection.getresponse()


def text_of(stream: bytes) -> str:
    """Of a stream that ended as it should."""
    events = [line[6:] for line in stream.decode().splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]", stream[-500:]
    chunks = [json.loads(event) for event in events[:-1]]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert len(chunks) == BODY["max_tokens"]
    return "".join(chunk["choices"][0]["text"] for chunk in chunks)


@pytest.mark.parametrize("launcher", ["srun", pytest.param("torchrun", marks=pytest.mark.long)])
def test_usr1_lets_streams_end_and_the_job_serves_again_with_the_same_key(job: ServeJob, launcher: str) -> None:
    job.submit(launcher)
    job.address(0)
    key = job.key
    connection, response = asked(job, 0, "another key")
    assert response.status == 401
    connection.close()
    connection, response = asked(job, 0, key)
    assert response.status == 200
    begin = response.read(20)
    job.cluster.run("scancel", "--batch", "--signal=USR1", job.id)
    first = text_of(begin + response.read())
    connection.close()
    job.cluster.wait_for_requeue(job.id)
    connection, response = asked(job, 1, key)
    assert text_of(response.read()) == first
    connection.close()
    assert "serving at http://" in job.said
    job.cluster.run("scancel", job.id)
    assert job.cluster.wait_for_job(job.id).state == "CANCELLED"
