"""One GPT for every scale: the reference's architecture, each part a switch of `config.Model`.

Weights are kept in fp32 and cast to the activations' dtype where they are used, so that the
precision is an argument of the forward pass, and the same on every device.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from q0lib import config

HEAD_GATE_CHANNELS = 12
VALUE_GATE_CHANNELS = 32
ROPE_BASE = 10_000.0


class Linear(nn.Linear):
    """A bias-free linear map whose fp32 weight follows the dtype of its input."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


def norm(x: Tensor) -> Tensor:
    """RMS normalisation of the last axis, without weights."""
    return F.rms_norm(x, (x.size(-1),))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of x [..., T, H, D]; cos and sin [T, 1, D / 2]."""
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos + right * sin, right * cos - left * sin), dim=-1)


@functools.lru_cache(maxsize=16)
def causal_mask(context: int, window: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[T, T]: 0 where a query sees a key (itself and the window - 1 before it), -inf elsewhere."""
    at = torch.arange(context, device=device)  # a compiler ignores the cache: no copies from a CPU
    distance = at[:, None] - at[None, :]
    seen = (distance >= 0) & (distance < window)
    return torch.where(seen, 0.0, -torch.inf).to(dtype)


def attention(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Causal attention over q, k, v [B, H, T, D] within `window` keys, by the fastest means.

    On the CPU in bf16 plain batched products beat PyTorch's fused kernel several times
    (`python -m q0lib.bench` shows by how much); elsewhere the fused kernel is used.
    """
    context = q.size(2)
    if q.device.type == "cpu" and q.dtype == torch.bfloat16:
        flat = (x.flatten(0, 1) for x in (q, k, v))
        return _CpuAttention.apply(*flat, window).unflatten(0, q.shape[:2])
    mask = causal_mask(context, window, q.dtype, q.device) if window < context else None
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)


def attention_onto(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """The same where q [B, H, T, D] are the last of as many positions as k, v [B, H, S, D] have."""
    new, seen = q.size(2), k.size(2)
    if new == seen:
        return attention(q, k, v, window)
    if new == 1:
        return F.scaled_dot_product_attention(q, k[:, :, -window:], v[:, :, -window:])
    mask = causal_mask(seen, window, q.dtype, q.device)[-new:]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class Cache:
    """What one model has read of B sequences: keys and values [B, H, context, D] of every layer
    pass, filled up to `length`."""

    def __init__(self, context: int) -> None:
        self.context, self.length = context, 0
        self._passes: list[tuple[Tensor, Tensor]] = []

    def extended(self, at: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values of pass `at`, the new ones k, v [B, H, T, D] among them."""
        if at == len(self._passes):
            shape = (*k.shape[:2], self.context, k.size(3))
            self._passes.append((k.new_empty(shape), v.new_empty(shape)))
        end = self.length + k.size(2)
        for held, new in zip(self._passes[at], (k, v), strict=True):
            held[:, :, self.length : end] = new
        keys, values = self._passes[at]
        return keys[:, :, :end], values[:, :, :end]


class _CpuAttention(torch.autograd.Function):
    """Attention by batched products over q, k, v [N, T, D], in two blocks of queries.

    The first half of the queries never touches the second half of the keys, which saves a
    quarter of the work; and the softmax's gradient P * (dP - rowsum(dP * P)) takes its row sums
    from the output, as rowsum(dO * O), where PyTorch's own bf16 kernel is the slowest of all.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
        context = q.size(1)
        mask = causal_mask(context, window, q.dtype, q.device)
        out, probabilities = torch.empty_like(v), []
        for low, high in _query_blocks(context):
            scores = torch.baddbmm(
                mask[low:high, :high], q[:, low:high], k[:, :high].transpose(1, 2),
                alpha=q.size(-1) ** -0.5,
            )  # fmt: skip
            p = torch.softmax(scores, dim=-1, out=scores)
            torch.bmm(p, v[:, :high], out=out[:, low:high])
            probabilities.append(p)
        ctx.save_for_backward(q, k, v, out, *probabilities)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, *probabilities = ctx.saved_tensors
        grad, scale = grads[0].contiguous(), q.size(-1) ** -0.5
        rows = (grad.float() * out).sum(-1, keepdim=True).neg_().to(q.dtype)
        grad_q, grad_k, grad_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for (low, high), p in zip(_query_blocks(q.size(1)), probabilities, strict=True):
            g = grad[:, low:high]
            grad_v[:, :high].baddbmm_(p.transpose(1, 2), g)
            grad_p = torch.baddbmm(rows[:, low:high], g, v[:, :high].transpose(1, 2)).mul_(p)
            grad_q[:, low:high] = torch.bmm(grad_p, k[:, :high]).mul_(scale)
            grad_k[:, :high].baddbmm_(grad_p.transpose(1, 2), q[:, low:high], alpha=scale)
        return grad_q, grad_k, grad_v, None


def _query_blocks(context: int) -> tuple[tuple[int, int], ...]:
    return (0, context // 2), (context // 2, context)


# Takes the keys and values of new tokens, gives those of all that were read.
Extended = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class Block(nn.Module):
    """Attention and a SwiGLU, each normalised before and dropped out after."""

    def __init__(self, model: config.Model, value_gate: bool) -> None:
        super().__init__()
        width, self.heads = model.width, model.heads
        hidden = mlp_width(model)
        self.query, self.key, self.value = (Linear(width, width) for _ in range(3))
        self.out = Linear(width, width)
        self.gate, self.up = Linear(width, hidden), Linear(width, hidden)
        self.down = Linear(hidden, width)
        self.head_gate = (
            Linear(min(HEAD_GATE_CHANNELS, width), self.heads) if model.head_gates else None
        )
        self.value_gate = (
            Linear(min(VALUE_GATE_CHANNELS, width), self.heads) if value_gate else None
        )

    def forward(
        self,
        x: Tensor,
        values: Tensor | None,
        rope: tuple[Tensor, Tensor],
        window: int,
        drop: float,
        extended: Extended | None = None,
    ) -> Tensor:
        x = x + self._dropped(self.attend(norm(x), values, rope, window, extended), drop)
        y = norm(x)
        return x + self._dropped(self.down(F.silu(self.gate(y)) * self.up(y)), drop)

    def attend(
        self,
        x: Tensor,
        values: Tensor | None,
        rope: tuple[Tensor, Tensor],
        window: int,
        extended: Extended | None = None,
    ) -> Tensor:
        # One product for the three, though each is a parameter (and a Muon matrix) of its own.
        weight = torch.cat((self.query.weight, self.key.weight, self.value.weight))
        qkv = F.linear(x, weight.to(x.dtype)).unflatten(-1, (3 * self.heads, -1))
        v = qkv[..., 2 * self.heads :, :]
        if self.value_gate is not None and values is not None:
            gate = 2 * self.value_gate(x[..., : self.value_gate.in_features]).sigmoid()
            v = v + gate.unsqueeze(-1) * values.unflatten(-1, (self.heads, -1))
        qk = norm(rotate(qkv[..., : 2 * self.heads, :], *rope))
        q, k = qk.transpose(1, 2).chunk(2, dim=1)
        v = v.transpose(1, 2)
        if extended is not None:
            k, v = extended(k, v)
        y = attention_onto(q, k, v, window).transpose(1, 2)
        if self.head_gate is not None:
            gate = self.head_gate(x[..., : self.head_gate.in_features]).sigmoid()
            y = y * gate.unsqueeze(-1)
        return self.out(y.flatten(2))

    def _dropped(self, x: Tensor, drop: float) -> Tensor:
        return F.dropout(x, drop) if self.training and drop else x


class GPT(nn.Module):
    """Tokens [B, T] to final hidden states [B, T, width]; `head.weight` [V, width] turns them
    into logits, which the losses in `distill` soft-cap."""

    def __init__(self, model: config.Model) -> None:
        super().__init__()
        self.config = model
        width, layers = model.width, model.layers
        self.embedding = nn.Embedding(model.vocab_size, width)
        self.head = Linear(width, model.vocab_size)
        with_values = [has_value_projection(model, layer) for layer in range(layers)]
        self.blocks = nn.ModuleList(Block(model, value_gate=has) for has in with_values)
        self.value_projections = nn.ModuleDict(
            {str(layer): Linear(width, width) for layer in range(layers) if with_values[layer]}
        )
        if model.residual_scalars:
            self.residual_scale = nn.Parameter(torch.empty(layers))
            self.input_scale = nn.Parameter(torch.empty(layers))
        if model.unet_skips:
            self.skip_scale = nn.Parameter(torch.empty(layers // 2))
        if model.multi_token:
            self.next_mix = Linear(2 * width, width)
            self.next_block = Block(model, value_gate=False)
        self.passes = layer_passes(model)

    @torch.no_grad()
    def initialise(self, generator: torch.Generator) -> "GPT":
        """Draw the weights: embedding N(0, 1), head N(0, 0.001), matrices uniform with standard
        deviation width^-0.5, output projections and gates 0, so that blocks start as identity."""
        for name, parameter in self.named_parameters():
            layer = name.split(".")[-2] if "." in name else name
            if layer in ("embedding", "head"):
                std = 1.0 if layer == "embedding" else 0.001
                parameter.normal_(0.0, std, generator=generator)
            elif layer in ("out", "down", "head_gate", "value_gate"):
                parameter.zero_()
            elif layer == "input_scale":
                parameter.fill_(0.1)
            elif layer in ("residual_scale", "skip_scale"):
                parameter.fill_(1.0)
            else:
                bound = math.sqrt(3 / parameter.size(1))
                parameter.uniform_(-bound, bound, generator=generator)
        return self

    def forward(
        self, tokens: Tensor, dtype: torch.dtype = torch.float32, drop: float = 0.0,
        looped: bool = True, cache: Cache | None = None,
    ) -> Tensor:  # fmt: skip
        """Final hidden states [B, T, width] in `dtype`; layers loop only when `looped`.

        With a `cache` the tokens follow those that it holds, and it then holds them too.

        Raises:
            ValueError: they do not fit into it.
        """
        model = self.config
        if cache is None:
            rope = self._rope(tokens.size(1), dtype, tokens.device)
        else:
            new = slice(cache.length, cache.length + tokens.size(1))
            if new.stop > cache.context:
                raise ValueError(f"a cache of {cache.context} tokens cannot hold {new.stop}")
            cos, sin = self._rope(cache.context, dtype, tokens.device)
            rope = cos[new], sin[new]
        x = start = norm(self.embedding(tokens).to(dtype))
        kept: dict[int, Tensor] = {}
        for at, layer in enumerate(self.passes if looped else range(model.layers)):
            mirror = model.layers - 1 - layer
            if model.unet_skips and mirror in kept:
                x = x + self.skip_scale[mirror].to(dtype) * kept[mirror]
            if model.residual_scalars:
                x = self.residual_scale[layer].to(dtype) * x
                x = x + self.input_scale[layer].to(dtype) * start
            project = str(layer) in self.value_projections
            values = self.value_projections[str(layer)](start) if project else None
            extended = None if cache is None else functools.partial(cache.extended, at)
            x = self.blocks[layer](x, values, rope, window_size(model, layer), drop, extended)
            if layer < mirror:  # the others no later layer asks for
                kept[layer] = x
        if cache is not None:
            cache.length += tokens.size(1)
        return norm(x)

    def logits(
        self, tokens: Tensor, dtype: torch.dtype = torch.float32, cache: Cache | None = None,
        last: int = 0,
    ) -> Tensor:  # fmt: skip
        """Next-token logits, soft-capped, fp32 [B, T, V]; their softmax is what the model says.

        Of the `last` so many tokens (0: of all); see `forward` for `cache`. Whole logits are for
        reading and generating; the losses in `distill` never hold them.
        """
        return self.read_out(self(tokens, dtype, cache=cache)[:, -last:])

    def read_out(self, hidden: Tensor) -> Tensor:
        """Logits [..., V], soft-capped, fp32, of final hidden states [..., width]."""
        logits, cap = self.head(hidden).float(), self.config.softcap
        return cap * torch.tanh(logits / cap) if cap else logits

    def forward_next(self, hidden: Tensor, following: Tensor, drop: float = 0.0) -> Tensor:
        """Hidden states [B, T, width] from which the head predicts the token after next.

        `hidden` [B, T, width] comes from `forward`; `following` [B, T] is the next token of each
        position, known while training.
        """
        rope = self._rope(hidden.size(1), hidden.dtype, hidden.device)
        known = norm(self.embedding(following).to(hidden.dtype))
        x = self.next_mix(torch.cat((hidden, known), dim=-1))
        return norm(self.next_block(x, None, rope, self.config.context, drop))

    def _rope(
        self, context: int, dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        return rope_tables(context, self.config.width // self.config.heads, dtype, device)


def mixed_logits(
    models: Sequence[GPT], weights: Sequence[float], tokens: Tensor,
    caches: Sequence[Cache] | None = None, last: int = 0,
) -> Tensor:  # fmt: skip
    """log sum_i w_i p_i of the next token, fp32 [B, T, V]; a single model's logits as they are.

    `caches` (one a model) and `last` as in `GPT.logits`.
    """
    mixed: Tensor | None = None
    for i, (model, weight) in enumerate(zip(models, weights, strict=True)):
        logits = model.logits(tokens, cache=caches[i] if caches else None, last=last)
        if len(models) == 1:
            return logits
        said = logits.log_softmax(-1) + math.log(weight)
        mixed = said if mixed is None else torch.logaddexp(mixed, said)
    assert mixed is not None, "a mixture has members"
    return mixed


@functools.lru_cache(maxsize=8)
def rope_tables(
    context: int, head_width: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """cos and sin [T, 1, D / 2] of the rotary embedding."""
    count = functools.partial(torch.arange, dtype=torch.float64, device=device)
    frequency = ROPE_BASE ** (-count(0, head_width, 2) / head_width)
    angle = torch.outer(count(context), frequency).unsqueeze(1)
    return angle.cos().to(dtype), angle.sin().to(dtype)


# --- what follows from the config alone ----------------------------------------------------------


def mlp_width(model: config.Model) -> int:
    """SwiGLU hidden width: 8/3 of the width, rounded up to a multiple."""
    return -(-8 * model.width // (3 * model.mlp_multiple)) * model.mlp_multiple


def has_value_projection(model: config.Model, layer: int) -> bool:
    """Every other layer, counted back from the last, mixes a projection of the input in."""
    return model.value_projections and (model.layers - 1 - layer) % 2 == 0


def window_size(model: config.Model, layer: int) -> int:
    """Keys a query of this layer sees, itself included."""
    short = model.windows[layer % len(model.windows)] == "S" and layer < model.layers - 1
    return model.context // 2 if short else model.context


def layer_passes(model: config.Model) -> list[int]:
    """The layers in the order in which a looped forward pass runs them."""
    looped = list(range(model.loop_start, model.loop_end)) * model.loop_passes
    return [*range(model.loop_start), *looped, *range(model.loop_end, model.layers)]


@functools.cache
def parameter_count(model: config.Model) -> int:
    """Parameters of the model, counted on the meta device."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in GPT(model).parameters())


@functools.cache
def forward_flops(model: config.Model, looped: bool = True, multi_token: bool = False) -> float:
    """FLOPs a token of one forward pass: 2 a weight and pass in matrix products, and attention.

    A backward pass costs twice as much again. Scores and values are counted for the keys a query
    sees on average; normalisations, gates and other elementwise work are left out.
    `multi_token` adds the block that only training runs.
    """
    with torch.device("meta"):
        net = GPT(model)
    weights: Callable[[nn.Module], int] = lambda part: sum(  # noqa: E731
        parameter.numel() for parameter in part.parameters() if parameter.ndim == 2
    )
    total = 2.0 * weights(net.head)
    for layer in layer_passes(model) if looped else range(model.layers):
        total += 2.0 * weights(net.blocks[layer])
        if str(layer) in net.value_projections:
            total += 2.0 * weights(net.value_projections[str(layer)])
        total += 4.0 * model.width * _keys_seen(model.context, window_size(model, layer))
    if multi_token and model.multi_token:
        total += 2.0 * (weights(net.next_mix) + weights(net.next_block) + weights(net.head))
        total += 4.0 * model.width * _keys_seen(model.context, model.context)
    return total


def _keys_seen(context: int, window: int) -> float:
    """Keys seen by a query, on average over the positions of a sequence."""
    return window - window * (window - 1) / (2 * context)
