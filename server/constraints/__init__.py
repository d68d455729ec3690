"""Structured output: what a text may be, as a grammar, and which tokens may come next.

A format becomes llguidance's grammar text in a child process that can be killed (`worker`,
`compiler`); a `GrammarMatcher` follows it during generation.
"""
