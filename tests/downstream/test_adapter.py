"""Models and mixtures as lm-evaluation-harness asks them."""

import itertools
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from lm_eval.api.instance import Instance
from tiny import tiny_study, with_runtime

from q0lib import corpus, ensemble, evaluate, export, language_model, prior, train
from q0lib.downstream.adapter import Scorer

WEIGHTS = np.array([0.2, 0.5, 0.3])
# No two are the same tokens split elsewhere: the harness's own model would take one for the other.
PAIRS = [
    ("", "We the people"), ("We the people", " of the United States"), ("We ", "were the people"),
    ("a", "b"), ("The state of the Union is strong, and so it has been " * 4, " for years"),
    ("short", " and then a continuation that is far longer than the context " * 3),
]  # fmt: skip


@pytest.fixture(scope="module")
def trained(text, tmp_path_factory):
    run = with_runtime(tiny_study(0, "model.softcap=8").run("q0", 6), keep_weights=True)
    folder = tmp_path_factory.mktemp("run")
    return train.train_population(run, text, directory=folder, progress=False)


def chosen(weights):
    weights = np.asarray(weights, float)
    return prior.Selection(np.flatnonzero(weights), weights, len(weights), "by hand")


@pytest.fixture(scope="module")
def mixture(trained):
    return language_model.mixed(trained, chosen(WEIGHTS), "cpu")


def asked(kind, *arguments):
    return [Instance(kind, {}, each, i) for i, each in enumerate(arguments)]


def by_hand(model, context, continuation, sequence=False):
    """Token after token, from whole forward passes, in double precision."""
    ids = model.encoded(context + continuation).tolist()
    start = len(model.encoded(context.rstrip() if context.strip() else ""))
    ids, start = ids[-(model.context + 1) :], start - max(0, len(ids) - model.context - 1)
    start = max(1, start)
    p = []
    with torch.no_grad():
        for member in model.members:
            p.append(member.logits(torch.tensor([ids[:-1]]))[0].double().softmax(-1))
    p = torch.stack(p)  # [K, T, V]
    w = torch.tensor(model.weights, dtype=torch.float64)
    total, greedy = 0.0, True
    for at in range(start, len(ids)):
        said = (w[:, None] * p[:, at - 1]).sum(0) / w.sum()
        total += float(said[ids[at]].log())
        greedy &= int(said[: model.tokenizer.get_vocab_size()].argmax()) == ids[at]
        if sequence:  # what was said so far tells who is to be trusted
            w = w * p[:, at - 1, ids[at]]
            w = w / w.sum()
    return total, greedy


@pytest.mark.parametrize("mixing", ["token", "sequence"])
def test_scores_are_those_of_the_chain_rule(mixture, mixing):
    found = Scorer(mixture, mixing, progress=False).loglikelihood(asked("loglikelihood", *PAIRS))
    for pair, (log_p, greedy) in zip(PAIRS, found, strict=True):
        expected, likeliest = by_hand(mixture, *pair, sequence=mixing == "sequence")
        assert log_p == pytest.approx(expected, abs=1e-4), pair
        assert greedy == likeliest


def test_the_mixture_of_sequences_is_one_of_products(mixture, trained):
    """log sum_i w_i prod_t p_i, from what each member says alone."""
    request = asked("loglikelihood", PAIRS[1])
    ((mixed, _),) = Scorer(mixture, "sequence", progress=False).loglikelihood(request)
    alone = []
    for i in range(3):
        one = language_model.mixed(trained, chosen(np.eye(3)[i]), "cpu")
        alone.append(Scorer(one, progress=False).loglikelihood(request)[0][0])
    assert mixed == pytest.approx(np.logaddexp.reduce(np.log(WEIGHTS) + alone), abs=1e-4)
    ((by_token, _),) = Scorer(mixture, progress=False).loglikelihood(request)
    assert by_token != pytest.approx(mixed, abs=1e-4)


def test_a_mixture_of_copies_is_that_member(mixture):
    one = language_model.LanguageModel(mixture.members[:1], [1.0], mixture.tokenizer)
    two = language_model.LanguageModel([mixture.members[0]] * 2, [0.3, 0.7], mixture.tokenizer)
    for mixing in ("token", "sequence"):
        requests = asked("loglikelihood", *PAIRS)
        alone = Scorer(one, mixing, progress=False).loglikelihood(requests)
        copies = Scorer(two, mixing, progress=False).loglikelihood(requests)
        assert [g for _, g in alone] == [g for _, g in copies]
        assert [p for p, _ in alone] == pytest.approx([p for p, _ in copies], abs=1e-4)


def test_a_greedy_continuation_is_known_as_one(mixture):
    context = "The people"
    text = mixture.generate(context, 3, temperature=0)
    ids = mixture.encoded(context + text).tolist()
    if ids[: len(mixture.encoded(context))] != mixture.encoded(context).tolist():
        pytest.skip("the text splits into other tokens where it was joined")
    ((_, greedy),) = Scorer(mixture, progress=False).loglikelihood(
        asked("loglikelihood", (context, text))
    )
    assert greedy
    (written,) = Scorer(mixture, progress=False).generate_until(
        asked("generate_until", (context, {"until": [], "max_gen_toks": 3}))
    )
    assert written == text


def test_generation_ends_at_the_first_stop(mixture):
    whole = mixture.generate("The people", 40, temperature=0)
    stop = whole[len(whole) // 2 :][:2]
    (written,) = Scorer(mixture, progress=False).generate_until(
        asked("generate_until", ("The people", {"until": stop, "max_gen_toks": 40}))
    )
    assert written == whole[: whole.find(stop)]


def test_the_rolling_loss_of_a_mixture_is_that_of_held_out_text(mixture, trained, text):
    """The same document, as the population is evaluated on held-out text."""
    context = mixture.context
    ids = next(
        ids
        for words in itertools.count(60)
        if (len(ids := mixture.encoded(" ".join(["people", "of", "America"] * words))) - 1)
        % context == 0
    )  # fmt: skip
    document = mixture.tokenizer.decode(ids[1:].tolist())
    split = corpus.Split("test", ids.astype(np.uint16), np.array([0]), "")
    P = np.stack([
        evaluate.held_out_log_probs(trained.model(i), split, torch.float32).exp().numpy()
        for i in range(3)
    ])  # fmt: skip
    (rolled,) = Scorer(mixture, progress=False).loglikelihood_rolling(
        asked("loglikelihood_rolling", (document,))
    )
    assert -rolled / (len(ids) - 1) == pytest.approx(ensemble.mixture_nll(WEIGHTS, P), abs=1e-5)


def test_batches_and_order_change_nothing(mixture):
    requests = asked("loglikelihood", *PAIRS)
    together = Scorer(mixture, progress=False)
    alone = Scorer(mixture, progress=False)
    alone._tokens_at_once = 1
    found = together.loglikelihood(requests)
    assert [p for p, _ in found] == pytest.approx(
        [p for p, _ in alone.loglikelihood(requests[::-1])[::-1]], abs=1e-4
    )
    assert together.loglikelihood(requests) == found, "and they are known the second time"


def test_settings_are_checked(mixture):
    with pytest.raises(ValueError, match=r"mixing must be one of .* got 'words'"):
        Scorer(mixture, "words")
    with pytest.raises(ValueError, match=r"precision must be one of .* got 'fp8'"):
        Scorer(mixture, precision="fp8")


_HARNESS = """
import json, sys, warnings
warnings.filterwarnings("ignore")
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
folder, pairs = sys.argv[1], json.loads(sys.argv[2])
def opened(**more):
    return HFLM(pretrained=folder, trust_remote_code=True, device="cpu", dtype="float32",
                max_length=32, batch_size=2, **more)
requests = [Instance("loglikelihood", {}, tuple(pair), i) for i, pair in enumerate(pairs)]
rolling = [Instance("loglikelihood_rolling", {}, (text,), i)
           for i, text in enumerate(b for _, b in pairs)]
# Of rolling text it would score the <|endoftext|> too that its tokenizer puts before it.
print(json.dumps([opened().loglikelihood(requests),
                  opened(add_bos_token=False).loglikelihood_rolling(rolling)]))
"""


def test_the_harness_own_model_says_the_same_of_the_exported_folder(trained, mixture, tmp_path):
    folder = export.write(tmp_path / "model", trained, chosen(WEIGHTS))
    env = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    pairs = [pair for pair in PAIRS if len(mixture.encoded(pair[1])) < 32]
    done = subprocess.run(
        [sys.executable, "-c", _HARNESS, str(folder), json.dumps(pairs)],
        env=env, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    theirs, rolling = json.loads(done.stdout.splitlines()[-1])
    ours = Scorer(mixture, progress=False)
    found = ours.loglikelihood(asked("loglikelihood", *pairs))
    for pair, mine, other in zip(pairs, found, theirs, strict=True):
        assert mine[0] == pytest.approx(other[0], abs=1e-3), pair
        assert mine[1] == other[1]
    texts = [(text,) for _, text in pairs]
    mine = ours.loglikelihood_rolling(asked("loglikelihood_rolling", *texts))
    assert mine == pytest.approx(rolling, abs=1e-3)
