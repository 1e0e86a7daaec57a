"""`retro mcp`: its tools find and read documents, and mistakes are errors that an assistant can read."""

import asyncio
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from indexing.retrieval.retriever import Retriever
from indexing.store.datastore import Datastore
from pipelines.cli.verbs.mcp import make_server
from tests.conftest import PATIENCE

QUERY = "the index of a chunk and the neighbor in memory 检索模型"
COMMAND = [sys.executable, "-m", "pipelines.cli", "mcp"]


def answers(server: Any, *calls: tuple[str, dict[str, Any]]) -> list[Any]:
    """The structured answers of calls to tools, or their errors as text."""
    from mcp import Client  # not at the top: every process that collects tests would import it, for a second
    from mcp_types import TextContent

    async def ask() -> list[Any]:
        async with Client(server, read_timeout_seconds=PATIENCE) as client:
            found: list[Any] = []
            for name, arguments in calls:
                result = await client.call_tool(name, arguments)
                first = result.content[0] if result.content else None
                found.append(
                    first.text if result.is_error and isinstance(first, TextContent) else result.structured_content
                )
            return found

    return asyncio.run(ask())


def test_search_returns_the_passages_of_the_hybrid_search(retriever: Retriever) -> None:
    (found,) = answers(make_server(retriever), ("search", {"query": QUERY, "k": 3}))
    hits = retriever.search([QUERY], 3, retrieval="hybrid").hits[0]
    assert [(each["document_id"], each["text"]) for each in found["result"]] == [
        (hit.document_id, hit.text + hit.continuation) for hit in hits
    ]


def test_reading_at_the_position_of_a_passage_returns_its_text(retriever: Retriever) -> None:
    server = make_server(retriever)
    (found,) = answers(server, ("search", {"query": QUERY, "k": 8}))
    assert any(passage["chunk"] > 0 for passage in found["result"])
    calls = [
        ("read", {"document_id": each["document_id"], "first_chunk": each["chunk"], "num_chunks": 2})
        for each in found["result"]
    ]
    assert [each["text"] for each in answers(server, *calls)] == [each["text"] for each in found["result"]]


def test_reading_on_from_next_chunk_returns_the_whole_document(retriever: Retriever) -> None:
    server, parts, first = make_server(retriever), [], 0
    document = retriever.document("doc-0", 0, 1024)
    while first is not None:
        (part,) = answers(server, ("read", {"document_id": "doc-0", "first_chunk": first, "num_chunks": 3}))
        parts.append(part["text"])
        first = part["next_chunk"]
    assert len(parts) == -(-document.num_chunks // 3) > 1
    assert "".join(parts) == "".join(each.text for each in document.chunks)


def test_mistakes_are_errors_that_name_the_value(retriever: Retriever) -> None:
    texts = answers(
        make_server(retriever),
        ("search", {"query": " "}),
        ("search", {"query": QUERY, "k": 0}),
        ("read", {"document_id": "nowhere"}),
        ("read", {"document_id": "doc-0", "num_chunks": 10**6}),
        ("serch", {"query": QUERY}),
    )
    for text, words in zip(
        texts, ("text to search for is empty", "k", "'nowhere'", "num_chunks", "serch"), strict=True
    ):
        assert words in text


def test_the_tools_are_described_and_do_not_write(retriever: Retriever) -> None:
    from mcp import Client

    async def listed() -> Any:
        async with Client(make_server(retriever)) as client:
            return (await client.list_tools()).tools

    for tool in asyncio.run(listed()):
        assert tool.description
        assert tool.annotations.read_only_hint
        assert all(each["description"] for each in tool.input_schema["properties"].values())


def test_a_client_starts_the_command_and_searches(tiny_datastore: Datastore) -> None:
    from mcp import StdioServerParameters

    command = StdioServerParameters(command=COMMAND[0], args=[*COMMAND[1:], str(tiny_datastore.folder)])
    (found,) = answers(command, ("search", {"query": QUERY, "k": 2}))
    assert len(found["result"]) == 2


def test_a_folder_that_is_no_datastore_is_refused_on_standard_error(tmp_path: Path) -> None:
    process = subprocess.run(
        [*COMMAND, str(tmp_path)], capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=PATIENCE
    )
    assert (process.returncode, process.stdout) == (2, "")
    assert process.stderr.startswith("error: ")


def test_ctrl_c_ends_the_command_although_it_waits_for_standard_input(tiny_datastore: Datastore) -> None:
    pipes = {name: subprocess.PIPE for name in ("stdin", "stdout", "stderr")}
    command = [*COMMAND, str(tiny_datastore.folder)]
    with subprocess.Popen(command, text=True, **pipes) as process:  # type: ignore[call-overload]
        process.stdin.write('{"jsonrpc": "2.0", "id": 1, "method": "ping"}\n')
        process.stdin.flush()
        assert '"id":1' in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == -signal.SIGINT
        assert "Traceback" not in process.stderr.read()
