"""Linear layers: dispatch, cuBLAS and our own GEMMs."""
