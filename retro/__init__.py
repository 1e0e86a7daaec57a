"""Layer 2: the model, batches, trainer, evaluation and generation (imports neither faiss nor ray)."""
