"""The fused losses against PyTorch's own, and where their arithmetic could go wrong."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from q0lib import config, distill
from q0lib.model import GPT, forward_flops

ALPHA, TEMPERATURE = 0.45, 1.2


def reference(hidden, head, targets, softcap, teacher):
    """The same loss from whole logits, by autograd."""

    def logits(x, w):
        z = x @ w.t()
        return softcap * torch.tanh(z / softcap) if softcap else z

    def mixed(lesson):
        said = [logits(x, w).log_softmax(-1) for x, w, _ in lesson.states]
        return sum(
            np.exp(lw) * p.exp() for lw, p in zip(lesson.log_weights, said, strict=True)
        ).log()

    student = logits(hidden, head)
    ce = F.cross_entropy(student, targets, ignore_index=distill.IGNORED)
    if teacher is None:
        return ce, ce
    t = teacher.temperature
    kl = F.kl_div(
        (student / t).log_softmax(-1), (mixed(teacher.lesson) / t).log_softmax(-1),
        log_target=True, reduction="none",
    ).sum(1)  # fmt: skip
    kl = kl[targets != distill.IGNORED].mean()
    return (1 - teacher.alpha) * ce + teacher.alpha * t**2 * kl, ce


def problem(tokens=40, width=12, vocab=70, scale=3.0, seed=0, softcap=15.0, teachers=1):
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, width, generator=g, dtype=torch.float32)
    head = torch.randn(vocab, width, generator=g) * scale
    targets = torch.randint(0, vocab, (tokens,), generator=g)
    states = [
        (torch.randn(tokens, width, generator=g), torch.randn(vocab, width, generator=g) * scale,
         softcap)
        for width in (width, width + 4)[:teachers]
    ]  # fmt: skip
    weights = [0.3, 0.7] if teachers == 2 else [1.0]
    lesson = distill.Mixture(states, [float(np.log(w)) for w in weights])
    lesson = distill.Distillation(lesson, ALPHA, TEMPERATURE)
    return hidden.requires_grad_(), head.requires_grad_(), targets, lesson


@pytest.mark.parametrize("softcap", [0.0, 15.0])
@pytest.mark.parametrize("taught", [0, 1, 2])
@pytest.mark.parametrize("chunk", [1 << 17, 70 * 7])
def test_loss_and_gradients_match_autograd(softcap, taught, chunk, monkeypatch):
    monkeypatch.setattr(distill, "CHUNK_ELEMENTS", chunk)
    hidden, head, targets, lesson = problem(softcap=softcap, teachers=max(taught, 1))
    targets[3] = distill.IGNORED
    teacher = lesson if taught else None
    expected = reference(hidden, head, targets, softcap, teacher)
    got = distill.head_loss(hidden, head, targets, softcap=softcap, teacher=teacher)
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
    for mine, theirs in zip(
        torch.autograd.grad(got[0] * 2, (hidden, head)),
        torch.autograd.grad(expected[0] * 2, (hidden, head)), strict=True,
    ):  # fmt: skip
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


def of_tokens(lesson, part):
    return lesson._replace(states=[(x[part], w, cap) for x, w, cap in lesson.states])


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 39))
def test_micro_batches_add_up_to_the_batch(cut):
    hidden, head, targets, lesson = problem()
    whole = distill.head_loss(hidden, head, targets, softcap=15.0, teacher=lesson)[0]
    parts = [
        distill.head_loss(
            hidden[part], head, targets[part], softcap=15.0, total=40,
            teacher=lesson._replace(lesson=of_tokens(lesson.lesson, part)),
        )[0]
        for part in (slice(0, cut), slice(cut, 40))
    ]  # fmt: skip
    assert float(sum(part.detach() for part in parts)) == pytest.approx(
        float(whole.detach()), rel=1e-5
    )


def test_a_student_equal_to_its_teacher_has_no_divergence_in_any_precision():
    hidden, head, targets, _ = problem(vocab=50_000, scale=1.0, tokens=8)
    for dtype in (torch.float32, torch.bfloat16):
        x = hidden.detach().to(dtype)
        itself = distill.Mixture([(x, head.detach(), 15.0)], [0.0])
        same = distill.Distillation(itself, 1.0, TEMPERATURE)
        loss, _ = distill.head_loss(x, head, targets, softcap=15.0, teacher=same)
        assert loss.item() == pytest.approx(0.0, abs=1e-5)


def test_loss_arithmetic_stays_fp32_for_bf16_activations():
    hidden, head, targets, _ = problem(vocab=50_000, scale=0.5, tokens=16)
    low = hidden.detach().bfloat16()
    exact = F.cross_entropy((low @ head.detach().bfloat16().t()).double(), targets)
    got = distill.head_loss(low, head, targets)[1]
    assert float(got) == pytest.approx(float(exact), abs=1e-5)


def test_extremes_stay_finite():
    hidden, head, targets, lesson = problem()
    nothing = torch.full_like(targets, distill.IGNORED)
    loss, entropy = distill.head_loss(hidden, head, nothing, teacher=lesson)
    assert loss.item() == entropy.item() == 0.0
    assert all(not g.any() for g in torch.autograd.grad(loss, (hidden, head)))

    ((taught, taught_head, _),) = lesson.lesson.states
    ruled_out = taught_head.clone()
    ruled_out[5] = -torch.inf
    sure = lesson.lesson._replace(states=[(taught.abs() + 0.1, ruled_out, 0.0)])
    hard = lesson._replace(lesson=sure)
    for teacher in (hard, lesson._replace(temperature=1e-3)):
        loss, _ = distill.head_loss(hidden, head, targets, teacher=teacher)
        assert torch.isfinite(loss)
        assert all(torch.isfinite(g).all() for g in torch.autograd.grad(loss, (hidden, head)))
    with pytest.raises(ValueError, match="temperature must be > 0, got 0"):
        distill.head_loss(hidden, head, targets, teacher=lesson._replace(temperature=0.0))


def test_log_probs_are_the_log_softmax_at_the_targets():
    hidden, head, targets, _ = problem()
    capped = 15 * torch.tanh(hidden @ head.t() / 15)
    expected = capped.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    got = distill.token_log_probs(hidden, head, targets, 15.0)
    torch.testing.assert_close(got, expected.detach(), rtol=1e-5, atol=1e-5)


def built(seed, width=32):
    model = GPT(config.Model(vocab_size=300, context=16, layers=2, width=width, heads=2))
    model.initialise(torch.Generator().manual_seed(seed)).train()
    with torch.no_grad():
        model.head.weight.mul_(300)  # a fresh head says next to nothing
    return model


def test_teacher_is_an_independent_frozen_copy():
    model = built(0)
    teacher = distill.Teacher([model])
    (copied,) = teacher.models
    tokens = torch.arange(16)[None]
    before = copied(tokens, drop=0.5)
    assert model.training
    assert not copied.training
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    after = copied(tokens, drop=0.5)
    assert torch.equal(before, after), "no dropout, no aliasing"
    assert not any(parameter.requires_grad for parameter in copied.parameters())


def test_a_mixture_teaches_its_probabilities_chunk_by_chunk():
    models = [built(0), built(1, width=64), built(2)]
    teacher = distill.Teacher(models, [1, 2, 5])
    tokens = torch.arange(32).view(2, 16)
    lesson = teacher.lesson(tokens)
    said = [m.eval().logits(tokens).flatten(0, 1).softmax(-1) for m in models]
    expected = (said[0] + 2 * said[1] + 5 * said[2]) / 8
    got = torch.cat([lesson.log_probs(slice(at, at + 5)) for at in range(0, 32, 5)])
    torch.testing.assert_close(got.softmax(-1), expected.detach(), rtol=1e-4, atol=1e-6)
    assert teacher.flops == sum(forward_flops(model.config) for model in models)
    alone = distill.Teacher([models[0]]).lesson(tokens).log_probs(slice(0, 32)).softmax(-1)
    torch.testing.assert_close(alone, said[0].detach(), rtol=1e-4, atol=1e-6)
    for bad in ([1, 2], [1, 2, 0]):
        with pytest.raises(ValueError, match="a positive weight for each, got 3 models"):
            distill.Teacher(models, bad)
