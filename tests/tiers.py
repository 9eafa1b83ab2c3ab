"""Which cases of a test run where: `make test` has a case of nearly every test in 15 minutes on two cores,
`make test-slow` more of each within the hour that CI has, `make test-deep` all.

The marker `slow` in a test decides for itself. Here stand the tests whose cases are many or take long, with
the share of their cases that is quick; the others are slow. And those with more slow cases than an hour
holds, with the share that is slow; the others are deep. The cases are drawn by the name of the test, so they
are the same in every run and on every machine. One case that is named on the command line always runs.

Seconds of processor decide where a test stands: `python -m pytest --cost FILE` writes those of each test.
"""

import math
import os
import random
import time
from collections import defaultdict
from pathlib import Path

import pytest

HERE = Path(__file__).parent

# One in so many cases is quick. 0: none.
QUICK = {
    0: [
        "fused/test_aot.py::test_shipped_configurations",
        "parallel/test_checkpoint.py::test_every_plan_to_every_plan",
        "test_cuda_mutants.py::test_a_fault_is_found",
        "test_examples.py::test_demo",
        "test_examples.py::test_train",
        "test_run.py::test_a_killed_rank_is_replaced",
        "test_sanitizers.py::test_no_report",
    ],
    2: [
        "fused/test_plain.py::test_registered_partial_sums",
        "hosts/test_messages.py::test_as_on_one_host",
        "hosts/test_shrink_torch_hosts.py::test_survivors_go_on",
        "hosts/test_two_levels.py::test_table",
        "hosts/test_ucx.py::test_faults",
        "parallel/test_accumulation.py::test_calls_are_one_batch",
        "parallel/test_around_optimizer.py::test_groups_schedulers_and_averages",
        "parallel/test_compiled.py::test_equal_to_one_process",
        "parallel/test_encoder_decoder.py::test_encoder_and_decoder_make_one_trunk",
        "parallel/test_generate.py::test_tokens_of_one_process",
        "parallel/test_meta.py::test_initialised_is_the_same_under_every_plan",
        "parallel/test_outer_state.py::test_buffers_outside_of_the_blocks",
        "parallel/test_outer_state.py::test_second_results_of_blocks",
        "parallel/test_products.py::test_plans_go_through_fused",
        "parallel/test_proof.py::test_plain_blocks_are_right",
        "parallel/test_proof.py::test_refused",
        "parallel/test_sequence.py::test_ring",
        "parallel/test_sequence_mode.py::test_model_under_the_mode",
        "parallel/test_shared_state.py::test_what_later_stages_would_not_get",
        "parallel/test_steps.py::test_dropout",
        "parallel/test_tensor_foreign.py::test_checkpoints_between_plans",
        "parallel/test_tensor_layers.py::test_layers",
        "parallel/test_verify_faults.py::test_planted_fault",
        "parallel/test_verify_steps.py::test_three_steps_are_equal",
        "test_autoload.py::test_group",
        "test_autoload.py::test_groups_of_gloo_are_as_without_us",
        "test_autoload.py::test_replace_gloo",
        "test_autoload.py::test_what_names_mean",
        "test_cuda_host.py::test_program",
        "test_cuda_hosts.py::test_making_it",
        "test_cuda_kernels.py::test_values_and_reports",
        "test_cuda_python.py::test_killed_rank_of_torch_distributed",
        "test_examples.py::test_all_reduce",
        "test_examples.py::test_fused_matmul",
        "test_joining.py::test_death_at_any_moment",
        "test_lifecycle.py::test_script_ends",
        "test_lifecycle.py::test_small_or_no_dev_shm",
        "test_message_progress.py::test_messages_move_while_one_side_computes",
        "test_point_to_point.py::test_a_finished_receiver_may_leave_at_once",
        "test_torch_messages.py::test_torch_pipeline_traffic",
        "test_torch_trainers.py::test_same_as_gloo",
        "test_trace.py::test_a_folder_that_cannot_be_written_is_one_warning",
        "test_trainers.py::test_trainer",
    ],
    3: [
        "fused/test_ptx_check.py::test_fault_in_the_source",
        "hosts/test_two_levels.py::test_beyond_two_segments",
        "parallel/test_call_order.py::test_training",
        "parallel/test_encoder_decoder.py::test_an_encoder_in_front_of_the_blocks",
        "parallel/test_encoder_decoder.py::test_equal_to_one_process",
        "parallel/test_hosts.py::test_equal_to_one_process",
        "parallel/test_meta.py::test_loaded_is_as_from_pretrained",
        "parallel/test_named_blocks.py::test_equal_to_one_process",
        "parallel/test_pipedream_plan.py::test_updates_are_the_ones_of_the_rule",
        "parallel/test_proof.py::test_what_looks_at_other_positions",
        "parallel/test_recovery_hosts.py::test_killed_ranks_and_hosts_change_nothing",
        "parallel/test_scaler.py::test_autocast",
        "parallel/test_tensor_rules.py::test_models_equal_one_process",
        "parallel/test_traffic.py::test_pipeline_sends_one_tensor_per_boundary",
        "parallel/test_vocabulary.py::test_what_a_model_does_with_its_logits",
        "test_cuda_hosts.py::test_ends",
        "test_faults.py::test_kill",
        "test_interpreter.py::test_a_daemon_thread_at_the_end",
        "test_lifecycle.py::test_abort",
    ],
    4: [
        "hosts/test_host_faults.py::test_a_rank_is_missing",
        "parallel/test_memory.py::test_within_five_percent",
        "parallel/test_own_recomputation.py::test_equal_to_one_process",
        "parallel/test_steps.py::test_equal_to_one_process",
        "parallel/test_tensor_foreign.py::test_equal_to_one_process",
        "test_cuda_python.py::test_operations_in_threads",
        "test_interpreter.py::test_ctrl_c",
        "test_random_programs.py::test_programs",
    ],
    6: [
        "parallel/test_equality.py::test_schedules_give_the_same_bits",
        "parallel/test_hf_plans.py::test_transformers_model",
        "parallel/test_prove_stages.py::test_through_the_stages",
        "test_fiber.py::test_runs_without_report",
        "test_given_back.py::test_no_peer_reads_or_writes_what_was_given_back",
        "test_launchers.py::test_a_program_needs_no_setting",
        "test_mismatch.py::test_mismatch",
        "test_torch_backend.py::test_operation",
        "test_torch_suite.py::test_profiler_events",
    ],
    8: [
        "parallel/test_verify.py::test_equal",
        "test_cuda_group.py::test_program",
        "test_torch_suite.py::test_torch_suite",
    ],
    12: [
        "gpu/test_gpu_check.py::test_check_on_host_tensors",
        "parallel/test_strategy_examples.py::test_example",
    ],
    20: [
        "test_collectives.py::test_table",
    ],
    30: [
        "fused/test_kernels.py::test_kernels",
        "model_families/test_model_families.py::test_family",
        "parallel/test_equality.py::test_plan_equals_single_process",
    ],
}

# One in so many of the cases that are not quick is slow.
SLOW = {
    2: [
        "test_random_programs.py::test_more_programs",
        "test_torch_suite.py::test_over_hosts",
    ],
    3: [
        "parallel/test_equality.py::test_plan_equals_single_process",
        "fused/test_aot.py::test_combinations",
        "fused/test_kernels.py::test_kernels",
    ],
    4: [
        "test_cuda_kernels.py::test_many_seeds",
    ],
}


def share_of(table):
    return {name: share for share, names in table.items() for name in names}


def name_of(item):
    """Of the test function, from tests/ on: parallel/test_steps.py::test_dropout."""
    return f"{os.path.relpath(item.path, HERE)}::{getattr(item, 'originalname', item.name)}"


def draw(items, share, name):
    """(one in `share` of the items, the others)"""
    if share == 0:
        return [], items
    order = random.Random(name).sample(range(len(items)), len(items))
    kept = set(order[: math.ceil(len(items) / share)])
    drawn, others = [], []
    for place, item in enumerate(items):
        (drawn if place in kept else others).append(item)
    return drawn, others


def deal(items):
    """Marks what is slow and what is deep."""
    quick, slow, tests = share_of(QUICK), share_of(SLOW), defaultdict(list)
    for item in items:
        tests[name_of(item)].append(item)
    for name, cases in tests.items():
        marked = [item for item in cases if item.get_closest_marker("slow")]
        others = [item for item in cases if not item.get_closest_marker("slow")]
        _, late = draw(others, quick.get(name, 1), name)
        _, deep = draw([*marked, *late], slow.get(name, 1), name)
        for mark, chosen in ((pytest.mark.slow, late), (pytest.mark.deep, deep)):
            for item in chosen:
                item.add_marker(mark)


# --- hooks of pytest -----------------------------------------------------------------------------


def pytest_addoption(parser):
    parser.addoption("--deep", action="store_true", help="all cases of the slow tests: `make test-deep`")
    parser.addoption("--cost", metavar="FILE", help="add a line for each test: name, processor time, time")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    deal(items)
    if not config.getoption("--deep"):
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("deep")])
        items[:] = [item for item in items if not item.get_closest_marker("deep")]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    before, start = os.times(), time.monotonic()
    result = yield
    path = item.config.getoption("--cost")
    if path:
        used = sum(os.times()[:4]) - sum(before[:4])  # also of processes that have ended
        with open(path, "a") as file:
            file.write(f"{item.nodeid}\t{used:.2f}\t{time.monotonic() - start:.2f}\n")
    return result
