"""`semel topics`: list, create, describe and delete topics."""

from __future__ import annotations

from typing import Annotated

import typer

from semel.cli.connecting import Bootstrap, ConfigFile, ProfileName, Setting, connect
from semel.cli.output import (
    EXIT_CODES,
    AsJson,
    Shown,
    Yes,
    bold,
    confirm,
    expected_errors,
    print_json,
    show,
    table,
)
from semel.client.admin import Admin, ConfigEntry, TopicDescription
from semel.errors import ConfigError, KafkaError, UnsupportedByBroker
from semel.inspect.shown import show_text

topics = typer.Typer(no_args_is_help=True, help="List, create, describe and delete topics.")

Names = Annotated[list[str], typer.Argument(metavar="TOPIC...", help="One or more topics.")]


@topics.command("list", epilog=EXIT_CODES)
def list_topics(
    internal: Annotated[bool, typer.Option("--internal", help="Kafka's own topics too.")] = False,
    as_json: AsJson = False,
    bootstrap: Bootstrap = None,
    profile: ProfileName = None,
    config: ConfigFile = None,
    setting: Setting = None,
) -> None:
    """List the topics of a cluster, one a line.

    \b
    semel topics list --bootstrap localhost:9092
    semel topics list --json | jq -r '.[]'
    """
    with expected_errors(), connect(bootstrap, profile, config, setting) as cluster:
        names = Admin(cluster).list_topics(include_internal=internal)
        show(lambda: Shown(names, [show_text(name, longest=None) for name in names]), as_json=as_json)


@topics.command("create", epilog=EXIT_CODES)
def create_topics(
    topic: Names,
    partitions: Annotated[int, typer.Option(help="How many; the broker's default without it.")] = -1,
    replication: Annotated[int, typer.Option(help="How many replicas; the broker's default without it.")] = -1,
    topic_setting: Annotated[
        list[str] | None,
        typer.Option("--topic-setting", metavar="NAME=VALUE", help="Such as cleanup.policy=compact; may be repeated."),
    ] = None,
    as_json: AsJson = False,
    bootstrap: Bootstrap = None,
    profile: ProfileName = None,
    config: ConfigFile = None,
    setting: Setting = None,
) -> None:
    """Create topics of one shape.

    \b
    semel topics create orders returns --partitions 6 --bootstrap localhost:9092
    semel topics create balances --topic-setting cleanup.policy=compact
    """
    with expected_errors(), connect(bootstrap, profile, config, setting) as cluster:
        chosen = dict(_topic_setting(text) for text in topic_setting or [])
        Admin(cluster).create_topics(topic, partitions=partitions, replication=replication, config=chosen)
        _report("created", topic, as_json=as_json)


def _topic_setting(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ConfigError(f"{show_text(text)!r} is no setting: write NAME=VALUE. Nothing was created.")
    return name, value


@topics.command("describe", epilog=EXIT_CODES)
def describe_topics(
    topic: Names,
    as_json: AsJson = False,
    bootstrap: Bootstrap = None,
    profile: ProfileName = None,
    config: ConfigFile = None,
    setting: Setting = None,
) -> None:
    """Show partitions, replicas and what was set for topics.

    \b
    semel topics describe orders --bootstrap localhost:9092
    semel topics describe orders --json | jq '.[].partitions | length'
    """
    with expected_errors(), connect(bootstrap, profile, config, setting) as cluster:
        show(lambda: _describe(Admin(cluster), topic), as_json=as_json)


def _describe(admin: Admin, names: list[str]) -> Shown:
    described = admin.describe_topics(names)
    values, lines = [], list[str]()
    for name in dict.fromkeys(names):
        settings = _settings(admin, name)
        values.append(_value(described[name], settings))
        lines += ([""] if lines else []) + _lines(described[name], settings)
    return Shown(values, lines)


def _settings(admin: Admin, name: str) -> list[ConfigEntry] | None:
    """What was set for the topic itself; None where this user may not see it."""
    try:
        return [entry for entry in admin.describe_configs("topic", name).values() if entry.source == "topic"]
    except (KafkaError, UnsupportedByBroker):
        return None


def _lines(told: TopicDescription, settings: list[ConfigEntry] | None) -> list[str]:
    lines = [f"{bold(show_text(told.name, longest=None))}  {told.topic_id or ''}".rstrip()]
    if settings is None:
        lines.append("Its settings may not be seen by this user.")
    else:
        lines += [f"{entry.name}={show_text(entry.value)}" for entry in settings]
    rows = [
        (one.partition, one.leader, " ".join(map(str, one.replicas)), " ".join(map(str, one.in_sync)), one.leader_epoch)
        for one in told.partitions
    ]
    titles = ("PARTITION", "LEADER", "REPLICAS", "IN SYNC", "LEADER EPOCH")
    return [*lines, *table(titles, rows, right=("PARTITION", "LEADER", "LEADER EPOCH"))]


def _value(told: TopicDescription, settings: list[ConfigEntry] | None) -> dict[str, object]:
    return {
        "name": told.name,
        "id": None if told.topic_id is None else str(told.topic_id),
        "is_internal": told.is_internal,
        "settings": None if settings is None else {entry.name: entry.value for entry in settings},
        "partitions": [
            {
                "partition": one.partition,
                "leader": one.leader,
                "leader_epoch": one.leader_epoch,
                "replicas": list(one.replicas),
                "in_sync": list(one.in_sync),
            }
            for one in told.partitions
        ],
    }


@topics.command("delete", epilog=EXIT_CODES)
def delete_topics(
    topic: Names,
    yes: Yes = False,
    as_json: AsJson = False,
    bootstrap: Bootstrap = None,
    profile: ProfileName = None,
    config: ConfigFile = None,
    setting: Setting = None,
) -> None:
    """Delete topics and all their records, after a confirmation.

    \b
    semel topics delete orders --bootstrap localhost:9092
    semel topics delete orders returns --yes
    """
    with expected_errors(), connect(bootstrap, profile, config, setting) as cluster:
        admin = Admin(cluster)
        partitions = sum(len(told.partitions) for told in admin.describe_topics(topic).values())
        names = ", ".join(show_text(name, longest=None) for name in topic)
        confirm(f"Delete {names} ({partitions} partitions) with all records?", yes=yes)
        admin.delete_topics(topic)
        _report("deleted", topic, as_json=as_json)


def _report(done: str, names: list[str], *, as_json: bool) -> None:
    if as_json:
        print_json({done: names})
        return
    for name in names:
        typer.echo(f"{done} {show_text(name, longest=None)}")
