"""Tests of contract/ that `pytest --device sim` leaves out, by name, with the reason.

`--device cuda` leaves out the same, but for what the simulated device alone cannot do.

A name is `folder/file.py::test`, for all of its parameters, or `folder/file.py::test[some words]` for those with all
of these words; `FILES` are about something else than tensors on a device.
At most a tenth of the tests of offload/, replay/ and rerun/ may stand here (test_device_exemptions.py).
"""

from __future__ import annotations

import re

import pytest

__all__ = ["CHANGING", "EXEMPT", "FILES", "is_expected", "split", "why_exempt", "words_of"]

_NO_LAYOUT = "the simulated device has strided tensors only"
_SHALLOW_COPY = "torch's `.data =` takes a conjugated tensor only on devices that it names itself"
_LATER = "a device's store gives bytes back at its next call, once copies have passed"
_CPU_GENERATOR = "is about numbers that the CPU's generator draws"
_FREED = "is about memory of the CPU that is freed or enlarged while workers write it to a file, or when they have"
_FILE = "is about a file that workers write straight from CPU tensors; device tensors get there by bounce buffers"
_COUNTERS = "asks for what the store of CPU tensors counts"
_HOOKS = "compares hooks that copy between devices, under a mode that changes what copies make, with no hooks"
_KEPT = "expects that cumsum is replayed, which accelerators keep: it is not deterministic there"
_OF_CPU = "is about operators, kernels or tensors of the CPU"
_COUNT_THEMSELVES = "counts versions, as the recorder does where kernels do not; those of devices do"
_FORWARD_MODE = "torch's forward-mode derivatives end the process on the simulated device, without actckpt too"
_HAS_ACCELERATOR = "is about a machine without accelerators"
_ENDS_CONTEXT = "an index out of range ends the context of a GPU, for all tests after it"
_FORKS = "forks a process after autograd has threads, which it has on a machine with a GPU"
_TRANSPOSED = "products of a GPU differ where a factor is transposed; hooks that copy it change plain training, too"
_FUSED = "a scripted function of a GPU computes other numbers once its kernels are fused, without actckpt too"
_STARTS_ANEW = "cuDNN's dropout starts anew after a generator was set, which replays do; tests/gpu has tests of it"
_NO_STORE = "is about tensors that have no store, as those of the CPU until there is a folder"
_MESH_OF_CPU = "DTensor moves what it is given to the devices of its mesh, here the CPU"
_FRESH = "the process that loads the model has no simulated device"
_RACES = "moves noise before its kernel writes it, which the simulated device takes for the fault that it is"
_CASTS = "a device's peaks are predicted without casts that later forwards of one autocast find in its cache"
_OF_SIMULATED = (_RACES, _NO_LAYOUT, _SHALLOW_COPY, _FORWARD_MODE, _FRESH)

_OFFLOAD = "offload/test_offload_"
_KERNELS = "replay/test_replay_kernels.py::test_programs_are_bit_equal_to_plain_autograd"
_MATCHES = "replay/test_policy_matches.py::"
_INSIDE_HOOKS = "replay/test_replay_hooks.py::test_gradients_inside_hooks_are_those_of_plain_autograd"
_AUDIT = "replay/test_replay_audit.py::"
_FUNCTION = "contract/test_subclasses.py::test_a_function_gets_back_the_subclass_that_it_saved"
_STEPS = "contract/test_budgets_of_other_steps.py::"
_MATRIX = "contract/test_budget_matrix.py::test_"
FILES = {
    "test_estimation.py": "is about what estimates say of a CPU",
    "test_device_exemptions.py": "is about the names below",
    "test_explain_oom.py": "is about what the CPU allocates; device/test_out_of_memory.py is about devices",
}
EXEMPT: dict[str, str] = {
    "rerun/test_filled_late.py::test_offload_refuses_noise_that_it_moved_too_early": _RACES,
    f"{_STEPS}test_a_forward_inside_of_a_transform_is_no_step": _FORWARD_MODE,
    **dict.fromkeys(
        (f"{_FUNCTION}[{kind}]" for kind in ("distributed", "replicated", "distributed, of a collective")), _MESH_OF_CPU
    ),
    **dict.fromkeys(
        (
            "contract/test_budgets_on_disk.py::test_without_a_folder_or_room_nothing_goes_to_disk",
            "contract/test_budgets_on_disk.py::test_with_a_folder_plans_know_how_fast_it_is",
            "contract/test_measuring_tools.py::"
            "test_the_first_step_under_a_budget_counts_as_one_in_which_everything_is_recomputed[no_store]",
        ),
        _NO_STORE,
    ),
    f"{_MATRIX}a_percentage_is_one_of_what_plain_training_needs[casts, all blocks read a weight]": _CASTS,
    f"{_MATRIX}the_smallest_budget_of_activations_is_met[casts, all blocks read a weight]": _CASTS,
    f"{_MATRIX}the_smallest_budget_of_activations_is_met[casts until the step ends,]": _CASTS,
    "contract/test_blocks.py::test_a_saved_model_is_loaded_by_a_fresh_process": _FRESH,
    f"{_KERNELS}[sparse]": _NO_LAYOUT,
    "replay/test_replay_filling.py::test_memory_that_was_offloaded_is_not_held_until_its_region_closes": _LATER,
    f"{_OFFLOAD}fidelity.py::test_what_comes_back_has_the_same_values_and_layout[sparse]": _NO_LAYOUT,
    f"{_OFFLOAD}fidelity.py::test_what_comes_back_has_the_same_values_and_layout[conjugated]": _SHALLOW_COPY,
    f"{_OFFLOAD}fidelity.py::test_functions_get_back_what_they_saved[strided nested]": _NO_LAYOUT,
    f"{_OFFLOAD}graphs.py::test_a_graph_whose_backward_never_runs_gives_its_bytes_back[memory]": _LATER,
    f"{_OFFLOAD}faults.py::test_host_without_an_accelerator_is_refused": _HAS_ACCELERATOR,
    f"{_OFFLOAD}faults.py::test_the_disk_limit_is_never_exceeded": _COUNTERS,
    "replay/test_replay_kernels.py::test_a_bfloat16_cast_of_a_weight_is_replayed_and_not_kept": _OF_CPU,
    "replay/test_replay_aliases.py::test_in_place_foreach_operators_count_versions_up_under_the_recorder": (
        _COUNT_THEMSELVES
    ),
    f"{_OFFLOAD}freed.py::test_what_was_written_is_freed_though_nothing_else_is_saved": _LATER,
    f"{_OFFLOAD}fidelity.py::test_functions_get_back_what_they_saved[sparse buffer]": _NO_LAYOUT,
    f"{_OFFLOAD}stays.py::test_a_tensor_dtype_and_device_that_no_store_takes_stays": _NO_LAYOUT,
    "offload/test_prefer_offload.py::test_forward_does_not_wait_for_a_disk_that_is_behind": _FILE,
    f"{_KERNELS}[strided nested]": _NO_LAYOUT,
    "replay/test_dispatch_modes.py::test_a_mode_around_a_part_of_a_step_changes_what_it_changes_in_plain_autograd"
    "[hooks noise]": _HOOKS,
    "replay/test_dispatch_modes.py::test_a_mode_around_a_part_of_a_step_changes_what_it_changes_in_plain_autograd"
    "[nested noise]": _HOOKS,
    "replay/test_replay_hooks.py::test_gradients_inside_hooks_that_round_are_those_of_torchs_checkpoint[scan]": _KEPT,
    f"{_MATCHES}test_a_policy_that_matches_nothing_warns_once_per_place_and_names_what_runs": _OF_CPU,
    f"{_AUDIT}test_workspaces_are_not_compared_where_a_policy_keeps_the_results_before_them": _OF_CPU,
    "replay/test_replay_nesting.py::test_rule_10_flex_attention_in_a_region": _OF_CPU,
    "rerun/test_random_state.py::test_without_preserve_rng_state_the_rerun_draws_on": _CPU_GENERATOR,
    "rerun/test_rerun_audit.py::test_values_from_uninitialized_memory_warn": _OF_CPU,
    "rerun/test_rerun_audit.py::test_uninitialized_memory_excuses_no_other_difference": _OF_CPU,
    f"{_OFFLOAD}freed.py::test_memory_freed_while_it_is_copied_out_gives_what_was_saved": _FREED,
    f"{_OFFLOAD}freed.py::test_memory_freed_after_its_graph_is_gone_is_no_crash": _FREED,
    f"{_OFFLOAD}freed.py::test_memory_freed_whose_write_failed_gives_what_was_saved": _FREED,
    f"{_OFFLOAD}freed.py::test_a_tensor_in_two_spans_whose_writes_failed_gives_what_was_saved": _FREED,
    f"{_OFFLOAD}freed.py::test_what_was_brought_back_may_be_freed_by_its_reader": _FREED,
    f"{_OFFLOAD}freed.py::test_storages_that_nobody_copies_do_not_wait": _FREED,
    f"{_OFFLOAD}freed.py::test_memory_freed_while_backward_holds_it_gives_what_was_saved": _FREED,
    f"{_OFFLOAD}freed.py::test_what_a_failed_backward_read_ahead_is_released": _FREED,
    f"{_OFFLOAD}faults.py::test_a_write_that_fails_keeps_the_tensor": _FILE,
    f"{_OFFLOAD}faults.py::test_short_writes_and_reads_are_continued": _FILE,
    f"{_OFFLOAD}faults.py::test_a_read_that_fails_raises_and_the_next_try_is_right": _FILE,
    f"{_OFFLOAD}faults.py::test_sources_that_are_still_being_written_are_used_as_they_are": _FILE,
}

#: What `--device cuda` leaves out besides.
EXEMPT_ON_GPU: dict[str, str] = {
    **dict.fromkeys(
        (f"{_KERNELS}[what an operator wrote write={case}]" for case in ("index put", "scatter add")),
        _ENDS_CONTEXT,
    ),
    f"{_AUDIT}test_an_audit_does_not_fail_in_a_child_process_that_may_not_use_its_store": _FORKS,
    **dict.fromkeys(
        (
            f"{_INSIDE_HOOKS}[{program} contiguous]"
            for program in ("transposes", "half precision", "double precision", "conjugated")
        ),
        _TRANSPOSED,
    ),
    "rerun/test_keywords.py::test_early_stop_leaves_a_scripted_function_in_which_torch_fails": _FUSED,
    "replay/test_replay_models.py::test_a_model_trains_as_without_a_region[lstm]": _STARTS_ANEW,
    "replay/test_presets.py::test_each_keeps_what_it_says_and_the_rest_is_recomputed": _OF_CPU,
}

#: Tests that change a saved tensor in place while it may be copied to the host. Nobody orders the two, and nobody uses
#: what was copied: backward raises for the change, or is over.
CHANGING = {
    f"{_OFFLOAD}overlaps.py::test_a_change_between_two_overlapping_views_is_not_joined",
    f"{_OFFLOAD}stays.py::test_a_change_after_backward_is_nobodys_business",
    f"{_OFFLOAD}stays.py::test_a_change_in_place_raises",
    f"{_OFFLOAD}stays.py::test_a_tensor_changed_and_saved_again_comes_back_as_it_was_then",
    f"{_OFFLOAD}stays.py::test_a_change_of_an_output_or_a_parameter_raises",
    "replay/test_replay_aliases.py::test_a_change_that_plain_autograd_notices_never_gives_another_gradient",
    "replay/test_replay_backward.py::test_a_backward_that_changes_what_it_saved_spoils_nothing_else",
    "replay/test_replay_property.py::test_random_programs_are_bit_equal_to_plain_autograd",
    "contract/test_quantized_tensors.py::test_quantized_weights_that_an_optimizer_changed_are_saved",
    "offload/test_prefer_offload.py::test_what_found_no_room_is_watched_for_changes_as_any_that_is_kept",
}
_WHILE_COPIED = re.compile(r"^\w+ on sim:\d, stream \d+ writes \d+ bytes that cuMemcpyDtoHAsync .* reads, and nothing")


def split(key: str) -> tuple[str, set[str]]:
    """Return what a name says of a test: without parameters, and words of these."""
    name, _, words = key.removesuffix("]").partition("[")
    return name, set(words.split())


def _by_name(table: dict[str, str]) -> dict[str, list[tuple[set[str], str]]]:
    found: dict[str, list[tuple[set[str], str]]] = {}
    for key, why in table.items():
        found.setdefault(split(key)[0], []).append((split(key)[1], why))
    return found


_BY_NAME = {
    "sim": _by_name(EXEMPT),
    "cuda": _by_name({key: why for key, why in EXEMPT.items() if why not in _OF_SIMULATED} | EXEMPT_ON_GPU),
}


def words_of(item: pytest.Item) -> tuple[str, set[str]]:
    """Return the name of a test without parameters, and the words of these."""
    name = f"{item.path.parent.name}/{item.path.name}::{getattr(item, 'originalname', item.name)}"
    callspec = getattr(item, "callspec", None)
    return name, set() if callspec is None else set(callspec.id.replace("-", " ").split())


def why_exempt(item: pytest.Item, device: str = "sim") -> str | None:
    """Return why a test does not run on the device; None if it does."""
    if item.path.parent.name == "contract" and item.path.name in FILES:
        return FILES[item.path.name]
    name, words = words_of(item)
    return next((why for key, why in _BY_NAME[device].get(name, ()) if key <= words), None)


def is_expected(item: pytest.Item, fault: str) -> bool:
    """Whether a test provokes a fault of the device on purpose."""
    return words_of(item)[0] in CHANGING and _WHILE_COPIED.match(fault) is not None
