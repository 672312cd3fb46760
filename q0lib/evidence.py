"""The measured study beyond its curves: ablations, small budgets, data efficiency, the summary.

Populations in, small tables out; `comparison` has the curves. Members and weights are chosen on
fitness text; what is compared on test was chosen on validation. Losses are nats per token.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from q0lib import comparison, config, efficiency, ensemble, population, prior, results
from q0lib.experiments import FULL, Experiment

Found = Sequence[tuple[Experiment, config.Run]]


def ablation_tables(found: Found, budgets: Sequence[float]) -> dict[str, pd.DataFrame]:
    """What each variant of the recipe is worth, and how it got there.

    ablations: a row a (variant, seed, budget) with `mixtures`; `behind` is how far the learned
    mixture lies above the full recipe's of the same seed on test, `behind_se` its error paired
    over documents, and `mean_behind_se` the same error of the mean over all seeds of `found`.
    snapshots: `results.snapshot_curve` of each variant and seed. A budget that a run ends before
    has no row.

    Raises:
        ValueError: a budget that is no whole number of some variant's cycles.
    """
    populations = [(each, population.load(run)) for each, run in found]
    nll, rows = {}, []
    for each, whole in populations:
        for epochs in budgets:
            if epochs > whole.run.epochs:
                continue
            part = results.at_budget(whole, epochs, 1)
            if part is None:
                raise ValueError(f"{each.label} has no snapshot after {epochs:g} epochs")
            row = mixtures(part)
            nll[each.label, whole.run.seed, epochs] = row.pop("nll")
            rows.append({"variant": each.label, "seed": whole.run.seed, "epochs": epochs, **row,
                         **results.origin(whole)})  # fmt: skip
    documents = populations[0][1].documents["test"]
    for row in rows:
        variant, epochs = row["variant"], row["epochs"]
        seeds = [seed for label, seed, at in nll if (label, at) == (variant, epochs)]
        pairs = {seed: (nll[variant, seed, epochs], nll[FULL, seed, epochs]) for seed in seeds}
        ours, full = pairs[row["seed"]]
        row["behind"], row["behind_se"] = ensemble.paired_difference(ours, full, documents)
        ours, full = np.mean(list(pairs.values()), axis=0)
        row["mean_behind_se"] = ensemble.paired_difference(ours, full, documents)[1]
    curves = [
        results.snapshot_curve(whole).assign(variant=each.label, seed=whole.run.seed)
        for each, whole in populations
    ]
    return {"ablations": pd.DataFrame(rows), "snapshots": pd.concat(curves, ignore_index=True)}


def mixtures(part: population.Population) -> dict:
    """What a population is worth on test: its learned mixture (exact weights), the uniform one,
    that of the 8 heaviest (k8), its snapshots' mean, the last of them, and what it cost; the first
    two on validation too. `nll` holds the learned mixture's loss of every token."""
    P, M = part.P, len(part)
    weights = {"learned": prior.fit_prior(P["fitness"]).weights, "uniform": np.full(M, 1 / M)}
    nll = -ensemble.mixture_log_probs(weights["learned"], P["test"])
    row = {"members": M, "flops": part.flops, "snapshot": float(part.members.test_loss.mean()),
           "last": float(part.members.test_loss.iloc[-1]), "nll": nll}  # fmt: skip
    for name, each in weights.items():
        row[name] = ensemble.mixture_nll(each, P["test"])
        row[f"{name}_validation"] = ensemble.mixture_nll(each, P["validation"])
    if M >= 8:
        chosen = prior.select(P["fitness"], 8, "truncate")
        row["k8"] = ensemble.mixture_nll(chosen.weights, P["test"])
    return row


def compare(ablations: pd.DataFrame, variants: Sequence[str]) -> pd.DataFrame:
    """`variants` against the full recipe, over seeds: the rows of a figure, best last.

    Columns: variant, epochs, seeds, snapshot, learned (means), behind with its 95% interval (low,
    high: the documents' error and, with two seeds or more, Student's over them, added as
    squares), by_seed (a list).
    """
    rows = []
    known = ablations[ablations.variant.isin(variants)]
    for (variant, epochs), block in known.groupby(["variant", "epochs"], sort=False):
        mean, _, high = efficiency.interval(block.behind.tolist())
        alone = len(block) == 1
        error = float((block.behind_se if alone else block.mean_behind_se).iloc[0])
        half = float(np.hypot(0.0 if alone else high - mean, 1.96 * error))
        rows.append({"variant": variant, "epochs": epochs, "seeds": len(block),
                     "snapshot": block.snapshot.mean(), "learned": block.learned.mean(),
                     "behind": mean, "low": mean - half, "high": mean + half,
                     "by_seed": block.behind.tolist()})  # fmt: skip
    order = ["epochs", "behind"]
    return pd.DataFrame(rows).sort_values(order, ascending=[True, False], ignore_index=True)


def small_table(found: Found) -> pd.DataFrame:
    """Budgets of a few epochs, a row a (way to spend them, seed, budget), with `mixtures`.

    `mixed` and `mixed_validation` are the mixture that each way is meant for: learned, but uniform
    for independent models.
    """
    rows = []
    for each, run in found:
        row = mixtures(whole := population.load(run))
        row.pop("nll")
        kind = "uniform" if each.method in ("ensemble", "single") else "learned"
        rows.append({"spent_on": each.label, "seed": run.seed, "epochs": each.epochs, **row,
                     "mixed": row[kind], "mixed_validation": row[f"{kind}_validation"],
                     **results.origin(whole)})  # fmt: skip
    return pd.DataFrame(rows)


def split_table(found: Found) -> pd.DataFrame:
    """Independent ensembles by the length of their members: uniform mixtures of 1, 2, ... members.

    Columns: split, seed, epochs (a member), members, total (epochs), validation, test.
    """
    rows = []
    for each, run in found:
        whole = population.load(run)
        for members in range(1, run.trajectories + 1):
            P = whole.prefix(members, 1).P
            weights = np.full(members, 1 / members)
            rows.append(
                {"split": each.label, "seed": run.seed, "epochs": run.method.epochs_per_cycle,
                 "members": members, "total": members * run.method.epochs_per_cycle,
                 "validation": ensemble.mixture_nll(weights, P["validation"]),
                 "test": ensemble.mixture_nll(weights, P["test"]), **results.origin(whole)}
            )  # fmt: skip
    return pd.DataFrame(rows)


def tuning_table(found: Found) -> pd.DataFrame:
    """The trials that fixed a preset, with their validation losses: a row a trial and budget.

    A trial is read at every budget at which its method has a trial, so that each can be compared.
    Columns: method, seed, changed (fields that differ from the preset's, or are the preset's),
    epochs, members, snapshot (mean of the members), uniform, learned, run, commit.
    """
    rows = []
    for each, run in found:
        whole = population.load(run)
        for epochs in sorted({other.epochs for other, _ in found if other.method == each.method}):
            part = results.at_budget(whole, epochs, run.trajectories)
            if part is None:
                continue
            P, M = part.P, len(part)
            fitted = prior.fit_prior(P["fitness"])
            rows.append(
                {"method": run.name, "seed": run.seed, "changed": each.label, "epochs": epochs,
                 "members": M, "snapshot": part.members.validation_loss.mean(),
                 "uniform": ensemble.mixture_nll(np.full(M, 1 / M), P["validation"]),
                 "learned": ensemble.mixture_nll(fitted.weights, P["validation"]),
                 **results.origin(whole)}
            )  # fmt: skip
    return pd.DataFrame(rows)


def reference_tables(found: Found, tokens: int) -> dict[str, pd.DataFrame]:
    """One epoch on more and more tokens.

    reference: a row a (model, multiple of `tokens`, seed); `model` is the size, and the recipe
    where it is not the one for all (`recipe`). reference_documents: the same runs' test loss by
    document, as `comparison.document_losses` has it, method the model and epochs the multiple.

    Raises:
        ValueError: runs that were evaluated on different text.
    """
    rows, sums = [], {}
    texts = set()
    for each, run in found:
        whole = population.load(run)
        member, (size, _, *recipe) = whole.members.iloc[-1], each.label.split(", ")
        model = ", ".join([size, *recipe])
        multiple = run.corpus.train_tokens / tokens
        record = population.read_record(population.member_path(run.directory, 0, 0))
        texts.add(record["fingerprints"]["test"])
        _, index = np.unique(whole.documents["test"], return_inverse=True)
        sums["tokens", -1, 0.0] = np.bincount(index).astype(float)
        sums[model, run.seed, multiple] = np.bincount(index, weights=-np.log(whole.P["test"][-1]))
        rows.append(
            {"model": model, "size": size, "recipe": "".join(recipe), "multiple": multiple,
             "tokens": run.corpus.train_tokens,
             "seed": run.seed, "validation": member.validation_loss, "test": member.test_loss,
             "flops": member.flops, **results.origin(whole)}
        )  # fmt: skip
    if len(texts) > 1:
        raise ValueError(f"the reference was evaluated on {len(texts)} different texts, not on one")
    return {"reference": pd.DataFrame(rows), "reference_documents": comparison.document_frame(sums)}


def reference_curve(table: pd.DataFrame) -> pd.DataFrame:
    """Of a reference table, the model that is best on validation at each number of tokens.

    The mean over seeds decides. Columns as there, a row a (tokens, seed).
    """
    means = table.groupby(["tokens", "model"]).validation.mean().reset_index()
    best = means.sort_values(["tokens", "validation"]).drop_duplicates("tokens")
    return table.merge(best[["tokens", "model"]]).sort_values(["seed", "tokens"], ignore_index=True)


def data_efficiency(
    curves: pd.DataFrame,
    line: pd.DataFrame,
    tokens: int,
    points: Sequence[tuple[str, float]],
    documents: pd.DataFrame,
    reference_documents: pd.DataFrame,
) -> pd.DataFrame:
    """How many times `tokens` the reference needs for the test loss of each (method, budget).

    `curves` as `comparison.epoch_curves` gives them, `line` as `reference_curve`. A seed's loss is
    read off the reference's mean over seeds. A budget of 0 takes the one that is best on
    validation; a point that the curves do not have is left out. The interval holds the seeds
    (Student's) and the documents (resampled for both, alike), the half-widths added as squares.

    Columns: method, epochs, loss, multiplier (nan when a seed lies beyond the reference), low,
    high, seeds, cases. The table that `summary` reads has one more, reference: "one recipe" or
    "tuned".
    """
    mean_line = line.groupby("tokens").test.mean()
    drawn_of = comparison.resampled_losses(reference_documents)
    points_of = line[["model", "seed", "multiple"]].itertuples(index=False, name=None)
    drawn = pd.DataFrame([drawn_of[point] for point in points_of])
    drawn_line = drawn.groupby(line.tokens.to_numpy()).mean().to_numpy()  # [multiples, draws]
    ours_of = comparison.resampled_losses(documents)
    rows = []
    for method, epochs in points:
        curve = curves[curves.method == method]
        if epochs == 0 and len(curve):
            epochs = curve.groupby("epochs").validation.mean().idxmin()
        at = curve[curve.epochs == epochs]
        if at.empty:
            continue
        axis = mean_line.index
        ratios = [efficiency.data_efficiency(x, axis, mean_line, tokens) for x in at.loss]
        said = [efficiency.describe_efficiency(x, axis, mean_line, tokens) for x in at.loss]
        ratios = [x if np.isfinite(x) else np.nan for x in ratios]
        mean, low, high = efficiency.interval(ratios)
        if np.isfinite(mean):
            ours = np.mean([ours_of[method, seed, epochs] for seed in at.seed], axis=0)
            found = [
                efficiency.data_efficiency(x, axis, reference, tokens)
                for x, reference in zip(ours, drawn_line.T, strict=True)
            ]
            ends = axis[0] / tokens, axis[-1] / tokens  # stand in where a draw has no crossing
            draws = np.clip(np.nan_to_num(found, nan=ends[0]), *ends)
            of_seeds = high - mean if len(ratios) > 1 else 0.0
            half = float(np.hypot(of_seeds, 1.96 * np.std(draws)))
            low, high = mean - half, mean + half
        rows.append({"method": method, "epochs": epochs, "loss": at.loss.mean(),
                     "multiplier": mean, "low": low, "high": high, "seeds": len(at),
                     "cases": "; ".join(said)})  # fmt: skip
    return pd.DataFrame(rows)


def summary(folder: Path) -> pd.DataFrame:
    """The study in a few lines: every headline number with its interval, from the tables there.

    Columns: metric, value, low, high, seeds, split. Tables that are not there yet have no lines.
    Where a seed has no crossing the value is nan.
    """
    rows = []

    def line(metric: str, row: Any) -> None:
        rows.append({"metric": metric, "value": row.multiplier, "low": row.low, "high": row.high,
                     "seeds": int(row.seeds), "split": "test"})  # fmt: skip

    if (path := folder / "epoch_multipliers.csv").exists():
        table = results.read(path)
        sizes = (
            ("q0", "_best_k"), ("q0_k8", "_k8"), ("q0_greedy_k8", "_k8_greedy"),
            (f"q0_k{table.own_k.iloc[0]}", "_own_k"), ("q0_uniform", "_uniform"),
        )  # fmt: skip
        table = table.set_index(["protocol", "reference", "axis", "method"])
        references = {"ensemble": "", "distilled_ensemble": "_vs_distilled_ensemble"}
        for reference, versus in references.items():
            for axis in ("epochs", "flops"):
                for method, k in sizes:
                    name = f"{axis.removesuffix('s')}_efficiency"
                    name += versus if versus and k == "_best_k" else k + versus
                    for protocol, ending in {"clean": "", "paper": "_paper_protocol"}.items():
                        key = (protocol, reference, axis, method)
                        if key in table.index and (protocol == "clean" or axis == "epochs"):
                            line(name + ending, table.loc[key])
    if (path := folder / "data_efficiency.csv").exists():
        names, known = {"ensemble": "baseline"}, {row["metric"] for row in rows}
        for row in results.read(path).itertuples():
            metric = f"data_efficiency_{names.get(row.method, row.method)}"
            if row.reference == "tuned":
                metric += "_tuned_reference"
            if metric in known:  # the same method at another budget
                metric += f"_{row.epochs:g}_epochs"
            known.add(metric)
            line(metric, row)
    return pd.DataFrame(rows)
