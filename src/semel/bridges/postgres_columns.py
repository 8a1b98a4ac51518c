"""The query for the columns of a table in Postgres, and for what the types of a user's own are made of."""

from __future__ import annotations

from typing import Final

DEFAULT_COLLATION: Final = 100
"""Its oid, in every database."""

COLUMNS: Final = f"""
WITH RECURSIVE found AS (
    SELECT * FROM pg_attribute WHERE attrelid = to_regclass($1) AND attnum > 0 AND NOT attisdropped
), step AS (
    SELECT attnum, atttypid AS kind, atttypmod AS modifier, '' AS before, '' AS after, 0 AS number FROM found
    UNION ALL
    SELECT attnum, inner_kind, CASE WHEN t.typtype = 'd' THEN t.typtypmod ELSE modifier END,
        before || CASE t.typtype WHEN 'r' THEN 'range of ' WHEN 'm' THEN 'multirange of ' ELSE '' END,
        CASE WHEN is_array THEN '[]' ELSE '' END || after, number + 1
    FROM step JOIN pg_type t ON t.oid = kind
    CROSS JOIN LATERAL (SELECT EXISTS (SELECT 1 FROM pg_type item WHERE item.typarray = t.oid) AS is_array) AS a
    CROSS JOIN LATERAL (SELECT CASE
        WHEN is_array THEN t.typelem
        WHEN t.typtype = 'd' THEN t.typbasetype
        -- As JSON, since servers before Postgres 14 have no multiranges and no such column.
        WHEN t.typtype IN ('r', 'm') THEN (SELECT rngsubtype FROM pg_range r
            WHERE t.oid IN (rngtypid, (to_jsonb(r) ->> 'rngmultitypid')::oid))
    END AS inner_kind) AS i
    WHERE inner_kind IS NOT NULL
), base AS (
    SELECT DISTINCT ON (attnum) attnum, before || coalesce(
        (SELECT 'row of ' || string_agg(format_type(field.atttypid, field.atttypmod), ', ' ORDER BY field.attnum)
            FROM pg_type t JOIN pg_attribute field ON field.attrelid = t.typrelid
            WHERE t.oid = kind AND t.typtype = 'c' AND field.attnum > 0 AND NOT field.attisdropped),
        format_type(kind, modifier)) || after AS name
    FROM step ORDER BY attnum, number DESC
)
SELECT attname, format_type(atttypid, atttypmod),
    attnotnull AND NOT atthasdef AND attidentity = '',
    (SELECT quote_ident(n.nspname) || '.' || quote_ident(c.collname)
        FROM pg_collation c JOIN pg_namespace n ON n.oid = c.collnamespace
        WHERE c.oid = attcollation AND c.oid <> {DEFAULT_COLLATION}),
    base.name, attgenerated <> '' OR attidentity = 'a'
FROM found JOIN base USING (attnum) ORDER BY attnum
"""
"""For each column: its name, type, whether rows must have it, collation, base type, and whether it is GENERATED ALWAYS.

The base type is the one that `exact_casts` knows: the type under a domain, "range of" or "multirange of" the type of
the bounds, or "row of" the types of a composite type's fields.
"""
