"""Tests of which the quick run takes every third case: those between are of the same kind, and run with `-m slow`."""

THINNED = {
    "test_account": ("test_one_sampled_step_in_closed_form",),
    "test_audit_bounds": ("test_scores_cover_however_thresholds_are_chosen",),
    "test_audit_game": (
        "test_cells_are_won_as_often_as_they_should_be",
        "test_winners_have_the_law_of_the_mathematics",
    ),
    "test_backends": ("test_alone_and_in_a_batch_the_bits_are_the_same",),
    "test_dispatch_guard": (
        "test_a_wrong_bracket_is_not_the_answer",
        "test_an_engine_that_fails_ends_nothing",
    ),
    "test_interop_dp_accounting": (
        "test_published_tables",
        "test_sampled_gaussian_lies_within_dp_accounting_s_bracket",
        "test_the_grid_of_single_sampled_steps",
    ),
    "test_journal": ("test_a_full_disk_is_one_line_and_what_is_solved_is_kept",),
    "test_kernel_namespaces": ("test_calibration_slopes_are_forward_mode_derivatives",),
    "test_kernels": ("test_moments_are_within_their_certificate",),
    "test_lattice": (
        "test_few_expected_hits_are_narrow",
        "test_many_eps_share_compositions",
        "test_numpy_and_xla_agree",
        "test_one_step_closed_form",
        "test_reference_table",
        "test_two_laws_and_finite_parts",
    ),
    "test_lattice_finite": ("test_one_step_is_bracketed",),
    "test_mechanisms_discrete": (
        "test_composed_discrete_gaussian_against_dp_accounting",
        "test_one_step_of_integer_noise_against_mpmath",
    ),
    "test_mechanisms_other": ("test_replace_one_without_replacement_is_piecewise",),
    "test_mechanisms_profile": ("test_gaussian_noisy_max_is_the_theorem",),
    "test_rdp": ("test_the_same_orders_as_dp_accounting",),
    "test_representations": (
        "test_laplace_moments",
        "test_sampled_gaussian_moments",
    ),
    "test_samplers": ("test_discrete_gaussian_fits_its_law",),
    "test_selection_bound": ("test_upper_bounds_are_convex_and_above_plain_sums",),
    "test_selection_bounds": ("test_bounds_hold_against_every_score_order",),
    "test_selection_composed": (
        "test_copies_are_above_the_composition_of_every_order",
        "test_the_pair_is_a_convex_profile_that_agrees_with_itself_backwards",
    ),
    "test_selection_extremes": ("test_simple_bounds_of_few_outcomes_against_all_orders",),
    "test_selection_laws": ("test_tails_and_probabilities_at_any_size",),
    "test_selection_monotone": ("test_delta_is_the_integral_of_the_positive_part",),
    "test_selection_top": ("test_more_winners_cost_more_and_all_of_them_the_most",),
    "test_simple_bounds": (
        "test_basic_composition_where_hits_are_rare",
        "test_mass_at_infinity_beside_a_gaussian",
        "test_one_sampled_step",
        "test_repeated_randomised_response",
    ),
    "test_training_clipping": ("test_convolutions_with_channels_last_are_the_same",),
    "test_training_clipping_range": (
        "test_a_bad_row_counts_and_changes_no_other",
        "test_no_contribution_exceeds_the_clip_norm_over_the_whole_range",
        "test_squares_that_vanish_do_not_hide_a_gradient",
        "test_the_rows_of_an_embedding_by_indices_of_any_integer",
    ),
    "test_training_mixing": ("test_operations_within_one_example_are_not",),
    "test_training_recalibrate": ("test_full_batches_through_a_filter",),
    "test_training_resume": ("test_what_a_plan_spent_counts_under_the_next",),
    "test_training_step": ("test_all_examples_drawn_are_used_and_normalised_by_the_expected_number",),
    "test_tuning_declared": ("test_counts_are_exact_sums_of_rounded_values",),
    "test_truncated_poisson": ("test_enumeration_of_small_data_sets",),
    "test_two_steps": (
        "test_delta_by_quadrature",
        "test_epsilon_by_quadrature",
    ),
    "test_verify": (
        "test_moments_equal_a_direct_integral",
        "test_steps_with_small_loss_taken_apart_change_nothing",
    ),
    "test_verify_direct_integration": (
        "test_direct_integration_equals_the_sum_over_a_line",
        "test_two_steps_against_plain_quadrature",
    ),
}
"""By test file: tests whose cases differ in numbers alone."""
