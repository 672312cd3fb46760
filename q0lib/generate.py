"""Text from a model folder, as it is written.

python -m q0lib generate model/ --prompt "My fellow citizens"
python -m q0lib generate model/ --prompt "My fellow" --members one --temperature 1
"""

from collections.abc import Sequence
from pathlib import Path

from q0lib import command


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns its exit status."""
    parser = command.parser("q0lib generate", __doc__ or "")
    parser.add_argument("model", type=Path, help="a model folder")
    parser.add_argument("--prompt", default="", help="default: none, the start of a document")
    parser.add_argument("--tokens", type=int, default=200, help="at most (default 200)")
    parser.add_argument("--temperature", type=float, default=0.8, help="default 0.8; 0: greedy")
    parser.add_argument("--top-k", type=int, default=0, help="only the K likeliest (0: all)")
    parser.add_argument("--top-p", type=float, default=1.0, help="only the likeliest share")
    parser.add_argument("--seed", type=int, default=0, help="of all draws (default 0)")
    parser.add_argument(
        "--members",
        choices=("all", "one"),
        default="all",
        help="of a mixture, for a token: all mixed, or one drawn by its weight",
    )
    given = parser.parse_args(argv)

    def work() -> None:
        from q0lib import language_model

        pieces = language_model.load(given.model).stream(
            given.prompt,
            given.tokens,
            temperature=given.temperature,
            top_k=given.top_k,
            top_p=given.top_p,
            seed=given.seed,
            sampling={"all": "mixture", "one": "member"}[given.members],
        )
        print(given.prompt, end="", flush=True)
        for piece in pieces:
            print(piece, end="", flush=True)
        print()

    return command.status(parser.prog, work)
