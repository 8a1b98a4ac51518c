import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Collection;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import java.util.concurrent.ConcurrentLinkedQueue;
import java.util.concurrent.CountDownLatch;
import org.apache.kafka.clients.consumer.ConsumerRebalanceListener;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.CooperativeStickyAssignor;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.consumer.OffsetAndTimestamp;
import org.apache.kafka.clients.consumer.RangeAssignor;
import org.apache.kafka.common.KafkaException;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;

/**
 * Reads a topic as a member of a group with the Java client and commits what it has read. It takes the same arguments
 * and words and reports the same events as the Python members: copiers/member.py has them.
 */
public class Reader implements ConsumerRebalanceListener {
    private static final ConcurrentLinkedQueue<String> WORDS = new ConcurrentLinkedQueue<>();
    private static volatile boolean leaving = false;

    private final KafkaConsumer<byte[], byte[]> consumer;

    public static void main(String[] arguments) throws Exception {
        Map<String, String> settings = new HashMap<>();
        for (String argument : arguments) {
            String[] pair = argument.split("=", 2);
            settings.put(pair[0], pair[1]);
        }
        report("ready");
        CountDownLatch joining = new CountDownLatch(1);
        Thread listener = new Thread(() -> listen(joining));
        listener.setDaemon(true);
        listener.start();
        joining.await();
        new Reader(settings).run(settings.get("source"));
    }

    private static void listen(CountDownLatch joining) {
        try (BufferedReader words = new BufferedReader(new InputStreamReader(System.in))) {
            for (String word = words.readLine(); word != null; word = words.readLine()) {
                if (word.equals("join")) {
                    joining.countDown();
                } else {
                    WORDS.add(word);
                }
            }
        } catch (java.io.IOException ended) {
            report("failed", ended);
        }
        leaving = true;
        joining.countDown();
    }

    private static synchronized void report(String event, Object... details) {
        StringBuilder line = new StringBuilder(event);
        for (Object detail : details) {
            line.append(' ').append(String.valueOf(detail).replaceAll("\\s+", " "));
        }
        System.out.println(line);
        System.out.flush();
    }

    private Reader(Map<String, String> settings) {
        Map<String, Object> all = new HashMap<>();
        all.put("bootstrap.servers", settings.get("bootstrap"));
        all.put("group.id", settings.get("group"));
        all.put("auto.offset.reset", "earliest");
        all.put("enable.auto.commit", false);
        all.put("metadata.max.age.ms", "500");
        if (settings.containsKey("instance_id")) {
            all.put("group.instance.id", settings.get("instance_id"));
        }
        if (settings.get("protocol").equals("consumer")) {
            all.put("group.protocol", "consumer");
        } else {
            boolean cooperative = settings.get("protocol").equals("cooperative");
            Class<?> assignor = cooperative ? CooperativeStickyAssignor.class : RangeAssignor.class;
            all.put("partition.assignment.strategy", assignor.getName());
            all.put("session.timeout.ms", settings.get("session_timeout_ms"));
            all.put("heartbeat.interval.ms", "500");
        }
        consumer = new KafkaConsumer<>(all, new ByteArrayDeserializer(), new ByteArrayDeserializer());
    }

    private void run(String topic) {
        consumer.subscribe(List.of(topic), this);
        try {
            while (!leaving) {
                read();
                String word = WORDS.poll();
                if (word != null) {
                    seek(Long.parseLong(word.substring("seek ".length())));
                }
            }
        } finally {
            consumer.close();
        }
    }

    private void read() {
        List<String> values = new ArrayList<>();
        for (ConsumerRecord<byte[], byte[]> record : consumer.poll(Duration.ofMillis(200))) {
            values.add(new String(record.value(), StandardCharsets.UTF_8));
        }
        if (values.isEmpty()) {
            return;
        }
        try {
            consumer.commitSync();
            report("read", values.toArray());
        } catch (KafkaException failure) {  // refused in a rebalance: whoever owns the partitions next reads them again
            report("failed", failure);
        }
    }

    private void seek(long timestamp) {
        Map<TopicPartition, Long> asked = new HashMap<>();
        consumer.assignment().forEach(partition -> asked.put(partition, timestamp));
        Map<Integer, Long> found = new TreeMap<>();
        for (Map.Entry<TopicPartition, OffsetAndTimestamp> one : consumer.offsetsForTimes(asked).entrySet()) {
            consumer.seek(one.getKey(), one.getValue().offset());
            found.put(one.getKey().partition(), one.getValue().offset());
        }
        report("sought", found.entrySet().stream().map(one -> one.getKey() + ":" + one.getValue()).toArray());
    }

    @Override
    public void onPartitionsAssigned(Collection<TopicPartition> partitions) {
        report("assigned", partitions.stream().map(TopicPartition::partition).sorted().toArray());
    }

    @Override
    public void onPartitionsRevoked(Collection<TopicPartition> partitions) {
        report("revoked", partitions.stream().map(TopicPartition::partition).sorted().toArray());
    }
}
