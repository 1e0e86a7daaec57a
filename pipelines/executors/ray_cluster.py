"""Join a Ray cluster, after a check that it answers: Ray itself tries for minutes and logs nothing at first."""

import contextlib
import os
import re
import socket

from indexing.store.errors import InputError

_ANSWER_SECONDS = 7  # for a cluster to accept a connection, and to answer


def connect(address: str) -> None:
    """Join a Ray cluster, or start one on this machine. A process that has joined one stays in it.

    Args:
        address: `auto`, `ray://…`; empty: the cluster that runs this job, or a new one.

    Raises:
        InputError: no cluster answers, it refuses this process, Ray does not start, or its workers could not.
    """
    import ray

    if ray.is_initialized():
        return
    _check_uv()
    where = address or os.environ.get("RAY_ADDRESS", "")
    if not where:  # a new cluster, for this process alone: its workers run at the priority of this process
        os.environ.setdefault("RAY_worker_niceness", "0")
    try:
        require_answer(where)
        ray.init(address=address or None, log_to_driver=False, include_dashboard=False)
    # Ray raises many types, and `Exception` itself if a process of its own does not start in time.
    except Exception as error:
        raise InputError(
            f"executor.ray_address: no Ray cluster at {where or 'this machine'}: {error}\nA cluster with token "
            "authentication needs RAY_AUTH_MODE=token and the token in this environment too (docs/how-to/run-on-a-cluster.md)."
        ) from error


def _check_uv() -> None:
    """Refuse a relative path of `uv`, with whose command Ray starts its workers: they wait in silence until Ray's time
    limit.

    Raises:
        InputError: this process was started by `PATH/uv run`, and workers are in other folders.
    """
    import psutil  # Ray brings it
    import ray

    if not ray._private.ray_constants.RAY_ENABLE_UV_RUN_RUNTIME_ENV:
        return
    for parent in psutil.Process().parents():
        with contextlib.suppress(psutil.Error):
            command = parent.cmdline()
            if command[1:2] == ["run"] and os.path.basename(command[0]) == "uv":
                if os.path.dirname(command[0]) and not os.path.isabs(command[0]):
                    raise InputError(
                        f"Ray starts its workers with the command of this process, `{command[0]} run`, in other folders, where this "
                        f"path does not exist. Run `uv` by its name or as {os.path.abspath(command[0])}, or set "
                        "RAY_ENABLE_UV_RUN_RUNTIME_ENV=0, with the packages installed on every machine."
                    )
                return


def require_answer(address: str) -> None:
    """Return if a gRPC server answers at `HOST:PORT` or `ray://HOST:PORT`. Other addresses are not checked.

    Raises:
        ConnectionError: no server listens there, or it does not answer gRPC.
    """
    parts = re.fullmatch(r"(ray://)?(\[[^\]]+\]|[^:/]+):(\d+)", address)
    if parts is None:  # `auto`, empty, or an address that Ray refuses at once
        return
    import grpc
    import ray

    client, host, port = parts.groups()
    if not client and host in ("localhost", "127.0.0.1", "[::1]"):
        host = ray.util.get_node_ip_address()  # Ray uses this address then
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_SECONDS).close()
    except OSError as error:
        raise ConnectionError(str(error)) from error
    if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
        return
    with grpc.insecure_channel(f"{host}:{port}", options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            grpc.channel_ready_future(channel).result(timeout=_ANSWER_SECONDS)
        except grpc.FutureTimeoutError:
            raise ConnectionError(f"the server there did not answer in {_ANSWER_SECONDS} s") from None
