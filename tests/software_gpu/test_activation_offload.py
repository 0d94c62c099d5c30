"""Activation offloading on software GPUs: the gradients of a model that keeps everything, and less memory."""

import pytest
from expecttest import assert_expected_inline

from software_gpu import activation_programs
from software_gpu.activation_programs import MODELS, PROGRAMS
from software_gpu.launch import run_on_gpus

FEW = ["steps_with_and_without_backward", "two_backwards"]
Found = tuple[dict[str, float], dict[str, dict[str, int]], str]


def check_differences(found: list[dict[str, float]], names: list[str]) -> None:
    for off in found:
        assert len(off) == len(MODELS) * len(names)
        assert {name: by for name, by in off.items() if not by < 1e-12} == {}


def gradients_memory_and_refusal() -> Found:
    off = activation_programs.differences(FEW)
    return off, activation_programs.kept_each_way(), activation_programs.change_an_input()


@pytest.fixture(scope="module")
def found() -> Found:
    # Copies that no stream waits for come too late.
    return run_on_gpus(1, gradients_memory_and_refusal, late=1)[0]


def test_gradients_are_those_of_a_model_that_keeps_everything(found: Found) -> None:
    check_differences([found[0]], FEW)


@pytest.mark.slow
@pytest.mark.parametrize("late", [1, 2, 4, 11])
def test_all_orders_of_forward_and_backward_give_these_gradients(late: int) -> None:
    names = list(PROGRAMS)
    check_differences(run_on_gpus(2, activation_programs.differences, names, late=late, timeout_s=400), names)


def test_forward_leaves_no_inputs_and_steady_steps_wait_for_nothing(found: Found) -> None:
    """Of six layers: an input each; the last one's alone, with what is around the layers."""
    _, kept, _ = found
    assert kept["False"]["after forward"] == kept["True"]["after forward"] + 5
    assert kept["None"]["peak"] > kept["False"]["peak"] > kept["True"]["peak"]
    for numbers in kept.values():
        assert {what for what, number in numbers.items() if number} == {"after forward", "peak"}


def test_a_module_that_changes_its_input_is_refused(found: Found) -> None:
    *_, message = found
    assert_expected_inline(
        message,
        """An input of a checkpointed module, of shape (1024, 16), was changed in place by the module or while it ran. In backward, activation checkpointing runs the module again from the input as it was. Let the module compute a new tensor.""",
    )
