"""What a model folder loses on a text of yours: nats per token, perplexity, bits per byte.

python -m q0lib score model/ my_text.txt
"""

from collections.abc import Sequence
from pathlib import Path

from q0lib import command


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns its exit status."""
    parser = command.parser("q0lib score", __doc__ or "")
    parser.add_argument("model", type=Path, help="a model folder")
    parser.add_argument("text", type=Path, help="a .txt, .jsonl, .csv or .parquet file, or folder")
    parser.add_argument("--column", default="text", help="of a file of rows (default: text)")
    given = parser.parse_args(argv)

    def work() -> None:
        from q0lib import language_model

        loss = language_model.load(given.model).loss(given.text, given.column, progress=True)
        print(f"loss            {loss.per_token:.4f} nats per token")
        print(f"perplexity      {loss.perplexity:.2f}")
        print(f"bits per byte   {loss.bits_per_byte:.4f}")
        print(f"tokens          {loss.tokens:,} in {loss.documents:,} documents")
        print(f"bytes           {loss.bytes:,}")

    return command.status(parser.prog, work)
