"""What fits a text and a machine: the training tokens are the one dial, everything follows them.

Four presets stand on a ladder: quick (16K training tokens), cpu (50K), gpu (20M), paper (100M).
A text between two of them gets each size and each hyper-parameter between theirs, in proportion to
the logarithm of the tokens: geometrically where both are positive, else linearly. What is no
number, or is switched off in the lower one, is the lower one's. So at a preset's own tokens the
proposal is that preset.

What stands behind it, and what does not. Quick and cpu were tuned on validation (learning rates,
weight decay, batch, dropout, noise: data/results/{quick,cpu}/tuning.csv), paper holds the
published values, and gpu takes those of paper in its methods. Between 50K and 20M tokens *nothing*
was measured but one epoch of three sizes, where the largest won from 50K to 1M tokens
(data/results/cpu/reference.csv): that models should grow with the text is seen, how fast is not.

Epochs: more have always been worth having (cpu, seed 0: q0 has 4.57, 4.46, 4.41, 4.39 nats on test
after 16, 32, 64, 128 epochs), but fresh text is worth more (twice the text: 0.24 to 0.40 nats,
data_efficiency.csv). So all of the text is used if 32 epochs of it fit the hours, else a part; what
time is left buys epochs. The student reads 24 epochs, 16 where time is short (4.421 and 4.432 on
test at cpu, two seeds, by an earlier recipe). The single model gets what a member of the tuned
ensemble gets, 16 epochs at quick, 32 from cpu on: after 64 it is worse (4.67 against 4.60). A
population has no more members than its fitness text has hundreds of tokens: freely fitted weights
would lose there what they gain.
"""

import dataclasses
import functools
import itertools
import math
from dataclasses import dataclass
from typing import Any

from q0lib import allocation, config, lessons, presets
from q0lib.corpus import HELD_OUT
from q0lib.model import forward_flops
from q0lib.prior import TOKENS_PER_MEMBER
from q0lib.train import estimate

LEAST = 2_048  # training tokens: with fewer there is nothing to see
# (epochs of q0, epochs of the student), from the least to the most that hours are spent on.
RECIPES = (
    (32, 16), (32, 24), (48, 24), (64, 24), (96, 24), (128, 24), (192, 24), (256, 24),
)  # fmt: skip
SHORTEST = 64  # context
PACKINGS = 4  # orders of the text that a student's lessons are kept for
KEPT_BYTES = lessons.MOST_BYTES // 4  # ... of each at most
SHARE = 0.85  # of the hours that is planned for; the rest is for what the measuring did not see
# Factors on matrix_lr and weight_decay that are tried beside the proposal, when asked to tune.
TRIALS = ((0.6, 1.0), (1.0, 0.6), (1.0, 1.5))


@dataclass(frozen=True)
class Machine:
    """What there is to train on: `memory` in bytes, of the device, that training may take."""

    device: str
    name: str
    cores: int
    memory: float
    threads: int = 1


@dataclass(frozen=True)
class Speed:
    """FLOP/s of training, of training with a teacher, and of evaluation."""

    training: float
    taught: float
    evaluation: float


@dataclass(frozen=True)
class Wish:
    """What the reader asks for: `k` members teach the student; `vocabulary` is that of a tokenizer
    that is there, 0 lets it follow the tokens."""

    hours: float
    k: int = 8
    tune: bool = False
    baseline: bool = True
    vocabulary: int = 0


@dataclass(frozen=True)
class Stage:
    """One thing to be done: its FLOPs (teachers included) and seconds, evaluation too."""

    name: str
    epochs: float
    flops: float
    seconds: float


@dataclass(frozen=True)
class Proposal:
    """A study of the reader's text: how large, how long, and what it costs."""

    study: config.Preset
    epochs: int  # of q0
    student_epochs: int
    single_epochs: int  # 0: no baseline
    k: int  # members that teach the student
    trial_epochs: int  # of each trial; 0: no tuning
    stages: tuple[Stage, ...]
    # Above 0 only a part of the text can be read 32 times, and the single model reads so many
    # tokens once instead.
    single_tokens: int = 0

    @property
    def seconds(self) -> float:
        return sum(stage.seconds for stage in self.stages)

    @property
    def flops(self) -> float:
        return sum(stage.flops for stage in self.stages)


# --- the dial ----------------------------------------------------------------------------------


@functools.cache
def _ladder() -> tuple[config.Preset, ...]:
    return tuple(presets.load(name) for name in presets.NAMES)


def place(tokens: int) -> tuple[config.Preset, config.Preset, float]:
    """The presets on both sides of so many tokens, and how far they lie between, from 0 to 1."""
    steps = list(itertools.pairwise(_ladder()))
    low, high = next((s for s in steps if tokens <= s[1].corpus.train_tokens), steps[-1])
    span = math.log(high.corpus.train_tokens / low.corpus.train_tokens)
    return low, high, min(1.0, max(0.0, math.log(tokens / low.corpus.train_tokens) / span))


def scaled(tokens: int, vocabulary: int = 0) -> config.Preset:
    """The preset for so many training tokens, of a text of one's own.

    `vocabulary` is that of a tokenizer which is there; 0 lets it follow the tokens, for one to be
    trained. Below quick's tokens everything is quick's but the splits, which shrink with them;
    above paper's all is paper's.
    """
    low, high, share = place(tokens)
    between = functools.partial(_between, share=share)
    context = 2 ** round(math.log2(between(low.model.context, high.model.context)))
    words = vocabulary or (high if share == 1 else low).corpus.vocab_size
    if not vocabulary and 0 < share < 1:
        words = _whole(between(low.corpus.vocab_size, high.corpus.vocab_size), 64)
    splits = {f"{split}_tokens": between(getattr(low.corpus, f"{split}_tokens"),
                                         getattr(high.corpus, f"{split}_tokens"))
              for split in HELD_OUT}  # fmt: skip
    below = min(1.0, tokens / low.corpus.train_tokens)
    sizes = {split: max(context + 1, round(below * size)) for split, size in splits.items()}
    corpus = config.Corpus(vocab_size=words, train_tokens=tokens, **sizes)
    models = low.model, high.model
    head = 2 ** round(math.log2(between(*(m.width / m.heads for m in models))))
    width = _whole(between(low.model.width, high.model.width), head)
    model = _mixed(low.model, high.model, share) | {
        "vocab_size": 64 * math.ceil(words / 64),
        "context": context,
        "width": width,
        "heads": width // head,
        "mlp_multiple": 2 ** round(math.log2(between(*(m.mlp_multiple for m in models)))),
    }
    methods = {
        name: config.Method(**_mixed(low.methods[name], high.methods[name], share))
        for name in low.methods
    }
    for name, method in methods.items():
        batches = {
            batch: context * max(1, round(getattr(method, batch) / context))
            for batch in ("batch_tokens", "edge_batch_tokens")
            if getattr(method, batch)
        }
        methods[name] = dataclasses.replace(method, **batches)
    return config.Preset("own", corpus, config.Model(**model), methods, RECIPES[0][0])


def _between(low: float, high: float, share: float) -> float:
    if low > 0 and high > 0:
        return low * (high / low) ** share
    return low + (high - low) * share


def _whole(size: float, multiple: int) -> int:
    """The nearest multiple of `multiple`, at least one."""
    return multiple * max(1, round(size / multiple))


def _mixed(low: Any, high: Any, share: float) -> dict[str, Any]:
    """The fields of two configs of a kind, mixed."""
    mixed = dataclasses.asdict(high if share == 1 else low)
    if 0 < share < 1:
        for name, value in mixed.items():
            other = getattr(high, name)
            if isinstance(value, float):
                mixed[name] = float(f"{_between(value, other, share):.3g}")
            elif type(value) is int and value > 0:
                mixed[name] = max(1, round(_between(value, other, share)))
    return mixed


def single_epochs(tokens: int) -> int:
    """The budget of one model alone: that of a member of the tuned ensemble, in whole pairs."""
    return 2 * round(scaled(tokens).methods["ensemble"].epochs_per_cycle / 2)


# --- what fits ---------------------------------------------------------------------------------


def propose(
    tokens: int, held_out: dict[str, int], machine: Machine, speed: Speed, wish: Wish
) -> Proposal:
    """The largest study of a text that fits the machine and the hours.

    `tokens` and `held_out` (by split) say how many the text has for each. Where the hours are too
    few for all of it, the first part of it in a fixed random order is used.

    Raises:
        ValueError: hours too few for the smallest study, or memory for any.
    """

    def fits(one: Proposal) -> bool:
        return one.seconds <= SHARE * 3600 * wish.hours and memory(one) <= machine.memory

    most = min(tokens, _ladder()[-1].corpus.train_tokens)
    fitness = min(held_out["fitness"], scaled(most).corpus.fitness_tokens)
    for recipe in reversed(RECIPES):
        scarce = recipe[0] // 2 * TOKENS_PER_MEMBER > fitness and recipe[0] > RECIPES[0][0]
        if not scarce and fits(one := costed(most, recipe, held_out, machine, speed, wish)):
            return one
    least = min(LEAST, most)
    steps = (least * (most / least) ** (step / 100) for step in range(100))
    sizes = sorted({least, *(int(float(f"{size:.2g}")) for size in steps)})
    found = [costed(size, RECIPES[0], held_out, machine, speed, wish) for size in sizes]
    if fitting := [one for one in found if fits(one)]:
        return _one_pass(fitting[-1], most)
    if memory(found[0]) > machine.memory:
        raise ValueError(
            f"{machine.memory / 2**30:.2f} GiB of memory are too few: the smallest study of this "
            f"text takes {memory(found[0]) / 2**30:.2f}"
        )
    raise ValueError(
        f"hours must be at least {found[0].seconds / SHARE / 3600:.2g} for this text on this "
        f"machine ({RECIPES[0][0]} epochs of {least:,} tokens), got {wish.hours:g}"
    )


def _one_pass(one: Proposal, most: int) -> Proposal:
    """The study, whose single model reads more text once, for what its epochs would have cost."""
    planned = one.single_epochs * one.study.corpus.train_tokens
    tokens = min(most, planned)
    stages = tuple(
        Stage(each.name, 1, each.flops * tokens / planned, each.seconds * tokens / planned)
        if each.name == "single model"
        else each
        for each in one.stages
    )
    changes = {"single_epochs": 1, "single_tokens": tokens, "stages": stages}
    return dataclasses.replace(one, **changes) if planned else one  # type: ignore[arg-type]


def single(one: Proposal) -> config.Run:
    """The single model of a study: the baseline, or one pass over more text, by the recipe that
    the study's one-epoch reference has (half the batch, weight decay 0.01: plans/cpu.toml)."""
    study = one.study
    if not one.single_tokens:
        return study.run("single", one.single_epochs)
    context, method = study.model.context, study.methods["single"]
    batch = context * max(1, method.batch_tokens // (2 * context))
    method = dataclasses.replace(method, batch_tokens=batch, weight_decay=0.01)
    text = dataclasses.replace(study.corpus, train_tokens=one.single_tokens)
    return dataclasses.replace(study, corpus=text, methods={"single": method}).run("single", 1)


def costed(
    tokens: int,
    recipe: tuple[int, int],
    held_out: dict[str, int],
    machine: Machine,
    speed: Speed,
    wish: Wish,
) -> Proposal:
    """The study of so many tokens by one of the `RECIPES`, with its cost."""
    epochs, student_epochs = recipe
    study = _study(tokens, recipe, held_out, machine, wish)
    k, single = min(wish.k, epochs // 2), single_epochs(tokens) if wish.baseline else 0
    forward = forward_flops(study.model)
    scored = sum(getattr(study.corpus, f"{split}_tokens") for split in held_out) * forward

    def stage(name: str, run: config.Run, rate: float, lessons_of: float = 0.0) -> Stage:
        flops, members = estimate(run)["flops"], run.trajectories * run.cycles
        seconds = flops / rate + (lessons_of + members * scored) / speed.evaluation
        return Stage(name, run.epochs, flops + lessons_of, seconds)

    stages, trial_epochs = [], 0
    if wish.tune:
        trial_epochs = min(32, epochs // 2)
        one = stage("tuning", trial(study, trial_epochs), speed.taught)
        times = len(TRIALS)  # the proposal's own trial is a part of the population
        stages.append(
            Stage(one.name, *(times * each for each in (one.epochs, one.flops, one.seconds)))
        )
    stages.append(stage("population", study.run("q0", epochs), speed.taught))
    if single:
        stages.append(stage("single model", study.run("single", single), speed.training))
    orders = study.methods["student"].packings or student_epochs
    alike = study.run("single", student_epochs)  # but for what its teachers say
    stages.append(stage("student", alike, speed.training, orders * tokens * k * forward))
    return Proposal(study, epochs, student_epochs, single, k, trial_epochs, tuple(stages))


def _study(
    tokens: int, recipe: tuple[int, int], held_out: dict[str, int], machine: Machine, wish: Wish
) -> config.Preset:
    """The scaled preset on this text and machine: splits that are there, batches in parts that
    fit, lessons kept where they are small."""
    epochs, student_epochs = recipe
    study = scaled(tokens, wish.vocabulary)
    splits = {"train": tokens}
    for split, there in held_out.items():
        splits[split] = min(there, getattr(study.corpus, f"{split}_tokens"))
    context = study.model.context
    while context > SHORTEST and min(splits.values()) < 4 * context:
        context //= 2
    methods = dict(study.methods)
    methods["q0"] = dataclasses.replace(
        methods["q0"], trajectories=allocation.best_trajectories(epochs)
    )
    kept = 2 * tokens * study.model.vocab_size <= KEPT_BYTES and student_epochs > PACKINGS
    methods["student"] = dataclasses.replace(methods["student"], packings=PACKINGS * kept)
    cuda = machine.device.startswith("cuda")
    how = config.Runtime(
        device=machine.device, threads=machine.threads, compile=cuda, keep_weights=True,
        cache_lessons=kept,
    )  # fmt: skip
    sizes: dict[str, Any] = {f"{split}_tokens": size for split, size in splits.items()}
    study = dataclasses.replace(
        study,
        corpus=dataclasses.replace(study.corpus, **sizes),
        model=dataclasses.replace(study.model, context=context),
        methods=methods,
        epochs=epochs,
        runtime=how,
    )
    rows = max(method.batch_tokens for method in methods.values()) // context
    while rows > 1 and _taught_memory(study, wish.k) > machine.memory:
        rows = -(-rows // 2)
        study = dataclasses.replace(study, runtime=dataclasses.replace(how, micro_batch=rows))
    return study


def memory(proposal: Proposal) -> float:
    """Bytes on the device that the hungriest stage takes, roughly."""
    return _taught_memory(proposal.study, proposal.k)


def _taught_memory(study: config.Preset, k: int) -> float:
    need = estimate(study.run("q0"))
    return need["memory"] + 4 * k * need["parameters"]  # the student's teachers are fp32


def disk(proposal: Proposal) -> float:
    """Bytes on disk: every snapshot's weights, with two checkpoints, and the lessons kept."""
    study = proposal.study
    parameters = estimate(study.run("q0"))["parameters"]
    kept = 2 * study.corpus.train_tokens * study.model.vocab_size * PACKINGS
    members = proposal.epochs // 2 + 2 + 2 * 4
    return 4 * parameters * members + kept * study.runtime.cache_lessons


def trial(study: config.Preset, epochs: int, rate: float = 1.0, decay: float = 1.0) -> config.Run:
    """One trajectory of q0 with its matrix_lr and weight_decay scaled."""
    method = dataclasses.replace(tuned(study, rate, decay).methods["q0"], trajectories=1)
    return dataclasses.replace(study, methods={"q0": method}).run("q0", epochs)


def tuned(study: config.Preset, rate: float, decay: float) -> config.Preset:
    """The study with these factors on matrix_lr, of every method, and on weight_decay, of all but
    the student, whose own is small because its teachers hold it."""
    methods = {
        name: dataclasses.replace(
            method,
            matrix_lr=float(f"{rate * method.matrix_lr:.3g}"),
            weight_decay=method.weight_decay
            if method.teacher == "mixture"
            else float(f"{decay * method.weight_decay:.3g}"),
        )
        for name, method in study.methods.items()
    }
    return dataclasses.replace(study, methods=methods)
