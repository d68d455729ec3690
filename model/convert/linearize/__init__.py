"""A published Llama becomes a model of constant state: windows, kept first tokens, far parts.

`conversion` has the stages in their order. `plan` says what each layer keeps, `source` is the
source, `student` the same weights with the plan's attention and updates. `train` has both stages;
`report` compares the result with its source. README.md in this
folder has all files.
"""
