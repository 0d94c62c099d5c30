"""layout/nested.py: tensors are found in, and replaced inside, whatever a forward may return.

In this process and without torch.distributed: the file under test knows nothing of sharding.
"""

import collections
import dataclasses
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import pytest
import torch
from common import no_garbage_collection
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shardwise.layout.nested import NotAContainer, find_tensors, replace_tensors


def tensors(count: int) -> list[Tensor]:
    return [torch.full((1,), float(i)) for i in range(count)]


def assert_finds(output: Any, expected: list[Tensor]) -> None:
    """Each tensor once, in order, and the object itself rather than an equal one."""
    found = find_tensors(output)
    assert [id(t) for t in found] == [id(t) for t in expected]


def test_tensors_are_freed_without_the_garbage_collector() -> None:
    with no_garbage_collection():
        tensor = torch.ones(1)
        freed = weakref.ref(tensor)
        find_tensors({"inputs": [tensor], "more": {"inside": tensor}})
        del tensor
        assert freed() is None


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclasses.dataclass
class Output:
    logits: Any
    loss: Any = None


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenOutput:
    logits: Any
    loss: Any = None


class Plain:
    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


class Slotted:
    __slots__ = ("left", "right", "unset")

    def __init__(self, left: Any, right: Any) -> None:
        self.left, self.right = left, right


class SlottedAndMore(Slotted):
    __slots__ = "extra"  # a single name may stand alone

    def __init__(self, left: Any, right: Any, extra: Any) -> None:
        super().__init__(left, right)
        self.extra = extra


class SlottedInPrivate:
    __slots__ = ("__hidden",)

    def __init__(self, hidden: Any) -> None:
        self.__hidden = hidden


class MyList(list):  # type: ignore[type-arg]
    pass


class MyDict(dict):  # type: ignore[type-arg]
    pass


class LazyMapping(Mapping[str, Any]):
    def __init__(self, *pairs: tuple[Tensor, Tensor]) -> None:
        self._pairs = pairs

    def __getitem__(self, key: str) -> Any:
        return list(self._pairs[int(key)])

    def __iter__(self) -> Iterator[str]:
        return (str(i) for i in range(len(self._pairs)))

    def __len__(self) -> int:
        return len(self._pairs)


class Registered:
    """Known to torch's pytree, which is shown lists made on the spot. Its attributes show nothing."""

    __slots__ = ("read",)

    def __init__(self, *values: Any) -> None:
        self.read = lambda: values


pytree.register_pytree_node(
    Registered,
    lambda value: ([list(value.read())], None),
    lambda children, _: Registered(*next(iter(children))),
    serialized_type_name="test_outputs.Registered",
)


# --- finding, in containers of every kind below ---------------------------------------------------


def test_tensors_are_found_in_order_and_each_once() -> None:
    a, b, c, d = tensors(4)
    assert_finds({"z": a, "y": [b, (c, a)], "x": Output(d, b)}, [a, b, c, d])
    assert_finds([a, Pair(a, [a])], [a])


def test_subclasses_parameters_and_equal_tensors_are_tensors_of_their_own() -> None:
    found = [nn.Parameter(torch.ones(1)), torch.ones(1).as_subclass(_Subclass), torch.ones(1), torch.ones(1)]
    assert_finds(found, found)


class _Subclass(torch.Tensor):
    pass


def test_what_cannot_hold_an_output_is_not_searched() -> None:
    layer = nn.Linear(2, 2)
    namespace = types.ModuleType("namespace")
    namespace.tensor = torch.ones(1)  # type: ignore[attr-defined]
    attribute_of_a_class = type("Holder", (), {"tensor": torch.ones(1)})
    for output in (None, 1, 2.0, 3j, True, "text", b"bytes", layer, [layer], attribute_of_a_class):
        assert_finds(output, [])
    # An output may refer to a Python module (through its config, say); all of torch hangs on that.
    assert_finds([namespace], [])


def test_an_iterator_in_the_output_is_not_consumed() -> None:
    a, b = tensors(2)
    waiting = iter([a, b])
    find_tensors((waiting, a))
    assert list(waiting) == [a, b]


def test_properties_of_an_object_are_not_run() -> None:
    class Costly(Plain):
        @property
        def computed(self) -> Tensor:
            raise AssertionError("a property was run")

    (a,) = tensors(1)
    assert_finds(Costly(x=a), [a])


def test_cycles_end() -> None:
    a, b = tensors(2)
    ring: list[Any] = [a]
    ring.append({"again": ring, "b": b})
    assert_finds(ring, [a, b])
    node = Plain(x=a)
    node.itself = node  # type: ignore[attr-defined]
    assert_finds(node, [a])


def nested(depth: int, core: Any) -> Any:
    for _ in range(depth):
        core = [core]
    return core


def test_nesting_is_followed_to_a_bounded_depth() -> None:
    (a,) = tensors(1)
    assert_finds(nested(8, a), [a])
    assert_finds(nested(sys.getrecursionlimit(), a), [])  # and ends, without a RecursionError


def test_what_was_met_too_deep_is_searched_where_it_is_met_again() -> None:
    (a,) = tensors(1)
    shared = [[[a]]]
    assert_finds([nested(6, shared), shared], [a])


def test_containers_made_on_the_spot_are_all_searched() -> None:
    """The lists live only while they are looked at: the next one may lie at the same address."""
    values = tensors(200)
    pairs = list(zip(values[::2], values[1::2], strict=True))
    assert_finds([Registered(*pair) for pair in pairs], values)
    assert_finds([LazyMapping(pair) for pair in pairs], values)
    assert_finds(LazyMapping(*pairs), values)


# --- replacing ------------------------------------------------------------------------------------


PAIRS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "list": lambda a, b: [a, b],
    "tuple": lambda a, b: (a, b),
    "dict": lambda a, b: {"x": a, "y": b},
    "namedtuple": Pair,
    "dataclass": Output,
    "frozen": FrozenOutput,
    "packed": nn.utils.rnn.PackedSequence,
    "nested": lambda a, b: [Pair({"x": (a,)}, Output([b]))],
}


@pytest.mark.parametrize("make", PAIRS.values(), ids=PAIRS)
def test_a_tensor_is_replaced_where_it_stands(make: Callable[[Tensor, Tensor], Any]) -> None:
    old, kept, new = tensors(3)
    for output, expected in ((make(old, kept), [new, kept]), (make(kept, old), [kept, new])):
        replaced = replace_tensors(output, {id(old): new})
        assert type(replaced) is type(output)
        assert_finds(replaced, expected)
        assert old in find_tensors(output)  # what the caller's forward holds on to stays as it was


def test_a_tensor_alone_or_that_stands_twice_is_replaced_by_one_and_the_same() -> None:
    old, new = tensors(2)
    assert replace_tensors(old, {id(old): new}) is new
    first, (second,) = replace_tensors([old, (old,)], {id(old): new})
    assert first is new
    assert second is new


def test_what_needs_no_replacement_is_returned_itself() -> None:
    old, kept, new = tensors(3)
    same = collections.deque([kept])
    for output in (None, 3, "text", kept, [kept], Plain(x=kept), same, nn.Linear(2, 2)):
        assert replace_tensors(output, {id(old): new}) is output
    replaced = replace_tensors([old, same], {id(old): new})
    assert replaced[1] is same


@dataclasses.dataclass
class WithDerivedField:
    logits: Any
    derived: Any = dataclasses.field(default=None, init=False)


@dataclasses.dataclass
class WithInitVar:
    logits: Any
    scale: dataclasses.InitVar[float]

    def __post_init__(self, scale: float) -> None:
        self.scaled = scale


def derived_field(a: Tensor) -> WithDerivedField:
    output = WithDerivedField(None)
    output.derived = a
    return output


def attribute_beside_fields(a: Tensor) -> Output:
    output = Output(None)
    output.hidden = a  # type: ignore[attr-defined]
    return output


OTHERS: dict[str, Callable[[Tensor], Any]] = {
    "OrderedDict": lambda a: collections.OrderedDict(x=a),
    "defaultdict": lambda a: collections.defaultdict(list, x=a),
    "deque": lambda a: collections.deque([a]),
    "structseq": lambda a: torch.return_types.max((a, a)),
    "list-subclass": lambda a: MyList([a]),
    "dict-subclass": lambda a: MyDict(x=a),
    "set": lambda a: {a},
    "frozenset": lambda a: frozenset([a]),
    "proxy": lambda a: types.MappingProxyType({"x": a}),
    "slots": lambda a: Slotted(a, None),
    "slots-of-two-classes": lambda a: SlottedAndMore(None, None, a),
    "private-slot": SlottedInPrivate,
    "plain": lambda a: Plain(x=a),
    "initvar": lambda a: WithInitVar(a, 2.0),
    "registered": Registered,
    "field-not-in-init": derived_field,
    "attribute-beside-fields": attribute_beside_fields,
}


@pytest.mark.parametrize("make", OTHERS.values(), ids=OTHERS)
def test_any_other_container_is_rebuilt_or_refused_by_name(make: Callable[[Tensor], Any]) -> None:
    """Never returned with the old tensor inside, or without the tensor."""
    old, new = tensors(2)
    output = make(old)
    try:
        replaced = replace_tensors(output, {id(old): new})
    except NotAContainer as error:
        assert type(output).__name__ in str(error)  # noqa: PT017
    else:
        assert_finds(replaced, [new])
        assert type(replaced) is type(output)
    assert_finds(output, [old])


def test_other_fields_of_a_dataclass_keep_their_values() -> None:
    old, new = tensors(2)
    output = WithDerivedField(old)
    output.derived = "kept"
    output.note = "kept as well"  # type: ignore[attr-defined]
    replaced = replace_tensors(output, {id(old): new})
    assert replaced.logits is new
    assert replaced.derived == "kept"
    assert replaced.note == "kept as well"
