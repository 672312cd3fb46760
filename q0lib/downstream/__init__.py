"""Downstream tasks: what a model, or a mixture of models, gets right.

`adapter` answers lm-evaluation-harness for any model of ours, `tasks` makes tasks of that harness
from held-out text, `evaluation` runs tasks and keeps what was answered item by item. The harness is
an optional dependency (`pip install q0lib[lm-eval]`) of the first and the last.
"""
