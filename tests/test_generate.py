"""Text and scores from a model: what was read is kept, mixtures are exact, no token is lost."""

import dataclasses
import itertools
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import some_messages, tiny_study

import q0lib
from q0lib import __main__ as dispatch
from q0lib import config, corpus, ensemble, evaluate, export, population, prior
from q0lib.language_model import LanguageModel, draw, window_start
from q0lib.model import GPT, Cache, mixed_logits

SMALL = config.Model(vocab_size=300, context=32, layers=4, width=32, heads=2, windows="SSL")
VARIANTS = {
    "every switch": SMALL,
    "looped": dataclasses.replace(SMALL, loop_start=1, loop_end=3, loop_passes=3),
    "no skips": dataclasses.replace(SMALL, unet_skips=False),
    "no scalars": dataclasses.replace(SMALL, residual_scalars=False),
    "no gates": dataclasses.replace(SMALL, head_gates=False),
    "no values": dataclasses.replace(SMALL, value_projections=False),
    "no cap, whole windows": dataclasses.replace(SMALL, softcap=0.0, windows="L"),
}


def built(model: config.Model = SMALL, seed: int = 0) -> GPT:
    net = GPT(model)
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.normal_(0, 0.25, generator=g)
    return net.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def several(text) -> LanguageModel:
    members = [built(seed=seed) for seed in range(3)]
    return LanguageModel(members, [0.5, 0.3, 0.2], text.tokenizer)


def alone(several, member=0) -> LanguageModel:
    return LanguageModel([several.members[member]], [1.0], several.tokenizer)


def unkept_log_probs(model: LanguageModel, ids: list[int]) -> np.ndarray:
    """log of the mixture after `ids`, from each member's whole pass."""
    seen = torch.tensor([ids])
    p = sum(
        w * m.logits(seen)[0, -1].double().softmax(-1).numpy()
        for w, m in zip(model.weights, model.members, strict=True)
    )
    return np.log(p)


# --- the cache -------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("steps", [[1] * 32, [7, 1, 1, 12, 1, 10], [32], [31, 1]], ids=str)
def test_reading_on_gives_what_reading_anew_gives(variant, steps):
    net = built(VARIANTS[variant])
    tokens = torch.randint(0, 300, (2, 32), generator=torch.Generator().manual_seed(1))
    cache = Cache(32)
    parts = [net.logits(part, cache=cache) for part in tokens.split(steps, dim=1)]
    whole = net.logits(tokens)
    assert whole.std() > 0.05, "something to tell apart"
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=0, atol=2e-4)
    assert cache.length == 32
    with pytest.raises(ValueError, match="a cache of 32 tokens cannot hold 33"):
        net.logits(tokens[:, :1], cache=cache)


def test_without_a_cache_nothing_changes_and_the_last_positions_can_be_had_alone():
    net, tokens = built(), torch.arange(20)[None]
    assert torch.equal(net(tokens), net(tokens, cache=Cache(32)))
    torch.testing.assert_close(net.logits(tokens, last=3), net.logits(tokens)[:, -3:])


# --- mixtures --------------------------------------------------------------------------------


def test_a_mixture_of_one_is_the_member_and_of_several_their_probabilities(several):
    tokens = torch.arange(20)[None]
    one = alone(several, 1)
    assert torch.equal(
        mixed_logits(one.members, one.weights, tokens), several.members[1].logits(tokens)
    )
    mixed = mixed_logits(several.members, several.weights, tokens)[0, -1]
    np.testing.assert_allclose(mixed, unkept_log_probs(several, list(range(20))), atol=1e-5)


def test_scores_are_those_of_the_ensemble(several):
    text = "Fellow citizens of the Senate, we are here. "
    scored = several.score(text)
    ids = [0, *scored.id]
    rows = torch.tensor([ids])
    P = np.stack([
        m.logits(rows[:, :-1])[0].softmax(-1).gather(1, rows[0, 1:, None])[:, 0].numpy()
        for m in several.members
    ])  # fmt: skip
    expected = ensemble.mixture_log_probs(np.array(several.weights), P)
    np.testing.assert_allclose(scored.log_p, expected, atol=1e-5)
    assert "".join(scored.token) == text
    assert several.loss(text).per_token == pytest.approx(-expected.mean(), abs=1e-5)
    assert several.loss(text).per_byte == pytest.approx(-expected.sum() / len(text), abs=1e-5)


# --- losses ----------------------------------------------------------------------------------


def test_a_loss_is_that_of_evaluation_on_the_same_tokens(several):
    """A document cut into windows, as a held-out split is, and a rest that the split leaves."""
    text = Path(some_messages()).read_text()[:3000]
    ids = next(corpus.encoded([text], several.tokenizer, "int64"))[0]
    whole = (len(ids) - 1) // 32 * 32
    split = corpus.Split("test", ids, np.array([0]), "")
    P = np.stack([
        evaluate.held_out_log_probs(m, split, torch.float32).double().exp().numpy()
        for m in several.members
    ])  # fmt: skip
    log_p = several.score(text).log_p.to_numpy()
    assert len(log_p) == len(ids) - 1 > whole > 0
    expected = ensemble.mixture_nll(np.array(several.weights), P)
    assert -log_p[:whole].mean() == pytest.approx(expected, abs=1e-5)
    rest = ids[whole:].tolist()
    last = [unkept_log_probs(several, rest[:i])[rest[i]] for i in range(1, len(rest))]
    np.testing.assert_allclose(log_p[whole:], last, atol=1e-5)
    loss = several.loss(text)
    assert (loss.tokens, loss.bytes, loss.documents) == (len(log_p), len(text.encode()), 1)
    assert loss.nats == pytest.approx(-log_p.sum(), rel=1e-6)
    assert loss.perplexity == pytest.approx(np.exp(-log_p.mean()))
    assert loss.bits_per_byte == pytest.approx(loss.nats / len(text.encode()) / np.log(2))


def test_the_documents_of_a_file_are_scored_each_for_itself(several, tmp_path):
    texts = ["naïve 政府", "a" * 5, " ".join(map(str, range(90))), "<|endoftext|> is text"]
    path = tmp_path / "texts.jsonl"
    path.write_text("\n".join(json.dumps({"body": each}) for each in texts))
    loss = several.loss(path, column="body")
    each = [several.loss(one) for one in texts]
    assert loss.documents == 4
    assert loss.tokens == sum(one.tokens for one in each)
    assert loss.bytes == sum(len(text.encode()) for text in texts)
    assert loss.nats == pytest.approx(sum(one.nats for one in each), rel=1e-6)


# --- text ------------------------------------------------------------------------------------


def test_text_is_the_likeliest_of_the_whole_prefix_far_beyond_the_context(several):
    """Greedy text is what members without a cache say, window by window."""
    ids = several.encoded("We the people").tolist()
    expected: list[int] = []
    for _ in range(90):
        seen = ids[window_start(len(ids), 32) :]
        token = int(unkept_log_probs(several, seen)[: several.tokenizer.get_vocab_size()].argmax())
        if token == 0:
            break
        ids.append(token)
        expected.append(token)
    assert len(expected) > 5
    written = several.generate("We the people", 90, temperature=0)
    whole = several.tokenizer.decode(expected)
    assert whole.rstrip("�").startswith(written.rstrip("�"))
    assert len(written) > 0.8 * len(whole)


def test_a_window_fills_up_and_goes_on_from_its_half():
    seen = [n - window_start(n, 8) for n in range(1, 25)]
    assert seen[:8] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert seen[8:18] == [4, 5, 6, 7, 8, 4, 5, 6, 7, 8]


def test_a_seed_decides_and_other_seeds_differ(several):
    one, again, other = (several.generate("The", 30, seed=seed) for seed in (1, 1, 2))
    assert one == again != other
    one, again = (several.generate("The", 30, seed=3, sampling="member") for _ in range(2))
    assert one == again


def test_pieces_are_whole_characters(several, monkeypatch):
    """The bytes of one character come in several tokens; nothing is shown before its last."""
    text = "naïve 政府 🦉 end"
    ids = several.encoded(text).tolist()[1:]
    assert len(ids) > len(text) / 2
    from q0lib import language_model

    monkeypatch.setattr(language_model, "draw", lambda *_: next(feed))
    feed = itertools.chain(ids, [0])
    pieces = list(several.stream("", 200))
    assert "".join(pieces) == text
    assert not any("�" in piece for piece in pieces)


@pytest.mark.parametrize("sampling", ["mixture", "member"])
def test_tokens_are_drawn_as_the_mixture_says(several, sampling, monkeypatch):
    """Second tokens after a fixed first one, by a chi-square of those expected often enough."""
    from q0lib import language_model

    drawn = []

    def noted(*given):
        drawn.append(draw(*given))
        return 65 if len(drawn) % 2 else 0  # the first is always token 65, the second the last

    monkeypatch.setattr(language_model, "draw", noted)
    for seed in range(700):
        several.generate("A", 2, seed=seed, sampling=sampling)
    ids = several.encoded("A").tolist()
    for seen, tokens in ((ids, drawn[::2]), ([*ids, 65], drawn[1::2])):
        p = np.exp(unkept_log_probs(several, seen))[: several.tokenizer.get_vocab_size()]
        p /= p.sum()
        counts, expected = np.bincount(tokens, minlength=len(p)), len(tokens) * p
        often = expected > 5
        chi = ((counts - expected)[often] ** 2 / expected[often]).sum()
        assert often.sum() > 10
        assert chi < often.sum() + 4 * np.sqrt(2 * often.sum())


def test_unlikely_tokens_can_be_left_out():
    g = torch.Generator().manual_seed(0)
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    drawn = lambda *given: {draw(logits.clone(), *given, g) for _ in range(300)}  # noqa: E731
    assert drawn(0.0, 0, 1.0) == {0}
    assert drawn(1.0, 2, 1.0) == {0, 1}
    assert drawn(1.0, 0, 0.5) == {0}
    assert drawn(1.0, 0, 0.79) == {0, 1}
    assert drawn(1.0, 0, 0.81) == {0, 1, 2}
    assert drawn(1.0, 0, 1.0) == {0, 1, 2, 3}
    sharp = [draw(logits.clone(), 0.5, 0, 1.0, g) for _ in range(4000)]
    assert np.mean(np.array(sharp) == 0) == pytest.approx(0.25 / 0.365, abs=0.03)


def test_an_empty_prompt_starts_a_document(several):
    assert several.stream("", 1)
    first = next(iter(several.stream("", 5, temperature=0)), "")
    expected = int(unkept_log_probs(several, [0])[:300].argmax())
    assert first == (several.tokenizer.decode([expected]) if expected else "")


# --- what cannot be ----------------------------------------------------------------------------


def test_options_and_prompts_that_cannot_be(several):
    for options, said in (
        ({"temperature": -1}, "temperature must be >= 0, got -1"),
        ({"top_p": 0}, r"top_p must be in \(0, 1\], got 0"),
        ({"top_k": -1}, "top_k must be >= 0"),
        ({"tokens": -1}, "tokens must be >= 0"),
        ({"sampling": "some"}, r"sampling must be one of \('mixture', 'member'\), got 'some'"),
    ):
        with pytest.raises(ValueError, match=said):
            several.generate("A", **{"tokens": 1, **options})
    with pytest.warns(UserWarning, match=r"the prompt has \d+ tokens, the model sees 32"):
        several.generate("word " * 60, 1)
    for nothing in (several.score, several.loss):
        with pytest.raises(ValueError, match="there is no text to score"):
            nothing("")


@pytest.fixture
def folder(text, tmp_path) -> Path:
    """An exported model of two members that were never trained."""
    run = tiny_study().run("q0", 4)
    from tiny import made

    found = made(run, 2)
    found.directory = tmp_path / "run"
    (tmp_path / "run").mkdir()
    text.tokenizer.save(str(tmp_path / "run/tokenizer.json"))
    for member in range(2):
        population.write_weights(found.weights_path(member), built(run.model, member))
    weights = np.array([0.4, 0.6])
    return export.write(
        tmp_path / "model", found, prior.Selection(np.array([1, 0]), weights, 2, "by hand")
    )


def test_a_folder_that_is_no_model_is_one_sentence(folder, tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no model folder"):
        q0lib.load(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="is no model folder: it has no config"):
        q0lib.load(tmp_path / "run")
    other = corpus.train_tokenizer(["some other text, and more of it"] * 9, 280)
    kept = (folder / "tokenizer.json").read_text()
    other.save(str(folder / "tokenizer.json"))
    with pytest.raises(ValueError, match="it is another model's tokenizer"):
        q0lib.load(folder)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json cannot be read"):
        q0lib.load(folder)
    (folder / "tokenizer.json").write_text(kept)
    about = json.loads((folder / "config.json").read_text())
    for change, said in (
        ({"width": 64}, r"model\.safetensors does not fit its config\.json"),
        ({"windows": "X"}, "windows must be letters S and L"),
        ({"mixture_weights": [0.2, 0.3, 0.5]}, r"model\.safetensors does not fit"),
    ):
        (folder / "config.json").write_text(json.dumps(about | change))
        with pytest.raises(ValueError, match=said):
            q0lib.load(folder)
    del about["context"]
    (folder / "config.json").write_text(json.dumps(about))
    with pytest.raises(ValueError, match="is of another q0lib"):
        q0lib.load(folder)
    (folder / "model.safetensors").unlink()
    (folder / "config.json").write_text(json.dumps(about | {"context": 32}))
    with pytest.raises(ValueError, match=r"no whole model folder: it has no model\.safetensors"):
        q0lib.load(folder)
    shutil.rmtree(folder)


# --- commands ----------------------------------------------------------------------------------


def test_commands_write_and_score(folder, tmp_path, capsys):
    model = q0lib.load(folder, device="cpu")
    for members, sampling in (("all", "mixture"), ("one", "member")):
        asked = ["generate", str(folder), "--prompt", "We", "--tokens", "9", "--temperature", "1"]
        assert dispatch.main([*asked, "--seed", "4", "--members", members]) == 0
        written = model.generate("We", 9, seed=4, sampling=sampling)
        assert capsys.readouterr().out == f"We{written}\n"
    path = tmp_path / "text.txt"
    path.write_text("Fellow citizens, hear.\n")
    assert dispatch.main(["score", str(folder), str(path)]) == 0
    said, loss = capsys.readouterr().out, model.loss("Fellow citizens, hear.")
    assert f"{loss.per_token:.4f} nats per token" in said
    assert f"perplexity      {loss.perplexity:.2f}" in said
    assert f"bits per byte   {loss.bits_per_byte:.4f}" in said
    assert f"{loss.tokens:,} in 1 documents" in said
    assert dispatch.main(["score", str(folder), str(tmp_path / "none.txt")]) == 2
    assert dispatch.main(["generate", str(tmp_path)]) == 2
    assert "is no model folder" in capsys.readouterr().err


def test_the_commands_are_listed_and_a_text_is_for_own_text(capsys, monkeypatch):
    assert dispatch.main(["--help"]) == 0
    said = capsys.readouterr().out
    assert all(f"python -m q0lib {name}" in said for name in dispatch.COMMANDS)
    assert dispatch.main([]) == 2
    given = []
    module = type("own_text", (), {"main": staticmethod(lambda argv: given.append(argv) or 0)})
    load = dispatch.importlib.import_module
    monkeypatch.setattr(
        dispatch.importlib, "import_module", lambda name: module if "own" in name else load(name)
    )
    assert dispatch.main(["text.jsonl", "--out", "model"]) == 0
    assert given == [["text.jsonl", "--out", "model"]]
