// Copies a topic in transactions with franz-go.
package main

import (
	"context"
	"fmt"
	"hash/fnv"
	"math/rand"
	"os"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
	"semel.test/members/member"
)

const (
	endTimeout         = 30 * time.Second
	transactionTimeout = 10 * time.Second
)

func main() {
	settings := member.FromArguments()
	leaving, _ := member.WaitJoin()
	if err := run(settings, leaving); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(settings member.Settings, leaving context.Context) error {
	hash := fnv.New64()
	hash.Write([]byte(settings["seed"]))
	random := rand.New(rand.NewSource(int64(hash.Sum64())))
	abortOneIn := settings.Int("abort_one_in")
	session, err := kgo.NewGroupTransactSession(append(settings.GroupOptions(),
		kgo.FetchIsolationLevel(kgo.ReadCommitted()),
		kgo.TransactionalID(settings["transactional_id"]),
		// The client asks for its producer id at its first transaction. Before that, what a killed one left open holds
		// back the group's offsets, so that a successor comes to no transaction: the broker has to end it by time.
		kgo.TransactionTimeout(transactionTimeout),
		kgo.DefaultProduceTopic(settings["target"]),
		kgo.OnPartitionsAssigned(member.ReportPartitions("assigned")),
		kgo.OnPartitionsRevoked(member.ReportPartitions("revoked")),
		kgo.OnPartitionsLost(member.ReportPartitions("revoked")),
	)...)
	if err != nil {
		return err
	}
	defer session.Close()
	transactions, abortedPlace := 0, 0 // one in every abortOneIn transactions, at a random place among them
	for leaving.Err() == nil {
		waiting, stop := context.WithTimeout(leaving, member.PollTimeout)
		fetches := session.PollRecords(waiting, settings.Int("transaction_records"))
		stop()
		if fetches.NumRecords() == 0 {
			continue
		}
		place := transactions % abortOneIn
		if place == 0 {
			abortedPlace = random.Intn(abortOneIn)
		}
		transactions++
		if err := copyOnce(session, fetches, place == abortedPlace); err != nil {
			return err
		}
	}
	return nil
}

// copyOnce makes one transaction. The session itself goes back to the committed positions when it does not commit.
func copyOnce(session *kgo.GroupTransactSession, fetches kgo.Fetches, abort bool) error {
	if err := session.Begin(); err != nil {
		return err
	}
	var failed kgo.FirstErrPromise
	fetches.EachRecord(func(record *kgo.Record) {
		session.Produce(context.Background(), &kgo.Record{Key: record.Key, Value: record.Value}, failed.Promise())
	})
	failure := failed.Err() // waits until all are written, so that an abort is one of records in the log
	if failure != nil {
		member.Report("failed", failure)
	}
	ending, stop := context.WithTimeout(context.Background(), endTimeout)
	defer stop()
	committed, err := session.End(ending, kgo.TransactionEndTry(!abort && failure == nil))
	switch {
	case err != nil:
		return err
	case committed:
		member.Report("committed", fetches.NumRecords())
	case abort && failure == nil:
		member.Report("aborted", fetches.NumRecords())
	default:
		member.Report("failed", "the commit became an abort")
	}
	return nil
}
