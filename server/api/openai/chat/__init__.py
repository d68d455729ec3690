"""Chat completions: messages, tools, reasoning, answers."""
