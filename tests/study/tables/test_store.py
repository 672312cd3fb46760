"""Tables on disk."""

import pandas as pd
import pytest

from q0lib.study.tables import store


def test_a_table_comes_back_and_what_it_lacks_is_said(tmp_path):
    path = tmp_path / "t.csv"
    table = pd.DataFrame(
        {"method": ["q0", "q0", "single"], "epochs": [4, 16, 16], "loss": [4.7654321, 4.5, 4.9]}
    )
    store.write(table, path)
    pd.testing.assert_frame_equal(store.read(path), table, rtol=1e-5)
    asked = store.read(path, epochs=[16], method=["q0"])
    assert asked.loss.tolist() == [4.5]
    with pytest.raises(ValueError, match=r"has no epochs 8, it has \[4, 16\]; run the notebook"):
        store.read(path, epochs=[4, 8])
    with pytest.raises(FileNotFoundError, match="recompute=True"):
        store.read(tmp_path / "none.csv")
