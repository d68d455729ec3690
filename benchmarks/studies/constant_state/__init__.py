"""The bundled chat model of constant state next to its original; see `__main__`."""
