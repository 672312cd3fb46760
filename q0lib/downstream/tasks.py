"""Tasks made from held-out text, for lm-evaluation-harness, that show a signal at any scale.

*which_passage*: which of four passages does this continuation follow? The continuation is the same
each time, so that its own probability cancels. *which_continuation*: which of four continuations
follows this passage, by log p(continuation | passage) - log p(continuation) (`acc_mutual_info`)?
Both ask all pairs of four passages and their continuations, each from a document of its own.
*last_word*: the word that ends a passage and stood in it before, written greedily, as in LAMBADA
(Paperno et al. 2016).

A folder holds a `.jsonl` and a `.yaml` for each, and is what `TaskManager(include_path=...)` reads.
Every item says which document it is from: items of one document are not independent.
"""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from q0lib import files

NAMES = "which_passage", "which_continuation", "last_word"
CHOICES = 4
# A word with the white space before it, or where there is none a piece of the text.
_WORD = re.compile(r"\s*\S{1,24}")
_COMMON = """\
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
target_delimiter: ""
num_fewshot: 0
metadata:
  version: 1.0
"""
_TASKS = {
    "which_passage": """\
output_type: multiple_choice
doc_to_text: gold
doc_to_choice: passages
doc_to_target: continuation
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
""",
    "which_continuation": """\
output_type: multiple_choice
doc_to_text: passage
doc_to_choice: continuations
doc_to_target: gold
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
  - metric: acc_mutual_info
    aggregation: mean
    higher_is_better: true
""",
    "last_word": """\
output_type: loglikelihood
doc_to_text: passage
doc_to_target: word
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
  - metric: perplexity
    aggregation: perplexity
    higher_is_better: false
""",
}


def write(
    folder: Path | str,
    documents: Sequence[str],
    items: int = 2000,
    *,
    passage_chars: int = 160,
    continuation_chars: int = 60,
    seed: int = 0,
) -> dict[str, int]:
    """Make the tasks from `documents` in `folder`; says how many items each has.

    At most `items` of each, fewer where the text has no more: every stretch of text is used once.
    A passage has about `passage_chars` characters, whole words, a continuation about
    `continuation_chars`. The same documents, sizes and seed give the same files. The documents
    must be none that a model in question was trained on.

    Raises:
        ValueError: too little text for a single item of one of the tasks.
    """
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    pairs = _pairs(documents, passage_chars, continuation_chars, rng)
    found = {
        **_choices(pairs, items, rng),
        "last_word": _last_words(documents, items, passage_chars + continuation_chars, rng),
    }
    for name in NAMES:
        if not found[name]:
            raise ValueError(
                f"{len(documents)} documents of {sum(map(len, documents)):,} characters are too "
                f"little text for an item of {name!r} ({CHOICES} documents of more than "
                f"{passage_chars + continuation_chars} characters, a word that comes again)"
            )
        data = (target / f"{name}.jsonl").resolve()
        lines = [json.dumps(item, ensure_ascii=False) for item in found[name]]
        files.write_text(data, "\n".join(lines) + "\n")
        text = _COMMON.format(name=name, data=json.dumps(str(data))) + _TASKS[name]
        files.write_text(target / f"{name}.yaml", text)
    return {name: len(rows) for name, rows in found.items()}


def _pairs(
    documents: Sequence[str], passage: int, continuation: int, rng: np.random.Generator
) -> list[tuple[int, str, str]]:
    """Passages and what follows them, (document, passage, continuation): of all documents in turn,
    so that neighbours in the list are of different ones."""
    streams = []
    for at in rng.permutation(len(documents)):
        cut = _stretches(documents[at], (passage, continuation))
        streams.append([(int(at), before, after) for before, after in cut])
    longest = max(map(len, streams), default=0)
    return [stream[i] for i in range(longest) for stream in streams if i < len(stream)]


def _stretches(document: str, sizes: Sequence[int]) -> Iterator[tuple[str, ...]]:
    """The document cut from its start into stretches of parts of these sizes; a rest is left."""
    parts: list[str] = [""]
    for word in _WORD.findall(document):
        parts[-1] += word
        if len(parts[-1].strip()) >= sizes[len(parts) - 1]:
            if len(parts) == len(sizes):
                yield parts[0].strip(), *parts[1:]
                parts = [""]
            else:
                parts.append("")


def _choices(
    pairs: list[tuple[int, str, str]], items: int, rng: np.random.Generator
) -> dict[str, list[dict]]:
    """The items of both tasks: of every four pairs four each, the right answer in each place."""
    found: dict[str, list[dict]] = {"which_passage": [], "which_continuation": []}
    group: list[tuple[int, str, str]] = []
    for pair in pairs:
        if len(found["which_passage"]) + CHOICES > items:
            break
        if pair[0] in {document for document, _, _ in group}:
            continue  # at the end of the list, where few documents are left
        group.append(pair)
        if len(group) < CHOICES:
            continue
        passages = [passage for _, passage, _ in group]
        continuations = [continuation for _, _, continuation in group]
        for gold, (document, passage, continuation) in enumerate(group):
            common = {"document": document, "gold": gold}
            found["which_passage"].append(
                {**common, "passages": passages, "continuation": continuation}
            )
            found["which_continuation"].append(
                {**common, "passage": passage, "continuations": continuations}
            )
        group = []
    return found


def _last_words(
    documents: Sequence[str], items: int, size: int, rng: np.random.Generator
) -> list[dict]:
    """Passages up to a word of four letters or more that stood in them before, of all documents in
    turn."""
    streams = []
    for at in rng.permutation(len(documents)):
        stream = []
        for (stretch,) in _stretches(documents[at], (2 * size,)):
            if item := _ending(stretch, size):
                stream.append({"document": int(at), **item})
        streams.append(stream)
    longest = max(map(len, streams), default=0)
    return [stream[i] for i in range(longest) for stream in streams if i < len(stream)][:items]


def _ending(stretch: str, size: int) -> dict[str, str] | None:
    """The first word after `size` characters that repeats one before it, and what comes before."""
    before: set[str] = set()
    passage = ""
    for word in _WORD.findall(stretch):
        plain = re.sub(r"\W", "", word).lower()
        bare = word.rstrip(".,;:!?\"')")
        if len(passage) >= size and len(plain) >= 4 and plain in before and bare.strip().isalpha():
            return {"passage": passage, "word": bare}
        before.add(plain)
        passage += word
    return None
