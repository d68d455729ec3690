"""Structured output: what a text may be, as a grammar, and where its tokens may go on.

`formats` of a request become llguidance's grammar text in a child process that can
be killed (`worker`, `child`, `compiler`); `matcher` reads it beside the engine.
"""
