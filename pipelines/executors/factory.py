"""The executor that `executor.kind` names."""

from pipelines.executors.process_pool import PoolExecutor
from pipelines.executors.settings import ExecutorSettings
from pipelines.executors.tasks import Executor, LocalExecutor


def make_executor(settings: ExecutorSettings) -> Executor:
    """Make it; on Ray, join the cluster.

    Raises:
        InputError: no cluster answers.
    """
    if settings.kind == "local":
        return LocalExecutor(settings) if settings.workers == 1 else PoolExecutor(settings)
    from pipelines.executors.ray_pool import RayExecutor

    return RayExecutor(settings)
