"""How tokens may be drawn: ranges of a request's parameters, and what holds by default."""

from __future__ import annotations

from dataclasses import replace

from server.engine.types import Dry, SamplingParams
from server.errors import InvalidRequest

# -------------------------------------------------------------------------------------------------
# What a request may ask of the draws: the ranges of its parameters, whichever sampler draws.


#: How many of the most likely tokens a request may ask for.
MAX_TOP_LOGPROBS = 20
#: As at OpenAI, and more than any penalty takes off.
MAX_LOGIT_BIAS, MAX_BIASED_IDS = 100.0, 1024

#: How many last tokens of a session, fed and generated, the penalties look at.
PENALTY_WINDOW = 256

#: Tokens that no repetition has; more than any client names.
MAX_DRY_BREAKERS = 64
OFF = Dry(0.0)

MAX_SEED = (1 << 64) - 1

#: Below it logits over the temperature leave float32. The draw is that of temperature 0.
MIN_TEMPERATURE = 1e-5


def is_greedy(params: SamplingParams) -> bool:
    """Whether the likeliest token that is allowed is drawn, whatever else ``params`` say."""
    return params.temperature < MIN_TEMPERATURE or params.top_p == 0.0


def has_penalty(params: SamplingParams) -> bool:
    """Whether a draw depends on the session's recent tokens."""
    penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
    return penalties != (1.0, 0.0, 0.0) or params.dry is not None


def has_filter(params: SamplingParams) -> bool:
    """Whether some tokens cannot be drawn however the number falls."""
    filters = (params.top_k, params.top_p, params.min_p, params.typical_p, params.top_n_sigma)
    return (*filters, params.xtc_probability) != (0, 1.0, 0.0, 1.0, 0.0, 0.0)


def check_params(params: SamplingParams, vocab_size: int) -> None:
    """Raises `InvalidRequest` that names the first field out of range."""
    dry = params.dry or OFF
    for ok, field, rule in (
        (0.0 <= params.temperature <= 100.0, "temperature", "must be in 0..100"),
        (0 <= params.top_k <= vocab_size, "top_k", f"must be in 0..{vocab_size}"),
        (0.0 <= params.top_p <= 1.0, "top_p", "must be in 0..1"),
        (0.0 <= params.min_p <= 1.0, "min_p", "must be in 0..1"),
        (0.0 < params.typical_p <= 1.0, "typical_p", "must be above 0 and at most 1"),
        (0.0 <= params.top_n_sigma <= 100.0, "top_n_sigma", "must be in 0..100"),
        (0.0 <= params.xtc_probability <= 1.0, "xtc_probability", "must be in 0..1"),
        (0.0 <= params.xtc_threshold <= 1.0, "xtc_threshold", "must be in 0..1"),
        (0.0 <= dry.multiplier <= 100.0, "dry_multiplier", "must be in 0..100"),
        (1.0 <= dry.base <= 100.0, "dry_base", "must be in 1..100"),
        (
            1 <= dry.allowed_length <= PENALTY_WINDOW,
            "dry_allowed_length",
            f"must be in 1..{PENALTY_WINDOW}",
        ),
        (
            0 <= dry.penalty_last_n <= PENALTY_WINDOW,
            "dry_penalty_last_n",
            f"must be in 0..{PENALTY_WINDOW}",
        ),
        (
            len(dry.breakers) <= MAX_DRY_BREAKERS
            and all(0 <= id < vocab_size for id in dry.breakers),
            "dry_sequence_breakers",
            f"must be at most {MAX_DRY_BREAKERS} ids in 0..{vocab_size - 1}",
        ),
        (
            params.repetition_penalty >= 0.01,
            "repetition_penalty",
            "must be at least 0.01",
        ),
        (params.repetition_penalty <= 100.0, "repetition_penalty", "must be at most 100"),
        (-2.0 <= params.presence_penalty <= 2.0, "presence_penalty", "must be in -2..2"),
        (-2.0 <= params.frequency_penalty <= 2.0, "frequency_penalty", "must be in -2..2"),
        (
            len(params.logit_bias) <= MAX_BIASED_IDS,
            "logit_bias",
            f"must have at most {MAX_BIASED_IDS} token ids",
        ),
        (
            all(-MAX_LOGIT_BIAS <= bias <= MAX_LOGIT_BIAS for _, bias in params.logit_bias),
            "logit_bias",
            "must be in -100..100",
        ),
        (
            all(0 <= id < vocab_size for id, _ in params.logit_bias),
            "logit_bias",
            f"must be of token ids in 0..{vocab_size - 1}",
        ),
        (
            len({id for id, _ in params.logit_bias}) == len(params.logit_bias),
            "logit_bias",
            "must have each token id once",
        ),
        (
            params.top_logprobs is None or 0 <= params.top_logprobs <= MAX_TOP_LOGPROBS,
            "top_logprobs",
            f"must be in 0..{MAX_TOP_LOGPROBS}",
        ),
        (0 <= params.seed <= MAX_SEED, "seed", "must be in 0..2**64-1"),
        (params.max_tokens >= 1, "max_tokens", "must be at least 1"),
        (all(params.stop), "stop", "must not hold an empty string"),
        (
            all(0 <= id < vocab_size for id in params.stop_token_ids),
            "stop_token_ids",
            f"must be in 0..{vocab_size - 1}",
        ),
    ):
        if not ok:
            raise InvalidRequest(f"{field}: {rule}", field)


# How tokens are drawn where neither a client nor the model's own files say: the one definition for
# API, page and terminal.
#
# Chosen with ``python -m benchmarks.sampling``, which compares texts of the bundled model under
# many settings with what people wrote (``benchmarks/results/sampling.json``): of the settings
# without a penalty this one repeats itself and varies its words most nearly as they do. A lower
# temperature repeats more, and without ``top_p`` the model invents words. There is no penalty:
# greedy decoding stays greedy, and formats are not disturbed.


DEFAULTS = SamplingParams(temperature=1.0, top_p=0.9)

#: The fields whose defaults `/v1/models` names.
FIELDS = (
    *("temperature", "top_k", "top_p", "min_p", "typical_p", "top_n_sigma"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)


def with_defaults(defaults: SamplingParams = DEFAULTS, /, **given: object) -> SamplingParams:
    """Sampling parameters in which every given value wins over its default."""
    return replace(defaults, **given)  # type: ignore[arg-type]


def published(defaults: SamplingParams = DEFAULTS) -> dict[str, float]:
    """The defaults by the names that requests have for them."""
    return {name: getattr(defaults, name) for name in FIELDS}
