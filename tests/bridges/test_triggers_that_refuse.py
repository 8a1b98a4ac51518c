"""Rows that only the database can judge: triggers with codes of their own, values nested too deeply."""

from __future__ import annotations

import json
from typing import Any

import pytest
from database_scene import Input, broker, make_postgres, numbers, server

from semel.testing.embedded import EmbeddedBroker
from semel.testing.postgres import Postgres

__all__ = ["broker", "server"]

RAISES = [
    "RAISE EXCEPTION 'no' USING ERRCODE = 'UR001'",
    "ASSERT NEW.number <> 7",
    "SELECT 1 INTO STRICT n WHERE false",
]


@pytest.mark.parametrize("what", RAISES)
def test_a_row_that_a_trigger_refuses_is_a_dead_letter(server: Postgres, broker: EmbeddedBroker, what: str) -> None:
    """Whatever code it raises. The other rows are written."""
    place, source = make_postgres(server), Input(broker.bootstrap, 1)
    place.do(
        "CREATE TABLE numbers (number bigint)",
        "CREATE FUNCTION judge() RETURNS trigger LANGUAGE plpgsql AS $$ DECLARE n int; BEGIN "
        f"IF NEW.number = 7 THEN {what}; END IF; RETURN NEW; END $$",
        "CREATE TRIGGER judge BEFORE INSERT ON numbers FOR EACH ROW EXECUTE FUNCTION judge()",
    )
    source.write(range(10))
    report = source.run(lambda row: {"number": int(row.value)}, place.target(table="numbers", dead_letter="failed"))
    assert report.dead_letters == 1
    assert numbers(place) == [one for one in range(10) if one != 7]


def test_json_that_is_nested_too_deeply_is_a_dead_letter(server: Postgres, broker: EmbeddedBroker) -> None:
    """Postgres reports its stack's limit, SQLSTATE 54001, for this value alone."""
    place, source = make_postgres(server), Input(broker.bootstrap, 1)
    place.do("CREATE TABLE numbers (number bigint, note jsonb)")
    source.write(range(5))

    def with_note(row: Any) -> dict[str, Any]:
        number = int(row.value)
        return {"number": number, "note": "[" * 50_000 + "]" * 50_000 if number == 3 else json.dumps([number])}

    report = source.run(with_note, place.target(table="numbers", dead_letter="failed"))
    assert report.dead_letters == 1
    assert numbers(place) == [0, 1, 2, 4]
