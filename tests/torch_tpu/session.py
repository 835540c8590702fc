"""A test run on TorchTPU: its device, and which tests of the other folders run on it, too.

The import makes the device, and so must come before that of torch.
"""

from __future__ import annotations

import atexit
import os
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.torch_tpu import stand_in

_REASON_TO_SKIP = stand_in.reason_to_skip()


if _REASON_TO_SKIP is None:
    _folder = tempfile.TemporaryDirectory()
    atexit.register(_folder.cleanup)
    os.environ.update(stand_in.environment(Path(_folder.name)))
    stand_in.start()


def is_started() -> bool:
    """Whether the device was used in this process."""
    if _REASON_TO_SKIP is not None:
        return False
    from torch_tpu._internal.device import _device_ops_backend

    return bool(_device_ops_backend._is_initialized())


_OPERATOR = "it needs an operator or a kernel that torch_tpu, or the stand-in for a TPU, does not have"
_LAZY = "it tests lazy tensors, which torch_tpu does not have"
_NUMBER = "what .item() reads before the update is an error"
_VIEW = "a view of a weight that is made in a step, and read there, is a part of the step"
_SPMD = "it tests sharding, which this package does with torch_xla only"
_DATASETS = "it needs the package datasets, which is not in this environment"
_ALGORITHM = "torch_tpu draws random numbers with one algorithm only"
_HOST = "it is about the data on the host, and takes long; other kinds of data run"
# Tests of the other folders that do not run on TorchTPU, by the end of their name, and why.
LEFT_OUT: dict[str, str] = {
    "test_exceptions.py::test_a_graph_that_does_not_compile": "it makes torch_xla's compiler fail",
    "test_exceptions.py::test_the_sync_itself_raises": _LAZY,
    "test_exceptions.py::test_state_of_other_optimizers[ASGD-options3-1]": (
        "its parameters and their average share a buffer with torch_xla only"
    ),
    "test_rfc_stories.py::test_a_profiler_scope_across_the_edge": "it tests the profiler of torch_xla",
    "test_rfc_stories.py::test_leaving_the_loop_early": _LAZY,
    "test_optimizers.py::test_a_stale_optimizer_is_told_once": (
        "a step with an optimizer of parameters that were moved away raises a PlaceholderError there"
    ),
    "test_replay.py::test_views_aliases_and_copies_see_what_they_should": (
        "a view or alias of a tensor that a later step changes cannot be read any more; torch_tpu says so"
    ),
    "test_replay.py::test_state_lives_in_as_many_buffers_as_before": _LAZY,
    "test_replay.py::test_a_torch_that_does_not_tell_of_writes_is_noticed": _LAZY,
    "test_replay.py::test_a_torch_xla_that_behaves_otherwise_is_noticed_once": _LAZY,
    "test_replay.py::test_a_tensor_that_has_moved_is_not_looked_for_at_its_old_address": _SPMD,
    **{
        f"test_activation_checkpointing.py::{name}": reason
        for reason, names in (
            (_LAZY, ["test_torchs_function_by_any_name[False-lazy]", "test_torchs_function_by_any_name[True-lazy]"]),
            (_ALGORITHM, [f"test_the_same_dropout_masks[{variant}-three_fry]" for variant in (False, True)]),
            ("torch itself starts the device for a checkpoint on the host", ["test_tensors_of_the_host_are_torchs"]),
            (
                "memory of a TPU is libtpu's to say",
                ["test_memory_falls"],
            ),
        )
        for name in names
    },
    "test_nesting.py::test_inner_error_caught_by_the_user_rolls_back_the_inner_step_alone": (
        "an error that is caught between a step and a step inside it is not supported"
    ),
    "test_index_check.py::test_indices_that_are_computed_from_the_batch[positions]": _OPERATOR,
    "test_replay_hidden.py::test_tensors_written_through_an_alias": (
        "AveragedModel in a step gives _foreach_lerp_ a weight on the device, which torch_tpu reads"
    ),
    "test_replay_guards.py::test_equal_numbers_that_part_are_traced_again": (
        "equal numbers of an optimizer share an input of the graph with torch_xla only"
    ),
    "test_replaced_code.py::test_what_is_replaced_runs[a library's module gets a part]": _OPERATOR,
    "test_replaced_code.py::test_what_is_replaced_runs[the engine's entry]": (
        "it replaces what torch 2.9 calls for a backward; torch 2.13 gives it other arguments"
    ),
    "lightning_strategy/test_training.py::test_the_process_is_eager_once_there_is_a_strategy_and_during_runs": _LAZY,
    "lightning_strategy/test_training.py::test_losses_read_behind_each_batch_cost_a_transfer_and_nothing_else": (
        "xla_adapters.count() does not see copies to the host of torch_tpu"
    ),
    "lightning_strategy/test_training.py::test_gradients_zeroed_in_place_by_the_user[False-2]": (
        "gradients that are kept from step to step (free_grads=False) are refused"
    ),
    "hf_trainer/test_errors_in_steps.py::test_read_inside_the_step_works_under_warn": (
        "nothing of a step can be executed before its end"
    ),
    "hf_trainer/test_errors_in_steps.py::test_an_update_that_is_interrupted_in_a_replayed_step"
    "[_accelerator_graph_capture_health_check]": "torch 2.13 does not call it in a replayed update",
    **{
        f"hf_trainer/test_generation.py::{name}": reason
        for name, reason in (
            ("test_models_that_generate_in_a_way_of_their_own[kosmos2]", "on_graph_break='warn' is refused"),
            ("test_models_that_generate_in_a_way_of_their_own[seamless]", _OPERATOR),
            ("test_predict_with_generate_by_another_input[whisper]", _OPERATOR),
        )
    },
    "hf_trainer/test_checkpoints.py::test_renamed_weights_resume_exactly": _OPERATOR,
    "hf_trainer/test_checkpoints.py::test_renamed_weights_of_the_best_model_are_loaded": _OPERATOR,
    "hf_trainer/test_checkpoints.py::test_other_random_numbers_are_shown": _ALGORITHM,
    "lightning_strategy/test_checkpoints.py::test_other_random_numbers_are_shown": _ALGORITHM,
    "lightning_strategy/test_checkpoints.py::test_what_cannot_take_effect_raises": _SPMD,
    **{
        f"adapters/test_resume.py::test_the_data_goes_on[{kind}-{data}]": reason
        for kind in ("hf", "lightning")
        for data, reason in (
            *((name, _DATASETS) for name in ("datasets", "streaming datasets")),
            *((name, _HOST) for name in ("drawing", "generator", "several", "accumulated", "sampler of torch")),
            ("collator", _HOST),
        )
    },
    **{
        f"hf_trainer/test_accelerate.py::test_{name}": reason
        for name, reason in (
            *(
                (f"losses_and_weights_of_the_cpu_in_one_execution_for_each_step[{loop}]", _NUMBER)
                for loop in ("accumulating", "accumulating_by_hand", "with_a_norm_of_numbers", "without_an_optimizer")
            ),
            ("numbers_of_the_open_step_are_logged_when_it_has_ended", _NUMBER),
            ("a_number_that_is_read_before_the_update_cannot_decide_it", _NUMBER),
            ("under_warn_the_step_is_executed_in_two_parts", "on_graph_break='warn' is refused"),
            ("a_step_that_fails_is_discarded_and_the_loop_may_go_on", _VIEW),
            ("an_error_in_the_model_discards_the_step[forward]", _VIEW),
            ("a_read_before_the_backward_in_evaluation_mode_is_told", "a backward of an earlier step is refused"),
            ("sharded_over_eight_devices[dp]", _SPMD),
            ("sharded_over_eight_devices[fsdp]", _SPMD),
            ("several_devices_need_sharding", _SPMD),
        )
    },
    "lightning_strategy/test_training.py::test_language_model_of_huggingface_with_an_attention_mask": _OPERATOR,
}
_HERE = Path(__file__).parent
_shared: list[str] = []
_left_out: dict[str, str] = {}


# After those that a mark leaves out.
@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what does not run on TorchTPU, and all where the device cannot be had."""
    for item in items:
        if _REASON_TO_SKIP is not None:
            item.add_marker(pytest.mark.skip(reason=_REASON_TO_SKIP))
        elif _HERE not in item.path.parents:
            reason = next((reason for name, reason in LEFT_OUT.items() if _is(item, name)), None)
            if reason is None:
                _shared.append(item.nodeid)
            else:
                _left_out[item.nodeid] = reason
                item.add_marker(pytest.mark.skip(reason=reason))


def _is(item: pytest.Item, name: str) -> bool:
    """Whether an item is the test of that name; without a parameter all of its parameters."""
    nodeid = item.nodeid if "[" in name else item.nodeid.partition("[")[0]
    return nodeid.endswith(f"/{name}")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Says how many tests of the other folders ran on TorchTPU, too, and why the rest did not."""
    if _shared or _left_out:
        terminalreporter.section("on both runtimes")
        terminalreporter.line(f"{len(_shared)} tests of torch_xla ran on TorchTPU, too; {len(_left_out)} did not:")
        for reason, count in Counter(_left_out.values()).items():
            terminalreporter.line(f"  {count}: {reason}")
