import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.time.Duration;
import java.util.Collection;
import java.util.HashMap;
import java.util.HashSet;
import java.util.List;
import java.util.Map;
import java.util.Random;
import java.util.Set;
import java.util.concurrent.CountDownLatch;
import org.apache.kafka.clients.consumer.ConsumerRebalanceListener;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.ConsumerRecords;
import org.apache.kafka.clients.consumer.CooperativeStickyAssignor;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.consumer.OffsetAndMetadata;
import org.apache.kafka.clients.consumer.RangeAssignor;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.KafkaException;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.errors.InvalidProducerEpochException;
import org.apache.kafka.common.errors.OutOfOrderSequenceException;
import org.apache.kafka.common.errors.ProducerFencedException;
import org.apache.kafka.common.errors.TimeoutException;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;
import org.apache.kafka.common.serialization.ByteArraySerializer;

/**
 * Copies a topic in transactions with the Java client. It takes the same arguments and words and reports the same
 * events as the Python members: copiers/member.py has them.
 */
public class Copier implements ConsumerRebalanceListener {
    private static volatile boolean leaving = false;

    private final Map<String, String> settings;
    private final String source;
    private final String target;
    private final int abortOneIn;
    private final Random random;
    private int transactions = 0;
    private int abortedPlace = 0;
    private final KafkaConsumer<byte[], byte[]> consumer;
    private KafkaProducer<byte[], byte[]> producer;

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
        new Copier(settings).run();
    }

    private static void listen(CountDownLatch joining) {
        try (BufferedReader words = new BufferedReader(new InputStreamReader(System.in))) {
            for (String word = words.readLine(); word != null; word = words.readLine()) {
                if (word.equals("join")) {
                    joining.countDown();
                }
            }
        } catch (java.io.IOException ended) {
            report("failed", ended);
        }
        leaving = true;
        joining.countDown();
    }

    private static synchronized void report(Object... words) {
        StringBuilder line = new StringBuilder();
        for (Object word : words) {
            line.append(line.length() == 0 ? "" : " ").append(String.valueOf(word).replaceAll("\\s+", " "));
        }
        System.out.println(line);
        System.out.flush();
    }

    private Copier(Map<String, String> settings) {
        this.settings = settings;
        source = settings.get("source");
        target = settings.get("target");
        abortOneIn = Integer.parseInt(settings.get("abort_one_in"));
        random = new Random(settings.get("seed").hashCode());
        producer = newProducer();
        consumer = new KafkaConsumer<>(consumerSettings(), new ByteArrayDeserializer(), new ByteArrayDeserializer());
    }

    private Map<String, Object> consumerSettings() {
        Map<String, Object> all = new HashMap<>();
        all.put("bootstrap.servers", settings.get("bootstrap"));
        all.put("group.id", settings.get("group"));
        all.put("auto.offset.reset", "earliest");
        all.put("enable.auto.commit", false);
        all.put("isolation.level", "read_committed");
        all.put("max.poll.records", settings.get("transaction_records"));
        if (settings.get("protocol").equals("consumer")) {
            all.put("group.protocol", "consumer");
        } else {
            boolean cooperative = settings.get("protocol").equals("cooperative");
            Class<?> assignor = cooperative ? CooperativeStickyAssignor.class : RangeAssignor.class;
            all.put("partition.assignment.strategy", assignor.getName());
            all.put("session.timeout.ms", settings.get("session_timeout_ms"));
            all.put("heartbeat.interval.ms", "500");
        }
        return all;
    }

    private KafkaProducer<byte[], byte[]> newProducer() {
        Map<String, Object> all = new HashMap<>();
        all.put("bootstrap.servers", settings.get("bootstrap"));
        all.put("transactional.id", settings.get("transactional_id"));
        KafkaProducer<byte[], byte[]> started =
                new KafkaProducer<>(all, new ByteArraySerializer(), new ByteArraySerializer());
        started.initTransactions();
        return started;
    }

    private void run() {
        consumer.subscribe(List.of(source), this);
        try {
            while (!leaving) {
                // Callbacks run inside poll, where no transaction is open: what it returns is of the current assignment.
                ConsumerRecords<byte[], byte[]> records = consumer.poll(Duration.ofMillis(200));
                if (!records.isEmpty()) {
                    copy(records);
                }
            }
        } finally {
            consumer.close();
            producer.close();
        }
    }

    @Override
    public void onPartitionsAssigned(Collection<TopicPartition> partitions) {
        reportPartitions("assigned", partitions);
    }

    @Override
    public void onPartitionsRevoked(Collection<TopicPartition> partitions) {
        reportPartitions("revoked", partitions);
    }

    private static void reportPartitions(String event, Collection<TopicPartition> partitions) {
        StringBuilder line = new StringBuilder(event);
        partitions.stream().mapToInt(TopicPartition::partition).sorted().forEach(one -> line.append(' ').append(one));
        report(line);
    }

    private void copy(ConsumerRecords<byte[], byte[]> records) {
        try {
            producer.beginTransaction();
            Map<TopicPartition, OffsetAndMetadata> ends = new HashMap<>();
            for (ConsumerRecord<byte[], byte[]> record : records) {
                producer.send(new ProducerRecord<>(target, record.key(), record.value()));
                ends.put(
                        new TopicPartition(record.topic(), record.partition()),
                        new OffsetAndMetadata(record.offset() + 1));
            }
            producer.sendOffsetsToTransaction(ends, consumer.groupMetadata());
            if (wantsAbort()) {
                producer.flush();  // or the records would be dropped here instead of aborted there
                producer.abortTransaction();
                report("aborted", records.count());
                rewind(records.partitions());
                return;
            }
            producer.commitTransaction();
            report("committed", records.count());
        } catch (KafkaException failure) {
            report("failed", failure);
            giveUp(failure);
            rewind(records.partitions());
        }
    }

    /** One in every `abort_one_in` transactions, at a random place among them. */
    private boolean wantsAbort() {
        int place = transactions++ % abortOneIn;
        if (place == 0) {
            abortedPlace = random.nextInt(abortOneIn);
        }
        return place == abortedPlace;
    }

    private void giveUp(KafkaException failure) {
        boolean fatal = failure instanceof ProducerFencedException
                || failure instanceof OutOfOrderSequenceException
                || failure instanceof InvalidProducerEpochException
                || failure instanceof TimeoutException;
        if (!fatal) {
            try {
                producer.abortTransaction();
                return;
            } catch (KafkaException worse) {
                report("failed", worse);
            }
        }
        producer.close(Duration.ZERO);
        producer = newProducer();
    }

    /** Back to the committed positions of what was not copied after all and is still ours. */
    private void rewind(Set<TopicPartition> partitions) {
        Set<TopicPartition> ours = new HashSet<>(partitions);
        ours.retainAll(consumer.assignment());
        Map<TopicPartition, OffsetAndMetadata> committed = consumer.committed(ours);
        for (TopicPartition partition : ours) {
            OffsetAndMetadata position = committed.get(partition);
            consumer.seek(partition, position == null ? 0 : position.offset());
        }
    }
}
