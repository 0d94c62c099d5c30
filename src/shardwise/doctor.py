"""Whether the machines, the network and the folders of a job are fit for training, before any training.

Checks leave facts on the board of the job, which works where collectives do not. Rank 0 puts them together,
so that a rank has a few operations, and all ranks come to the same findings.

    shardwise/doctor/1/3/2      what rank 2 told in the third exchange of the first examination
    shardwise/doctor/1/3/all    what all have told, for all of them

Bandwidth counts the bytes that a rank sends: (N - 1) / N of the unsharded ones in an all-gather or a
reduce-scatter of N ranks, and twice that in an all-reduce. All process groups of a dimension run at once, as
in training. Calls that may block run in a thread: a network that does not deliver is a finding, not a hang.
"""

import math
import os
import platform
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwise import __version__
from shardwise.layout.fqns import listed_ranks, ranks_by_value
from shardwise.layout.text_tables import aligned
from shardwise.ranks.board import Board
from shardwise.torch_compat import c10d

T = TypeVar("T")

_LONGEST_ERROR = 400

# --- findings -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Finding:
    """What one check has found on ``subject``: the figures, or what is not well and what to do.

    ``verdict``: "ok"; "slow": training works, and takes longer than it would have to; or "wrong": training
    fails, hangs or goes astray.
    """

    verdict: str
    subject: str
    text: str


ok, slow, wrong = (partial(Finding, verdict) for verdict in ("ok", "slow", "wrong"))


def table(findings: Sequence[Finding]) -> str:
    """One line for each finding, and a last one with the count of those that are not well."""
    rows = [(each.verdict, each.subject, each.text) for each in findings]
    lines = aligned([("verdict", "what", "found"), *rows], right=())
    verdicts = [each.verdict for each in findings]
    counts = ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in ("ok", "slow", "wrong"))
    return "\n".join([*lines, "", counts])


# --- the ranks ------------------------------------------------------------------------------------


class CheckFailed(Exception):
    """A check could not be made, for the reasons in ``findings``; raised on all ranks alike."""

    def __init__(self, findings: list[Finding]) -> None:
        super().__init__(table(findings))
        self.findings = findings


class CannotGoOn(Exception):
    """The text says what is wrong on this rank."""


class Hung(CannotGoOn):
    """Something did not end in time, perhaps because of another rank."""


class Job:
    """One rank's end of the job; all ranks run the same checks in the same order.

    ``timeout_s``: how long to wait for the facts of a rank, and for a collective.
    ``has_hung``: a thread of this process is still in a collective.
    """

    def __init__(self, rank: int, world: int, store: dist.Store, timeout_s: float = 60.0) -> None:
        self.rank = rank
        self.world = world
        self.store = store
        self.timeout_s = timeout_s
        self.has_hung = False
        run = store.add(f"shardwise/doctor/runs/{rank}", 1)  # earlier ones have left their facts
        self._board = Board(store, f"shardwise/doctor/{run}")
        self._num_exchanges = 0

    def gather(self, subject: str, function: Callable[[], T]) -> list[T]:
        """What ``function`` returns on each rank, on all ranks, sent as JSON; CheckFailed if it has raised on
        any, or one has sent nothing in time."""
        told: dict[str, Any] = {}
        try:
            told["fact"] = function()
        except Hung as error:
            told["hung"] = str(error)
        except Exception as error:
            text = str(error) if isinstance(error, CannotGoOn) else f"{type(error).__name__}: {error}"
            told["error"] = " ".join(text.split())[:_LONGEST_ERROR]
        self._num_exchanges += 1
        key = str(self._num_exchanges)
        self._board.post(f"{key}/{self.rank}", told)
        if self.rank == 0:
            self._board.post(f"{key}/all", self._collected(key))
        everyone = self._wait_for(f"{key}/all", 10 * self.timeout_s)  # rank 0 may have more to do
        for kind in ("error", "hung"):  # who has hung waits for who has failed
            failed = ranks_by_value((rank, each[kind]) for rank, each in enumerate(everyone) if kind in each)
            if failed:
                texts = [f"{listed_ranks(ranks)}: {text}" for text, ranks in failed.items()]
                raise CheckFailed([wrong(subject, text) for text in texts])
        return [each["fact"] for each in everyone]

    def run(self, subject: str, function: Callable[[], T]) -> T:
        """What ``function`` returns on this rank, once it has returned on all; raises as ``gather``."""
        results: list[T] = []
        self.gather(subject, lambda: results.append(function()))
        return results[0]

    def leave(self) -> None:
        """To be called at the end: rank 0 leaves last, since the store may be in its process."""
        self._board.post(f"left/{self.rank}", {})
        if self.rank == 0:
            self._collected("left")

    def _collected(self, key: str) -> list[dict[str, Any]]:
        """What all ranks have told at ``key``; an error of those that have told nothing in time."""
        deadline = time.monotonic() + 2 * self.timeout_s  # a rank may be in ``within_timeout``
        found = []
        for rank in range(self.world):
            try:
                found.append(self._wait_for(f"{key}/{rank}", deadline - time.monotonic()))
            except TimeoutError:
                found.append({"error": f"no answer within {2 * self.timeout_s:g} s. Has its process ended?"})
        return found

    def _wait_for(self, key: str, within_s: float) -> Any:
        deadline = time.monotonic() + within_s

        def check() -> None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"doctor: rank 0 has sent nothing within {within_s:g} s. Has it ended?")

        return self._board.wait_for(key, check)

    def within_timeout(self, what: str, function: Callable[[], T]) -> T:
        """What ``function`` returns. It runs in a thread, which is left behind if it does not come back in
        time; then Hung is raised."""
        result: Future[T] = Future()

        def run() -> None:
            try:
                result.set_result(function())
            except BaseException as error:
                result.set_exception(error)

        threading.Thread(target=run, name=f"doctor: {what}", daemon=True).start()
        if not wait([result], timeout=self.timeout_s).done:
            self.has_hung = True
            raise Hung(
                f"{what} did not end within {self.timeout_s:g} s. Either a rank does not take part, or the "
                "network does not connect these ranks: look at firewalls, and at the interface that "
                "NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME names."
            )
        return result.result()


SIZES = (4 << 10, 1 << 20, 32 << 20)
"""Unsharded bytes of a collective: the first shows the latency, the others the bandwidth."""

Ready = tuple[Callable[[], Any], Callable[[], bool]]
"""What runs a collective, and what tells whether its first result is right."""

Collective = Callable[[dist.ProcessGroup, int, torch.device], Ready]
"""Prepares a collective of shards with so many numbers."""

_REPEATS = 5
_MOST_BEHIND = 2.0
"""How many times longer than in the median of its like a process group may take."""


# --- the process group, the mesh, latency and bandwidth -------------------------------------------


def check_mesh(
    job: Job, sizes: tuple[int, ...] | None, names: Sequence[str] | None, wanted: str | None
) -> list[Finding]:
    """Connect the ranks and run each collective in each dimension; a finding each."""
    connect = partial(_mesh, job, sizes or (job.world,), names, wanted)
    mesh = job.run("mesh", partial(job.within_timeout, "connecting the ranks", connect))
    backend = c10d.backend_name(mesh.get_group(0), torch.device(mesh.device_type))
    dims = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
    found = [ok("mesh", f"{' x '.join(f'{name} {size}' for name, size in dims.items())}, over {backend}")]
    for name, size in dims.items():
        for kind, collective in _COLLECTIVES.items() if size > 1 else ():
            subject = f"{name}: {kind}"
            measure = partial(_measured, mesh.get_group(name), collective, wanted)
            found += judge(subject, job.gather(subject, partial(job.within_timeout, subject, measure)))
    return found


def _mesh(job: Job, sizes: tuple[int, ...], names: Sequence[str] | None, wanted: str | None) -> DeviceMesh:
    if (size := math.prod(sizes)) != job.world:
        raise CannotGoOn(f"--mesh holds {size} ranks, and the job has {job.world}.")
    names = names or {1: ("shard",), 2: ("replicate", "shard")}.get(len(sizes), ())
    if len(names) != len(sizes):
        raise CannotGoOn(f"the mesh has {len(sizes)} dimensions. Give as many different --names.")
    device = own_device(wanted)
    if not dist.is_initialized():
        # Later than the job's own timeout, since NCCL's is the end of the process.
        later = timedelta(seconds=2 * job.timeout_s)
        store = dist.PrefixStore("shardwise/doctor/process_group", job.store)
        dist.init_process_group(store=store, rank=job.rank, world_size=job.world, timeout=later)
    return init_device_mesh(device.type, sizes, mesh_dim_names=tuple(names))


def _measured(pg: dist.ProcessGroup, collective: Collective, wanted: str | None) -> dict[str, Any]:
    """For each size the seconds of the fastest of several, and whether the first has given what it should."""
    device = own_device(wanted)
    seconds, are_right = [], True
    for num_bytes in SIZES:
        run, is_right = collective(pg, max(1, num_bytes // torch.float32.itemsize // pg.size()), device)
        run()  # connects
        are_right &= is_right()
        seconds.append(min(_timed(run, device) for _ in range(_REPEATS)))
    return {"ranks": c10d.ranks_of(pg), "seconds": seconds, "is_right": are_right}


def judge(subject: str, facts: Sequence[dict[str, Any]]) -> list[Finding]:
    """The findings from the ``ranks``, ``seconds`` by size, and whether it ``is_right``, of each rank."""
    bad = [rank for rank, each in enumerate(facts) if not each["is_right"]]
    if bad:
        text = f"{listed_ranks(bad)} received wrong numbers. Memory, driver or network are broken there"
        return [wrong(subject, f"{text}; train on other machines.")]
    largest = {tuple(each["ranks"]): each["seconds"][-1] for each in facts}
    median_s = sorted(largest.values())[(len(largest) - 1) // 2]
    behind = {
        ranks: seconds / median_s for ranks, seconds in largest.items() if seconds > _MOST_BEHIND * median_s
    }
    world = len(facts[0]["ranks"])
    sent = (world - 1) / world * (2 if subject.endswith("all-reduce") else 1)
    slowest = [max(each["seconds"][index] for each in facts) for index in range(len(SIZES))]
    figures = f"{1e6 * slowest[0]:.0f} us; " + ", ".join(
        f"{sent * size / seconds / 1e9:.2f} GB/s at {size >> 20} MiB"
        for size, seconds in list(zip(SIZES, slowest, strict=True))[1:]
    )
    if not behind:
        return [ok(subject, f"{world} ranks, {figures}")]
    advice = f"as most ({figures}). Look at the links of their machines."
    texts = [f"{listed_ranks(ranks)} take {times:.1f} times as long" for ranks, times in behind.items()]
    return [slow(subject, f"{text} {advice}") for text in texts]


def _timed(run: Callable[[], Any], device: torch.device) -> float:
    synchronize = partial(torch.accelerator.synchronize, device) if device.type != "cpu" else lambda: None
    synchronize()
    started = time.perf_counter()
    run()
    synchronize()
    return time.perf_counter() - started


def _all_gather(pg: dist.ProcessGroup, numel: int, device: torch.device) -> Ready:
    own = torch.full((numel,), float(pg.rank()), device=device)
    full = torch.empty(numel * pg.size(), device=device)
    expected = torch.arange(float(pg.size()), device=device).repeat_interleave(numel)
    return lambda: _finish(c10d.all_gather(pg, full, own, True)), lambda: torch.equal(full, expected)


def _reduce_scatter(pg: dist.ProcessGroup, numel: int, device: torch.device) -> Ready:
    full, own = torch.ones(numel * pg.size(), device=device), torch.empty(numel, device=device)
    reduce = partial(c10d.reduce_scatter, pg, own, full, dist.ReduceOp.SUM, True)
    return lambda: _finish(reduce()), lambda: bool((own == pg.size()).all())


def _all_reduce(pg: dist.ProcessGroup, numel: int, device: torch.device) -> Ready:
    full = torch.ones(numel * pg.size(), device=device)
    # It has run once: the result is in place, and later runs sum it further.
    return lambda: dist.all_reduce(full, group=pg), lambda: bool((full == pg.size()).all())


def _finish(work: Any) -> None:
    if work is not None:
        work.wait()


_COLLECTIVES: dict[str, Collective] = {
    "all-gather": _all_gather,
    "reduce-scatter": _reduce_scatter,
    "all-reduce": _all_reduce,
}


_SHARE_OF_TIMEOUT = 6
"""So much of the timeout (10 s of it by default) a shared file system may take to show a new file."""


# --- folders for checkpoints ----------------------------------------------------------------------


def check_folder(job: Job, folder: Path) -> list[Finding]:
    """Write, flush and rename a file on each rank, and look for those of all others.

    Rank 0 makes the folder if it is not there, as a save does, and removes it afterwards.
    """
    subject = f"folder {folder}"
    missing: list[Path] = []

    def make() -> tuple[str, str]:
        if job.rank:
            return "", ""
        missing.extend(each for each in (folder, *folder.parents) if not each.exists())
        return _why_not(lambda: folder.mkdir(parents=True, exist_ok=True)), uuid.uuid4().hex

    why_not, name = job.gather(subject, make)[0]
    if why_not:
        return [wrong(subject, f"rank 0 cannot make it, as a save would: {why_not}.")]
    names = [f".shardwise-doctor-{name}-{rank}" for rank in range(job.world)]
    own, patience_s = folder / names[job.rank], job.timeout_s / _SHARE_OF_TIMEOUT

    def write() -> str:
        is_missing = _what_stays(lambda: not folder.is_dir(), patience_s)
        return _NOT_THERE if is_missing else _why_not(partial(_write, own))

    def look() -> tuple[list[int], int]:
        if errors[job.rank]:
            return [], 0
        written = [rank for rank, error in enumerate(errors) if not error]
        unseen = _what_stays(partial(_unseen, folder, names, written), patience_s)
        return unseen, shutil.disk_usage(folder).free

    try:
        errors = job.gather(subject, write)
        facts = job.gather(subject, look)
    finally:
        for path in (own, _partial(own)):
            with suppress(OSError):
                path.unlink()
    job.gather(subject, lambda: None)  # all have removed their files
    for each in missing:
        with suppress(OSError):
            each.rmdir()
    failed = ranks_by_value((rank, error) for rank, error in enumerate(errors) if error).items()
    found = [wrong(subject, f"{listed_ranks(ranks)} cannot save there: {why}.") for why, ranks in failed]
    for rank, (unseen, _) in enumerate(facts):
        if unseen:
            text = f"rank {rank} does not see what {listed_ranks(unseen)} wrote: it is not shared"
            found.append(wrong(subject, f"{text}. Mount one file system there on all machines."))
    free_gb = min(free for _, free in facts) / 1e9
    return found or [ok(subject, f"shared by all ranks; write, fsync and rename work; {free_gb:.0f} GB free")]


_NOT_THERE = "it is not there, as it is on rank 0. Mount one file system there on all machines"


def _why_not(act: Callable[[], None]) -> str:
    """The text of what fails in ``act``."""
    try:
        act()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _what_stays(look: Callable[[], T], within_s: float) -> T:
    """What ``look`` returns in the end: other machines may show a change of the folder later."""
    deadline = time.monotonic() + within_s
    while (found := look()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def _unseen(folder: Path, names: Sequence[str], written: Sequence[int]) -> list[int]:
    """The ranks whose files are not there. Opening a folder makes NFS ask the server again, as asking for a
    file may not."""
    there = set(os.listdir(folder))
    return [rank for rank in written if names[rank] not in there]


def _write(path: Path) -> None:
    """Write as a checkpoint is written."""
    with open(_partial(path), "wb") as file:
        file.write(b"shardwise")
        file.flush()
        os.fsync(file.fileno())
    _partial(path).rename(path)


def _partial(path: Path) -> Path:
    return path.with_name(f"{path.name}.partial")


_LEAST_FREE = 0.9
"""The share of a device's memory that has to be free before training."""


# --- devices --------------------------------------------------------------------------------------


def check_devices(job: Job, wanted: str | None) -> list[Finding]:
    """Type, model, memory and peers of each rank's device."""
    facts = job.gather("devices", lambda: _facts(own_device(wanted)))
    ranks_of = ranks_by_value((rank, each["type"]) for rank, each in enumerate(facts))
    if len(ranks_of) > 1:
        sides = ", ".join(f"{kind} on {listed_ranks(ranks)}" for kind, ranks in ranks_of.items())
        text = f"the type is {sides}. Look at the driver and the build of torch where there is none."
        raise CheckFailed([wrong("devices", text)])
    (kind,) = ranks_of
    return judge_devices(facts) if kind == "cuda" else [ok("devices", f"{kind} on all ranks")]


def own_device(wanted: str | None) -> torch.device:
    """This rank's device: of its number on the machine, as torchrun tells it. It becomes the current one of
    this thread; CannotGoOn if there is none."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    there = "cpu" if accelerator is None else accelerator.type
    kind = wanted or there
    if kind == "cpu":
        return torch.device("cpu")
    if kind != there:
        raise CannotGoOn(f"there is no {kind} here, only {there}. Install a driver and a torch that have it.")
    index, count = int(os.environ.get("LOCAL_RANK", "0")), torch.accelerator.device_count()
    if index >= count == 1:  # a launcher that shows each process its own
        index = 0
    if index >= count:
        raise CannotGoOn(
            f"number {index} on its machine, which has {count} devices. Start one process for each device."
        )
    torch.accelerator.set_device_index(index)
    return torch.device(kind, index)


def _facts(device: torch.device) -> dict[str, Any]:
    if device.type != "cuda":
        return {"type": device.type}
    free, total = torch.cuda.mem_get_info(device)
    others = [index for index in range(torch.cuda.device_count()) if index != device.index]
    return {
        "type": device.type,
        "name": torch.cuda.get_device_name(device),
        "place": f"{platform.node()} {device}",
        "uuid": str(torch.cuda.get_device_properties(device).uuid),  # numbers depend on what is visible
        "free": free,
        "total": total,
        "unreachable": [i for i in others if not torch.cuda.can_device_access_peer(device, i)],
    }


def judge_devices(facts: list[dict[str, Any]]) -> list[Finding]:
    """The findings from what each rank has told of its device."""
    found: list[Finding] = []
    for rank, each in enumerate(facts):
        if each["free"] < _LEAST_FREE * each["total"]:
            taken = (each["total"] - each["free"]) / 1e9
            text = f"{taken:.0f} of {each['total'] / 1e9:.0f} GB are taken on rank {rank} ({each['place']})"
            found.append(wrong("devices", f"{text}. End what else runs there."))
        if each["unreachable"]:
            text = f"that of rank {rank} cannot access devices {each['unreachable']} of its machine directly"
            found.append(slow("devices", f"{text}. Copies between them pass through the host."))
    for ranks in ranks_by_value((rank, each["uuid"]) for rank, each in enumerate(facts)).values():
        if len(ranks) > 1:
            text = f"{listed_ranks(ranks)} use the same one ({facts[ranks[0]]['place']})"
            found.append(wrong("devices", f"{text}. Start one process for each."))
    names = {each["name"] for each in facts}
    if len(names) > 1:
        found.append(slow("devices", f"{', '.join(sorted(names))}: all wait for the slowest."))
    least_gb = min(each["free"] for each in facts) / 1e9
    return found or [ok("devices", f"{len(facts)} x {facts[0]['name']}, at least {least_gb:.0f} GB free")]


_PREFIXES = ("NCCL_", "TORCH_NCCL_", "GLOO_", "SHARDWISE_", "OMP_", "MKL_", "PYTORCH_", "UCX_", "FI_")
_OF_ONE_HOST = ("_IFNAME", "_HCA", "_FILE", "_DEVICES", "_RANK", "_HOST", "_DIR")
"""Names of interfaces and files, which may differ where machines do."""

_MOST_APART_S = 0.5
_ROUNDS = 5


# --- all checks in order, with those of versions, environments and clocks -------------------------


def examine(
    job: Job,
    *,
    folders: Sequence[Path] = (),
    mesh: tuple[int, ...] | None = None,
    names: Sequence[str] | None = None,
    device_type: str | None = None,
) -> list[Finding]:
    """The findings of all checks, up to the first that cannot be made; the same on all ranks.

    ``mesh``: its sizes, by default one dimension; ``names``: of its dimensions. ``device_type``: what to
    train on, by default the accelerator, or the host.
    """
    found: list[Finding] = []
    try:
        found += _check_ranks(job)
        found += _check_versions(job)
        found += _check_environment(job)
        found += _check_clocks(job)
        for folder in folders:
            found += check_folder(job, folder)
        found += check_devices(job, device_type)
        found += check_mesh(job, mesh, names, device_type)
    except CheckFailed as failed:
        found += failed.findings
    return found


def _check_ranks(job: Job) -> list[Finding]:
    """Whether all have come, and how many there are on each machine."""
    hosts = job.gather("ranks", platform.node)
    counts = [len(ranks) for ranks in ranks_by_value(enumerate(hosts)).values()]
    if len(counts) == 1:
        return [ok("ranks", f"{job.world} on one machine ({hosts[0]})")]
    each = f"{counts[0]}" if len(set(counts)) == 1 else f"{min(counts)} to {max(counts)}"
    return [ok("ranks", f"{job.world} on {len(counts)} machines, {each} on each")]


def versions() -> dict[str, str]:
    """Of all that has to be the same on the ranks."""
    found = {"python": platform.python_version(), "torch": torch.__version__, "shardwise": __version__}
    if torch.cuda.is_available():
        found["cuda"] = str(torch.version.cuda)
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def _check_versions(job: Job) -> list[Finding]:
    facts = job.gather("versions", versions)
    shown = ", ".join(f"{name} {version}" for name, version in facts[0].items())
    return _differences("versions", facts, "Install the same everywhere.") or [ok("versions", shown)]


def _check_environment(job: Job) -> list[Finding]:
    """Variables that change how ranks compute and communicate: of libraries, thread pools, torch's memory."""

    def own() -> dict[str, str]:
        return {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(_PREFIXES) and not name.endswith(_OF_ONE_HOST)
        }

    facts = job.gather("environment", own)
    shown = ", ".join(f"{name}={value}" for name, value in facts[0].items()) or "none is set"
    advice = "Export the same on all machines."
    return _differences("environment", facts, advice) or [ok("environment", shown)]


def _differences(subject: str, facts: Sequence[Mapping[str, str]], advice: str) -> list[Finding]:
    """A finding for each name whose value is not the same on all ranks."""
    found = []
    for name in dict.fromkeys(name for each in facts for name in each):
        values = ranks_by_value((rank, each.get(name, "nothing")) for rank, each in enumerate(facts))
        if len(values) > 1:
            sides = ", ".join(f"{value} on {listed_ranks(ranks)}" for value, ranks in values.items())
            found.append(wrong(subject, f"{name} is {sides}. {advice}"))
    return found


def _check_clocks(job: Job) -> list[Finding]:
    """How far the clock of each rank is ahead of that of rank 0: logs and traces are compared by time.

    An exchange ends on rank 0 first, and on the others when they look, within milliseconds. The median of
    several rounds leaves out those in which a rank was held up.
    """
    rounds = [job.gather("clocks", time.time) for _ in range(_ROUNDS)]
    offsets = [median(times[rank] - times[0] for times in rounds) for rank in range(job.world)]
    advice = "Logs and traces of ranks cannot be compared. Start NTP (chrony) on that machine."
    found = []
    for rank, offset in enumerate(offsets):
        if abs(offset) > _MOST_APART_S:
            where = f"{abs(offset):.1f} s {'ahead of' if offset > 0 else 'behind'} that of rank 0"
            found.append(wrong("clocks", f"that of rank {rank} is {where}. {advice}"))
    return found or [ok("clocks", f"at most {1e3 * max(map(abs, offsets)):.1f} ms from that of rank 0")]
