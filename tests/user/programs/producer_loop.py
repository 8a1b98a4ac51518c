"""Import a file of bookings: ten lines are one booking and must appear together. Goes on where it stopped."""

import sys

from confluent_kafka import Consumer, TopicPartition

import semel

bootstrap = sys.argv[1]
LINES = 10


def bookings_so_far() -> int:
    """The topic itself knows how far we came (read_committed: half a booking does not count)."""
    reader = Consumer({"bootstrap.servers": bootstrap, "group.id": "unused", "enable.partition.eof": True})
    reader.assign([TopicPartition("bookings", 0, 0)])
    lines = 0
    while True:
        message = reader.poll(10)
        if message is None or message.error():
            reader.close()
            return lines // LINES
        lines += 1


with semel.Producer(bootstrap_servers=bootstrap, transactional_id="booking-import") as producer:
    # After the line above no older run of this program can write any more.
    for booking in range(bookings_so_far(), 10_000_000):
        with producer.transaction():
            for line in range(LINES):
                producer.send("bookings", f"{booking}/{line}".encode(), key=str(booking).encode())
