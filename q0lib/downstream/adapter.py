"""A model of ours as lm-evaluation-harness asks it: `lm_eval.api.model.LM`.

A mixture scores a continuation token by token, sum_t log sum_i w_i p_i(x_t | x_<t), as the paper's
ensembles do. The mixture of whole sequences, log sum_i w_i prod_t p_i(x_t | x_<t), is the same
chain with the weights that the members' past success leaves them; it can choose otherwise, and is
an option.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from lm_eval import utils
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from torch import Tensor
from tqdm import tqdm

from q0lib import distill, runtime
from q0lib.language_model import LanguageModel

MIXING = "token", "sequence"
_WRITTEN = 256  # tokens that a task gets where it does not say

# Tokens that are read, and those after them that are scored.
Pair = tuple[tuple[int, ...], tuple[int, ...]]


class Scorer(TemplateLM):
    """`model` for lm-evaluation-harness; a mixture is mixed by "token" or by "sequence".

    `precision` is that of the hidden states, "fp32" or "bf16"; probabilities are fp32.

    Every context begins with <|endoftext|>, as documents did in training; an empty one is that
    token alone. What does not fit is cut on the left. Requests that tokenise alike are scored once,
    for as long as the scorer lives.

    Raises:
        ValueError: another way of mixing, or precision.
    """

    def __init__(
        self,
        model: LanguageModel,
        mixing: str = "token",
        precision: str = "fp32",
        *,
        progress: bool = True,
    ) -> None:
        super().__init__()
        for name, value, known in (
            ("mixing", mixing, MIXING), ("precision", precision, tuple(runtime.DTYPES))
        ):  # fmt: skip
            if value not in known:
                raise ValueError(f"{name} must be one of {known}, got {value!r}")
        self.model, self.mixing, self.progress = model, mixing, progress
        self._device, self._dtype = model.device, runtime.DTYPES[precision]
        # Tokens of a forward pass: as many as a held-out batch has on the CPU, more where that is
        # what keeps the device busy.
        self._tokens_at_once = (16 if model.device.type == "cpu" else 64) * model.context
        self._scored: dict[Pair, tuple[float, bool]] = {}

    @property
    def eot_token_id(self) -> int:
        return self.model.end

    @property
    def max_length(self) -> int:
        return self.model.context

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Token ids of a text, <|endoftext|> before them unless `add_special_tokens` is False."""
        ids = self.model.encoded(string).tolist()
        return ids[1:] if add_special_tokens is False else ids

    def loglikelihood(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """log p of each continuation, nats, and whether it is what the mixture would write."""
        return super().loglikelihood(requests, disable_tqdm=True)  # the bar of `_score` says more

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        pairs = [self._cut(context, continuation) for _, context, continuation in requests]
        self._score(pairs)
        return [self._scored[pair] for pair in pairs]

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Summed log p, nats, of whole texts, every token once, in windows that do not overlap."""
        windows = []
        for request in requests:
            ids = self.tok_encode(request.args[0], add_special_tokens=False)
            rolled = utils.get_rolling_token_windows(ids, self.eot_token_id, self.max_length, 1)
            windows.append([self._cut(*utils.make_disjoint_window(window)) for window in rolled])
        self._score([pair for text in windows for pair in text])
        return [sum(self._scored[pair][0] for pair in text) for text in windows]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """What the model writes after each context, greedily unless the task says otherwise, up to
        the first of its stops."""
        written = []
        for request in tqdm(requests, desc="generating", leave=False, disable=not self.progress):
            context, options = request.args
            stops = options.get("until") or []
            stops = [stops] if isinstance(stops, str) else stops
            sampled = options.get("do_sample", False)
            text = ""
            for piece in self.model.stream(
                context,
                options.get("max_gen_toks", _WRITTEN),
                temperature=options.get("temperature", 1.0) if sampled else 0.0,
                top_k=options.get("top_k", 0) if sampled else 0,
                top_p=options.get("top_p", 1.0) if sampled else 1.0,
            ):
                text += piece
                if any(stop in text for stop in stops):
                    break
            ends = [text.find(stop) for stop in stops if stop in text]
            written.append(text[: min(ends)] if ends else text)
        return written

    def _cut(self, context: Sequence[int], continuation: Sequence[int]) -> Pair:
        """What the model reads and what it is asked, cut on the left to what it sees."""
        whole = tuple(context) + tuple(continuation)
        kept = whole[-(self.max_length + 1) :]
        scored = min(len(continuation), len(kept) - 1)
        return kept[: len(kept) - scored], kept[len(kept) - scored :]

    def _score(self, pairs: list[Pair]) -> None:
        """Score what was not scored before, the longest first: those of a length together."""
        new = sorted(
            {pair for pair in pairs if pair not in self._scored},
            key=lambda pair: (-len(pair[0]) - len(pair[1]), pair),
        )
        with tqdm(
            total=len(new), desc="scoring", unit="request", leave=False, disable=not self.progress
        ) as bar:
            while new:
                width = len(new[0][0]) + len(new[0][1]) - 1
                rows = max(1, self._tokens_at_once // max(1, width))
                batch, new = new[:rows], new[rows:]
                self._scored.update(zip(batch, self._log_likelihoods(batch), strict=True))
                bar.update(len(batch))

    @torch.no_grad()
    def _log_likelihoods(self, batch: list[Pair]) -> Iterator[tuple[float, bool]]:
        """log p of each continuation, nats, and whether it is what the mixture would write."""
        width = max(len(context) + len(scored) for context, scored in batch) - 1
        block = torch.zeros(len(batch), width, dtype=torch.int64)  # what follows tells nothing
        rows: list[int] = []
        columns: list[int] = []
        targets: list[int] = []
        for row, (context, scored) in enumerate(batch):
            ids = (*context, *scored)[:-1]
            block[row, : len(ids)] = torch.tensor(ids)
            rows += [row] * len(scored)
            columns += range(len(context) - 1, len(ids))
            targets += scored
        device = self.model.device
        asked = torch.tensor(targets, device=device)
        place = torch.tensor(rows, device=device), torch.tensor(columns, device=device)
        lengths = [len(scored) for _, scored in batch]
        block = block.to(device)
        hidden = [member(block, self._dtype)[place] for member in self.model.members]
        said, greedy = self._mixed(hidden, asked, lengths)
        for log_p, first in zip(said.split(lengths), greedy.split(lengths), strict=True):
            total = log_p.sum() if self.mixing == "token" else log_p[-1] if len(log_p) else 0.0
            yield float(total), bool(first.all())

    def _mixed(
        self, hidden: list[Tensor], asked: Tensor, lengths: list[int]
    ) -> tuple[Tensor, Tensor]:
        """log p of the tokens `asked` [n], float64, and whether each is the likeliest [n].

        By sequence log p is that of all up to there: the members' weights are multiplied by what
        they gave to the tokens before, which leaves the likeliest one as it is.
        """
        members = self.model.members
        shares: list[Tensor] = []
        for member, states, weight in zip(members, hidden, self.model.weights, strict=True):
            share = torch.full(asked.shape, math.log(weight), device=asked.device)
            if self.mixing == "sequence":
                own = distill.token_log_probs(
                    states, member.head.weight, asked, member.config.softcap
                )
                share += torch.cat([part.cumsum(0) - part for part in own.split(lengths)])
            shares.append(share)
        words = self.model.tokenizer.get_vocab_size()  # heads may be wider
        said, greedy = [], []
        for part in distill.chunks(hidden[0], members[0].head.weight):
            mixed: Tensor | None = None
            for member, states, share in zip(members, hidden, shares, strict=True):
                log_p = member.read_out(states[part]).log_softmax(-1) + share[part, None]
                mixed = log_p if mixed is None else torch.logaddexp(mixed, log_p)
            assert mixed is not None, "a mixture has members"
            chosen = asked[part]
            said.append(mixed.gather(1, chosen[:, None])[:, 0].double().cpu())
            greedy.append((mixed[:, :words].argmax(-1) == chosen).cpu())
        return torch.cat(said), torch.cat(greedy)
