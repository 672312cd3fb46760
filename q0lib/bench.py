"""Speed against the machine's own matrix products, memory, and the choices behind both.

    python -m q0lib.bench
    python -m q0lib.bench --preset quick --seconds 1
    python -m q0lib.bench --preset gpu     # on a GPU
    python -m q0lib.bench --large          # and a population of 480 x 10M test tokens: 20 GB

One process, one thread on a CPU: what a sweep gives each of its jobs. Every figure is the best of
several repeats, since other work on the machine only ever slows a repeat down.
"""

import dataclasses
import functools
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from q0lib import (
    command,
    config,
    corpus,
    distill,
    evaluate,
    memory,
    peaks,
    presets,
    prior,
    provenance,
    train,
    trajectory,
)
from q0lib.model import GPT, Cache, attention, causal_mask, forward_flops

# Dense bf16 products, FLOP/s, as the makers state them; the first name that a device has in its.
NOMINAL = {"B200": 2250e12, "H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "A100": 312e12,
           "L40S": 362e12, "L4": 121e12, "A10": 125e12, "RTX 4090": 165e12}  # fmt: skip
# The shapes of preset gpu, small enough for a CPU, at two micro-batches and two vocabularies.
SHRUNK = [
    ["corpus.vocab_size=4096", "model.vocab_size=4096", "runtime.micro_batch=2"],
    ["corpus.vocab_size=4096", "model.vocab_size=4096", "runtime.micro_batch=8"],
    ["corpus.vocab_size=16384", "model.vocab_size=16384", "runtime.micro_batch=2"],
]
SMALLER = ["corpus.source=sotu", "corpus.tokenizer=bpe", "model.width=192", "model.layers=4",
           "model.context=256", "methods.batch_tokens=2048", "methods.edge_batch_tokens=0",
           "runtime.threads=1", "runtime.compile=false"]  # fmt: skip
GIB = 2.0**30


def best_seconds(work: Callable[[], object], budget: float) -> float:
    """Shortest of the repeats of `work` that fit into `budget` seconds (two at least)."""

    def done() -> None:
        work()
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()

    done()
    best, spent, repeats = float("inf"), 0.0, 0
    while spent < budget or repeats < 2:
        started = time.perf_counter()
        done()
        took = time.perf_counter() - started
        best, spent, repeats = min(best, took), spent + took, repeats + 1
    return best


def matmul_peak(dtype: torch.dtype, device: torch.device, seconds: float) -> float:
    """FLOP/s of a square matrix product, the yardstick."""
    size = 1024 if device.type == "cpu" else 8192
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / best_seconds(lambda: torch.mm(a, b), seconds)


def training(study: config.Preset, seconds: float) -> list[tuple[str, float, float]]:
    """(what, tokens/s, FLOP/s) of training with and without a teacher, and of evaluation."""
    run = memory.fitted(dataclasses.replace(study.run("q0"), seed=0))
    text = peaks.noise(run)
    rows = []
    for name, distill_after in (("training", 10**6), ("training with a teacher", 0)):
        method = dataclasses.replace(run.method, distill_after=distill_after)
        one = trajectory.Trajectory(dataclasses.replace(run, method=method, cycles=1), 0, text)
        if not distill_after:
            one.newest = distill.Teacher([one.model], dtype=one.dtype)

        def step(one: trajectory.Trajectory = one) -> None:
            one.step = 0
            one.train_step()

        step()
        tokens, flops = one.spent["tokens"], one.spent["flops"]
        took = best_seconds(step, seconds)
        rows.append((name, tokens / took, flops / took))
    took = best_seconds(
        lambda: evaluate.held_out_log_probs(one.model, text["test"], one.dtype), seconds
    )
    scored = corpus.held_out_rows(text["test"].tokens, run.model.context) * run.model.context
    rows.append(("evaluation", scored / took, scored * forward_flops(run.model) / took))
    return rows


def choices(
    model: config.Model, tokens: int, device: torch.device, seconds: float
) -> list[tuple[str, float]]:
    """(what, milliseconds) of so many tokens forward and backward: ours, and what it stands in
    for."""
    rows, heads, width = tokens // model.context, model.heads, model.width // model.heads
    drawn = functools.partial(torch.randn, dtype=torch.bfloat16, device=device, requires_grad=True)
    q, k, v, grad = (drawn(rows, heads, model.context, width) for _ in range(4))
    hidden = drawn(tokens, model.width)
    head = torch.randn(model.vocab_size, model.width, device=device, requires_grad=True)
    targets = torch.randint(model.vocab_size, (tokens,), device=device)
    states = [(hidden.detach(), head.detach(), 15.0)]
    lesson = distill.Distillation(distill.Mixture(states, [0.0]), 0.45, 1.2)

    def attend(function: Callable[..., torch.Tensor], *args: object) -> Callable[[], object]:
        return lambda: torch.autograd.grad(function(q, k, v, *args), (q, k, v), grad)

    def fused(teacher: distill.Distillation | None) -> Callable[[], object]:
        return lambda: torch.autograd.grad(
            distill.head_loss(hidden, head, targets, softcap=15.0, teacher=teacher)[0],
            (hidden, head),
        )

    def whole(teacher: distill.Distillation | None) -> Callable[[], object]:
        def logits(x: torch.Tensor) -> torch.Tensor:
            return 15 * torch.tanh((x @ head.to(x.dtype).t()).float() / 15)

        def loss() -> torch.Tensor:
            student = logits(hidden)
            ce = F.cross_entropy(student, targets)
            if teacher is None:
                return ce
            t = teacher.temperature
            with torch.no_grad():
                taught = (logits(hidden.detach()) / t).log_softmax(-1)
            kl = F.kl_div((student / t).log_softmax(-1), taught, log_target=True,
                          reduction="batchmean")  # fmt: skip
            return (1 - teacher.alpha) * ce + teacher.alpha * t**2 * kl

        return lambda: torch.autograd.grad(loss(), (hidden, head))

    mask = causal_mask(model.context, model.context, torch.bfloat16, device)
    window = model.context // 2
    works = {
        "attention (ours)": attend(attention, model.context),
        "... within a window of half (ours)": attend(attention, window),
        "... fused kernel": attend(
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)
        ),
        "... products by autograd": attend(
            lambda q, k, v: (q @ k.transpose(-1, -2) * width**-0.5 + mask).softmax(-1) @ v
        ),
        "head and loss, in chunks (ours)": fused(None),
        "... whole logits": whole(None),
        "head and distillation, in chunks (ours)": fused(lesson),
        "... with whole logits": whole(lesson),
    }
    if device.type == "cuda":
        works["... within a window of half, flex_attention"] = attend(
            torch.compile(flex_attention), None, in_window(model.context, window, device)
        )
    return [(name, 1e3 * best_seconds(work, seconds)) for name, work in works.items()]


def in_window(context: int, window: int, device: torch.device) -> BlockMask:
    """What `causal_mask` says, for `flex_attention`, which skips the blocks that nobody sees."""
    return create_block_mask(
        lambda _b, _h, query, key: (query >= key) & (query - key < window),
        None, None, context, context, device=device,
    )  # fmt: skip


def generating(model: config.Model, seconds: float) -> list[tuple[str, float]]:
    """(what, tokens/s) of a token at the end of a full context: read on, and all read anew."""
    net = GPT(model).initialise(torch.Generator().manual_seed(0)).eval()
    tokens = torch.randint(model.vocab_size, (1, model.context))
    cache = Cache(model.context)

    def read_on() -> None:
        cache.length = model.context - 1
        net.logits(tokens[:, -1:], cache=cache)

    with torch.no_grad():
        net.logits(tokens[:, :-1], cache=cache)
        works = {
            "keys and values kept": read_on,
            "all read anew": lambda: net.logits(tokens, last=1),
            "... with the logits of all": lambda: net.logits(tokens),
        }
        return [(name, 1 / best_seconds(work, seconds)) for name, work in works.items()]


def priors(sizes: Sequence[int], tokens: int) -> list[tuple[int, str, float, float]]:
    """(members, fit, seconds, gap in nats) of the exact fit and the paper's, on one population.

    The rows imitate snapshots of a trajectory: losses on one text that keep nine tenths of their
    deviation from cycle to cycle, on a level that falls.
    """
    rng = np.random.default_rng(0)
    base = rng.gamma(2.0, 1.5, tokens)
    rows = []
    for members in sizes:
        drift = rng.normal(0, 0.4, (members, tokens))
        for member in range(1, members):
            drift[member] = 0.9 * drift[member - 1] + np.sqrt(1 - 0.9**2) * drift[member]
        level = 0.3 * np.exp(-np.arange(members) / 8)[:, None]
        P = np.exp(-np.maximum(base + drift + level, 1e-3)).astype(np.float32)
        for method in ("exact", "adamw"):
            started = time.perf_counter()
            fit = prior.fit_prior(P, method)
            rows.append((members, method, time.perf_counter() - started, fit.gap))
    return rows


def footprints(study: config.Preset) -> Iterator[tuple[str, float, float]]:
    """(what, bytes as counted, bytes as measured) at the peak of training: of the preset's q0 and
    ensemble, and on a CPU of the shapes of preset gpu, shrunk."""
    runs = {f"{name}, {study.name}": study.run(name) for name in ("q0", "ensemble")}
    if runs[f"q0, {study.name}"].runtime.device == "cpu" or not torch.cuda.is_available():
        for changes in SHRUNK:
            one = presets.load("gpu", overrides=[*SMALLER, *changes])
            words, rows = one.model.vocab_size, one.runtime.micro_batch
            runs[f"q0, gpu shrunk, {words} words, {rows} rows"] = one.run("q0")
    else:
        torch.cuda.empty_cache()  # what this process still holds is no room for another
    for name, run in runs.items():
        run = memory.fitted(dataclasses.replace(
            run, runtime=dataclasses.replace(run.runtime, compile=False)
        ))  # fmt: skip
        yield name, memory.training(run, run.method.teacher == "chain"), peaks.training(run)


def _report_training(study: config.Preset, peak: float, seconds: float) -> None:
    """Tokens per second and model FLOPs against the peaks; on a GPU also uncompiled, and memory."""
    on_gpu = torch.cuda.is_available()
    name = torch.cuda.get_device_name() if on_gpu else ""
    nominal = next((rate for part, rate in NOMINAL.items() if part in name), None)
    variants = [study]
    if on_gpu and study.runtime.compile:
        how = dataclasses.replace(study.runtime, compile=False)
        variants.append(dataclasses.replace(study, runtime=how))
    for variant in variants:
        run = memory.fitted(variant.run("q0"))
        rows = run.runtime.micro_batch or run.method.batch_tokens // run.model.context
        print(f"  {'compiled' if run.runtime.compile else 'as it is'}, {rows} rows at a time")
        if on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        for what, tokens, flops in training(variant, seconds):
            of_nominal = f"{flops / nominal:>8.0%} of nominal" if nominal else ""
            print(f"  {what:<26}{tokens:>10,.0f} tokens/s{flops / peak:>8.0%}{of_nominal}")
        if on_gpu:
            print(f"  peak memory {torch.cuda.max_memory_reserved() / GIB:.1f} GiB")
    if not on_gpu:
        print("  (compiled or not, peak memory of a device, share of its nominal: need CUDA)")


def _report_reading(members: Sequence[int], tokens: int) -> None:
    print(f"\na population on disk, {peaks.FITNESS:,} fitness and {tokens:,} test tokens")
    with tempfile.TemporaryDirectory() as folder:
        peaks.simulated(Path(folder), max(members), tokens)
        for count in members:
            opening, fitting, mixing, peak = peaks.reading(Path(folder), count)
            disk = 4e-9 * count * (tokens + peaks.FITNESS)
            print(
                f"  {count:>4} members  {disk:>5.2f} GB on disk  opened {opening:>6.1f} s  fitted "
                f"{fitting:>6.1f} s  mixed {mixing:>6.1f} s  peak {peak / 1e9:.2f} GB"
            )


def report(study: config.Preset, seconds: float, large: bool = False) -> None:
    """Print everything, a section at a time."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if study.precision == "bf16" else torch.float32
    made = provenance.provenance()
    print(f"{made['processor']}, torch {torch.__version__}, {torch.get_num_threads()} thread(s)")
    peak = matmul_peak(dtype, device, seconds)
    print(f"\nmatrix product, {study.precision}: {peak / 1e9:,.0f} GFLOP/s = 100%")
    print(f"\npreset {study.name}: {study.model}")
    _report_training(study, peak, seconds)
    tokens = min(study.methods["q0"].batch_tokens, 16 * study.model.context)
    print(f"\nforward and backward of {tokens:,} tokens")
    for name, milliseconds in choices(study.model, tokens, device, seconds / 4):
        print(f"  {name:<42}{milliseconds:>8.2f} ms")
    if device.type == "cpu":
        print("  (attention in a window by flex_attention: needs CUDA)")
    print("\nmemory at the peak of training, uncompiled: counted and measured")
    for name, counted, measured in footprints(study):
        print(f"  {name:<42}{counted / GIB:>8.3f} GiB{measured / GIB:>8.3f} GiB")
    print(f"\ngenerating on a CPU, at the end of {study.model.context} tokens")
    for name, rate in generating(study.model, seconds / 4):
        print(f"  {name:<42}{rate:>8,.0f} tokens/s")
    print("\nprior, 132,000 fitness tokens")
    for members, method, took, gap in priors((32, 128), 132_000):
        print(f"  {members:>4} members  {method:<6}{took:>8.2f} s   gap {gap:.0e} nats")
    _report_reading((30, 120, 480), 10_000_000 if large else 200_000)
    print("\nwhat a run of each preset needs (estimated; evaluation not counted)")
    for name in presets.NAMES:
        each = presets.load(name)
        for method in ("q0", "ensemble"):
            run = each.run(method)
            need = train.estimate(run)
            print(
                f"  {name:<6}{method:<9}{run.epochs:>4g} epochs  {need['parameters']:>14,.0f} "
                f"parameters  {need['flops']:.1e} FLOPs  {_fitting(run)}"
            )


def _fitting(run: config.Run) -> str:
    """The memory that training takes; of the larger presets by the card that it is fitted to."""
    if run.preset in ("quick", "cpu"):
        return f"{memory.training(run) / GIB:.2f} GiB"
    run = dataclasses.replace(run, runtime=dataclasses.replace(run.runtime, device="cuda"))
    said = []
    for card in (24, 80, 141):
        one = memory.with_micro_batch(run, card * GIB)
        need, rows = memory.training(one) / GIB, one.runtime.micro_batch
        said.append(f"{need:.0f} GiB in {rows}s" if need < card else "too much")
        said[-1] += f" of {card}"
    return ", ".join(said)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns its exit status."""
    parser = command.parser("q0lib.bench", __doc__ or "")
    parser.add_argument("--preset", default="cpu", help="default: cpu")
    parser.add_argument("--seconds", type=float, default=3.0, help="for each figure (default 3)")
    parser.add_argument("--large", action="store_true", help="read 480 x 10M test tokens: minutes")
    given = parser.parse_args(argv)

    def work() -> None:
        if not given.seconds > 0:
            raise ValueError(f"seconds must be > 0, got {given.seconds:g}")
        study = presets.load(given.preset)
        torch.set_num_threads(study.runtime.threads or torch.get_num_threads())
        report(study, given.seconds, given.large)

    return command.status(parser.prog, work)


if __name__ == "__main__":
    sys.exit(main())
