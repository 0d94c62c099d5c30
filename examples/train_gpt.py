"""Train a small byte-level GPT whose weights are sharded over all processes.

    python examples/train_gpt.py                                # one process
    torchrun --nproc-per-node 2 examples/train_gpt.py           # the same run, shared by two
    torchrun --nproc-per-node 2 examples/train_gpt.py --strategy zero2 --send-gradients int8
    torchrun --nproc-per-node 2 examples/train_gpt.py --compile block
    torchrun --nproc-per-node 2 examples/train_gpt.py --steps 5 --trace runs/trace   # open step.html
    torchrun --nproc-per-node 2 examples/train_gpt.py --optimizer muon
    torchrun --nproc-per-node 8 examples/train_gpt.py --layers 24 --width 1536 --heads 16 \
        --context 1024 --batch 64 --lr 3e-4 --dtype bf16        # eight GPUs

Should a process die, torchrun restarts all of them, and they go on from the last checkpoint; the losses
are those of a run that nothing has broken. So are they, but for rounding, if the same command is later
given with another --nproc-per-node, --strategy or --compile:

    torchrun --nproc-per-node 2 --max-restarts 3 examples/train_gpt.py --checkpoint-dir runs/saved --resume

Told to end by SIGTERM, as schedulers do it with jobs that make place for others, it saves at that step and
exits; the same command goes on from there.

Runs on CPUs (gloo) and on CUDA GPUs (nccl), needs no data but the Python installation itself,
and takes about two minutes with the defaults on two CPU cores. The one part that is about
sharding is `shard_by_name`, and what is saved and put back is in resume.py; the rest is what a training
script looks like anyway.
"""

import argparse
import contextlib
import importlib.metadata
import math
import os
import platform
import time
from collections.abc import Callable, Iterator

import psutil
import torch
import torch.distributed as dist
import torch.nn.functional as F
from corpus import (
    Corpus,
    draw_offsets,
    evenly_spaced_offsets,
    read_corpus,
    unigram_cross_entropy,
    windows_at,
)
from gpt import GPT, generate
from report import History, draw_loss, verdict, write_metrics
from resume import Checkpoints, Progress
from settings import parse_settings
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.rendezvous import rendezvous
from tqdm import tqdm

EVAL_BATCHES = 32
TRACED_STEP = 4  # or the last: the first ones record the order of blocks, and compile
SAMPLE_PROMPT = b"def "
SAMPLE_BYTES = 300


def main() -> None:
    """Set up, train, sample, report."""
    settings = parse_settings()
    shard = import_sharding(settings)
    start_processes(settings.device)

    corpus = read_corpus()
    model = build_sharded_model(settings, shard)
    history = train(model, corpus, settings)
    if (done := len(history.train_loss)) < settings.steps:
        if dist.get_rank() == 0:
            print(f"told to stop: saved at step {done} of {settings.steps}; --resume goes on", flush=True)
        dist.destroy_process_group()
        return
    # All ranks take part: a forward all-gathers weights. It draws the same bytes on each of them.
    with sampling(model, settings):
        sample = generate(model, SAMPLE_PROMPT, SAMPLE_BYTES, settings.seed)

    if dist.get_rank() == 0:
        write_report(settings, history, sample)
    dist.destroy_process_group()


def build_sharded_model(settings: argparse.Namespace, shard: Callable) -> GPT:
    """Build the same model on every rank, then leave each rank only its part of it."""
    torch.manual_seed(settings.seed)
    model = GPT(
        layers=settings.layers,
        width=settings.width,
        heads=settings.heads,
        context=settings.context,
    ).to(settings.device)
    shard(model, settings)
    compile_parts(model, settings)
    return model


def compile_parts(model: GPT, settings: argparse.Namespace) -> None:
    """Have each block, or the model with its blocks, compiled at its first call; names stay as they are."""
    if settings.compile == "block":
        for block in model.blocks:
            block.compile()
    elif settings.compile == "model":
        model.compile()


def shard_by_name(model: GPT, settings: argparse.Namespace) -> None:
    """Let a strategy decide what each rank holds; a block's weights are unsharded for its own work."""
    from shardwise import CommPolicy, shard_model
    from shardwise.policies import LowPrecisionReduction, QuantizedAllGather, QuantizedReduction
    from shardwise.strategies import register_comm_hook

    sends_int8 = settings.send_weights == "int8"
    policy = CommPolicy(quantized_all_gather=QuantizedAllGather() if sends_int8 else None)
    shard_model(model, strategy=settings.strategy, wrap=type(model.blocks[0]), comm_policy=policy)
    if settings.send_gradients == "bf16":
        register_comm_hook(model, None, LowPrecisionReduction(torch.bfloat16))
    elif settings.send_gradients == "int8":
        register_comm_hook(model, None, QuantizedReduction())


@contextlib.contextmanager
def sampling(model: GPT, settings: argparse.Namespace) -> Iterator[None]:
    """Unshard the weights once for many forwards, where the implementation can; and compile none of these.

    Each is one byte longer than the one before, and a graph all-gathers weights whenever it runs.
    """
    with contextlib.ExitStack() as stack:
        if settings.compile is not None:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        if settings.peer == "shardwise":
            from shardwise import inference

            stack.enter_context(inference(model))
        yield


def shard_by_hand(model: GPT, settings: argparse.Namespace) -> None:
    """Do what strategy zero3 does, with torch's own fully_shard."""
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(settings.device.type, settings.mesh, mesh_dim_names=("shard",))
    # One call per block: its weights are unsharded for its own forward and backward, then freed.
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    # The call on the whole model takes what is left: embeddings, last norm, head.
    fully_shard(model, mesh=mesh)


def build_optimizer(model: torch.nn.Module, settings: argparse.Namespace) -> torch.optim.Optimizer:
    """Make AdamW, or Muon, over the sharded parameters: its state is sharded because they are.

    It has to come after sharding, which replaces the parameters by DTensors.
    """
    if settings.optimizer == "muon":
        from shardwise.optim import Muon

        return Muon(
            model.named_parameters(),
            lr=settings.lr,
            adjust_lr_fn="match_rms_adamw",  # so that one learning rate suits both
            adamw={"lr": settings.lr, "betas": (0.9, 0.95), "weight_decay": 0.0, "fused": True},
            row_blocks=rows_of_fused_matrices,
        )
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]  # norms: not pulled towards zero
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=settings.lr, betas=(0.9, 0.95), fused=True)


def rows_of_fused_matrices(name: str, param: torch.Tensor) -> list[int] | None:
    """Tell Muon that queries, keys and values are three matrices in one."""
    return [param.shape[1]] * 3 if name.endswith("qkv.weight") else None


def learning_rate(step: int, peak: float, steps: int) -> float:
    """Rise linearly over the first tenth of the steps, then fall along a cosine to a tenth."""
    warm_up = max(1, steps // 10)
    if step < warm_up:
        return peak * (step + 1) / warm_up
    progress = (step - warm_up) / max(1, steps - warm_up)
    return peak * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress)))


def train(model: GPT, corpus: Corpus, settings: argparse.Namespace) -> History:
    """Run all steps that are not done yet, with validations and checkpoints in between and at the end."""
    optimizer = build_optimizer(model, settings)
    generator = torch.Generator().manual_seed(settings.seed)
    validation = validation_batches(corpus, settings)
    targets = torch.cat(validation)[:, 1:]
    history = History(unigram=unigram_cross_entropy(corpus.train, targets))
    progress = Progress(generator, history)
    checkpoints = Checkpoints(settings, model, optimizer, progress)
    checkpoints.resume()

    quiet, first = dist.get_rank() != 0, progress.steps_done
    traced = min(first + TRACED_STEP, settings.steps - 1)
    steps = range(first, settings.steps)
    bar = tqdm(steps, initial=first, total=settings.steps, unit="step", disable=quiet, dynamic_ncols=True)
    with checkpoints.stop_signal() as stop:
        for step in bar:
            began = time.perf_counter()
            offsets = draw_offsets(corpus.train, settings.context, settings.batch, generator)
            windows = windows_at(corpus.train, rows_of_this_rank(offsets), settings.context)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, settings.lr, settings.steps)
            with tracing(model, step == traced, settings):
                loss = train_step(model, optimizer, windows, settings)
            history.train_loss.append(loss)
            history.step_seconds.append(time.perf_counter() - began)
            history.memory_mb.append(memory_mb(settings.device))
            if not math.isfinite(loss):
                raise FloatingPointError(f"step {step + 1}: the loss is {loss}; try a smaller --lr")

            done = step + 1
            if done % settings.eval_every == 0 or done == settings.steps:
                history.val_steps.append(done)
                history.val_loss.append(evaluate(model, validation, settings))
            show_progress(bar, history, settings)
            stopping = stop is not None and stop.requested()
            checkpoints.save_if_due(stopping)
            if stopping:
                break
        checkpoints.wait()
    return history


@contextlib.contextmanager
def tracing(model: GPT, is_traced: bool, settings: argparse.Namespace) -> Iterator[None]:
    """Record this step if it is to be traced and that is wanted: a file for each rank, and a page of all."""
    if settings.trace is None or not is_traced:
        yield
        return
    import shardwise

    with shardwise.trace(model) as trace:
        yield
    paths = [settings.trace / f"rank{rank}.json" for rank in range(dist.get_world_size())]
    trace.save(paths[dist.get_rank()])
    dist.barrier()
    if dist.get_rank() == 0:
        shardwise.merge_traces(paths, settings.trace / "step.html")
        print(f"\n{trace}\nAll ranks: {settings.trace / 'step.html'}", flush=True)


def train_step(
    model: GPT,
    optimizer: torch.optim.Optimizer,
    windows: torch.Tensor,
    settings: argparse.Namespace,
) -> float:
    """Learn from this rank's windows; return the loss averaged over all ranks.

    Nothing here mentions ranks: backward averages the gradients, the norm of DTensors is the norm
    over all shards, and the optimizer updates the shard that is here.
    """
    loss = mean_loss(model, windows, settings)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
    optimizer.step()
    optimizer.zero_grad()
    return mean_over_ranks(loss)


def mean_loss(model: GPT, windows: torch.Tensor, settings: argparse.Namespace) -> torch.Tensor:
    """Nats per byte over this rank's windows, each (context + 1) bytes long."""
    windows = windows.to(settings.device)
    # No cache: it would keep a bf16 copy of every weight that fully_shard has already freed.
    with torch.autocast(
        settings.device.type,
        dtype=torch.bfloat16,
        enabled=settings.dtype == "bf16",
        cache_enabled=False,
    ):
        logits = model(windows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())


@torch.no_grad()
def evaluate(model: GPT, batches: list[torch.Tensor], settings: argparse.Namespace) -> float:
    """Validation loss over all ranks, which must hold equally many batches: forwards all-gather."""
    losses = [mean_loss(model, rows_of_this_rank(batch), settings) for batch in batches]
    return mean_over_ranks(torch.stack(losses).mean())


def validation_batches(corpus: Corpus, settings: argparse.Namespace) -> list[torch.Tensor]:
    """Cut the same global batches on every rank, spread evenly over the validation text."""
    text, count = corpus.validation, EVAL_BATCHES * settings.batch
    offsets = evenly_spaced_offsets(text, settings.context, count)
    return list(windows_at(text, offsets, settings.context).split(settings.batch))


def rows_of_this_rank(batch: torch.Tensor) -> torch.Tensor:
    """Take this rank's equal share of a global batch."""
    return batch.chunk(dist.get_world_size())[dist.get_rank()]


def mean_over_ranks(value: torch.Tensor) -> float:
    """Average a number over all ranks. By a sum, because gloo has no averaging reduction."""
    total = value.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def memory_mb(device: torch.device) -> float:
    """Return the peak of allocated GPU memory, or on a CPU what the process occupies now."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e6
    return psutil.Process().memory_info().rss / 1e6


def show_progress(bar: tqdm, history: History, settings: argparse.Namespace) -> None:
    """Put the newest numbers behind the bar; it draws them when it moves on."""
    shown = {
        "loss": f"{history.train_loss[-1]:.3f}",
        "tokens/s": f"{history.tokens_per_s(settings.batch * settings.context, last=20):,.0f}",
        "MB": f"{history.memory_mb[-1]:,.0f}",
    }
    if history.val_loss:
        shown["val"] = f"{history.val_loss[-1]:.3f}"
    bar.set_postfix(shown, refresh=False)


def write_report(settings: argparse.Namespace, history: History, sample: bytes) -> None:
    """Write metrics.json and loss.png, print the verdict and the sample."""
    settings.out.mkdir(parents=True, exist_ok=True)
    tokens_per_s = history.tokens_per_s(settings.batch * settings.context)
    write_metrics(
        settings.out / "metrics.json",
        history,
        settings=vars(settings),
        versions=versions(settings.peer),
        world_size=dist.get_world_size(),
        tokens_per_s=tokens_per_s,
    )
    processes = dist.get_world_size()
    how = f"{settings.peer}, {processes} x {settings.device.type}, {tokens_per_s:,.0f} tokens/s"
    draw_loss(settings.out / "loss.png", history, title=f"Sharded byte-level GPT: {how}")

    print(f"\nA sample:\n{sample.decode(errors='replace')}\n")
    print(verdict(history))
    print(f"\n{how}; curve and metrics are in {settings.out}")


def versions(peer: str) -> dict[str, str]:
    """Name what the numbers were measured with."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    if peer == "shardwise":
        # Used from a source tree that is on the path but not installed, it has no version.
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found["shardwise"] = importlib.metadata.version("shardwise")
    return found


def import_sharding(settings: argparse.Namespace) -> Callable:
    """Choose one implementation and leave the other, so that neither can lean on the other."""
    return shard_by_hand if settings.peer == "torch" else shard_by_name


def import_fully_shard(peer: str) -> Callable:
    """The same choice, for examples that call fully_shard on each module themselves."""
    if peer == "torch":
        from torch.distributed.fsdp import fully_shard
    else:
        from shardwise import fully_shard
    return fully_shard


def start_processes(device: torch.device) -> None:
    """Join the processes that torchrun started, or be the only one."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    device_id = device if device.type == "cuda" else None
    if "WORLD_SIZE" in os.environ:
        store, rank, world_size = next(rendezvous("env://"))
        store = dist.PrefixStore(attempt_of_torchrun(), store)
    else:
        # In this process: a world of one needs no address and no port.
        store, rank, world_size = dist.HashStore(), 0, 1
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, device_id=device_id)


def attempt_of_torchrun() -> str:
    """Name this attempt, for a store that torchrun keeps from one restart to the next.

    The addresses of processes that have died are in it still, and who reads one of them before the new one
    is written fails (pytorch issue 135712). On several machines each counts restarts for itself, and no
    name would be common: there, start torchrun with --rdzv-backend c10d and
    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, which makes it open a new store for each attempt.
    """
    on_one_machine = os.environ.get("GROUP_WORLD_SIZE") == "1"
    return "attempt " + (os.environ["TORCHELASTIC_RESTART_COUNT"] if on_one_machine else "0")


if __name__ == "__main__":
    main()
