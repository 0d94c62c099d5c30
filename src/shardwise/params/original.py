"""What was sharded: the parameter that the module had before. Unsharded parameters are made like it."""

import copy
import weakref
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.layout.chunks import local_chunk
from shardwise.layout.mesh import ShardMesh
from shardwise.params.replaced_parameter import ReplacedParameter
from shardwise.torch_compat import autograd, dtensor, tensor_impl


class Original:
    """The class, attributes and hooks of a parameter before it was sharded, and its placements if it was a
    DTensor of tensor or expert parallelism. The tensor itself is not kept alive.
    """

    def __init__(self, param: nn.Parameter) -> None:
        self.tensor = weakref.ref(param)
        self.shape = param.shape
        self._stride = torch.empty(param.shape, device="meta").stride()
        # Attributes that the caller has set; a tensor subclass keeps its contents in there as well.
        own = vars(param.detach())
        self.attributes = {name: value for name, value in vars(param).items() if name not in own}
        self._class = type(param)
        self._spec = dtensor.spec_of(param) if isinstance(param, DTensor) else None
        # The caller's hooks stay in these dicts, so that a handle can remove them.
        self._hooks = autograd.gradient_hooks(param)
        self.post_hooks = autograd.post_accumulate_hooks(param)

    def without_hooks(self) -> "Original":
        """The same for a copy of the model, which does not get the caller's hooks."""
        twin = copy.copy(self)
        twin._hooks = twin.post_hooks = None
        return twin

    @property
    def is_tensor_parallel(self) -> bool:
        """True if modules see a DTensor."""
        return self._spec is not None

    @property
    def has_own_class(self) -> bool:
        """True if it was of a subclass of ``nn.Parameter``."""
        return self._spec is None and self._class not in (nn.Parameter, ReplacedParameter)

    @property
    def has_hooks(self) -> bool:
        """True if the caller had put hooks on it."""
        return bool(self._hooks) or bool(self.post_hooks)

    def content_in(self, whole: Tensor) -> Tensor:
        """The tensor to shard of a tensor like the original: this rank's part, if that is a DTensor."""
        return dtensor.local_tensor(whole) if self._spec is not None else whole

    def part_of(self, full: Tensor) -> Tensor:
        """The tensor to shard of a full, plain tensor. No communication."""
        return full if self._spec is None else local_chunk(full, self._spec)

    def content_of(self, gradient: Tensor, mesh: ShardMesh) -> Tensor:
        """The tensor to reduce of an unsharded gradient: this rank's part, placed as the parameter."""
        if self._spec is None or not isinstance(gradient, DTensor):
            return gradient
        wanted = list(self._spec.placements)
        if mesh.full_mesh is not None and gradient.device_mesh == mesh.full_mesh.mesh:
            # The reduction makes the sums over data parallel ranks.
            for index in mesh.full_mesh.data_parallel_dims:
                wanted[index] = gradient.placements[index]
        if tuple(wanted) != gradient.placements:
            gradient = gradient.redistribute(placements=wanted)
        return dtensor.local_tensor(gradient)

    # --- unsharded parameters ---------------------------------------------------------------------

    def like(self, data: Tensor, requires_grad: bool) -> nn.Parameter:
        """A parameter over ``data`` with the class of the original, or its placements if it is a DTensor."""
        if self.has_own_class:
            return tensor_impl.as_subclass_of_parameter(self._class, data, requires_grad)
        return self.over(data, requires_grad)

    def over(self, data: Tensor, requires_grad: bool) -> nn.Parameter:
        """As ``like``, for ``data`` that has a class of its own."""
        if self._spec is None:
            return nn.Parameter(data, requires_grad)
        spec = dtensor.sharded_spec(self._spec.mesh, self._spec.placements, self.shape, data.dtype)
        return dtensor.make_parameter(data, spec, requires_grad)

    def as_seen_in_graphs(self, full: Tensor) -> Tensor:
        """``full`` as modules see it: a DTensor where the original is one."""
        if self._spec is None:
            return full
        mesh, placements = self._spec.mesh, self._spec.placements
        return DTensor.from_local(full, mesh, placements, shape=self.shape, stride=self._stride)

    def attach_hooks(self, unsharded: nn.Parameter) -> None:
        """Run the caller's gradient hooks on this rank's unsharded gradient, before it is reduced."""
        if self._hooks is not None:
            unsharded.register_hook(partial(autograd.run_gradient_hooks, self._hooks))
