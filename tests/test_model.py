"""The GPT against hand counts, PyTorch's attention, and what causality demands."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from q0lib import config, optim, presets
from q0lib.model import (
    GPT,
    attention,
    causal_mask,
    forward_flops,
    layer_passes,
    mlp_width,
    norm,
    parameter_count,
    rope_tables,
    rotate,
    window_size,
)

SMALL = config.Model(vocab_size=300, context=32, layers=4, width=48, heads=3, windows="SSL")


def built(model: config.Model = SMALL, seed: int = 0) -> GPT:
    net = GPT(model).initialise(torch.Generator().manual_seed(seed))
    with torch.no_grad():  # gates and output projections start at 0, where nothing would show
        for parameter in net.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.manual_seed(seed)))
    return net


def test_paper_preset_has_the_references_parameters():
    width, vocab, heads, layers = 2048, 50_304, 16, 30
    hidden = 5632  # 8/3 x 2048 = 5461.3, up to a multiple of 256
    attention_weights = 4 * width * width + 12 * heads
    block = attention_weights + 3 * width * hidden
    value_layers = 15 * (width * width + 32 * heads)
    scalars = 2 * layers + layers // 2
    one_more_block = 2 * width * width + block
    by_hand = 2 * vocab * width + layers * block + value_layers + scalars + one_more_block
    study = presets.load("paper")
    assert mlp_width(study.model) == hidden
    assert parameter_count(study.model) == by_hand == 1_870_149_003


def test_layers_loop_in_place():
    model = presets.load("paper").model
    assert len(layer_passes(model)) == 20 + 10 * 5  # the paper counts 70 passes forward
    assert layer_passes(model)[13:17] == [13, 14, 15, 16]
    assert layer_passes(model)[24:27] == [24, 15, 16]
    assert [window_size(SMALL, layer) for layer in range(4)] == [16, 16, 32, 32]
    assert [window_size(model, layer) for layer in (0, 3, 28, 29)] == [1024, 2048, 1024, 2048]


def test_flops_by_hand():
    plain = config.Model(
        vocab_size=300, context=32, layers=2, width=48, heads=3, unet_skips=False,
        residual_scalars=False, head_gates=False, value_projections=False, mlp_multiple=16,
    )  # fmt: skip
    weights = 300 * 48 + 2 * (4 * 48 * 48 + 3 * 48 * 128)
    keys = (32 + 1) / 2
    assert forward_flops(plain) == 2 * weights + 2 * 4 * 48 * keys
    looped = dataclasses.replace(plain, loop_start=1, loop_end=2, loop_passes=3)
    extra = 2 * (2 * (4 * 48 * 48 + 3 * 48 * 128) + 4 * 48 * keys)
    assert forward_flops(looped) - forward_flops(plain) == pytest.approx(extra)
    assert forward_flops(looped, looped=False) == forward_flops(plain)


@pytest.mark.parametrize("window", [6, 3, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_window_holds_as_many_keys_as_it_says_the_query_among_them(window, dtype):
    """With queries of zero every key that is seen weighs the same, and values tell them apart."""
    values = torch.eye(6, dtype=dtype)[None, None]
    q, k = torch.zeros(2, 1, 1, 6, 6, dtype=dtype)
    seen = attention(q, k, values, window)[0, 0] > 0
    expected = [[max(0, i - window + 1) <= j <= i for j in range(6)] for i in range(6)]
    assert seen.tolist() == expected


@pytest.mark.parametrize("window", [32, 16, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_matches_pytorch(window, dtype):
    g = torch.Generator().manual_seed(1)
    q, k, v, grad = (torch.randn(2, 3, 32, 16, generator=g) for _ in range(4))
    leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)]
    mask = causal_mask(32, window, torch.float32, torch.device("cpu"))
    doubles = [x.detach().float().requires_grad_() for x in leaves]
    expected = F.scaled_dot_product_attention(*doubles, attn_mask=mask)
    got = attention(*leaves, window)
    tolerance = 1e-5 if dtype == torch.float32 else 4e-2
    torch.testing.assert_close(got.float(), expected, rtol=tolerance, atol=tolerance)
    mine = torch.autograd.grad(got, leaves, grad.to(dtype))
    theirs = torch.autograd.grad(expected, doubles, grad)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a.float(), b, rtol=tolerance, atol=tolerance)


def test_rotation_keeps_lengths_and_depends_on_distance_alone():
    cos, sin = rope_tables(32, 16, torch.float32, torch.device("cpu"))
    g = torch.Generator().manual_seed(2)
    x, y = (torch.randn(16, generator=g).expand(32, 1, 16) for _ in range(2))
    turned_x, turned_y = rotate(x, cos, sin)[:, 0], rotate(y, cos, sin)[:, 0]
    torch.testing.assert_close(turned_x.norm(dim=1), x[:, 0].norm(dim=1))
    products = turned_x @ turned_y.T
    torch.testing.assert_close(products[5, 2], products[25, 22], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("model", [
    SMALL,
    dataclasses.replace(SMALL, loop_start=1, loop_end=3, loop_passes=2),
    dataclasses.replace(SMALL, unet_skips=False, residual_scalars=False, head_gates=False,
                        value_projections=False),
])  # fmt: skip
def test_no_position_sees_its_future(model):
    net = built(model).eval()
    tokens = torch.randint(0, 300, (1, 32), generator=torch.manual_seed(3))
    changed = tokens.clone()
    changed[0, 20:] = 7
    with torch.no_grad():
        before, after = net(tokens), net(changed)
    assert torch.equal(before[0, :20], after[0, :20])
    assert not torch.equal(before[0, 20:], after[0, 20:])


def test_every_switch_changes_the_output_and_every_parameter_learns():
    net = built(dataclasses.replace(SMALL, multi_token=True, loop_start=1, loop_end=2,
                                    loop_passes=2))  # fmt: skip
    tokens = torch.randint(0, 300, (2, 33), generator=torch.manual_seed(3))
    hidden = net(tokens[:, :-1])
    ahead = net.forward_next(hidden, tokens[:, 1:])
    (net.head(hidden).square().mean() + net.head(ahead).square().mean()).backward()
    still = [name for name, p in net.named_parameters() if p.grad is None or not p.grad.any()]
    assert still == []
    assert not torch.equal(net(tokens[:, :-1], looped=False), hidden)


def test_multi_token_states_see_the_next_token_and_no_later_one():
    net = built(dataclasses.replace(SMALL, multi_token=True)).eval()
    tokens = torch.randint(0, 300, (1, 33), generator=torch.manual_seed(3))
    changed = tokens.clone()
    changed[0, 21:] = 7
    with torch.no_grad():
        before = net.forward_next(net(tokens[:, :-1]), tokens[:, 1:])
        after = net.forward_next(net(changed[:, :-1]), changed[:, 1:])
    assert torch.equal(before[0, :20], after[0, :20])
    assert not torch.equal(before[0, 20], after[0, 20])


def test_units_are_dropped_in_training_alone():
    net, tokens = built(), torch.arange(32)[None]
    with torch.no_grad():
        assert torch.equal(net.eval()(tokens, drop=0.5), net(tokens))
        assert not torch.equal(net.train()(tokens, drop=0.5), net(tokens))


def test_a_fresh_model_predicts_nearly_uniformly():
    net = GPT(SMALL).initialise(torch.Generator().manual_seed(0))
    tokens = torch.arange(32)[None]
    entropy = F.cross_entropy(net.head(net(tokens))[0], torch.arange(32)).detach()
    assert float(entropy) == pytest.approx(float(torch.tensor(300.0).log()), abs=0.05)
    torch.testing.assert_close(norm(torch.full((2, 4), 3.0)), torch.ones(2, 4))


def test_bf16_stays_close_to_fp32():
    net = built().eval()
    tokens = torch.randint(0, 300, (2, 32), generator=torch.manual_seed(4))
    with torch.no_grad():
        gap = (net(tokens, torch.bfloat16).float() - net(tokens)).abs().mean()
    assert float(gap) < 0.03


def test_optimizer_groups_and_rates():
    net, method = GPT(SMALL), config.Method()
    muon, adam = optim.optimizers(net, method)
    grouped = [p for o in (muon, adam) for g in o.param_groups for p in g["params"]]
    assert {id(p) for p in grouped} == {id(p) for p in net.parameters()}
    assert len(grouped) == len(list(net.parameters()))
    assert all(p.ndim == 2 for g in muon.param_groups for p in g["params"])
    optim.scale([muon, adam], lr=0.5, weight_decay=0.7)
    assert muon.param_groups[0]["lr"] == pytest.approx(method.matrix_lr / 2)
    assert muon.param_groups[0]["weight_decay"] == pytest.approx(method.weight_decay * 0.7)
    optim.scale([muon, adam], lr=1.0, weight_decay=1.0)
    rates = {len(g["params"][0].shape): g["lr"] for g in adam.param_groups}
    assert adam.param_groups[0]["lr"] == method.embedding_lr
    assert adam.param_groups[1]["lr"] == method.unembedding_lr
    assert rates[1] in (method.scalar_lr, method.scalar_lr * 0.01)
    assert all(g["weight_decay"] == 0 for g in adam.param_groups if g["params"][0].ndim == 1)
