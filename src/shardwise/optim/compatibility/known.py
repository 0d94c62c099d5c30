"""Optimizers that cannot step DTensors, by package and name.

As tried by ``test_optimizers.py`` and ``test_torchao_training.py`` of ``tests/interop``, with torch 2.13,
pytorch_optimizer 4.1 and torchao 0.18. What is in no list is stepped as it is.
"""

import torch

Names = dict[str, frozenset[str]]


def _names(**packages: str) -> Names:
    return {package: frozenset(names.split()) for package, names in packages.items()}


LACK_AN_OPERATION = _names(torch="Rprop", pytorch_optimizer="ADOPT AdaSmooth Adan DiffGrad FTRL MADGRAD SRMM")
"""Elementwise, with an operation that DTensor lacks: right on flat shards."""

REFUSED = _names(
    torch="Adafactor",
    transformers="Adafactor",
    pytorch_optimizer="""
        A2Grad AdaFactor AdaGC AdaNorm Adalite AdamP Aida Alice ApolloDQN ASGD CAME DAdaptAdaGrad DAdaptAdam
        DAdaptAdan DAdaptLion DAdaptSGD DASH DeMo EmoFact Kron Lamb LARS LoRARite Magma MARS NovoGrad Prodigy
        RACS Ranger ROSE SaRA ScalableShampoo SGDP Shampoo SM3 SOAP SPAM SPlus StableAdamW StableSPAM SWATS
    """,
)
"""With norms or sums over whole parameters, in ways for which DTensor has no rule: a step raises, some after
weights have changed."""

FLATTENING = _names(torch="LBFGS", pytorch_optimizer="FlashAdamW LBFGS")
"""They flatten parameters, which DTensor refuses where a sharded dim does not divide by the ranks."""

LOW_BIT = _names(torchao="Adam4bit Adam8bit AdamFp8 AdamW4bit AdamW8bit AdamWFp8")
"""Each rank quantises the state of its shard or does not, as ``is_quantised`` says."""


def is_quantised(numel: int, block_size: int) -> bool:
    """Whether the state of so many elements is kept in low precision, by the rule of ``LOW_BIT``."""
    return numel >= 4096 and numel % block_size == 0


def is_in(names: Names, kind: type[torch.optim.Optimizer]) -> bool:
    """Whether ``kind`` itself, not a subclass of it, is one of them."""
    return kind.__name__ in names.get(package_of(kind), ())


def package_of(kind: type[torch.optim.Optimizer]) -> str:
    """The package that ``kind`` comes from."""
    return kind.__module__.partition(".")[0]
