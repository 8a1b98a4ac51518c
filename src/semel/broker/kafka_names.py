"""Settings of Apache Kafka's brokers that have no effect here: a misspelt name can be told from one of these."""

from __future__ import annotations

from typing import Final

_NAMES: Final = """
advertised.listeners alter.config.policy.class.name auto.leader.rebalance.enable background.threads
broker.heartbeat.interval.ms broker.id.generation.enable broker.session.timeout.ms client.quota.callback.class
compression.gzip.level compression.lz4.level compression.zstd.level connection.failed.authentication.delay.ms
connections.max.idle.ms control.plane.listener.name controlled.shutdown.enable controlled.shutdown.max.retries
controlled.shutdown.retry.backoff.ms controller.listener.names controller.quorum.append.linger.ms
controller.quorum.bootstrap.servers controller.quorum.election.backoff.max.ms controller.quorum.election.timeout.ms
controller.quorum.fetch.timeout.ms controller.quorum.request.timeout.ms controller.quorum.retry.backoff.ms
controller.quorum.voters controller.quota.window.num controller.quota.window.size.seconds controller.socket.timeout.ms
create.topic.policy.class.name delegation.token.expiry.check.interval.ms delegation.token.expiry.time.ms
delegation.token.master.key delegation.token.max.lifetime.ms delegation.token.secret.key
delete.records.purgatory.purge.interval.requests early.start.listeners eligible.leader.replicas.enable
fetch.purgatory.purge.interval.requests group.consumer.migration.policy group.coordinator.append.linger.ms
group.coordinator.new.enable group.coordinator.threads group.share.enable group.share.heartbeat.interval.ms
group.share.max.groups group.share.max.heartbeat.interval.ms group.share.max.record.lock.duration.ms
group.share.max.session.timeout.ms group.share.max.size group.share.min.heartbeat.interval.ms
group.share.min.session.timeout.ms group.share.session.timeout.ms host.name initial.broker.registration.timeout.ms
inter.broker.listener.name inter.broker.protocol.version kafka.metrics.polling.interval.secs kafka.metrics.reporters
leader.imbalance.check.interval.seconds leader.imbalance.per.broker.percentage listener.security.protocol.map
listeners log.cleaner.dedupe.buffer.size log.cleaner.delete.retention.ms log.cleaner.io.buffer.load.factor
log.cleaner.io.buffer.size log.cleaner.io.max.bytes.per.second log.cleaner.max.compaction.lag.ms
log.cleaner.min.cleanable.ratio log.cleaner.min.compaction.lag.ms log.cleaner.threads log.cleanup.policy
log.deletion.delay.ms log.dir log.dir.failure.timeout.ms log.flush.interval.messages log.flush.interval.ms
log.flush.offset.checkpoint.interval.ms log.flush.scheduler.interval.ms log.flush.start.offset.checkpoint.interval.ms
log.index.interval.bytes log.index.size.max.bytes log.initial.task.delay.ms log.local.retention.bytes
log.local.retention.ms log.message.downconversion.enable log.message.format.version log.message.timestamp.after.max.ms
log.message.timestamp.before.max.ms log.message.timestamp.difference.max.ms log.message.timestamp.type log.preallocate
log.retention.bytes log.retention.hours log.retention.minutes log.retention.ms log.roll.hours log.roll.jitter.hours
log.roll.jitter.ms log.roll.ms log.segment.bytes log.segment.delete.delay.ms max.connection.creation.rate
max.connections max.connections.per.ip max.connections.per.ip.overrides message.max.bytes metadata.log.dir
metadata.log.max.record.bytes.between.snapshots metadata.log.max.snapshot.interval.ms metadata.log.segment.bytes
metadata.log.segment.ms metadata.max.idle.interval.ms metadata.max.retention.bytes metadata.max.retention.ms
metric.reporters metrics.num.samples metrics.recording.level metrics.sample.window.ms min.insync.replicas
num.io.threads num.network.threads num.recovery.threads.per.data.dir num.replica.alter.log.dirs.threads
num.replica.fetchers offsets.commit.required.acks offsets.commit.timeout.ms offsets.load.buffer.size
offsets.topic.compression.codec password.encoder.cipher.algorithm password.encoder.iterations
password.encoder.key.length password.encoder.keyfactory.algorithm password.encoder.old.secret password.encoder.secret
port principal.builder.class process.roles producer.purgatory.purge.interval.requests queued.max.request.bytes
queued.max.requests quota.window.num quota.window.size.seconds replica.fetch.backoff.ms replica.fetch.max.bytes
replica.fetch.min.bytes replica.fetch.response.max.bytes replica.fetch.wait.max.ms
replica.high.watermark.checkpoint.interval.ms replica.lag.time.max.ms replica.selector.class
replica.socket.receive.buffer.bytes replica.socket.timeout.ms replication.quota.window.num
replication.quota.window.size.seconds request.timeout.ms reserved.broker.max.id security.inter.broker.protocol
security.providers server.max.startup.time.ms share.coordinator.append.linger.ms share.coordinator.threads
socket.connection.setup.timeout.max.ms socket.connection.setup.timeout.ms socket.listen.backlog.size
socket.receive.buffer.bytes socket.send.buffer.bytes telemetry.max.bytes
transaction.abort.timed.out.transaction.cleanup.interval.ms transaction.state.log.load.buffer.size
transaction.two.phase.commit.enable unclean.leader.election.enable unclean.leader.election.interval.ms
unstable.api.versions.enable unstable.feature.versions.enable
"""

IGNORED_NAMES: Final = frozenset(_NAMES.split())

PREFIXES: Final = (
    "group.share.",
    "group.streams.",
    "listener.name.",
    "metrics.",
    "remote.log.",
    "sasl.",
    "share.coordinator.",
    "ssl.",
    "zookeeper.",
)
"""Beginnings of families of such names."""
