"""For environments that have another checkout installed; see `sitecustomize`."""
