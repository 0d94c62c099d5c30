"""Two hosts under torchrun, as network namespaces with a wire between them, whose workers are killed."""

import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest
import torch

ROOT = Path(__file__).parents[2]
JOB = Path(__file__).parent / "two_hosts_job.py"
ADDRESSES = ("10.83.0.1", "10.83.0.2")
STEPS = 60
SAVED, RESUMED = r"saved (\d+)", r"resumed at (\d+)"
LIMIT_S = 240.0


def run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


@pytest.fixture
def namespaces() -> Iterator[list[str]]:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    names = [f"shardwise-test-{os.getpid()}-{host}" for host in range(2)]
    made = []
    try:
        for name in names:
            try:
                run("ip", "netns", "add", name)
            except subprocess.CalledProcessError as error:
                pytest.skip(f"no network namespace can be made: {error.stderr.decode()}")
            made.append(name)
        run("ip", "link", "add", "wire", "netns", names[0], "type", "veth", "peer", "wire", "netns", names[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            run("ip", "-n", name, "address", "add", f"{address}/24", "dev", "wire")
            run("ip", "-n", name, "link", "set", "wire", "up")
            run("ip", "-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in made:
            run("ip", "netns", "del", name)


class Hosts:
    """A job on two hosts of two ranks each."""

    def __init__(self, namespaces: list[str], base: Path) -> None:
        base.mkdir()
        self.base = base
        self.folders = [base / f"host-{host}" for host in range(2)]
        self.outputs = [base / f"host-{host}.txt" for host in range(2)]
        self._launchers = [self._launch(host, name) for host, name in enumerate(namespaces)]

    def _launch(self, host: int, namespace: str) -> psutil.Popen:
        environment = os.environ | {
            **{"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "wire"},
            "HOST_FOLDER": str(self.folders[host]),
            # torchrun's own store has addresses of workers that died, under numbers of attempts that differ.
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        command = ["ip", "netns", "exec", namespace, sys.executable, "-m", "torch.distributed.run"]
        command += ["--nnodes=2", "--nproc-per-node=2", "--max-restarts=5", "--rdzv-backend=c10d"]
        command += [f"--rdzv-endpoint={ADDRESSES[0]}:29400", f"--local-addr={ADDRESSES[host]}"]
        command += [f"--rdzv-conf=is_host={not host}"]  # torchrun does not know the address of a namespace
        command += [str(JOB), str(self.base), str(STEPS)]
        with self.outputs[host].open("w") as file:
            return psutil.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT)

    def told(self, pattern: str) -> list[int]:
        """The numbers in what ranks of both hosts have printed, like ``saved (\\d+)``."""
        return [int(n) for output in self.outputs for n in re.findall(pattern, output.read_text())]

    def wait_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not condition():
            for launcher, output in zip(self._launchers, self.outputs, strict=True):
                assert launcher.poll() in (None, 0), output.read_text()[-6000:]
            assert time.monotonic() < deadline, [output.read_text()[-3000:] for output in self.outputs]
            time.sleep(0.02)

    def kill_workers(self, which: Sequence[int]) -> None:
        """Kill all workers of these hosts; their launchers start others."""
        workers = [worker for host in which for worker in self._launchers[host].children(recursive=True)]
        for worker in workers:
            worker.kill()
        psutil.wait_procs(workers, timeout=LIMIT_S)

    def wait(self) -> None:
        self.wait_until(lambda: all(launcher.poll() == 0 for launcher in self._launchers))

    def end(self) -> None:
        for launcher in self._launchers:
            if launcher.poll() is None:
                launcher.terminate()  # torchrun ends its workers
                launcher.wait()


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("lost", [(0,), (1,), (0, 1)], ids=["host 0", "host 1", "both hosts"])
def test_a_job_goes_on_after_hosts_have_died(
    lost: tuple[int, ...], namespaces: list[str], tmp_path: Path
) -> None:
    """Their workers are killed and their memory is gone, three times. The job goes on from the last step that
    was complete in memory, or from the disk if no host is left that has it."""
    hosts = Hosts(namespaces, tmp_path / "killed")
    at = random.Random(str(lost))
    try:
        for number in range(3):
            moment = 15 * number + at.randrange(5, 15)
            hosts.wait_until(lambda moment=moment: max(hosts.told(SAVED), default=0) >= moment)
            complete = max(hosts.told(SAVED))
            hosts.kill_workers(lost)
            for host in lost:
                shutil.rmtree(hosts.folders[host])
            hosts.wait_until(lambda number=number: len(hosts.told(RESUMED)) == 4 * (number + 2))
            source, least = "memory", complete
            if len(lost) == 2:
                least = complete // 10 * 10
                source = "disk" if least else "nowhere"
            *_, step = sorted(hosts.told(rf"{RESUMED} from {source}"))
            assert hosts.told(RESUMED).count(step) >= 4  # all ranks
            assert step >= least
        hosts.wait()
    finally:
        hosts.end()
    uninterrupted(tmp_path / "uninterrupted")
    found, want = (torch.load(tmp_path / name / "weights.pt") for name in ("killed", "uninterrupted"))
    assert found.keys() == want.keys()
    for name in want:
        assert torch.equal(found[name], want[name]), name


def uninterrupted(base: Path) -> None:
    """The same job on one host, from beginning to end."""
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    environment["HOST_FOLDER"] = str(base / "memory")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    subprocess.run([*command, str(JOB), str(base), str(STEPS)], env=environment, check=True, timeout=LIMIT_S)
