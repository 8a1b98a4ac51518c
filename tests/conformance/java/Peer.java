import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Base64;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.Future;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.clients.producer.RecordMetadata;
import org.apache.kafka.clients.producer.internals.BuiltInPartitioner;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.compress.Compression;
import org.apache.kafka.common.header.Header;
import org.apache.kafka.common.header.internals.RecordHeader;
import org.apache.kafka.common.record.TimestampType;
import org.apache.kafka.common.record.internal.CompressionType;
import org.apache.kafka.common.record.internal.ControlRecordType;
import org.apache.kafka.common.record.internal.EndTransactionMarker;
import org.apache.kafka.common.record.internal.MemoryRecords;
import org.apache.kafka.common.record.internal.MemoryRecordsBuilder;
import org.apache.kafka.common.record.internal.MutableRecordBatch;
import org.apache.kafka.common.record.internal.Record;
import org.apache.kafka.common.record.internal.RecordBatch;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;
import org.apache.kafka.common.serialization.ByteArraySerializer;

/**
 * The Java client as a peer for tests of other clients.
 *
 * One command per line on standard input, one line back on standard output: "ok" and tokens, or "error" and a message.
 * A line is a command and tokens split by spaces; a token is fields split by commas; a field is "-" for null or "+" and
 * base64. Numbers travel as text fields. The first token of most commands is a map: its keys and values in turn.
 */
public class Peer {
    private static final String NULL = "-";

    public static void main(String[] arguments) throws Exception {
        PrintStream answers = System.out;
        System.setOut(System.err); // a library that prints must not break the protocol
        BufferedReader commands = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.US_ASCII));
        for (String line = commands.readLine(); line != null; line = commands.readLine()) {
            String answer;
            try {
                answer = "ok" + carryOut(line.split(" "));
            } catch (Exception | LinkageError error) {
                error.printStackTrace();
                answer = "error " + text(error.toString());
            }
            answers.print(answer + "\n");
            answers.flush();
        }
    }

    private static String carryOut(String[] tokens) throws Exception {
        switch (tokens[0]) {
            case "hello":
                return "";
            case "produce":
                return produce(map(tokens[1]), records(tokens));
            case "consume":
                return consume(map(tokens[1]));
            case "build":
                return build(map(tokens[1]), records(tokens));
            case "marker":
                return marker(map(tokens[1]));
            case "parse":
                return parse(bytes(tokens[1]));
            case "partition":
                Map<String, String> about = map(tokens[1]);
                byte[] key = Base64.getDecoder().decode(about.get("key"));
                return " " + number(BuiltInPartitioner.partitionForKey(key, Integer.parseInt(about.get("partitions"))));
            default:
                throw new IllegalArgumentException("unknown command " + tokens[0]);
        }
    }

    // ---- with a broker

    private static String produce(Map<String, String> options, List<Given> given) throws Exception {
        String topic = options.remove("peer.topic");
        String end = options.remove("peer.end");
        boolean transactional = options.containsKey("transactional.id");
        StringBuilder answer = new StringBuilder();
        Map<String, Object> settings = new HashMap<>(options);
        KafkaProducer<byte[], byte[]> producer =
                new KafkaProducer<>(settings, new ByteArraySerializer(), new ByteArraySerializer());
        try {
            if (transactional) {
                producer.initTransactions();
                producer.beginTransaction();
            }
            List<Future<RecordMetadata>> sent = new ArrayList<>();
            for (Given one : given) {
                sent.add(producer.send(
                        new ProducerRecord<>(topic, one.partition, one.timestamp, one.key, one.value, one.headers)));
            }
            producer.flush();
            for (Future<RecordMetadata> future : sent) {
                RecordMetadata metadata = future.get();
                answer.append(' ').append(number(metadata.partition())).append(',').append(number(metadata.offset()));
            }
            if (transactional && end.equals("commit")) {
                producer.commitTransaction();
            } else if (transactional && end.equals("abort")) {
                producer.abortTransaction();
            }
        } finally {
            // An open transaction is left to the coordinator, as by a producer that crashed.
            producer.close(end.equals("leave open") ? Duration.ZERO : Duration.ofSeconds(30));
        }
        return answer.toString();
    }

    private static String consume(Map<String, String> options) {
        String topic = options.remove("peer.topic");
        long deadline = System.nanoTime() + Duration.ofSeconds(Long.parseLong(options.remove("peer.timeout.s"))).toNanos();
        StringBuilder answer = new StringBuilder();
        try (KafkaConsumer<byte[], byte[]> consumer = new KafkaConsumer<>(
                new HashMap<String, Object>(options), new ByteArrayDeserializer(), new ByteArrayDeserializer())) {
            List<TopicPartition> partitions = new ArrayList<>();
            consumer.partitionsFor(topic).forEach(info -> partitions.add(new TopicPartition(topic, info.partition())));
            consumer.assign(partitions);
            consumer.seekToBeginning(partitions);
            // With read_committed these are the last stable offsets: an open transaction bounds what there is to read.
            Map<TopicPartition, Long> ends = consumer.endOffsets(partitions);
            while (partitions.stream().anyMatch(partition -> consumer.position(partition) < ends.get(partition))) {
                if (System.nanoTime() > deadline) {
                    throw new IllegalStateException("the topic was not read to its end in time");
                }
                for (ConsumerRecord<byte[], byte[]> record : consumer.poll(Duration.ofMillis(100))) {
                    if (record.offset() < ends.get(new TopicPartition(topic, record.partition()))) {
                        answer.append(' ').append(consumed(record));
                    }
                }
            }
        }
        return answer.toString();
    }

    private static String consumed(ConsumerRecord<byte[], byte[]> record) {
        return String.join(",", field(record.key()), field(record.value()), number(record.timestamp()),
                number(record.partition()), number(record.offset()), text(record.timestampType().name))
                + headers(record.headers().toArray());
    }

    // ---- without one

    private static String build(Map<String, String> options, List<Given> given) {
        long baseOffset = Long.parseLong(options.get("base_offset"));
        long producerId = Long.parseLong(options.get("producer_id"));
        MemoryRecordsBuilder builder = MemoryRecords.builder(
                ByteBuffer.allocate(1024),
                RecordBatch.CURRENT_MAGIC_VALUE,
                Compression.of(CompressionType.forName(options.get("compression"))).build(),
                TimestampType.forName(options.get("timestamp_type")),
                baseOffset,
                Long.parseLong(options.get("log_append_time")),
                producerId,
                Short.parseShort(options.get("producer_epoch")),
                Integer.parseInt(options.get("base_sequence")),
                Boolean.parseBoolean(options.get("transactional")),
                false,
                Integer.parseInt(options.get("partition_leader_epoch")));
        long next = baseOffset;
        for (Given one : given) {
            long offset = one.offset == null ? next : one.offset;
            builder.appendWithOffset(offset, one.timestamp, one.key, one.value, one.headers.toArray(new Header[0]));
            next = offset + 1;
        }
        return " " + field(builder.build().buffer());
    }

    private static String marker(Map<String, String> options) {
        ControlRecordType type = ControlRecordType.valueOf(options.get("type"));
        MemoryRecords marker = MemoryRecords.withEndTransactionMarker(
                Long.parseLong(options.get("base_offset")),
                Long.parseLong(options.get("timestamp")),
                Integer.parseInt(options.get("partition_leader_epoch")),
                Long.parseLong(options.get("producer_id")),
                Short.parseShort(options.get("producer_epoch")),
                new EndTransactionMarker(type, Integer.parseInt(options.get("coordinator_epoch"))));
        return " " + field(marker.buffer());
    }

    private static String parse(byte[] data) {
        StringBuilder answer = new StringBuilder();
        for (MutableRecordBatch batch : MemoryRecords.readableRecords(ByteBuffer.wrap(data)).batches()) {
            batch.ensureValid();
            answer.append(' ').append(String.join(",", text("batch"), number(batch.magic()), number(batch.baseOffset()),
                    number(batch.lastOffset()), number(batch.producerId()), number(batch.producerEpoch()),
                    number(batch.baseSequence()), number(batch.partitionLeaderEpoch()), text(batch.compressionType().name),
                    text(batch.timestampType().name), number(batch.maxTimestamp()),
                    text(Boolean.toString(batch.isTransactional())), text(Boolean.toString(batch.isControlBatch()))));
            for (Record record : batch) {
                record.ensureValid();
                answer.append(' ').append(String.join(",", text("record"), field(record.key()), field(record.value()),
                        number(record.timestamp()), number(record.offset()), number(record.sequence())))
                        .append(headers(record.headers()));
            }
        }
        return answer.toString();
    }

    // ---- tokens and fields

    private static final class Given {
        byte[] key;
        byte[] value;
        Long timestamp;
        Integer partition;
        Long offset;
        List<Header> headers = new ArrayList<>();
    }

    private static List<Given> records(String[] tokens) {
        List<Given> given = new ArrayList<>();
        for (int at = 2; at < tokens.length; at++) {
            String[] fields = tokens[at].split(",");
            Given one = new Given();
            one.key = bytes(fields[0]);
            one.value = bytes(fields[1]);
            one.timestamp = fields[2].equals(NULL) ? null : Long.valueOf(string(fields[2]));
            one.partition = fields[3].equals(NULL) ? null : Integer.valueOf(string(fields[3]));
            one.offset = fields[4].equals(NULL) ? null : Long.valueOf(string(fields[4]));
            for (int header = 5; header < fields.length; header += 2) {
                one.headers.add(new RecordHeader(string(fields[header]), bytes(fields[header + 1])));
            }
            given.add(one);
        }
        return given;
    }

    private static Map<String, String> map(String token) {
        String[] fields = token.split(",");
        Map<String, String> map = new HashMap<>();
        for (int at = 0; at < fields.length; at += 2) {
            map.put(string(fields[at]), string(fields[at + 1]));
        }
        return map;
    }

    private static byte[] bytes(String field) {
        return field.equals(NULL) ? null : Base64.getDecoder().decode(field.substring(1));
    }

    private static String string(String field) {
        return new String(bytes(field), StandardCharsets.UTF_8);
    }

    private static String field(byte[] value) {
        return value == null ? NULL : "+" + Base64.getEncoder().encodeToString(value);
    }

    private static String field(ByteBuffer value) {
        if (value == null) {
            return NULL;
        }
        byte[] copy = new byte[value.remaining()];
        value.duplicate().get(copy);
        return field(copy);
    }

    private static String text(String value) {
        return field(value.getBytes(StandardCharsets.UTF_8));
    }

    private static String number(long value) {
        return text(Long.toString(value));
    }

    private static String headers(Header[] headers) {
        StringBuilder fields = new StringBuilder();
        for (Header header : headers) {
            fields.append(',').append(text(header.key())).append(',').append(field(header.value()));
        }
        return fields.toString();
    }
}
