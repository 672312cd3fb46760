"""The plan of a text: what it is, what the machine is, what will be done, kept so that the same
command goes on with it.

A file beside the runs holds it, named by the folder of the model that is to come. A speed measured
anew would be another, and with it the plan: so what was once planned is read, and only another
request, or `anew`, plans again.
"""

import dataclasses
import hashlib
import json
import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from tqdm import tqdm

from q0lib import bench, config, corpus, export, files, paths, provenance, runtime
from q0lib.corpus import HELD_OUT
from q0lib.own_text import proposal
from q0lib.own_text.proposal import Machine, Proposal, Speed, Stage, Wish
from q0lib.train import estimate

LEAST_TOKENS, LEAST_DOCUMENTS = 20_000, 40  # 2,000 tokens and 4 documents in each held-out split
CHARS = 3.5  # a token of a small vocabulary: a first guess, until the text is tokenised
GUESS = 0.3  # share of plain matrix products that training reaches (`make bench`): likewise


@dataclass(frozen=True)
class Asked:
    """What the reader asks for; a plan is for one such request. `threads` 0: the faster of one
    and all cores."""

    source: str
    hours: float = 1.0
    text_field: str = "text"
    tokenizer: str = "bpe"
    document_chars: int = 1500
    seed: int = 0
    k: int = 8
    tune: bool = False
    baseline: bool = True
    device: str = "auto"
    threads: int = 0

    def __post_init__(self) -> None:
        for name, least in (("k", 1), ("threads", 0), ("seed", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be >= {least}, got {getattr(self, name)}")
        if not self.hours > 0:
            raise ValueError(f"hours must be > 0, got {self.hours:g}")


@dataclass(frozen=True)
class Look:
    """What a text holds: documents, characters, and tokens in the part for each split."""

    documents: int
    characters: int
    vocabulary: int
    pools: dict[str, int]

    @property
    def tokens(self) -> int:
        return sum(self.pools.values())


@dataclass(frozen=True)
class Plan:
    """What was asked for, what was found, and what follows."""

    asked: Asked
    look: Look
    machine: Machine
    speed: Speed
    proposal: Proposal


def make(asked: Asked, out: Path, *, anew: bool = False) -> Plan:
    """The plan kept for `out`, if it is for this request; else a new one, not yet kept.

    Raises:
        FileNotFoundError: no such text, or tokenizer.
        ValueError: `out` has a plan for another request (says what differs), or holds something
            that is no model; a text that is too small, or cannot be read; too few hours, too
            little memory.
    """
    if out.exists() and not (out.is_dir() and (export.is_model(out) or not export.any_in(out))):
        raise ValueError(f"{out} is there and is no exported model: name another folder")
    source = asked.source
    if source.startswith("hub:") or source == "fineweb":
        raise ValueError(f"source must be a file or a folder, its size is not known from {source}")
    if Path(source).exists():  # runs are found again from any folder
        asked = dataclasses.replace(asked, source=str(Path(source).resolve()))
    path = place(out)
    if path.exists() and not anew:
        held = read(path)
        ours = dataclasses.asdict(asked)
        theirs = dataclasses.asdict(held.asked)
        differing = [f"{name} was {theirs[name]!r} and is now {ours[name]!r}"
                     for name in ours if ours[name] != theirs[name]]  # fmt: skip
        if differing:
            raise ValueError(
                f"{path} is a plan for another request ({'; '.join(differing)}): ask as then to "
                "go on, give --anew to plan again, or another --out"
            )
        return held
    return _new(asked)


def keep(plan: Plan, out: Path) -> None:
    """Save the plan of the model that will lie in `out`."""
    files.write_text(place(out), json.dumps(dataclasses.asdict(plan), indent=1))


def place(out: Path) -> Path:
    """Where the plan of the model in `out` is kept: not in `out`, which holds a whole model or
    nothing."""
    name = hashlib.sha256(str(out.resolve()).encode()).hexdigest()[:8]
    return paths.RUNS / "own" / f"plan-{out.name}-{name}.json"


def read(path: Path) -> Plan:
    """A plan that was kept.

    Raises:
        ValueError: it cannot be read, or is of another q0lib.
    """
    held = files.read_json(path)
    try:
        return _plan(held)
    except (TypeError, LookupError) as error:
        raise ValueError(f"{path} is of another q0lib ({error}): give --anew") from error


def _plan(held: dict[str, Any]) -> Plan:
    proposed = held["proposal"]
    study = proposed["study"]
    parts = {"corpus": config.Corpus, "model": config.Model, "runtime": config.Runtime}
    study |= {name: kind(**study[name]) for name, kind in parts.items()}
    study["methods"] = {name: config.Method(**each) for name, each in study["methods"].items()}
    proposed["study"] = config.Preset(**study)
    proposed["stages"] = tuple(Stage(**stage) for stage in proposed["stages"])
    return Plan(
        Asked(**held["asked"]), Look(**held["look"]), Machine(**held["machine"]),
        Speed(**held["speed"]), Proposal(**proposed),
    )  # fmt: skip


def _new(asked: Asked) -> Plan:
    documents, characters = count(asked)
    machine = this_machine(asked.device)
    wish = Wish(asked.hours, asked.k, asked.tune, asked.baseline)
    if asked.tokenizer == "bpe":
        guess = round(characters / CHARS)
        first = proposal.propose(
            round(0.7 * guess), dict.fromkeys(HELD_OUT, guess // 10), machine, _peak(machine), wish
        )
        vocabulary = first.study.corpus.vocab_size
    else:
        if not Path(asked.tokenizer).is_file():
            raise FileNotFoundError(
                f"tokenizer must be bpe or the path of a tokenizer.json, got {asked.tokenizer!r}"
            )
        vocabulary = corpus.read_tokenizer(Path(asked.tokenizer)).get_vocab_size()
    wish = dataclasses.replace(wish, vocabulary=vocabulary)
    found = Look(documents, characters, vocabulary, _pools(asked, vocabulary))
    _check_size(asked.source, found.tokens, documents)
    room = {split: found.pools[split] for split in HELD_OUT}

    def propose(speed: Speed) -> Proposal:
        return proposal.propose(found.pools["train"], room, machine, speed, wish)

    machine, speed = measure(propose(_peak(machine)).study, machine, asked.threads)
    chosen = propose(speed)
    text = {name: getattr(asked, name)
            for name in ("source", "text_field", "tokenizer", "document_chars")}  # fmt: skip
    study = dataclasses.replace(
        chosen.study, corpus=dataclasses.replace(chosen.study.corpus, **text), seed=asked.seed
    )
    return Plan(asked, found, machine, speed, dataclasses.replace(chosen, study=study))


# --- the text ----------------------------------------------------------------------------------


def count(asked: Asked) -> tuple[int, int]:
    """Documents and characters of a text.

    Raises:
        ValueError: too few of them.
    """
    documents = characters = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they come again when the text is tokenised
        found = corpus.documents_of(_corpus(asked, 257))
        for document in tqdm(found, desc="reading", unit=" documents", leave=False):
            documents, characters = documents + 1, characters + len(document)
    _check_size(asked.source, round(characters / CHARS), documents)
    return documents, characters


def _check_size(source: str, tokens: int, documents: int) -> None:
    if tokens < LEAST_TOKENS or documents < LEAST_DOCUMENTS:
        raise ValueError(
            f"{source} has some {tokens:,} tokens in {documents:,} documents, and a population "
            f"needs {LEAST_TOKENS:,} in {LEAST_DOCUMENTS} to be trained, weighed and judged on "
            "text that is not the same: add text of its kind, or cut running text finer "
            "(--document-chars)"
        )


def _corpus(asked: Asked, vocabulary: int) -> config.Corpus:
    return config.Corpus(
        source=asked.source, text_field=asked.text_field, tokenizer=asked.tokenizer,
        vocab_size=vocabulary, document_chars=asked.document_chars, train_tokens=1,
        fitness_tokens=1, validation_tokens=1, test_tokens=1,
    )  # fmt: skip


def _pools(asked: Asked, vocabulary: int) -> dict[str, int]:
    """Tokens in the part of the text for each split, tokenised if it is not yet."""
    text = corpus.load(_corpus(asked, vocabulary))
    file = getattr(text["train"].tokens, "filename")  # noqa: B009  of a memory map
    pools = files.read_json(Path(file).with_name("corpus.json"))["pools"]
    return {split: pools[split]["tokens"] for split in corpus.SPLITS}


# --- the machine -------------------------------------------------------------------------------


def this_machine(device: str) -> Machine:
    """What there is to train on; of memory nine tenths of what is free.

    Raises:
        ValueError: no such device here.
    """
    chosen = runtime.device(device)
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    if chosen.type == "cuda":
        free = torch.cuda.mem_get_info(chosen)[0]
        return Machine(str(chosen), torch.cuda.get_device_name(chosen), cores, 0.9 * free, 0)
    name = provenance.provenance()["processor"] if chosen.type == "cpu" else chosen.type
    return Machine(str(chosen), name, cores, 0.9 * _free_memory())


def _free_memory() -> float:
    """Bytes that are free, or where the system does not say, half of what there is."""
    about = Path("/proc/meminfo")
    if about.exists():
        lines = dict(line.split(":", 1) for line in about.read_text().splitlines())
        free = 1024.0 * int(lines["MemAvailable"].split()[0])
    elif hasattr(os, "sysconf"):
        free = 0.5 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    else:
        return 4.0 * 2**30
    limit = Path("/sys/fs/cgroup/memory.max")  # of a container
    if limit.exists() and (text := limit.read_text().strip()).isdigit():
        free = min(free, float(text))
    return free


def _peak(machine: Machine) -> Speed:
    """A first guess of the speed, from plain matrix products."""
    peak = bench.matmul_peak(torch.bfloat16, torch.device(machine.device), 0.2)
    return Speed(GUESS * peak, GUESS * peak, GUESS * peak)


def measure(
    study: config.Preset, machine: Machine, threads: int = 0, seconds: float = 1.0
) -> tuple[Machine, Speed]:
    """The machine, with how many threads it is best used, and the speed of a study on it.

    A few steps are trained on random tokens: speed does not depend on what they say.
    """
    counts = {threads} if threads else {1, machine.cores}
    if machine.device != "cpu":
        counts = {0}
    found = {}
    for number in tqdm(sorted(counts), desc="measuring the speed", unit=" settings", leave=False):
        with runtime.threads(number):
            (_, _, training), (_, _, taught), (_, _, scored) = bench.training(study, seconds)
        found[number] = Speed(training, taught, scored)
    best = max(found, key=lambda number: found[number].taught)
    return dataclasses.replace(machine, threads=best), found[best]


# --- in words ----------------------------------------------------------------------------------


def table(plan: Plan, out: Path) -> pd.DataFrame:
    """What will be done, and what it costs: what, value, why; a row each."""
    one, look, machine = plan.proposal, plan.look, plan.machine
    study = one.study
    text, model, q0 = study.corpus, study.model, study.methods["q0"]
    need = estimate(study.run("q0"))
    run = study.run("q0", one.epochs)
    share = text.train_tokens / look.pools["train"]
    used, baseline = "all of it", f"one model, {one.single_epochs} epochs"
    reason = "the budget of a member of the tuned ensemble"
    if share < 1:
        used = (
            f"{100 * share:.2g}% of it: hours are short here, not text, and a population is not "
            "what it takes; with more hours more of it is used"
        )
    if one.single_tokens:
        # Measured once: 2.2M tokens of documentation, 7 minutes on two cores, 3.3% of it: the
        # student 3.73, one pass of the single model over everything 3.00 nats per token.
        baseline = f"one model, one pass over {one.single_tokens:,} tokens"
        reason = "more text read once is probably better than this population: the better is kept"
    members = run.trajectories * run.cycles
    rows = [
        ("text", f"{look.documents:,} documents, {look.characters:,} characters, "
         f"{look.tokens:,} tokens", plan.asked.source),
        ("training tokens", f"{text.train_tokens:,} of {look.pools['train']:,}", used),
        ("fitness, validation, test",
         " ".join(f"{getattr(text, f'{split}_tokens'):,}" for split in HELD_OUT),
         "weights and choice; tuning; what is reported"),
        ("vocabulary", f"{text.vocab_size:,}", "grows with the training tokens"
         if plan.asked.tokenizer == "bpe" else plan.asked.tokenizer),
        ("model", f"{need['parameters']:,.0f} parameters: width {model.width}, {model.layers} "
         f"layers, {model.heads} heads, context {model.context}",
         f"between the presets, by tokens ({_between(text.train_tokens)})"),
        ("rates", f"q0: matrix_lr {q0.matrix_lr:g}, weight_decay {q0.weight_decay:g}, "
         f"{q0.batch_tokens:,} tokens a step", _evidence(text.train_tokens)),
        ("population", f"q0: {run.trajectories} x {run.cycles} cycles of "
         f"{q0.epochs_per_cycle:g} epochs, {members} snapshots", "epochs: what the hours allow"),
        ("student", f"{one.student_epochs} epochs, taught by {one.k} chosen snapshots",
         "one model out"),
        ("baseline", baseline if one.single_epochs else "none", reason),
        ("machine", f"{machine.name}, {machine.device}, {machine.threads or 'all'} threads",
         f"{machine.cores} cores, {machine.memory / 2**30:.1f} GiB to be had"),
        *((f"time: {stage.name}", duration(stage.seconds), f"{stage.epochs:g} epochs, "
           f"{stage.flops:.2g} FLOPs") for stage in one.stages),
        ("time", f"{duration(one.seconds)} of {duration(3600 * plan.asked.hours)}",
         f"{one.flops:.2g} FLOPs, at the speed measured just now"),
        ("memory, disk", f"{proposal.memory(one) / 2**30:.2f} GiB, "
         f"{proposal.disk(one) / 2**30:.2f} GiB", "estimated"),
        ("goes to", str(out), f"plan and runs: {run.directory.parent}"),
    ]  # fmt: skip
    return pd.DataFrame(rows, columns=["what", "value", "why"]).set_index("what")


def duration(seconds: float) -> str:
    """Seconds as a person says them."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def _between(tokens: int) -> str:
    low, high, _ = proposal.place(tokens)
    return f"{low.name} {low.corpus.train_tokens:,}, {high.name} {high.corpus.train_tokens:,}"


def _evidence(tokens: int) -> str:
    low, high, share = proposal.place(tokens)
    if high.name == "cpu":
        return "tuned at the presets on both sides"
    if (low.name, share) == ("cpu", 0):
        return "tuned at preset cpu"
    return "between the tuned cpu and the paper's: nothing was measured here, --tune looks"
