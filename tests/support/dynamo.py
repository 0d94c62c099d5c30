"""What tests that compile begin with."""

import warnings


def quiet_dynamo() -> None:
    """Without a warning of dynamo itself, when it looks at an input that is not a leaf."""
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")


def forget_graphs() -> None:
    """Begin anew: nothing is left of what was compiled before, nor counted."""
    import torch._dynamo
    from torch._dynamo.utils import counters

    quiet_dynamo()
    torch._dynamo.reset()
    counters.clear()
