"""What a failed run looks like to the person who reads it."""

from collections.abc import Mapping, Sequence


class WorkerError(AssertionError):
    """A rank raised, died or stayed silent; `failed` and `silent` name the ranks."""

    def __init__(
        self,
        what: str,
        size: int,
        waited_s: float,
        errors: Mapping[int, str],
        silent: Sequence[int],
        stacks: Mapping[int, str],
    ) -> None:
        self.failed = sorted(errors)
        self.silent = sorted(silent)
        answered = [rank for rank in range(size) if rank not in errors and rank not in silent]
        verdicts = [
            f"{_ranks(ranks)} {verdict}"
            for ranks, verdict in [
                (self.failed, "failed"),
                (self.silent, f"gave no answer within {waited_s:.1f} s"),
                (answered, "returned"),
            ]
            if ranks
        ]
        lines = [f"{what} on a world of {size}: {', '.join(verdicts)}"]
        for ranks, text in _by_text(errors):
            lines += [f"--- {_ranks(ranks)} failed ---", text.rstrip()]
        for rank, text in sorted(stacks.items()):
            state = "is still in" if rank in silent else "has returned and is now in"
            lines += [f"--- rank {rank} {state} ---", text.rstrip()]
        super().__init__("\n".join(lines))


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _by_text(errors: Mapping[int, str]) -> list[tuple[list[int], str]]:
    # Ranks run the same code, so they mostly fail alike: show that once.
    ranks: dict[str, list[int]] = {}
    for rank, text in sorted(errors.items()):
        ranks.setdefault(text, []).append(rank)
    return [(same, text) for text, same in ranks.items()]
