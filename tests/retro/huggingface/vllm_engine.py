"""One engine of vLLM in a process of its own: `python -m tests.retro.huggingface.vllm_engine JOB.json ANSWER.json`.

An engine for CPUs looks through all imported modules when it starts, and vLLM 0.32 fails at those of numba.
"""

import json
import sys
from pathlib import Path
from typing import Any

_DRIVER = """
import torch
import triton.backends.driver as base
from triton.backends.compiler import GPUTarget

class Driver(base.DriverBase):
    def __init__(self): pass
    is_active = classmethod(lambda cls: True)
    map_python_to_cpp_type = get_benchmarker = None
    def get_current_target(self): return GPUTarget("cpu", 0, 1)
    def get_active_torch_device(self): return torch.device("cpu")
"""
_COMPILER = """
import triton.backends.compiler as base

class Backend(base.BaseBackend):
    supports_target = staticmethod(lambda target: target.backend == "cpu")
    hash = parse_options = add_stages = load_dialects = get_module_map = None
"""


def write_triton_backend(folder: Path) -> Path:
    """Write a package with which vLLM finds Triton on a CPU, where Triton's interpreter runs the kernels. For PYTHONPATH."""
    (folder / "interpreted").mkdir(parents=True)
    (folder / "interpreted-0.dist-info").mkdir()
    (folder / "interpreted" / "driver.py").write_text(_DRIVER)
    (folder / "interpreted" / "compiler.py").write_text(_COMPILER)
    (folder / "interpreted-0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: interpreted\nVersion: 0\n"
    )
    (folder / "interpreted-0.dist-info" / "entry_points.txt").write_text("[triton.backends]\ncpu = interpreted\n")
    return folder


def main(job: dict[str, Any]) -> dict[str, Any]:
    """Generate after the prompts of a job, without copying and with it, and count accepted drafts."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        job["model"], dtype="float32", max_model_len=512, max_num_batched_tokens=512, max_num_seqs=8, enforce_eager=True,
        disable_log_stats=False, **job["engine"],
    )  # fmt: skip
    drawn: dict[str, Any] = {"temperature": 0, "max_tokens": job["new"]}
    inputs = [{"prompt_token_ids": tokens} for tokens in job["prompts"]]
    off = SamplingParams(**drawn, prompt_logprobs=20, extra_args={"copy_strength": 0})
    first = llm.generate(inputs, off, use_tqdm=False)
    trusts = [job["trust"]] * len(inputs)
    if job["trust"] is None:
        from retro.huggingface import DatastoreLogitsProcessor
        from retro.huggingface.vllm_processor import trust_of

        datastore = job["engine"]["additional_config"]["retro_datastore"]
        judge = DatastoreLogitsProcessor.open(datastore, llm.get_tokenizer())
        trusts = [list(map(float, trust_of(judge, output))) for output in first]
    on = [SamplingParams(**drawn, min_tokens=job["new"], extra_args={"retro_trust": trust}) for trust in trusts]
    second = llm.generate(inputs, on, use_tqdm=False)
    found = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    tokens = [[list(output.outputs[0].token_ids) for output in outputs] for outputs in (first, second)]
    accepted = found.get("vllm:spec_decode_num_accepted_tokens", 0)
    return {"trusts": trusts, "off": tokens[0], "on": tokens[1], "accepted": accepted}


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(main(json.loads(Path(sys.argv[1]).read_text()))))
