"""The model of the step plane holds in every interleaving, finds seeded faults, and has the numbers of the code."""

from __future__ import annotations

import re

import pytest

from shared_mem.layout import Layout, RowKind
from tools.step_plane import model
from tools.step_plane.model import CONFIGURATIONS, Configuration
from tools.step_plane.mutants import MUTANTS, Mutant, edited

needs_spin = pytest.mark.skipif(model.missing_tools() is not None, reason=str(model.missing_tools()))
BY_NAME = {configuration.name: configuration for configuration in CONFIGURATIONS}
WAKE_UPS = BY_NAME["wake-ups"]
TEXT = model.MODEL.read_text()


@needs_spin
def test_no_interleaving_of_the_smallest_configuration_is_wrong() -> None:
    outcome = model.search(WAKE_UPS.options)
    assert outcome.error == ""
    assert outcome.states > 5000


@needs_spin
def test_a_lost_wake_up_is_found() -> None:
    assert model.search((*WAKE_UPS.options, "NO_BELL")).error == "invalid end state"


def test_row_kinds_of_the_model_are_those_of_both_languages() -> None:
    numbers = {f"LS_KIND_{kind.name}": int(kind) for kind in RowKind}
    assert model.kinds() == {**numbers, "LS_KINDS": len(RowKind)}
    used = set(re.findall(r"LS_KIND_[A-Z_]*", TEXT))
    assert used - {"LS_KIND_"} <= model.kinds().keys()


def test_sizes_of_the_model_are_those_of_the_layout() -> None:
    halves = int(re.findall(r"#define HALVES (\d+)", TEXT)[0])
    layout = Layout(num_slots=2, num_rows=2, vocab_size=100, num_recs=3)
    rows = {layout.row_offset(seq, 0, 0) for seq in range(60)}
    entries = {layout.rec_entry_offset(seq) for seq in range(60)}
    assert len(rows) == halves
    assert all(layout.row_offset(seq, 0, 0) == layout.row_offset(seq + halves, 0, 0) for seq in range(60))
    assert len(entries) == layout.num_recs
    assert all(layout.rec_entry_offset(seq) == layout.rec_entry_offset(seq + layout.num_recs) for seq in range(60))


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_has_its_place_in_the_model_and_in_the_sources(mutant: Mutant) -> None:
    if mutant.found_in:
        assert mutant.found_in in BY_NAME
        assert re.search(rf"\b{mutant.name}\b", TEXT)
    assert mutant.found_in or mutant.edits
    for name, text in edited(mutant.edits).items():
        assert text != (model.ROOT / "shared_mem" / name).read_text()


@needs_spin
@pytest.mark.slow
@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=lambda configuration: configuration.name)
def test_no_interleaving_is_wrong(configuration: Configuration) -> None:
    assert model.search(configuration.options).error == ""


@needs_spin
@pytest.mark.slow
@pytest.mark.parametrize("configuration", [c for c in CONFIGURATIONS if c.is_small], ids=lambda c: c.name)
def test_every_run_ends(configuration: Configuration) -> None:
    assert model.search(configuration.options, no_cycles=True).error == ""


@needs_spin
@pytest.mark.slow
@pytest.mark.parametrize("mutant", [mutant for mutant in MUTANTS if mutant.found_in], ids=lambda mutant: mutant.name)
def test_the_model_finds_a_mutant(mutant: Mutant) -> None:
    assert model.search((*BY_NAME[mutant.found_in].options, mutant.name)).error
