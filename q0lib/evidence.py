"""The measured study beyond its curves: ablations, small budgets, data efficiency, the summary.

Populations in, small tables out; `results` has the curves. Members and weights are chosen on
fitness text; what is compared on test was chosen on validation. Losses are nats per token.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from q0lib import config, efficiency, ensemble, population, prior, results
from q0lib.experiments import FULL, Experiment

Found = Sequence[tuple[Experiment, config.Run]]


def ablation_tables(found: Found, budgets: Sequence[float]) -> dict[str, pd.DataFrame]:
    """What each variant of the recipe is worth, and how it got there.

    ablations: a row a (variant, seed, budget): the loss of the learned mixture of all snapshots
    (exact weights), of the 8 heaviest ("k8"), of the uniform mixture, and of a snapshot alone
    (their mean); `behind` is how far the learned mixture lies above the full recipe's of the same
    seed, `behind_se` its error paired over test documents.
    snapshots: `results.snapshot_curve` of each variant and seed.
    """
    rows, curves = [], []
    full = {run.seed: population.load(run) for each, run in found if each.label == FULL}
    for each, run in found:
        whole = population.load(run)
        tau = run.method.epochs_per_cycle
        for epochs in budgets:
            losses = _losses(whole.prefix(1, round(epochs / tau)))
            theirs = full[run.seed].run.method.epochs_per_cycle
            reference = _losses(full[run.seed].prefix(1, round(epochs / theirs)))
            behind = ensemble.paired_difference(
                losses.pop("nll"), reference["nll"], whole.documents["test"]
            )
            rows.append({"variant": each.label, "seed": run.seed, "epochs": epochs, **losses,
                         "behind": behind[0], "behind_se": behind[1],
                         **results.origin(whole)})  # fmt: skip
        curve = results.snapshot_curve(whole)
        curves.append(curve.assign(variant=each.label, seed=run.seed))
    return {"ablations": pd.DataFrame(rows), "snapshots": pd.concat(curves, ignore_index=True)}


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
        of_seeds = 0.0 if len(block) == 1 else high - mean
        half = float(np.hypot(of_seeds, 1.96 * block.behind_se.mean()))
        rows.append({"variant": variant, "epochs": epochs, "seeds": len(block),
                     "snapshot": block.snapshot.mean(), "learned": block.learned.mean(),
                     "behind": mean, "low": mean - half, "high": mean + half,
                     "by_seed": block.behind.tolist()})  # fmt: skip
    order = ["epochs", "behind"]
    return pd.DataFrame(rows).sort_values(order, ascending=[True, False], ignore_index=True)


def _losses(part: population.Population) -> dict:
    P, M = part.P, len(part)
    fitted = prior.fit_prior(P["fitness"])
    nll = -ensemble.mixture_log_probs(fitted.weights, P["test"])
    row = {"members": M, "flops": part.flops, "snapshot": float(part.members.test_loss.mean()),
           "uniform": ensemble.mixture_nll(np.full(M, 1 / M), P["test"]),
           "learned": float(nll.mean()),
           "learned_validation": ensemble.mixture_nll(fitted.weights, P["validation"])}  # fmt: skip
    if M >= 8:
        chosen = prior.select(P["fitness"], 8, "truncate")
        row["k8"] = ensemble.mixture_nll(chosen.weights, P["test"])
    return row | {"nll": nll}


def small_table(found: Found) -> pd.DataFrame:
    """Budgets of a few epochs, a row a (way to spend them, seed, budget): see `ablation_tables`."""
    rows = []
    for each, run in found:
        whole = population.load(run)
        losses = _losses(whole)
        losses.pop("nll")
        rows.append({"spent_on": each.label, "seed": run.seed, "epochs": each.epochs, **losses,
                     **results.origin(whole)})  # fmt: skip
    return pd.DataFrame(rows)


def tuning_table(found: Found) -> pd.DataFrame:
    """The trials that fixed a preset, with their validation losses: a row a trial and budget.

    A trial is read at its own budget and at half of it. Columns: method, changed (the fields that
    differ from the preset, or are the preset's), epochs, members, snapshot (mean of the members),
    uniform, learned, run, commit.
    """
    rows = []
    for each, run in found:
        whole = population.load(run)
        for share in (2, 1):
            part = results.at_budget(whole, run.epochs / share, run.trajectories)
            if part is None:
                continue
            P, M = part.P, len(part)
            fitted = prior.fit_prior(P["fitness"])
            rows.append(
                {"method": run.name, "seed": run.seed, "changed": each.label,
                 "epochs": run.epochs / share, "members": M,
                 "snapshot": part.members.validation_loss.mean(),
                 "uniform": ensemble.mixture_nll(np.full(M, 1 / M), P["validation"]),
                 "learned": ensemble.mixture_nll(fitted.weights, P["validation"]),
                 **results.origin(whole)}
            )  # fmt: skip
    return pd.DataFrame(rows)


def reference_table(found: Found, tokens: int) -> pd.DataFrame:
    """One epoch on more and more tokens, a row a (model size, multiple of `tokens`, seed)."""
    rows = []
    for each, run in found:
        whole = population.load(run)
        member = whole.members.iloc[-1]
        rows.append(
            {"size": each.label.partition(",")[0], "multiple": run.corpus.train_tokens / tokens,
             "tokens": run.corpus.train_tokens, "seed": run.seed,
             "batch_tokens": run.method.batch_tokens, "matrix_lr": run.method.matrix_lr,
             "validation": member.validation_loss, "test": member.test_loss, "flops": member.flops,
             **results.origin(whole)}
        )  # fmt: skip
    return pd.DataFrame(rows)


def reference_curve(table: pd.DataFrame) -> pd.DataFrame:
    """Of a `reference_table`, the setting that is best on validation at each number of tokens.

    The mean over seeds decides. Columns as there, a row a (tokens, seed).
    """
    setting = ["size", "batch_tokens", "matrix_lr"]
    means = table.groupby(["tokens", *setting]).validation.mean().reset_index()
    best = means.sort_values(["tokens", "validation"]).drop_duplicates("tokens")
    return table.merge(best[["tokens", *setting]]).sort_values(["seed", "tokens"])


def data_efficiency(
    curves: pd.DataFrame, reference: pd.DataFrame, tokens: int, points: Sequence[tuple[str, float]]
) -> pd.DataFrame:
    """How many times `tokens` the reference needs for the test loss of each (method, budget).

    `curves` as `results.epoch_curves` gives them, `reference` as `reference_curve`; every seed
    is measured against the reference's mean over seeds. A budget of 0 takes the method's best.

    Columns: method, epochs, loss, multiplier, low, high (Student's over seeds), seeds, cases.
    """
    line = reference.groupby("tokens").test.mean()
    rows = []
    for method, epochs in points:
        curve = curves[curves.method == method]
        if epochs == 0:
            epochs = curve.groupby("epochs").loss.mean().idxmin()
        losses = curve[curve.epochs == epochs].loss
        ratios = [efficiency.data_efficiency(x, line.index, line, tokens) for x in losses]
        said = [efficiency.describe_efficiency(x, line.index, line, tokens) for x in losses]
        mean, low, high = efficiency.interval(ratios)
        rows.append({"method": method, "epochs": epochs, "loss": losses.mean(), "multiplier": mean,
                     "low": low, "high": high, "seeds": len(losses),
                     "cases": "; ".join(said)})  # fmt: skip
    return pd.DataFrame(rows)


def summary(folder: Path) -> pd.DataFrame:
    """The study in a few lines: every headline number with its interval, from the tables there.

    Columns: metric, value, low, high, seeds, split. Tables that are not there yet have no lines.
    """
    rows = []

    def line(metric: str, row: pd.Series) -> None:
        rows.append({"metric": metric, "value": row.multiplier, "low": row.low, "high": row.high,
                     "seeds": int(row.seeds), "split": "test"})  # fmt: skip

    if (path := folder / "epoch_multipliers.csv").exists():
        table = results.read(path).set_index(["protocol", "reference", "axis", "method"])
        sizes = {
            "q0": "_best_k", "q0_k8": "_k8", "q0_greedy_k8": "_k8_greedy",
            "q0_uniform": "_uniform",
        }  # fmt: skip
        references = {"ensemble": "", "distilled_ensemble": "_vs_distilled_ensemble"}
        for reference, versus in references.items():
            for axis in ("epochs", "flops"):
                for method, k in sizes.items():
                    name = f"{axis.removesuffix('s')}_efficiency"
                    name += versus if versus and k == "_best_k" else k + versus
                    for protocol, ending in {"clean": "", "paper": "_paper_protocol"}.items():
                        key = (protocol, reference, axis, method)
                        if key in table.index and (protocol == "clean" or axis == "epochs"):
                            line(name + ending, table.loc[key])
    if (path := folder / "data_efficiency.csv").exists():
        names, known = {"ensemble": "baseline"}, {row["metric"] for row in rows}
        for row in results.read(path).itertuples():
            reading = "" if row.reference == "one recipe" else "_tuned_reference"
            metric = f"data_efficiency_{names.get(row.method, row.method)}"
            if metric + reading in known:  # the same method at another budget
                metric += f"_{row.epochs:g}_epochs"
            known.add(metric + reading)
            line(metric + reading, row)
    return pd.DataFrame(rows)
