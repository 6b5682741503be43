"""Rows that the everyday suite leaves to ``make soak``, because another row of it sees the same mistakes in less time.

A mark in a test's own file says which rows of a matrix are drawn. This table says which of the drawn ones cost seconds.
It is in one place, so that the time of the suite can be set from its ``--durations``. An entry that names no test makes
tests/test_everyday.py fail.
"""

from collections.abc import Collection, Sequence

import pytest

ALL = None
"""All rows of a test."""
MOVED: dict[str, Sequence[str] | None] = {
    "accelerator/test_activation_parts.py::test_bytes_are_those_of_a_cut_sequence_and_those_foreseen": ALL,
    "accelerator/test_activation_parts.py::test_gradients_are_those_of_one_process": (
        "tokens5-dropout0.2-layers3",
        "pp2-recomputeselective-microbatches2",
        "recomputefull-tokens5-dropout0.2-sequenceTrue-layers3",
    ),
    "accelerator/test_activations.py::test_a_move_that_is_left_out_is_told": (
        "places0-0-Kind.OFFLOAD",
        "places0-0-Kind.RELOAD",
        "places1-1-Kind.OFFLOAD",
        "places1-1-Kind.RELOAD",
        "places2-1-Kind.OFFLOAD",
        "places2-1-Kind.RELOAD",
    ),
    "accelerator/test_activations.py::test_the_bits_of_a_run_that_keeps_them": (
        "accumulation3-pp2-",
        "accumulation2-recomputeselective-",
    ),
    "accelerator/test_budget.py::test_no_step_stops_the_host_more_often_than_the_page_says": ("quick",),
    "accelerator/test_life.py::test_a_run_lives_on_a_device": (
        "ranks 2, mesh (('pp', 2),), family gpt2, tied True",
    ),
    "accelerator/test_offload.py::test_a_disk_beside_the_device": ALL,
    "accelerator/test_offload.py::test_masters_in_host_memory": (
        "1-cases0",
        "2-cases1",
    ),
    "accelerator/test_offload.py::test_state_that_leaves_between_steps": ("2-cases1",),
    "accelerator/test_precisions.py::test_a_layout_is_as_near_as_one_process": ("few",),
    "accelerator/test_streams.py::test_a_mistake_is_seen": (
        "a gradient's memory is given away",
        "an update is not waited for",
        "a batch's memory is given away",
        "an update is over before its copy",
    ),
    "accelerator/test_streams.py::test_every_use_is_ordered": (
        "batches",
        "weights of one",
    ),
    "checkpoint/test_checkpoints.py::test_a_bad_piece_on_one_rank_stops_all": ("False",),
    "cli/test_click_trainer.py::test_a_killed_run_loses_nothing_that_was_committed": ALL,
    "cli/test_trainer.py::test_a_cut_model_trains_writes_and_goes_on_as_a_whole_one": (
        "4-3-{'mesh': {'dp': 2, 'tp': 2}, 'recompute': 'full'}",
        "2-0-{'mesh': {'pp': 2}, 'pipeline': {'schedule': 'interleaved_1f1b', 'virtual_stages': 2}}",
        "2-0-{'mesh': {'tp': 2}}",
    ),
    "cli/test_trainer.py::test_two_ranks_train_and_write_as_one_does": ("0",),
    "comm/test_strict.py::test_engines_start_and_train": ("pp 3, tied, on three of the ranks",),
    "comm/test_strict.py::test_trains_as_over_gloo": ("dense-tp2-recomputefull-overlap3",),
    "comm/watching/test_watch.py::test_a_number_for_the_deadline_is_kept": ALL,
    "deepspeed/calls/test_cpu_for_cuda.py::test_a_pretrained_llama_has_its_rotary_frequencies": ALL,
    "engine/construction/test_build.py::test_compiled_blocks": ("aot_eager",),
    "engine/fit/test_fits.py::test_changes_are_priced_over_the_hosts_of_the_job": ALL,
    "engine/fit/test_foresee.py::test_the_peak_of_each_stage_is_foreseen": (
        "{'recompute': 'full', 'precision': 'bf16'}",
        "{'pipeline': {'schedule': 'interleaved_1f1b', 'virtual_stages': 2}}",
    ),
    "engine/fit/test_outside.py::test_what_lies_outside_torch_is_compared_with_the_memory_of_a_device": ALL,
    "engine/parts/test_attention_backend.py::test_compiled_code_of_another_choice_is_not_run": ALL,
    "engine/parts/test_guard.py::test_a_clean_run_has_the_same_bits_and_no_alarm": (
        "2-{'zero': {'stage': 1}, 'precision': 'bf16'}-{}",
    ),
    "engine/parts/test_kinds_left_out.py::test_no_kind_is_left_out_in_silence": (
        "disk, at the end",
        "delayed",
        "lamb",
        "zero0",
        "zero2",
        "muon",
        "zero1",
        "tp",
        "zero3",
    ),
    "engine/parts/test_tables.py::test_equals_one_process": (
        "4-mixed-auto-z0-m1-7-0-8-1-fp64",
        "4-mixed-auto-z0-m1-fp64",
        "2-mixed-auto-z0-m1-fp32",
        "2-mixed-auto-z0-m1-fp64",
        "2-table-rows-z0-m1-fp64",
        "2-row-rows-z0-m1-fp64",
        "4-mixed-auto-z2-m2-fp64",
    ),
    "engine/parts/test_weighing.py::test_the_norm_is_that_of_one_batch": (
        "gpt-4",
        "own loss-4",
    ),
    "engine/parts/test_weighing_unseen.py::test_exact_or_refused": ("2",),
    "engine/state/test_hung_saving.py::test_a_call_of_one_rank_alone_is_said_to_be_collective_on_both": (
        "save-shared_memory",
        "load-torch",
        "state_dict-shared_memory",
        "full_parameters-torch",
        "close-shared_memory",
        "evaluate-torch",
    ),
    "engine/state/test_hung_saving.py::test_a_rank_that_hangs_is_named_with_its_stack": (
        "0-save_in_front",
        "0-save_behind_and_wait",
        "1-load",
    ),
    "engine/state/test_hung_saving.py::test_a_rank_that_holds_the_interpreters_lock_is_named_with_its_stack": (
        "save_in_front",
    ),
    "engine/state/test_hung_saving.py::test_a_rank_that_is_killed_is_named_at_once": (
        "save_behind_and_wait",
        "load",
    ),
    "engine/state/test_hung_saving.py::test_a_stopped_rank_is_named": ("0",),
    "engine/state/test_reshape.py::test_no_bit_changes_on_the_way": ("bf16-gpt2",),
    "engine/state/test_saving.py::test_resuming_on_other_ranks_keeps_the_curve": ALL,
    "engine/step/test_check.py::test_right_models_are_compared_and_pass": ("4",),
    "engine/step/test_keys_ahead.py::test_no_bit_changes": (
        "placements1-2-depths1-2-reader-config1",
        "placements2-2-depths2-1-compute-config2",
        "placements4-2-depths4-1--config4",
        "placements5-1-depths5-2-reader-config5",
    ),
    "engine/step/test_mid_step.py::test_a_compiled_model_is_saved_under_its_own_names": ALL,
    "engine/test_compiled_ranks.py::test_a_block_is_one_graph_and_equals_one_process": ("experts",),
    "engine/test_context_methods.py::test_plan_has_what_is_sent": ("2",),
    "engine/test_dropout_layouts.py::test_losses_are_those_of_one_rank": (
        "pp2-tp2-microbatches2-dropout0.1",
    ),
    "engine/test_experts.py::test_equals_one_process": (
        "replicate2-dp2-ep2-stage2-microbatches2-toldFalse",
        "dp2-ep2-stage3-recomputefull",
    ),
    "engine/test_halves.py::test_halves_beside_other_techniques_have_the_bits_of_1f1b": ALL,
    "engine/test_halves.py::test_halves_equal_one_process": ("4",),
    "engine/test_late.py::test_every_bit_is_that_of_the_plain_run": ("2",),
    "engine/test_low_precision_layouts.py::test_all_ranks_skip_together": (
        "pp2-dp2-microbatches2-stage3",
        "tp2",
    ),
    "engine/test_low_precision_layouts.py::test_losses_are_near_those_of_one_rank": (
        "pp2-dp2-microbatches2-stage3-bf16",
        "tp2-fp16",
    ),
    "engine/test_many_engines.py::test_twenty_engines_with_overlapping_lives": ("4",),
    "engine/test_model_parallel.py::test_equals_one_process": ("tp3-sequenceFalse-kv_heads1-heads6",),
    "engine/test_offload.py::test_gradients_leave_between_microbatches": ("2-cases1",),
    "engine/test_offload.py::test_ranks_have_the_same_bits": (
        "2-cases0",
        "4-cases1",
    ),
    "engine/test_offload_beside.py::test_the_same_bits": ("2",),
    "engine/test_offload_faults.py::test_a_life_that_is_struck": (
        "9-ENOSPC save",
        "4-EIO write",
    ),
    "engine/test_schedulers.py::test_weights_are_those_of_plain_torch": ("1",),
    "engine/test_second_engine.py::test_a_dropped_engine_is_collected": ALL,
    "engine/test_second_engine.py::test_a_fork_after_engines_on_gloo": ALL,
    "engine/test_second_engine.py::test_an_engine_after_another_one": ("gloo",),
    "engine/test_second_engine.py::test_many_engines_refused_closed_and_dropped": ALL,
    "foreign/test_foreign.py::test_a_class_is_exact_or_refused": (
        "T5ForConditionalGeneration-pp2",
        "T5ForConditionalGeneration-zero3",
        "Gemma2ForCausalLM-pp2",
        "BertForMaskedLM-pp2",
        "GPTNeoXForCausalLM-pp2",
    ),
    "foreign/test_foreign.py::test_by_tiles": ("masked-BertForMaskedLM-bert-tp2-mlp0",),
    "parallel/zero/test_batch_norm.py::test_synchronized_in_compiled_blocks": ALL,
    "passes/test_recompute.py::test_with_compiled_blocks": ("{'scope': 'full'}-True",),
    "simulate/test_calibration.py::test_ranks_measure_together": ALL,
    "test_examples.py::test_examples_run_on_two_ranks": ALL,
    "test_examples.py::test_more_ranks_lose_what_one_process_does": (
        "05",
        "09",
        "11",
        "12",
    ),
    "test_types.py::test_mypy_finds_mistakes_of_use_and_none_in_a_right_program": ALL,
}
"""By test, the ids of its rows, or the beginnings of ids that hold more than a layout."""


def is_moved(item: pytest.Item) -> bool:
    """Return whether the soak alone runs this row."""
    return _entry_of(item) is not None


def _entry_of(item: pytest.Item) -> tuple[str, str] | None:
    test, _, row = item.nodeid.removeprefix("tests/").partition("[")
    if test not in MOVED:
        return None
    ids = MOVED[test]
    if ids is None:
        return test, ""
    return next(((test, each) for each in ids if row == f"{each}]" or row.startswith(f"{each}_")), None)


def unknown(items: Collection[pytest.Item]) -> list[str]:
    """Return the entries that name none of the items."""
    found = {_entry_of(item) for item in items}
    rows = [(test, each) for test, ids in MOVED.items() for each in ([""] if ids is None else ids)]
    return [f"{test}[{row}]" if row else test for test, row in rows if (test, row) not in found]
