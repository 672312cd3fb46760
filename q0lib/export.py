"""A population becomes a model folder that `q0lib.load` and `transformers` read, whole or not.

<folder>/model.safetensors       the members' weights, members.<i>.<name of model.GPT>
<folder>/config.json             the network's shape, the mixture's weights, where it came from
<folder>/tokenizer.json, tokenizer_config.json
<folder>/configuration_q0.py, modeling_q0.py, network_q0.py   what `transformers` runs
<folder>/README.md               the model card: losses, run, how to load it

python -m q0lib export data/runs/cpu/q0-seed0-7140a71de9da --out model --k 8
"""

import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from q0lib import command, config, corpus, ensemble, files, model, prior
from q0lib.population import Population
from q0lib.provenance import provenance

_HERE = Path(__file__).parent
# Every line of an exported file that names q0lib, and what stands there where q0lib is not.
_NAMES = {
    "from q0lib import config\n": "from .configuration_q0 import Q0Config\n",
    "config.Model": "Q0Config",
    "from q0lib.for_transformers.configuration_q0 import": "from .configuration_q0 import",
    "from q0lib.model import": "from .network_q0 import",
}
_CODE = {
    "network_q0.py": "model.py",
    "configuration_q0.py": "for_transformers/configuration_q0.py",
    "modeling_q0.py": "for_transformers/modeling_q0.py",
}


def write(
    folder: Path | str,
    population: Population,
    chosen: prior.Selection | None = None,
    *,
    notes: str = "",
) -> Path:
    """Write a population, mixed as `chosen`, as a model folder; returns the folder.

    Without `chosen` it is mixed as its run directory says, which by default is all members, by
    the prior. One member gives a plain model. `notes` (Markdown) stands in the model card. What
    was exported to `folder` before is replaced.

    Raises:
        FileNotFoundError: the weights of a member were not kept.
        ValueError: a selection of other members; `folder` holds something else.
    """
    target = Path(folder)
    if target.exists() and not (target.is_dir() and (is_model(target) or not any_in(target))):
        raise ValueError(f"{target} is there and is no exported model: name another folder")
    chosen = by_directory(population) if chosen is None else chosen
    weights = prior.check_weights(chosen.weights, len(population))
    members = [int(member) for member in chosen.members if weights[member] > 0]
    shape = dataclasses.replace(population.run.model, multi_token=False)  # its block only trains
    wanted = model.GPT(shape).state_dict()
    tensors = {
        f"members.{i}.{name}": value
        for i, member in enumerate(members)
        for name, value in population.model(member).state_dict().items()
        if name in wanted
    }
    about = _about(population, members, weights)
    tokenizer = _with_start(population.tokenizer)
    described = {
        "architectures": ["Q0ForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_q0.Q0Config",
            "AutoModelForCausalLM": "modeling_q0.Q0ForCausalLM",
        },
        "model_type": "q0",
        "dtype": "float32",
        "bos_token_id": tokenizer.token_to_id(corpus.END_OF_TEXT),
        "eos_token_id": tokenizer.token_to_id(corpus.END_OF_TEXT),
        **dataclasses.asdict(shape),
        "mixture_weights": [float(weights[member]) for member in members],
        "tokenizer_size": tokenizer.get_vocab_size(),
        "document_chars": population.run.corpus.document_chars,
        "q0": about,
    }
    with files.replacing(target) as temporary:
        temporary.mkdir()
        files.save_tensors(temporary / "model.safetensors", tensors, format="pt")
        tokenizer.save(str(temporary / "tokenizer.json"))
        texts = {
            "config.json": json.dumps(described, indent=1),
            "tokenizer_config.json": json.dumps(_tokenizer_config(shape.context), indent=1),
            "README.md": _card(population.run, about, notes),
            **{name: exported_source(path) for name, path in _CODE.items()},
        }
        for name, text in texts.items():
            (temporary / name).write_text(text, encoding="utf-8")
        if target.exists():  # a folder that holds something cannot be replaced, but moved
            target.rename(temporary.parent / "before")
    return target


def is_model(folder: Path) -> bool:
    """Whether a folder holds an exported model."""
    path = folder / "config.json"
    try:
        return json.loads(path.read_text(encoding="utf-8")).get("model_type") == "q0"
    except (OSError, ValueError, AttributeError):
        return False


def any_in(folder: Path) -> bool:
    return next(folder.iterdir(), None) is not None


def exported_source(path: str) -> str:
    """A module of q0lib as it stands in a model folder, where it must not need q0lib."""
    text = (_HERE / path).read_text(encoding="utf-8")
    for ours, theirs in _NAMES.items():
        text = text.replace(ours, theirs)
    return text


def by_directory(population: Population) -> prior.Selection:
    """How the run directory mixes its members, as a selection of these."""
    held = population.keep_mixture()
    at = population.members[["trajectory", "cycle"]].itertuples(index=False, name=None)
    place = {pair: index for index, pair in enumerate(at)}
    if lacking := [pair for pair in held.members if pair not in place]:
        raise ValueError(
            f"{population.directory} mixes member {lacking[0]} (trajectory, cycle), which is not "
            "among those that were opened: choose others, or open all"
        )
    members = np.array([place[pair] for pair in held.members])
    weights = np.zeros(len(population))
    weights[members] = held.weights
    return prior.Selection(members, weights, len(members), held.choice)


def _about(population: Population, members: list[int], weights: np.ndarray) -> dict[str, Any]:
    """Where a model came from, and what it loses on held-out text."""
    run, rows = population.run, population.members
    at = rows.iloc[members]
    return {
        "run": population.directory.name,
        "key": run.key,
        "preset": run.preset,
        "method": run.name,
        "seed": run.seed,
        "epochs": run.epochs,
        "tokens_trained_on": run.corpus.train_tokens,
        "trained_by_commit": str(rows.commit.iloc[-1]) if "commit" in rows else "unknown",
        "exported_by_commit": provenance()["commit"],
        "members": [list(map(int, pair)) for pair in zip(at.trajectory, at.cycle, strict=True)],
        "losses": {
            split: ensemble.mixture_nll(weights, population.P[split]) for split in corpus.HELD_OUT
        },
    }


def _with_start(ours: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """A copy that by default puts <|endoftext|> before a text, where it stood in training."""
    tokenizer = tokenizers.Tokenizer.from_str(ours.to_str())
    start = tokenizer.token_to_id(corpus.END_OF_TEXT)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{corpus.END_OF_TEXT} $A",
        pair=f"{corpus.END_OF_TEXT} $A {corpus.END_OF_TEXT}:1 $B:1",
        special_tokens=[(corpus.END_OF_TEXT, start)],
    )
    return tokenizer


def _tokenizer_config(context: int) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": corpus.END_OF_TEXT,
        "eos_token": corpus.END_OF_TEXT,
        "pad_token": corpus.END_OF_TEXT,
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": True,  # a text that names <|endoftext|> is text
    }


def _card(run: config.Run, about: dict[str, Any], notes: str) -> str:
    members, losses = about["members"], about["losses"]
    what = "one model" if len(members) == 1 else f"a mixture of K = {len(members)} models"
    rows = "\n".join(f"| {split} | {loss:.4f} |" for split, loss in losses.items())
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags: [q0]
---
# {what[0].upper()}{what[1:]}, by q0

{model.parameter_count(run.model):,} parameters each, a context of {run.model.context} tokens.

| held-out text | loss, nats per token |
|---|---|
{rows}

*Fitness* text chose members and weights, *validation* what was tuned, *test* nothing.

| | |
|---|---|
| run | `{about["run"]}` (key {about["key"]}) |
| preset, method, seed | {about["preset"]}, {about["method"]}, {about["seed"]} |
| epochs of training | {about["epochs"]:g}, on {about["tokens_trained_on"]:,} tokens |
| members (trajectory, cycle) | {", ".join(f"({t}, {c})" for t, c in members)} |
| commit that trained, that exported | {about["trained_by_commit"]}, {about["exported_by_commit"]} |

{notes}

## Use it

```python
import q0lib

model = q0lib.load("path/to/this/folder")
print(model.generate("Once", tokens=100))
print(model.loss("A text.").per_token)
```

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "path/to/this/folder"
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
print(tokenizer.decode(model.generate(**tokenizer("Once", return_tensors="pt"))[0]))
```

Every document began with `<|endoftext|>` in training; both tokenizers put it there.

The licence is for whoever trained the model to state: it depends on the text.
"""


def selection(population: Population, k: int | None, member: str | None) -> prior.Selection | None:
    """What `--k` and `--member` ask for: None is how the run directory mixes its members.

    Raises:
        ValueError: k or a member beyond the population, or both given.
    """
    if k is not None and member is not None:
        raise ValueError("--k and --member exclude each other")
    if k is not None:
        return prior.select(population.P["fitness"], k)
    if member is None:
        return None
    index = int(population.members.validation_loss.argmin()) if member == "best" else -1
    if re.fullmatch(r"\d+", member):
        index = int(member)
    if not 0 <= index < len(population):
        raise ValueError(f"member must be 'best' or in 0..{len(population) - 1}, got {member!r}")
    weights = np.zeros(len(population))
    weights[index] = 1
    return prior.Selection(np.array([index]), weights, 1, "member")


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns its exit status."""
    parser = command.parser("q0lib export", __doc__ or "")
    parser.add_argument("run", type=Path, help="a run directory, trained with keep_weights=true")
    parser.add_argument("--out", type=Path, required=True, help="the model folder to write")
    parser.add_argument("--k", type=int, help="mix the K members that are chosen greedily")
    parser.add_argument("--member", help="one member: its number, or best (on validation)")
    given = parser.parse_args(argv)

    def work() -> None:
        population = Population.open(given.run)
        chosen = selection(population, given.k, given.member)
        folder = write(given.out, population, chosen)
        about = files.read_json(folder / "config.json")["q0"]
        losses = ", ".join(f"{split} {loss:.4f}" for split, loss in about["losses"].items())
        print(f"{folder}: K = {len(about['members'])}, nats per token: {losses}")

    return command.status(parser.prog, work)
