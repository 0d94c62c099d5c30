"""What sharding adds to a step on the host, in figures that do not depend on the machine's load.

Claim: a sharded block of 12 parameters (two norms, four linear layers) takes a fifth of the Python calls that
it takes with torch's FSDP2 ("the peer"), and adds a third of the instructions. Floor, made by hand: 0.14 of
the peer's. Refuted by: a figure that is above the claim; or by a variant that skips work (host_overhead.py
counts its collectives). How it is measured, and what it cannot show: README.md.

    python bench/host_instructions.py
    python bench/host_instructions.py --instructions --widths 32 128
"""

import argparse
import collections
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from common import OURS, PEER, PLAIN, command_line, fake_world, find_library, print_table, shard, write_json
from torch import Tensor, nn

BLOCKS, FEWER = 16, 8
WARM_UP, COUNTED = 8, 3
NO_VALGRIND = 3
"""Exit status where valgrind is missing."""
COLUMNS = {
    "variant": "variant",
    "width": "width",
    "python_per_block": "Python calls/block",
    "c_per_block": "C calls/block",
    "own_per_block": "own Python calls/block",
    "python_fixed": "fixed Python calls",
    "own_fixed": "own fixed",
    "own_per_stepped": "own Python calls/parameter, AdamW",
    "instructions": "M instructions/step",
    "added_to_peer": "added to peer",
}


class Block(nn.Module):
    """Two norms and four linear layers: 12 parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        x = x + self.out(torch.tanh(q) * k + v)
        return x + self.down(torch.relu(self.up(self.norm2(x))))


def sharded_blocks(variant: str, width: int, blocks: int, mesh: Any) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(width) for _ in range(blocks)))
    shard(variant, model, model, mesh=mesh)
    return model


def steady_step(variant: str, width: int, blocks: int, mesh: Any) -> Callable[[], None]:
    model = sharded_blocks(variant, width, blocks, mesh)
    x = torch.randn(2, width)

    def step() -> None:
        model(x).sum().backward()
        for param in model.parameters():
            param.grad = None

    for _ in range(WARM_UP):
        step()
    return step


def steady_update(variant: str, width: int, blocks: int, mesh: Any) -> Callable[[], None]:
    """A step of an optimizer, with gradients that stay."""
    model = sharded_blocks(variant, width, blocks, mesh)
    model(torch.randn(2, width)).sum().backward()
    update = torch.optim.AdamW(model.parameters(), fused=True).step
    for _ in range(WARM_UP):
        update()
    return update


def calls_of(step: Callable[[], None], library: str) -> collections.Counter[str]:
    """Calls of one step: of Python functions, of those in the folder ``library``, of C functions."""
    counts: collections.Counter[str] = collections.Counter()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            counts["python"] += 1
            counts["own"] += frame.f_code.co_filename.startswith(library)
        elif event == "c_call":
            counts["c"] += 1

    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
    return counts


def folder_of(variant: str) -> str:
    """Where the source of what shards lies; nothing does for plain modules."""
    if variant == PLAIN:
        return "nowhere"
    return str(Path(str(find_library(variant).__file__)).parent)


def count_calls(variant: str, width: int) -> dict[str, Any]:
    with fake_world(8) as mesh:
        (many, few), (many_updates, few_updates) = (
            [calls_of(make(variant, width, blocks, mesh), folder_of(variant)) for blocks in (BLOCKS, FEWER)]
            for make in (steady_step, steady_update)
        )
        num_more = (BLOCKS - FEWER) * len(list(Block(width).parameters()))
    row: dict[str, Any] = {"variant": variant, "width": width}
    for kind in ("python", "c", "own"):
        per_block = (many[kind] - few[kind]) / (BLOCKS - FEWER)
        row |= {f"{kind}_per_block": per_block, f"{kind}_fixed": many[kind] - BLOCKS * per_block}
    return row | {"own_per_stepped": (many_updates["own"] - few_updates["own"]) / num_more}


# --- instructions -----------------------------------------------------------------------------------


def run_counted(variant: str, width: int) -> None:
    """Steps of which callgrind, in which this process runs, counts some."""
    with fake_world(8) as mesh:
        step = steady_step(variant, width, BLOCKS, mesh)
        for switch in ("on", "off"):
            subprocess.run(
                ["callgrind_control", "-i", switch, str(os.getpid())], check=True, capture_output=True
            )
            if switch == "on":
                for _ in range(COUNTED):
                    step()


def instructions_of(variant: str, width: int) -> float:
    """Millions in a step, with what switching the count on and off takes."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "callgrind.out")
        command = ["valgrind", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={out}"]
        command += [sys.executable, __file__, "--counted", variant, "--widths", str(width)]
        single = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
        subprocess.run(command, env=os.environ | single, check=True, capture_output=True)
        totals = [
            int(n)
            for path in Path(folder).iterdir()
            for n in re.findall(r"^totals: (\d+)", path.read_text(), re.M)
        ]
        return sum(totals) / COUNTED / 1e6


def add_instructions(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        row["instructions"] = instructions_of(row["variant"], row["width"])
    for width in {row["width"] for row in rows}:
        found = {row["variant"]: row for row in rows if row["width"] == width}
        plain, peer = (found[variant]["instructions"] for variant in (PLAIN, PEER))
        for row in found.values():
            row["added_to_peer"] = (row["instructions"] - plain) / (peer - plain)


def parse() -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument("--widths", type=int, nargs="+", default=[32])
    parser.add_argument("--variants", nargs="+", default=[PLAIN, PEER, OURS], choices=[PLAIN, PEER, OURS])
    parser.add_argument("--instructions", action="store_true", help="count them with valgrind, in minutes")
    parser.add_argument("--counted", metavar="VARIANT", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    options = parse()
    torch.set_num_threads(1)
    if options.counted:
        run_counted(options.counted, options.widths[0])
        return
    if options.instructions and shutil.which("valgrind") is None:
        print("valgrind is not installed: instructions are not counted")
        raise SystemExit(NO_VALGRIND)
    rows = [count_calls(variant, width) for width in options.widths for variant in options.variants]
    if options.instructions:
        add_instructions(rows)
    print_table(rows, COLUMNS)
    write_json(options.json, "host_instructions", vars(options), rows)


if __name__ == "__main__":
    main()
