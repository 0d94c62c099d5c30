"""Policies by name, for callers who need no more of them: "bf16", "fp16", "cpu"."""

from typing import Any

import torch

from shardwise.policies import CPUOffloadPolicy, MixedPrecisionPolicy

_PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": None}


def precision_named(caller: str, mp_policy: Any) -> Any:
    """A policy that computes in the dtype of this name and reduces in float32; what is no text, as it is.

    Raises:
        ValueError: there is none of this name.
    """
    if not isinstance(mp_policy, str):
        return mp_policy
    if mp_policy.lower() not in _PRECISIONS:
        raise ValueError(
            f"{caller}: there is no mp_policy '{mp_policy}'. Pass 'bf16' or 'fp16' (compute in it, reduce in "
            "float32), 'fp32' (compute in what the model has), or a MixedPrecisionPolicy."
        )
    dtype = _PRECISIONS[mp_policy.lower()]
    return None if dtype is None else MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)


def offload_named(caller: str, offload_policy: Any) -> Any:
    """:class:`CPUOffloadPolicy` for "cpu"; what is no text, as it is.

    Raises:
        ValueError: there is none of this name.
    """
    if not isinstance(offload_policy, str):
        return offload_policy
    if offload_policy.lower() != "cpu":
        raise ValueError(
            f"{caller}: there is no offload_policy '{offload_policy}'. Pass 'cpu', a CPUOffloadPolicy, or "
            "None to keep shards on the device."
        )
    return CPUOffloadPolicy()
