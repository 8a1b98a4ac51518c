"""The page over real sockets, on a real broker: every view, the one action, and what it refuses."""

from __future__ import annotations

import http.client
import re
import ssl
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from inspect_scene import Scene, scene
from web_scene import HOSTILE, HOSTILE_NAME, LEDGER, Page, fill_ledger, fill_orders, form_of, running_page, write_report

from semel.client.producer import Producer
from semel.inspect.shown import show_text
from semel.inspect.transactions import held_partitions, open_transactions
from semel.records.reference import Record
from semel.testing.certificates import make_certificates

STATUS = re.compile(r'<tr class="(\w+)"><th class="number" scope="row"><a id="offset-(\d+)"')


@pytest.fixture(scope="module")
def place() -> Iterator[Scene]:
    with scene(1) as opened:
        yield opened


@pytest.fixture(scope="module")
def writer(place: Scene) -> Iterator[Producer]:
    opened = fill_orders(place)
    fill_ledger(place)
    yield opened
    opened.abort()
    opened.close()


@pytest.fixture(scope="module")
def page(place: Scene, writer: Producer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    folder = tmp_path_factory.mktemp("reports")
    write_report(folder, "clean", is_clean=True)
    write_report(folder, "bad", is_clean=False, text="<script>window.hacked=1</script>")
    with running_page(place.settings, reports=folder) as running:
        yield running


def csrf_of(text: str) -> str:
    found = re.search(r'name="csrf" value="(\w+)"', text)
    assert found is not None, text
    return found[1]


# -- views -----------------------------------------------------------------------------------------------------------


def test_records_of_each_status_are_shown_apart(page: Page) -> None:
    """J1: committed, aborted, plain and open ones, and the markers between them."""
    shown = page.settled("/records", topic="orders", partition=0)

    assert STATUS.findall(shown.text) == [
        ("committed", "0"),
        ("aborted", "2"),
        ("plain", "4"),
        ("open", "5"),
        ("plain", "6"),
    ]
    assert "commit of producer" in shown.text
    assert "<b>stable to 5</b>, ends at 7" in shown.text
    for status, offset in (("aborted", "2"), ("open", "5")):
        only = page.settled("/records", topic="orders", partition=0, show=status, **{"from": 0})
        assert STATUS.findall(only.text) == [(status, offset)]


def test_a_record_tells_who_wrote_it_and_who_sees_it(page: Page) -> None:
    """The same sentences as `semel inspect topic --offset`."""
    shown = page.settled("/record", topic="orders", partition=0, offset=5).text

    for said in ("transactional.id open-writer", "only readers with isolation.level=read_uncommitted", "<dd>open</dd>"):
        assert said in shown
    assert "ends the transaction of producer" in page.settled("/record", topic="orders", partition=0, offset=1).text


def test_transactions_are_on_a_timeline_with_the_stable_offset_of_what_they_hold(page: Page) -> None:
    """J1: who holds which partition, and how far readers of committed records get."""
    shown = page.settled("/transactions").text

    bar = shown[shown.index("open-writer") : shown.index("</ol>")]
    assert "Ongoing" in bar
    assert "<rect" in bar
    assert "orders:0</a> stable to 5 of 7, <b>2 held back</b>" in bar


def test_a_transactional_id_shows_what_it_did_lately(page: Page) -> None:
    """From the coordinator's own log, the newest first."""
    shown = page.settled("/transaction", id="order-writer").text
    assert re.findall(r"<td>(CompleteCommit|CompleteAbort|Ongoing)</td>", shown)[:2] == ["CompleteAbort", "Ongoing"]


def test_groups_are_shown_with_true_and_naive_lag(page: Page) -> None:
    """J1: one record to read, where end minus committed is 6."""
    row = page.settled("/groups").text.split('name=billing"')[1].split("</tr>")[0]
    assert re.findall(r'<td class="number[^"]*">([^<]*)</td>', row)[2:] == ["1", "6", "1", "1", "1", "2"]
    assert "orders:0" in page.settled("/group", name="billing").text


def test_pipelines_are_shown_with_batches_outcomes_and_lag(page: Page) -> None:
    """E5: what the ledger knows, and that it does not know how long Spark took."""
    row = page.settled("/pipelines").text.split("name=orders-enriched")[1].split("</tr>")[0]
    assert "batch 11" in row
    assert "committed" in row
    assert '<td class="number strong">1</td>' in row
    shown = page.settled("/pipeline", name="orders-enriched").text
    assert len(re.findall(r">batch \d+</th>", shown)) == 12
    assert '<td class="number">5 s</td>' in shown
    assert "semelEncode" in shown


def test_the_doctors_findings_are_shown_with_their_commands(page: Page) -> None:
    """The same findings as `semel doctor --bootstrap`."""
    shown = page.settled("/doctor").text
    assert "transaction-protocol-1" in shown
    assert "kafka-features.sh" in shown


def test_the_overview_counts_what_is_open(page: Page) -> None:
    """Each number is a link to where it is explained."""
    shown = page.until(lambda text: "…</b>" not in text, "/").text
    assert '<a id="tile-open" href="/transactions"><b>1</b>' in shown
    assert '<a id="tile-pipelines" href="/pipelines"><b>1</b>' in shown


def test_topics_and_their_partitions_are_listed(page: Page) -> None:
    """With what is held back, and only those that are asked for."""
    row = page.settled("/topics", q="orders").text.split("name=orders")[1].split("</tr>")[0]
    assert re.findall(r'<td class="number[^"]*">([^<]*)</td>', row) == ["3", "7", "2"]
    assert LEDGER not in page.settled("/topics", q="orders").text
    assert 'id="partition-2"' in page.settled("/topic", name="orders").text


def test_reports_of_verify_are_shown_and_their_pages_run_no_script(page: Page) -> None:
    """In a sandbox, with the styles that are in them and nothing else."""
    listed = page.get("/reports").text
    assert "not exactly once" in listed
    shown = page.get("/report", name="bad").text
    assert "&lt;script&gt;window.hacked=1" in shown
    whole = page.get("/report/page", name="bad")
    policy = whole.headers["content-security-policy"]
    assert policy.startswith("sandbox; default-src 'none'; style-src 'unsafe-hashes' 'sha256-")
    assert "unsafe-inline" not in policy
    assert page.get("/report/page", name="../bad").status != 200
    assert page.get("/report", name="/etc").status != 200


def test_a_folder_of_anything_is_no_danger(tmp_path: Path, place: Scene) -> None:
    """Files that are no reports, broken ones, and links that lead out of the folder."""
    (tmp_path / "verdict.json").write_text("[" * 100_000)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "verdict.json").write_text('{"is_clean": true, "checked": 7, "anomalies": [3, {"count": "x"}]}')
    (tmp_path / "a" / "run.json").write_bytes(b"\xff")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "secret.html").symlink_to("/etc/passwd")
    with running_page(place.settings, reports=tmp_path) as running:
        listed = running.get("/reports")
        assert (listed.status, listed.text.count("exactly once</span>")) == (200, 1)
        assert "secret" not in listed.text
        assert running.get("/report", name="a").status == 200
        assert running.get("/report/page", name="b/secret.html").status != 200


# -- hostile content -------------------------------------------------------------------------------------------------


def test_hostile_keys_values_headers_and_names_are_text(place: Scene, page: Page) -> None:
    """Nothing that anybody wrote becomes markup, and no control character gets through."""
    place.admin.create_topics("hostile", partitions=1)
    with place.producer(HOSTILE_NAME) as producer, producer.transaction():
        producer.send("hostile", HOSTILE, key=HOSTILE, headers=[("<b>\x1b</b>", HOSTILE)], partition=0)
    place.admin.commit_offsets(HOSTILE_NAME, {("hostile", 0): 0})
    pages = [
        page.settled("/records", topic="hostile", partition=0),
        page.settled("/record", topic="hostile", partition=0, offset=0),
        page.until(lambda text: "window.hacked" in text, "/groups"),
        page.settled("/group", name=HOSTILE_NAME),
        page.settled("/transaction", id=HOSTILE_NAME),
        page.settled("/topics", q=HOSTILE_NAME),
        page.settled("/topic", name=HOSTILE_NAME),
    ]
    for shown in pages:
        assert "window.hacked" in shown.text
        assert not re.search(r"<script>|<img src=x|<b>\\", shown.text)
        assert all(one.isprintable() or one == "\n" for one in shown.text)


def test_a_ledger_that_anybody_wrote_to_is_still_shown(place: Scene, page: Page) -> None:
    """Entries that are none are left out."""
    with place.producer() as producer:
        for value in (b"{}", b"[]", b'{"records": "<b>", "at_ms": {}}', b'{"pipeline": 7}', b"\xff"):
            producer.send(LEDGER, value, key=b"strange", partition=0)
    shown = page.until(lambda text: "orders-enriched" in text, "/pipelines")
    assert shown.status == 200


def test_a_value_of_5_mb_is_cut_and_can_be_had_whole(place: Scene, page: Page) -> None:
    """A page of it is small; more comes a piece at a time, or as a file that is never shown as what it says it is."""
    place.admin.create_topics("large", partitions=1, config={"max.message.bytes": "6000000"})
    value = b"<script>window.hacked=1</script>" * (5 * (1 << 20) // 32)
    settings = {**place.settings, "max.request.size": 8_000_000}
    with Producer(settings) as producer:
        producer.send("large", value, partition=0)
    listed = page.settled("/records", topic="large", partition=0)
    assert len(listed.body) < 20_000
    assert f"({len(value)} bytes)" in listed.text
    shown = page.settled("/record", topic="large", partition=0, offset=0)
    assert len(shown.body) < 100_000
    assert "5,242,880 bytes; here are 1 to 16,384" in shown.text
    assert (
        "here are 5,242,865 to 5,242,880"
        in page.settled("/record", topic="large", partition=0, offset=0, at=5_242_864).text
    )
    whole = page.get("/value", topic="large", partition=0, offset=0)
    assert whole.body == value
    assert whole.headers["content-type"] == "application/octet-stream"
    assert whole.headers["content-disposition"].startswith("attachment")


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/nothing", 404),
        ("/records", 400),
        ("/records?topic=orders&partition=x", 400),
        ("/records?topic=orders&partition=99999999999999999999", 400),
        ("/records?topic=orders&partition=77", 404),
        ("/records?topic=orders&partition=0&from=999", 404),
        ("/records?topic=orders&partition=0&show=<b>", 400),
        ("/record?topic=orders&partition=0&offset=999", 404),
        ("/value?topic=orders&partition=0&offset=1", 404),
        ("/topic?name=gone", 404),
        ("/group?name=gone", 404),
        ("/transaction?id=gone", 404),
        ("/pipeline?name=gone", 404),
        ("/transactions/end?topic=orders&partition=1&producer=5", 502),
    ],
)
def test_wrong_addresses_are_one_sentence(page: Page, path: str, status: int) -> None:
    """No stack trace, and the right status."""
    answer = page.settled(path.replace("<", "%3C").replace(">", "%3E"))
    assert answer.status == status
    assert 'class="banner bad"' in answer.text


# -- the action --------------------------------------------------------------------------------------------------------


def test_a_hanging_transaction_is_found_explained_and_ended_from_the_page(place: Scene, page: Page) -> None:
    """Bar 2: the last stable offset moves."""
    place.admin.create_topics("late", partitions=1)
    producer = place.hang("late", "late-writer")
    shown = page.until(lambda text: "late:0</a>: a transaction hangs" in text, "/transactions").text
    assert "No marker will ever come here" in shown
    link = re.search(r'<a class="button" id="end-1" href="([^"]*)"', shown)
    assert link is not None
    before = page.get(link[1].replace("&amp;", "&")).text
    form = form_of(before)
    assert form["producer"] == str(producer.identity.producer_id)

    ended = page.post("/transactions/end", form)

    assert ended.status == 303
    after = page.settled(ended.headers["location"]).text
    assert '<b id="stable">4</b> (readers were held at 2)' in after
    assert held_partitions(place.cluster, ["late"]) == []
    assert "late:0</a>: a transaction hangs" not in page.settled("/transactions").text
    again = page.post("/transactions/end", form)
    assert (again.status, "no open transaction" in again.text) == (409, True)


def test_what_does_not_hang_is_ended_by_force_alone(place: Scene, page: Page) -> None:
    """Bar 2: refused, and unchanged; then forced."""
    place.admin.create_topics("alive", partitions=1)
    with place.producer("alive-writer") as producer:
        producer.begin()
        producer.send("alive", b"x", partition=0)
        producer.flush()
        [found] = open_transactions(place.cluster, [("alive", 0)])
        where = {"topic": "alive", "partition": 0, "producer": found.producer.producer_id}
        form = form_of(page.get("/transactions/end", **where).text)

        refused = page.post("/transactions/end", form)

        assert refused.status == 409
        assert "does not hang" in refused.text
        assert 'name="force"' in refused.text
        assert open_transactions(place.cluster, [("alive", 0)]) == [found]
        assert page.post("/transactions/end", {**form, "start": 7, "force": "yes"}).status == 409
        assert page.post("/transactions/end", {**form, "force": "yes"}).status == 303
        assert open_transactions(place.cluster, [("alive", 0)]) == []
        producer.abort()


def test_ending_without_the_forms_token_is_refused(place: Scene, page: Page) -> None:
    """Another site can send a form to this one, and cannot read the token."""
    place.admin.create_topics("kept", partitions=1)
    producer = place.hang("kept", "kept-writer")
    form = {"topic": "kept", "partition": 0, "producer": producer.identity.producer_id, "start": 2, "force": "yes"}
    for token in ({}, {"csrf": ""}, {"csrf": "0" * 64}, {"csrf": "é"}):
        refused = page.post("/transactions/end", {**form, **token})
        assert refused.status == 403
    assert page.get("/transactions/end", **form).status == 200  # to look changes nothing
    assert len(held_partitions(place.cluster, ["kept"])) == 1


# -- who may ask -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "10.0.0.7", "", "a b"])
def test_a_foreign_host_name_is_refused(page: Page, host: str) -> None:
    """DNS rebinding: the page of another site that has this machine's address as its own."""
    for path in ("/", "/static/semel.js", "/records?topic=orders&partition=0"):
        answer = page.get(path, {"Host": host})
        assert answer.status in (400, 421)  # an impossible one does not reach the page
        assert b"orders" not in answer.body


def test_every_answer_has_a_strict_policy_and_nothing_inline(page: Page) -> None:
    """No script, style or handler within a page; nothing from elsewhere."""
    for path in ("/", "/transactions", "/records?topic=orders&partition=0", "/nothing", "/static/semel.css", "/doctor"):
        answer = page.settled(path)
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'; script-src 'self'; style-src 'self'" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert not re.search(r"<script(?! src=\"/static/)|\sstyle=|\son\w+=|<style|https?://(?!127)", answer.text)


def test_a_login_is_asked_for_and_forms_belong_to_their_session(place: Scene) -> None:
    """Without it nothing is told, and a token of one session is worth nothing in another."""
    with running_page(place.settings, password="open sesame") as page:
        sent = page.get("/records?topic=orders&partition=0")
        assert (sent.status, sent.headers["location"]) == (
            303,
            "/login?next=%2Frecords%3Ftopic%3Dorders%26partition%3D0",
        )
        assert page.post("/transactions/end", {}).status == 401
        assert page.get("/static/semel.css").status == 200
        assert page.post("/login", {"password": "wrong"}).status == 403
        assert page.post("/login", {"password": "open sesame", "next": "//evil.example"}).headers["location"] == "/"

        entered = page.post("/login", {"password": "open sesame", "next": "/topics?q=o"})

        assert (entered.status, entered.headers["location"]) == (303, "/topics?q=o")
        cookie = entered.headers["set-cookie"]
        assert "httponly" in cookie.lower()
        assert "samesite=strict" in cookie.lower()
        page.cookies["semel_session"] = cookie.split("=", 1)[1].split(";")[0]
        shown = page.settled("/topics")
        assert shown.status == 200
        token = csrf_of(shown.text)
        other = page.post("/login", {"password": "open sesame"}).headers["set-cookie"].split("=", 1)[1].split(";")[0]
        assert csrf_of(page.get("/topics", {"Cookie": f"semel_session={other}"}).text) != token
        assert page.post("/logout", {"csrf": token}).status == 303
        assert page.get("/topics").status == 303


def test_over_tls_the_cookie_is_sent_over_tls_alone(place: Scene, tmp_path: Path) -> None:
    """The certificate is the one that was given."""
    made = make_certificates()
    path = tmp_path / "page.pem"
    path.write_text(made.server.key_pem + made.server.certificate_pem)
    with running_page(place.settings, password="open sesame", certificate=str(path)) as page:
        trust = ssl.create_default_context(cadata=made.ca_pem)
        connection = http.client.HTTPSConnection("localhost", page.port, timeout=30, context=trust)
        form = {"Content-Type": "application/x-www-form-urlencoded"}
        connection.request("POST", "/login", "password=open+sesame", form)
        answer = connection.getresponse()
        assert answer.status == 303
        assert "secure" in (answer.getheader("set-cookie") or "").lower()
        connection.close()


def test_guessing_passwords_is_slow(place: Scene) -> None:
    """Whoever guesses gets a few tries in a second."""
    with running_page(place.settings, password="open sesame") as page:
        began = time.monotonic()
        for _ in range(3):
            assert page.post("/login", {"password": "guess"}).status == 403
        assert time.monotonic() - began >= 1.0


# -- the cluster -----------------------------------------------------------------------------------------------------


def test_many_tabs_ask_the_cluster_once(place: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer is shared for a moment, however many ask for it."""
    from semel.web.views import transactions

    looks: list[float] = []
    look_at_open = transactions.look_at_open

    def count(cluster: object) -> object:
        looks.append(time.monotonic())
        return look_at_open(cluster)  # type: ignore[arg-type]

    monkeypatch.setattr(transactions, "look_at_open", count)
    monkeypatch.setattr("semel.web.app.look_at_open", count)
    with running_page(place.settings) as page:
        began = time.monotonic()
        for _ in range(30):
            page.settled("/transactions")
        allowed = 2 + (time.monotonic() - began) / transactions.FRESH_S
    assert 1 <= len(looks) <= allowed


def test_text_that_is_cut_is_cut_before_it_is_kept() -> None:
    """What the site keeps of a record is small, whatever the record is."""
    assert len(show_text(Record(0, 0, None, b"x" * 5_000_000).value, 160)) < 200
