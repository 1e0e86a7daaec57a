"""The view "Trace" in a real Chromium: runs of a pasted or generated text are marked and lead to their place in a document."""

import re
import shutil
from pathlib import Path

import pytest

from indexing.retrieval.retriever import Retriever
from indexing.store.datastore import Datastore
from indexing.store.files import read_json, write_checked
from retro.server.app import make_app
from retro.server.settings import ServeSettings
from tests.retro.server.browser import MARKS, PHONE, TEXT, ask, expect, form_of, submit
from tests.retro.server.conftest import listening

pytestmark = MARKS


def passage(retriever: Retriever) -> str:
    """The middle of a document, over three chunks."""
    return "zq " + "".join(retriever.lookup.chunk(chunk).text for chunk in (41, 42, 43)) + "qz"


def test_a_run_is_marked_and_leads_to_its_place_in_the_document(open_page, url: str, retriever: Retriever) -> None:
    page = open_page(url + form_of("trace"))
    text = passage(retriever)
    with page.expect_response("**/trace") as answered:
        submit(page, "trace", text)
    answer = answered.value.json()
    expect(page.locator(".traced")).to_have_count(len(answer["runs"]))
    assert page.locator(".trace .query pre").text_content() == text
    number = max(range(len(answer["runs"])), key=lambda run: answer["runs"][run]["tokens"])
    run, card = answer["runs"][number], page.locator(f".traced[data-keys='run.{number}']")
    quoted = text[slice(*run["text"])]
    marks = page.locator(f".query mark[data-keys~='run.{number}']")
    assert "".join(marks.all_text_contents()) == quoted
    expect(card).to_contain_text("occurs once" if run["occurrences"] == 1 else f"occurs {run['occurrences']} times")
    marks.last.hover()
    expect(card).to_have_class(re.compile("linked"))
    marks.first.click()
    link = card.get_by_role("link").first
    expect(link).to_be_focused()
    page.keyboard.press("Enter")
    found = page.locator("#document [aria-current]")
    expect(found).to_contain_text("the run begins here")
    expect(found).to_be_focused()
    assert "".join(page.locator("#document mark").all_text_contents()) == quoted
    page.get_by_role("link", name="← Trace").click()
    expect(page.locator(".trace .query pre")).to_have_text(text)


def test_with_several_datastores_a_run_names_its_own_and_those_that_were_not_searched_are_named(
    open_page, two: Retriever, tmp_path: Path
) -> None:
    ships, trains = (split.folder for split in two.retrieval.splits)
    shutil.copytree(ships, bare := tmp_path / "bare")
    manifest = read_json(bare / "manifest.json")
    del manifest["fingerprints"]["suffixes"]
    write_checked(bare / "manifest.json", manifest)
    name = "/".join(trains.parts[-2:])
    with listening(make_app(Retriever.open(bare, trains), None, ServeSettings())) as url:
        page = open_page(url + form_of("trace"))
        submit(page, "trace", "the train number 21 of the trains leaves")
        expect(page.locator(".traced").first).to_contain_text(f"in {name},")
        expect(page.locator("#trace-strip")).to_contain_text(f"searched in {name}; not in ")
        page.locator(".traced a").first.click()
        expect(page.locator("#document mark").first).to_be_visible()


def test_a_generated_text_is_traced(open_page, url: str) -> None:
    page = open_page(url + form_of("generation"))
    page.get_by_label("Tokens to write").fill("20")
    ask(page, "generation", TEXT)
    written = page.locator(".generated").first.text_content()
    with page.expect_request("**/trace") as sent:
        page.get_by_role("link", name="Find where this text occurs").first.click()
    assert sent.value.post_data_json == {"text": written, "least": 8, "documents": 3}
    expect(page.locator("#tab-trace")).to_have_attribute("aria-selected", "true")
    expect(page.locator(".trace .query pre")).to_be_visible()


def test_a_text_without_runs_says_so_and_many_runs_are_folded(open_page, url: str, retriever: Retriever) -> None:
    page = open_page(url + form_of("trace"), **PHONE)
    submit(page, "trace", "qqq zzz")
    expect(page.locator("#trace")).to_contain_text("No runs")
    expect(page.locator("#trace-strip")).to_contain_text("0% of the tokens are in 0 runs")
    page.get_by_role("button", name="Change text").click()
    page.locator("#trace [name=least]").fill("1")
    letters = " ".join(map(chr, range(33, 127)))  # equal runs are one, so the text needs many different ones
    submit(page, "trace", letters + TEXT * 3 + passage(retriever))
    expect(page.locator(".traced").first).to_be_visible()
    runs = page.locator(".traced").count()
    shown = page.locator(".found > .traced")
    expect(shown).to_have_count(min(runs, 40))
    assert runs > 41
    expect(page.locator(".trace .fold > summary")).to_have_text(f"{runs - 40} shorter runs")
    last = page.locator(f".traced[data-keys='run.{runs - 1}']")
    page.locator(f".query mark[data-keys~='run.{runs - 1}']").last.click()
    expect(last.get_by_role("link").first).to_be_focused()  # its fold is open


def test_a_datastore_without_sorted_prefixes_names_the_command(open_page, tiny_datastore: Datastore) -> None:
    with listening(make_app(Retriever.open(tiny_datastore.folder), None, ServeSettings())) as url:
        page = open_page(url + form_of("trace"), errors=True)
        expect(page.locator("#trace .command")).to_contain_text("--stage suffixes")


@pytest.mark.parametrize("text", ["床前明月光 🙂🙂 ", "a<b>&"])
def test_marks_count_characters_as_the_server_does(open_page, url: str, retriever: Retriever, text: str) -> None:
    page = open_page(url + form_of("trace"))
    whole = text + passage(retriever)
    with page.expect_response("**/trace") as answered:
        submit(page, "trace", whole)
    answer = answered.value.json()
    run = answer["runs"][-1]
    number = len(answer["runs"]) - 1
    marks = page.locator(f".query mark[data-keys~='run.{number}']")
    expect(marks.first).to_be_visible()
    assert "".join(marks.all_text_contents()) == answer["text"][slice(*run["text"])]
