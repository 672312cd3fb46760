"""A model folder: what is in it, that others read it, and that what is no model stays as it is."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from tiny import made, tiny_study, with_runtime

import q0lib
from q0lib import __main__ as dispatch
from q0lib import corpus, ensemble, export, prior, train
from q0lib.model import mixed_logits

TEXT = "<|endoftext|> of naïve 政."  # fits the context of 32


@pytest.fixture(scope="module")
def trained(text, tmp_path_factory):
    """Three snapshots of a model with every switch on, their weights kept."""
    overrides = ("model.windows=SL", "model.loop_end=1", "model.loop_passes=2",
                 "model.multi_token=true")  # fmt: skip
    run = with_runtime(tiny_study(0, *overrides).run("q0", 6), keep_weights=True)
    folder = tmp_path_factory.mktemp("run")
    return train.train_population(run, text, directory=folder, progress=False)


def mixed(weights) -> prior.Selection:
    weights = np.array(weights)
    members = np.argsort(-weights, kind="stable")
    return prior.Selection(members, weights, len(weights), "by hand")


@pytest.fixture(scope="module")
def folder(trained, tmp_path_factory):
    path = tmp_path_factory.mktemp("export") / "model"
    return export.write(path, trained, mixed([0.2, 0.0, 0.8]), notes="Of **messages**.")


def test_a_folder_holds_the_mixture_and_says_where_it_came_from(trained, folder):
    about = json.loads((folder / "config.json").read_text())
    assert about["mixture_weights"] == [0.8, 0.2]
    assert about["q0"]["members"] == [[0, 2], [0, 0]]
    losses = {
        split: ensemble.mixture_nll(np.array([0.2, 0, 0.8]), trained.P[split])
        for split in corpus.HELD_OUT
    }
    assert about["q0"]["losses"] == pytest.approx(losses)
    card = (folder / "README.md").read_text()
    assert f"| test | {losses['test']:.4f} |" in card
    assert trained.run.key in card
    assert "K = 2" in card
    assert "Of **messages**." in card
    loaded = q0lib.load(folder, device="cpu")
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        for mine, member in zip(loaded.members, (2, 0), strict=True):
            assert torch.equal(mine.logits(tokens), trained.model(member).logits(tokens))


def test_without_a_choice_the_run_directory_says_how_it_is_mixed(trained, tmp_path):
    trained.keep_mixture(mixed([0.0, 1.0, 0.0]))
    one = q0lib.load(export.write(tmp_path / "one", trained), device="cpu")
    (trained.directory / "mixture.json").unlink()
    assert one.weights == [1.0]
    all_ = q0lib.load(export.write(tmp_path / "all", trained), device="cpu")
    fitted = trained.fitted().weights
    assert sorted(all_.weights) == pytest.approx(sorted(fitted[fitted > 0]))


def test_another_folder_is_not_overwritten_and_a_model_is(trained, folder, tmp_path):
    there = tmp_path / "there"
    there.mkdir()
    (there / "thesis.txt").write_text("years")
    with pytest.raises(ValueError, match="is no exported model: name another folder"):
        export.write(there, trained, mixed([1.0, 0.0, 0.0]))
    assert (there / "thesis.txt").read_text() == "years"
    again = export.write(tmp_path / "model", trained, mixed([1.0, 0.0, 0.0]))
    export.write(again, trained, mixed([0.0, 1.0, 0.0]))
    assert json.loads((again / "config.json").read_text())["q0"]["members"] == [[0, 1]]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model", "there"], "no scraps"


def test_members_without_weights_are_not_exported(tmp_path):
    bare = made(tiny_study().run("q0", 6), 3)
    bare.directory = tmp_path
    with pytest.raises(FileNotFoundError, match="keep_weights=true"):
        export.write(tmp_path / "model", bare, mixed([1.0, 0.0, 0.0]))
    assert not (tmp_path / "model").exists()


def test_exported_code_needs_no_q0lib():
    for path in export._CODE.values():
        code = "\n".join(
            line for line in export.exported_source(path).splitlines() if "import" in line
        )
        assert "q0lib" not in code
        assert "config.Model" not in export.exported_source(path).replace("q0lib's `config.M", "")


def test_the_command_exports_a_member_or_k(trained, tmp_path, capsys):
    run = str(trained.directory)
    best = int(trained.members.validation_loss.argmin())
    for asked, members in (
        ("--member=best", [[0, best]]),
        ("--k=1", None),
        ("--member=1", [[0, 1]]),
    ):
        assert dispatch.main(["export", run, "--out", str(tmp_path / "m"), asked]) == 0
        found = json.loads((tmp_path / "m/config.json").read_text())["q0"]["members"]
        assert len(found) == 1
        assert members in (None, found)
    assert "K = 1, nats per token" in capsys.readouterr().out
    for asked, said in (("--k=4", "k must be in 1..3"), ("--member=3", "'best' or in 0..2")):
        assert dispatch.main(["export", run, "--out", str(tmp_path / "m"), asked]) == 2
        assert said in capsys.readouterr().err
    assert dispatch.main(["export", str(tmp_path / "m"), "--out", str(tmp_path / "n")]) == 2
    assert "is no run directory" in capsys.readouterr().err


_ELSEWHERE = """
import json, sys
sys.modules["q0lib"] = None  # as where it is not installed
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
folder, text = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
ids = tokenizer(text, return_tensors="pt")
with torch.no_grad():
    logits = model(**ids).logits
    short = tokenizer("Fellow", return_tensors="pt")
    n = short.input_ids.size(1)
    padded = torch.cat((torch.full((1, 5), 9), short.input_ids), 1)
    mask = torch.cat((torch.zeros(1, 5, dtype=torch.int64), torch.ones(1, n, dtype=torch.int64)), 1)
    left = model(padded, attention_mask=mask).logits[0, 5:]
    plain = model(short.input_ids).logits[0]
    try:
        model(torch.zeros(1, 33, dtype=torch.int64))
    except ValueError as error:
        refused = str(error)
    loss = float(model(**ids, labels=ids.input_ids).loss)
written = [
    model.generate(**ids, max_new_tokens=40, do_sample=False, eos_token_id=None,
                   use_cache=cached)[0].tolist()
    for cached in (True, False)
]
print(json.dumps({
    "ids": ids.input_ids[0].tolist(), "logits": logits[0].tolist(), "written": written,
    "back": tokenizer.decode(ids.input_ids[0], skip_special_tokens=True), "loss": loss,
    "bos": [tokenizer.bos_token_id, model.config.bos_token_id, model.config.eos_token_id],
    "left": (left - plain).abs().max().item(), "refused": refused,
}))
"""


def test_transformers_loads_it_where_q0lib_is_not(folder, tmp_path):
    """The real library, offline, in a process of its own that cannot import q0lib."""
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    env |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "TRANSFORMERS_VERBOSITY": "error"}
    task = [sys.executable, "-c", _ELSEWHERE, str(folder), TEXT]
    done = subprocess.run(task, env=env, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    ours = q0lib.load(folder, device="cpu")
    ids = ours.encoded(TEXT).tolist()
    assert said["ids"] == ids, "with <|endoftext|> before the text, and as text in it"
    assert ids.count(0) == 1
    assert said["back"] == TEXT
    assert said["bos"] == [0, 0, 0]
    with torch.no_grad():
        logits = mixed_logits(ours.members, ours.weights, torch.tensor([ids]))[0]
    torch.testing.assert_close(torch.tensor(said["logits"]), logits, rtol=1e-4, atol=1e-5)
    assert said["loss"] == pytest.approx(-ours.score(TEXT).log_p.mean(), abs=1e-4)
    assert said["left"] < 1e-4, "padding on the left changes nothing"
    assert said["refused"] == "the model sees at most 32 tokens, got 33"
    # Greedily, beyond the context, every token from all that ours would see.
    from q0lib.language_model import window_start

    for _ in range(40):
        seen = torch.tensor([ids[window_start(len(ids), 32) :]])
        with torch.no_grad():
            ids.append(int(mixed_logits(ours.members, ours.weights, seen)[0, -1].argmax()))
    assert said["written"] == [ids, ids]
