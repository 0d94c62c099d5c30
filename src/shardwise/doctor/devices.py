"""Whether the devices of all ranks are alike, free, and can reach each other on a machine."""

import os
import platform
from typing import Any

import torch

from shardwise.doctor.job import CannotGoOn, CheckFailed, Finding, Job, ok, slow, wrong
from shardwise.layout.fqns import listed_ranks, ranks_by_value

_LEAST_FREE = 0.9
"""The share of a device's memory that has to be free before training."""


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
