"""Training by workers of a Ray cluster (Ray Train): started, and started anew from the last checkpoint when some of them fail.

    driver ── TorchTrainer ── workers: a process group of torch, each `retro.trainer.train` ── checkpoints in RUN, on a file system
                   ▲                                   │                                      that all nodes share
                   └────── all anew, a few times ──────┘ one dies

What a worker is told and what it leaves is the same as under torchrun, so a run may go on with either.
"""

import logging
from typing import Any

from indexing.store.errors import InputError
from pipelines.config import Config
from pipelines.executors import connect

log = logging.getLogger("retro")


def train_on_ray(config: Config) -> None:
    """Train as `config.executor.train` says, and return when the run is complete.

    Raises:
        InputError: there is no cluster, workers failed too often, or a worker's own InputError or FloatingPointError.
    """
    connect(config.executor.ray_address, "executor.ray_address")
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer
    from ray.train.v2.api.exceptions import TrainingFailedError

    resources = config.executor.train
    reserved: dict[str, float] = {"CPU": resources.cpus}
    if resources.gpus:
        reserved["GPU"] = resources.gpus
    if resources.memory_bytes:
        reserved["memory"] = resources.memory_bytes
    trainer = TorchTrainer(
        _work,
        train_loop_config={"config": config},
        torch_config=TorchConfig(backend="cpu:gloo,cuda:nccl" if resources.gpus else "gloo"),
        scaling_config=ScalingConfig(
            num_workers=resources.workers, use_gpu=resources.gpus > 0, resources_per_worker=reserved
        ),
        run_config=RunConfig(
            name="ray",
            storage_path=str(config.run.absolute()),
            failure_config=FailureConfig(max_failures=config.executor.train_failures),
        ),
    )
    try:
        result = trainer.fit()
    except TrainingFailedError as error:
        raise InputError(
            f"{config.run}: training on Ray failed more than {config.executor.train_failures} times: {error}"
        ) from error
    if problem := (result.metrics or {}).get("problem"):
        raise InputError(problem)


def _work(arguments: dict[str, Any]) -> None:
    """What a worker does. A user's mistake is reported and not tried again: it would be the same mistake."""
    import ray.train

    from pipelines.model_verbs import run_training
    from pipelines.progress import setup_logging

    setup_logging()
    config: Config = arguments["config"]
    problem = ""
    try:
        run_training(config, "train")
    except (InputError, FloatingPointError) as error:
        problem = str(error)
    ray.train.report({"problem": problem})
