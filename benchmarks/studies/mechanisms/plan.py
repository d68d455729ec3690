"""What ``ablation`` runs, in the order of what it settles first.

- ``parts``       size small: softmax and `elu` with and without convolution, norm and gate; the
                  delta rule, the decay and the convolution of `delta` and `gated` one by one;
                  Mamba-2 and RWKV-7. Three seeds, the first one of all before the second.
- ``maps``        the other mechanisms at size small: feature maps, random and learnt features, hard
                  and soft codes, windows, where positions enter. Three seeds.
- ``conversion``  of the small softmax model, and as control the same model trained further on as
                  many tokens.
- ``recall``      to convergence, heads as wide as gives each mechanism the same bytes of state;
                  ``recall_apart`` the same with each value behind its key.
- ``rates``       three learning rates.
- ``long``        the tiny size with 20 tokens per parameter.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from benchmarks.report import RESULTS, Figures, read_result
from benchmarks.studies.mechanisms import conversion, language, recall
from benchmarks.studies.mechanisms.folder import VOCAB_SIZE, Folder
from benchmarks.studies.mechanisms.specs import SIZES, Size, Spec, state_bytes

QUESTIONS = ("parts", "maps", "conversion", "recall", "recall_apart", "rates", "long")
SURROUNDED = ("", "conv_size=4", "gate=true,norm=true", "conv_size=4,gate=true,norm=true")
SOFTMAX_SURROUNDED = f"softmax:{SURROUNDED[-1]}"
PARTS = (
    *(f"{name}:{parts}".rstrip(":") for name in ("softmax", "elu") for parts in SURROUNDED),
    *("delta", "delta:conv_size=0", "delta:decay=false", "delta:gate=false"),
    *("gated", "gated:conv_size=0", "normed:map=elu", "retnet", "mamba2", "rwkv7"),
    *("dijiang", "dijiang:published=true"),
)
#: What the notes that this project began from ask, and what a review missed.
MAPS = (
    *("relu", "softmax_map", "efficient", "efficient:denominator=weights", "normed"),
    *("performer", "performer:orthogonal=false", "performer:features=128"),
    *("performer:features=128,orthogonal=false", "performer:projection=trained"),
    *("performer:map=hyperbolic", "performer:map=relu", "performer:map=relu,projection=trained"),
    *("performer:map=simplified", "performer:map=simplified,projection=trained", "rbf"),
    *("soft_vq:codewords=32", "soft_vq", "soft_vq:qk_norm=true", "vq:window=1", "vq"),
    *("vq:qk_norm=true", "vq:commitment=0.0001,qk_norm=true"),
    *("cosine", "cosine:order=2,key_dim=16", "cosine:order=2,key_dim=16,unit_length=false"),
    *(
        "elu:denominator=tokens",
        "softmax_map:denominator=tokens",
        "delta:negative_eigenvalues=true",
    ),
    *("window_linear:window=64", "window_linear:older=forgotten,window=64"),
    *("softmax:rotary=none", "elu:rotary=before", "elu:rotary=after", "cosine:rotary=before"),
    *("performer:rotary=before", "retnet:positions=rotary", "retnet:positions=none"),
    *("cosformer", "cosformer:horizon=512"),
)
#: Those of the parts and maps that the summary shows.
SHOWN = (
    *("softmax", "softmax:conv_size=4", "elu", "elu:conv_size=4", "delta", "gated", "mamba2"),
    *("rwkv7", "retnet", "dijiang", "vq", "performer"),
    *("window_linear:window=64", "window_linear:older=forgotten,window=64"),
)
SEEDS = (0, 1, 2)
RATES = (3e-3, 6e-3, 1.2e-2)
RATED = ("softmax", SOFTMAX_SURROUNDED, "elu", "delta", "gated", "retnet", "mamba2", "rwkv7")
LONG_SIZE, LONG_TOKENS_PER_PARAMETER = "tiny", 20
LONG = ("softmax", "softmax:conv_size=4", "elu", "delta", "gated", "retnet")
#: Bytes of state of a model of recall, and the controls, whose cache grows.
STATES = (8 << 10, 32 << 10, 128 << 10)
RECALL_CONTROLS = ("softmax", "softmax:conv_size=4")
RECALLED = ("elu", "elu:conv_size=4", "retnet", "gated", "delta", "delta:decay=false")
RECALL_STEPS = 3000
#: By question.
RECALL_FORMS: dict[str, recall.Form] = {"recall": "joined", "recall_apart": "apart"}
CONVERTED = ("softmax", "window_linear:window=32", "performer", "gated")
CONVERTED_SIZE = "small"


@dataclass(frozen=True)
class Job:
    """One run; ``run`` gives the figures of the file called ``name``.

    ``work`` is how much there is to compute, in tokens of the small size or in steps of recall.
    """

    name: str
    question: str
    mechanism: str
    work: float
    run: Callable[[], Figures]


def jobs(folder: Folder, recipe: language.Recipe, recall_steps: int = RECALL_STEPS) -> list[Job]:
    """All of them, in their order."""
    first, *others = SEEDS
    return [
        *_small("parts", folder, recipe, first),
        *_small("maps", folder, recipe, first),
        *_conversions(folder, recipe),
        *_recalls("recall", first, recall_steps, recipe.device),
        *_recalls("recall_apart", first, recall_steps, recipe.device),
        *(job for seed in others for job in _small("parts", folder, recipe, seed)),
        *_rates(folder, recipe),
        *_long(folder, recipe),
        *(job for seed in others for job in _small("maps", folder, recipe, seed)),
        *(
            job
            for seed in others
            for question in RECALL_FORMS
            for job in _recalls(question, seed, recall_steps, recipe.device)
        ),
    ]


def _small(question: str, folder: Folder, recipe: language.Recipe, seed: int) -> Iterator[Job]:
    for name in {"parts": PARTS, "maps": MAPS}[question]:
        yield _language(question, folder, "small", Spec.parse(name), seed, recipe)


def _rates(folder: Folder, recipe: language.Recipe) -> Iterator[Job]:
    for rate in RATES:
        if rate != recipe.learning_rate:  # those are among the parts
            changed = dataclasses.replace(recipe, learning_rate=rate)
            for name in RATED:
                yield _language("rates", folder, "small", Spec.parse(name), SEEDS[0], changed)


def _long(folder: Folder, recipe: language.Recipe) -> Iterator[Job]:
    tokens = SIZES[LONG_SIZE].num_parameters(VOCAB_SIZE) * LONG_TOKENS_PER_PARAMETER
    steps = math.ceil(tokens / recipe.batch_size / recipe.window)
    longer = dataclasses.replace(recipe, num_steps=steps)
    for name in LONG:
        yield _language("long", folder, LONG_SIZE, Spec.parse(name), SEEDS[0], longer)


def _language(
    question: str, folder: Folder, size: str, spec: Spec, seed: int, recipe: language.Recipe
) -> Job:
    rate = f"-{recipe.learning_rate:g}" if question == "rates" else ""
    name = f"{question}{rate}-{size}-{spec.slug}-{seed}"
    work = recipe.num_tokens * (1.0 if size == "small" else 0.5)
    run = partial(language.run, folder, name, size, spec, seed, recipe)
    return Job(name, question, str(spec), work, run)


def _conversions(folder: Folder, recipe: language.Recipe) -> Iterator[Job]:
    source = folder.work(f"parts-{CONVERTED_SIZE}-softmax-{SEEDS[0]}") / "model"
    for name in CONVERTED:
        spec = Spec.parse(name)
        job = f"conversion-{spec.slug}"
        work = conversion.NUM_STEPS * recipe.batch_size * recipe.window
        run = partial(conversion.run, folder, job, source, spec, recipe)
        yield Job(job, "conversion", str(spec), work, run)


def _recalls(question: str, seed: int, num_steps: int, device: str) -> Iterator[Job]:
    recipe = recall.RecallRecipe(RECALL_FORMS[question], num_steps=num_steps, device=device)
    controls = RECALL_CONTROLS if seed == SEEDS[0] else ()
    sizes = [(Spec.parse(name), 0, recall.SIZE) for name in controls]
    for wanted in STATES:
        for name in RECALLED:
            spec = Spec.parse(name)
            sizes.append((spec, wanted, matched_size(spec, wanted)))
    for spec, wanted, size in sizes:
        name = f"{question}-{wanted}-{spec.slug}-{seed}"
        run = partial(recall.run, spec, seed, recipe, size)
        yield Job(name, question, str(spec), num_steps, run)


def matched_size(spec: Spec, wanted: int) -> Size:
    """The size of recall whose heads give the mechanism nearly ``wanted`` bytes of state."""

    def gap(size: Size) -> float:
        found = state_bytes(spec.config(size, recall.NOTHING + 1))
        assert found is not None, spec
        return abs(math.log(found / wanted))

    sizes = [dataclasses.replace(recall.SIZE, head_dim=dim) for dim in range(4, 129, 2)]
    return min(sizes, key=gap)


def seconds(job: Job, pace: float) -> float:
    """How long a job takes by the committed comparison, times ``pace``."""
    kind = "recall" if job.question in RECALL_FORMS else "language"
    attention = job.mechanism.partition(":")[0]
    known = _seconds_per_work(kind)
    return job.work * known.get(attention, max(known.values())) * pace


def _seconds_per_work(kind: str) -> dict[str, float]:
    """By attention: seconds per token of the small size, or per step of recall."""
    found: dict[str, list[float]] = {}
    for run in read_result(RESULTS / "mechanisms.json")["runs"]:
        if run["kind"] == kind and run.get("size") in (None, "small"):
            work = run["training"].get("num_tokens") or run["recipe"]["num_steps"]
            attention = run["mechanism"].partition(":")[0]
            found.setdefault(attention, []).append(run["training"]["seconds"] / work)
    return {attention: statistics.fmean(values) for attention, values in found.items()}
