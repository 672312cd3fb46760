"""How much fresh text one epoch needs to match a method: `reference.csv`, `data_efficiency.csv`."""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from q0lib import efficiency, population
from q0lib.study import longer_test, plan
from q0lib.study.tables import intervals, mixtures


def reference_tables(
    found: plan.Trained, tokens: int, test_tokens: int = 0
) -> dict[str, pd.DataFrame]:
    """One epoch on more and more tokens; with `test_tokens`, on a `longer_test`.

    reference: a row a (model, multiple of `tokens`, seed); `model` is the size, and the recipe
    where it is not the one for all (`recipe`). reference_documents: the same runs' test loss by
    document, as `intervals.document_frame` has it, method the model and epochs the multiple.

    Raises:
        ValueError: runs that were evaluated on different text.
    """
    rows, sums = [], {}
    texts = set()
    for each, run in found:
        whole = population.load(run)
        if test_tokens:
            whole = longer_test.read(whole, test_tokens, progress=False)
        record = population.read_record(population.member_path(run.directory, 0, 0))
        texts.add(record["fingerprints"]["test"])
        size = f"width {run.model.width}"
        fields = [text.removeprefix("single.") for text in each.overrides if "single." in text]
        recipe = " ".join(fields) if each.part == "tuned_reference" else ""
        model, multiple = f"{size} {recipe}".strip(), run.corpus.train_tokens / tokens
        sums[intervals.TOKENS] = intervals.document_sizes(whole)
        sums[model, run.seed, multiple] = intervals.document_sums(whole, np.ones(1))
        member = whole.members.iloc[-1]
        rows.append(
            {"model": model, "size": size, "recipe": recipe, "multiple": multiple,
             "tokens": run.corpus.train_tokens, "seed": run.seed,
             "validation": member.validation_loss, "test": member.test_loss,
             "flops": member.flops, **mixtures.origin(whole)}
        )  # fmt: skip
    if len(texts) > 1:
        raise ValueError(f"the reference was evaluated on {len(texts)} different texts, not on one")
    documents = intervals.document_frame(sums)
    return {"reference": pd.DataFrame(rows), "reference_documents": documents}


def reference_curve(table: pd.DataFrame) -> pd.DataFrame:
    """Of a reference table, the model that is best on validation at each number of tokens.

    The mean over seeds decides; it goes as far as every seed does. Columns as there, a row a
    (tokens, seed).
    """
    best = intervals.elected(table, "tokens", "model", "validation")
    best = best[best.groupby("tokens").seed.transform("nunique") == best.seed.nunique()]
    return best.sort_values(["seed", "tokens"], ignore_index=True)


def table(
    curves: pd.DataFrame,
    line: pd.DataFrame,
    tokens: int,
    points: Sequence[tuple[str, float]],
    documents: pd.DataFrame,
    reference_documents: pd.DataFrame,
) -> pd.DataFrame:
    """How many times `tokens` the reference needs for the test loss of each (method, budget).

    `curves` as `epoch_efficiency.curves` gives them, `line` as `reference_curve`. A seed's loss is
    read off the reference of the same seed, or off the mean of the reference's seeds where it is
    none of them. A budget of 0 takes the one that is best on validation; a point that the curves
    do not have is left out. The interval is `efficiency.ratio_interval` over the seeds and the
    documents (resampled for both, alike); `clipped` is the share of draws beyond the reference,
    where its end stood in.

    Columns: method, epochs, loss, multiplier (nan when a seed lies beyond the reference), low,
    high, seeds, reached (seeds that do not), clipped, cases. `summary.table` reads them with one
    more, reference: "one recipe" or "tuned".

    Raises:
        ValueError: losses by document of two different texts.
    """
    texts = [
        table.set_index(intervals.POINT).loc[intervals.TOKENS].filter(regex=r"^d\d+$").astype(float)
        for table in (documents, reference_documents)
    ]
    if not texts[0].equals(texts[1]):
        raise ValueError("the curves and the reference were evaluated on different documents")
    ours_of = intervals.resampled_losses(documents)
    theirs_of = intervals.resampled_losses(reference_documents)
    references = {}
    for seed in sorted(line.seed.unique()):
        rows = line[line.seed == seed].sort_values("tokens")
        names = rows[["model", "seed", "multiple"]].itertuples(index=False, name=None)
        references[seed] = rows.test.to_numpy(), np.array([theirs_of[name] for name in names])
    mean = [np.mean(each, axis=0) for each in zip(*references.values(), strict=True)]
    axis = np.sort(line.tokens.unique())
    rows = []
    for method, epochs in points:
        curve = curves[curves.method == method]
        if epochs == 0 and len(curve):
            epochs = curve.groupby("epochs").validation.mean().idxmin()
        at = curve[curve.epochs == epochs]
        if at.empty:
            continue
        said, ratios, texts_drawn = [], [], []
        for row in at.itertuples():
            reference, drawn = references.get(row.seed, mean)
            said.append(efficiency.describe_efficiency(row.loss, axis, reference, tokens))
            ratios.append(efficiency.data_efficiency(row.loss, axis, reference, tokens))
            texts_drawn.append((axis, drawn, ours_of[method, row.seed, epochs]))
        spread, clipped = intervals.crossing_spread(texts_drawn)
        multiplier, low, high = efficiency.ratio_interval(ratios, spread)
        rows.append({"method": method, "epochs": epochs, "loss": at.loss.mean(),
                     "multiplier": multiplier, "low": low, "high": high, "seeds": len(at),
                     "reached": int(np.isfinite(ratios).sum()),
                     "clipped": clipped, "cases": "; ".join(said)})  # fmt: skip
    return pd.DataFrame(rows)
