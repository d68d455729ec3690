"""Parameters of generation that other servers have and this one does not: refused unless off."""

from __future__ import annotations

from collections.abc import Iterable

from server.api.schemas.wire import Refusal


def refused(names: Iterable[str], reason: str, *accepted: object) -> dict[str, Refusal]:
    """All of ``names`` are refused for ``reason``, with other values than those ``accepted``."""
    return dict.fromkeys(names, Refusal(reason, accepted))


#: Of llama.cpp, Ollama and text-generation-webui. Clients send them all, most of them off.
OTHER_SAMPLERS = {
    **refused(["mirostat", "mirostat_mode"], "use min_p or top_n_sigma", 0),
    **refused(["dynamic_temperature", "dynatemp_range"], "use top_n_sigma", False, 0),
    **refused(["smoothing_factor", "top_a", "epsilon_cutoff", "eta_cutoff"], "use min_p", 0),
    **refused(["tfs", "tfs_z", "guidance_scale"], "use min_p or typical_p", 1),
    **refused(["penalty_alpha", "negative_prompt"], "the model is run once for each token", 0, ""),
    **refused(["skew", "no_repeat_ngram_size"], "use dry_multiplier or typical_p", 0),
    **refused(["encoder_repetition_penalty"], "use repetition_penalty", 1),
    **refused(["adaptive_target"], "use min_p or top_n_sigma", -1, -0.01),
    **refused(["do_sample"], "a temperature of 0 is greedy", True),
    **refused(["temperature_last"], "the temperature comes before the filters", False),
    **refused(["num_beams"], "there is no beam search", 1),
    **refused(["min_tokens", "min_length"], "use ignore_eos with a limit of tokens", 0),
    **refused(["ban_eos_token"], "use ignore_eos", False),
    **refused(["custom_token_bans", "banned_strings"], "use logit_bias on token ids", "", []),
    **refused(["grammar", "grammar_string"], "GBNF is not read; give a JSON schema", ""),
}

#: What has a meaning only next to those.
PARTS_OF_OTHERS = frozenset(
    {
        *("mirostat_tau", "mirostat_eta", "dynatemp_low", "dynatemp_high", "dynatemp_exponent"),
        *("smoothing_curve", "adaptive_decay", "rep_pen_slope", "max_tokens_second"),
    }
)
