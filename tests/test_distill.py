"""The fused losses against PyTorch's own, and where their arithmetic could go wrong."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from q0lib import config, distill
from q0lib.model import GPT

ALPHA, TEMPERATURE = 0.45, 1.2


def reference(hidden, head, targets, softcap, teacher):
    """The same loss from whole logits, by autograd."""

    def logits(x, w):
        z = x @ w.t()
        return softcap * torch.tanh(z / softcap) if softcap else z

    student = logits(hidden, head)
    ce = F.cross_entropy(student, targets, ignore_index=distill.IGNORED)
    if teacher is None:
        return ce, ce
    t = teacher.temperature
    kl = F.kl_div(
        (student / t).log_softmax(-1), (logits(teacher.hidden, teacher.head) / t).log_softmax(-1),
        log_target=True, reduction="none",
    ).sum(1)  # fmt: skip
    kl = kl[targets != distill.IGNORED].mean()
    return (1 - teacher.alpha) * ce + teacher.alpha * t**2 * kl, ce


def problem(tokens=40, width=12, vocab=70, scale=3.0, seed=0):
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, width, generator=g, dtype=torch.float32)
    head = torch.randn(vocab, width, generator=g) * scale
    targets = torch.randint(0, vocab, (tokens,), generator=g)
    taught = torch.randn(tokens, width, generator=g)
    taught_head = torch.randn(vocab, width, generator=g) * scale
    lesson = distill.Distillation(taught, taught_head, ALPHA, TEMPERATURE)
    return hidden.requires_grad_(), head.requires_grad_(), targets, lesson


@pytest.mark.parametrize("softcap", [0.0, 15.0])
@pytest.mark.parametrize("taught", [False, True])
@pytest.mark.parametrize("chunk", [1 << 17, 70 * 7])
def test_loss_and_gradients_match_autograd(softcap, taught, chunk, monkeypatch):
    monkeypatch.setattr(distill, "_CHUNK_ELEMENTS", chunk)
    hidden, head, targets, lesson = problem()
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


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 39))
def test_micro_batches_add_up_to_the_batch(cut):
    hidden, head, targets, lesson = problem()
    whole = distill.head_loss(hidden, head, targets, softcap=15.0, teacher=lesson)[0]
    parts = [
        distill.head_loss(
            hidden[part], head, targets[part], softcap=15.0, total=40,
            teacher=lesson._replace(hidden=lesson.hidden[part]),
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
        same = distill.Distillation(x, head.detach(), 1.0, TEMPERATURE)
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

    ruled_out = lesson.head.clone()
    ruled_out[5] = -torch.inf
    hard = lesson._replace(hidden=lesson.hidden.abs() + 0.1, head=ruled_out)
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


def test_teacher_is_an_independent_frozen_copy():
    model = GPT(config.Model(vocab_size=300, context=16, layers=2, width=32, heads=2))
    model.initialise(torch.Generator().manual_seed(0)).train()
    teacher = distill.frozen_teacher(model)
    tokens = torch.arange(16)[None]
    before = teacher(tokens, drop=0.5)
    assert model.training
    assert not teacher.training
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    after = teacher(tokens, drop=0.5)
    assert torch.equal(before, after), "no dropout, no aliasing"
    assert not any(parameter.requires_grad for parameter in teacher.parameters())
