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

Trained = Sequence[tuple[Experiment, config.Run]]


def ablation_tables(found: Trained, budgets: Sequence[float]) -> dict[str, pd.DataFrame]:
    """What each variant of the recipe is worth, and how it got there.

    ablations: a row a (variant, seed, budget) with `mixtures`; `behind` is how far the learned
    mixture lies above the full recipe's of the same seed on test (nan where that does not go so
    far), `behind_se` its error paired over documents, and `mean_behind_se` the same error of the
    mean over the `paired` seeds. snapshots: `results.snapshot_curve` of each variant and seed. A
    budget that a run ends before has no row.

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
        pairs = {
            seed: (each, nll[FULL, seed, epochs])
            for (label, seed, at), each in nll.items()
            if (label, at) == (variant, epochs) and (FULL, seed, epochs) in nll
        }
        row |= {"paired": len(pairs), "behind": np.nan, "behind_se": np.nan}
        row["mean_behind_se"] = np.nan
        if row["seed"] in pairs:
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

    Raises:
        ValueError: a variant that is not there, or that has nothing to compare it with.
    """
    rows = []
    known = ablations[ablations.variant.isin(variants) & ablations.behind.notna()]
    if missing := set(variants) - set(known.variant):
        raise ValueError(f"no pair of {sorted(missing)[0]!r} and the full recipe at one budget")
    for (variant, epochs), block in known.groupby(["variant", "epochs"], sort=False):
        mean, _, high = efficiency.interval(block.behind.tolist())
        alone = len(block) == 1
        whole = len(block) == block.paired.iloc[0]
        # Of some of the seeds alone, the mean's error over documents is at most their mean error.
        error = float((block.mean_behind_se if whole else block.behind_se).mean())
        half = float(np.hypot(0.0 if alone else high - mean, 1.96 * error))
        rows.append({"variant": variant, "epochs": epochs, "seeds": len(block),
                     "snapshot": block.snapshot.mean(), "learned": block.learned.mean(),
                     "behind": mean, "low": mean - half, "high": mean + half,
                     "by_seed": block.behind.tolist()})  # fmt: skip
    order = ["epochs", "behind"]
    return pd.DataFrame(rows).sort_values(order, ascending=[True, False], ignore_index=True)


def leads(snapshots: pd.DataFrame, curves: pd.DataFrame) -> pd.DataFrame:
    """How many times fewer epochs and FLOPs than the largest ensemble each variant needs.

    `comparison.multipliers` of every variant in a table of snapshots, its learned mixture of all
    snapshots so far, against the ensemble of `curves` (a table of `results.budget_table`), for the
    seeds that a variant has. The interval covers the training seeds alone.

    Raises:
        ValueError: a seed of the snapshots without an ensemble.
    """
    point = ["seed", "epochs", "flops", "loss"]
    base = curves[(curves.method == "ensemble") & (curves.choice == "uniform")]
    base = base.rename(columns={"test": "loss"})[["method", *point, "k"]]
    blocks = []
    for variant, rows in snapshots.groupby("variant", sort=False):
        ours = rows.rename(columns={"mixture": "loss"}).assign(method=variant)[["method", *point]]
        pair = pd.concat([ours, base[base.seed.isin(rows.seed)]])
        blocks.append(comparison.multipliers(pair, ["ensemble"]))
    return pd.concat(blocks, ignore_index=True)


def small_table(found: Trained) -> pd.DataFrame:
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


def split_table(found: Trained) -> pd.DataFrame:
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


def tuning_table(found: Trained) -> pd.DataFrame:
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


def reference_tables(found: Trained, tokens: int) -> dict[str, pd.DataFrame]:
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
        record = population.read_record(population.member_path(run.directory, 0, 0))
        texts.add(record["fingerprints"]["test"])
        size = f"width {run.model.width}"
        fields = [text.removeprefix("single.") for text in each.overrides if "single." in text]
        recipe = " ".join(fields) if each.part == "tuned_reference" else ""
        model, multiple = f"{size} {recipe}".strip(), run.corpus.train_tokens / tokens
        sums[comparison.TOKENS] = comparison.document_sizes(whole)
        sums[model, run.seed, multiple] = comparison.document_sums(whole, np.ones(1))
        member = whole.members.iloc[-1]
        rows.append(
            {"model": model, "size": size, "recipe": recipe, "multiple": multiple,
             "tokens": run.corpus.train_tokens, "seed": run.seed,
             "validation": member.validation_loss, "test": member.test_loss,
             "flops": member.flops, **results.origin(whole)}
        )  # fmt: skip
    if len(texts) > 1:
        raise ValueError(f"the reference was evaluated on {len(texts)} different texts, not on one")
    documents = comparison.document_frame(sums)
    return {"reference": pd.DataFrame(rows), "reference_documents": documents}


def reference_curve(table: pd.DataFrame) -> pd.DataFrame:
    """Of a reference table, the model that is best on validation at each number of tokens.

    The mean over seeds decides; it goes as far as every seed does. Columns as there, a row a
    (tokens, seed).
    """
    best = comparison.elected(table, "tokens", "model", "validation")
    best = best[best.groupby("tokens").seed.transform("nunique") == best.seed.nunique()]
    return best.sort_values(["seed", "tokens"], ignore_index=True)


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
    read off the reference of the same seed, or off the mean of the reference's seeds where it is
    none of them. A budget of 0 takes the one that is best on validation; a point that the curves
    do not have is left out. The interval is `efficiency.ratio_interval` over the seeds and the
    documents (resampled for both, alike); `clipped` is the share of draws beyond the reference,
    where its end stood in.

    Columns: method, epochs, loss, multiplier (nan when a seed lies beyond the reference), low,
    high, seeds, reached (seeds that do not), clipped, cases. The table that `summary` reads has one
    more, reference: "one recipe" or "tuned".

    Raises:
        ValueError: losses by document of two different texts.
    """
    texts = [
        table.set_index(comparison.POINT)
        .loc[comparison.TOKENS]
        .filter(regex=r"^d\d+$")
        .astype(float)
        for table in (documents, reference_documents)
    ]
    if not texts[0].equals(texts[1]):
        raise ValueError("the curves and the reference were evaluated on different documents")
    ours_of = comparison.resampled_losses(documents)
    theirs_of = comparison.resampled_losses(reference_documents)
    references = {}
    for seed in sorted(line.seed.unique()):
        rows = line[line.seed == seed].sort_values("tokens")
        names = rows[["model", "seed", "multiple"]].itertuples(index=False, name=None)
        references[seed] = rows.test.to_numpy(), np.array([theirs_of[name] for name in names])
    mean = [np.mean(each, axis=0) for each in zip(*references.values(), strict=True)]
    axis = np.sort(line.tokens.unique())
    ends = axis[0] / tokens, axis[-1] / tokens
    rows = []
    for method, epochs in points:
        curve = curves[curves.method == method]
        if epochs == 0 and len(curve):
            epochs = curve.groupby("epochs").validation.mean().idxmin()
        at = curve[curve.epochs == epochs]
        if at.empty:
            continue
        said, ratios, logs, clipped = [], [], [], 0
        for row in at.itertuples():
            reference, drawn = references.get(row.seed, mean)
            said.append(efficiency.describe_efficiency(row.loss, axis, reference, tokens))
            ratios.append(efficiency.data_efficiency(row.loss, axis, reference, tokens))
            found = np.array([
                efficiency.data_efficiency(loss, axis, other, tokens)
                for loss, other in zip(ours_of[method, row.seed, epochs], drawn.T, strict=True)
            ])  # fmt: skip
            clipped += int((~np.isfinite(found)).sum())
            logs.append(np.log(np.clip(np.nan_to_num(found, nan=ends[0]), *ends)))
        spread = float(np.mean(logs, axis=0).std())
        multiplier, low, high = efficiency.ratio_interval(ratios, spread)
        rows.append({"method": method, "epochs": epochs, "loss": at.loss.mean(),
                     "multiplier": multiplier, "low": low, "high": high, "seeds": len(at),
                     "reached": int(np.isfinite(ratios).sum()),
                     "clipped": clipped / np.size(logs), "cases": "; ".join(said)})  # fmt: skip
    return pd.DataFrame(rows)


def summary(folder: Path) -> pd.DataFrame:
    """The study in a few lines: every headline number with its interval, from the tables there.

    Columns: metric, value, low, high, seeds, split, reached (seeds that have a number; where not
    all do, the value is nan). Tables that are not there yet have no lines.
    """
    rows = []

    def line(metric: str, row: Any) -> None:
        rows.append(
            {"metric": metric, "value": row.multiplier, "low": row.low, "high": row.high,
             "seeds": int(row.seeds), "split": "test", "reached": int(row.reached)}
        )  # fmt: skip

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
