"""Fields that OpenAI's API or other servers have and this one does not: refused by name.

A value that asks for nothing (null, or the default) is accepted. A field that a body declares
itself is never looked up here.
"""

from __future__ import annotations

from collections.abc import Iterable

from server.api.chat.messages import NO_MEDIA
from server.api.schemas.wire import Refusal


def _refused(names: Iterable[str], reason: str, *accepted: object) -> dict[str, Refusal]:
    return dict.fromkeys(names, Refusal(reason, accepted))


_HOSTED = {
    **_refused(
        ["cache_salt"],
        "the prefix cache needs no key: it knows each tenant's own prefixes at any token",
    ),
    **_refused(["moderation"], "this server moderates nothing"),
}

_WINDOW = "penalties look at the last 256 tokens"
_ORDER = "filters have one order"

#: Of vLLM's, llama.cpp's, text-generation-webui's and others' sampling.
_SAMPLING = {
    **_refused(["use_beam_search"], "there is no beam search; use best_of", False),
    **_refused(["length_penalty"], "is for beam search, which there is not", 1.0),
    **_refused(["early_stopping"], "is for beam search, which there is not", False),
    **_refused(["min_tokens", "min_length"], "use ignore_eos with max_tokens", 0),
    **_refused(["num_beams"], "there is no beam search; use best_of", 1),
    **_refused(["grammar", "grammar_string"], "GBNF is not read; use response_format", ""),
    **_refused(["json_schema"], "use response_format", {}),
    **_refused(["repeat_last_n", "repetition_penalty_range"], _WINDOW, -1, 256),
    **_refused(["min_keep"], "filters leave one token at least", 0, 1),
    **_refused(["mirostat", "mirostat_mode"], "use min_p or top_n_sigma", 0),
    **_refused(["dynamic_temperature", "dynatemp_range"], "use top_n_sigma", False, 0),
    **_refused(["smoothing_factor", "top_a", "epsilon_cutoff", "eta_cutoff"], "use min_p", 0),
    **_refused(["tfs", "tfs_z", "guidance_scale"], "use min_p or typical_p", 1),
    **_refused(["penalty_alpha", "negative_prompt"], "the model is run once for each token", 0, ""),
    **_refused(["samplers", "sampler_priority", "temperature_last"], _ORDER, [], False),
    **_refused(["ban_eos_token"], "use ignore_eos", False),
    **_refused(["add_bos_token"], "a text gets the start token, token ids are as given", True),
    **_refused(["custom_token_bans", "banned_strings"], "use logit_bias on token ids", "", []),
    **_refused(["n_probs"], "use logprobs", 0),
    **_refused(["reasoning_format"], "the thinking is in reasoning_content", "auto", "deepseek"),
    **_refused(["bad_words"], "is not supported; use logit_bias on token ids", []),
    **_refused(["allowed_token_ids"], "is not supported; use logit_bias or response_format"),
    **_refused(["include_stop_str_in_output"], "a stop string is never shown", False),
    **_refused(["skip_special_tokens"], "special tokens have no text here", True),
    **_refused(["spaces_between_special_tokens"], "special tokens have no text here", True),
    **_refused(["detokenize"], "text is always made", True),
    **_refused(
        ["truncate_prompt_tokens", "truncation_prompt_tokens", "truncation_side"],
        "a prompt is never cut: the state has no length limit",
        -1,
    ),
    **_refused(["add_special_tokens"], "a text gets the start token, token ids are as given", True),
    **_refused(["logits_processors"], "the server runs no code of its clients"),
    **_refused(["return_tokens_as_token_ids"], "is not supported", False),
    **_refused(["kv_transfer_params", "vllm_xargs"], "is not supported"),
    **_refused(
        [
            *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
            *("guided_decoding_backend", "guided_whitespace_pattern", "structural_tag"),
            "structured_outputs",
        ],
        "is not supported; use response_format",
    ),
}

#: `POST /v1/completions`.
COMPLETIONS = {
    **_HOSTED,
    **_SAMPLING,
    **_refused(["suffix"], "the model cannot fill in: it reads from left to right", ""),
    **_refused(["max_completion_tokens"], "is called max_tokens here"),
    **_refused(["tools", "tool_choice", "messages"], "is for /v1/chat/completions"),
    **_refused(["logprob_start_len", "return_logprob"], "is not supported; use logprobs and echo"),
}

#: `POST /v1/chat/completions`.
CHAT = {
    **_HOSTED,
    **_SAMPLING,
    **_refused(["audio"], NO_MEDIA),
    **_refused(["modalities"], NO_MEDIA, ["text"]),
    **_refused(["web_search_options"], "the server reaches no network"),
    **_refused(["reasoning"], "is called reasoning_effort here", {}, {"effort": "none"}),
    **_refused(["functions"], "is not supported; use tools", []),
    **_refused(["function_call"], "is not supported; use tool_choice", "none"),
    **_refused(["prompt_logprobs", "echo"], "is for /v1/completions", False),
    **_refused(["chat_template"], "the template comes from the model alone"),
    **_refused(["documents"], "is not supported; chat_template_kwargs may have them", []),
    **_refused(["prompt"], "is for /v1/completions; give messages"),
    **_refused(["allowed_tools"], "is part of tool_choice"),
    **_refused(["best_of"], "is for /v1/completions", 1),
    **_refused(["mm_processor_kwargs", "media_io_kwargs"], NO_MEDIA),
}

#: `POST /v1/responses`.
RESPONSES = {
    **_HOSTED,
    **_refused(["conversation"], "there are no conversation objects; use previous_response_id"),
    **_refused(["max_tool_calls"], "there are no built-in tools"),
    **_refused(["prompt"], "there are no stored prompts"),
    **_refused(["context_management"], "the state has a constant size: nothing needs to be cut"),
    **_refused(["messages"], "is for /v1/chat/completions; give input"),
    **_refused(["max_tokens", "max_completion_tokens"], "is called max_output_tokens here"),
}

#: What a response says of its thinking.
REASONING = {
    **_refused(
        ["summary", "generate_summary"],
        "there are no summaries: the output has all that is thought",
        "auto",
    ),
}

#: `POST /v1/embeddings`.
EMBEDDINGS = {
    **_refused(["dimensions"], "the vector has the model's hidden size, and is not cut"),
    **_refused(["truncate_prompt_tokens"], "an input is never cut"),
    **_refused(["messages"], "is not supported; give input"),
    **_refused(["priority"], "all requests have the same priority", 0),
    **_refused(["normalize"], "the vector always has the length 1", True),
}
