"""Chat templates: messages to the text that a model was trained on.

May use errors only. `models` holds a renderer, which `api.openai.chat` calls.
"""
