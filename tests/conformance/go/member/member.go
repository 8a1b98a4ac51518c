// Package member is what the programs here have in common: their settings, what they are told on standard input, what
// they report. It is the same as in copiers/member.py, which has the words.
package member

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
)

// PollTimeout is how long a member waits for records before it looks at what it was told.
const PollTimeout = 200 * time.Millisecond

var reporting sync.Mutex

// Report writes one event.
func Report(event string, details ...any) {
	reporting.Lock()
	defer reporting.Unlock()
	words := strings.Fields(event + " " + fmt.Sprintln(details...))
	fmt.Println(strings.Join(words, " "))
}

// Settings are the arguments `name=value`.
type Settings map[string]string

// FromArguments reads the settings.
func FromArguments() Settings {
	settings := Settings{}
	for _, argument := range os.Args[1:] {
		name, value, _ := strings.Cut(argument, "=")
		settings[name] = value
	}
	return settings
}

// Int is a setting that is a number; 0 if it is not there.
func (settings Settings) Int(name string) int {
	number, _ := strconv.Atoi(settings[name])
	return number
}

// WaitJoin says that the program is loaded and waits for the word to begin. The context ends when the program is asked
// to leave; every other line comes out of the channel.
func WaitJoin() (leaving context.Context, words <-chan string) {
	joining, told := make(chan struct{}), make(chan string, 16)
	leaving, leave := context.WithCancel(context.Background())
	go func() {
		input := bufio.NewScanner(os.Stdin)
		joined := false
		for input.Scan() {
			if input.Text() != "join" {
				told <- input.Text()
			} else if !joined {
				joined = true
				close(joining)
			}
		}
		leave()
		if !joined {
			close(joining)
		}
	}()
	Report("ready")
	<-joining
	return leaving, told
}

// GroupOptions make the client a member as the settings say.
func (settings Settings) GroupOptions() []kgo.Opt {
	chosen := []kgo.Opt{
		kgo.SeedBrokers(settings["bootstrap"]),
		kgo.ConsumerGroup(settings["group"]),
		kgo.ConsumeTopics(settings["source"]),
		kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()),
		kgo.SessionTimeout(time.Duration(settings.Int("session_timeout_ms")) * time.Millisecond),
		kgo.HeartbeatInterval(500 * time.Millisecond),
	}
	if instance := settings["instance_id"]; instance != "" {
		chosen = append(chosen, kgo.InstanceID(instance))
	}
	switch settings["protocol"] {
	case "consumer":
		return append(chosen, kgo.Balancers(kgo.StickyBalancer()), kgo.ServerSideBalancer())
	case "cooperative":
		return append(chosen, kgo.Balancers(kgo.CooperativeStickyBalancer()))
	default:
		return append(chosen, kgo.Balancers(kgo.RangeBalancer()))
	}
}

// ReportPartitions is a callback that reports the partitions it is given.
func ReportPartitions(event string) func(context.Context, *kgo.Client, map[string][]int32) {
	return func(_ context.Context, _ *kgo.Client, topics map[string][]int32) {
		for _, partitions := range topics {
			slices.Sort(partitions)
			Report(event, strings.Trim(fmt.Sprint(partitions), "[]"))
		}
	}
}
