"""Contract: what exporter, runtime and every engine agree on: tensors, manifest, errors and tolerances; no torch."""
