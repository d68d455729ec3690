"""Chat templates: messages to the text that a model was trained on.

May use `workers` and errors. `models` holds a renderer, which `api.openai.chat` calls.
"""
