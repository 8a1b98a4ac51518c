import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.HashMap;
import java.util.List;
import java.util.Locale;
import java.util.Map;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.CooperativeStickyAssignor;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.consumer.OffsetAndMetadata;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;
import org.apache.kafka.common.serialization.ByteArraySerializer;

/**
 * Transactions of one record with the Java client, as many as each line on standard input asks for: "produce 100" writes
 * 100 records, "copy 100" reads and writes 100, each with its offset. The answer is the seconds that they took.
 */
public class OneRecordTransactions {
    private final String target;
    private final KafkaProducer<byte[], byte[]> producer;
    private final KafkaConsumer<byte[], byte[]> consumer;

    /** Arguments: bootstrap, a name for the group and the transactional id, topic to read, topic to write. */
    public static void main(String[] arguments) throws Exception {
        new OneRecordTransactions(arguments[0], arguments[1], arguments[2], arguments[3]).serve();
    }

    private OneRecordTransactions(String bootstrap, String name, String source, String target) {
        this.target = target;
        // Nothing here waits for more records: linger.ms is 0, and a fetch is answered as soon as there is a byte.
        Map<String, Object> writing = new HashMap<>();
        writing.put("bootstrap.servers", bootstrap);
        writing.put("transactional.id", name);
        writing.put("linger.ms", 0);
        producer = new KafkaProducer<>(writing, new ByteArraySerializer(), new ByteArraySerializer());
        producer.initTransactions();
        Map<String, Object> reading = new HashMap<>();
        reading.put("bootstrap.servers", bootstrap);
        reading.put("group.id", name);
        reading.put("auto.offset.reset", "earliest");
        reading.put("enable.auto.commit", false);
        reading.put("isolation.level", "read_committed");
        reading.put("max.poll.records", 1);
        reading.put("partition.assignment.strategy", CooperativeStickyAssignor.class.getName());
        consumer = new KafkaConsumer<>(reading, new ByteArrayDeserializer(), new ByteArrayDeserializer());
        consumer.subscribe(List.of(source));
    }

    private void serve() throws Exception {
        BufferedReader lines = new BufferedReader(new InputStreamReader(System.in));
        for (String line = lines.readLine(); line != null; line = lines.readLine()) {
            String[] words = line.split(" ");
            int count = Integer.parseInt(words[1]);
            long started = System.nanoTime();
            if (words[0].equals("copy")) {
                copy(count);
            } else {
                produce(count);
            }
            System.out.println((System.nanoTime() - started) / 1e9);
            System.out.flush();
        }
        consumer.close();
        producer.close();
    }

    private void produce(int count) {
        byte[] value = "x".repeat(100).getBytes(StandardCharsets.US_ASCII);
        for (int done = 0; done < count; done++) {
            producer.beginTransaction();
            producer.send(new ProducerRecord<>(target, 0, null, value));
            producer.commitTransaction();
        }
    }

    private void copy(int count) {
        int done = 0;
        while (done < count) {
            for (ConsumerRecord<byte[], byte[]> record : consumer.poll(Duration.ofSeconds(1))) {
                producer.beginTransaction();
                producer.send(new ProducerRecord<>(target, record.key(), upper(record.value())));
                TopicPartition partition = new TopicPartition(record.topic(), record.partition());
                producer.sendOffsetsToTransaction(
                        Map.of(partition, new OffsetAndMetadata(record.offset() + 1)), consumer.groupMetadata());
                producer.commitTransaction();
                done++;
            }
        }
    }

    private static byte[] upper(byte[] value) {
        String text = new String(value, StandardCharsets.US_ASCII);
        return text.toUpperCase(Locale.ROOT).getBytes(StandardCharsets.US_ASCII);
    }
}
