"""Fields that OpenAI's API or other servers have and this one does not: refused by name.

A value that asks for nothing (null, or the default) is accepted. A field that a body declares
itself is never looked up here.
"""

from __future__ import annotations

from server.api.chat.messages import NO_MEDIA
from server.api.schemas.other_samplers import OTHER_SAMPLERS, refused

_HOSTED = {
    **refused(
        ["cache_salt"],
        "the prefix cache needs no key: it knows each tenant's own prefixes at any token",
    ),
    **refused(["moderation"], "this server moderates nothing"),
}

#: Of vLLM's, llama.cpp's, text-generation-webui's and others' sampling.
_SAMPLING = {
    **refused(["use_beam_search"], "there is no beam search; use best_of", False),
    **refused(["length_penalty"], "is for beam search, which there is not", 1.0),
    **refused(["early_stopping"], "is for beam search, which there is not", False),
    **OTHER_SAMPLERS,
    **refused(["json_schema"], "use response_format", {}),
    **refused(["min_keep"], "filters leave one token at least", 0, 1),
    **refused(["samplers", "sampler_priority"], "filters have one order", []),
    **refused(["add_bos_token"], "a text gets the start token, token ids are as given", True),
    **refused(["n_probs"], "use logprobs", 0),
    **refused(["reasoning_format"], "the thinking is in reasoning_content", "auto", "deepseek"),
    **refused(["bad_words"], "is not supported; use logit_bias on token ids", []),
    **refused(["allowed_token_ids"], "is not supported; use logit_bias or response_format"),
    **refused(["include_stop_str_in_output"], "a stop string is never shown", False),
    **refused(["skip_special_tokens"], "special tokens have no text here", True),
    **refused(["spaces_between_special_tokens"], "special tokens have no text here", True),
    **refused(["detokenize"], "text is always made", True),
    **refused(
        ["truncate_prompt_tokens", "truncation_prompt_tokens", "truncation_side"],
        "a prompt is never cut: the state has no length limit",
        -1,
    ),
    **refused(["add_special_tokens"], "a text gets the start token, token ids are as given", True),
    **refused(["logits_processors"], "the server runs no code of its clients"),
    **refused(["return_tokens_as_token_ids"], "is not supported", False),
    **refused(["kv_transfer_params", "vllm_xargs"], "is not supported"),
    **refused(
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
    **refused(["suffix"], "the model cannot fill in: it reads from left to right", ""),
    **refused(["max_completion_tokens"], "is called max_tokens here"),
    **refused(["tools", "tool_choice", "messages"], "is for /v1/chat/completions"),
    **refused(["logprob_start_len", "return_logprob"], "is not supported; use logprobs and echo"),
}

#: `POST /v1/chat/completions`.
CHAT = {
    **_HOSTED,
    **_SAMPLING,
    **refused(["audio"], NO_MEDIA),
    **refused(["modalities"], NO_MEDIA, ["text"]),
    **refused(["web_search_options"], "the server reaches no network"),
    **refused(["reasoning"], "is called reasoning_effort here", {}, {"effort": "none"}),
    **refused(["functions"], "is not supported; use tools", []),
    **refused(["function_call"], "is not supported; use tool_choice", "none"),
    **refused(["prompt_logprobs", "echo"], "is for /v1/completions", False),
    **refused(["chat_template"], "the template comes from the model alone"),
    **refused(["documents"], "is not supported; chat_template_kwargs may have them", []),
    **refused(["prompt"], "is for /v1/completions; give messages"),
    **refused(["allowed_tools"], "is part of tool_choice"),
    **refused(["best_of"], "is for /v1/completions", 1),
    **refused(["mm_processor_kwargs", "media_io_kwargs"], NO_MEDIA),
}

#: `POST /v1/responses`.
RESPONSES = {
    **_HOSTED,
    **refused(["conversation"], "there are no conversation objects; use previous_response_id"),
    **refused(["max_tool_calls"], "there are no built-in tools"),
    **refused(["prompt"], "there are no stored prompts"),
    **refused(["context_management"], "the state has a constant size: nothing needs to be cut"),
    **refused(["messages"], "is for /v1/chat/completions; give input"),
    **refused(["max_tokens", "max_completion_tokens"], "is called max_output_tokens here"),
}

#: What a response says of its thinking.
REASONING = {
    **refused(
        ["summary", "generate_summary"],
        "there are no summaries: the output has all that is thought",
        "auto",
    ),
}

#: `POST /v1/embeddings`.
EMBEDDINGS = {
    **refused(["dimensions"], "the vector has the model's hidden size, and is not cut"),
    **refused(["truncate_prompt_tokens"], "an input is never cut"),
    **refused(["messages"], "is not supported; give input"),
    **refused(["priority"], "all requests have the same priority", 0),
    **refused(["normalize"], "the vector always has the length 1", True),
}
