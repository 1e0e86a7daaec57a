"""Layer 0: the artifact format: shards, manifests, fingerprints, atomic writes."""
