"""Train a byte-level GPT whose perceptrons are mixtures of experts, with the experts spread over processes.

    torchrun --nproc-per-node 4 examples/train_moe.py            # 2 groups of experts x 2 shards
    torchrun --nproc-per-node 4 examples/train_moe.py --ep 4     # every process has 2 of 8 experts, whole
    python examples/train_moe.py                                 # one process, the same losses

    4 processes, --ep 2          rank 0       rank 1       rank 2       rank 3
    reads                        windows 0-3  windows 4-7  windows 8-11 windows 12-15
    computes experts             0-3          4-7          0-3          4-7
    keeps of each of them        first half   first half   second half  second half
    keeps of all else            a quarter    a quarter    a quarter    a quarter

Tokens travel to their experts among the ranks of one `ep` row (0 and 1, 2 and 3). The ranks of one
`edp` column (0 and 2, 1 and 3) hold shards of the same experts. All four shard everything else. So a
block has parameters on two meshes, and one `fully_shard` call takes both: `shard_placement_fn` says
which parameter belongs where.

What has to be set is the scale of the gradients. Every rank's loss is a mean over its own tokens,
and the gradient of their mean over all ranks is wanted: the sum of the ranks' gradients divided by
the number of ranks. `fully_shard` divides by the size of the mesh over which it reduces. For the
experts that is `edp`, too little by a factor `ep`: on its way back through the exchange the
gradient of an expert has already been added up over the ranks of `ep`. Hence
`set_gradient_divide_factor(number of ranks)` on the block, which holds for the parameters of both meshes
and is for the others what they are divided by anyway. Adam, which scales its steps by itself, nearly
hides a wrong factor; the norm that clips does not.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from corpus import Corpus, read_corpus, training_loader, validation_loader
from gpt import GPT, Attention
from processes import (
    Parser,
    check_above_0,
    check_sizes,
    choose_device,
    mean_over_ranks,
    share_of_rank,
    start_processes,
    world_size,
)
from report import History, progress_bar, show_step, write_report
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from train_gpt import evaluate, learning_rate, mean_loss

from shardwise import clip_grad_norm_, explain, fully_shard
from shardwise.policies import ShardPlacementResult

EVAL_BATCHES = 8


def main() -> None:
    """Set up, train, report."""
    settings = parse_settings()
    start_processes(settings.device)
    model = build_model(settings)
    parallelize(model, settings)
    shape = f"{world_size()} processes, {settings.ep} of them share the {settings.experts} experts"
    if dist.get_rank() == 0:
        print(f"device  {settings.device_choice}\nmesh    {shape}\n\n{explain(model)}\n", flush=True)
    history = train(model, read_corpus(), settings)
    write_report(settings, history, shape)
    dist.destroy_process_group()


def parse_settings(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read and check the command line."""
    parser = Parser("Train a byte-level GPT with expert parallelism and sharding.")
    add = parser.add_argument
    add("--experts", type=int, default=8, help="experts of each block")
    add("--active", type=int, default=2, help="experts that each token visits")
    add("--ep", type=int, help="processes that share the experts; default: 2 if that divides")
    add("--layers", type=int, default=3, help="number of blocks")
    add("--width", type=int, default=96, help="features per position")
    add("--heads", type=int, default=4, help="attention heads; must divide --width")
    add("--context", type=int, default=128, help="bytes the model looks back at most")
    add("--batch", type=int, default=16, help="windows per step, all processes together")
    add("--steps", type=int, default=100, help="optimizer steps")
    add("--lr", type=float, default=3e-3, help="highest learning rate")
    add("--clip", type=float, default=1.0, help="largest norm of the gradient")
    add("--seed", type=int, default=0, help="fixes the weights and the batches")
    add("--device", choices=["auto", "cpu", "cuda"], default="auto", help="auto prefers cuda")
    add("--eval-every", type=int, default=100, help="steps between two validations")
    add("--out", type=Path, default=Path("runs/moe"), help="folder for the curve and the metrics")
    settings = parser.parse_args(arguments)
    with parser.refusing():
        check_above_0(settings, "ep", "clip", "eval_every")
        if settings.ep is None:
            settings.ep = 1 if world_size() % 2 else 2
        check_sizes(settings, shares=world_size())
        check_experts(settings)
        settings.device, settings.device_choice = choose_device(settings.device)
    return settings


def check_experts(settings: argparse.Namespace) -> None:
    """Refuse what does not divide over the processes that share the experts."""
    if not 1 <= settings.active <= settings.experts:
        raise ValueError(
            f"--active {settings.active}: expected 1 to {settings.experts}, as many as --experts"
        )
    for name, number in (("experts", settings.experts), ("processes", world_size())):
        if number % settings.ep:
            raise ValueError(f"--ep {settings.ep} does not divide {number} {name} into equal parts")


# --- the model ------------------------------------------------------------------------------------


class Experts(nn.Module):
    """Perceptrons without common weights; each works on its own rows.

    After `spread_over` a rank computes an equal part of them, on rows from all ranks of `mesh`.
    """

    def __init__(self, count: int, width: int, depth: int):
        super().__init__()
        self.mesh: DeviceMesh | None = None
        self.up = nn.Parameter(torch.randn(count, width, 2 * width) * width**-0.5)
        self.down = nn.Parameter(torch.randn(count, 2 * width, width) * (2 * width * 2 * depth) ** -0.5)

    def spread_over(self, mesh: DeviceMesh) -> None:
        """Leave each rank of `mesh` its experts, as the local part of a DTensor.

        As DTensors they are still the whole model's parameters: norms count every expert once, and
        a checkpoint holds all of them.
        """
        self.mesh = mesh
        for name, param in list(self.named_parameters()):
            # Every rank has drawn the same weights, so nothing has to be sent.
            spread = distribute_tensor(param.data, mesh, [Shard(0)], src_data_rank=None)
            setattr(self, name, nn.Parameter(spread))

    def forward(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Apply expert 0 to the first `counts[0]` rows, expert 1 to the next, and so on."""
        if self.mesh is None:
            return self.compute(rows, counts)
        ranks, group = self.mesh.size(), self.mesh.get_group()
        # Row r of `arriving`: how many rows rank r of the mesh has for each expert that is here.
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=group)
        arriving = arriving.view(ranks, -1)
        sent, received = counts.view(ranks, -1).sum(1).tolist(), arriving.sum(1).tolist()
        here = Exchange.apply(rows, sent, received, group)
        # They come sorted by rank, then by expert; the experts want them by expert alone.
        expert = torch.arange(arriving.shape[1], device=rows.device).repeat(ranks)
        order = expert.repeat_interleave(arriving.flatten()).argsort(stable=True)
        results = self.compute(here[order], arriving.sum(0))[order.argsort()]
        return Exchange.apply(results, received, sent, group)

    def compute(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Apply the experts that are here."""
        weights = zip(local(self.up), local(self.down), strict=True)
        parts = rows.split(counts.tolist())
        return torch.cat([F.gelu(part @ up) @ down for part, (up, down) in zip(parts, weights, strict=True)])


def local(param: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor. Its gradient is that part's gradient."""
    return param.to_local() if isinstance(param, DTensor) else param


class Exchange(torch.autograd.Function):
    """Send the first `sent[0]` rows to rank 0 of the group and so on; gradients go the way back."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        result = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(result, rows.contiguous(), received, sent, group=group)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return Exchange.apply(gradient, ctx.received, ctx.sent, ctx.group), None, None, None


class Mixture(nn.Module):
    """Every token visits the `active` experts of highest score, and adds up what they say, so weighted.

    Experts of equal use come from a handicap on the choice that follows their load, not from a term
    of the loss (Wang et al. 2024, "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts"):
    such a term is no mean over tokens, so that it would depend on how the batch is divided.
    """

    def __init__(self, experts: int, active: int, width: int, depth: int):
        super().__init__()
        self.active = active
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = Experts(experts, width, depth)
        self.register_buffer("handicap", torch.zeros(experts))
        self.register_buffer("load", torch.zeros(experts, dtype=torch.long), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1)
        scores = self.router(tokens).softmax(dim=-1)
        chosen = (scores - self.handicap).topk(self.active).indices
        counts = torch.bincount(chosen.flatten(), minlength=len(self.load))
        if torch.is_grad_enabled():
            self.load += counts
        order = chosen.flatten().argsort(stable=True)  # of visits, by expert
        visitor = order // self.active
        results = self.experts(tokens[visitor], counts) * scores.gather(1, chosen).flatten()[order, None]
        return torch.zeros_like(tokens).index_add(0, visitor, results).view_as(x)

    @torch.no_grad()
    def balance(self) -> None:
        """Make experts that were used more than the mean harder to choose, over all ranks' tokens."""
        dist.all_reduce(self.load)
        self.handicap += 0.001 * (self.load * len(self.load) - self.load.sum()).sign()
        self.load.zero_()


class Block(nn.Module):
    """Attention, then a mixture of experts, each normalized first and added to its input."""

    def __init__(self, settings: argparse.Namespace):
        super().__init__()
        self.attention_norm = nn.LayerNorm(settings.width)
        self.attention = Attention(settings.width, settings.heads, settings.layers)
        self.mixture_norm = nn.LayerNorm(settings.width)
        self.mixture = Mixture(settings.experts, settings.active, settings.width, settings.layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mixture(self.mixture_norm(x))


def build_model(settings: argparse.Namespace) -> GPT:
    """Build the same model on every rank: ordinary, and whole."""
    torch.manual_seed(settings.seed)
    model = GPT(layers=0, width=settings.width, heads=settings.heads, context=settings.context)
    model.blocks.extend(Block(settings) for _ in range(settings.layers))
    return model.to(settings.device)


# --- parallelism ----------------------------------------------------------------------------------


def parallelize(model: GPT, settings: argparse.Namespace) -> None:
    """Spread the experts over `ep`; shard them over `edp`, and everything else over all ranks."""
    device = settings.device.type
    everyone = init_device_mesh(device, (world_size(),), mesh_dim_names=("dp",))
    if settings.ep == 1:  # every rank computes all experts, so one mesh will do
        for block in model.blocks:
            fully_shard(block, mesh=everyone)
        fully_shard(model, mesh=everyone)
        return

    shape = (world_size() // settings.ep, settings.ep)
    expert_mesh = init_device_mesh(device, shape, mesh_dim_names=("edp", "ep"))
    # Not by Shard(0): that would want at least as many experts on a rank as `edp` has ranks.
    on_edp = ShardPlacementResult(Shard(1), expert_mesh["edp"])
    for block in model.blocks:
        experts = block.mixture.experts
        experts.spread_over(expert_mesh["ep"])
        own = {id(param) for param in experts.parameters()}
        fully_shard(
            block,
            mesh=everyone,
            shard_placement_fn=lambda param, own=own: on_edp if id(param) in own else None,
        )
        block.set_gradient_divide_factor(float(world_size()))  # the docstring of this file says why
    fully_shard(model, mesh=everyone)


def by_mesh(model: GPT) -> list[list[nn.Parameter]]:
    """Parameters in groups of one mesh: torch's operations on lists of DTensors ask for that."""
    groups: dict[DeviceMesh | None, list[nn.Parameter]] = {}
    for param in model.parameters():
        groups.setdefault(param.device_mesh if isinstance(param, DTensor) else None, []).append(param)
    return list(groups.values())


# --- training -------------------------------------------------------------------------------------


def train(model: GPT, corpus: Corpus, settings: argparse.Namespace) -> History:
    """Run all steps, with a validation every `eval_every` steps and after the last one."""
    optimizer = torch.optim.AdamW([{"params": params} for params in by_mesh(model)], betas=(0.9, 0.95))
    validation, unigram = validation_loader(corpus, settings, share_of_rank(), EVAL_BATCHES)
    history = History(unigram, settings.batch * settings.context)
    with progress_bar(history, settings) as bar:
        for step, batch in enumerate(training_loader(corpus, settings, share_of_rank())):
            began = time.perf_counter()
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, settings)
            loss = mean_loss(model, batch, settings.device)
            loss.backward()
            norm = clip_grad_norm_(model, settings.clip)  # of parameters on two meshes
            optimizer.step()
            optimizer.zero_grad()
            for block in model.blocks:
                block.mixture.balance()
            history.note_step(mean_over_ranks(loss), norm.item(), time.perf_counter() - began)
            done = step + 1
            if done % settings.eval_every == 0 or done == settings.steps:
                history.note_validation(evaluate(model, validation, settings))
            show_step(bar, history)
    return history


if __name__ == "__main__":
    main()
