"""`make gpu-hour` goes on where it was cut: `bench_gpu --resume` over the sections that a CPU has."""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.bench_gpu import read_done
from benchmarks.gpu.sections import SECTIONS as SECTIONS_OF_GPU
from tests.gpu_engine.harness import PATIENCE_S, until_false

SECTIONS = ("exposed", "pairs")

LOSSLESS = "device/test_device_lossless.py::test_tokens_equal_those_of_a_cpu"
FAILURES, HOST = "device/test_failures.py::", "kernels/test_hostfunc.py::"
RELEASED = HOST + "test_a_release_frees_early_and_a_later_replay_raises_an_error"
TABLE_HERE = f"""
test_adapters.py::test_tokens_equal_those_of_a_cpu device/test_device_adapters.py::test_tokens_equal_those_of_a_cpu
test_engine.py::test_unguided_tokens_equal_those_of_a_cpu {LOSSLESS}
test_engine.py::test_prompts_prefilled_together_have_the_tokens_of_a_cpu
    device/test_device_prefill.py::test_prompts_prefilled_together_have_the_tokens_of_each_alone
test_engine.py::test_guided_tokens_equal_those_of_a_cpu {LOSSLESS}
test_engine.py::test_jump_forward_tokens_change_no_answer {LOSSLESS}
test_engine.py::test_a_draft_model_changes_no_token_and_its_rows_are_cached {LOSSLESS}
test_engine.py::test_a_decoupled_draft_model_is_exchanged_in_the_middle_of_answers
    device/test_device_decoupled.py::test_an_exchange_in_the_middle_of_answers_changes_no_token
test_engine.py::test_a_draft_model_on_a_gpu_of_its_own_is_right_as_the_target_is
    device/test_device_decoupled.py::test_a_draft_graph_on_a_stream_of_its_own_is_right_as_the_target_is
test_engine.py::test_logprobs_equal_those_of_a_cpu
    device/test_device_engine.py::test_log_probabilities_and_tensors_equal_those_of_a_cpu
test_engine.py::test_the_slot_of_an_aborted_request_is_reused
    device/test_device_engine.py::test_the_slot_of_an_aborted_request_is_reused
test_engine.py::test_a_step_without_rows_ends_and_answers_continue
    {FAILURES}test_late_rows_are_deferred_and_used_when_they_arrive
test_engine.py::test_a_grammar_process_killed_during_an_answer_changes_no_token {LOSSLESS}
test_features.py::test_trees_and_heads_change_no_token {LOSSLESS}
test_features.py::test_trees_under_a_grammar_change_no_token
    device/test_trees.py::test_accepted_branches_under_a_grammar_change_no_token
test_features.py::test_searches_are_those_of_a_cpu device/test_device_beams.py::test_a_guided_search
test_features.py::test_captured_processors_are_a_part_of_the_graph_and_others_leave_it
    device/test_device_processors.py::test_captured_processors_are_a_part_of_the_graph
test_features.py::test_log_probabilities_of_prompts_and_tensors_are_those_of_a_cpu
    device/test_device_engine.py::test_log_probabilities_and_tensors_equal_those_of_a_cpu
test_hybrids.py::test_hybrids_have_the_tokens_of_a_cpu
    device/test_device_hybrids.py::test_tokens_equal_those_of_a_cpu
test_hybrids.py::test_guided_hybrids_have_the_tokens_of_a_cpu
    device/test_device_hybrids.py::test_guided_tokens_equal_those_of_a_cpu
test_hostfunc.py::test_example_prints_twenties
    {HOST}test_captured_calls_run_at_every_replay_and_the_end_of_their_graph_frees_the_arguments
test_hostfunc.py::test_replays_count_and_arguments_are_freed_with_the_graph
    {HOST}test_captured_calls_run_at_every_replay_and_the_end_of_their_graph_frees_the_arguments
test_hostfunc.py::test_eager_call_is_ordered_with_device_work
    {HOST}test_call_outside_a_graph_runs_once_on_the_other_thread_and_frees_its_arguments
test_hostfunc.py::test_an_error_is_raised_at_the_next_check_and_the_stream_continues
    {HOST}test_errors_are_recorded_reported_and_raised_at_the_next_call
test_hostfunc.py::test_a_release_before_a_replay_raises_an_error {RELEASED}
test_products.py::test_products_use_the_kernel
    kernels/cuda/test_products.py::test_a_linear_of_any_shape_equals_the_plain_one
test_products.py::test_a_token_has_the_same_logits_in_steps_and_in_prompts
    device/test_rounding.py::test_tokens_do_not_depend_on_the_librarys_rounding
test_products.py::test_answers_do_not_depend_on_drafts_lanes_chunks_or_preemption
    device/test_rounding.py::test_tokens_do_not_depend_on_the_librarys_rounding
test_scaled.py::test_a_product_is_that_of_its_matrix kernels/cuda/test_scaled.py::test_sums_become_numbers
test_scaled.py::test_a_row_of_int8_has_the_same_bits_for_any_number_of_rows
    kernels/cuda/test_scaled.py::test_a_row_does_not_depend_on_those_beside_it
test_scaled.py::test_a_token_has_the_same_logits_with_any_drafts_beside_it
    kernels/cuda/test_scaled.py::test_a_row_does_not_depend_on_those_beside_it
test_scaled.py::test_a_checkpoint_runs_from_its_own_numbers
    kernels/cuda/test_scaled.py::test_rows_of_a_wider_tensor_are_read_by_their_stride
test_steps.py::test_guided_tokens_follow_the_grammar
    device/test_graph.py::test_tokens_follow_the_grammar_whatever_lanes_share_a_step
test_steps.py::test_launching_ahead_changes_no_token
    device/test_graph.py::test_launch_does_not_wait_and_outputs_are_read_one_step_later
test_steps.py::test_no_row_of_a_hundred_thousand_replays_is_stale_torn_or_lost
    {FAILURES}test_no_row_of_thousands_of_replays_is_stale_or_lost
test_steps.py::test_replays_end_within_the_deadline_after_the_peer_is_killed
    {FAILURES}test_rows_are_deferred_within_the_deadline_after_the_peer_is_killed
test_steps.py::test_abort_word_ends_a_wait_at_once {FAILURES}test_abort_word_ends_a_wait_at_once
test_steps.py::test_launches_after_the_capture_allocate_nothing
    device/test_graph.py::test_a_launch_is_one_copy_in_a_replay_and_one_copy_out_of_a_free_place
"""
"""A test of tests/gpu, and the test of its case here: over the recorded stream or in the interpreter."""


def cases_of(root: Path, folder: str) -> set[str]:
    return {
        f"{file.relative_to(root / folder)}::{node.name}"
        for file in (root / folder).rglob("test_*.py")
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
    }


def test_each_case_for_a_gpu_also_runs_here(root: Path) -> None:
    """A step that allocates is not seen here, and of checkpoints of 8 bits the kernels only."""
    words = TABLE_HERE.split()
    here = dict(zip(words[::2], words[1::2], strict=True))
    assert set(here) == cases_of(root, "tests/gpu")
    known = cases_of(root, "tests") | {f"device/{name}" for name in cases_of(root, "tests/gpu_engine/device")}
    assert set(here.values()) - known == set()


def test_each_section_is_tried_here_as_far_as_a_cpu_goes() -> None:
    """The others end with a reason, which names what runs here."""
    left_out = {}
    for name in ("hostfunc", "kernels", "products", "references", "engines"):
        (left_out[name],) = SECTIONS_OF_GPU[name][0]("cpu", True).left_out
    assert all("tests/" in reason for reason in left_out.values())
    runs = {"exposed", "pairs", "kill", "tokens", "llama", "smol"}
    assert set(SECTIONS_OF_GPU) == runs | set(left_out)


def start(root: Path, file: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks", "bench_gpu", "--device", "cpu", "--quick", "--json", str(file)]
    return subprocess.Popen(
        [*command, "--only", *SECTIONS, *arguments],
        cwd=root,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def sections(file: Path) -> dict[str, dict[str, Any]]:
    return {section["name"]: section for section in json.loads(file.read_text())["sections"]}


@pytest.mark.slow
def test_a_run_that_was_cut_goes_on_with_the_sections_that_are_missing_or_failed(root: Path, tmp_path: Path) -> None:
    file = tmp_path / "gpu-hour.json"
    with start(root, file) as cut:
        until_false(lambda: not file.exists() and cut.poll() is None)
        os.killpg(cut.pid, signal.SIGKILL)
    assert list(sections(file)) == [SECTIONS[0]]
    first = sections(file)[SECTIONS[0]]
    assert first["status"] == "ok"

    with start(root, file, "--resume") as rest:
        _, said = rest.communicate(timeout=PATIENCE_S)
    assert rest.returncode == 0, said
    assert [line.split()[1] for line in said.splitlines() if line.startswith("[")] == [f"{SECTIONS[1]}:"]
    done = sections(file)
    assert list(done) == [*SECTIONS]
    assert done[SECTIONS[0]] == first, "with the seconds and figures of the first run"
    assert done[SECTIONS[1]]["status"] == "ok"


def test_only_sections_that_ended_well_on_this_machine_are_left_out(tmp_path: Path) -> None:
    file, rows = tmp_path / "gpu-hour.json", []
    for name, status in (("exposed", "ok"), ("pairs", "FAILED"), ("kill", "left out")):
        rows.append({"name": name, "status": status, "seconds": 1.0, "found": {}, "reason": ""})
    file.write_text(json.dumps({"machine": "an H100", "sections": rows}))
    assert [result.name for result in read_done(file, "an H100")] == ["exposed"]
    assert read_done(tmp_path / "none.json", "an H100") == []
    with pytest.raises(ValueError, match="is of another machine or other versions: an H100"):
        read_done(file, "an H200")
