"""Models that each do one thing that sharding finds hard (docs/explain/failures.md)."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from models import WIDTH, Block
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

# --- checkpointing --------------------------------------------------------------------------------


class InnerCheckpoint(nn.Module):
    """A block of which a part is recomputed."""

    def __init__(self, block: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.block = block
        self.last = nn.Linear(WIDTH, WIDTH)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return self.last(checkpoint(self.block, x, use_reentrant=self.reentrant))


class CheckpointedTower(nn.Module):
    """Blocks that are recomputed in backward, in the ways people do it.

    where: inside (a part of the block), around (torch.utils.checkpoint at the call), pairs (two
    blocks recomputed together), wrapper (checkpoint_wrapper around the block, before it is sharded),
    wrapped (the block inside the wrapper is what is sharded), whole (the caller checkpoints the model).
    """

    def __init__(self, where: str, reentrant: bool, depth: int = 3) -> None:
        super().__init__()
        self.where, self.reentrant = where, reentrant
        impl = CheckpointImpl.REENTRANT if reentrant else CheckpointImpl.NO_REENTRANT
        self.inlet = nn.Linear(WIDTH, WIDTH)
        blocks: list[nn.Module] = [Block(WIDTH, 13) for _ in range(depth)]
        if where == "inside":
            blocks = [InnerCheckpoint(block, reentrant) for block in blocks]
        if where in ("wrapper", "wrapped"):
            blocks = [checkpoint_wrapper(block, impl) for block in blocks]
        self.blocks = nn.ModuleList(blocks)
        self.outlet = nn.Linear(WIDTH, 1)

    def to_shard(self) -> list[nn.Module]:
        if self.where == "wrapped":
            return [block._checkpoint_wrapped_module for block in self.blocks]  # type: ignore[misc]
        return list(self.blocks)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        if self.where == "around":
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=self.reentrant)
        elif self.where == "pairs":
            first, second, *others = self.blocks
            x = checkpoint(lambda h: second(first(h)), x, use_reentrant=self.reentrant)
            for block in others:
                x = block(x)
        else:
            for block in self.blocks:
                x = block(x)
        return self.outlet(x)

    def run(self, x: Tensor) -> Tensor:
        """As the caller calls it."""
        if self.where != "whole":
            return self(x)
        return checkpoint(self, x.requires_grad_(), use_reentrant=self.reentrant)  # type: ignore[return-value]


class Stages(nn.Module):
    """Stages of several blocks each, recomputed as a whole; every level is sharded.

    `order` says which stage runs when: [0, 1], or [0, 0] as looped transformers have it.
    """

    def __init__(self, reentrant: bool, order: tuple[int, ...]) -> None:
        super().__init__()
        self.inlet = nn.Linear(WIDTH, WIDTH)
        self.stages = nn.ModuleList(Stage() for _ in set(order))
        self.outlet = nn.Linear(WIDTH, 1)
        self.reentrant, self.order = reentrant, order

    def to_shard(self) -> list[nn.Module]:
        return [m for stage in self.stages for m in (*stage.blocks, stage)]  # type: ignore[misc]

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for index in self.order:
            x = checkpoint(self.stages[index], x, use_reentrant=self.reentrant)  # type: ignore[assignment]
        return self.outlet(x)


class Stage(nn.Module):
    """Uses parameters of its own before and after its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([block(), block()])
        self.after = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        for each in self.blocks:
            x = each(x)
        return torch.tanh(self.after(x))


def block() -> nn.Module:
    return Block(WIDTH, 13)


# --- towers of unusual blocks ---------------------------------------------------------------------


class Chain(nn.Module):
    """Inlet, the blocks that `used` names, outlet; how a block's output becomes the next input says `between`."""

    def __init__(self, *makers: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.inlet = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(make() for make in makers)
        self.outlet = nn.Linear(WIDTH, 1)
        self.used: Sequence[int] = tuple(range(len(makers)))

    def between(self, block: nn.Module, x: Tensor) -> Tensor:
        return block(x)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for index in self.used:
            x = self.between(self.blocks[index], x)
        return self.outlet(x)


class Branching(Chain):
    """Of its blocks each forward uses those in `used`; and a parameter that none uses."""

    def __init__(self) -> None:
        super().__init__(block, block, block)
        self.spare = nn.Parameter(torch.ones(3, 5))


class PartlyUsed(nn.Module):
    """A block with a parameter that forward uses only on request."""

    def __init__(self) -> None:
        super().__init__()
        self.main = nn.Linear(WIDTH, WIDTH)
        self.extra = nn.Parameter(torch.full((5, WIDTH), 0.1))
        self.uses_extra = False

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.main(x))
        return x * self.extra.sum(0) if self.uses_extra else x


class Recursive(nn.Module):
    """Calls itself, as tree-shaped models do and diffusion models that condition on their own guess."""

    def __init__(self, guesses: bool) -> None:
        super().__init__()
        self.inlet = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([block()])
        self.outlet = nn.Linear(WIDTH, WIDTH)
        self.guesses = guesses

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        y = self.blocks[0](self.inlet(x))
        if depth:
            with torch.set_grad_enabled(torch.is_grad_enabled() and not self.guesses):
                inner = self(y, depth - 1)
            y = y + torch.tanh(inner)
        y = self.outlet(y)
        return y.sum(1, keepdim=True) if depth == 2 else y


class Between(Chain):
    """Parameters of the root between its blocks."""

    def __init__(self) -> None:
        super().__init__(block, block)
        self.middle = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.middle(self.blocks[0](self.inlet(x))))
        return self.outlet(self.blocks[1](x))


class Constrained(nn.Module):
    """Keeps its weight within bounds, in forward, in one of the ways people do it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        weight = self.linear.weight
        if self.how == "data":
            weight.data = torch.renorm(weight.data, 2, 0, 0.5)
        elif self.how == "data_in_place":
            weight.data.clamp_(-0.1, 0.1)
        elif self.how == "no_grad":
            with torch.no_grad():
                weight.clamp_(-0.1, 0.1)
        return torch.tanh(self.linear(x))


class Twice(Chain):
    """Uses its weights, and a block of its own, several times in a forward."""

    def __init__(self) -> None:
        super().__init__(block, block)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.blocks
        x = self.inlet(x)
        x = first(x)
        x = second(x) + first(x)
        x = first(self.inlet(x))
        with torch.no_grad():
            scale = 1 + second(x).abs().mean(dim=1, keepdim=True)
        return self.outlet(second(x) / scale)


class LoraLinear(nn.Module):
    """A frozen bfloat16 base with float32 adapters, whose gradients are complete before the base runs."""

    def __init__(self, rank: int = 2) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH, bias=False).to(torch.bfloat16).requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, WIDTH) / 3)
        self.up = nn.Parameter(torch.randn(WIDTH, rank) / 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.base(x.to(torch.bfloat16)).to(x.dtype)  # its backward runs last
        return torch.tanh(h + x @ self.down.t() @ self.up.t())


class MixedBlock(nn.Module):
    """Parameters of three dtypes, all trainable, of odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.coarse = nn.Parameter(torch.randn(7, WIDTH).to(torch.bfloat16))
        self.middle = nn.Parameter(torch.randn(5, WIDTH))
        self.fine = nn.Parameter(torch.randn(WIDTH, 12).double())
        self.flag = nn.Parameter(torch.tensor([True, False, True]), requires_grad=False)
        self.more = nn.Parameter(torch.randn(3).to(torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        a = x.to(torch.bfloat16) @ self.coarse.t() + self.more[self.flag].sum()
        b = x.float() @ self.middle.t()
        return torch.tanh(torch.cat([a.double(), b.double()], dim=1) @ self.fine.t())


class Tied(nn.Module):
    """One parameter under two names, in the root's group."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, 7, bias=False)
        self.blocks = nn.ModuleList([Block(7, 13)])
        self.head = nn.Linear(WIDTH, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](self.embed(x))
        return (x @ self.head.weight).sum(1, keepdim=True)


class Recurrent(nn.Module):
    """A recurrent network as a block."""

    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.rnn = kind(WIDTH, WIDTH, batch_first=True, **options)
        self.mix = nn.Linear(WIDTH * (2 if options.get("bidirectional") else 1), WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        sequence = torch.stack([x, x.flip(1), x * 0.5], dim=1)
        outputs, _ = self.rnn(sequence)
        return self.mix(outputs[:, -1])


# --- recovering -----------------------------------------------------------------------------------


class Failure(Exception):
    """Raised on request by the models here."""


class _FailInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, fails: bool) -> Tensor:
        ctx.fails = fails
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        if ctx.fails:
            raise Failure("in backward")
        return gradients[0], None


class Fragile(Block):
    """A block that fails when told to: before or after its work in forward, or in backward."""

    def __init__(self) -> None:
        super().__init__(WIDTH, 13)
        self.fails: str | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.fails == "early":
            raise Failure("early in forward")
        x = super().forward(x)
        if self.fails == "interrupted":
            raise KeyboardInterrupt
        if self.fails == "late":
            raise Failure("late in forward")
        return self.up.weight.sum() * 0 + _FailInBackward.apply(x, self.fails == "backward")  # type: ignore


def fragile_tower() -> nn.Module:
    return Chain(Fragile, Fragile, Fragile)
