"""A published Llama becomes a model of constant state: windows, kept first tokens, far parts.

`conversion` has the stages in their order. `plan` says what each layer keeps, `network` is the
source, `student` the same weights with the plan's attention and updates. `match` and `divergence`
have the losses of both trainings; `report` compares the result with its source. README.md in this
folder has all files.
"""
