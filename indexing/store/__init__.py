"""The datastore's format: artifacts, manifests, fingerprints, arrays in shards, atomic writes, remote mirrors."""
