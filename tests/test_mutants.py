"""The list of mutants is one that can be tried: its texts are there, and so are its tests."""

import mutants
import pytest
from mutants import MUTANTS, ROOT, Mutant


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


def test_what_survives_or_is_gone_is_said_and_is_a_failure(tmp_path, monkeypatch, capsys):
    (tmp_path / "q0lib").mkdir()
    (tmp_path / "tests").mkdir()
    (tmp_path / "pyproject.toml").write_text('[tool.pytest.ini_options]\naddopts = "-q"\n')
    code = tmp_path / "q0lib" / "half.py"
    code.write_text("def half(x):\n    return x / 2\n")
    (tmp_path / "tests" / "test_half.py").write_text(
        "from q0lib.half import half\n\n\ndef test_half():\n    assert half(4) == 2\n"
    )
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    given = {"third": "x / 3", "root": "x**0.5", "text": "x /"}
    listed = [Mutant(name, "half.py", "x / 2", new, "test_half.py") for name, new in given.items()]
    listed.append(Mutant("gone", "half.py", "x // 2", "x", "test_half.py"))
    monkeypatch.setattr(mutants, "MUTANTS", listed)
    assert mutants.main([]) == 1
    said = capsys.readouterr().out.splitlines()[1:]
    assert said[0] == "third  test_half.py::test_half"
    assert said[1] == "root   SURVIVED"
    assert said[2].startswith("text   CANNOT RUN test_half.py: ")
    assert said[3] == "gone   NOT FOUND: 0 times in half.py"
    assert said[4] == "1 of 4 killed"
    assert mutants.main(["thi"]) == 0
    assert code.read_text().endswith("x / 2\n"), "never in place"
