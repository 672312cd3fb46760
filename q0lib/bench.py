"""Training speed against the machine's own matrix products, and the choices behind it.

    python -m q0lib.bench
    python -m q0lib.bench --preset quick --seconds 1

One process, one thread on a CPU: what a sweep gives each of its jobs. Every figure is the best of
several repeats, since other work on the machine only ever slows a repeat down.
"""

import dataclasses
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import tokenizers
import torch
import torch.nn.functional as F
from tokenizers.models import BPE

from q0lib import (
    command,
    config,
    corpus,
    distill,
    evaluate,
    files,
    presets,
    prior,
    provenance,
    train,
    trajectory,
)
from q0lib.model import GPT, Cache, attention, causal_mask, forward_flops


def best_seconds(work: Callable[[], object], budget: float) -> float:
    """Shortest of the repeats of `work` that fit into `budget` seconds (two at least)."""
    work()
    best, spent, repeats = float("inf"), 0.0, 0
    while spent < budget or repeats < 2:
        started = time.perf_counter()
        work()
        took = time.perf_counter() - started
        best, spent, repeats = min(best, took), spent + took, repeats + 1
    return best


def matmul_peak(dtype: torch.dtype, device: torch.device, seconds: float) -> float:
    """FLOP/s of a square matrix product, the yardstick."""
    size = 1024 if device.type == "cpu" else 8192
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))

    def work() -> None:
        torch.mm(a, b)
        if device.type == "cuda":
            torch.cuda.synchronize()

    return 2 * size**3 / best_seconds(work, seconds)


def training(study: config.Preset, seconds: float) -> list[tuple[str, float, float]]:
    """(what, tokens/s, FLOP/s) of training with and without a teacher, and of evaluation."""
    run = dataclasses.replace(study.run("q0"), seed=0)
    text = _noise(run)
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


def _noise(run: config.Run) -> corpus.Text:
    """Random tokens in place of a corpus: speed does not depend on what they say."""
    rng = np.random.default_rng(0)
    size = max(run.method.batch_tokens, 16 * run.model.context) * 2
    splits = {}
    for name in corpus.SPLITS:
        tokens = rng.integers(run.model.vocab_size, size=size).astype(np.uint32)
        splits[name] = corpus.Split(name, tokens, np.array([0]), "noise")
    return corpus.Text(run.corpus, splits, run.model.vocab_size, tokenizers.Tokenizer(BPE()))


def choices(model: config.Model, batch_tokens: int, seconds: float) -> list[tuple[str, float]]:
    """(what, milliseconds) forward and backward: ours, and what it stands in for."""
    rows, heads, width = batch_tokens // model.context, model.heads, model.width // model.heads
    q, k, v, grad = (
        torch.randn(rows, heads, model.context, width, dtype=torch.bfloat16, requires_grad=True)
        for _ in range(4)
    )
    hidden = torch.randn(batch_tokens, model.width, dtype=torch.bfloat16, requires_grad=True)
    head = torch.randn(model.vocab_size, model.width, requires_grad=True)
    targets = torch.randint(model.vocab_size, (batch_tokens,))
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

    mask = causal_mask(model.context, model.context, torch.bfloat16, torch.device("cpu"))
    works = {
        "attention, batched products (ours)": attend(attention, model.context),
        "attention, fused kernel": attend(
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)
        ),
        "attention, products by autograd": attend(
            lambda q, k, v: (q @ k.transpose(-1, -2) * width**-0.5 + mask).softmax(-1) @ v
        ),
        "head and loss, in chunks (ours)": fused(None),
        "head and loss, whole logits": whole(None),
        "head and distillation, in chunks (ours)": fused(lesson),
        "head and distillation, whole logits": whole(lesson),
    }
    return [(name, 1e3 * best_seconds(work, seconds)) for name, work in works.items()]


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


def reading(sizes: Sequence[int], tokens: int) -> list[tuple[int, float, float, float]]:
    """(members, GB on disk, seconds, peak GB in memory) of opening a population and mixing it.

    The rows are made up and each size is read by a process of its own, whose peak is its own.
    """
    found = []
    with tempfile.TemporaryDirectory() as folder:
        rng = np.random.default_rng(0)
        paths = [Path(folder, f"{member}.safetensors") for member in range(max(sizes))]
        for path in paths:
            files.save_tensors(path, {"test": -torch.from_numpy(rng.gamma(2, 1.5, tokens)).float()})
        for members in sizes:
            task = [sys.executable, "-c", _READ, *map(str, paths[:members])]
            said = subprocess.run(task, check=True, capture_output=True, text=True).stdout.split()
            found.append((members, 4e-9 * members * tokens, float(said[0]), float(said[1]) / 1e6))
    return found


_READ = """
import resource, sys, time
from pathlib import Path
import numpy as np
from q0lib import ensemble, files, rows
started = time.perf_counter()
P = rows.probabilities([files.open_tensors(Path(path))[0]["test"] for path in sys.argv[1:]])
ensemble.mixture_nll(np.full(len(P), 1 / len(P)), P)
took = time.perf_counter() - started
status = Path("/proc/self/status")
if status.exists():  # there ru_maxrss would include what the parent had used
    peak = status.read_text().partition("VmHWM:")[2].split()[0]
else:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(took, peak)
"""


def report(study: config.Preset, seconds: float) -> None:
    """Print everything, a section at a time."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if study.precision == "bf16" else torch.float32
    made = provenance.provenance()
    print(f"{made['processor']}, torch {torch.__version__}, {torch.get_num_threads()} thread(s)")
    peak = matmul_peak(dtype, device, seconds)
    print(f"\nmatrix product, {study.precision}: {peak / 1e9:.0f} GFLOP/s = 100%")
    print(f"\npreset {study.name}: {study.model}")
    for name, tokens, flops in training(study, seconds):
        print(f"  {name:<26}{tokens:>10,.0f} tokens/s{flops / peak:>8.0%}")
    if device.type == "cpu":
        print("\nforward and backward of one batch")
        batch = study.methods["q0"].batch_tokens
        for name, milliseconds in choices(study.model, batch, seconds / 4):
            print(f"  {name:<42}{milliseconds:>8.2f} ms")
    print(f"\ngenerating, at the end of {study.model.context} tokens")
    for name, tokens in generating(study.model, seconds / 4):
        print(f"  {name:<42}{tokens:>8,.0f} tokens/s")
    print("\nprior, 132,000 fitness tokens")
    for members, method, took, gap in priors((32, 128, 480), 132_000):
        print(f"  {members:>4} members  {method:<6}{took:>8.2f} s   gap {gap:.0e} nats")
    print("\nopening a population and mixing it, 1,000,000 test tokens")
    for members, disk, took, peak in reading((30, 120, 480), 1_000_000):
        print(f"  {members:>4} members  {disk:.2f} GB on disk{took:>8.2f} s   peak {peak:.2f} GB")
    print("\nwhat a run of each preset needs (estimated; evaluation not counted)")
    for name in presets.NAMES:
        each = presets.load(name)
        for method in ("q0", "ensemble"):
            run = each.run(method)
            need = train.estimate(run)
            print(
                f"  {name:<6}{method:<9}{run.epochs:>4g} epochs  {need['parameters']:>14,.0f} "
                f"parameters  {need['flops']:.1e} FLOPs  {need['memory'] / 2**30:>6.2f} GiB"
            )


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns its exit status."""
    parser = command.parser("q0lib.bench", __doc__)
    parser.add_argument("--preset", default="cpu", help="default: cpu")
    parser.add_argument("--seconds", type=float, default=3.0, help="for each figure (default 3)")
    given = parser.parse_args(argv)

    def work() -> None:
        if not given.seconds > 0:
            raise ValueError(f"seconds must be > 0, got {given.seconds:g}")
        study = presets.load(given.preset)
        torch.set_num_threads(study.runtime.threads or torch.get_num_threads())
        report(study, given.seconds)

    return command.status(parser.prog, work)


if __name__ == "__main__":
    sys.exit(main())
