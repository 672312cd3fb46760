"""The study in a few lines."""

import pandas as pd

from q0lib.study.tables import store, summary


def test_summary_names_what_was_asked_and_skips_what_is_not_there(tmp_path):
    assert summary.table(tmp_path).empty
    multipliers = [
        {"protocol": protocol, "reference": reference, "axis": axis, "method": method,
         "multiplier": 2.0, "low": 1.5, "high": 2.5, "seeds": 3, "reached": 3, "own_k": 16}
        for protocol in ("clean", "paper")
        for reference in ("ensemble", "distilled_ensemble")
        for axis in ("epochs", "flops")
        for method in ("q0", "q0_k8", "q0_k16")
    ]  # fmt: skip
    store.write(pd.DataFrame(multipliers), tmp_path / "epoch_multipliers.csv")
    ratios = [
        {"method": method, "epochs": epochs, "multiplier": 7.0, "low": 6, "high": 8, "seeds": 3,
         "reached": 3, "reference": reference}
        for reference in ("one recipe", "tuned")
        for method, epochs in (("q0", 256), ("q0", 512), ("ensemble", 256))
    ]  # fmt: skip
    store.write(pd.DataFrame(ratios), tmp_path / "data_efficiency.csv")
    table = summary.table(tmp_path)
    assert list(table) == ["metric", "value", "low", "high", "seeds", "split", "reached"]
    asked = {
        "epoch_efficiency_best_k", "epoch_efficiency_k8", "flop_efficiency_best_k",
        "flop_efficiency_k8", "epoch_efficiency_own_k", "epoch_efficiency_vs_distilled_ensemble",
        "data_efficiency_q0", "data_efficiency_q0_512_epochs", "data_efficiency_baseline",
        "data_efficiency_q0_tuned_reference", "data_efficiency_q0_tuned_reference_512_epochs",
    }  # fmt: skip
    assert asked <= set(table.metric)
    assert table.metric.is_unique
    eight = pd.DataFrame(multipliers).assign(own_k=8)
    store.write(eight, tmp_path / "epoch_multipliers.csv")
    assert {"epoch_efficiency_k8", "epoch_efficiency_own_k"} <= set(
        summary.table(tmp_path).metric
    ), "the ensemble's own number may be eight too"
    assert (table.value[table.metric == "data_efficiency_baseline"] == 7.0).all()
    more = pd.DataFrame(multipliers)[lambda table: table.protocol == "clean"]
    more = more.drop(columns="protocol").assign(seeds=8, multiplier=2.5)
    store.write(more, tmp_path / "power_multipliers.csv")
    store.write(pd.DataFrame(ratios[:1]).assign(seeds=8), tmp_path / "power_data_efficiency.csv")
    table = summary.table(tmp_path).set_index("metric")
    assert table.index.is_unique
    assert table.value["epoch_efficiency_best_k_8_seeds"] == 2.5
    assert table.value["epoch_efficiency_best_k"] == 2.0
    assert table.seeds["data_efficiency_q0_256_epochs_8_seeds"] == 8
