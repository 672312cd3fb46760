"""The code broken in small ways, one at a time: would a test notice?

    make mutants                              # all of them, some minutes
    python tests/mutants.py leak trainer      # those with one of these words in their names

Each mutant replaces a text that stands once in a file, in a temporary copy of the project, and
runs the tests that are to fail. The exit status is 1 if a mutant survives, if its text is no
longer there (the code moved on: adapt the mutant), if its tests cannot be run, or if one of them
fails without any.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("q0lib", "tests", "pyproject.toml")
SECONDS = 600  # at most, for the tests of one mutant; all the tests once take a minute
LEFT = ("SURVIVED", "NOT FOUND", "CANNOT RUN")  # what is said of a mutant that no test killed


class Mutant(NamedTuple):
    """`old` stands once in q0lib/`file`; with `new` in its place `tests` (node ids) must fail."""

    name: str
    file: str
    old: str
    new: str
    tests: str  # relative to tests/, with spaces between


ADDS_UP = "test_leaks.py::test_losses_add_up_over_tokens_and_nothing_else_moves"
FOLDS = "test_leaks.py::test_a_held_out_document_tells_nothing_to_the_other_folds"
AVERAGE = "test_steps.py::test_a_snapshot_is_the_average_of_the_end_of_its_own_cycle"
OWN_START = "test_steps.py::test_every_seed_and_trajectory_has_its_own_start_and_its_own_order"
OWN_TOKENS = "test_steps.py::test_every_split_has_the_probabilities_of_its_own_tokens"
BOTH_ENDS = "test_selection.py::test_greedy_looks_from_both_ends"
WINDOW = "test_model.py::test_a_window_holds_as_many_keys_as_it_says_the_query_among_them"
GRADIENTS = "test_distill.py::test_loss_and_gradients_match_autograd"
CERTIFICATE = "test_prior.py::test_certificate_bounds_what_any_weights_can_gain"
FROZEN = "test_distill.py::test_teacher_is_an_independent_frozen_copy"
CLUSTERED = "test_ensemble.py::test_the_error_counts_documents_not_tokens"
COUNTED = "test_trajectory.py::test_distillation_starts_when_it_should_and_is_counted"
READ_ON = "test_generate.py::test_reading_on_gives_what_reading_anew_gives"
ELECTED = (
    "study/tables/test_epoch_efficiency.py"
    "::test_trajectories_are_chosen_on_validation_over_seeds_and_by_the_paper_on_test"
)

BUYS = "test_own_text.py::test_hours_buy_text_first_and_epochs_then"
STUDENTS_COST = (
    "test_own_text.py::test_the_students_cost_is_its_own_passes_and_those_of_its_teachers"
)
SAME_PLAN = (
    "test_own_text.py::test_the_same_request_goes_on_with_its_plan_though_the_speed_is_another"
)
REPORTED = "test_own_text.py::test_losses_are_those_of_the_test_text_with_errors_paired_by_token"
FOLLOWS = "test_config.py::test_a_larger_vocabulary_takes_the_model_along_unless_that_is_given"
TABLES = "study/tables/"
MUTANTS = (
    # --- students ---
    Mutant("student: its teachers are chosen on test text", "student.py",
           'np.asarray(one.P["fitness"])', 'np.asarray(one.P["test"])',
           "test_student.py::test_the_greedy_choice_on_fitness_text_teaches"),
    Mutant("student: teachers weigh all alike", "student.py",
           "distill.Teacher(models, taught.weights, dtype)",
           "distill.Teacher(models, None, dtype)",
           "test_student.py::test_the_teacher_says_what_its_members_mixture_says"),
    Mutant("student: teachers may have read what it is judged by", "student.py",
           "for split in corpus.HELD_OUT:", "for split in ():",
           "test_student.py::test_teachers_that_may_have_read_what_is_held_out_are_refused"),
    Mutant("student: who teaches is no part of its key", "config.py",
           'taught = {"teaching": self.teaching.decides} if self.teaching else {}', "taught = {}",
           "test_student.py::test_who_teaches_decides_a_student_and_where_they_lie_does_not"),
    Mutant("student: lessons are of the row before", "lessons.py",
           "packing[start : start + taken]", "packing[start - 1 : start - 1 + taken]",
           "test_student.py::test_what_is_kept_is_what_is_said"),
    Mutant("student: a lesson read again is paid again", "lessons.py",
           "return self.stream.packing(epoch) < epoch", "return False",
           "test_student.py::test_costs_count_the_passes_of_every_teacher"),
    Mutant("student: charged without those who taught its teachers", TABLES + "students.py",
           "        for part in one.teachers:\n            theirs",
           "        for part in one.teachers if one is each else ():\n            theirs",
           "study/test_students.py::test_a_student_is_charged_for_everyone_who_taught"),
    # --- weights and choices that saw the wrong text ---
    Mutant("leak: worth fits weights on test", TABLES + "mixtures.py",
           '{"learned": part.fitted()', '{"learned": prior.fit_prior(P["test"])',
           f"{ADDS_UP}[small_budgets-test]"),
    Mutant("leak: worth chooses its eight on test", TABLES + "mixtures.py",
           'part.fitted("adamw"))\n        row',
           'prior.fit_prior(P["test"], "adamw"))\n        row',
           f"{ADDS_UP}[small_budgets-test]"),
    Mutant("leak: every part is fitted on test", "population.py",
           'prior.fit_prior(self.P["fitness"], fit)', 'prior.fit_prior(self.P["test"], fit)',
           f"{ADDS_UP}[selections-test]"),
    Mutant("leak: selections choose members on test", TABLES + "mixtures.py",
           'prior.select_path(population.P["fitness"]', 'prior.select_path(population.P["test"]',
           f"{ADDS_UP}[selections-test]"),
    Mutant("leak: epoch efficiency fits weights on test", TABLES + "epoch_efficiency.py",
           'papers = part.fitted("adamw")\n        cut',
           'papers = prior.fit_prior(part.P["test"], "adamw")\n        cut',
           f"{ADDS_UP}[epoch_efficiency-test]"),
    Mutant("leak: losses by document are of weights fitted on test", TABLES + "epoch_efficiency.py",
           'P = part.P["fitness"]', 'P = part.P["test"]',
           "study/tables/test_multipliers.py"
           "::test_document_losses_add_up_and_widen_the_interval"),
    Mutant("leak: the curve of snapshots fits weights on test", TABLES + "mixtures.py",
           "weights = part.fitted()", 'weights = prior.fit_prior(part.P["test"])',
           f"{ADDS_UP}[curve_on_test-test]"),
    Mutant("leak: the curve of snapshots fits on the split it shows", TABLES + "mixtures.py",
           "weights = part.fitted()", "weights = prior.fit_prior(part.P[split])",
           f"{ADDS_UP}[curve_on_validation-validation]"),
    Mutant("leak: the prior's tables choose on test", TABLES + "learned_prior.py",
           'prior.select_path(P["fitness"], block', 'prior.select_path(P["test"], block',
           f"{ADDS_UP}[prior-test]"),
    Mutant("leak: the prior's tables cross-validate on test", TABLES + "learned_prior.py",
           'P, part.documents["fitness"], possible',
           'part.P["test"], part.documents["test"], possible',
           f"{ADDS_UP}[prior-test]"),
    Mutant("leak: less fitness text is fitted on all of it", TABLES + "learned_prior.py",
           "part = P[:, :size]", "part = P",
           "test_leaks.py::test_weights_of_less_fitness_text_know_nothing_of_the_rest"),
    Mutant("leak: trials are judged on test", TABLES + "tuning.py",
           'ensemble.mixture_nll(fitted.weights, P["validation"])',
           'ensemble.mixture_nll(fitted.weights, P["test"])',
           f"{ADDS_UP}[tuning-test] {ADDS_UP}[tuning-validation]"),
    Mutant("leak: trials are fitted on validation", TABLES + "tuning.py",
           "fitted = part.fitted()",
           'fitted = __import__("q0lib").prior.fit_prior(P["validation"])',
           f"{ADDS_UP}[tuning-validation]"),
    Mutant("leak: trajectories are elected on test", TABLES + "epoch_efficiency.py",
           'judge = "validation" if', 'judge = "test" if', ELECTED),
    Mutant("leak: the reference is elected on test", TABLES + "data_efficiency.py",
           '"model", "validation")', '"model", "test")',
           "test_leaks.py::test_the_reference_model_is_elected_on_validation"),
    Mutant("leak: the best budget is that of test", TABLES + "data_efficiency.py",
           'curve.groupby("epochs").validation', 'curve.groupby("epochs").loss',
           "test_leaks.py::test_the_best_budget_is_that_of_validation"),
    Mutant("leak: K is chosen in-sample", TABLES + "mixtures.py",
           "return min(held_out, key=lambda record: record.nll).k",
           'P = population.P["fitness"]\n'
           "    path = prior.select_path(P, possible, choice)\n"
           "    return min(path, key=lambda k: ensemble.mixture_nll(path[k].weights, P))",
           "test_leaks.py::test_k_is_not_chosen_on_the_text_that_the_weights_were_fitted_to"),
    Mutant("leak: a penalty is chosen in-sample", "study/prior_variations.py",
           "fit(P[:, fold != out], parameter)", "fit(P, parameter)",
           "test_leaks.py::test_a_penalty_is_chosen_on_documents_that_its_weights_have_not_seen"),
    Mutant("leak: folds are dealt by token", "ensemble.py",
           "permutation(D) % folds)[index]", "permutation(P.shape[1]) % folds)", FOLDS),
    Mutant("leak: folds fit on what they hold out", "ensemble.py",
           "P[:, fold != out]", "P", FOLDS),
    Mutant("leak: folds share one prior of all documents", "ensemble.py",
           'prior = fit_prior(fitted, "adamw")', 'prior = fit_prior(P, "adamw")',
           f"{FOLDS}[truncate]"),
    Mutant("leak: the tokenizer is trained on all documents", "corpus.py",
           'train_tokenizer(pools["train"],', "train_tokenizer(sum(pools.values(), []),",
           "test_leaks.py::test_the_tokenizer_has_read_training_text_alone"),
    # --- losses and their errors ---
    Mutant("loss: logarithms are mixed, not probabilities", "ensemble.py",
           "np.log(weights[members] @ read_block(P, tokens, members))",
           "weights[members] @ np.log(read_block(P, tokens, members))",
           "test_ensemble.py::test_probabilities_are_mixed_not_logits"),
    Mutant("loss: a budget holds one cycle too many", "population.py",
           "(members.cycle < cycles)", "(members.cycle <= cycles)",
           "test_population.py::test_prefix_is_checked"),
    Mutant("loss: an epoch with a teacher costs no more than one without", "trajectory.py",
           "tokens * (3 * student + self._lesson_flops(first))", "tokens * 3 * student", COUNTED),
    Mutant("error: pairs are not paired", "ensemble.py",
           "standard_error(a - b, documents)", "standard_error(a, documents)",
           "test_ensemble.py::test_pairing_removes_what_two_methods_share"),
    Mutant("error: some seeds alone may elect", TABLES + "intervals.py",
           'means = means[means["size"] == seeds]', "means = means",
           "study/tables/test_data_efficiency.py::test_a_reference_of_some_seeds_alone_is_not_chosen"),
    Mutant("error: texts are drawn by document, not by token", TABLES + "intervals.py",
           "draws @ points.to_numpy().T / (draws @ tokens)[:, None]",
           "draws @ (points.to_numpy() / tokens).T / len(tokens)",
           "test_leaks.py::test_a_text_drawn_anew_counts_a_long_document_for_its_tokens"),
    Mutant("error: tokens count as independent", "ensemble.py",
           "D, index = _documents(documents, len(values), at_least=2)",
           "D, index = _documents(np.arange(len(values)), len(values), at_least=2)",
           CLUSTERED),
    Mutant("error: document borders off by one", "corpus.py",
           "np.arange(1, held_out_rows(self.tokens, context) * context + 1)",
           "np.arange(0, held_out_rows(self.tokens, context) * context)",
           "test_leaks.py::test_a_token_belongs_to_the_document_that_it_stands_in"),
    # --- the choice of members ---
    Mutant("prior: greedy without swaps", "prior.py",
           "(_swapped(P, start) for start in starts)", "(start for start in starts)",
           "test_selection.py::test_greedy_swaps_out_a_member_that_was_best_alone"),
    Mutant("prior: greedy from forward selection alone", "prior.py",
           "starts = (forward, _solve(P, order[:k]))", "starts = (forward,)", BOTH_ENDS),
    Mutant("prior: greedy from the largest weights alone", "prior.py",
           "starts = (forward, _solve(P, order[:k]))", "starts = (_solve(P, order[:k]),)",
           BOTH_ENDS),
    Mutant("prior: the certificate is half of the gap", "prior.py",
           "float(np.log(slopes.max()))", "float(np.log(slopes.max())) / 2", CERTIFICATE),
    Mutant("prior: the certificate forgets the best member", "prior.py",
           "float(np.log(slopes.max()))", "float(np.log(np.sort(slopes)[-2:][0]))", CERTIFICATE),
    # --- training ---
    Mutant("trainer: a cycle ends above its floor", "trajectory.py",
           'at = done + 1 if method.schedule == "cyclic" else done', "at = done",
           "test_trajectory.py::test_snapshot_is_taken_at_the_floor_before_the_perturbation"),
    Mutant("trainer: the teacher comes a cycle late", "trajectory.py",
           "self.cycle < self.method.distill_after", "self.cycle <= self.method.distill_after",
           COUNTED),
    Mutant("trainer: the average's decay is reversed", "trajectory.py",
           "lerp_(value, 1 - self.method.ema_decay)", "lerp_(value, self.method.ema_decay)",
           AVERAGE),
    Mutant("trainer: the average goes on into the next cycle", "trajectory.py",
           "        self.average = None\n", "", AVERAGE),
    Mutant("trainer: the average is not what is left as snapshot", "trajectory.py",
           "self.model if self.average is None else self._built(self.average)", "self.model",
           AVERAGE),
    Mutant("trainer: the first member teaches all", "train.py",
           "weights_path(directory, index - 1,", "weights_path(directory, 0,",
           "test_steps.py::test_a_member_is_taught_by_the_one_before_it"),
    Mutant("trainer: wd_schedule is ignored", "trajectory.py",
           "method.wd_schedule", '"anti"',
           "test_steps.py::test_weight_decay_follows_its_schedule"),
    Mutant("trainer: wd_floor is ignored", "trajectory.py",
           "method.wd_floor", "0.7",
           "test_steps.py::test_weight_decay_follows_its_schedule"),
    Mutant("trainer: the data's order ignores the seed", "trajectory.py",
           "(run.seed, index, _DATA)", "(0, index, _DATA)", OWN_START),
    Mutant("trainer: trajectories share the data's order", "trajectory.py",
           "(run.seed, index, _DATA)", "(run.seed, 0, _DATA)", OWN_START),
    Mutant("trainer: draws ignore the seed", "trajectory.py",
           "words = [self.run.seed,", "words = [0,", OWN_START),
    Mutant("trainer: the same units are dropped at every step", "trajectory.py",
           '_DROPOUT, int(self.spent["steps"])', "_DROPOUT, 0",
           "test_steps.py::test_every_step_drops_other_units"),
    Mutant("trainer: training reads test", "trajectory.py",
           'text["train"], run.model.context', 'text["test"], run.model.context',
           "test_steps.py::test_training_reads_training_text_all_of_it_and_nothing_else"),
    Mutant("trainer: every split is evaluated on test", "train.py",
           "held_out_log_probs(snapshot, text[split]",
           'held_out_log_probs(snapshot, text["test"]', OWN_TOKENS),
    Mutant("trainer: dropout outside training", "model.py",
           "if self.training and drop", "if drop",
           "test_model.py::test_units_are_dropped_in_training_alone"),
    Mutant("trainer: the order of an epoch is the same in each", "corpus.py",
           "default_rng([*stream.seed, epoch])", "default_rng([*stream.seed])",
           "test_corpus.py::test_epoch_stream_covers_each_epoch_in_its_own_order"),
    # --- the model and its losses ---
    Mutant("model: a window one key too wide", "model.py",
           "(distance < window)", "(distance <= window)", WINDOW),
    Mutant("model: attention sees the next token", "model.py",
           "(distance >= 0)", "(distance >= -1)", WINDOW),
    Mutant("distillation: the squared temperature is forgotten", "distill.py",
           "loss += (soft * kl).sum() * teacher.temperature", "loss += (soft * kl).sum()",
           GRADIENTS),
    Mutant("distillation: and in the gradient", "distill.py",
           "share * (teacher.alpha * teacher.temperature)", "share * teacher.alpha", GRADIENTS),
    Mutant("distillation: the divergence is of the student from the teacher", "distill.py",
           "gap = q.mul_(theirs.sub_(logits)).sum(1, keepdim=True)\n"
           "    return gap / q_sum + p_sum.log_() - q_sum.log_()",
           "gap = p.mul_(logits.sub_(theirs)).sum(1, keepdim=True)\n"
           "    return gap / p_sum + q_sum.log_() - p_sum.log_()", GRADIENTS),
    Mutant("distillation: the teacher's mode is that of training", "distill.py",
           ".to(dtype).eval()", ".to(dtype)", FROZEN),
    Mutant("distillation: the teacher is the student", "distill.py",
           "copy.deepcopy(m)", "m", FROZEN),
    Mutant("distillation: a mixture forgets its weights", "distill.py",
           ".log_softmax(1).add_(log_weight)", ".log_softmax(1)",
           "test_distill.py::test_a_mixture_teaches_its_probabilities_chunk_by_chunk"),
    # --- a text of the reader's own ---
    Mutant("own text: epochs are bought before text", "own_text/proposal.py",
           "for recipe in reversed(RECIPES):", "for recipe in RECIPES:", BUYS),
    Mutant("own text: a lesson costs one teacher", "own_text/proposal.py",
           "orders * tokens * k * forward", "orders * tokens * forward", STUDENTS_COST),
    Mutant("own text: a plan is made anew each time", "own_text/plan.py",
           "        return held\n", "        return _new(asked)\n", SAME_PLAN),
    Mutant("own text: fitness losses are reported", "own_text/work.py",
           'mixture_log_probs(weights, one.P["test"])',
           'mixture_log_probs(weights, one.P["fitness"])', REPORTED),
    Mutant("own text: a larger vocabulary leaves the model behind", "presets.py",
           'changes["model"] = dataclasses.replace(model, vocab_size=words)', "pass", FOLLOWS),
    # --- text and scores ---
    Mutant("cache: new tokens stand at the start", "model.py",
           "rope = cos[new], sin[new]",
           "rope = cos[: tokens.size(1)], sin[: tokens.size(1)]", READ_ON),
    Mutant("cache: a single token sees beyond its window", "model.py",
           "k[:, :, -window:], v[:, :, -window:]", "k, v", READ_ON),
    Mutant("cache: passes of a looped layer share their keys", "model.py",
           "functools.partial(cache.extended, at)", "functools.partial(cache.extended, layer)",
           READ_ON),
    Mutant("mixture: its logits are those of the members, mixed", "model.py",
           "said = logits.log_softmax(-1) + math.log(weight)", "said = logits + math.log(weight)",
           "test_generate.py"
           "::test_a_mixture_of_one_is_the_member_and_of_several_their_probabilities"),
    Mutant("generate: members are drawn alike", "language_model.py",
           "torch.multinomial(shares, 1,", "torch.multinomial(torch.ones_like(shares), 1,",
           "test_generate.py::test_tokens_are_drawn_as_the_mixture_says"),
    Mutant("score: a window forgets the token before it", "language_model.py",
           "range(0, len(document) - 1, self.context)", "range(0, len(document), self.context + 1)",
           "test_generate.py::test_a_loss_is_that_of_evaluation_on_the_same_tokens"),
    Mutant("export: members keep another's weight", "export.py",
           "[float(weights[member]) for member in members]", "sorted(weights[members].tolist())",
           "test_export.py::test_a_folder_holds_the_mixture_and_says_where_it_came_from"),
    Mutant("export: transformers sees the last token alone", "for_transformers/modeling_q0.py",
           '{"input_ids": input_ids[:, start:],', '{"input_ids": input_ids[:, -1:],',
           "test_export.py::test_transformers_loads_it_where_q0lib_is_not"),
)  # fmt: skip


def copied(to: Path) -> Path:
    """A copy of what the tests need of the project."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, to / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, to / name)
    return to


def failure(project: Path, tests: Sequence[str]) -> str:
    """The first of `tests` that fails in the copy at `project`, "" if none does."""
    # No bytecode: a file that changes twice in a second would be run as it was before.
    env = os.environ | {"PYTHONPATH": str(project), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "--tb=no", "-rfE",
               *(f"tests/{test}" for test in tests)]  # fmt: skip
    try:
        done = subprocess.run(
            command, cwd=project, env=env, capture_output=True, text=True, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        return f"no end after {SECONDS} s"
    if done.returncode not in (0, 1):
        said = (done.stdout + done.stderr).strip().splitlines()
        return f"CANNOT RUN {' '.join(tests)}: {said[-1] if said else done.returncode}"
    failed = re.findall(r"^(?:FAILED|ERROR) (?:\S*/)?(\S.*?)(?: - .*)?$", done.stdout, re.MULTILINE)
    return failed[0] if failed else ""


def killed_by(mutant: Mutant, project: Path) -> str:
    """The test that fails when the code is so broken; a word in capitals when there is none."""
    file = project / "q0lib" / mutant.file
    whole = file.read_text(encoding="utf-8") if file.exists() else ""
    if whole.count(mutant.old) != 1:
        return f"NOT FOUND: {whole.count(mutant.old)} times in {mutant.file}"
    file.write_text(whole.replace(mutant.old, mutant.new), encoding="utf-8")
    try:
        return failure(project, mutant.tests.split()) or "SURVIVED"
    finally:
        file.write_text(whole, encoding="utf-8")


def main(words: Sequence[str]) -> int:
    """Try the mutants whose names hold one of `words` (all, without); the exit status."""
    chosen = [each for each in MUTANTS if not words or any(word in each.name for word in words)]
    if not chosen:
        print(f"no mutant has one of these words in its name: {', '.join(words)}")
        return 1
    with tempfile.TemporaryDirectory(prefix="q0-mutants-") as folder:
        project = copied(Path(folder))
        tests = sorted({test for each in chosen for test in each.tests.split()})
        print(f"{len(chosen)} mutants; first their {len(tests)} tests on the code as it is")
        if already := failure(project, tests):
            print(f"fails without any mutant: {already}")
            return 1
        found = {each: killed_by(each, project) for each in tqdm(chosen, unit="mutant")}
    width = max(len(each.name) for each in found)
    for each, by in found.items():
        print(f"{each.name:{width}}  {by}")
    left = [by for by in found.values() if by.startswith(LEFT)]
    print(f"{len(found) - len(left)} of {len(found)} killed")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
