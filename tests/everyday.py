"""Rows that the everyday suite leaves to ``make soak``, because another row of it sees the same mistakes in less time.

A mark in a test's own file says which rows of a matrix are drawn. This table says which of the drawn ones cost seconds.
It is in one place, so that the time of the suite can be set from its ``--durations``. An entry that names no test makes
tests/test_everyday.py fail.
"""

from collections.abc import Collection, Sequence
from typing import Any

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
        "None-2-Kind.RELOAD",
        "places3-2-Kind.OFFLOAD",
    ),
    "accelerator/test_activations.py::test_the_bits_of_a_run_that_keeps_them": (
        "accumulation3-pp2-",
        "accumulation2-recomputeselective-",
        "stage3-expertsTrue-ep2",
    ),
    "accelerator/test_budget.py::test_no_step_stops_the_host_more_often_than_the_page_says": ("quick",),
    "accelerator/test_exposed.py::test_a_late_collective_is_exposed_on_its_axis": (
        "dp_replicate",
        "ep",
    ),
    "accelerator/test_exposed.py::test_a_late_message_is_exposed_on_pp": ("0",),
    "accelerator/test_life.py::test_a_run_lives_on_a_device": (
        "ranks 2, mesh (('pp', 2),), family gpt2, tied True",
        "optimizer asgd, precision bf16, layers 1",
        "optimizer sgd, precision bf16, layers 1",
        "optimizer nadam, precision bf16, layers 1",
        "ranks 2, optimizer lamb, precision fp16, stage 2, layers 1",
    ),
    "accelerator/test_offload.py::test_a_disk_beside_the_device": ALL,
    "accelerator/test_offload.py::test_masters_in_host_memory": (
        "1-cases0",
        "2-cases1",
    ),
    "accelerator/test_offload.py::test_state_that_leaves_between_steps": ("2-cases1",),
    "accelerator/test_parity_layouts.py::test_fused_forms_equal_one_process_on_a_device": (
        "dp2-microbatches2-stage3-recomputeselective",
        "pp2-microbatches2",
    ),
    "accelerator/test_precisions.py::test_a_layout_is_as_near_as_one_process": ("few",),
    "accelerator/test_streams.py::test_a_mistake_is_seen": (
        "a gradient's memory is given away",
        "an update is not waited for",
        "a batch's memory is given away",
        "an update is over before its copy",
        "a weight is read before it has come",
        "an activation leaves before it is computed",
        "an event stands before its copy",
        "an event of the wrong stream",
        "an activation is dropped under its copy",
        "a batch is read before it has come",
    ),
    "accelerator/test_streams.py::test_every_use_is_ordered": (
        "batches",
        "weights of one",
        "masters",
        "activations",
    ),
    "accelerator/test_tables.py::test_tables_beside_stages_equal_one_process": ("pp2",),
    "checkpoint/test_checkpoints.py::test_a_bad_piece_on_one_rank_stops_all": ("False",),
    "checkpoint/test_checkpoints.py::test_a_rank_that_dies_leaves_the_older_step_and_the_others_are_told": (
        "1",
    ),
    "checkpoint/test_kill.py::test_kill_at_a_sample_of_calls": ("1",),
    "checkpoint/test_save.py::test_any_call_may_fail": ("ENOSPC",),
    "cli/runs/test_chosen_step.py::test_the_two_best_of_twelve_evaluations_survive_a_kill_and_a_resume": (
        "pictures",
        "text",
    ),
    "cli/test_click_trainer.py::test_a_killed_run_loses_nothing_that_was_committed": ALL,
    "cli/test_click_trainer.py::test_every_model_runs_by_its_name": (
        "logistic_regression",
        "wide_deep",
        "dcn",
    ),
    "cli/test_click_trainer.py::test_the_kept_configuration_starts_the_same_run": ALL,
    "cli/test_train.py::test_a_full_disk_in_between_does_not_end_the_run": ("in front",),
    "cli/test_train.py::test_a_signal_saves_the_step_and_says_how_to_go_on": ("2-0",),
    "cli/test_train.py::test_the_last_save_of_a_run_is_tried_twice_and_must_succeed": ("in front",),
    "cli/test_trainer.py::test_a_cut_model_trains_writes_and_goes_on_as_a_whole_one": (
        "4-3-{'mesh': {'dp': 2, 'tp': 2}, 'recompute': 'full'}",
        "2-0-{'mesh': {'tp': 2}}",
        "4-3-{'mesh': {'pp': 2, 'dp': 2}}",
    ),
    "cli/test_trainer.py::test_two_ranks_train_and_write_as_one_does": ("0",),
    "comm/test_header_waits.py::test_the_verdict_ends_a_wait_for_a_header": ("strict",),
    "comm/test_launch_order.py::test_calls_of_all_ranks_fit_one_order": ("interleaved",),
    "comm/test_shared_memory.py::test_random_programs_with_late_ends": ("4-4",),
    "comm/test_strict.py::test_engines_start_and_train": ("pp 3, tied, on three of the ranks",),
    "comm/test_strict.py::test_trains_as_over_gloo": ("dense-tp2-recomputefull-overlap3",),
    "comm/watching/test_calls_alike.py::test_calls_of_all_ranks_are_alike": ("tensor",),
    "comm/watching/test_inquiry.py::test_the_rank_that_hangs_is_named_alive_and_dead": ("stopped-shared-0",),
    "comm/watching/test_watch.py::test_a_hung_rank_is_named_with_its_stack": (
        "pipeline over gloo",
        "pipeline",
    ),
    "comm/watching/test_watch.py::test_a_number_for_the_deadline_is_kept": ALL,
    "comm/watching/test_watch.py::test_a_rank_at_work_is_named_and_waited_for": ("gloo",),
    "deepspeed/calls/test_cpu_for_cuda.py::test_a_pretrained_llama_has_its_rotary_frequencies": ALL,
    "deepspeed/test_neighbours.py::test_an_encoder_is_called_by_itself": ("t5",),
    "deepspeed/training/test_pipeline_engine.py::test_a_pipeline_of_deepspeeds": (
        "stage 0",
        "in a V, stage 3, recomputed",
    ),
    "engine/construction/test_build.py::test_compiled_blocks": ("aot_eager",),
    "engine/fit/test_fits.py::test_changes_are_priced_over_the_hosts_of_the_job": ALL,
    "engine/fit/test_fits.py::test_two_ranks_that_share_a_sequence_hold_a_longer_one": (
        "planned",
        "ulysses",
    ),
    "engine/fit/test_foresee.py::test_the_peak_of_a_step_is_foreseen": (
        "{'recompute': 'full'}",
        "{}",
    ),
    "engine/fit/test_foresee.py::test_the_peak_of_each_stage_is_foreseen": (
        "{'recompute': 'full', 'precision': 'bf16'}",
        "{'pipeline': {'schedule': 'interleaved_1f1b', 'virtual_stages': 2}}",
        "{}",
        "{'pipeline': {'schedule': 'zb_h1'}}",
    ),
    "engine/fit/test_foresee.py::test_the_peak_of_experts_is_foreseen": (
        "{}",
        "{'recompute': 'full'}",
    ),
    "engine/fit/test_foresee.py::test_the_peak_of_experts_on_several_ranks_is_foreseen": (
        "{'mesh': {'ep': 2}}",
        "{'mesh': {'tp': 2}}",
    ),
    "engine/fit/test_foresee.py::test_the_peak_of_several_ranks_is_foreseen": ("{'mesh': {'tp': 2}}",),
    "engine/fit/test_outside.py::test_what_lies_outside_torch_is_compared_with_the_memory_of_a_device": ALL,
    "engine/parts/test_attention_backend.py::test_compiled_code_of_another_choice_is_not_run": ALL,
    "engine/parts/test_guard.py::test_a_clean_run_has_the_same_bits_and_no_alarm": (
        "2-{'zero': {'stage': 1}, 'precision': 'bf16'}-{}",
        "4-{'mesh': {'ep': 2}, 'zero': {'stage': 1}}-{'experts': 4}",
        "4-{'mesh': {'tp': 2}, 'zero': {'stage': 0}, 'offload': {'state': 'int8'}}-{'tied': True}",
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
        "experts",
        "zero3, weights on a disk",
    ),
    "engine/parts/test_tables.py::test_a_planted_bug_is_seen": (
        "clipping passes tables by",
        "row sums of some columns",
        "scores of the last microbatch",
        "start rows depend on the rank",
        "the schedule passes tables by",
        "the last microbatch alone",
        "each rank evicts alone",
        "skipped steps are not replayed",
    ),
    "engine/parts/test_tables.py::test_equals_one_process": (
        "4-mixed-auto-z0-m1-7-0-8-1-fp64",
        "4-mixed-auto-z0-m1-fp64",
        "2-mixed-auto-z0-m1-fp32",
        "2-mixed-auto-z0-m1-fp64",
        "2-table-rows-z0-m1-fp64",
        "2-row-rows-z0-m1-fp64",
        "4-mixed-auto-z2-m2-fp64",
        "2-row-auto-z1-m2-fp64",
        "2-column-auto-z0-m1-fp32",
        "2-column-auto-z0-m1-fp64",
    ),
    "engine/parts/test_tables.py::test_without_a_bug_nothing_is_seen": ALL,
    "engine/parts/test_unit_norms.py::test_data_parallel_ranks": ("4",),
    "engine/parts/test_unit_norms.py::test_slices_and_stages": ("4",),
    "engine/parts/test_weighing.py::test_the_norm_is_that_of_one_batch": (
        "gpt-4",
        "own loss-4",
        "gpt-2",
        "own loss-2",
        "as it is-2",
    ),
    "engine/parts/test_weighing_unseen.py::test_exact_or_refused": ("2",),
    "engine/state/test_averaging.py::test_the_average_is_that_of_averaged_model": (
        "{'zero': {'stage': 0}}",
        "{'zero': {'stage': 2}}",
        "{'mesh': {'tp': 2}}",
    ),
    "engine/state/test_hung_saving.py::test_a_call_of_one_rank_alone_is_said_to_be_collective_on_both": (
        "save-shared_memory",
        "load-torch",
        "state_dict-shared_memory",
        "full_parameters-torch",
        "close-shared_memory",
        "evaluate-torch",
        "close-torch",
        "full_parameters-shared_memory",
        "load-shared_memory",
        "state_dict-torch",
    ),
    "engine/state/test_hung_saving.py::test_a_rank_that_hangs_is_named_with_its_stack": (
        "0-save_in_front",
        "0-save_behind_and_wait",
        "1-load",
        "0-load",
        "1-save_in_front",
    ),
    "engine/state/test_hung_saving.py::test_a_rank_that_holds_the_interpreters_lock_is_named_with_its_stack": (
        "save_in_front",
    ),
    "engine/state/test_hung_saving.py::test_a_rank_that_is_killed_is_named_at_once": (
        "save_behind_and_wait",
        "load",
    ),
    "engine/state/test_hung_saving.py::test_a_slow_disk_is_no_hang": ("in front",),
    "engine/state/test_hung_saving.py::test_a_stopped_rank_is_named": ("0",),
    "engine/state/test_saving.py::test_a_state_goes_round_layouts_without_changing_a_bit": ("fp32",),
    "engine/state/test_saving.py::test_resuming_on_other_ranks_keeps_the_curve": ALL,
    "engine/state/test_saving.py::test_resuming_on_the_same_ranks_changes_no_bit": (
        "0",
        "1",
    ),
    "engine/state/test_table_increments.py::test_two_ranks_read_and_write_the_same_chain": ("others",),
    "engine/state/test_vector_export.py::test_a_change_without_a_mark_is_seen": (
        "a row that still moves",
        "loaded rows",
    ),
    "engine/state/test_vector_export.py::test_two_ranks_export_the_same": ("others",),
    "engine/step/test_check.py::test_right_models_are_compared_and_pass": ("4",),
    "engine/step/test_keys_ahead.py::test_no_bit_changes": (
        "placements1-2-depths1-2-reader-config1",
        "placements2-2-depths2-1-compute-config2",
        "placements4-2-depths4-1--config4",
        "placements5-1-depths5-2-reader-config5",
        "placements3-2-depths3-2-compute-config3",
        "placements6-1-depths6-1-compute-config6",
    ),
    "engine/step/test_mid_step.py::test_a_compiled_model_is_saved_under_its_own_names": ALL,
    "engine/step/test_mid_step.py::test_a_save_in_the_middle_of_a_step_holds_the_rows_of_the_last_one": (
        "2-forward raised",
        "2-accumulated",
    ),
    "engine/step/test_whole_tensors.py::test_equals_the_formula_on_whole_tensors": (
        "lamb-dp2-microbatches2-layers2-1",
        "lamb-dp2-stage1-gpt2-layers2-1",
        "lamb-dp2-stage2-gpt2-layers2-1",
        "lamb-tp2-kv_heads1-layers2-1",
        "lars-dp2-microbatches2-layers2-1",
        "lars-dp2-stage1-gpt2-layers2-1",
        "lars-dp2-stage2-gpt2-layers2-1",
        "lars-pp2-microbatches3-gpt2-layers2-1",
        "muon-dp2-microbatches2-layers2-1",
        "muon-dp2-stage2-gpt2-layers2-1",
        "muon-dp4-stage3-layers2-2",
        "lamb-pp2-dp2-microbatches2-stage2-gpt2-layers2-1",
        "lamb-pp2-microbatches3-gpt2-layers2-1",
        "muon-dp2-stage1-gpt2-layers2-1",
    ),
    "engine/step/test_whole_tensors.py::test_state_goes_through_other_layouts_without_changing_a_bit": (
        "lamb",
    ),
    "engine/test_compile.py::test_what_a_user_compiles": ("model",),
    "engine/test_context_methods.py::test_equals_one_process": (
        "(3, 'ring', 'odd, dropout, recompute')",
        "(4, {'method': 'planned', 'ulysses': 2}, 'state on the host')",
    ),
    "engine/test_context_methods.py::test_plan_has_what_is_sent": ("2",),
    "engine/test_documents.py::test_equals_each_document_by_itself": (
        "window-4-sinks-True-pattern-2-heads-6-kv_heads-1",
        "window-4-sinks-True-pattern-2-kv_heads-2-tp-2-sequence-False",
        "window-3-cp-2-pp-2-stage-2-microbatches-3-tile-4",
    ),
    "engine/test_dropout_layouts.py::test_losses_are_those_of_one_rank": (
        "pp2-tp2-microbatches2-dropout0.1",
    ),
    "engine/test_experts.py::test_equals_one_process": (
        "replicate2-dp2-ep2-stage2-microbatches2-toldFalse",
        "dp2-ep2-stage3-recomputefull",
        "pp2-tp2-ep2-microbatches2-virtual_stages2-recomputefull",
        "dp4-ep4-stage3-microbatches2-hosts2-exchangeblocks",
        "pp2-ep2-microbatches3-cp2",
        "dp2-stage3-recomputefull-rows9",
        "tp2-stage2-microbatches2-toldFalse",
        "microbatches2-rows9-cp2",
        "dp2-tp2-ep2-etp2-stage2-rows20",
        "stage1-microbatches2-cp3",
    ),
    "engine/test_experts.py::test_planted_bugs_are_seen": ("dense_strategy_for_all",),
    "engine/test_experts_beside.py::test_updates_by_whole_tensors": (
        "lamb-dp2-ep2-stage3-microbatches2",
        "lamb-tp2-etp2",
    ),
    "engine/test_halves.py::test_halves_beside_other_techniques_have_the_bits_of_1f1b": ALL,
    "engine/test_halves.py::test_halves_equal_one_process": ("4",),
    "engine/test_late.py::test_every_bit_is_that_of_the_plain_run": ("2",),
    "engine/test_low_precision_layouts.py::test_all_ranks_skip_together": (
        "pp2-dp2-microbatches2-stage3",
        "tp2",
        "pp2-tp2-microbatches2-scheduleinterleaved_1f1b-virtual_stages2-gpt2",
    ),
    "engine/test_low_precision_layouts.py::test_an_overflow_on_one_rank_is_an_overflow_on_all": (
        "1",
        "2",
        "0",
    ),
    "engine/test_low_precision_layouts.py::test_losses_are_near_those_of_one_rank": (
        "pp2-dp2-microbatches2-stage3-bf16",
        "tp2-fp16",
        "pp2-microbatches4-bf16",
        "pp2-dp2-microbatches2-stage3-fp16",
        "pp2-tp2-microbatches2-scheduleinterleaved_1f1b-virtual_stages2-gpt2-fp16",
        "pp2-tp2-microbatches2-scheduleinterleaved_1f1b-virtual_stages2-gpt2-bf16",
    ),
    "engine/test_many_engines.py::test_twenty_engines_with_overlapping_lives": ("4",),
    "engine/test_microbatches.py::test_gradients_are_the_plain_loops": ("4",),
    "engine/test_model_parallel.py::test_equals_one_process": (
        "tp2-sequenceFalse-gpt2-tile7",
        "pp3-microbatches2",
        "dp2-microbatches2-stage1-recomputeselective",
        "dp2-microbatches2-stage2-recomputefull",
        "pp2-microbatches3-gpt2-tile5",
        "tile5-cp2",
        "dp2-tp2-microbatches2-stage3-recomputeselective-kv_heads1-overlap5",
        "pp2-tp2-microbatches3-scheduleinterleaved_1f1b-virtual_stages2-kv_heads1",
        "pp2-dp2-microbatches4-stage3-scheduleinterleaved_1f1b-virtual_stages2-recomputefull",
    ),
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
    "engine/test_parity.py::test_equals_one_process": (
        "4-zero0-x1-sgd-fp64-replicate2",
        "4-zero1-x1-sgd-fp64-replicate2",
        "4-zero2-x1-sgd-fp64-replicate2",
        "4-zero1-x1-adamw-fp64-hosts2",
        "4-zero2-x3-adamw-fp64-hosts2",
        "3-zero0-x1-adamw-fp64",
        "3-zero1-x1-adamw-fp64",
        "3-zero2-x1-adamw-fp64",
        "3-zero3-x1-adamw-fp64",
    ),
    "engine/test_second_engine.py::test_a_dropped_engine_is_collected": ALL,
    "engine/test_second_engine.py::test_a_fork_after_engines_on_gloo": ALL,
    "engine/test_second_engine.py::test_an_engine_after_another_one": ("gloo",),
    "engine/test_second_engine.py::test_many_engines_refused_closed_and_dropped": ALL,
    "engine/test_split_schedules.py::test_the_same_bits_beside_another_technique": ("frozen blocks-names1",),
    "engine/test_tables_model_parallel.py::test_tables_beside_slices_and_stages_equal_one_process": (
        "tp2-pp2-auto-z0",
        "dp2-tp2-data_parallel-z2",
    ),
    "engine/test_transformers_experts.py::test_equals_one_process": (
        "GptOssForCausalLM",
        "Qwen3MoeForCausalLM",
    ),
    "engine/test_unlike_data.py::test_data_of_unlike_length_is_refused_on_all_ranks": (
        "dataset-batches",
        "stream-steps",
    ),
    "foreign/test_foreign.py::test_a_class_is_exact_or_refused": (
        "T5ForConditionalGeneration-pp2",
        "T5ForConditionalGeneration-zero3",
        "Gemma2ForCausalLM-pp2",
        "BertForMaskedLM-pp2",
        "GPTNeoXForCausalLM-pp2",
        "LlamaForCausalLM-tp2",
        "LlamaForCausalLM-zero3",
        "BertForMaskedLM-zero3",
        "Gemma2ForCausalLM-zero3",
        "GPTNeoXForCausalLM-tp2",
    ),
    "foreign/test_foreign.py::test_by_tiles": (
        "masked-BertForMaskedLM-bert-tp2-mlp0",
        "causal-GPTNeoXForCausalLM-gpt_neox-zero3-mlp0",
    ),
    "hostile/test_hostile.py::test_a_sample": ("deepspeed stage 2",),
    "launch/test_local.py::test_ranks_that_do_not_stop_are_killed_after_a_while": (
        "lambda *_: None-_SAVE_S",
    ),
    "models/ctr/test_model.py::test_criteo_rows_give_the_losses_of_plain_torch": ("made-20-deepfm",),
    "parallel/context/test_attention.py::test_equals_attention_in_one_process": (
        "4-planned-1",
        "4-planned-2",
        "4-ring-1",
        "3-ring-1",
        "3-planned-3",
    ),
    "parallel/embedding/test_step_keys.py::test_one_exchange_has_the_bits_of_one_for_each_microbatch": (
        "False-copies",
        "False-pooled",
        "True-routed",
    ),
    "parallel/embedding/test_transports.py::test_fifty_steps_in_fp32": (
        "data_parallel",
        "table",
    ),
    "parallel/embedding/test_transports.py::test_the_same_losses": (
        "4-torch",
        "2-shared_memory",
    ),
    "parallel/expert/test_dispatch.py::test_exact_in_rounds": ("4-1-9",),
    "parallel/expert/test_loads.py::test_equals_one_process": (
        "Layout(pp=2, dp=1, tp=1, ep=1, microbatches=4, virtual_stages=1, stage=0, recompute='none')",
        "Layout(pp=1, dp=1, tp=2, ep=1, microbatches=1, virtual_stages=1, stage=0, recompute='none')",
        "Layout(pp=1, dp=2, tp=1, ep=1, microbatches=1, virtual_stages=1, stage=1, recompute='selective')",
    ),
    "parallel/expert/test_loads.py::test_labels_that_are_not_read_are_seen_on_several_ranks": (
        "Layout(pp=2, dp=1, tp=1, ep=1, microbatches=2, virtual_stages=1, stage=0, recompute='none')",
    ),
    "parallel/pipeline/test_passes.py::test_lists_ordered_by_other_seconds_are_proved_too": (
        "0-0",
        "1-5",
    ),
    "parallel/zero/test_batch_norm.py::test_synchronized_in_compiled_blocks": ALL,
    "parallel/zero/test_cost.py::test_bytes_per_parameter": ("4",),
    "parallel/zero/test_cost.py::test_sixteen_bits_on_the_wire": ("4-cases1",),
    "passes/test_recompute.py::test_with_compiled_blocks": ("{'scope': 'full'}-True",),
    "passes/test_recompute.py::test_with_zero_on_two_ranks": ("0",),
    "simulate/test_calibration.py::test_ranks_measure_together": ALL,
    "test_examples.py::test_examples_run_on_two_ranks": ALL,
    "test_examples.py::test_experts_in_a_script_of_deepspeeds": ALL,
    "test_examples.py::test_more_ranks_lose_what_one_process_does": (
        "05",
        "09",
        "11",
        "12",
        "08",
    ),
    "test_types.py::test_mypy_finds_mistakes_of_use_and_none_in_a_right_program": ALL,
    "verify/test_bugs_verify.py::test_a_planted_bug_is_found_named_and_explained": (
        "averaged over tp",
        "second moments forgotten",
    ),
    "verify/test_static.py::test_foreign_models_have_no_problem": (
        "GPT2LMHeadModel",
        "BertForMaskedLM",
    ),
}
"""By test, the ids of its rows, or the beginnings of ids that hold more than a layout."""


BEGUN_FIRST = (
    "test_guides.py",
    "engine/test_model_parallel.py",
    "engine/parts/test_tables.py",
    "engine/step/test_keys_ahead.py",
    "cli/test_plan.py",
    "cli/test_click_trainer.py",
    "cli/test_train.py",
    "test_examples.py",
    "engine/test_experts.py",
    "engine/fit/test_foresee.py",
    "engine/test_parity.py",
    "cli/test_image_trainer.py",
    "engine/test_second_engine.py",
    "engine/state/test_hung_saving.py",
    "engine/fit/test_fits.py",
    "engine/fit/test_search.py",
    "comm/test_strict.py",
    "kernels/test_fused.py",
    "parallel/zero/test_windows.py",
    "accelerator/test_streams.py",
)
"""The files that take the longest. One worker runs a whole file: one of these at the end would leave the others without
work."""


def place_in_run(item: pytest.Item) -> int:
    """Return the key by which the items of a run are sorted: the longest files come first."""
    file = item.nodeid.partition("::")[0].removeprefix("tests/")
    return BEGUN_FIRST.index(file) if file in BEGUN_FIRST else len(BEGUN_FIRST)


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


def chosen(request: pytest.FixtureRequest, test: str, *parameters: str) -> list[tuple[Any, ...]]:
    """Return the values of ``parameters`` in the rows of ``test`` that this run asks for, in the requesting module.

    A fixture that measures all rows of a table in one call leaves out the rows that are skipped, such as those of the
    soak, and the rows that were not asked for by name.
    """
    rows = [
        item.callspec
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.path == request.path and item.originalname == test
        if not item.get_closest_marker("skip")
    ]
    return list(dict.fromkeys(tuple(row.params[name] for name in parameters) for row in rows))


def unknown(items: Collection[pytest.Item]) -> list[str]:
    """Return the entries that name none of the items."""
    found = {_entry_of(item) for item in items}
    rows = [(test, each) for test, ids in MOVED.items() for each in ([""] if ids is None else ids)]
    return [f"{test}[{row}]" if row else test for test, row in rows if (test, row) not in found]
