"""The optimizer that bench/whole_parameters.py brings along, and its rows; tests/optim trains such classes on ranks."""

import numpy
import torch
from torch import Tensor, nn
from whole_parameters import Shampoo, Spread, _row


def test_shampoo_preconditions_by_the_fourth_roots_of_both_sums() -> None:
    """Against the matrix powers of the paper, in float64."""
    gradients = [
        torch.randn(4, 5, generator=torch.Generator().manual_seed(i), dtype=torch.float64) for i in range(2)
    ]
    param = nn.Parameter(torch.zeros(4, 5, dtype=torch.float64))
    optimizer = Shampoo([param], lr=1.0, eps=1e-2)
    left, right = (1e-2 * torch.eye(size, dtype=torch.float64) for size in (4, 5))
    expected = torch.zeros_like(param)
    for gradient in gradients:
        param.grad = gradient.clone()
        optimizer.step()
        left, right = left + gradient @ gradient.T, right + gradient.T @ gradient
        roots = [_inverse_fourth_root(each) for each in (left, right)]
        expected -= roots[0] @ gradient @ roots[1]
    torch.testing.assert_close(param.detach(), expected, rtol=1e-9, atol=1e-9)


def _inverse_fourth_root(matrix: Tensor) -> Tensor:
    u, s, vh = torch.linalg.svd(matrix)
    return u @ torch.diag(s**-0.25) @ vh


def test_rounds_with_roots_and_the_first_are_not_among_the_usual_ones() -> None:
    times = {"replicated": numpy.array([99.0, 10, 20, 50]), "ours": numpy.array([1.0, 5, 10, 10])}
    row = _row("SOAP", "ours", times, {"replicated": 8.0, "ours": 2.0}, has_roots=True)
    assert Spread(**row["step_to_replicated"]).median == 0.5
    assert (row["roots_to_replicated"], row["state_to_replicated"]) == (0.2, 0.25)
