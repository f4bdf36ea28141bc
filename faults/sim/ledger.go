package sim

import (
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"example.com/redislock"
	"example.com/redislock/faults/history"
	"example.com/redislock/internal/virtual"
)

const prefix = "redislock:"

// ledger is a model of the locks, kept by what Redis did, one command after the other. It says what no lock may ask for.
type ledger struct {
	world *world

	mu     sync.Mutex
	owners map[string]owner // by key
	claims map[claimID]*claim
}

// owner is what a key should hold.
type owner struct {
	value string
	until time.Time
}

// claimID is what a lock's value and its events have in common.
type claimID struct {
	host, key, task string
	since           int64 // ms
}

// claim is a lock that Redis has given.
type claim struct {
	value    string
	process  string // empty until the holder has it
	delivery int64
	sets     []int64 // when Redis set its TTL
}

func newLedger(w *world) *ledger {
	return &ledger{world: w, owners: make(map[string]owner), claims: make(map[claimID]*claim)}
}

// verb tells the commands of a lock by their shape; "" for others. args are its value and what follows.
func verb(c virtual.Command) (name, key string, args []string) {
	if c.Name == "SET" && len(c.Args) > 2 && strings.HasPrefix(c.Args[0], prefix) {
		return "acquire", c.Args[0], []string{c.Args[1], c.Args[len(c.Args)-1]}
	}
	if c.Script == "" || len(c.Args) < 4 || !strings.HasPrefix(c.Args[2], prefix) {
		return "", "", nil
	}
	if c.Args[1] == "2" { // with the fence counter
		return "acquire", c.Args[2], c.Args[4:]
	}
	switch args = c.Args[3:]; len(args) {
	case 1:
		return "release", c.Args[2], args
	case 2:
		return "extend", c.Args[2], args
	case 3:
		return "done", c.Args[2], args
	}
	return "", "", nil
}

// see is the tap of a host's link for locks.
func (l *ledger) see(host string, c virtual.Command, reply []byte) {
	name, key, args := verb(c)
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(c.Args) > 0 && strings.HasPrefix(c.Args[0], prefix) {
		l.expect(name == "acquire", c.Args[0], "%s, whoever holds it", c)
	}
	if name == "" || reply[0] == '-' { // refused, or a script that Redis does not know yet
		return
	}
	answer, value := strings.TrimSpace(string(reply)), args[0]
	yes, now := answer == ":1", time.Now()
	has := l.owners[key]
	if !now.Before(has.until) {
		has = owner{}
	}
	switch name {
	case "acquire":
		switch {
		case c.Script != "":
			yes = strings.Contains(answer, value)
		case slices.Contains(c.Args, "get"): // SET answers with what was there before
			yes = answer == "$-1" || answer == "_"
		default:
			yes = answer == "+OK"
		}
		again := c.Script != "" && has.value == value
		l.expect(yes == (has.value == "" || again), key, "acquire for %s: %q, while it is held by %q", value, answer, has.value)
	case "extend":
		l.expect(yes == (has.value == value), key, "extend for %s: %s, while it is held by %q", value, answer, has.value)
	case "release":
		l.expect(yes == (has.value == value), key, "release for %s: %s, while it is held by %q", value, answer, has.value)
	case "done":
		marker := args[1]
		l.expect(yes == (has.value == "" || has.value == value || has.value == marker), key, "marker for %s: %s, while it is held by %q", value, answer, has.value)
		if yes && has.value != marker {
			l.set(key, marker, args[2])
		}
	}
	switch {
	case !yes:
	case name == "acquire", name == "extend":
		l.set(key, value, args[1])
		l.claim(host, key, value)
	case name == "release":
		delete(l.owners, key)
	}
	l.checkTTL(key)
}

func (l *ledger) expect(ok bool, key, format string, args ...any) {
	if !ok {
		l.world.add(history.Record{Kind: history.KindModel, Key: key, Err: fmt.Sprintf(format, args...)})
	}
}

func (l *ledger) set(key, value, ms string) {
	n, _ := strconv.Atoi(ms)
	l.owners[key] = owner{value, time.Now().Add(time.Duration(n) * time.Millisecond)}
}

// claim notes that Redis has set the TTL of a lock.
func (l *ledger) claim(host, key, value string) {
	id := claimID{host: host, key: key}
	id.task, id.since = holder(value)
	k := l.claims[id]
	if k == nil || k.value != value {
		k = &claim{value: value}
		l.claims[id] = k
	}
	k.sets = append(k.sets, l.world.now())
}

// checkTTL looks at a key for a TTL that no lock and no marker may have.
func (l *ledger) checkTTL(key string) {
	redis := l.world.Redis
	if left := redis.TTL(key); redis.Exists(key) && (left <= 0 || left > l.world.times(longest)) {
		l.world.add(history.Record{Kind: history.KindImmortal, Key: key, Err: fmt.Sprint("TTL ", left)})
	}
}

// holder reads who wrote a value.
func holder(value string) (task string, since int64) {
	_, text, _ := strings.Cut(value, " ")
	var h redislock.Holder
	if json.Unmarshal([]byte(text), &h) != nil {
		return "", 0
	}
	return h.TaskID, h.Since.UnixMilli()
}

// acquired notes which delivery has got a lock.
func (l *ledger) acquired(host, process string, delivery int64, e redislock.Event) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if k := l.claims[claimID{host, e.Key, e.TaskID, e.Holder.Since.UnixMilli()}]; k != nil {
		k.process, k.delivery = process, delivery
	}
}

// released wants a lock that is said to be released not to be there any more.
func (l *ledger) released(host string, e redislock.Event) {
	l.mu.Lock()
	defer l.mu.Unlock()
	k := l.claims[claimID{host, e.Key, e.TaskID, e.Holder.Since.UnixMilli()}]
	if has := l.owners[e.Key]; k != nil && time.Now().Before(has.until) {
		l.expect(has.value != k.value, e.Key, "said to be released by %s, which still holds it", k.value)
	}
}

// forget is for a key that is deleted behind its holder's back.
func (l *ledger) forget(keys ...string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, key := range keys {
		delete(l.owners, key)
	}
}

// stolen is for a key that is overwritten behind its holder's back.
func (l *ledger) stolen(key, value string, ttl time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.owners[key] = owner{value, time.Now().Add(ttl)}
}

// records are the claims, for the history.
func (l *ledger) records() (all []history.Record) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for id, k := range l.claims {
		process := k.process
		if process == "" {
			process = id.host
		}
		for _, t := range k.sets {
			all = append(all, history.Record{T: t, Kind: history.KindSet, Process: process, Delivery: k.delivery, Task: id.task, Key: id.key})
		}
	}
	return all
}
