"""A Slurm of our own for a test session: real daemons under one folder, which leave nothing behind.

Knows: Slurm's daemons and commands, what they need to run without a service manager. Does not know: how hosts are
joined (wiring.py), what jobs do.

Made for Debian's packages slurmctld, slurmd, slurm-client and munge (22.05). Nothing in /etc is read or written.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tests.slurm.wiring import HEAD, Loopback, Namespaces, Wiring

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "sinfo", "scontrol", "scancel")
PATH = os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin"
KILL_WAIT = 6  # seconds from SIGTERM to SIGKILL
REQUEUE_WAIT = 5  # seconds a requeued job is held back: the least that Slurm can do

_ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "BOOT_FAIL"}

_SETTINGS = """
ClusterName=lockstride
SlurmUser={user}
SlurmdUser={user}
SlurmctldPidFile={folder}/run/slurmctld.pid
SlurmdPidFile={folder}/run/slurmd.%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd.%n.log
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/run/munge.sock,cred_expire={requeue_wait}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
JobAcctGatherType=jobacct_gather/linux
AccountingStorageType=accounting_storage/none
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0,sched_min_interval=0
ReturnToService=2
SlurmctldTimeout=30
SlurmdTimeout=30
KillWait={kill_wait}
MinJobAge=3600
FirstJobId={first_job}
JobRequeue=1
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
"""


def missing_programs() -> list[str]:
    return [program for program in PROGRAMS if shutil.which(program, path=PATH) is None]


class Job(NamedTuple):
    """What the controller says of a job or of an array's task. ``number``: one of an array's tasks has the array's."""

    number: str
    state: str
    exit_code: str
    restarts: int

    @property
    def ended(self) -> bool:
        return self.state in _ENDED


@dataclass(slots=True)
class _Daemon:
    name: str
    process: subprocess.Popen[bytes]


class Cluster:
    """``with`` starts and stops it. ``cpus``: of each node; more than the machine has is fine."""

    def __init__(self, folder: Path, *, nodes: int = 2, cpus: int = 4, namespaces: bool = False) -> None:
        self.folder = folder.resolve()
        self.nodes = [f"n{number}" for number in range(1, nodes + 1)]
        self.wiring: Wiring = Namespaces(self.nodes, self.folder) if namespaces else Loopback(self.nodes)
        self.environment = {**os.environ, "PATH": PATH, "SLURM_CONF": str(self.folder / "slurm.conf")}
        self._cpus = cpus
        self._daemons: list[_Daemon] = []

    def __enter__(self) -> Cluster:
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        left = self.stop()
        assert not left, f"these outlived the cluster: {left}"

    def run(self, *command: str | Path, environment: Mapping[str, str] | None = None, cwd: Path | None = None) -> str:
        """A command on the login node; what it wrote to stdout. Raises AssertionError with all it said if it fails."""
        words = [*self.wiring.on(HEAD), *map(str, command)]
        variables = {**self.environment, **(environment or {})}
        ended = subprocess.run(words, env=variables, cwd=cwd, capture_output=True, text=True, timeout=120, check=False)
        assert ended.returncode == 0, f"{command} ended with {ended.returncode}: {ended.stdout}{ended.stderr}"
        return ended.stdout

    def job(self, job: str) -> Job:
        """Of a job, or of one task of an array (``12_3``)."""
        shown = self.run("scontrol", "--oneliner", "show", "job", job)
        values = dict(word.split("=", 1) for word in shown.split() if "=" in word)
        return Job(values["JobId"], values["JobState"], values["ExitCode"], int(values["Restarts"]))

    def wait_for_job(self, job: str, seconds: float = 300) -> Job:
        """Once it has ended."""
        wait_until(lambda: self.job(job).ended, f"the end of job {job}", seconds)
        return self.job(job)

    def wait_for_requeue(self, job: str, restarts: int = 1) -> None:
        """Once Slurm has started it anew so many times."""
        wait_until(lambda: self.job(job).restarts == restarts, f"the requeue of job {job}", 120)

    def kill(self, daemon: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Ends ``slurmctld`` or a ``slurmd.NODE`` and waits until it is gone."""
        for each in [each for each in self._daemons if each.name == daemon]:
            each.process.send_signal(number)
            each.process.wait(30)
            self._daemons.remove(each)

    def start_controller(self) -> None:
        """Returns once it answers."""
        self._spawn("slurmctld", HEAD, "slurmctld", "-D", "-f", self.environment["SLURM_CONF"])
        wait_until(self._answers, f"an answer of slurmctld (logs in {self.folder / 'log'})", 60)

    def wait_until_saved(self, job: str) -> None:
        """Until the controller has written to disk that the job runs, which it does some seconds late."""
        saved = self.folder / "state" / "job_state"
        changed = time.time_ns()
        self.run("scontrol", "update", f"jobid={job}", "comment=saved")
        wait_until(lambda: saved.exists() and saved.stat().st_mtime_ns > changed, "the state of jobs on disk", 60)

    def start_node(self, node: str) -> None:
        self._spawn(f"slurmd.{node}", node, "slurmd", "-D", "-N", node, "-f", self.environment["SLURM_CONF"])

    def cut(self, node: str) -> None:
        """Nothing reaches the node any more, nor leaves it: network namespaces only."""
        self.wiring.link(node, up=False)

    def mend(self, node: str) -> None:
        self.wiring.link(node, up=True)

    def wait_until_idle(self) -> None:
        """All nodes up, and no job on them."""

        def idle() -> bool:
            shown = self.run("sinfo", "--noheader", "--Node", "--states", "idle", "--format", "%N")
            return len(shown.split()) == len(self.nodes)

        wait_until(idle, f"all nodes idle (logs in {self.folder / 'log'})", 120)

    def stop(self) -> list[str]:
        """Ends all jobs and daemons; the names of those that would not end."""
        try:
            if any(each.name == "slurmctld" for each in self._daemons):
                self._end_jobs()
        finally:
            left = self._end_daemons()
            self.wiring.tear_down()
        return left

    def _end_jobs(self) -> None:
        with contextlib.suppress(AssertionError):  # some may end by themselves meanwhile
            self.run("scancel", "--full", "--user", str(os.getuid()))
        wait_until(lambda: not self.run("squeue", "--noheader").strip(), "an empty queue", 60)

    def _end_daemons(self) -> list[str]:
        left = []
        for each in reversed(self._daemons):
            each.process.terminate()
        for each in reversed(self._daemons):
            try:
                each.process.wait(30)
            except subprocess.TimeoutExpired:
                if not each.name.startswith("slurmd."):  # one whose link was cut may wait for an answer for minutes
                    left.append(each.name)
                each.process.kill()
                each.process.wait(10)
        self._daemons.clear()
        return left

    def _start(self) -> None:
        self._write_files()
        self.wiring.set_up()
        files = {"key-file": "munge.key", "socket": "run/munge.sock", "pid-file": "run/munged.pid"}
        files |= {"log-file": "log/munged.log", "seed-file": "run/munged.seed"}
        options = [f"--{option}={self.folder / name}" for option, name in files.items()]
        self._spawn("munged", None, "munged", "--foreground", "--force", *options)
        wait_until((self.folder / "run/munge.sock").exists, "munged's socket", 60)
        self.start_controller()
        for node in self.nodes:
            self.start_node(node)
        self.wait_until_idle()

    def _answers(self) -> bool:
        try:
            self.run("sinfo", "--noheader")
        except AssertionError:
            return False
        return True

    def _write_files(self) -> None:
        for name in ("run", "log", "state", *(f"spool/{node}" for node in self.nodes)):
            (self.folder / name).mkdir(parents=True)
        self.folder.chmod(0o755)  # others reach munged's socket through it
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(1024))
        user = pwd.getpwuid(os.getuid()).pw_name
        first_job = 1 + os.getpid() % 1000 * 60  # a job's ports come of its number: two test sessions have others
        settings = _SETTINGS.format(
            user=user, folder=self.folder, kill_wait=KILL_WAIT, requeue_wait=REQUEUE_WAIT, first_job=first_job
        )
        nodes = [f"{self.wiring.node(node)} CPUs={self._cpus} RealMemory=2000 State=UNKNOWN" for node in self.nodes]
        lines = [self.wiring.controller(), *nodes, settings.strip()]
        (self.folder / "slurm.conf").write_text("\n".join(lines) + "\n")
        (self.folder / "cgroup.conf").write_text("CgroupAutomount=no\n")

    def _spawn(self, name: str, host: str | None, *command: str) -> None:
        with (self.folder / "log" / f"{name}.console").open("ab") as log:
            words = [*(self.wiring.on(host) if host else []), *command]
            process = subprocess.Popen(
                words, env=self.environment, cwd=self.folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        self._daemons.append(_Daemon(name, process))


def wait_until(condition: Callable[[], bool], what: str, seconds: float, every: float = 0.1) -> None:
    """Raises AssertionError naming ``what`` when ``condition`` stays false."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, f"{what} did not come within {seconds:g} s"
        time.sleep(every)
