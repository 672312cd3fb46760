"""q0lib: train a population of snapshots, weight it with a learned prior, measure what it saves.

Text becomes tokens (`corpus`), tokens train snapshots (`trajectory`), snapshots leave
probabilities (`population`), probabilities give weights (`prior`), weights give a loss for every
K (`ensemble`), losses give multipliers (`efficiency`), multipliers become figures (`plots`); and
the population becomes a model that people can use (`export`, `q0lib.load`).
`study` measures all of that, `sweeps` runs the notebooks that tell of it.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from q0lib.language_model import LanguageModel

__version__ = "0.1.0"


def load(folder: str, device: str = "auto") -> "LanguageModel":
    """The model of a folder that `export` wrote; see `language_model.load`."""
    from q0lib import language_model

    return language_model.load(folder, device)
