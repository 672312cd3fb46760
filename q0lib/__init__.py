"""q0lib: train a population of snapshots, weight it with a learned prior, measure what it saves.

Text becomes tokens (`corpus`), tokens train snapshots (`trajectory`), snapshots leave
probabilities (`population`), probabilities give weights (`prior`), weights give a loss for every
K (`ensemble`), losses give multipliers (`efficiency`), multipliers become figures (`plots`).
`study` measures all of that, `sweeps` runs the notebooks that tell of it.
"""

__version__ = "0.1.0"
