"""The four presets, from two CPU cores to the paper's scale, and how one is changed."""

import dataclasses
from typing import Any

from q0lib.config import Corpus, Method, Model, Preset, Runtime

NAMES = "quick", "cpu", "gpu", "paper"


def _presets() -> dict[str, Preset]:
    """The presets. Each method is q0 or differs from it by the fields named here."""
    q0 = Method()
    ensemble = Method(
        trajectories=0, cycles=1, epochs_per_cycle=32.0, schedule="cosine", lr_floor=0.0,
        wd_schedule="flat", wd_floor=1.0, teacher="none", perturb_start=0.0, perturb_end=0.0,
        ema_fraction=0.1, loop_from=0.5, mixture="uniform",
    )  # fmt: skip
    reference = {
        "q0": dataclasses.replace(
            q0, trajectories=2, batch_tokens=524_288, edge_batch_tokens=393_216
        ),
        "ensemble": dataclasses.replace(ensemble, batch_tokens=524_288),
    }
    # Tuned on validation at preset quick, for each method's own mixture: the trials are in
    # data/results/quick/tuning.csv.
    small = {
        "q0": dataclasses.replace(
            q0, matrix_lr=0.04, embedding_lr=0.3, unembedding_lr=0.004, scalar_lr=0.1,
            weight_decay=0.7, distill_after=4,
        ),
        "ensemble": dataclasses.replace(
            ensemble, epochs_per_cycle=16.0, matrix_lr=0.03, embedding_lr=0.3,
            unembedding_lr=0.004, scalar_lr=0.1, weight_decay=1.0, dropout=0.0,
        ),
    }  # fmt: skip
    # At preset cpu (data/results/cpu/tuning.csv) longer members at a lower rate make the better
    # ensemble, q0 is better without noise, and a model that is to be used alone needs more weight
    # decay.
    long = dataclasses.replace(small["ensemble"], epochs_per_cycle=32.0)
    cpu = {
        "q0": dataclasses.replace(small["q0"], perturb_start=0.0, perturb_end=0.0),
        "ensemble": dataclasses.replace(long, matrix_lr=0.02),
        "single": _alone(long, weight_decay=1.3),
    }
    quick = {
        "q0": dataclasses.replace(small["q0"], batch_tokens=1024, horizon=24),
        "ensemble": dataclasses.replace(small["ensemble"], batch_tokens=1024),
    }
    studies = [
        Preset(
            name="quick",
            corpus=Corpus(
                train_tokens=16_384, fitness_tokens=8_192, validation_tokens=8_192,
                test_tokens=16_384, vocab_size=1024,
            ),
            model=Model(vocab_size=1024, context=128, layers=3, width=96, heads=3),
            methods=_family(quick),
            epochs=48,
        ),
        Preset(
            name="cpu",
            corpus=Corpus(validation_tokens=30_720, test_tokens=30_720),
            model=Model(),
            methods=_family(cpu),
            epochs=64,
        ),
        Preset(
            name="gpu",
            corpus=Corpus(
                source="fineweb", subset="sample-10BT", tokenizer="gpt2", vocab_size=50_257,
                train_tokens=20_000_000, fitness_tokens=131_072, validation_tokens=2_000_000,
                test_tokens=2_000_000,
            ),
            model=Model(
                vocab_size=50_304, context=1024, layers=12, width=768, heads=6, mlp_multiple=256,
                windows="SSSL",
            ),
            methods=_family({
                "q0": dataclasses.replace(
                    q0, batch_tokens=131_072, edge_batch_tokens=98_304, horizon=32,
                    distill_after=4,
                ),
                "ensemble": dataclasses.replace(ensemble, batch_tokens=131_072),
            }),
            epochs=64,
            runtime=Runtime(threads=0, compile=True, keep_weights=True),
        ),
        Preset(
            name="paper",
            corpus=Corpus(
                source="fineweb", subset="sample-10BT", tokenizer="gpt2", vocab_size=50_257,
                train_tokens=100_000_000 - 131_072, fitness_tokens=131_072,
                validation_tokens=10_000_000, test_tokens=10_000_000,
            ),
            model=Model(
                vocab_size=50_304, context=2048, layers=30, width=2048, heads=16,
                mlp_multiple=256, windows="SSSL", loop_start=15, loop_end=25, loop_passes=5,
                multi_token=True,
            ),
            methods=_family(reference),
            epochs=256,
            runtime=Runtime(threads=0, compile=True, keep_weights=True),
        ),
    ]  # fmt: skip
    return {study.name: study for study in studies}


def _alone(ensemble: Method, weight_decay: float) -> Method:
    """A member of the ensemble that takes the whole budget."""
    return dataclasses.replace(
        ensemble, trajectories=1, cycles=1, epochs_per_cycle=0.0, weight_decay=weight_decay
    )


def _family(methods: dict[str, Method]) -> dict[str, Method]:
    """q0 and its baseline, with the methods that follow from them by a field or two."""
    ensemble = methods["ensemble"]
    single = methods.get("single", _alone(ensemble, ensemble.weight_decay))
    return {
        **methods,
        # One model that a whole mixture teaches (`Teaching`): at preset cpu, tuned there.
        "student": dataclasses.replace(
            single,
            teacher="mixture",
            alpha=0.9,
            temperature=1.0,
            distill_after=0,
            weight_decay=0.3,
            dropout=0.1,
            packings=4,
        ),
        # The stronger baseline that the paper leaves out: each member distils the one before it.
        "distilled_ensemble": dataclasses.replace(
            ensemble, teacher="previous_member", distill_after=1
        ),
        "single": single,  # one model for the whole budget
        # For budgets of a few epochs: the same run, four snapshots in its last quarter mixed where
        # `single` averages its last weights.
        "tail": dataclasses.replace(
            single, cycles=4, tail=0.25, ema_fraction=0.0, mixture="learned"
        ),
    }


def load(name: str, *, seed: int = 0, overrides: list[str] | None = None) -> Preset:
    """The preset called `name`, with its seed and any `overrides` such as "q0.alpha=0.3".

    An override names "corpus", "model", a method, or "study", then a field; "methods" stands for
    every method at once. Values are cast to the field's type. A `corpus.vocab_size` above the
    model's takes the model's along, unless `model.vocab_size` is given too.

    Raises:
        ValueError: an unknown preset, section or field, or a value out of its range.
    """
    studies = _presets()
    if name not in studies:
        raise ValueError(f"unknown preset {name!r}, known: {', '.join(studies)}")
    study = dataclasses.replace(studies[name], seed=seed)
    sections: dict[str, dict[str, str]] = {}
    if isinstance(overrides, str):
        raise ValueError(f"overrides must be a list of section.field=value, got {overrides!r}")
    for text in overrides or []:
        target, separator, value = text.partition("=")
        section, dot, item = target.strip().partition(".")
        if not separator or not dot:
            raise ValueError(f"override must look like section.field=value, got {text!r}")
        sections.setdefault(section, {})[item] = value.strip()
    shared = ("corpus", "model", "runtime")
    own = {**{name: getattr(study, name) for name in shared}, "study": study, **study.methods}
    methods = dict(study.methods)
    changes: dict[str, Any] = {}
    for section, values in sections.items():
        if section != "methods" and section not in own:
            known = ", ".join([*own, "methods"])
            raise ValueError(f"unknown section {section!r} in overrides, known: {known}")
        if section == "study":
            changes |= _known(study, section, values)
        elif section in shared:
            changes[section] = _replaced(own[section], section, values)
        else:
            for each in methods if section == "methods" else [section]:
                methods[each] = _replaced(methods[each], section, values)
    words = changes.get("corpus", study.corpus).vocab_size
    if words > study.model.vocab_size and "vocab_size" not in sections.get("model", {}):
        model = changes.get("model", study.model)
        changes["model"] = dataclasses.replace(model, vocab_size=words)
    return dataclasses.replace(study, methods=methods, **changes)


def _known(item: Any, section: str, values: dict[str, str]) -> dict[str, str]:
    plain = [each.name for each in dataclasses.fields(item) if each.type in (int, float, bool, str)]
    for name in values:
        if name not in plain:
            raise ValueError(f"unknown field {section}.{name}, known: {', '.join(plain)}")
    return values


def _replaced(item: Any, section: str, values: dict[str, str]) -> Any:
    return dataclasses.replace(item, **_known(item, section, values))
