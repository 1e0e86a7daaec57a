"""Layer 0: the artefact format: shards, manifests, fingerprints, atomic writes."""
