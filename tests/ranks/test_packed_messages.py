"""Messages: what they hold, and how large tensors are cut for them."""

import torch

from shardwise.ranks.packing import in_messages, num_packed_bytes, views_in


def test_tensors_of_all_dtypes_lie_in_one_message() -> None:
    tensors = [
        torch.arange(5, dtype=torch.int8),
        torch.randn(3, 4),
        torch.tensor(2.5, dtype=torch.float64),
        torch.empty(0, 3),
        torch.tensor([True, False]),
        torch.randn(2, dtype=torch.complex128),
    ]
    forms = [(tensor.shape, tensor.dtype) for tensor in tensors]
    message = torch.zeros(num_packed_bytes(forms), dtype=torch.uint8)
    assert len(message) == 16 + 48 + 16 + 0 + 16 + 32
    for view, tensor in zip(views_in(message, forms), tensors, strict=True):
        view.copy_(tensor)
    for view, tensor in zip(views_in(message.clone(), forms), tensors, strict=True):
        assert torch.equal(view, tensor)


def test_items_are_cut_by_rows_and_share_messages() -> None:
    asked: list[str] = []

    def items() -> object:
        for name, rows, row_bytes in (
            ("a", 5, 20),
            ("none", 0, 8),
            ("b", 1, 200),
            ("value", 0, 0),
            ("c", 2, 8),
        ):
            asked.append(name)
            yield name, rows, row_bytes

    messages = in_messages(items(), 64)  # type: ignore[arg-type]
    assert next(messages) == [("a", 0, 3)]
    assert asked == ["a"]
    assert list(messages) == [[("a", 3, 5), ("none", 0, 0)], [("b", 0, 1), ("value", 0, 0)], [("c", 0, 2)]]
