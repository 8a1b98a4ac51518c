"""The page of `semel ui` on each broker: what hangs is found, explained and ended there."""

from __future__ import annotations

import re

import pytest
from raw import RawClient
from raw_producer import RawProducer
from targets import KafkaUnderTest, NewTopic
from test_inspect import hang
from web_scene import form_of, running_page

from semel.client.admin import Admin

pytestmark = pytest.mark.needs("has_transaction_admin")


def test_the_page_ends_what_hangs_and_refuses_what_does_not(
    kafka: KafkaUnderTest, raw: RawClient, new_topic: NewTopic
) -> None:
    """The last stable offset moves; a transaction that is alive stays."""
    late, alive = new_topic(), new_topic()
    settings = {"bootstrap.servers": kafka.bootstrap}
    with Admin(settings) as admin, running_page(settings) as page:
        hang(raw, admin, late, f"{late}-writer")
        living = RawProducer(raw, f"{alive}-writer").begin()
        living.write(alive, b"x")
        shown = page.until(lambda text: f"{late}:0</a>: a transaction hangs" in text, "/transactions").text
        section = next(one for one in shown.split("<section")[1:] if late in one)
        link = re.search(r'class="button" id="end-\d+" href="([^"]*)"', section)
        assert link is not None

        ended = page.post("/transactions/end", form_of(page.get(link[1].replace("&amp;", "&")).text))

        assert ended.status == 303
        assert '<b id="stable">4</b>' in page.settled(ended.headers["location"]).text
        where = {"topic": alive, "partition": 0, "producer": living.identity.producer_id}
        refused = page.post("/transactions/end", form_of(page.get("/transactions/end", **where).text))
        assert (refused.status, "does not hang" in refused.text) == (409, True)
        living.commit()
        assert "committed" in page.settled("/records", topic=alive, partition=0).text
