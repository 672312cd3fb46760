"""One model out of your text, and what can be done with it.

    python -m q0lib my_text.jsonl --out model/        trains a population, leaves a model folder
    python -m q0lib generate model/ --prompt "..."    writes text
    python -m q0lib score model/ my_text.txt          loss, perplexity and bits per byte of a text
    python -m q0lib evaluate model/ --tasks piqa,blimp   downstream tasks, answer by answer
    python -m q0lib export RUN_DIRECTORY --out model/ a run's member, or mixture, as a model folder

`python -m q0lib <command> --help` says the rest of each.
"""

import importlib
import sys
from collections.abc import Sequence

COMMANDS = {
    "generate": "q0lib.generate",
    "score": "q0lib.score",
    "evaluate": "q0lib.downstream.evaluation",
    "export": "q0lib.export",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Hand the arguments to the command that they name; a text is for `own_text`."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(f"usage: python -m q0lib ...\n\n{__doc__}", end="")
        return 0 if arguments else 2
    name = arguments[0]
    if name in COMMANDS:
        return importlib.import_module(COMMANDS[name]).main(arguments[1:])
    return importlib.import_module("q0lib.own_text").main(arguments)


if __name__ == "__main__":
    sys.exit(main())
