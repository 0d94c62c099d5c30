"""From a sharded parameter to its bucket, and to its place in the buffers of that."""

import weakref
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from shardwise.buckets.bucket import Bucket

FLAT_SLOT = "_shardwise_flat_slot"
"""The attribute of a sharded parameter that has its `FlatSlot`."""


class FlatSlot:
    """The bucket of a sharded parameter, and the index of the parameter in it.

    It does not keep the bucket alive, and it does not travel: a pickled or copied parameter is in no bucket.
    """

    __slots__ = ("_bucket", "index")

    def __init__(self, bucket: "Bucket | None" = None, index: int = 0) -> None:
        self._bucket = None if bucket is None else weakref.ref(bucket)
        self.index = index

    def __reduce__(self) -> tuple[type["FlatSlot"], tuple[()]]:
        """An empty one."""
        return FlatSlot, ()

    @property
    def bucket(self) -> "Bucket | None":
        """The bucket, while there is one."""
        return None if self._bucket is None else self._bucket()


def bucket_and_index(param: Tensor) -> "tuple[Bucket, int] | None":
    """Where ``param`` stands; None if it is no sharded parameter, or not that of its bucket any more."""
    slot = param.__dict__.get(FLAT_SLOT)
    if slot is None or (bucket := slot.bucket) is None or bucket.params[slot.index].sharded is not param:
        return None
    return bucket, slot.index
