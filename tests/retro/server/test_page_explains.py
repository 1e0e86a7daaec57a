"""What the page tells someone who has never heard of RETRO: what was found and read, where it helped, in which unit."""

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from indexing.retrieval.retriever import Retriever
from tests.retro.server.browser import ASKED, LONG, MARKS, PHONE, Page, ask, download, expect, form_of, submit
from tests.retro.server.conftest import TEXT

pytestmark = MARKS


def answer_with(page: Page, path: str, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the server's answers before the page sees them."""

    def handle(route) -> None:
        answer = route.fetch()
        body = answer.json()
        change(body)
        route.fulfill(response=answer, json=body)

    page.route(path, handle)


# --- the form --------------------------------------------------------------------------------------------------------


def test_examples_are_texts_of_held_out_documents(open_page, url: str, retriever: Retriever) -> None:
    view = "passage"
    page = open_page(url + form_of(view))
    examples = page.locator(f"#{view} .examples")
    expect(examples).to_contain_text("Not in the datastore")
    held_out = retriever.datastore.valid
    ids = {row["id"] for row in held_out.metadata(range(held_out.num_documents))}
    assert {each.get_attribute("title") for each in examples.locator("button").all()} <= ids
    examples.locator("button").first.click()
    expect(page.locator(f"#{view} .results").locator(".neighbor, .token:not(.first), .pane").first).to_be_visible()


def test_one_of_several_datastores_can_be_chosen(open_page, url: str) -> None:
    page = open_page("about:blank")
    answer_with(page, "**/datastore", lambda body: body["datastores"].append({"name": "b/other", "chunks": 1}))
    page.goto(url + form_of("neighbors"))
    choice = page.locator("#neighbors select[name=datastore]")
    name = choice.locator("option").nth(1).get_attribute("value")
    choice.select_option(name)
    with page.expect_request("**/neighbors") as sent:
        ask(page, "neighbors")
    assert sent.value.post_data_json["datastore"] == name
    single = open_page(url + form_of("neighbors"))
    expect(single.locator(".served")).to_contain_text("chunks")
    expect(single.locator("#neighbors select[name=datastore]")).to_be_hidden()


# --- what it finds ---------------------------------------------------------------------------------------------------


def test_marks_name_the_neighbor_and_have_at_least_five_tokens_and_the_id_is_below_the_title(
    open_page, url: str
) -> None:
    page = open_page(url + form_of("neighbors"))
    with page.expect_response("**/neighbors") as answered:
        ask(page, "neighbors")
    chunks = answered.value.json()["chunks"]
    for card, chunk in zip(page.locator("article.chunk").all(), chunks, strict=True):
        runs = {
            f"{rank}.{number}": (rank, span)
            for rank, neighbor in enumerate(chunk["neighbors"])
            for number, span in enumerate(each for each in neighbor["spans"] if each["tokens"] >= 5)
        }
        shown = card.locator(".query mark").all()
        assert {key for mark in shown for key in mark.get_attribute("data-keys").split()} == set(runs)
        numbers = {int(each) for mark in shown for each in (mark.get_attribute("data-ranks") or "").split()}
        assert numbers == {rank + 1 for rank, _ in runs.values()}
    first, shown_first = chunks[0]["neighbors"][0], page.locator(".neighbor").first
    assert first["title"] != first["document_id"]
    expect(shown_first.locator("h4")).to_contain_text(first["title"])
    expect(shown_first.locator(".source").first).to_have_text(first["document_id"])


def test_near_copies_are_folded_below_the_first_of_them(open_page, url: str) -> None:
    def repeat(body: dict) -> None:
        found = body["chunks"][0]["neighbors"]
        found[0]["text"] = "Every text in this list of found neighbors begins in another way, but one."
        found[1]["text"] = "A different text, which has nothing at all in common with its predecessor."
        found[2]["text"] = found[0]["text"].replace("another", "an other")

    page = open_page(url + form_of("neighbors"))
    answer_with(page, "**/neighbors", repeat)
    ask(page, "neighbors")
    card = page.locator("article.chunk").first
    folded = card.locator("details.copies")
    expect(folded.locator("summary").first).to_have_text("Neighbor 3: almost the same text as neighbor 1")
    expect(folded.locator("article.neighbor")).to_be_hidden()
    assert [each.text_content() for each in card.locator("article.neighbor > h4 .rank").all()][:3] == ["1", "3", "2"]
    folded.locator("summary").first.click()
    expect(folded.locator("article.neighbor")).to_be_visible()


@pytest.mark.parametrize("view", ["passage", "generation"])
def test_the_answer_can_be_downloaded(open_page, url: str, view: str) -> None:
    page = open_page(url + form_of(view))
    if view == "generation":
        page.get_by_label("Tokens to write").fill("20")
    ask(page, view)
    stored = download(page, view)
    request = stored.pop("request")
    assert request.get("text", request.get("prompt")) == ASKED[view]
    if view == "generation":
        shown = page.locator(".generated").all_text_contents()
        assert [stored["with_neighbors"]["text"], stored["without_neighbors"]["text"]] == shown
    else:
        assert stored["tokens"]


# --- where it helps --------------------------------------------------------------------------------------------------


def test_the_first_chunk_is_grey_and_the_others_show_the_neighbors_that_the_model_could_read(
    open_page, url: str
) -> None:
    page = open_page(url + form_of("passage"))
    with page.expect_response("**/score") as answered:
        ask(page, "passage")
    answer = answered.value.json()
    numbers = [token["chunk"] for token in answer["tokens"]]
    tokens = page.locator("#passage .token").all()
    grey = ["first" in each.get_attribute("class").split() for each in tokens]
    assert grey == [number == 0 for number in numbers]
    read = {each["chunk"] + 1: [hit["title"] for hit in each["neighbors"]] for each in answer["sources"]["chunks"]}
    for number in range(numbers[-1] + 1):
        tokens[numbers.index(number)].click()
        shown = page.locator("#passage .found:not([hidden])")
        expect(shown).to_have_attribute("aria-label", f"Neighbors for chunk {number + 1}")
        assert shown.locator(".neighbor > summary b").all_text_contents() == read.get(number, [])
        expect(shown).to_contain_text("chunk 1" if number == 0 else f"in chunk {number + 1}", ignore_case=True)
    assert "".join(page.locator("#passage .token").all_text_contents()) == LONG
    page.locator("#passage-strip summary").click()
    expect(page.locator("#passage-strip")).to_contain_text("the first chunk has none")
    submit(page, "passage", "the index")
    expect(page.locator("#passage-strip")).to_contain_text("The first chunk has no neighbors")


def test_marked_tokens_have_their_text_in_the_neighbor(open_page, url: str) -> None:
    """Shared runs have at least five tokens. A copied token points to the text that it was copied from."""

    def add_copy(body: dict) -> None:
        chunk = body["sources"]["chunks"][0]
        start = sum(len(token["text"]) for token in body["tokens"] if token["chunk"] == 0)
        word = next(token["text"] for token in body["tokens"] if token["chunk"] == 1)
        chunk["neighbors"][1]["text"] = f"before{word}after"
        copy = {"text": [start, start + len(word)], "chunk": 0, "neighbor": 1, "neighbor_text": [6, 6 + len(word)]}
        body["sources"]["copies"] = [copy | {"tokens": 1, "share": 0.9}]

    page = open_page(url + form_of("passage"))
    answer_with(page, "**/score", add_copy)
    ask(page, "passage")
    page.locator(".neighbor:not([open]) > summary").evaluate_all("nodes => nodes.forEach(node => node.click())")
    marked = page.locator("#passage .token[data-keys]").all()
    keys = {key for node in marked for key in node.get_attribute("data-keys").split()}
    assert len(keys) > 1
    for key in keys:
        tokens = page.locator(f'#passage .token[data-keys~="{key}"]').all_text_contents()
        assert len(tokens) >= 5 or "copy" in key
        assert "".join(tokens) == "".join(page.locator(f'#passage mark[data-keys~="{key}"]').all_text_contents())
    copied = page.locator(".token.copied")
    expect(copied).to_have_count(1)
    expect(page.locator("#passage .token[data-ranks]")).to_have_attribute("data-ranks", "2")
    copied.hover()
    expect(page.locator("mark.copied")).to_have_class(re.compile("linked"))
    expect(page.locator(".readout")).to_contain_text("copied from neighbor 2")


@pytest.mark.parametrize(
    ("on", "said", "kind"), [(0.714, "29% fewer bits", "helped"), (1.0034, "0.34% more bits", "hurt")]
)
def test_fewer_bits_are_better_everywhere(open_page, url: str, on: float, said: str, kind: str) -> None:
    sign = 1 if kind == "helped" else -1

    def change(body: dict) -> None:
        body |= {"bits_per_byte_on": on, "bits_per_byte_off": 1.0}
        for token in body["tokens"]:
            token |= {"difference": sign * 2.0} if token["chunk"] else {}

    page = open_page(url + form_of("passage"))
    answer_with(page, "**/score", change)
    ask(page, "passage")
    expect(page.locator(f"#passage-strip .verdict.{kind}")).to_have_text(
        f"With retrieval the model guesses this text in {said}."
    )
    page.locator("#passage .token").last.click()
    words = {
        "helped": ["7.4 times as likely", "2.89 fewer bits: helped"],
        "hurt": ["7.4 times less likely", "2.89 more bits: hurt"],
    }
    for text in words[kind]:
        expect(page.locator(".readout")).to_contain_text(text)
    expect(page.locator(f"#passage .token.{kind}")).to_have_count(page.locator("#passage .token:not(.first)").count())
    expect(page.locator("#passage-strip .legend-list")).to_contain_text("the bits that the model needs for each byte")


def test_the_number_of_a_neighbor_is_at_the_end_of_a_word(open_page, url: str) -> None:
    words = ["a", " Rob", "in", " Bec", "ker", "s", "!", " 检", "索"]
    script = """
    async (words) => {
      const { neighborsRead, numberWords } = await import("./parts/chunk_row.js");
      const tokens = words.map((text) => ({ text, node: document.createElement("span") }));
      const copy = (from, to, neighbor) => ({ text: [from, to], neighbor, neighbor_text: [0, 1], tokens: 1 });
      const hit = { text: "?", continuation: "", title: "", document_id: "d", source: "", chunk_id: 0, score: 1 };
      const copies = [copy(1, 5, 0), copy(5, 7, 1), copy(7, 11, 1), copy(16, 18, 0)]; // " Rob", "in", " Bec", " 检"
      neighborsRead({ number: 1, tokens, start: 0, neighbors: [hit, hit], copies });
      numberWords(tokens);
      return tokens.map(({ node }) => node.dataset.ranks ?? "");
    }
    """
    shown = open_page(url + form_of("datastore")).evaluate(script, words)
    assert shown == ["", "", "1 2", "", "", "2", "", "1", ""]


BRUTE_FORCE = """
async () => {
  const { sharedRuns, LEAST_RUN } = await import("./parts/shared_runs.js");
  let seed = 1;
  const random = (most) => (seed = (seed * 48271) % 2147483647) % most;
  const word = () => "abc"[random(3)] + (random(4) ? "" : " ");
  for (let round = 0; round < 300; round++) {
    const tokens = Array.from({ length: 12 }, word);
    const other = Array.from({ length: 20 }, word).join("");
    const found = sharedRuns(tokens, other);
    let longest = 0;
    for (let i = 0; i < 12; i++) for (let j = i + LEAST_RUN; j <= 12; j++) {
      if (other.includes(tokens.slice(i, j).join(""))) longest = Math.max(longest, j - i);
    }
    if (Math.max(0, ...found.map(({ start, stop }) => stop - start)) !== longest) return "not the longest";
    for (const { start, stop, at, text } of found) {
      if (text !== tokens.slice(start, stop).join("") || !other.startsWith(text, at)) return "another text";
      if (stop - start < LEAST_RUN) return "too short";
      if (found.some((run) => run.start > start && run.start < stop)) return "overlapping";
    }
  }
  return "";
}
"""


def test_shared_runs_are_the_longest_ones(open_page, url: str) -> None:
    assert open_page(url).evaluate(BRUTE_FORCE) == ""


# --- what it writes --------------------------------------------------------------------------------------------------


def test_a_generated_text_shows_what_it_read(open_page, url: str) -> None:
    page = open_page(url + form_of("generation"))
    page.get_by_label("Tokens to write").fill("40")
    ask(page, "generation")
    stored = download(page, "generation")["with_neighbors"]
    read = {chunk["chunk"] + 1: chunk["neighbors"] for event in stored["sources"] for chunk in event["chunks"]}
    rows = page.locator("#generation .chunk-row").all()
    numbers = [int(row.locator("h3").text_content().split()[1]) - 1 for row in rows]
    assert numbers == list(range(numbers[0], numbers[0] + len(rows)))
    assert len(rows) >= 3
    for number, row in zip(numbers, rows, strict=True):
        assert row.locator(".neighbor > summary b").all_text_contents() == [hit["title"] for hit in read[number]]
    assert "".join(page.locator("#generation .token").all_text_contents()) == stored["text"]
    expect(page.locator("#generation .generated .border")).to_have_count(len(rows) - 1)


def test_an_error_is_in_view_above_the_text_that_broke_off(open_page, url: str) -> None:
    page = open_page(url + form_of("generation"), errors=True, **PHONE)
    event = json.dumps({"text": "long line\n" * 200, "finish_reason": None})
    error = json.dumps({"error": {"message": "the shelf is on fire.", "type": "server_error", "code": None}})
    stream = f"data: {event}\n\ndata: {error}\n\ndata: [DONE]\n\n"

    def break_off(route) -> None:
        if route.request.post_data_json["retrieval"]:  # the other text is never answered
            route.fulfill(status=200, content_type="text/event-stream", body=stream)

    page.route("**/generate", break_off)
    submit(page, "generation", TEXT)
    problem = page.get_by_role("alert")
    expect(problem).to_contain_text("the shelf is on fire.")
    expect(problem).to_be_in_viewport()
    expect(page.locator(".pane .state").first).to_have_text("broke off after 1 tokens")


@pytest.mark.parametrize("answered", [True, False])
def test_a_text_that_waits_says_so_and_a_model_that_does_not_read_neighbors_writes_one(
    open_page, url: str, answered: bool
) -> None:
    page = open_page("about:blank")
    if answered:
        answer_with(page, "**/datastore", lambda body: body["model"].update(retrieval=False))
    else:  # the request of one text is never answered
        page.route(
            "**/generate", lambda route: route.continue_() if route.request.post_data_json["retrieval"] else None
        )
    page.goto(url + form_of("generation"))
    expect(page.locator(".served")).to_contain_text("chunks")
    page.get_by_label("Tokens to write").fill("5")
    submit(page, "generation", TEXT)
    states = page.locator(".pane .state")
    expect(states.first).to_contain_text("5 tokens in")
    if answered:
        assert page.locator(".pane h3").all_text_contents() == ["Without neighbors"]
    else:
        expect(states.nth(1)).to_contain_text("Waiting")
        page.get_by_role("button", name="Stop").click()
        expect(states.nth(1)).to_contain_text("stopped")
