"""Downstream tasks of a model folder or run directory, by lm-evaluation-harness.

python -m q0lib evaluate model/ --tasks arc_easy,piqa,sciq,blimp
python -m q0lib evaluate model/ --tasks which_passage,last_word --text held_out.txt
python -m q0lib evaluate model/ --tasks piqa --against other/evaluation

The first are that harness's own tasks, by its names. The tasks which_passage, which_continuation
and last_word are made from text that the model was not trained on: of a run directory its own test
text, else what --text names. Every answer is kept in <out>/<task>.samples.jsonl, so that two models
are compared item by item (--against). Run again, it goes on with the first task that is missing.
"""

import contextlib
import difflib
import hashlib
import json
import logging
import os
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from tqdm import tqdm

from q0lib import command, corpus, export, files, language_model, readers
from q0lib.downstream import tasks as own_tasks
from q0lib.language_model import LanguageModel
from q0lib.population import Population

COLUMNS = ["task", "metric", "value", "se", "chance", "items"]


def evaluate(
    model: LanguageModel,
    tasks: Sequence[str],
    folder: Path | str,
    *,
    include: Path | str | None = None,
    limit: int | None = None,
    mixing: str = "token",
    precision: str = "fp32",
    progress: bool = True,
) -> pd.DataFrame:
    """Run `tasks` on a model, one after the other, and keep every answer in `folder`.

    Tasks are names that lm-evaluation-harness knows, groups among them, or those of the task folder
    `include`. A task that `folder` has from before is not run again. `limit` takes the first items
    of each only; `mixing` and `precision` as in `adapter.Scorer`.

    Returns a row a task and metric: task, metric, value, se (of the mean over items), chance (of a
    guess, nan where there is no choice), items. A group has the plain mean over its tasks.

    Raises:
        ValueError: a task that nobody knows; `folder` holds answers of another model, or settings.
        ConnectionError: a task's data set must come from the hub, which cannot be reached.
        ImportError: lm-evaluation-harness is not installed.
    """
    from q0lib.downstream.adapter import Scorer

    if limit is not None and limit < 1:
        raise ValueError(f"limit must be >= 1, got {limit}")
    target = Path(folder)
    settings = {"limit": limit, "mixing": mixing, "precision": precision}
    with _quiet():
        groups, manager = _known(tasks, include)
        _claim(target, model, include, settings)
        scorer = Scorer(model, mixing, precision, progress=progress)
        names = [name for members in groups.values() for name in members]
        with tqdm(names, desc="tasks", unit="task", disable=not progress) as bar:
            for name in bar:
                bar.set_postfix_str(name)
                if not (target / f"{name}.json").exists():
                    _run(scorer, name, target, manager, limit)
    return pd.concat(
        [_group(target, name, members) for name, members in groups.items()], ignore_index=True
    )


def samples(folder: Path | str, task: str) -> pd.DataFrame:
    """What was answered to every item of a task: its number, log p of all choices, and metrics.

    Columns: item, document (of the tasks made here, else the item), log_p (a list), and one for
    each metric of the task.

    Raises:
        FileNotFoundError: the task was not run.
    """
    path = Path(folder) / f"{task}.samples.jsonl"
    if not path.exists():
        raise FileNotFoundError(f"{path} is not there: task {task!r} was not evaluated")
    return pd.read_json(path, lines=True, precise_float=True)


def compare(first: Path | str, second: Path | str) -> pd.DataFrame:
    """How two models differ on the tasks that both were given, item by item.

    Columns: task, metric, items, first, second (means), difference (first - second), se (of the
    paired difference, items of one document taken together) and z.

    Raises:
        ValueError: they have no task in common, or were given other items.
    """
    both = [
        {path.name.removesuffix(".samples.jsonl") for path in Path(each).glob("*.samples.jsonl")}
        for each in (first, second)
    ]
    if not (shared := sorted(both[0] & both[1])):
        raise ValueError(f"{first} and {second} have no task in common")
    rows = []
    for task in shared:
        ours, theirs = samples(first, task), samples(second, task)
        if not ours.item_hash.equals(theirs.item_hash):
            raise ValueError(f"{first} and {second} were given other items of task {task!r}")
        for metric in _metrics(ours):
            mean, se = clustered(ours[metric] - theirs[metric], ours.document)
            rows.append(
                {"task": task, "metric": metric, "items": len(ours), "first": ours[metric].mean(),
                 "second": theirs[metric].mean(), "difference": mean, "se": se,
                 "z": mean / se if se else np.nan}
            )  # fmt: skip
    return pd.DataFrame(rows)


def clustered(values: pd.Series, documents: pd.Series) -> tuple[float, float]:
    """The mean of `values`, one an item, and its standard error, items clustered by document."""
    excess = (values - values.mean()).groupby(documents.to_numpy()).sum()
    n = len(excess)
    if n < 2:
        return float(values.mean()), float("nan")
    return float(values.mean()), float(np.sqrt(n / (n - 1) * (excess**2).sum()) / len(values))


def open_model(
    path: Path | str, *, k: int | None = None, member: str | None = None, device: str = "auto"
) -> LanguageModel:
    """The model of a model folder; or of a run directory, as that mixes its members by default.

    `k` and `member` choose members of a run directory as `export` does.

    Raises:
        ValueError: k or member of a model folder; `path` is neither.
        FileNotFoundError: nothing is there, or the weights of a member were not kept.
    """
    directory = Path(path)
    if not (directory / "run.json").exists():
        if k is not None or member is not None:
            raise ValueError(f"--k and --member choose from a run directory, {path} is none")
        return language_model.load(directory, device)
    population = Population.open(directory)
    return language_model.mixed(population, export.selection(population, k, member), device)


# --- one task ------------------------------------------------------------------------------------


def _run(scorer: Any, name: str, folder: Path, manager: Any, limit: int | None) -> None:
    import lm_eval

    begun = time.monotonic()
    found = lm_eval.simple_evaluate(
        scorer, tasks=[name], task_manager=manager, limit=limit, bootstrap_iters=0, log_samples=True
    )
    if found is None:
        raise RuntimeError(f"lm-evaluation-harness gave no results for task {name!r}")
    logged = found["samples"][name]
    if len({sample["filter"] for sample in logged}) > 1:  # one answer, read in several ways
        first = logged[0]["filter"]
        logged = [sample for sample in logged if sample["filter"] == first]
    rows = []
    for sample in sorted(logged, key=lambda sample: sample["doc_id"]):
        answers = sample["filtered_resps"]
        metrics = {each: sample[each] for each in sample["metrics"] if np.isscalar(sample[each])}
        rows.append(
            {"item": sample["doc_id"], "item_hash": sample["doc_hash"],
             "document": sample["doc"].get("document", sample["doc_id"]),
             "log_p": [a[0] if isinstance(a, list | tuple) else a for a in answers], **metrics}
        )  # fmt: skip
    text = "".join(json.dumps(row, default=float, allow_nan=False) + "\n" for row in rows)
    files.write_text(folder / f"{name}.samples.jsonl", text)
    table = pd.DataFrame(rows)
    values, chance = found["results"][name], _chance(found["configs"][name], logged)
    results = []
    for key, value in values.items():
        metric = key.partition(",")[0]
        if isinstance(value, int | float) and "," in key and not metric.endswith("_stderr"):
            per_item = metric in table and metric in _metrics(table)
            se = clustered(table[metric], table.document)[1] if per_item else None
            results.append(
                {"task": name, "metric": metric, "value": value, "se": se,
                 "chance": chance if metric.startswith("acc") else None, "items": len(rows)}
            )  # fmt: skip
    held = {"results": results, "version": found["versions"].get(name),
            "seconds": round(time.monotonic() - begun, 1)}  # fmt: skip
    files.write_text(folder / f"{name}.json", json.dumps(held, indent=1))


def _metrics(table: pd.DataFrame) -> list[str]:
    """The metrics of a table of samples that are means over items."""
    return [name for name in table if str(name).startswith(("acc", "exact"))]


def _chance(settings: dict, logged: list[dict]) -> float | None:
    """What a guess gets: one in so many choices, on average over items."""
    if settings.get("output_type") != "multiple_choice":
        return None
    twice = (
        2 if "acc_mutual_info" in logged[0]["metrics"] else 1
    )  # each choice also without context
    return float(np.mean([twice / len(sample["filtered_resps"]) for sample in logged]))


def _group(folder: Path, name: str, members: list[str]) -> pd.DataFrame:
    rows = []
    for member in members:
        rows += files.read_json(folder / f"{member}.json")["results"]
    table = pd.DataFrame(rows, columns=COLUMNS)
    if members != [name]:
        means = []
        for metric, block in table.groupby("metric", sort=False):
            se = float(np.sqrt((block.se.astype(float) ** 2).sum(skipna=False)) / len(block))
            means.append([name, metric, block.value.mean(), se, block.chance.mean(),
                          block["items"].sum()])  # fmt: skip
        table = pd.concat([pd.DataFrame(means, columns=COLUMNS), table], ignore_index=True)
    return table.astype({"value": float, "se": float, "chance": float})


# --- names, and what a folder belongs to ---------------------------------------------------------


def _known(names: Sequence[str], include: Path | str | None) -> tuple[dict[str, list[str]], Any]:
    """The tasks behind each name, groups taken apart, and who loads them."""
    from lm_eval.tasks import TaskManager

    if not names:
        raise ValueError("no task was named")
    folder = str(include) if include else None
    # The harness's own tasks take seconds to list: only where ours are not enough.
    manager = TaskManager(include_path=folder, include_defaults=False)
    local = set(manager.all_tasks)
    if not (others := [name for name in names if name not in local]):
        return {name: [name] for name in names}, manager
    manager = TaskManager(include_path=folder)
    for name in others:
        if name not in manager.all_tasks:
            near = difflib.get_close_matches(name, [*own_tasks.NAMES, *manager.all_tasks], n=3)
            hint = f"; did you mean {', '.join(near)}?" if near else ""
            raise ValueError(f"lm-evaluation-harness knows no task {name!r}{hint}")
    try:
        corpus.reach_hub()
        groups = {name: list(manager.load([name])["tasks"]) for name in names}
    except (ConnectionError, OSError) as error:
        raise ConnectionError(
            f"the data of task {others[0]!r} is on the hub, which cannot be reached ({error}); "
            "connect, or use the tasks that are made from text of yours (--text)"
        ) from error
    return groups, manager


def _claim(folder: Path, model: LanguageModel, include: Path | str | None, settings: dict) -> None:
    """Make sure that what is in `folder` was answered by this model, of these items."""
    digest = hashlib.sha256(json.dumps(model.weights).encode())
    for member in model.members:
        for name, value in member.state_dict().items():
            digest.update(name.encode() + value.cpu().numpy().tobytes())
    made = {
        path.stem: hashlib.sha256(path.read_bytes()).hexdigest()[:16]
        for path in sorted(Path(include).glob("*.jsonl") if include else [])
    }
    ours = {"model": digest.hexdigest()[:16], **settings}
    path = folder / "about.json"
    folder.mkdir(parents=True, exist_ok=True)
    if path.exists():
        theirs = files.read_json(path)
        before = theirs.get("items", {})
        differing = [name for name, value in ours.items() if theirs.get(name) != value]
        differing += [
            f"text for {name}" for name in made if before.get(name, made[name]) != made[name]
        ]
        if differing:
            raise ValueError(
                f"{folder} holds answers of another {' and '.join(differing)}: name another folder"
            )
        made = {**before, **made}
    files.write_text(path, json.dumps({**ours, "items": made}, indent=1))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what the harness and its data sets say on the way, which is not for the reader."""
    import datasets

    shown = datasets.is_progress_bar_enabled()
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        logging.disable(before)
        if shown:
            datasets.enable_progress_bars()


# --- the command ---------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns its exit status."""
    parser = command.parser("q0lib evaluate", __doc__ or "")
    parser.add_argument("model", type=Path, help="a model folder, or a run directory with weights")
    parser.add_argument("--tasks", required=True, help="names, separated by commas")
    parser.add_argument("--out", type=Path, help="folder for answers (default: MODEL/evaluation)")
    parser.add_argument("--text", type=Path, help="a text that the model was not trained on")
    parser.add_argument("--column", default="text", help="of a text of rows (default: text)")
    parser.add_argument("--include", type=Path, help="a folder of tasks of your own (YAML)")
    parser.add_argument("--items", type=int, default=2000, help="of each task made (default 2000)")
    parser.add_argument("--limit", type=int, help="only the first so many items of each task")
    parser.add_argument("--k", type=int, help="of a run: the K members that are chosen greedily")
    parser.add_argument("--member", help="of a run: one member, its number or best")
    parser.add_argument("--mixing", default="token", help="of a mixture: token (default), sequence")
    parser.add_argument("--precision", default="fp32", help="fp32 (default) or bf16")
    parser.add_argument("--device", default="auto", help="auto (default), cpu, cuda, ...")
    parser.add_argument("--against", type=Path, help="another model's folder of answers")
    given = parser.parse_args(argv)

    def work() -> None:
        try:
            import lm_eval  # noqa: F401
        except ImportError:
            raise RuntimeError(
                "tasks are run by lm-evaluation-harness, which is not installed: "
                "pip install 'q0lib[lm-eval]'"
            ) from None
        names = [name for name in re.split(r"[,\s]+", given.tasks) if name]
        out = given.out or given.model / "evaluation"
        model = open_model(given.model, k=given.k, member=given.member, device=given.device)
        include = given.include
        if include is None and set(names) & set(own_tasks.NAMES):
            include = out / "tasks"
            _make_tasks(include, given)
        table = evaluate(model, names, out, include=include, limit=given.limit, mixing=given.mixing,
                         precision=given.precision)  # fmt: skip
        print(table.to_string(index=False, float_format="{:.4f}".format, na_rep=""))
        print(f"every answer: {out}{os.sep}<task>.samples.jsonl")
        if given.against:
            print(f"\nthis model minus {given.against}, item by item:")
            print(compare(out, given.against).to_string(index=False, float_format="{:.4f}".format))

    return command.status(parser.prog, work)


def _make_tasks(folder: Path, given: Any) -> None:
    """Tasks from the text that was named, or else from a run directory's own test text."""
    if given.text is not None:
        cut = corpus.config.Corpus.document_chars
        documents = list(readers.documents(given.text, given.column, cut))
    elif (given.model / "run.json").exists():
        documents = corpus.held_out_documents(Population.open(given.model).run.corpus)
    else:
        raise ValueError(
            f"tasks are made from text that the model was not trained on: name one with --text, "
            f"or give the run directory instead of {given.model}"
        )
    own_tasks.write(folder, documents, given.items)
