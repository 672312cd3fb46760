"""The run directory: written whole, read strictly, never believed half-way."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import tiny_study, with_runtime

from q0lib import config, corpus, files, population, trajectory
from q0lib.model import GPT


@pytest.fixture(scope="module")
def trained(text, tmp_path_factory):
    run = with_runtime(tiny_study().run("q0", 6), keep_weights=True)
    folder = tmp_path_factory.mktemp("run")
    return run, trajectory.train_population(run, text, directory=folder, progress=False), folder


def test_rows_and_records(trained, text):
    run, loaded, folder = trained
    assert len(loaded) == 3
    for split in corpus.HELD_OUT:
        tokens = corpus.held_out_rows(text[split].tokens, 32) * 32
        assert loaded.P[split].shape == (3, tokens)
        assert loaded.documents[split].shape == (tokens,)
        assert ((loaded.P[split] > 0) & (loaded.P[split] <= 1)).all()
        np.testing.assert_allclose(
            loaded.members[f"{split}_loss"], -np.log(loaded.P[split].astype(float)).mean(1),
            atol=1e-5,
        )  # fmt: skip
    assert loaded.members.cycle.tolist() == [0, 1, 2]
    assert loaded.members.epochs.round().tolist() == [2, 4, 6]
    about = json.loads((folder / "run.json").read_text())
    assert about["key"] == run.key
    assert about["decides"] == json.loads(json.dumps(run.decides))
    assert about["versions"]["torch"] == torch.__version__
    assert about["commit"]
    result = json.loads((folder / "result.json").read_text())
    assert result["tokens"] == loaded.members.tokens.max()
    assert result["flops"] == loaded.flops


def test_prefix_is_checked(trained):
    _, loaded, _ = trained
    assert len(loaded.prefix(1, 2)) == 2
    with pytest.raises(ValueError, match="within 1 trajectories x 3 cycles, got 2 x 1"):
        loaded.prefix(2, 1)


def test_an_incomplete_run_is_not_believed(tmp_path):
    run = tiny_study().run("q0", 6)
    with pytest.raises(FileNotFoundError, match=r"needs 1 trajectories x 3 cycles .* train it"):
        population.load(run, tmp_path)


def test_rows_of_other_tokens_do_not_mix(trained, tmp_path):
    import shutil

    run, _, folder = trained
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    path = population.member_path(copy, 0, 1)
    record = population.read_record(path)
    record["fingerprints"]["test"] = "0" * 16
    population.write_member(path, load_file(path), record)
    with pytest.raises(ValueError, match="was evaluated on other tokens"):
        population.load(run, copy)
    path.write_bytes(b"garbage")
    with pytest.raises(ValueError, match="cannot be read"):
        population.load(run, copy)


def test_weights_load_strictly(trained, tmp_path):
    run, _, folder = trained
    path = population.weights_path(folder, 0, 0)
    GPT(run.model).load_state_dict(population.read_weights(path), strict=True)
    prefixed = {f"_orig_mod.{name}": value for name, value in load_file(path).items()}
    save_file(prefixed, tmp_path / "w.safetensors")
    with pytest.raises(FileNotFoundError, match="keep_weights=true to keep weights"):
        population.read_weights(tmp_path / "never.safetensors")
    with pytest.raises(RuntimeError, match="Missing key"):
        GPT(run.model).load_state_dict(population.read_weights(tmp_path / "w.safetensors"))


def test_a_failed_write_keeps_the_old_file_and_no_scraps(tmp_path):
    target = tmp_path / "sub" / "a.txt"
    files.write_text(target, "first")

    def failing() -> None:
        with files.replacing(target) as temporary:
            temporary.write_text("sec")
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="no space left to write"):
        failing()
    assert target.read_text() == "first"
    assert [p.name for p in target.parent.iterdir()] == ["a.txt"]


def test_scoring_leaves_the_student_in_training_mode(text):
    model = config.Model(vocab_size=300, context=32, layers=2, width=32, heads=2)
    net = GPT(model).initialise(torch.Generator().manual_seed(0)).train()
    first = population.held_out_log_probs(net, text["test"], torch.float32)
    second = population.held_out_log_probs(net, text["test"], torch.float32, batch=1)
    assert net.training
    torch.testing.assert_close(first, second)
