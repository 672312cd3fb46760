"""The one-epoch reference, and where methods lie on it."""

import numpy as np
import pandas as pd
import pytest
from tiny import tiny_study

from q0lib import population, train
from q0lib.study.plan import Experiment
from q0lib.study.tables import data_efficiency, intervals

pytestmark = pytest.mark.filterwarnings("ignore:.*tokens")


def test_reference_tables_hold_every_run_and_refuse_two_texts(text, run_folder):
    found = []
    faster = "matrix_lr=0.05"
    for multiple, part, changed in (
        (1, "reference", ()), (2, "reference", ()), (2, "tuned_reference", (f"single.{faster}",)),
    ):  # fmt: skip
        run = tiny_study(0, f"corpus.train_tokens={600 * multiple}", *changed).run("single", 1)
        train.train_population(run, progress=False)
        found.append((Experiment(part, "", "single", 1, changed), run))
    size = f"width {run.model.width}"
    tables = data_efficiency.reference_tables(found, 600)
    assert tables["reference"].multiple.tolist() == [1, 2, 2]
    assert tables["reference"].model.tolist() == [size, size, f"{size} {faster}"]
    assert tables["reference"].recipe.tolist() == ["", "", faster]
    losses = intervals.resampled_losses(tables["reference_documents"])
    assert set(losses) == {(size, 0, 1.0), (size, 0, 2.0), (f"{size} {faster}", 0, 2.0)}
    test = population.load(found[1][1]).members.test_loss.item()
    sums = tables["reference_documents"].set_index(intervals.POINT).sum(axis=1)
    assert sums[size, 0, 2.0] / sums[intervals.TOKENS] == pytest.approx(test)
    other = tiny_study(0, "corpus.test_tokens=300").run("single", 1)
    train.train_population(other, progress=False)
    with pytest.raises(ValueError, match="evaluated on 2 different texts"):
        data_efficiency.reference_tables([*found, (found[0][0], other)], 600)


def reference():
    return pd.DataFrame(
        [
            {"model": size, "tokens": tokens, "multiple": tokens / 100, "seed": seed,
             "validation": loss, "test": loss + 0.1 * seed}
            for seed in (0, 1)
            for size, losses in {"s": [5.0, 4.6, 4.4], "l": [5.2, 4.5, 4.0]}.items()
            for tokens, loss in zip([100, 200, 400], losses, strict=True)
        ]
    )  # fmt: skip


def by_document(points, spread):
    """Documents of ten tokens that add up to the losses of `points`, each off by its own."""
    rng = np.random.default_rng(0)
    sums = {("tokens", -1, 0.0): np.full(40, 10.0)}
    for *point, loss in points:
        noise = rng.normal(0, spread, 40)
        sums[tuple(point)] = 10 * (loss + noise - noise.mean())
    return intervals.document_frame(sums)


def test_the_reference_takes_the_best_size_and_efficiency_reads_it():
    line = data_efficiency.reference_curve(reference())
    assert line[line.seed == 0].model.tolist() == ["s", "l", "l"]
    curves = pd.DataFrame(
        {"method": ["q0"] * 4, "seed": [0, 0, 1, 1], "epochs": [8, 16] * 2,
         "validation": [4.9, 4.3] * 2, "loss": [4.9, 4.3, 4.8, 4.55]}
    )  # fmt: skip
    columns = ["model", "seed", "multiple", "test"]
    texts = [
        by_document(curves[["method", "seed", "epochs", "loss"]].to_numpy(), spread)
        for spread in (0.0, 0.1)
    ]
    of_line = by_document(reference()[columns].to_numpy(), 0.0)
    given = (line, 100, [("q0", 16), ("q0", 32)])
    named = texts[0].assign(protocol="clean")  # as the table of 04 has it
    table = data_efficiency.table(curves, *given, named, of_line)
    assert len(table) == 1, "a budget that the curves do not have is left out"
    row = table.iloc[0]
    # Seed 0's reference has 4.5 at 200 and 4.0 at 400: 4.3 lies at 280. Seed 1's has 4.6 and 4.1:
    # 4.55 lies at 220.
    assert row.cases == "2.80x; 2.20x"
    assert row.multiplier == pytest.approx(np.sqrt(2.8 * 2.2))
    of_seeds = 12.7062 * np.log(2.8 / 2.2) / 2
    assert row.high / row.multiplier == pytest.approx(np.exp(of_seeds), rel=1e-4)
    # A reference without these seeds is read at its mean: 4.55 at 200, 4.05 at 400.
    others = line.assign(seed=line.seed + 5)
    unpaired = data_efficiency.table(
        curves, others, *given[1:], texts[0], by_document(
            reference().assign(seed=lambda t: t.seed + 5)[columns].to_numpy(), 0.0
        )
    ).iloc[0]  # fmt: skip
    assert unpaired.cases == "3.00x; 2.00x"
    wider = data_efficiency.table(curves, *given, texts[1], of_line).iloc[0]
    assert wider.high > row.high
    # With one seed the documents alone: the slope there is 200 tokens for 0.5 nats.
    alone = data_efficiency.table(curves[curves.seed == 0], *given, texts[1], of_line).iloc[0]
    drawn = intervals.resampled_losses(texts[1])["q0", 0, 16.0]
    spread = np.log((200 + (4.5 - drawn) / 0.5 * 200) / 100).std()
    assert np.log(alone.high / alone.multiplier) == pytest.approx(1.96 * spread, rel=1e-3)
    assert alone.clipped == 0
    best = data_efficiency.table(curves, line, 100, [("q0", 0)], texts[0], of_line)
    assert best.epochs.item() == 16
    beyond = data_efficiency.table(curves.assign(loss=3.0), *given, texts[0], of_line).iloc[0]
    assert np.isnan(beyond.multiplier)
    assert (beyond.reached, beyond.cases) == (0, "beyond 4.0x; beyond 4.0x")
    shorter = of_line.drop(columns="d39")
    with pytest.raises(ValueError, match="different documents"):
        data_efficiency.table(curves, *given, texts[0], shorter)


def test_a_reference_of_some_seeds_alone_is_not_chosen():
    table = reference()
    ended = table[(table.seed == 0) | (table.tokens < 400)]
    assert data_efficiency.reference_curve(ended).tokens.tolist() == [100, 200] * 2
    lucky = table[(table.seed == 0) & (table.model == "s")].assign(model="lucky", validation=1.0)
    line = data_efficiency.reference_curve(pd.concat([table, lucky]))
    assert "lucky" not in set(line.model)
    assert len(line) == 6
