// Reads a topic as a member of a group with franz-go and commits what it has read.
package main

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
	"semel.test/members/member"
)

const requestTimeout = 30 * time.Second

type reader struct {
	client *kgo.Client
	topic  string

	mutex sync.Mutex // the client calls back from its own goroutines
	owned map[int32]bool
}

func main() {
	settings := member.FromArguments()
	leaving, words := member.WaitJoin()
	if err := run(settings, leaving, words); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(settings member.Settings, leaving context.Context, words <-chan string) error {
	own := &reader{topic: settings["source"], owned: map[int32]bool{}}
	client, err := kgo.NewClient(append(settings.GroupOptions(),
		kgo.DisableAutoCommit(),
		kgo.AllowAutoTopicCreation(),
		kgo.MetadataMinAge(100*time.Millisecond),
		kgo.MetadataMaxAge(500*time.Millisecond),
		kgo.OnPartitionsAssigned(own.changed("assigned", true)),
		kgo.OnPartitionsRevoked(own.changed("revoked", false)),
		kgo.OnPartitionsLost(own.changed("revoked", false)),
	)...)
	if err != nil {
		return err
	}
	defer client.Close()
	own.client = client
	for leaving.Err() == nil {
		own.read(leaving)
		select {
		case word := <-words:
			if err := own.seek(strings.TrimPrefix(word, "seek ")); err != nil {
				return err
			}
		default:
		}
	}
	return nil
}

func (own *reader) changed(event string, ours bool) func(context.Context, *kgo.Client, map[string][]int32) {
	report := member.ReportPartitions(event)
	return func(ctx context.Context, client *kgo.Client, topics map[string][]int32) {
		own.mutex.Lock()
		for _, partition := range topics[own.topic] {
			own.owned[partition] = ours
		}
		own.mutex.Unlock()
		report(ctx, client, topics)
	}
}

func (own *reader) read(leaving context.Context) {
	waiting, stop := context.WithTimeout(leaving, member.PollTimeout)
	defer stop()
	var values []any
	var records []*kgo.Record
	own.client.PollFetches(waiting).EachRecord(func(record *kgo.Record) {
		values = append(values, string(record.Value))
		records = append(records, record)
	})
	if len(values) == 0 {
		return
	}
	// Refused in a rebalance: whoever owns the partitions next reads them again.
	if err := own.client.CommitRecords(context.Background(), records...); err != nil {
		member.Report("failed", err)
		return
	}
	member.Report("read", values...)
}

func (own *reader) seek(timestamp string) error {
	at, err := strconv.ParseInt(timestamp, 10, 64)
	if err != nil {
		return err
	}
	asked := kmsg.NewListOffsetsRequestTopic()
	asked.Topic = own.topic
	own.mutex.Lock()
	for number, ours := range own.owned {
		if ours {
			partition := kmsg.NewListOffsetsRequestTopicPartition()
			partition.Partition, partition.Timestamp = number, at
			asked.Partitions = append(asked.Partitions, partition)
		}
	}
	own.mutex.Unlock()
	request := kmsg.NewPtrListOffsetsRequest()
	request.Topics = append(request.Topics, asked)
	asking, stop := context.WithTimeout(context.Background(), requestTimeout)
	defer stop()
	answer, err := request.RequestWith(asking, own.client)
	if err != nil {
		return err
	}
	offsets := map[int32]kgo.EpochOffset{}
	var found []string
	for _, partition := range answer.Topics[0].Partitions {
		offsets[partition.Partition] = kgo.EpochOffset{Epoch: partition.LeaderEpoch, Offset: partition.Offset}
		found = append(found, fmt.Sprintf("%d:%d", partition.Partition, partition.Offset))
	}
	slices.Sort(found)
	own.client.SetOffsets(map[string]map[int32]kgo.EpochOffset{own.topic: offsets})
	member.Report("sought", strings.Join(found, " "))
	return nil
}
