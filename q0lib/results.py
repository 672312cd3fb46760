"""From populations to tables: what every method reaches at every budget and K.

One row a (method, seed, budget, K, choice); the choice is made on fitness text, the losses of
all three splits stand beside it. Tables are small CSV files that notebooks read in seconds.
"""

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd

from q0lib import config, efficiency, ensemble, paths, prior
from q0lib.model import forward_flops
from q0lib.population import Population, load

SPLITS = ("fitness", "validation", "test")
DRAWS = 1000  # of test documents, for an interval
WRITTEN_BY = {
    **dict.fromkeys(("ablations", "snapshots"), "01_cycles"),
    **dict.fromkeys(("epoch_efficiency", "test_documents"), "04_epoch_efficiency"),
    **dict.fromkeys(("reference", "reference_documents", "data_efficiency"), "05_data_efficiency"),
    **dict.fromkeys(("small_budgets", "splits"), "06_allocation"),
    **dict.fromkeys(("runs", "tuning"), "measured_study"),
    "epoch_multipliers": "04_epoch_efficiency",
}
PRIOR_TABLES = (
    "prior_fits",
    "prior_weights",
    "prior_choices",
    "prior_cross_validation",
    "prior_fitness_size",
)
ALL_CHOICES: tuple[prior.Choice, ...] = ("truncate", "refit", "greedy", "lowest", "uniform")
CHOICES: tuple[prior.Choice, ...] = ("truncate", "greedy", "lowest", "uniform")


def selections(
    population: Population, ks: Sequence[int], choices: Sequence[prior.Choice]
) -> pd.DataFrame:
    """Losses of the population's mixtures, by choice and K.

    Members and weights are chosen on the fitness split. K that the population does not have are
    left out. `test_se` is the standard error of the test loss over documents.

    Columns: choice, k, fitness, validation, test (nats per token), test_se, flops (training).
    """
    possible = sorted({k for k in ks if k <= len(population)})
    fitted = prior.fit_prior(population.P["fitness"], "adamw")
    rows = []
    for choice in choices:
        path = prior.select_path(population.P["fitness"], possible, choice, fitted)
        for k, selection in path.items():
            rows.append({"choice": choice, "k": k, **_losses(population, selection.weights)})
    return pd.DataFrame(rows)


def origin(population: Population) -> dict[str, str]:
    """The columns by which a number is walked back: the run's directory, and the commit."""
    directory = population.directory
    commit = str(population.members["commit"].iloc[-1])
    return {"run": f"{directory.parent.name}/{directory.name}", "commit": commit}


def _losses(population: Population, weights: np.ndarray) -> dict[str, float]:
    row = {}
    for split in SPLITS:
        nll = -ensemble.mixture_log_probs(weights, population.P[split])
        row[split] = float(nll.mean())
    row["test_se"] = ensemble.standard_error(nll, population.documents["test"])
    row["flops"] = population.flops
    return row


def check_sizes(ks: Sequence[int], members: int) -> list[int]:
    """The sizes K, in order; ValueError for one that is not in 1..members."""
    for k in ks:
        if not 1 <= k <= members:
            raise ValueError(f"population sizes K must be in 1..{members}, got {k}")
    return sorted(set(ks))


def chosen_k(population: Population, ks: Sequence[int], choice: prior.Choice = "truncate") -> int:
    """The K of `ks` with the lowest cross-validated loss over fitness documents.

    On the text that fitted the weights more members always look better; held-out documents of the
    same split tell otherwise, and leave validation and test alone.
    """
    possible = sorted({k for k in ks if k <= len(population)})
    if len(possible) == 1:
        return possible[0]
    held_out = ensemble.cross_validate(
        population.P["fitness"], population.documents["fitness"], possible, (choice,)
    )
    return min(held_out, key=lambda record: record.nll).k


def budget_table(
    populations: Sequence[Population], budgets: Sequence[float], ks: Sequence[int] = ()
) -> pd.DataFrame:
    """`budget_rows` of every population, and of its first 1, 2, ... trajectories if they have
    cycles; what two of them contain is there once."""
    blocks = []
    for each in populations:
        sizes = ks if each.run.cycles > 1 else ()
        check_sizes(sizes, len(each))
        counts = range(1, each.run.trajectories + 1) if each.run.cycles > 1 else [None]
        for count in counts:
            part = each if count is None else each.prefix(count, each.run.cycles)
            blocks.append(budget_rows(part, budgets, sizes))
    table = pd.concat(blocks, ignore_index=True)
    keys = ["method", "seed", "epochs", "trajectories", "choice", "k"]
    return table.drop_duplicates(keys, ignore_index=True)


def budget_rows(
    population: Population, budgets: Sequence[float], ks: Sequence[int] = ()
) -> pd.DataFrame:
    """The curve of one population: a block of `selections` for each budget it contains.

    An ensemble is read off at its first members, trajectories with cycles at their first cycles;
    budgets that the population does not contain are left out. Each budget has the uniform mixture
    of all members, the paper's truncated prior at all members and at every K of `ks` that it
    holds, of which the K chosen on fitness documents has best_k true, and the greedy choice at
    every K of `ks`.

    Raises:
        ValueError: no budget that the population contains.
    """
    run, frames = population.run, []
    for epochs in budgets:
        part = at_budget(population, epochs, run.trajectories)
        if part is None:
            continue
        sizes = [*ks, len(part)]
        best = chosen_k(part, sizes)
        learned = selections(part, sizes, ["truncate"])
        learned["best_k"] = learned.k == best
        uniform = selections(part, [len(part)], ["uniform"]).assign(best_k=False)
        greedy = selections(part, ks if len(part) > 1 else [], ["greedy"]).assign(best_k=False)
        table = pd.concat([uniform, learned, greedy], ignore_index=True)
        table.insert(0, "trajectories", part.run.trajectories)
        table.insert(0, "epochs", epochs)
        frames.append(table)
    if not frames:
        raise ValueError(
            f"no budget of {list(budgets)} is part of {run.name} at {run.epochs:g} epochs"
        )
    table = pd.concat(frames, ignore_index=True)
    table.insert(0, "seed", run.seed)
    table.insert(0, "method", run.name)
    return table.assign(**origin(population))


def at_budget(population: Population, epochs: float, trajectories: int) -> Population | None:
    """What the population was after `epochs` in all; None if it never was.

    Its first `trajectories`, as far as they had come; an ensemble's first members.
    """
    run, tau = population.run, population.run.method.epochs_per_cycle
    if run.cycles == 1:
        trajectories = max(1, round(epochs / tau))
    cycles = max(1, round(epochs / (trajectories * tau)))
    fits = trajectories <= run.trajectories and cycles <= run.cycles
    if not fits or abs(trajectories * cycles * tau - epochs) > 1e-9:
        return None
    if run.method.tail and cycles < run.cycles:
        return None  # the snapshots of a tail do not stand where cycles would end
    return population.prefix(trajectories, cycles)


def fitness_curve(
    population: Population, sizes: Sequence[int], k: int, split: str = "validation"
) -> pd.DataFrame:
    """What more fitness text buys: losses after choosing on its first `sizes` tokens.

    Columns: tokens, choice, loss (nats per token on `split`). Choices: "prior" (exact weights on
    all members) and, each of k members, "truncate", "greedy", "lowest" and "uniform" (evenly
    spread, which needs no fitness text).
    """
    P, total = population.P["fitness"], population.P["fitness"].shape[1]
    rows = []
    for size in [*(size for size in sizes if size < total), total]:
        part = P[:, :size]
        fitted = prior.fit_prior(part, "adamw")
        weights = {"prior": prior.fit_prior(part).weights}
        for choice in CHOICES:
            weights[choice] = prior.select(part, k, choice, fitted).weights
        rows += [
            {"tokens": size, "choice": name, "loss": ensemble.mixture_nll(w, population.P[split])}
            for name, w in weights.items()
        ]
    return pd.DataFrame(rows)


def snapshot_curve(population: Population, split: str = "test") -> pd.DataFrame:
    """The loss of each snapshot of one trajectory, and of the learned mixture of all up to it.

    Columns: epochs, flops (spent on it so far), member, mixture (nats per token).
    """
    rows = []
    for cycles in range(1, population.run.cycles + 1):
        part = population.prefix(1, cycles)
        weights = prior.fit_prior(part.P["fitness"]).weights
        last = part.members.iloc[-1]
        rows.append(
            {
                "epochs": last.epochs,
                "flops": last.flops,
                "member": last[f"{split}_loss"],
                "mixture": ensemble.mixture_nll(weights, part.P[split]),
            }
        )
    return pd.DataFrame(rows)


def prior_tables(
    runs: Sequence[config.Run], ks: Sequence[int], sizes: Sequence[int], k: int
) -> dict[str, pd.DataFrame]:
    """Everything that the notebook on the prior shows, for the populations of `runs`.

    prior_fits: both fits with loss, certificate and seconds. prior_weights: the exact weight of
    every member. prior_choices: `selections` by every choice, with the paired distance of each K
    to the same choice's largest K, and what K costs at inference. prior_cross_validation: every
    choice and K on held-out fitness documents; `chosen` marks the smallest K within one standard
    error of the best. prior_fitness_size: `fitness_curve`.
    """
    tables: dict[str, list[pd.DataFrame]] = {name: [] for name in PRIOR_TABLES}
    for run in runs:
        part = load(run)
        P, possible = part.P["fitness"], check_sizes(ks, len(part))
        fitted = {name: _timed_fit(P, name) for name in ("exact", "adamw")}
        weights = fitted["exact"][0].weights
        held_out = ensemble.cross_validate(P, part.documents["fitness"], possible, ALL_CHOICES)
        chosen = ensemble.smallest_k_within_one_se(held_out)
        blocks = {
            "prior_fits": pd.DataFrame([
                {"fit": name, "nll": fit.nll, "gap": fit.gap, "steps": fit.steps, "seconds": took,
                 "test": ensemble.mixture_nll(fit.weights, part.P["test"])}
                for name, (fit, took) in fitted.items()
            ]),
            "prior_weights": part.members[["epochs", "fitness_loss"]].assign(weight=weights),
            "prior_choices": _with_costs(part, selections(part, possible, ALL_CHOICES)),
            "prior_cross_validation": pd.DataFrame(
                [{"choice": each.method, "k": each.k, "nll": each.nll, "se": each.se,
                  "behind": each.behind, "behind_se": each.behind_se, "chosen": each is chosen}
                 for each in held_out]
            ),
            "prior_fitness_size": fitness_curve(part, sizes, k),
        }  # fmt: skip
        for name, block in blocks.items():
            block.insert(0, "seed", run.seed)
            tables[name].append(block.assign(**origin(part)))
    return {name: pd.concat(blocks, ignore_index=True) for name, blocks in tables.items()}


def _timed_fit(P: np.ndarray, method: prior.Fit) -> tuple[prior.Prior, float]:
    started = time.perf_counter()
    return prior.fit_prior(P, method), time.perf_counter() - started


def _with_costs(population: Population, table: pd.DataFrame) -> pd.DataFrame:
    """Add to `selections` the paired distance to each choice's largest K, and inference costs."""
    P, documents = population.P, population.documents["test"]
    fitted = prior.fit_prior(P["fitness"], "adamw")
    rows = []
    for choice, block in table.groupby("choice", sort=False):
        path = prior.select_path(P["fitness"], block.k.tolist(), choice, fitted)
        nll = {k: -ensemble.mixture_log_probs(each.weights, P["test"]) for k, each in path.items()}
        most = nll[max(nll)]
        rows += [ensemble.paired_difference(values, most, documents) for values in nll.values()]
    behind, errors = zip(*rows, strict=True)
    flops = table.k * forward_flops(population.run.model)
    return table.assign(
        behind_all=behind, behind_all_se=errors, forward_passes=table.k, flops_per_token=flops
    )


def epoch_curves(
    table: pd.DataFrame, ks: Sequence[int], protocol: Literal["clean", "paper"] = "clean"
) -> pd.DataFrame:
    """The test-loss curves of a table of `budget_rows`, one row a (seed, method, budget).

    q0 gives a curve at its best K ("q0"), one of the uniform mixture of all its snapshots
    ("q0_uniform"), and two for each fixed K that a budget holds, of the paper's cut ("q0_k8") and
    of the greedy choice ("q0_greedy_k8"); any other method is the uniform mixture of all its
    members. "clean" takes the K chosen on fitness documents and
    the number of trajectories that is best on validation over the seeds; "paper" takes both by
    the test loss that is reported, as the paper does with its validation loss.

    Columns: seed, method, epochs, flops, trajectories, choice, k, validation, loss.
    """
    judge = "validation" if protocol == "clean" else "test"
    curves = []
    for method, rows in table.groupby("method", sort=False):
        uniform = rows[rows.choice == "uniform"]
        if method != "q0":
            curves.append(uniform)
            continue
        learned = rows[rows.choice == "truncate"]
        check_sizes(ks, int(learned.k.max()))
        best = learned[learned.best_k.astype(bool)]
        if protocol == "paper":
            best = learned.sort_values("test").drop_duplicates(["seed", "epochs", "trajectories"])
        named = {"q0": best, "q0_uniform": uniform}
        named |= {f"q0_k{k}": learned[learned.k == k] for k in ks}
        greedy = rows[rows.choice == "greedy"]
        named |= {f"q0_greedy_k{k}": greedy[greedy.k == k] for k in ks}
        curves += [
            best_allocation(block, judge).assign(method=name)
            for name, block in named.items()
            if len(block)
        ]
    curve = pd.concat(curves).drop_duplicates(["seed", "method", "epochs"])
    return curve.rename(columns={"test": "loss"})[
        ["seed", "method", "epochs", "flops", "trajectories", "choice", "k", "validation", "loss"]
    ].reset_index(drop=True)


def best_allocation(rows: pd.DataFrame, by: str) -> pd.DataFrame:
    """The rows of the number of trajectories that is best at each budget, by the mean over seeds.

    A number that some of the seeds have not trained does not stand for election.
    """
    means = rows.groupby(["epochs", "trajectories"])[by].agg(["mean", "size"]).reset_index()
    seeds = means.groupby("epochs")["size"].transform("max")
    means = means[means["size"] == seeds].sort_values(["epochs", "mean"])
    return rows.merge(means.drop_duplicates("epochs")[["epochs", "trajectories"]])


def document_losses(populations: Sequence[Population], curves: pd.DataFrame) -> pd.DataFrame:
    """The test loss of every point of `curves`, document by document, for paired intervals.

    One row a point, and one whose method is "tokens" with the scored tokens of each document;
    columns method, seed, epochs, and d0, d1, ...: summed nats of a document.
    """
    _, index = np.unique(populations[0].documents["test"], return_inverse=True)
    sums = {("tokens", -1, 0.0): np.bincount(index).astype(float)}
    curves = curves.assign(
        base=curves.method.str.replace(r"_(uniform|(greedy_)?k\d+)$", "", regex=True)
    )
    for (base, seed, epochs, count), points in curves.groupby(
        ["base", "seed", "epochs", "trajectories"]
    ):
        ours = [each for each in populations if (each.run.name, each.run.seed) == (base, seed)]
        part = next(filter(None, (at_budget(each, epochs, count) for each in ours)))
        P = part.P["fitness"]
        fitted = None if set(points.choice) == {"uniform"} else prior.fit_prior(P, "adamw")
        for point in points.itertuples():
            chosen = prior.select(P, int(point.k), point.choice, fitted)
            nll = -ensemble.mixture_log_probs(chosen.weights, part.P["test"])
            sums[point.method, seed, epochs] = np.bincount(index, weights=nll)
    return document_frame(sums)


def document_frame(sums: dict[tuple, np.ndarray]) -> pd.DataFrame:
    """A table of losses by document: `sums` holds them by (method, seed, epochs)."""
    frame = pd.DataFrame(list(sums.values())).add_prefix("d")
    return pd.concat([pd.DataFrame(list(sums), columns=POINT), frame], axis=1)


def over_seeds(curves: pd.DataFrame) -> pd.DataFrame:
    """Mean loss over seeds with its 95% interval (Student t), by method and budget."""
    rows = []
    for (method, epochs), block in curves.groupby(["method", "epochs"], sort=False):
        mean, low, high = efficiency.interval(block.loss.to_list())
        rows.append(
            {"method": method, "epochs": epochs, "flops": block.flops.mean(), "loss": mean,
             "low": low, "high": high, "seeds": len(block)}
        )  # fmt: skip
    return pd.DataFrame(rows).sort_values(["method", "epochs"], ignore_index=True)


def multipliers(
    curves: pd.DataFrame,
    references: Sequence[str] = ("ensemble", "distilled_ensemble"),
    documents: pd.DataFrame | None = None,
) -> pd.DataFrame:
    """What each method saves against the last point of each reference, seed by seed.

    One row a (method, reference, axis) with axis epochs or flops: the mean multiplier over seeds
    with its 95% interval, which is nan when a seed has no crossing; `reached` counts the seeds
    that have one, and `cases` says in words what each seed did. The interval is Student's over
    training seeds; with `documents` (`document_losses` of these curves) it also holds what other
    test documents would have said, the two half-widths added as squares, and with one seed that
    alone. `clipped` is the share of resampled texts without a crossing, where the end of the
    curve stood in for it; `own_k` the reference's members at its last point.
    """
    rows = []
    others = [name for name in curves.method.unique() if name not in references]
    for reference in references:
        theirs = curves[curves.method == reference].sort_values("epochs")
        for method in others if len(theirs) else []:
            for axis in ("epochs", "flops"):
                pair = curves[curves.method.isin([method, reference])]
                pair = pair.drop_duplicates(["seed", "method", axis])  # a tie in FLOPs
                values, cases = [], []
                for _, block in pair.groupby("seed"):
                    unit = "epochs" if axis == "epochs" else "FLOPs"
                    found = efficiency.crossings(block, reference, axis, unit).iloc[0]
                    values.append(float(found.multiplier))
                    cases.append(str(found.label))
                mean, low, high = efficiency.interval(values)
                clipped = math.nan
                if documents is not None and np.isfinite(mean):
                    draws, clipped = _resampled_multipliers(
                        pair, method, reference, axis, documents
                    )
                    of_seeds = high - mean if len(values) > 1 else 0.0
                    half = math.hypot(of_seeds, 1.96 * draws.std())
                    low, high = mean - half, mean + half
                rows.append(
                    {"method": method, "reference": reference, "axis": axis, "multiplier": mean,
                     "low": low, "high": high, "seeds": len(values),
                     "reached": int(np.isfinite(values).sum()), "clipped": clipped,
                     "own_k": int(theirs.k.iloc[-1]),
                     "cases": "; ".join(cases)}
                )  # fmt: skip
    columns = ["method", "reference", "axis", "multiplier", "low", "high", "seeds", "reached"]
    return pd.DataFrame(rows, columns=[*columns, "clipped", "own_k", "cases"])


def multiplier_by_budget(
    curves: pd.DataFrame, method: str = "q0", reference: str = "ensemble"
) -> pd.DataFrame:
    """`multipliers` on epochs for every budget of the reference, not only its last.

    A reference that has stopped improving makes any multiplier against its last point larger the
    longer it is trained; this shows how much. Columns: epochs (of the reference), multiplier, low,
    high (Student's over seeds), reached (seeds that have a crossing; without it the mean is nan).
    """
    rows = []
    for epochs in sorted(curves[curves.method == reference].epochs.unique()):
        values = []
        for _, block in curves.groupby("seed"):
            ours = block[block.method == method].sort_values("epochs")
            theirs = block[(block.method == reference) & (block.epochs == epochs)]
            matched = efficiency.matched_epochs(ours.epochs, ours.loss, theirs.loss.item())
            values.append(efficiency.multiplier(epochs, matched))
        mean, low, high = efficiency.interval(values)
        rows.append({"epochs": epochs, "multiplier": mean, "low": low, "high": high,
                     "reached": int(np.isfinite(values).sum())})  # fmt: skip
    return pd.DataFrame(rows)


def _resampled_multipliers(
    curves: pd.DataFrame, method: str, reference: str, axis: str, documents: pd.DataFrame
) -> tuple[np.ndarray, float]:
    """Mean multipliers over seeds [draws], each on test documents drawn anew with replacement.

    Every point of every curve sees the same draw. Where a draw shows no crossing, its bound (the
    curve's last or first cost) stands in; the share of those comes second.
    """
    losses = resampled_losses(documents)
    means = documents.set_index(POINT).filter(regex=r"^d\d+$").sum(axis=1)
    means /= means.loc["tokens"].iloc[0]
    total, seeds, clipped = np.zeros(DRAWS), curves.seed.unique(), 0
    for seed in seeds:
        of_seed = curves[curves.seed == seed].sort_values(axis)
        ours, theirs = (of_seed[of_seed.method == name] for name in (method, reference))
        drawn = []
        for rows in (ours, theirs.tail(1)):
            points = [(row.method, seed, row.epochs) for row in rows.itertuples()]
            off = [point for point, loss in zip(points, rows.loss, strict=True)
                   if not abs(means.get(point, np.nan) - loss) < 1e-4]  # fmt: skip
            if off:
                raise ValueError(
                    f"the documents do not add up to the loss of {off[0][0]}, seed {seed}, "
                    f"{off[0][2]:g} epochs: they are of other curves"
                )
            drawn.append(np.stack([losses[point] for point in points]))
        x, cost = ours[axis].to_numpy(), float(theirs[axis].iloc[-1])
        for draw in range(DRAWS):
            matched = efficiency.matched_epochs(x, drawn[0][:, draw], drawn[1][0, draw])
            clipped += not math.isfinite(matched)
            matched = x[-1] if math.isinf(matched) else x[0] if math.isnan(matched) else matched
            total[draw] += cost / matched / len(seeds)
    return total, clipped / (DRAWS * len(seeds))


POINT = ["method", "seed", "epochs"]  # what names a point of a curve


def resampled_losses(documents: pd.DataFrame) -> dict[tuple, np.ndarray]:
    """The losses [draws] of every point of `document_losses`, on documents drawn anew.

    The draws are the same for every point, and the same for every table of the same text.
    """
    sums = documents.set_index(POINT).filter(regex=r"^d\d+$")
    tokens = sums.loc["tokens"].to_numpy()[0]
    draws = np.random.default_rng(0).multinomial(
        len(tokens), np.full(len(tokens), 1 / len(tokens)), size=DRAWS
    )
    points = sums[sums.index.get_level_values("method") != "tokens"]
    losses = draws @ points.to_numpy().T / (draws @ tokens)[:, None]
    return {point: losses[:, i] for i, point in enumerate(points.index)}


def multiplier_table(table: pd.DataFrame) -> pd.DataFrame:
    """A table of `multipliers` for reading: methods down, what they are measured against across.

    A cell is "6.9 [6.1, 7.7]", or how many seeds have a crossing where not all have one.
    """
    cells = []
    for row in table.itertuples():
        text = f"{row.reached} of {row.seeds} seeds cross"
        if np.isfinite(row.multiplier):
            span = f" [{row.low:.1f}, {row.high:.1f}]" if np.isfinite(row.low) else ""
            text = f"{row.multiplier:.1f}{span}"
        cells.append((row.method, f"{row.reference}, {row.axis}", text))
    frame = pd.DataFrame(cells, columns=["method", "against", "times fewer"])
    wide = frame.pivot(index="method", columns="against", values="times fewer")
    return wide.loc[frame.method.unique(), frame.against.unique()]


def short_label(table: pd.DataFrame, method: str = "q0", reference: str = "ensemble") -> str:
    """The multiplier on epochs for the margin of a figure: "2.2x [1.9, 2.5]"."""
    rows = table[(table.method == method) & (table.reference == reference)]
    row = rows[rows.axis == "epochs"].iloc[0]
    if np.isnan(row.multiplier):
        return f"{row.reached} of {row.seeds} seeds cross"
    span = f" [{row.low:.1f}, {row.high:.1f}]" if row.seeds > 1 else ""
    return f"{row.multiplier:.1f}x fewer epochs{span}"


def multiplier_sentence(table: pd.DataFrame) -> str:
    """The headline of a table of `multipliers`, for a terminal or the foot of a figure."""
    lines = []
    for row in table[table.method == "q0"].itertuples():
        value = f"{row.multiplier:.1f}x"
        if np.isnan(row.multiplier):
            value = f"no mean ({row.reached} of {row.seeds} seeds cross: {row.cases})"
        elif row.seeds > 1:
            value += f" [{row.low:.1f}, {row.high:.1f}], {row.seeds} seeds"
        lines.append(f"q0 matches the {row.reference} with fewer {row.axis}: {value}")
    return "\n".join(lines)


def write(table: pd.DataFrame, path: Path) -> None:
    """Save a table as CSV, six significant digits, whole or not at all."""
    paths.write_text(path, table.to_csv(index=False, float_format="%.6g", lineterminator="\n"))


def read(path: Path, **asked: Sequence[object]) -> pd.DataFrame:
    """Read a table back, or the rows of it whose columns hold the values asked for.

    Raises:
        FileNotFoundError: it is not there; says how it is made.
        ValueError: a value asked for is nowhere in its column.
    """
    if not path.exists():
        notebook = WRITTEN_BY.get(path.stem, "the notebook")
        raise FileNotFoundError(
            f"{path} is not there; run {notebook} with recompute=True to train and write it"
        )
    table = pd.read_csv(path)
    for column, values in asked.items():
        held = set(table[column])
        if missing := [value for value in values if value not in held]:
            raise ValueError(
                f"{path.name} has no {column} {missing[0]!r}, it has {sorted(held)}; run the "
                "notebook with recompute=True to train what is missing"
            )
        table = table[table[column].isin(values)]
    return table.reset_index(drop=True)
