"""What an exported folder holds beside the model's own files: transformers' classes around them (`huggingface/copied_code.py`).

These modules alone may import transformers at the top: they are loaded by it.
"""
