"""HTTP server for a datastore and, optionally, a checkpoint."""
