"""The list of mutants is one that can be tried: its texts are there, and so are its tests."""

import pytest
from mutants import MUTANTS, ROOT


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda each: each.name)
def test_a_mutant_changes_code_that_is_there_and_names_tests_that_are(mutant):
    code = (ROOT / "q0lib" / mutant.file).read_text(encoding="utf-8")
    assert code.count(mutant.old) == 1, f"{mutant.file} has moved on: adapt the mutant"
    assert mutant.new != mutant.old
    for test in mutant.tests.split():
        path, _, name = test.partition("::")
        written = (ROOT / "tests" / path).read_text(encoding="utf-8")
        assert f"def {name.partition('[')[0]}(" in written


def test_mutants_have_names_of_their_own():
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
