"""slurm/job.sh by itself: what it finds out without a Slurm, and how it refuses what it cannot find out."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from pathlib import Path

import pytest

from launch.ranks.rendezvous import first_host

ROOT = Path(__file__).parents[2]
JOB = {"SLURM_JOB_ID": "17", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "gpu[07-09]"}


def bash(folder: Path, script: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """``script`` after job.sh, in a job of one node. Nothing of this machine's Slurm is seen."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "LOCKSTRIDE_"))}
    environment |= {**JOB, "SLURM_CONF": "/nowhere", "LOCKSTRIDE_LOGS": str(folder), **variables}
    return subprocess.run(
        ["bash", "-c", f'. "{ROOT}/slurm/job.sh"\n{script}', "bash", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.parametrize("name", ["job.sh", "generate.sbatch", "serve.sbatch", "site.env"])
def test_the_files_are_bash(name: str) -> None:
    subprocess.run(["bash", "-n", ROOT / "slurm" / name], check=True)


def test_the_first_host_of_a_node_list_is_the_one_that_python_finds(tmp_path: Path) -> None:
    lists = ["n1", "n1,n2", "gpu[07-09,12],login1", "a[1]b", "rack[1-2]node[03,5-7]", "x[10-12]-ib0,y", "node-a.b.c"]
    found = bash(tmp_path, 'for list; do lockstride_first_host "$list"; done', *lists)
    assert found.stdout.split() == [first_host(each) for each in lists]


@pytest.mark.parametrize("broken", ["", ",", "[", "[]"])
def test_a_node_list_without_a_first_host_is_refused(tmp_path: Path, broken: str) -> None:
    assert bash(tmp_path, 'lockstride_first_host "$1"', broken).returncode == 1


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({"SLURM_JOB_ID": ""}, "there is no Slurm job here: sbatch slurm/generate.sbatch"),
        ({"LOCKSTRIDE_SITE": "/nowhere/site.env"}, "/nowhere/site.env cannot be read"),
        ({"LOCKSTRIDE_MODULES": "cuda/99"}, "module load cuda/99: see LOCKSTRIDE_MODULES in site.env"),
        ({"LOCKSTRIDE_LOGS": "/proc/nowhere"}, "cannot be made: see LOCKSTRIDE_LOGS"),
        ({"LOCKSTRIDE_LAUNCHER": "mpirun"}, "LOCKSTRIDE_LAUNCHER is 'mpirun', but must be torchrun or srun"),
        ({"SLURM_JOB_NODELIST": "", "SLURM_JOB_NUM_NODES": "2"}, "SLURM_JOB_NODELIST is ''"),
        (
            {"SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "no-such-node[1-2]"},
            "the name of the first node, no-such-node1, has no address here: set LOCKSTRIDE_INTERFACE",
        ),
        (
            {"SLURM_JOB_NUM_NODES": "2", "LOCKSTRIDE_INTERFACE": "ib7"},
            "LOCKSTRIDE_INTERFACE=ib7 has no IPv4 address on gpu07",
        ),
        (
            {"SLURM_JOB_NUM_NODES": "2", "LOCKSTRIDE_INTERFACE": "lo", "SLURMD_NODENAME": "gpu08"},
            "the batch script runs on gpu08, but rank 0 on gpu07",
        ),
    ],
)
def test_what_cannot_be_found_out_ends_the_job(tmp_path: Path, variables: dict[str, str], reason: str) -> None:
    ended = bash(tmp_path, "lockstride_ranks generate", **variables)
    assert ended.returncode == 2, ended.stderr
    assert reason in ended.stderr


def test_one_node_meets_at_home_and_several_at_the_interface_or_the_first_name(tmp_path: Path) -> None:
    def address(**variables: str) -> str:
        return bash(tmp_path, "lockstride_meeting_address", **variables).stdout.strip()

    assert address() == "127.0.0.1"
    assert address(SLURM_JOB_NUM_NODES="2", LOCKSTRIDE_INTERFACE="lo") == "127.0.0.1", "its address"
    assert address(SLURM_JOB_NUM_NODES="2", SLURM_JOB_NODELIST="localhost,n2") == "localhost", "a name with an address"


def test_a_port_that_somebody_listens_on_is_passed_over(tmp_path: Path) -> None:
    first = bash(tmp_path, "lockstride_free_port").stdout.strip()
    with socket.create_server(("127.0.0.1", int(first))):
        second = bash(tmp_path, "lockstride_free_port").stdout.strip()
    assert 20_000 <= int(first) < 30_000
    assert 20_000 <= int(second) < 30_000
    assert second != first


def test_without_scontrol_the_program_s_own_drain_time_counts_and_a_requeue_says_what_to_do(tmp_path: Path) -> None:
    commands = tmp_path / "commands"
    commands.mkdir()
    for name in ("bash", "date", "dirname", "mkdir", "timeout"):
        (commands / name).symlink_to(str(shutil.which(name)))
    path = {"PATH": str(commands)}
    assert bash(tmp_path, "lockstride_drain_seconds", **path).stdout == ""
    ended = bash(tmp_path, "lockstride_asked=USR1; lockstride_end 143", **path)
    assert ended.returncode == 2
    assert "job 17 cannot be requeued: submit the same command again to go on" in ended.stderr


@pytest.mark.parametrize(
    ("array", "job"),
    [({}, "17"), ({"SLURM_ARRAY_JOB_ID": "17", "SLURM_ARRAY_TASK_ID": "3"}, "17_3")],
    ids=["no array", "the last task of an array, whose own number is the array's"],
)
def test_the_warning_goes_to_this_job_alone_and_so_does_the_requeue(
    tmp_path: Path, array: dict[str, str], job: str
) -> None:
    """To Slurm, 17 is each task of array 17."""
    for name in ("scancel", "scontrol"):
        command = tmp_path / name
        command.write_text(f'#!/bin/bash\necho "{name} $*" >>{tmp_path}/said\n')
        command.chmod(0o755)
    asked = "lockstride_on_signal USR1; lockstride_end 143"
    ended = bash(tmp_path, asked, PATH=f"{tmp_path}:{os.environ['PATH']}", **array)
    assert ended.returncode == 0
    assert "s after the start: ask sbatch for a longer --time" in ended.stderr
    assert (tmp_path / "said").read_text().splitlines() == [f"scancel --signal=TERM {job}", f"scontrol requeue {job}"]


@pytest.mark.parametrize(
    ("state", "code"),
    [
        ("lockstride_end 0", 0),
        ("lockstride_end 1", 1),
        ("lockstride_asked=USR1; lockstride_end 0", 0),  # done just in time
        ("lockstride_asked=TERM; lockstride_end 0", 143),
        ("lockstride_asked=USR1 SLURM_RESTART_COUNT=100; lockstride_end 143", 143),
    ],
)
def test_how_a_job_ends(tmp_path: Path, state: str, code: int) -> None:
    assert bash(tmp_path, state).returncode == code


def test_the_site_s_variables_give_way_to_the_environment(tmp_path: Path) -> None:
    shown = 'echo "$LOCKSTRIDE_PYTHON $LOCKSTRIDE_LAUNCHER $LOCKSTRIDE_ROOT $NCCL_SOCKET_IFNAME"'
    python, launcher, root = bash(tmp_path, shown, LOCKSTRIDE_LAUNCHER="srun").stdout.split()
    assert Path(python).name in ("python", "python3")
    assert (launcher, root) == ("srun", str(ROOT))
    several = {"SLURM_JOB_NUM_NODES": "2", "LOCKSTRIDE_INTERFACE": "ib0", "LOCKSTRIDE_PYTHON": "py"}
    assert bash(tmp_path, shown, **several).stdout.split()[-1] == "=ib0"


def serve_job(folder: Path, *options: str, **variables: str) -> tuple[str, list[str]]:
    """What slurm/serve.sbatch says, and the words after `-m launch`, with an srun that only notes them."""
    stubs = folder / "bin"
    stubs.mkdir(exist_ok=True)
    noted = folder / "noted"
    for name, script in (("srun", f"printf '%s\\n' \"$@\" >{noted}"), ("scontrol", "echo KillWait = 30 sec")):
        (stubs / name).write_text(f"#!/bin/bash\n{script}\n")
        (stubs / name).chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "LOCKSTRIDE_"))}
    environment |= {**JOB, "LOCKSTRIDE_LOGS": str(folder / "logs"), "LOCKSTRIDE_ROOT": str(ROOT), **variables}
    environment["PATH"] = f"{stubs}:{environment['PATH']}"
    ran = subprocess.run(
        ["bash", str(ROOT / "slurm/serve.sbatch"), "--model", "M", *options],
        env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    words = noted.read_text().splitlines()
    return ran.stderr, words[words.index("launch") + 1 :]


def test_a_server_s_job_says_where_it_is_and_keeps_its_key_over_a_requeue(tmp_path: Path) -> None:
    said, words = serve_job(tmp_path)
    key = tmp_path / "logs" / "17.api-key"
    port = words[words.index("--port") + 1]
    assert words[0] == "serve"
    assert words[words.index("--host") + 1] == "0.0.0.0"
    assert words[words.index("--drain-seconds") + 1] == "20"
    assert words[words.index("--api-key-file") + 1] == str(key)
    assert f":{port}/v1" in said
    assert str(key) in said
    assert key.stat().st_mode & 0o777 == 0o600
    made = key.read_text()
    assert len(made) == 48
    serve_job(tmp_path, SLURM_RESTART_COUNT="1")
    assert key.read_text() == made


def test_a_server_s_job_reads_options_with_an_equals_sign(tmp_path: Path) -> None:
    said, words = serve_job(tmp_path, "--port=8123", "--api-key-file=/tmp/k", "--host=127.0.0.1")
    assert "http://127.0.0.1:8123/v1" in said
    assert "the key is in /tmp/k" in said
    assert not {"--port", "--host", "--api-key-file"} & set(words)
    said, words = serve_job(tmp_path, "--uds=/tmp/x.sock", "--api-key=abc")
    assert "http://" not in said
    assert not {"--host", "--api-key-file"} & set(words)


def test_a_server_s_job_leaves_what_was_said_alone(tmp_path: Path) -> None:
    said, words = serve_job(tmp_path, "--host", "127.0.0.1", "--port", "9000", "--insecure")
    assert words.count("--host") == words.count("--port") == 1
    assert "--api-key-file" not in words
    assert "127.0.0.1:9000" in said
    assert not list((tmp_path / "logs").glob("*.api-key"))
