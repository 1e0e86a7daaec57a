"""Remote code of an exported folder: transformers' classes around the model's own files (see `huggingface/copied_code.py`).

Only these modules may import transformers at the top, because transformers loads them.
"""
