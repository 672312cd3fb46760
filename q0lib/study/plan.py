"""The measured study as a list of runs: what each is, and what it is for.

A *part* is the runs behind one notebook. Runs that share a directory (a budget that is the prefix
of a longer one) are trained once. `campaign` trains them.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from q0lib import allocation, config, presets

PARTS = (
    "tuning", "main", "splits", "ablation", "reference", "reference_sizes", "tuned_reference",
    "small",
)  # fmt: skip
# What is chosen by one seed is trained for one alone.
ONE_SEED = ("tuning", "splits", "reference_sizes", "tuned_reference")
FULL = "full recipe"  # the ablations' own reference: q0 as the preset has it
UNDISTILLED = "no distillation"
UNDISTILLED_LONGER = "cycles of 4 epochs, no distillation"
TEACHERS = (UNDISTILLED, "teacher every second cycle", UNDISTILLED_LONGER)  # the rest is the cycle


@dataclass(frozen=True)
class Extent:
    """How far the study goes at one preset; lengths in epochs."""

    budgets: tuple[float, ...]  # at which the curves have points
    q0: tuple[tuple[int, float], ...]  # trajectories, and how long each is
    ensemble: float
    splits: dict[float, str]  # epochs a member, beside the preset's, and the fields tuned for it
    single: tuple[float, ...]
    ablation: tuple[float, ...]  # where variants are compared; they are trained to the last
    small: dict[float, dict[str, str]]  # budgets, and the fields tuned for a method there
    multiples: tuple[int, ...]  # of the training tokens, for the one-epoch reference
    sizes: dict[str, tuple[str, ...]]  # ... of these models
    recipe: tuple[str, ...]  # ... all trained like this
    recipes: tuple[str, ...] = ()  # ... and the last of them like this too, fields of `single`
    # Where the last of the sizes is known to be the best, at every multiple of one seed: as far as
    # this one, beyond what any method is worth, other seeds train it alone. 0: not known.
    settled_to: int = 0
    trials: tuple[tuple[str, float, str], ...] = ()  # that fixed the preset: method, epochs, fields


_MULTIPLES = (1, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20)
_SMALL: dict[float, dict[str, str]] = {1: {}, 2: {}, 4: {}, 8: {}}


def _size(width: int, layers: int, heads: int) -> dict[str, tuple[str, ...]]:
    shape = {"width": width, "layers": layers, "heads": heads}
    return {f"width {width}": tuple(f"model.{name}={n}" for name, n in shape.items())}


# One seed, judged on validation: q0 by its learned mixture, an ensemble by its uniform one. What
# a field is where a trial does not name it, the preset says.
_NOISE = "perturb_start=0.25 perturb_end=0.05"  # the paper's
_CPU_TRIALS = (
    *(("q0", epochs, f"{fields} dropout=0.1 {_NOISE}") for epochs, fields in (
        (128, "weight_decay=0.7"), (64, "weight_decay=1.0"), (64, "weight_decay=0.5"),
        (32, "matrix_lr=0.055"), (32, "matrix_lr=0.03"), (32, "batch_tokens=1024"),
        (32, "alpha=0.6"), (32, "alpha=0.3"), (64, "teacher=none"), (32, "temperature=1.0"),
        (32, "distill_after=8"),
    )),
    *(("q0", epochs, fields) for epochs, fields in (
        (32, f"dropout=0.0 {_NOISE}"), (32, "dropout=0.1 perturb_start=0.1 perturb_end=0.05"),
        (128, "dropout=0.1 perturb_start=0 perturb_end=0"),
        (64, "dropout=0.0 perturb_start=0.1 perturb_end=0.05"),
        (64, "dropout=0.0 perturb_start=0.1 perturb_end=0.05 weight_decay=1.0"),
        (128, "dropout=0.0 perturb_start=0 perturb_end=0"),
        (64, "dropout=0.0 perturb_start=0 perturb_end=0 matrix_lr=0.03"),
    )),
    *(("ensemble", total, f"epochs_per_cycle={each} matrix_lr={lr} weight_decay={decay}{more}")
      for total, each, lr, decay, more in (
        (64, 8, 0.03, 0.7, ""), (64, 8, 0.03, 0.2, " batch_tokens=1024"),
        (64, 8, 0.02, 0.1, " batch_tokens=512"), (64, 16, 0.03, 0.5, ""), (256, 16, 0.03, 0.7, ""),
        (64, 16, 0.03, 1.0, ""), (64, 16, 0.03, 1.5, ""), (32, 16, 0.045, 1.0, ""),
        (48, 16, 0.02, 0.7, ""), (48, 16, 0.03, 0.7, " batch_tokens=1024"),
        (48, 16, 0.03, 0.7, " dropout=0.1"), (128, 32, 0.03, 0.8, ""), (256, 32, 0.03, 1.0, ""),
        (256, 32, 0.03, 1.3, ""), (256, 32, 0.02, 1.0, ""), (128, 32, 0.02, 1.3, ""),
        (128, 32, 0.014, 1.4, ""),
    )),
    *(("single", 32, f"weight_decay={value}") for value in (1.0, 1.3, 2.0)),
    # The recipe of the one-epoch reference, at ten times the tokens.
    *(("single", 1, f"corpus.train_tokens=500000 {fields}") for fields in (
        "batch_tokens=1024 weight_decay=1.0", "batch_tokens=1024 weight_decay=0.3",
        "batch_tokens=1024 weight_decay=0.1", "batch_tokens=1024 weight_decay=0.03",
        "batch_tokens=1024 weight_decay=0.01",
        "batch_tokens=1024 weight_decay=0.03 matrix_lr=0.02",
        "batch_tokens=1024 weight_decay=0.01 matrix_lr=0.045",
        "batch_tokens=2048 weight_decay=0.1", "batch_tokens=2048 weight_decay=0.03",
        "batch_tokens=512 weight_decay=1.0", "batch_tokens=512 weight_decay=0.3",
        "batch_tokens=512 weight_decay=0.3 matrix_lr=0.02",
        "batch_tokens=512 weight_decay=0.1 matrix_lr=0.02",
        "batch_tokens=512 weight_decay=0.03 matrix_lr=0.02",
        "batch_tokens=512 weight_decay=0.01 matrix_lr=0.02",
    )),
    # The recipes of budgets of a few epochs.
    *(("single", epochs, f"batch_tokens={batch} weight_decay={decay} matrix_lr={lr}")
      for epochs, batch, decay, lr in (
        (1, 256, 0.1, 0.014), (1, 256, 0.03, 0.014), (1, 256, 0.03, 0.02), (1, 256, 0.03, 0.03),
        (1, 512, 0.03, 0.02), (2, 256, 0.03, 0.02), (2, 256, 0.03, 0.03), (2, 256, 0.1, 0.02),
        (4, 512, 0.1, 0.03), (4, 1024, 0.1, 0.04), (8, 1024, 0.3, 0.04), (8, 1024, 0.2, 0.03),
        (8, 1024, 0.3, 0.02),
        (2, 2048, 1.3, 0.03), (2, 2048, 0.1, 0.03), (2, 1024, 0.3, 0.03), (2, 1024, 0.1, 0.03),
        (2, 512, 0.3, 0.02), (2, 512, 0.1, 0.02), (2, 512, 0.03, 0.02), (2, 256, 0.1, 0.014),
        (2, 256, 0.03, 0.014), (4, 1024, 0.3, 0.03), (4, 1024, 0.1, 0.03), (4, 512, 0.1, 0.02),
        (8, 2048, 1.3, 0.03), (8, 2048, 0.1, 0.03), (8, 1024, 0.5, 0.03), (8, 1024, 0.3, 0.03),
        (8, 1024, 0.1, 0.03), (8, 512, 0.3, 0.02), (8, 512, 0.1, 0.02), (8, 512, 0.03, 0.02),
        (8, 256, 0.1, 0.014),
    )),
    *(("q0", epochs, f"epochs_per_cycle={each} batch_tokens={batch} weight_decay={decay} "
                     f"matrix_lr={lr}{more}")
      for epochs, each, batch, decay, lr, more in (
        (1, 0.5, 512, 0.07, 0.028, ""), (1, 0.5, 256, 0.07, 0.02, ""),
        (1, 0.5, 256, 0.07, 0.03, ""), (2, 1, 256, 0.07, 0.03, ""),
        (2, 1, 2048, 0.7, 0.04, ""), (2, 1, 1024, 0.7, 0.04, ""), (2, 1, 1024, 0.2, 0.04, ""),
        (2, 1, 1024, 0.2, 0.04, " dropout=0"), (2, 1, 512, 0.2, 0.028, ""),
        (2, 1, 512, 0.07, 0.028, ""), (2, 1, 256, 0.2, 0.02, ""), (2, 1, 256, 0.07, 0.02, ""),
        (4, 2, 512, 0.1, 0.028, ""), (8, 2, 2048, 0.7, 0.04, ""), (8, 2, 2048, 0.3, 0.04, ""),
        (8, 2, 1024, 0.7, 0.04, ""), (8, 2, 1024, 0.2, 0.04, ""),
        (8, 2, 1024, 0.2, 0.04, " dropout=0"), (8, 2, 1024, 0.1, 0.04, ""),
        (8, 2, 512, 0.2, 0.028, ""), (8, 2, 512, 0.07, 0.028, ""), (8, 2, 256, 0.2, 0.02, ""),
    )),
    *(("ensemble", epochs, f"epochs_per_cycle={each} batch_tokens={batch} weight_decay={decay} "
                           f"matrix_lr={lr}")
      for epochs, each, batch, decay, lr in (
        (2, 1, 2048, 1.0, 0.02), (2, 1, 1024, 0.3, 0.02), (2, 1, 512, 0.2, 0.014),
        (2, 1, 512, 0.1, 0.02), (2, 1, 256, 0.1, 0.014), (2, 1, 256, 0.03, 0.02),
        (2, 1, 256, 0.03, 0.03), (4, 2, 1024, 0.1, 0.03), (4, 2, 512, 0.1, 0.02),
        (4, 2, 512, 0.1, 0.03), (4, 2, 256, 0.1, 0.014), (4, 2, 256, 0.1, 0.02),
        (8, 4, 2048, 1.0, 0.02), (8, 4, 1024, 0.3, 0.02), (8, 4, 1024, 0.1, 0.03),
        (8, 4, 1024, 0.3, 0.03), (8, 4, 512, 0.2, 0.014), (8, 4, 512, 0.1, 0.02),
        (8, 4, 512, 0.1, 0.03), (8, 4, 256, 0.1, 0.014),
    )),
)  # fmt: skip

_CPU_SMALL: dict[float, dict[str, str]] = {
    1: {"single": "batch_tokens=256 weight_decay=0.03 matrix_lr=0.02",
        "q0": "batch_tokens=256 weight_decay=0.07 matrix_lr=0.03"},
    2: {"single": "batch_tokens=256 weight_decay=0.03 matrix_lr=0.02",
        "q0": "batch_tokens=256 weight_decay=0.07 matrix_lr=0.02",
        "ensemble": "batch_tokens=256 weight_decay=0.03 matrix_lr=0.02"},
    4: {"single": "batch_tokens=1024 weight_decay=0.1 matrix_lr=0.03",
        "q0": "batch_tokens=512 weight_decay=0.07 matrix_lr=0.028",
        "ensemble": "batch_tokens=256 weight_decay=0.1 matrix_lr=0.02"},
    8: {"single": "batch_tokens=1024 weight_decay=0.3 matrix_lr=0.02",
        "q0": "batch_tokens=1024 weight_decay=0.2 matrix_lr=0.04",
        "ensemble": "batch_tokens=512 weight_decay=0.1 matrix_lr=0.03"},
}  # fmt: skip

EXTENTS = {
    "quick": Extent(
        budgets=(1, 2, 4, 8, 16, 24, 32, 48), q0=((1, 48),), ensemble=48,
        splits={8: ""}, single=(1, 2, 4, 8, 16, 32), ablation=(16, 32),
        small=_SMALL, multiples=_MULTIPLES[:6],
        sizes=_size(64, 2, 2) | _size(96, 3, 3) | _size(128, 4, 4),
        recipe=("single.weight_decay=0.03",),
    ),
    "cpu": Extent(
        budgets=(1, 2, 4, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160,
                 192, 224, 256, 288, 320, 384, 448, 512),
        q0=((4, 128),), ensemble=256,
        splits=dict.fromkeys((8, 16), "weight_decay=0.7 matrix_lr=0.03"),
        single=(1, 2, 4, 8, 16, 32, 64), ablation=(32, 64, 128), small=_CPU_SMALL,
        multiples=_MULTIPLES,
        sizes=_size(96, 3, 3) | _size(128, 4, 4) | _size(192, 6, 6),
        recipe=("single.batch_tokens=1024", "single.weight_decay=0.01"),
        recipes=(
            "batch_tokens=512 weight_decay=0.01 matrix_lr=0.02",
            "batch_tokens=256 weight_decay=0.01 matrix_lr=0.014",
        ),
        settled_to=12,
        trials=_CPU_TRIALS,
    ),
    "gpu": Extent(
        budgets=(1, 2, 4, 8, 16, 24, 32, 48, 64), q0=((1, 64),), ensemble=64, splits={16: ""},
        single=(1, 2, 4, 8, 16, 32), ablation=(16, 32), small=_SMALL, multiples=_MULTIPLES,
        sizes=_size(384, 6, 6) | _size(768, 12, 6) | _size(1280, 20, 10), recipe=(),
    ),
    "paper": Extent(
        budgets=(1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256), q0=((2, 128),), ensemble=256,
        splits={16: ""}, single=(1, 2, 4, 8, 16, 32), ablation=(64, 128, 256), small=_SMALL,
        multiples=_MULTIPLES,
        recipe=("model.loop_start=0", "model.loop_end=0", "model.multi_token=false"),
        sizes=_size(768, 12, 6) | _size(1280, 20, 10) | _size(1664, 26, 13),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Experiment:
    """One line of the study: a method at a budget, as the preset has it but for `overrides`."""

    part: str
    label: str
    method: str
    epochs: float
    overrides: tuple[str, ...] = ()

    def run(self, preset: str, seed: int) -> config.Run:
        """The run behind it."""
        chosen = presets.load(preset, seed=seed, overrides=list(self.overrides))
        return chosen.run(self.method, self.epochs)


Trained = Sequence[tuple[Experiment, config.Run]]  # what was planned, and its run


def experiments(
    preset: str, parts: Sequence[str] = PARTS, methods: Sequence[str] | None = None
) -> list[Experiment]:
    """The experiments of a preset, part by part, of all methods or of some.

    Raises:
        ValueError: an unknown preset, part or method.
    """
    base = presets.load(preset)
    extent = EXTENTS[preset]
    known = {"tuning": _tuning, "main": _main, "splits": _splits, "ablation": _ablations,
             **dict.fromkeys(("reference", "reference_sizes", "tuned_reference"), _reference),
             "small": _small}  # fmt: skip
    for part in parts:
        if part not in known:
            raise ValueError(f"unknown part {part!r}, known: {', '.join(known)}")
    for method in methods or ():
        if method not in base.methods:
            raise ValueError(f"unknown method {method!r}, known: {', '.join(base.methods)}")
    found = [each for part in parts for each in known[part](extent, base) if each.part == part]
    return [each for each in found if methods is None or each.method in methods]


def _main(extent: Extent, base: config.Preset) -> list[Experiment]:
    return [
        Experiment("main", "ensemble", "ensemble", extent.ensemble),
        *(Experiment("main", "q0", "q0", count * epochs, (f"q0.trajectories={count}",))
          for count, epochs in extent.q0),
        Experiment("main", "distilled_ensemble", "distilled_ensemble", extent.ensemble),
        *(Experiment("main", "single", "single", epochs) for epochs in extent.single),
    ]  # fmt: skip


def _tuning(extent: Extent, base: config.Preset) -> list[Experiment]:
    found = []
    for method, epochs, fields in extent.trials:
        named = [(field, field.partition("=")[0]) for field in fields.split()]
        changed = tuple(field if "." in name else f"{method}.{field}" for field, name in named)
        if method == "q0":
            changed = ("q0.trajectories=1", *changed)
        found.append(Experiment("tuning", fields, method, epochs, changed))
    return found


def _splits(extent: Extent, base: config.Preset) -> list[Experiment]:
    all_splits = {base.methods["ensemble"].epochs_per_cycle: "", **extent.splits}
    found = []
    for epochs, fields in sorted(all_splits.items()):
        changed = [f"ensemble.{each}" for each in (f"epochs_per_cycle={epochs:g}", *fields.split())]
        label = f"{extent.ensemble / epochs:g} models x {epochs:g} epochs"
        found.append(Experiment("splits", label, "ensemble", extent.ensemble, tuple(changed)))
    return found


def _ablations(extent: Extent, base: config.Preset) -> list[Experiment]:
    q0 = base.methods["q0"]

    def length(epochs: float) -> tuple[str, ...]:  # noise and teacher keep their place in epochs
        cycles = q0.epochs_per_cycle / epochs
        return (f"q0.epochs_per_cycle={epochs:g}", f"q0.horizon={round(q0.horizon * cycles)}",
                f"q0.distill_after={round(q0.distill_after * cycles)}")  # fmt: skip

    noise, fields = "no perturbation", "perturb_start=0 perturb_end=0"
    if not q0.perturb_start:
        noise, fields = "the paper's perturbation", _NOISE
    changes = {
        FULL: (),
        UNDISTILLED: ("q0.teacher=none",),
        "teacher every second cycle": ("q0.teacher_every=2",),
        "flat weight decay": ("q0.wd_schedule=flat",),
        "weight decay in phase": ("q0.wd_schedule=in_phase",),
        noise: tuple(f"q0.{field}" for field in fields.split()),
        "cycles of 1 epoch": length(1),
        "cycles of 4 epochs": length(4),
        UNDISTILLED_LONGER: (*length(4), "q0.teacher=none"),
        "EMA in the cycle": ("q0.ema_fraction=0.5",),
    }
    last = max(extent.ablation)
    # A third longer, so that it can be read where it has cost as much as the full recipe.
    longer = math.ceil(4 / 3 * last / q0.epochs_per_cycle) * q0.epochs_per_cycle
    return [
        Experiment("ablation", label, "q0", longer if label == UNDISTILLED else last,
                   ("q0.trajectories=1", *changed))
        for label, changed in changes.items()
    ]  # fmt: skip


def _reference(extent: Extent, base: config.Preset) -> list[Experiment]:
    """One epoch on more and more tokens: the parts reference, reference_sizes, tuned_reference."""
    found = []
    last = list(extent.sizes)[-1]
    for multiple, (size, model) in itertools.product(extent.multiples, extent.sizes.items()):
        settled = size == last and multiple <= extent.settled_to
        part = "reference" if settled or not extent.settled_to else "reference_sizes"
        label = f"{size}, {multiple}x tokens"
        shape = (f"corpus.train_tokens={multiple * base.corpus.train_tokens}", *model)
        found.append(Experiment(part, label, "single", 1.0, (*shape, *extent.recipe)))
        for fields in extent.recipes if settled else ():
            changed = (*shape, *(f"single.{field}" for field in fields.split()))
            named = f"{label}, {fields}"
            found.append(Experiment("tuned_reference", named, "single", 1.0, changed))
    return found


def _small(extent: Extent, base: config.Preset) -> list[Experiment]:
    found = []
    for epochs, tuned in extent.small.items():
        tau = min(base.methods["q0"].epochs_per_cycle, epochs / 2)
        shapes = [
            ("one model", "single", ()),
            ("one model, snapshots in its tail", "tail", (f"tail={allocation.tail(epochs):.6g}",)),
            ("one cycle", "q0", ("trajectories=1", f"epochs_per_cycle={epochs:g}")),
            ("cycles", "q0", ("trajectories=1", f"epochs_per_cycle={tau:g}")),
            *((f"models of {each:g} epochs", "ensemble", (f"epochs_per_cycle={each:g}",))
              for each in (epochs / 4, epochs / 2) if each >= 1),
        ]  # fmt: skip
        found += [
            Experiment("small", label, method, epochs,
                       tuple(f"{method}.{each}" for each in
                             (*shape, *tuned.get(method.replace("tail", "single"), "").split())))
            for label, method, shape in shapes
        ]  # fmt: skip
    return found
