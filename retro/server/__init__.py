"""The HTTP side of a datastore and a checkpoint."""
