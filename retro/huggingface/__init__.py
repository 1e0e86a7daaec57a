"""Models in Hugging Face's format: read from its folders, and written to them."""
