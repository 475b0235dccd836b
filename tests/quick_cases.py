"""Which cases of a test are quick, where one or a few show what the test is for.

The other cases are slow, as rows that `tests.ops.rows.over` leaves out are: they
run with `-m slow`, of which `--part` takes some. A test that is not here is as its own marks say.

What stays quick for every op is its comparison with the oracle, outputs and gradients, and its
decoding; for every model its forward pass, its gradient and its step; for every script a run.
Quick cases of a property are then one of each kind, or the cheaper of two implementations.
"""

from pathlib import Path

import pytest

# All cases of a session, before any is left out.
COLLECTED = pytest.StashKey[list[tuple[str, str, str]]]()


def case_of(item: pytest.Function) -> tuple[str, str, str]:
    """The file, in this folder, the test, and the id of its case that the item is."""
    file = item.path.relative_to(Path(__file__).parent).as_posix()
    return file, item.originalname, item.name.removeprefix(item.originalname)[1:-1]


# By file and test, the ids of the quick cases.
QUICK = {
    "ops/test_errors.py": {
        "test_numbers_at_their_bounds_are_those_of_float32": [
            "flash-options0",
        ],
    },
    "ops/test_flash_program.py": {
        "test_a_program_says_what_is_visited_and_seen": ["True-0.7"],
    },
    "ops/test_kept_mass.py": {
        "test_the_share_is_that_of_the_whole_matrix": ["True-lsh"],
        "test_heads_of_values_that_share_queries_and_keys_are_measured_alone": ["True"],
    },
    "ops/test_learned_sinks.py": {
        "test_kernels_of_half_precision_and_with_dropout": ["0.3-float16-0.004"],
        "test_one_more_logit": ["False-segment_ids1-flash, interpreted"],
        "test_decoding_has_the_sinks": ["dense, auto"],
        "test_sinks_far_below_and_with_a_soft_cap": ["flash"],
    },
    "convert/test_command.py": {
        "test_what_trax_lacks_is_refused_before_anything_is_written": [
            "run-model.pkl.gz-count_once-True",
        ],
    },
    "convert/test_hostile_files.py": {
        "test_odd_values_of_a_decoder_are_told_or_make_a_model": ["qwen3_5_text"],
    },
    # Those with alternatives of several kinds.
    "test_config_headers.py": {
        "test_a_run_with_the_flags_of_its_config_s_header_begins": [
            "transformer_tasks_64k_37m",
            "gpt2",
            "dsa_stages",
            "block_sparse",
        ],
        "test_the_number_of_parameters_of_a_header_is_the_models": [
            "transformer_text_64k_350m",
            "transformer_text_64k_1300m",
        ],
    },
    # Of the families, those of other parts than Llama's.
    "convert/test_decoders.py": {
        "test_logits_and_greedy_tokens_are_those_of_the_fixture": [
            "gemma 3, narrow",
            "olmo hybrid, still",
        ],
        "test_a_round_trip_gives_the_identical_arrays_and_function": [
            "llama, biases, tied",
            "mistral, narrow",
            "qwen2.5",
            "qwen3, tied",
            "qwen3.5, tied",
            "gemma 2, narrow",
            "olmo 2, groups",
            "olmo hybrid, rotary",
            "smollm 3, windows",
            "phi 3, narrow",
        ],
        "test_a_model_of_ours_goes_out_as_the_first_family_that_holds_it": [
            "windows rotate",
            "hybrid without positions",
        ],
        "test_a_folder_becomes_a_run_and_goes_back": ["llama 3.1"],
    },
    "convert/test_hugging_face.py": {
        "test_logits_are_those_of_transformers": ["rounds-8"],
    },
    "convert/test_other_attention.py": {
        "test_what_sees_all_keys_is_the_dense_model": ["1,2-moba"],
    },
    "convert/test_trax_files.py": {
        "test_weights_of_another_model": ["without_one-expected0", "transposed-expected3"],
    },
    "convert/test_trax_gin.py": {
        "test_a_run_of_trax_becomes_a_run_here": ["left"],
    },
    "data/test_pathfinder.py": {"test_what_is_painted_is_near_a_line": ["32", "64"]},
    "data/test_token_files.py": {
        "test_bytes_are_those_of_memory": ["dataset", "kinds"],
        "test_pieces_are_those_of_memory": ["bpe-a.txt", "tokenizers-kinds"],
        "test_errors_of_other_processes_name_the_line": ["b.jsonl-1"],
    },
    "data/test_wmt.py": {"test_a_prepared_dataset_is_read": ["array_record"]},
    "evals/test_likelihood.py": {
        "test_a_likelihood_is_that_of_the_request_by_itself": ["3"],
    },
    "flax/test_flax.py": {
        "test_a_module_around_an_op": ["lsh(chunk_len=4)"],
        "test_decoding_computes_the_last_row_of_attention_so_far": ["flash()"],
        "test_weights_and_gates_of_an_op": ["gated_linear(gate_rank=3)"],
        "test_grouped_keys_and_rotary_positions": ["op0"],
    },
    # Of any number of beams the search is compared with one that is written out.
    "generation/test_translate.py": {
        "test_the_search_is_the_one_written_out": ["reformer-0.6", "reformer-2.0"],
        "test_the_search_is_the_one_written_out_where_any_token_may_end": ["1.0"],
    },
    "layers/test_affine.py": {
        "test_narrow_weights_round_the_output_before_it_is_added": ["float16"],
        "test_it_is_the_equation": [
            f"{sizes}-{rows}-{impl}"
            for sizes, rows in (
                ("32-sizes0-options0", "rows0"),
                ("48-sizes1-options1", "rows1"),
                ("33-sizes2-options2", "rows0"),
                ("20-sizes6-options6", "rows1"),
            )
            for impl in ("xla", "interpreted")
        ],
    },
    "layers/test_attention.py": {
        "test_a_boolean_mask_is_one_segment": ["flash", "linear", "performer"],
        "test_a_key_brings_the_next_value": ["shared_qk"],
        "test_computes_in_the_dtype_of_its_input": ["lsh"],
        "test_dropout_is_a_function_of_the_rng": ["False"],
        "test_equals_an_independent_computation": [
            "lsh-True",
            "linformer-False",
            "longformer-False",
        ],
        "test_prefill_and_steps_are_apply": ["flash"],
        "test_rotary_is_relative": ["flash"],
    },
    "layers/test_every_op.py": {"test_weights_and_gates": ["fading-slots"]},
    "layers/test_feed_forward.py": {
        "test_chunks_change_neither_output_nor_gradients": ["3-64", "5-1"],
        "test_dropout_on_the_hidden_layer_and_on_the_output": ["16"],
        "test_the_kernel_is_the_same_function": ["float32-775-0.3-8-gelu-True"],
        "test_the_kernel_lowers_for_a_gpu": ["513-0.1"],
    },
    "layers/test_fewer_heads.py": {
        "test_every_op_has_them_or_says_why_not": [
            "flash-n_kv_heads",
            "linear-n_qk_heads",
            "linformer-n_kv_heads",
            "longformer-n_qk_heads",
            "shared_qk-n_kv_heads",
            "lsh-n_qk_heads",
        ],
        "test_decoding": ["longformer-n_kv_heads"],
    },
    "layers/test_float8.py": {
        "test_layers_round_in_training_alone": ["xla"],
        "test_the_kernel_rounds_as_array_operations_do": [
            "float8_e4m3fn-shape0",
            "float8_e5m2-shape1",
        ],
    },
    "layers/test_low_rank_projections.py": {
        "test_two_thin_matrices_are_one_whole": ["kda"],
    },
    "layers/test_relative.py": {
        "test_a_layer_adds_the_bias": ["True-t5", "False-alibi"],
        "test_steps_are_apply": ["t5"],
    },
    "layers/test_remat.py": {
        "test_memory_is_in_the_order_of_the_policies": ["local(chunk_len=16)-ReversibleStack"],
        "test_losses_and_gradients_are_those_of_every_policy": ["attention-residual-local"],
        "test_offloading_changes_no_number": ["ResidualStack"],
    },
    "layers/test_residual.py": {
        "test_blocks_of_a_cycle_may_differ_in_what_a_norm_adds": ["own layer", "post-norm"],
        "test_a_residual_and_its_gradient_are_added_in_the_norms_kernel": [
            "None-float32-RMSNorm",
            "bfloat16-bfloat16-RMSNorm",
        ],
        "test_the_kernel_of_a_norm_is_the_same_function": ["37-24-bfloat16-dtypes1-RMSNorm"],
        "test_a_memory_and_its_reader_are_masked_apart": [
            "ResidualStack-stream",
            "ReversibleStack-memory",
        ],
        "test_the_kernel_of_a_norm_lowers_for_a_gpu": [
            "1000-None-LayerNorm",
            "512-bfloat16-RMSNorm",
        ],
    },
    "layers/test_reversible.py": {
        "test_gradients_are_plain_autodiffs": ["False-0-options0-None"],
        "test_neither_memory_nor_the_program_grows_with_depth": ["{}"],
    },
    "layers/test_trax_attention.py": {
        "test_any_length_and_padding": ["layer1-13"],
        "test_chunked_self_attention": ["options1"],
        "test_dense_self_attention": ["options3"],
    },
    "models/test_decoding.py": {
        "test_bfloat16": ["transformer, rotary"],
        "test_every_op_decodes_in_a_model": ["linear"],
        "test_every_position_is_that_of_the_forward": ["reformer, one head of local keys"],
    },
    "models/test_designs.py": {
        # Those that no other one has among its choices.
        "test_a_transformer_is_that_of_the_papers": [
            "swiglu without biases",
            "relu squared",
            "qk_norm",
            "headwise",
            "elementwise",
            "key_conv, normed",
            "scaled, learnt",
            "soft cap",
            "capped logits",
            "base",
            "ntk",
            "partial yarn",
            "linear",
            "llama3",
            "longrope",
            "turns",
            "rms plus one",
            "norms of outputs",
            "norms of both",
            "scale",
            "bias of inputs",
            "bias of outputs",
            "gpt2",
            "llama",
            "qwen3",
        ],
        "test_steps_of_decoding_are_rows_of_the_whole": ["key_conv, normed-dsa"],
        "test_layers_differ_in_the_places_of_norms": ["places0"],
        "test_an_algorithm_chooses_by_convolved_keys": ["op1"],
        "test_packed_rows_compute_what_single_ones_do": ["key_conv", "longrope"],
    },
    "models/test_documents.py": {
        "test_a_window_computes_what_its_documents_compute_alone": ["dense, axial"],
    },
    "models/test_encoder.py": {
        "test_a_row_is_read_whole_and_its_padding_is_not": ["cls"],
        "test_cudnn_is_asked_and_told_the_lengths_of_rows": ["reversible"],
    },
    "models/test_lm.py": {
        "test_logits_may_be_in_bfloat16": ["True"],
        "test_evaluation_has_no_dropout_and_its_own_hashes": ["ReformerLM"],
        "test_features_are_of_the_tokens_shifted_right": ["ReformerLM"],
        "test_another_attention_is_one_gin_line": ["flash"],
        "test_apply_is_logits_of_features": ["TransformerLM"],
        "test_one_models_weights_serve_every_length": ["axial"],
        "test_padding_changes_no_token": ["ReformerLM-lsh", "TransformerLM-dense"],
        "test_position_t_depends_on_all_tokens_before_it_and_on_no_other": [
            "ReformerLM-lsh",
            "TransformerLM-dense",
        ],
        "test_the_next_value_is_never_one_of_the_future": ["shared_qk"],
        "test_no_option_is_ignored": ["ReformerLM"],
    },
    "models/test_seq2seq.py": {
        "test_a_step_of_hashed_cross_attention_is_the_layer_at_one_position": ["smyrf"],
        "test_every_step_is_that_of_the_forward": ["lsh"],
        "test_padding_changes_nothing": ["transformer"],
        "test_a_packed_batch_trains_like_its_sentences_one_by_one": ["reformer"],
    },
    "ops/test_against_oracle.py": {
        "test_a_few_heads_at_a_time": ["local(chunk_len=4)"],
        "test_bfloat16": ["dense"],
        "test_equal_tokens_share_large_logits": ["flash", "lsh"],
        "test_packed_segments_equal_one_by_one": ["linear", "longformer"],
        "test_segments_do_not_leak": ["lsh", "longformer"],
        "test_with_the_plan_given_nothing_reads_the_future": ["flash", "linear", "lsh"],
    },
    "ops/test_alignment.py": {
        "test_all_positions_stand_once_and_segments_apart": [
            "False-30-1-4-3",
            "False-23-40-1-1",
            "True-1-30-4-1",
            "True-60-20-3-3",
        ],
        "test_across_sequences_no_position_is_a_query_s_own": ["smyrf"],
    },
    "ops/test_angular_hash_kernel.py": {
        "test_the_impl_of_an_op_decides_how_it_hashes": [
            "lsh-plan",
            "hash_sparse-step",
        ],
        "test_the_same_buckets": ["float32-150-20-factors1-2", "bfloat16-37-8-factors0-3"],
    },
    "ops/test_block_sparse.py": {
        "test_long_segments_with_and_without_masks": ["32-True-True"],
        "test_heads_have_masks_of_their_own": ["True-False"],
        "test_nonzero_blocks_are_computed_once_in_each_pass_and_others_never": [
            "True-butterfly",
            "False-local_global",
        ],
        "test_segments_leave_out_the_tiles_that_none_of_them_is_in": ["True"],
    },
    "ops/test_calls.py": {
        "test_a_mask_of_keys_is_padding_in_segments": ["lsh"],
        "test_queries_of_another_dtype_have_gradients": ["op0"],
        "test_an_op_without_weights_is_called_without_params": [
            "flash",
            "lsh",
            "linformer",
            "nsa",
            "linear",
            "gated_delta",
        ],
    },
    "ops/test_chunked_kernel.py": {
        "test_many_blocks_are_one_attention": ["options8-0-True-tiles8-83"],
        "test_near_chunks_are_found_in_packed_fields": ["513-1-0-2", "3-5-0-6"],
    },
    "ops/test_contract.py": {
        "test_a_layer_projects_what_the_op_reads": ["slots"],
        "test_global_tokens_travel_with_segments": ["ReformerLM"],
        "test_padding_changes_nothing": ["fading"],
        "test_weights_gates_and_their_gradients": ["True-fading"],
    },
    "ops/test_decoding.py": {
        "test_arrays_without_padding": ["linear"],
        "test_bfloat16": ["local"],
        "test_the_impl_of_an_op_decides_its_step": ["flash"],
        "test_beams_share_their_past": ["flash", "shared_qk", "local"],
        "test_the_kernel_of_one_query": [
            "2-20-sizes1-float32-given1",
            "4-130-sizes3-bfloat16-given3",
        ],
        "test_the_kernel_of_one_query_adds_a_key": ["True-4-2-sizes0"],
        "test_the_kernel_that_inserts_the_newest": ["options0-16"],
        "test_a_step_sees_no_further_than_the_sequence": ["local", "asymmetric", "strict"],
    },
    "ops/test_indexing.py": {
        "test_the_best_of_each_devices_keys_are_the_best_of_all": ["7"],
        "test_a_segment_sees_nothing_of_its_neighbours": ["hashed"],
        "test_kernels_choose_infinite_keys_where_array_operations_do": [
            "None-bfloat16",
            "Pooled(block_sizes=(12, 4), n_blocks=100)-float32",
        ],
        "test_candidates_that_cover_all_keys_leave_the_choice_as_it_is": ["clusters-packed-True"],
        "test_a_kernel_chooses_among_candidates_what_array_operations_do": ["hashed relu"],
        "test_later_tokens_change_no_choice": ["levels", "hashed"],
        "test_no_array_holds_all_pairs": ["None"],
        "test_tiles_choose_what_one_row_of_scores_does": [
            "all-9-packed-True",
            "grouped-14-whole-False",
        ],
        "test_what_padding_holds_changes_no_choice": ["levels"],
    },
    "ops/test_compressed.py": {
        "test_no_summary_of_the_future_is_seen": ["csa"],
        "test_an_incomplete_block_and_what_fills_it_up": ["hca"],
        "test_padding_is_in_no_summary": ["nan-csa"],
        "test_a_summary_across_a_border_is_of_its_last_segment": ["csa"],
        "test_grouped_heads_and_rotations_are_those_of_the_equations": ["hca-True"],
    },
    "ops/test_dsa.py": {
        "test_a_query_chooses_the_best_of_those_before_it": ["xla"],
        "test_the_reported_loss_is_the_one_that_the_indexer_learns_from": ["3-choice1"],
        "test_kernels_choose_among_ties_what_array_operations_do": [
            "40-True-True-7",
        ],
        "test_the_indexer_learns_from_the_attention_and_from_nothing_else": ["xla"],
    },
    "ops/test_forward_mode.py": {
        "test_a_jvp_is_the_central_difference": ["flash"],
    },
    "ops/test_global_tokens.py": {
        "test_outputs_and_gradients": ["True-segment_ids1-dilation1-4-True-0.3-xla"],
    },
    "ops/test_grouped.py": {
        "test_a_head_of_keys_serves_a_group": ["flash"],
        "test_decoding": ["flash"],
    },
    "ops/test_head_shards.py": {"test_some_heads_are_those_of_the_whole": ["lsh"]},
    "ops/test_large_sizes.py": {
        "test_a_call_and_its_gradients": [
            "limitless-options0-n",
            "block_sparse-options4-block_size",
            "longformer-options9-dilation",
        ],
        "test_a_step": ["op1-options1-n", "longformer-options7-window"],
        "test_tokens_that_can_be_global": ["longformer-near0-far0", "block_sparse-near2-far2"],
    },
    "ops/test_linear_attention.py": {
        "test_the_gated_output": ["False-retention"],
        "test_the_memory_that_a_training_begins_with": ["12.0-gated_linear", "0.5-gated_delta"],
        "test_sums_that_float16_does_not_hold": ["packed, causal", "with its state"],
    },
    "ops/test_logits.py": {
        "test_a_learnt_factor_is_one_of_each_head": ["flash-xla"],
        "test_kernels_compute_what_array_operations_do": ["flash"],
        "test_against_the_oracle": ["True-flash", "False-linformer"],
        "test_padding_may_hold_anything": ["longformer"],
        "test_a_learnt_factor_stands_beside_other_weights": ["factory2", "factory5"],
        "test_the_number_of_keys_seen": ["one-True-7-7", "pair-False-9-5"],
        "test_no_op_ignores_an_option": ["flash-scale_by_length", "linformer-soft_cap"],
        "test_a_step_is_the_last_row": ["lsh"],
    },
    "ops/test_low_rank.py": {
        "test_the_kernel_of_long_short_attention_is_the_same_function": [
            "True-0.0-options2-True",
            "True-0.3-options4-True",
        ],
        "test_performers_features_of_some_positions_at_a_time": ["xla-float32-anywhere"],
        "test_landmarks_are_means_of_equal_segments": ["12-4"],
        "test_long_short_without_its_long_part_is_local": ["True"],
        "test_performers_memory_has_no_features_of_all_positions": ["True"],
    },
    "ops/test_lsh.py": {
        "test_kernels_of_strictly_causal_lsh": ["7-True"],
        "test_backward_drops_the_weights_that_forward_dropped": ["False"],
        "test_one_chunk_is_full_shared_qk_attention": ["True-True"],
        "test_order_is_by_segment_then_bucket_then_position": [
            "0-6-cpu-None",
            "5-47721859-cpu-int32",
            "0-5460-gpu-uint8",
            "5-65536-gpu-None",
            "0-268435456-gpu-int32",
            "5-536870912-gpu-uint8",
        ],
    },
    "ops/test_moba.py": {
        "test_a_query_chooses_among_the_blocks_whose_segment_is_its_own": ["xla"],
    },
    "ops/test_nsa.py": {
        "test_a_group_selects_the_blocks_of_the_largest_weights": ["True-xla"],
        "test_kernels_select_what_array_operations_do": ["heads2-sizes2-bfloat16-32768-options2"],
    },
    "ops/test_padding.py": {
        "test_booleans_are_ids": ["anywhere-longformer"],
        "test_lengths_are_booleans": ["False-flash"],
        "test_padding_costs_linear_attention_no_sort_and_no_mask": ["False-segment_ids"],
    },
    "ops/test_placement.py": {
        "test_masks_and_biases_are_split_as_they_need": ["shape2"],
        "test_rows_and_heads_are_computed_where_they_lie": ["lsh"],
        "test_a_mesh_may_be_in_use": ["lsh(chunk_len=8)-False", "flash()-True"],
    },
    "ops/test_poison.py": {
        "test_at_padding_and_in_another_example": ["linformer"],
        "test_behind_a_prompt": ["lsh"],
        "test_behind_causality": ["flash"],
        "test_in_another_segment": ["linear"],
        "test_a_query_of_nan": ["block_sparse"],
    },
    "ops/test_random_cases.py": {"test_random_cases": ["longformer", "lsh"]},
    "ops/test_random_features_kernel.py": {"test_the_equations": ["True"]},
    "ops/test_reading.py": {
        "test_a_piece_is_its_steps": ["lsh"],
        "test_slabs_of_a_cache_are_one_softmax": ["5"],
    },
    "ops/test_recall.py": {"test_separate_queries_and_keys_find_each_other": ["smyrf-False"]},
    "ops/test_recurrence.py": {"test_the_loop_over_positions": ["feature", "gated delta"]},
    "ops/test_second_order.py": {
        "test_every_finite_score_counts": ["flash"],
    },
    "ops/test_separate_orders.py": {
        "test_a_plan_made_for_the_kernel_serves_array_operations": ["smyrf"],
        "test_a_row_alone_has_the_order_that_it_has_among_others": ["asymmetric_lsh-False-gpu"],
        "test_the_kernel_hashes_as_array_operations_do": ["bfloat16"],
    },
    "ops/test_shards.py": {
        "test_rows_are_those_of_the_whole_batch": ["linformer"],
        "test_steps_are_those_of_the_whole_batch": ["linear"],
        "test_rows_and_heads_are_split": ["linear()"],
        "test_queries_are_split_and_keys_are_whole": ["flash()"],
    },
    "ops/test_shared_qk.py": {
        "test_causal_attention_moved_by_one_position": ["9-True", "1-False"],
    },
    "ops/test_strict.py": {
        "test_both_passes": ["linear", "lsh"],
    },
    "ops/test_value_heads.py": {
        "test_a_layer_projects_fewer_heads": ["retention"],
        "test_it_is_repeated_queries_and_keys": ["linear"],
    },
    "ops/test_without_the_matrix.py": {
        "test_a_few_heads_at_a_time": ["3-flash"],
        "test_chunks_above_the_diagonal_cost_nothing": ["47-47-flash"],
        "test_kernels_keep_the_small_gradients_of_float16": ["flash"],
        "test_many_queries_of_few_keys_are_cut_into_pieces_for_cudnn": ["83-64-4", "64-300-1"],
        "test_memory_is_linear_in_the_length": ["gradient-flash"],
        "test_padding_behind_rows_reaches_cudnn": ["83-True-1", "83-False-4"],
        "test_the_gradient_of_a_bias_keeps_its_dtype": ["flash"],
        "test_what_a_bias_shares_is_never_expanded": ["shape1-flash"],
        "test_a_kernels_gradient_is_that_of_array_operations": ["True-True-0.3"],
        "test_a_bias_hides": ["flash"],
    },
    "ops/test_x64.py": {
        "test_decoding": ["local"],
        "test_float64": ["lsh"],
    },
    "ops/test_states.py": {
        "test_gradients_go_through_the_state": ["gated_delta"],
        "test_parts_are_the_whole": ["packed-kda"],
        "test_the_last_state_is_that_of_decoding": ["kda"],
    },
    "test_dry_run.py": {
        "test_a_dry_run_needs_no_data_and_no_extra": ["enwik8.gin-sizes1"],
    },
    "training/test_training_carried.py": {"test_the_change_arrives": ["slots"]},
    "training/test_training_checkpoint.py": {
        "test_what_another_machine_sees_is_waited_for": ["True"],
    },
    "training/test_training_durability.py": {
        "test_any_failing_call_of_a_save_leaves_a_whole_checkpoint": ["rename-5"],
        "test_killed_while_a_step_is_saved_again_one_of_the_two_is_whole": ["rename"],
    },
    "training/test_training_loss.py": {
        "test_smoothing_is_the_cross_entropy_to_the_smoothed_targets": ["13-0.5", "5-0.1"],
        "test_sums_and_gradients_equal_the_plain_ones": ["13-5"],
        "test_the_kernel_computes_what_array_operations_compute": [
            "float32-0.3-0.0",
            "bfloat16-0.0-0.2",
        ],
    },
    "training/test_training_loop.py": {
        "test_signals_sent_twice_at_once_save": ["15"],
        "test_a_signal_saves_and_a_rerun_computes_the_same_bits": ["13-15"],
    },
    "training/test_training_optimizer.py": {
        "test_a_schedule_is_as_long_as_its_run": ["trapezoid"],
        "test_a_schedule_is_a_learning_rate": ["adamw"],
        "test_every_option_changes_the_updates": [
            "adam-learning_rate",
            "adam-eps",
            "adamw-learning_rate",
            "adamw-eps",
            "adamw-weight_decay",
            "adamw-no_decay",
            "muon-adam_learning_rate",
            "muon-n_iterations",
            "muon-rms",
            "muon-matrices",
            "muon-no_decay",
            "adafactor-decay_rate",
            "adafactor-clipping_threshold",
            "adafactor-min_dim_size_to_factor",
            "adafactor-weight_decay",
            "adafactor-no_decay-weight_decay",
        ],
        "test_muon_is_its_iteration_for_the_matrices_and_adamw_for_the_rest": ["0.2-5"],
        "test_a_step_changes_the_features_of_a_wider_model_as_much": ["0.2-True"],
    },
    "training/test_training_paths.py": {
        "test_a_run_is_saved_and_restored_in_a_folder_of_any_name": ["brackets"],
    },
    "training/test_training_metrics.py": {
        "test_each_line_has_tokens_a_second_and_the_share_of_the_peak": ["1000000000.0"],
    },
    "training/test_training_side_channels.py": {
        "test_broken_streams_cost_no_line": ["None-None"],
    },
    "training/test_training_pieces.py": {
        "test_reading_on_is_reading_at_once": ["TransformerLM"],
    },
    "training/test_watcher.py": {
        "test_a_process_that_is_killed_ends_the_others": ["2"],
        "test_processes_that_do_not_go_on_end_all": ["steps0-1-"],
    },
    "benchmarks/test_attention.py": {
        "test_attention_that_is_wrong_is_found": [
            "wrong_gradient-the gradient in float32 is",
            "lost_positions-the plan is no permutation",
        ],
        "test_a_recurrence_of_jax_linear_attention_gets_our_inputs": ["gated_linear"],
    },
    "benchmarks/test_table.py": {"test_the_table_times_each_pass_of_its_own": ["flash"]},
    "benchmarks/test_trained_rows.py": {
        "test_every_deep_row_is_a_model_of_48_layers": [
            "reversible, all again",
            "Transformer, all again, offloaded",
        ],
    },
    "test_nn.py": {
        "test_padding_may_be_nan_and_changes_nothing": ["linear", "lsh"],
        "test_every_algorithm_without_weights": ["local", "lsh"],
        "test_as_jax_s_own": [
            "plain-dense",
            "causal-flash",
            "scale-dense",
            "key lengths-dense",
            "query lengths-flash",
            "both lengths-dense",
            "window-flash",
            "own position-flash",
            "uneven window-flash",
            "window and lengths-dense",
            "window and mask-flash",
            "window and a hidden key-dense",
            "mask-dense",
            "mask of a head-dense",
            "bias-flash",
            "bias and mask-dense",
        ],
        "test_of_two_sequences_and_without_a_batch": ["flash"],
    },
    "ops/test_nan_scores.py": {
        "test_clusters_take_nan": ["xla"],
        "test_nan_comes_out": [
            "moba-xla",
            "csa-xla",
            "dsa, blocks-interpreted",
        ],
    },
    "ops/test_lowering.py": {
        "test_kernels": [
            "bfloat16-64-local",
            "bfloat16-64-kda",
        ],
        "test_a_call_and_its_gradients": [
            "float32-flash",
            "bfloat16-lsh",
            "float32-linear",
        ],
    },
    "ops/test_top_k.py": {
        "test_it_chooses_what_a_stable_sort_does": ["16-False-512"],
    },
    "training/test_training_data.py": {
        "test_a_changed_text_stops_a_run_and_its_evaluation": ["replaced", "one bit", "cut"],
    },
    "test_own_jax_model.py": {
        "test_a_model_of_flax_trains_with_an_op": ["_nnx"],
    },
    "ops/test_dropout.py": {
        "test_a_head": ["0-0-0.1", "1048576-786432-0.5"],
        "test_a_weaker_hash_is_found": ["0"],
    },
    "ops/test_hash_sparse.py": {
        "test_tiles_that_share_a_pair_meet": ["True"],
    },
    "training/test_training_step.py": {
        "test_each_step_and_micro_batch_has_its_own_randomness": ["2"],
    },
}
