"""Does a Ray cluster answer at an address? Asked before Ray, which tries for minutes and logs nothing at first."""

import os
import re
import socket

_ANSWER_SECONDS = 7  # for a cluster to accept a connection, and to answer


def require_answer(address: str) -> None:
    """Return if a gRPC server answers at `HOST:PORT` or `ray://HOST:PORT`; other addresses are not looked at.

    Raises:
        ConnectionError: nothing listens there, or it does not speak gRPC as Ray does.
    """
    found = re.fullmatch(r"(ray://)?(\[[^\]]+\]|[^:/]+):(\d+)", address)
    if found is None:  # `auto`, empty, or what Ray itself refuses at once
        return
    import grpc
    import ray

    client, host, port = found.groups()
    if not client and host in ("localhost", "127.0.0.1", "[::1]"):
        host = ray.util.get_node_ip_address()  # where Ray looks then
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
            raise ConnectionError(f"what listens there did not answer in {_ANSWER_SECONDS} s") from None
