"""A published Llama becomes a model of constant state: windows, kept first tokens, far parts.

`plan` says what each layer keeps, `network` is the source, `student` the same weights with the
plan's attention and low-rank updates. `match` and `distil` train it; `measure` compares it with
its source. README.md in this folder has the order of the commands.
"""
