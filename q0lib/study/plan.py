"""The measured study as a list of runs: what each is, and what it is for.

A *part* is the runs behind one notebook. Runs that share a directory (a budget that is the prefix
of a longer one) are trained once. `runs` trains them. How far it goes at a preset is data, in
`plans`.
"""

import dataclasses
import functools
import itertools
import math
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from q0lib import allocation, config, paths, population, presets, student

PLANS = Path(__file__).with_name("plans")

PARTS = (
    "tuning", "main", "splits", "ablation", "reference", "reference_sizes", "tuned_reference",
    "small",
)  # fmt: skip
STUDENTS = "student", "student_tuning"  # beyond the paper: who teaches, and whom
# With their weights: those that are asked downstream tasks; those that more seeds are trained of,
# and that are read on a longer test text.
DOWNSTREAM, POWER = "downstream", "power"
# What is chosen by one seed is trained for one alone.
ONE_SEED = ("tuning", "splits", "reference_sizes", "tuned_reference", "student_tuning")
FULL = "full recipe"  # the ablations' own reference: q0 as the preset has it
UNDISTILLED = "no distillation"
UNDISTILLED_LONGER = "cycles of 4 epochs, no distillation"
TEACHERS = (UNDISTILLED, "teacher every second cycle", UNDISTILLED_LONGER)  # the rest is the cycle


@dataclass(frozen=True)
class Extent:
    """How far the study goes at one preset, as `plans/<preset>.toml` has it; lengths in epochs.

    Fields of a method stand in one string, "batch_tokens=256 matrix_lr=0.02"; what it does not
    name, the preset says.
    """

    budgets: tuple[float, ...]  # at which the curves have points
    q0: tuple[tuple[int, float], ...]  # trajectories, and how long each is
    ensemble: float
    splits: dict[float, str]  # epochs a member, beside the preset's, and the fields tuned for it
    single: tuple[float, ...]
    ablation: tuple[float, ...]  # where variants are compared; they are trained to the last
    small: dict[float, dict[str, str]]  # budgets, and the fields tuned for a method there
    multiples: tuple[int, ...]  # of the training tokens, for the one-epoch reference
    sizes: tuple[dict[str, int], ...]  # ... of these models, each larger than the one before
    recipe: tuple[str, ...]  # ... all trained like this, overrides
    recipes: tuple[str, ...] = ()  # ... and the last of them like this too, fields of `single`
    # Students, each after its teachers: label; method, epochs and fields (of the method, or with a
    # dot); teachers, "label NxC" of the lines above; k of their members, 0 = all.
    student: tuple[dict[str, Any], ...] = ()
    # ... that fixed their recipe, or tell what it forgives: teachers, k, epochs, fields (among them
    # generated_tokens, that the teachers write). One seed.
    student_trials: tuple[tuple[str, int, float, str], ...] = ()
    # Models that are asked downstream tasks, beside the main part's ensembles and q0's first
    # trajectory: epochs of the single model, multiples for the one-epoch reference (of the last of
    # the sizes), and of the lines above the student.
    downstream: dict[str, Any] = dataclasses.field(default_factory=dict)
    # The same without a student, for many seeds: single, multiples, and test_tokens, on which all
    # of them are read.
    power: dict[str, Any] = dataclasses.field(default_factory=dict)
    # Where the last of the sizes is known to be the best, at every multiple of one seed: as far as
    # this one, beyond what any method is worth, other seeds train it alone. 0: not known.
    settled_to: int = 0
    # That fixed the preset: method, epochs, fields. In the file the name of a CSV beside it. One
    # seed, judged on validation by the mixture that the method is meant for.
    trials: tuple[tuple[str, float, str], ...] = ()


@functools.cache
def load(preset: str) -> Extent:
    """How far the study goes at `preset`.

    Raises:
        ValueError: no such preset; its file, or the trials beside it, cannot be read, lacks a
            field, or has one, or a method, that is not known.
    """
    methods, path = presets.load(preset).methods, PLANS / f"{preset}.toml"
    try:
        given = {name: _frozen(value) for name, value in tomllib.loads(path.read_text()).items()}
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path}: {error}") from None
    none = dataclasses.MISSING
    fields = {
        each.name: each.default is none and each.default_factory is none
        for each in dataclasses.fields(Extent)
    }
    lacks = {name for name, needed in fields.items() if needed} - given.keys()
    for what, names in {"unknown": given.keys() - fields, "missing": lacks}.items():
        if names:
            raise ValueError(f"{path}: {what} field {min(names)!r}, known: {', '.join(fields)}")
    for name in ("splits", "small"):
        given[name] = {float(epochs): tuned for epochs, tuned in given[name].items()}
    if "trials" in given:
        given["trials"] = _read_trials(path.with_name(given["trials"]))
    found = Extent(**given)
    named = {method for method, _, _ in found.trials}.union(*found.small.values())
    if unknown := sorted(named - methods.keys()):
        raise ValueError(f"{path}: unknown method {unknown[0]!r}, known: {', '.join(methods)}")
    return found


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def _read_trials(path: Path) -> tuple[tuple[str, float, str], ...]:
    table, columns = pd.read_csv(path), ["method", "epochs", "fields"]
    if list(table) != columns:
        raise ValueError(f"{path}: columns must be {columns}, got {list(table)}")
    return tuple(table.itertuples(index=False, name=None))


@dataclass(frozen=True)
class Experiment:
    """One line of the study: a method at a budget, as the preset has it but for `overrides`."""

    part: str
    label: str
    method: str
    epochs: float
    overrides: tuple[str, ...] = ()
    teachers: tuple["Part", ...] = ()  # whose mixture teaches it
    k: int = 0  # ... of so many members of theirs, chosen greedily; 0 = all
    generated_tokens: int = 0  # that they write for it

    def run(self, preset: str, seed: int) -> config.Run:
        """The run behind it; what teaches it must be trained.

        Raises:
            FileNotFoundError: a teacher is not; names it.
        """
        chosen = presets.load(preset, seed=seed, overrides=list(self.overrides))
        if not self.teachers:
            return chosen.run(self.method, self.epochs)
        taught = _teaching(tuple(self.taught_by(preset, seed)), self.k or None)
        taught = dataclasses.replace(taught, generated_tokens=self.generated_tokens)
        return chosen.run(self.method, self.epochs, taught)

    def taught_by(self, preset: str, seed: int) -> list[str]:
        """Its teachers as `student.taught_by` reads them."""
        return [part.name(preset, seed) for part in self.teachers]

    def waits(self, preset: str, seed: int) -> bool:
        """Whether it has a teacher that is yet to be trained."""
        return not all(
            not part.of.waits(preset, seed) and population.is_complete(part.run(preset, seed))
            for part in self.teachers
        )


# A choice among what is complete stays what it was, and takes seconds.
_teaching = functools.cache(student.taught_by)


@dataclass(frozen=True)
class Part:
    """The first trajectories, and their first cycles, of an experiment's population."""

    of: Experiment
    trajectories: int
    cycles: int

    def run(self, preset: str, seed: int) -> config.Run:
        """The run that is as large as this part."""
        run = self.of.run(preset, seed)
        return dataclasses.replace(run, trajectories=self.trajectories, cycles=self.cycles)

    def name(self, preset: str, seed: int) -> str:
        """As `student.taught_by` reads it."""
        directory = self.of.run(preset, seed).directory
        return f"{directory.relative_to(paths.RUNS)}@{self.trajectories}x{self.cycles}"


Trained = Sequence[tuple[Experiment, config.Run]]  # what was planned, and its run


def experiments(
    preset: str, parts: Sequence[str] = PARTS, methods: Sequence[str] | None = None
) -> list[Experiment]:
    """The experiments of a preset, part by part, of all methods or of some.

    Raises:
        ValueError: an unknown preset, part or method, or a plan that cannot be read (`load`).
    """
    base, extent = presets.load(preset), load(preset)
    known = {"tuning": _tuning, "main": _main, "splits": _splits, "ablation": _ablations,
             **dict.fromkeys(("reference", "reference_sizes", "tuned_reference"), _reference),
             "small": _small, DOWNSTREAM: _downstream, POWER: _power,
             **dict.fromkeys(STUDENTS, _student)}  # fmt: skip
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
        if not base.methods[method].cycles:  # cycles take what the budget leaves
            changed = (f"{method}.trajectories=1", *changed)
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
        noise, fields = "the paper's perturbation", "perturb_start=0.25 perturb_end=0.05"
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
    for multiple, size in itertools.product(extent.multiples, extent.sizes):
        settled = size == extent.sizes[-1] and multiple <= extent.settled_to
        part = "reference" if settled or not extent.settled_to else "reference_sizes"
        label = f"width {size['width']}, {multiple}x tokens"
        shape = (f"corpus.train_tokens={multiple * base.corpus.train_tokens}",
                 *(f"model.{name}={n}" for name, n in size.items()))  # fmt: skip
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
                             (*shape, *tuned.get(method, "").split())))
            for label, method, shape in shapes
        ]  # fmt: skip
    return found


def _downstream(extent: Extent, base: config.Preset) -> list[Experiment]:
    """Who is asked downstream tasks."""
    if not (asked := extent.downstream):
        return []
    students = [
        dataclasses.replace(each, part=DOWNSTREAM)
        for each in _student(extent, base)
        if each.label == asked.get("student")
    ]
    return _with_weights(DOWNSTREAM, asked, extent, base) + students


def _power(extent: Extent, base: config.Preset) -> list[Experiment]:
    """What many seeds are trained of."""
    return _with_weights(POWER, extent.power, extent, base) if extent.power else []


def _with_weights(
    part: str, asked: dict[str, Any], extent: Extent, base: config.Preset
) -> list[Experiment]:
    """The main methods at their longest, q0 as one trajectory (which a student has too), and the
    one-epoch reference; weights are kept."""
    size = extent.sizes[-1]
    longest = max(epochs for _, epochs in extent.q0)
    found = [
        Experiment(part, "single", "single", asked["single"]),
        Experiment(part, "ensemble", "ensemble", extent.ensemble),
        Experiment(part, "distilled_ensemble", "distilled_ensemble", extent.ensemble),
        Experiment(part, "q0", "q0", longest, ("q0.trajectories=1",)),
    ]
    for multiple in asked["multiples"]:
        shape = (f"corpus.train_tokens={multiple * base.corpus.train_tokens}",
                 *(f"model.{name}={n}" for name, n in size.items()))  # fmt: skip
        label = f"width {size['width']}, {multiple}x tokens"
        found.append(Experiment(part, label, "single", 1.0, (*shape, *extent.recipe)))
    kept = "runtime.keep_weights=true"
    return [dataclasses.replace(each, overrides=(*each.overrides, kept)) for each in found]


def _student(extent: Extent, base: config.Preset) -> list[Experiment]:
    """Populations that teach, with their weights, and whom they teach: generation by generation;
    then the trials, labelled by what differs from the recipe, and by who teaches them."""
    found: dict[str, Experiment] = {}

    def add(part: str, label: str, method: str, epochs: float, fields: str,
            teachers: Sequence[str], k: int) -> None:  # fmt: skip
        named = dict(each.split("=") for each in fields.split())
        generated = int(named.pop("generated_tokens", 0))
        changed = [
            f"{name if '.' in name else f'{method}.{name}'}={value}"
            for name, value in named.items()
        ]
        parts = []
        for name in teachers:
            source, _, size = name.rpartition(" ")
            parts.append(Part(found[source], *map(int, size.split("x"))))
        # Weights to teach with; and what teachers say is kept, since packings come again.
        changed += ["runtime.keep_weights=true", "runtime.cache_lessons=true"]
        found[label] = Experiment(
            part, label, method, epochs, tuple(changed), tuple(parts), k, generated
        )

    for line in extent.student:
        add("student", **{"k": 0, **line})
    for name, k, epochs, fields in extent.student_trials:
        members = f"{k} of" if k else "all of"
        add("student_tuning", f"{fields or 'the recipe'}; {epochs:g} epochs, {members} {name}",
            "student", epochs, fields, [name], k)  # fmt: skip
    return list(found.values())
