"""Importing this module adds the classes of an exported folder to transformers:
`AutoModelForCausalLM.from_pretrained(FOLDER)`.

transformers finds classes of other packages only if they are registered; it has no entry point for them.
"""

from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from retro.huggingface.modeling import RetroConfig, RetroForCausalLM
from retro.huggingface.tokenization import RetroTokenizer

AutoConfig.register(RetroConfig.model_type, RetroConfig)
AutoModelForCausalLM.register(RetroConfig, RetroForCausalLM)
# Models of other classes find it by its name.
AutoTokenizer.register(RetroConfig, slow_tokenizer_class=RetroTokenizer)
