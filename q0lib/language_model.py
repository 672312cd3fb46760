"""A model folder, loaded: it writes text, and says how likely a text is."""

import math
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import tokenizers
import torch
from safetensors.torch import load_file
from tokenizers.decoders import DecodeStream
from torch import Tensor
from tqdm import tqdm

from q0lib import config, corpus, export, files, prior, readers, runtime
from q0lib.model import GPT, Cache, mixed_logits
from q0lib.population import Population

SAMPLING = "mixture", "member"
_ROWS = 16  # windows scored at a time


@dataclass(frozen=True)
class Loss:
    """What a model loses on a text: nats in all, and what they are of."""

    nats: float
    tokens: int
    bytes: int
    documents: int

    @property
    def per_token(self) -> float:
        """Nats per token."""
        return self.nats / self.tokens

    @property
    def per_byte(self) -> float:
        """Nats per byte of UTF-8: what can be compared between tokenizers."""
        return self.nats / self.bytes

    @property
    def bits_per_byte(self) -> float:
        return self.per_byte / math.log(2)

    @property
    def perplexity(self) -> float:
        return math.exp(self.per_token)


def load(folder: Path | str, device: str = "auto") -> "LanguageModel":
    """The model of a folder that `export` wrote.

    Raises:
        FileNotFoundError: nothing is there.
        ValueError: it is no such folder, or damaged, or its tokenizer is that of another model.
    """
    path = Path(folder)
    if not path.exists():
        raise FileNotFoundError(f"there is no model folder {str(folder)!r}")
    if not export.is_model(path):
        raise ValueError(f"{path} is no model folder: it has no config.json that q0 wrote")
    about = files.read_json(path / "config.json")
    try:
        weights = [float(weight) for weight in about["mixture_weights"]]
        size, chars = about["tokenizer_size"], about["document_chars"]
        fields = config.Model.__dataclass_fields__
        shape = config.Model(**{name: about[name] for name in fields})
    except (LookupError, TypeError) as error:
        raise ValueError(f"{path}/config.json is of another q0lib ({error!r})") from error
    for name in ("tokenizer.json", "model.safetensors"):
        if not (path / name).exists():
            raise ValueError(f"{path} is no whole model folder: it has no {name}")
    try:
        tokenizer = corpus.read_tokenizer(path / "tokenizer.json")
    except Exception as error:  # tokenizers raises nothing more special
        raise ValueError(f"{path}/tokenizer.json cannot be read ({error})") from error
    found = tokenizer.get_vocab_size()
    if found != size or tokenizer.token_to_id(corpus.END_OF_TEXT) is None:
        raise ValueError(
            f"{path}/tokenizer.json has {found} tokens, the model's own has {size} with "
            f"{corpus.END_OF_TEXT} among them: it is another model's tokenizer"
        )
    files.open_tensors(path / "model.safetensors")
    where = runtime.device(device)
    tensors = load_file(path / "model.safetensors", device=str(where))
    members = []
    for i in range(len(weights)):
        member = GPT(shape).to(where)
        mark = f"members.{i}."
        own = {name.removeprefix(mark): v for name, v in tensors.items() if name.startswith(mark)}
        try:
            member.load_state_dict(own, strict=True)
        except RuntimeError as error:
            raise ValueError(f"{path}/model.safetensors does not fit its config.json") from error
        members.append(member.eval().requires_grad_(False))
    return LanguageModel(members, weights, tokenizer, chars)


def mixed(
    population: Population, chosen: prior.Selection | None = None, device: str = "auto"
) -> "LanguageModel":
    """A population whose weights were kept as a model, mixed as `export.write` would mix it.

    Raises:
        FileNotFoundError: the weights of a member were not kept.
        ValueError: a selection of other members.
    """
    chosen = export.by_directory(population) if chosen is None else chosen
    weights = prior.check_weights(chosen.weights, len(population))
    kept = [int(member) for member in chosen.members if weights[member] > 0]
    where = str(runtime.device(device))
    members = [population.model(member, where).requires_grad_(False) for member in kept]
    run = population.run
    return LanguageModel(
        members, [float(weights[i]) for i in kept], population.tokenizer, run.corpus.document_chars
    )


class LanguageModel:
    """`members` of one shape, mixed in probability by `weights`, and their tokenizer.

    Every document begins with <|endoftext|>, as in training; the models compute in fp32.
    """

    def __init__(
        self,
        members: list[GPT],
        weights: list[float],
        tokenizer: tokenizers.Tokenizer,
        document_chars: int = config.Corpus.document_chars,
    ) -> None:
        self.members, self.weights, self.tokenizer = members, weights, tokenizer
        self.document_chars = document_chars
        self.context = members[0].config.context
        self.device = members[0].head.weight.device
        self.end = int(tokenizer.token_to_id(corpus.END_OF_TEXT) or 0)  # it is there: `load`

    # --- text ----------------------------------------------------------------------------------

    def generate(self, prompt: str = "", tokens: int = 200, **options: object) -> str:
        """The text that follows `prompt`, as `stream` writes it, with its options."""
        return "".join(self.stream(prompt, tokens, **options))  # type: ignore[arg-type]

    def stream(
        self,
        prompt: str = "",
        tokens: int = 200,
        *,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        sampling: str = "mixture",
    ) -> Iterator[str]:
        """Text that follows `prompt` (none: the start of a document), in pieces as it is written.

        It ends after `tokens` tokens, or where the model ends the document. `temperature` 0 takes
        the likeliest token; `top_k` (0: off) and `top_p` leave out unlikely ones; `seed` decides
        all draws. `sampling` "mixture" mixes all members for every token; "member" draws one
        member for each token by its weight, which at temperature 1 gives the same distribution at
        the cost of one: the others read what was written in blocks, once they are drawn.

        A model sees at most its context: when that is full it goes on from the last half of it,
        and a longer prompt is cut on the left.

        Raises:
            ValueError: an option out of its range.
        Warns:
            UserWarning: the prompt does not fit.
        """
        for name, value, holds, allowed in (
            ("tokens", tokens, tokens >= 0, ">= 0"),
            ("temperature", temperature, temperature >= 0, ">= 0"),
            ("top_k", top_k, top_k >= 0, ">= 0 (0 = off)"),
            ("top_p", top_p, 0 < top_p <= 1, "in (0, 1]"),
            ("sampling", sampling, sampling in SAMPLING, f"one of {SAMPLING}"),
        ):
            if not holds:
                raise ValueError(f"{name} must be {allowed}, got {value!r}")
        ids = self.encoded(prompt).tolist()
        if len(ids) > self.context:
            warnings.warn(
                f"the prompt has {len(ids)} tokens, the model sees {self.context}: it is cut on "
                "the left",
                stacklevel=2,
            )
        return self._written(ids, tokens, temperature, top_k, top_p, seed, sampling)

    @torch.no_grad()
    def _written(
        self, ids: list[int], tokens: int, temperature: float, top_k: int, top_p: float,
        seed: int, sampling: str,
    ) -> Iterator[str]:  # fmt: skip
        generator = torch.Generator().manual_seed(seed)
        shares = torch.tensor(self.weights, dtype=torch.float64)
        if sampling == "mixture":
            readers_of = [_Reader(self.members, self.weights)]
        else:
            readers_of = [_Reader([member], [1.0]) for member in self.members]
        decoder = DecodeStream(skip_special_tokens=True)
        for _ in range(tokens):
            drawn = 0
            if len(readers_of) > 1:
                drawn = int(torch.multinomial(shares, 1, generator=generator))
            start = window_start(len(ids), self.context)
            mixed = readers_of[drawn].next_logits(ids, start)
            allowed = mixed[: self.tokenizer.get_vocab_size()].cpu()  # heads may be wider
            token = draw(allowed, temperature, top_k, top_p, generator)
            if token == self.end:
                return
            ids.append(token)
            if piece := decoder.step(self.tokenizer, token):
                yield piece

    # --- scores --------------------------------------------------------------------------------

    def score(self, text: str) -> pd.DataFrame:
        """log p, in nats, of every token of a document: columns id, token and log_p.

        Raises:
            ValueError: there is no text.
        """
        ids = self.encoded(text)
        if len(ids) < 2:
            raise ValueError("there is no text to score")
        (log_p,) = self._log_probs([ids])
        shown = [self.tokenizer.decode([token]) for token in ids[1:]]
        return pd.DataFrame({"id": ids[1:], "token": shown, "log_p": log_p})

    def loss(self, source: str | Path, column: str = "text", *, progress: bool = False) -> Loss:
        """What the model loses on a text (a str), or on the documents of a file or folder (a Path).

        Every token of a document is scored once, none of <|endoftext|>, in windows that are cut
        as held-out text is: the first begins with <|endoftext|>, the next with the last token of
        the one before. `column` is the text's in a file of rows.

        Raises:
            FileNotFoundError: nothing is there.
            ValueError: there is no text, or a file that cannot be read.
        """
        documents: Iterable[str] = [source] if isinstance(source, str) else readers.documents(
            source, column, self.document_chars
        )  # fmt: skip
        nats, tokens, size, count = 0.0, 0, 0, 0
        batch: list[np.ndarray] = []
        with tqdm(desc="scoring", unit="document", leave=False, disable=not progress) as bar:
            for ids, length in corpus.encoded(documents, self.tokenizer, "int64"):
                tokens, size, count = tokens + len(ids) - 1, size + length, count + 1
                batch.append(ids)
                if sum(map(len, batch)) >= _ROWS * self.context:
                    nats -= sum(float(each.sum()) for each in self._log_probs(batch))
                    batch = []
                bar.update()
            nats -= sum(float(each.sum()) for each in self._log_probs(batch))
        if not tokens:
            raise ValueError("there is no text to score")
        return Loss(nats, tokens, size, count)

    def encoded(self, text: str) -> np.ndarray:
        """The token ids of a document, int64 [n], <|endoftext|> before them."""
        return next(corpus.encoded([text], self.tokenizer, "int64"))[0]

    @torch.no_grad()
    def _log_probs(self, documents: list[np.ndarray]) -> list[np.ndarray]:
        """log p, float64 [n - 1], of all but the first of the n tokens of each document."""
        windows = [
            document[start : start + self.context + 1]
            for document in documents
            for start in range(0, len(document) - 1, self.context)
        ]
        found = []
        for first in range(0, len(windows), _ROWS):
            rows = windows[first : first + _ROWS]
            width = max(map(len, rows))
            block = torch.zeros(len(rows), width, dtype=torch.int64)  # what follows tells nothing
            for row, window in zip(block, rows, strict=True):
                row[: len(window)] = torch.from_numpy(window)
            block = block.to(self.device)
            logits = mixed_logits(self.members, self.weights, block[:, :-1])
            log_p = logits.log_softmax(-1).gather(2, block[:, 1:, None])[..., 0].double().cpu()
            found += [
                each[: len(window) - 1].numpy() for each, window in zip(log_p, rows, strict=True)
            ]
        scored = np.concatenate(found) if found else np.empty(0)
        ends = np.cumsum([len(document) - 1 for document in documents])
        return np.split(scored, ends[:-1])


class _Reader:
    """Members that read together, and how far they have read."""

    def __init__(self, members: list[GPT], weights: list[float]) -> None:
        self.members, self.weights = members, weights
        self._begin(0)

    def _begin(self, start: int) -> None:
        self.start = start
        self.caches = [Cache(member.config.context) for member in self.members]

    def next_logits(self, ids: list[int], start: int) -> Tensor:
        """Logits [V] of what follows ids[start:], of which only what is new is read."""
        if start != self.start:
            self._begin(start)
        new = ids[start + self.caches[0].length :]
        tokens = torch.tensor([new], device=self.members[0].head.weight.device)
        return mixed_logits(self.members, self.weights, tokens, self.caches, last=1)[0, -1]


def window_start(length: int, context: int) -> int:
    """The first of `length` tokens that is read for the next: a full context is left for the last
    half of it, which then fills up again."""
    fresh = context + 1 - context // 2
    return -(-max(0, length - context) // fresh) * fresh


def draw(
    logits: Tensor, temperature: float, top_k: int, top_p: float, generator: torch.Generator
) -> int:
    """A token by its logits [V]; the likeliest at temperature 0."""
    if not temperature:
        return int(logits.argmax())
    logits = logits.double() / temperature
    if 0 < top_k < len(logits):
        logits[logits < logits.topk(top_k).values[-1]] = -torch.inf
    p = logits.softmax(-1)
    if top_p < 1:  # the fewest tokens that have so much together
        ordered, order = p.sort(descending=True, stable=True)
        p[order[ordered.cumsum(0) - ordered >= top_p]] = 0
    return int(torch.multinomial(p, 1, generator=generator))
