"""Several machines on one: network namespaces with host names and addresses of their own, joined by a bridge."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

SUBNET = "10.77.0"
PORT = 29500
ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
    # As documented: without it a machine that returns waits for an address that torchrun does not write again.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}


def _ip(*words: object) -> None:
    subprocess.run(["ip", *map(str, words)], check=True, capture_output=True, text=True)


def _status(pid: int) -> dict[str, int]:
    """Return the parent (PPid) and the pending signals (ShdPnd) of a process; empty if it has ended."""
    with suppress(FileNotFoundError, ProcessLookupError):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        fields = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
        if not fields["State"].startswith("Z"):  # ended, and its parent does not know yet
            return {"PPid": int(fields["PPid"]), "ShdPnd": int(fields["ShdPnd"], 16)}
    return {}


def has_ended(pid: int) -> bool:
    """Return whether a process runs no longer."""
    return not _status(pid)


def is_told_to_end(pid: int) -> bool:
    """Return whether SIGTERM waits for a stopped process."""
    return bool(_status(pid).get("ShdPnd", 0) >> (signal.SIGTERM - 1) & 1)


def why_not() -> str | None:
    """Return why this system cannot make network namespaces, or None."""
    if not (sys.platform == "linux" and shutil.which("ip") and shutil.which("unshare")):
        return "ip and unshare (Debian: iproute2, util-linux) are not installed"
    name = f"pale-probe-{os.getpid()}"
    try:
        _ip("netns", "add", name)
        subprocess.run(
            ["ip", "netns", "exec", name, "unshare", "--uts", "hostname", "probe"],
            check=True,
            capture_output=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "network namespaces are not allowed here"
    finally:
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
    return None


@dataclass
class Machine:
    """A network namespace in which commands run under a host name of their own.

    Attributes:
        name: host name.
        namespace: network namespace.
        port: the bridge's end of its cable.
        output: output of all its commands.
    """

    name: str
    namespace: str
    port: str
    output: Path
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        """Start a command on this machine."""
        inside = ["unshare", "--uts", "sh", "-c", f'hostname {self.name} && exec "$@"', "sh"]
        with self.output.open("ab") as output:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self.namespace, *inside, *command],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | ENVIRONMENT,
            )
        self.processes.append(process)
        return process

    def torchrun(
        self, nodes: str, *arguments: object, restarts: int = 3, conf: str = ""
    ) -> subprocess.Popen[bytes]:
        """Start the documented command: `torchrun ... -m pale ARGUMENTS`; `conf` is `--rdzv-conf`."""
        first = re.sub(r"\d+$", "0", self.name)
        return self.start(
            [
                *(sys.executable, "-m", "torch.distributed.run"),
                *("--nnodes", nodes, "--nproc-per-node", "1", "--max-restarts", str(restarts)),
                *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{first}:{PORT}"),
                *("--rdzv-id", "job-7", "--rdzv-conf", conf),
                *("-m", "pale", *map(str, arguments)),
            ]
        )

    def pids(self) -> list[int]:
        """Return the ids of all processes on this machine."""
        listed = subprocess.run(
            ["ip", "netns", "pids", self.namespace], capture_output=True, text=True, check=True
        )
        return [int(word) for word in listed.stdout.split()]

    def worker(self) -> int:
        """Return the process that trains, a child of torchrun."""
        agents = {process.pid for process in self.processes}
        (found,) = [pid for pid in self.pids() if _status(pid).get("PPid") in agents]
        return found

    def cut(self) -> None:
        """Take the cable out: packets are lost, no connection is closed."""
        _ip("link", "set", self.port, "down")

    def join(self) -> None:
        """Put the cable in again."""
        _ip("link", "set", self.port, "up")

    def kill(self) -> None:
        """Kill all processes at once, as a power failure does."""
        for _ in range(20):
            listed = self.pids()
            for pid in listed:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if not listed:
                break
            time.sleep(0.1)
        for process in self.processes:
            process.wait()


@contextmanager
def machines(count: int, folder: Path) -> Iterator[list[Machine]]:
    """Yield machines that see each other under their host names; skip the test if the system forbids it."""
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    tag = f"pale{os.getpid() % 100000}"
    made = []
    hosts = "127.0.0.1 localhost\n"
    hosts += "".join(f"{SUBNET}.{i + 1} machine{i}\n" for i in range(count))
    try:
        _ip("link", "add", f"{tag}b", "type", "bridge")
        _ip("link", "set", f"{tag}b", "up")
        for i in range(count):
            machine = Machine(f"machine{i}", f"{tag}-{i}", f"{tag}{i}", folder / f"machine{i}.log")
            made.append(machine)
            # `ip netns exec` shows these files in place of those in /etc.
            etc = Path("/etc/netns") / machine.namespace
            etc.mkdir(parents=True)
            (etc / "hosts").write_text(hosts)
            _ip("netns", "add", machine.namespace)
            peer = ("peer", "name", "eth0", "netns", machine.namespace)
            _ip("link", "add", machine.port, "type", "veth", *peer)
            _ip("link", "set", machine.port, "master", f"{tag}b", "up")
            _ip("-n", machine.namespace, "addr", "add", f"{SUBNET}.{i + 1}/24", "dev", "eth0")
            _ip("-n", machine.namespace, "link", "set", "eth0", "up")
            _ip("-n", machine.namespace, "link", "set", "lo", "up")
        yield made
    finally:
        for machine in made:
            with suppress(subprocess.CalledProcessError):
                machine.kill()
            subprocess.run(["ip", "netns", "del", machine.namespace], check=False)
            shutil.rmtree(Path("/etc/netns") / machine.namespace, ignore_errors=True)
        subprocess.run(["ip", "link", "del", f"{tag}b"], check=False)
