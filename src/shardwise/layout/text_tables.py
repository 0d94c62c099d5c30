"""Text tables: rows of cells as lines of aligned columns."""

from collections.abc import Collection, Sequence


def aligned(rows: Sequence[Sequence[str]], right: Collection[int]) -> list[str]:
    """A line for each of ``rows``, which have the same number of cells; the columns ``right`` are
    right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if index in right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def ruled(rows: Sequence[Sequence[str]], right: Collection[int], *, has_total: bool = False) -> list[str]:
    """``aligned`` with a rule below the first line; with ``has_total`` also above the last."""
    header, *lines = aligned(rows, right)
    rule = "-" * max(map(len, [header, *lines]))
    return [header, rule, *lines[:-1], rule, lines[-1]] if has_total else [header, rule, *lines]


def unit_for(num_bytes: int) -> tuple[str, int]:
    """The unit for amounts up to ``num_bytes``, and its bytes."""
    for name, size in (("GB", 10**9), ("MB", 10**6)):
        if num_bytes >= size:
            return name, size
    return "kB", 10**3


def in_own_unit(num_bytes: int) -> str:
    """``num_bytes`` in the unit that suits it, for an amount that stands alone."""
    unit, size = unit_for(num_bytes)
    return f"{num_bytes / size:,.2f} {unit}"
