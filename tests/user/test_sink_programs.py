"""Spark programs that write with Semel's sink, restarted in the middle of a busy topic, counted by another client."""

from __future__ import annotations

import json
import shutil
import sys
from collections import Counter, defaultdict
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from busy_scene import PROGRAMS, Record, Scene, assert_exactly, since_a_latest_start
from order_writer import PRODUCTS

pytestmark = pytest.mark.user

PRICES = {"tea": 3, "coffee": 5, "milk": 1, "bread": 4, "salt": 2}


def test_a_copy_with_spark_submit_survives_kill_9(scene: Scene) -> None:
    """The row as it was read goes out again: key, value, and its headers stay away unless they are asked for."""
    scene.create("orders", "copied")
    submit = str(Path(sys.executable).parent / "spark-submit")
    scene.through_a_restart(
        scene.write("orders"),
        lambda: scene.start_command(submit, str(PROGRAMS / "copy_stream.py"), scene.bootstrap),
        stop="kill",
        found=lambda: [(record.key, record.value) for record in scene.read("copied")],
        expected=lambda: [(record.key, record.value) for record in scene.read("orders")],
    )


def test_each_window_is_written_once_when_it_is_over(scene: Scene) -> None:
    """A windowed aggregation in append mode, killed with kill -9; its state must survive too."""
    scene.create("orders", "sales")

    def sales(orders: list[Record]) -> list[tuple[int, str, int, int]]:
        windows: defaultdict[tuple[int, str], list[int]] = defaultdict(list)
        for record in orders:
            windows[record.order["at"] // 1000 * 1000, record.order["product"]].append(record.order["amount"])
        return [(start, product, len(found), sum(found)) for (start, product), found in windows.items()]

    closing = b'{"id": -1, "product": "closing", "amount": 0, "at": 4102444800000}'
    scene.through_a_restart(
        scene.write("orders"),
        lambda: scene.start("windowed_counts.py"),
        stop="kill",
        found=lambda: [
            (record.order["start"], record.order["product"], record.order["orders"], record.order["amount"])
            for record in scene.read("sales")
        ],
        expected=lambda: sales([record for record in scene.read("orders") if record.value != closing]),
        before_the_end=lambda: scene.produce("orders", closing),  # the far future: every window before it is over
        enough=3 * len(PRODUCTS),
    )


def test_running_totals_tell_every_change_once(scene: Scene) -> None:
    """Update mode: each customer's counts only rise, no total comes twice, and the last ones are right."""
    scene.create("orders", "totals")

    def totals() -> list[tuple[str, int, int]]:
        found = [record.value.decode().split(",") for record in scene.read("totals")]
        return [(customer, int(count), int(amount)) for customer, count, amount in found]

    def last_totals() -> list[tuple[str, int, int]]:
        return list({customer: (customer, count, amount) for customer, count, amount in totals()}.values())

    def expected() -> list[tuple[str, int, int]]:
        amounts: defaultdict[str, list[int]] = defaultdict(list)
        for record in scene.read("orders"):
            amounts[record.order["customer"]].append(record.order["amount"])
        return [(customer, len(found), sum(found)) for customer, found in amounts.items()]

    writer = scene.write("orders")
    program = scene.start("running_totals.py")
    scene.wait(lambda: len(totals()) >= 20, "totals", program)
    program.stop("kill")
    program = scene.start("running_totals.py")
    there = len(totals())
    scene.wait(lambda: len(totals()) >= there + 20, "totals after the restart", program)
    writer.finish()
    scene.finish(program, stop="terminate", found=last_totals, expected=expected)
    repeated = {total for total, count in Counter(totals()).items() if count > 1}
    assert not repeated, f"these totals were written twice: {sorted(repeated)[:5]}"
    by_customer: defaultdict[str, list[int]] = defaultdict(list)
    for customer, count, _ in totals():
        by_customer[customer].append(count)
    assert all(counts == sorted(counts) for counts in by_customer.values())


def test_a_batch_function_writes_to_kafka_and_to_parquet_beside_it(scene: Scene) -> None:
    """foreachBatch with KafkaSink and a second write of the user's own, killed with kill -9."""
    scene.create("orders", "clean")
    scene.through_a_restart(
        scene.write("orders"),
        lambda: scene.start("batch_function.py"),
        stop="kill",
        found=lambda: scene.ids("clean"),
        expected=lambda: scene.ids("orders"),
    )
    files = (scene.folder / "lake").glob("batch=*/*.parquet")
    lake = [json.loads(value)["id"] for file in files for value in pq.read_table(file)["value"].to_pylist()]
    assert_exactly(lake, scene.ids("orders"))


def test_rows_go_to_the_topic_in_their_column_with_their_headers(scene: Scene) -> None:
    """Column topic, headers as an array of structs; SIGTERM."""
    topics = [f"orders-{product}" for product in PRODUCTS]
    scene.create("orders", *topics)

    def found() -> list[tuple[str, bytes, bytes | None, tuple[tuple[str, bytes | None], ...]]]:
        return [(topic, record.value, record.key, record.headers) for topic in topics for record in scene.read(topic)]

    scene.through_a_restart(
        scene.write("orders"),
        lambda: scene.start("route_with_headers.py"),
        stop="terminate",
        found=found,
        expected=lambda: [
            (
                f"orders-{record.order['product']}",
                record.value,
                record.key,
                (*record.headers, ("routed-from", b"orders")),
            )
            for record in scene.read("orders")
        ],
    )


def test_two_outputs_of_a_batch_are_both_written(scene: Scene) -> None:
    """`with sink.batch(...)`: two topics in one transaction, killed with kill -9."""
    scene.create("orders", "even", "odd")
    scene.through_a_restart(
        scene.write("orders"),
        lambda: scene.start("two_outputs.py"),
        stop="kill",
        found=lambda: [(topic, number) for topic in ("even", "odd") for number in scene.ids(topic)],
        expected=lambda: [("odd" if number % 2 else "even", number) for number in scene.ids("orders")],
    )


def test_a_renamed_query_repeats_nothing(scene: Scene) -> None:
    """Killed with kill -9, then started under another name with the same checkpoint."""
    scene.create("orders", "copied")
    names = iter(["copy", "copy-of-orders"])
    scene.through_a_restart(
        scene.write("orders"),
        lambda: scene.start("copy_named.py", next(names)),
        stop="kill",
        found=lambda: scene.ids("copied"),
        expected=lambda: scene.ids("orders"),
    )


def test_rows_that_the_topic_refuses_go_to_the_dead_letters(scene: Scene) -> None:
    """Every fifth row is too long for its topic; killed with kill -9."""
    scene.create("orders", "too-long")
    scene.create("receipts", config={"max.message.bytes": "3000"})

    def numbers(topic: str) -> list[tuple[str, int]]:
        return [(topic, int(value.split()[0])) for value in scene.values(topic)]

    scene.through_a_restart(
        scene.write("orders"),
        lambda: scene.start("sink_dead_letters.py"),
        stop="kill",
        found=lambda: numbers("receipts") + numbers("too-long"),
        expected=lambda: [
            ("too-long" if record.order["product"] == "salt" else "receipts", record.order["id"])
            for record in scene.read("orders")
        ],
    )


def test_a_job_in_a_package_with_the_default_start_runs_with_python_m(scene: Scene) -> None:
    """`python -m sales_job`, a function of the package in a UDF, nothing from before the start; SIGTERM."""
    scene.create("orders", "sales")
    shutil.copytree(PROGRAMS / "sales_job", scene.folder / "sales_job")
    writer = scene.write("orders")
    before = scene.ends("orders")

    def found() -> list[int]:
        sold = scene.read("sales")
        assert all(record.order["vat"] == record.order["amount"] * 19 for record in sold)
        return [record.order["id"] for record in sold]

    scene.through_a_restart(
        writer,
        lambda: scene.start_command("/usr/bin/env", f"BROKER={scene.bootstrap}", sys.executable, "-m", "sales_job"),
        stop="terminate",
        found=found,
        expected=lambda: since_a_latest_start(found(), scene.read("orders"), before),
    )


def test_two_stateful_queries_in_one_application(scene: Scene) -> None:
    """dropDuplicatesWithinWatermark and a stream-stream join, killed with kill -9: their state must survive too."""
    scene.create("orders", "parcels", "payments", "unique", "matched")
    shop = scene.write("orders", twice_every=3)
    post = scene.write("parcels", "payments")
    scene.through_a_restart(
        shop,
        lambda: scene.start("clean_and_match.py"),
        stop="kill",
        found=lambda: [*scene.ids("unique"), *scene.values("matched")],
        expected=lambda: [
            *sorted(set(scene.ids("orders"))),
            *(f"{number}={number}".encode() for number in scene.ids("payments")),
        ],
        before_the_end=post.finish,
    )


def test_orders_are_enriched_while_the_query_is_stopped_again_and_again(scene: Scene) -> None:
    """from_json, a broadcast join and to_json as in Spark's guide; `query.stop()` comes wherever the query is."""
    scene.create("orders", "enriched")

    def enriched(order: dict[str, int]) -> tuple[int, int]:
        return order["id"], order["amount"] * PRICES[str(order["product"])]

    scene.through_its_own_restart(
        scene.write("orders"),
        scene.start("enrich.py"),
        says="reading the prices again",
        found=lambda: [(record.order["id"], record.order["total"]) for record in scene.read("enriched")],
        expected=lambda: [enriched(record.order) for record in scene.read("orders")],
    )


def test_pandas_in_the_middle_in_a_notebook(scene: Scene) -> None:
    """A pandas UDF and mapInPandas whose functions were made by `exec`, as in a notebook; stopped and started there."""
    scene.create("orders", "scores")
    cells = f"exec(compile(open({str(PROGRAMS / 'pandas_in_the_middle.py')!r}).read(), '<cell>', 'exec'))"
    scene.through_its_own_restart(
        scene.write("orders"),
        scene.start_command(sys.executable, "-c", cells, scene.bootstrap),
        says="started again",
        found=lambda: [(record.order["id"], record.order["score"]) for record in scene.read("scores")],
        expected=lambda: [(record.order["id"], record.order["amount"] ** 2) for record in scene.read("orders")],
    )


def test_a_notebook_cell_run_twice_leaves_the_first_query_running(scene: Scene) -> None:
    """The second start is refused by Spark; the first goes on. Then it is stopped, and the cell runs once more."""
    scene.create("orders", "copied")
    program = scene.start("notebook_cell_twice.py")
    scene.through_its_own_restart(
        scene.write("orders"),
        program,
        says="started again",
        found=lambda: scene.ids("copied"),
        expected=lambda: scene.ids("orders"),
    )
    assert "the second time: " in program.said, program.said


def test_a_job_like_crons_takes_what_is_there_ten_times(scene: Scene) -> None:
    """availableNow with maxOffsetsPerTrigger; the application is killed after its third run and started again."""
    scene.create("orders", "collected")
    writer = scene.write("orders")
    first = scene.start("cron_available_now.py")
    scene.wait(lambda: "run 3 is done" in first.said, "three runs", first)
    first.stop("kill")
    second = scene.start("cron_available_now.py")
    scene.wait(lambda: "run 3 is done" in second.said, "three runs after the restart", second)
    writer.finish()
    assert "run 9 is done" not in second.said, "no run has begun after the writer was done: nothing would be judged"
    assert second.wait() == 0, second.said
    assert_exactly(scene.ids("collected"), scene.ids("orders"))


def test_a_daily_report_is_written_once_however_often_it_runs(scene: Scene) -> None:
    """write_batch with a job id: killed between its two jobs, run again while the topic grows, and the next day."""
    scene.create("orders", "reports", "products", partitions=1)
    writer = scene.write("orders")
    killed = scene.start("daily_report.py", "monday")
    scene.wait(lambda: "wrote 7 lines" in killed.said, "the report", killed)
    killed.stop("kill")  # its second job may be done or not
    again = scene.start("daily_report.py", "monday")
    assert again.wait() == 0, again.said
    assert "was there already" in again.said
    writer.finish()
    tuesday = scene.start("daily_report.py", "tuesday")
    assert tuesday.wait() == 0, tuesday.said
    assert "wrote 7 lines" in tuesday.said
    days = Counter(value.decode().split(",")[0] for value in scene.values("reports"))
    assert days == {"monday": 7, "tuesday": 7}
    assert_exactly(scene.values("products"), [product.encode() for product in PRODUCTS] * 2)


def test_a_sink_called_twice_in_a_batch_says_so_at_once(scene: Scene) -> None:
    """What cannot be written safely is refused: nothing is dropped in silence, nothing is written twice."""
    scene.create("orders", "even")
    writer = scene.write("orders")
    program = scene.start("two_calls.py")
    assert program.wait() != 0, program.said
    assert "batch(" in program.said, f"the error does not name the way to do it:\n{program.said[-3000:]}"
    writer.finish()
    numbers = scene.ids("even")
    assert len(numbers) == len(set(numbers)), "something was written twice"
    assert not any(number % 2 for number in numbers)


def test_a_lost_checkpoint_is_refused_with_choices_and_the_query_can_go_on(scene: Scene) -> None:
    """The folder is deleted: nothing is repeated or skipped in silence, and one of the choices goes on exactly."""
    scene.create("orders", "copied")
    writer = scene.write("orders")
    program = scene.start("copy_named.py", "copy")
    scene.wait(lambda: len(scene.ids("copied")) >= 200, "the first copies", program)
    program.stop("kill")
    shutil.rmtree(scene.folder / "checkpoint")
    refused = scene.start("copy_named.py", "copy")
    assert refused.wait() != 0, refused.said
    for choice in ('resume="committed"', 'resume="checkpoint"', "another name"):
        assert choice in refused.said, f"{choice} is not named:\n{refused.said[-3000:]}"
    program = scene.start("copy_resumed.py")
    there = len(scene.ids("copied"))
    scene.wait(lambda: len(scene.ids("copied")) >= there + 200, "copies after the loss", program)
    writer.finish()
    scene.finish(program, stop="terminate", found=lambda: scene.ids("copied"), expected=lambda: scene.ids("orders"))
