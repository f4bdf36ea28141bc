package redislock

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	"example.com/redislock/internal/virtual"
)

// books collects the events of one or more Lockers and checks that they balance. The zero value is ready.
type books struct {
	mu     sync.Mutex
	events []Event
}

func (b *books) observe(_ context.Context, e Event) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.events = append(b.events, e)
}

// of returns the events of some kinds, or all, in the order in which they happened.
func (b *books) of(kinds ...EventKind) []Event {
	b.mu.Lock()
	defer b.mu.Unlock()
	var found []Event
	for _, e := range b.events {
		if len(kinds) == 0 || slices.Contains(kinds, e.Kind) {
			found = append(found, e)
		}
	}
	return found
}

func (b *books) count(kinds ...EventKind) int { return len(b.of(kinds...)) }

// String lists the kinds and how often each was seen, for messages.
func (b *books) String() string {
	counts := map[EventKind]int{}
	for _, e := range b.of() {
		counts[e.Kind]++
	}
	var parts []string
	for kind, n := range counts {
		parts = append(parts, fmt.Sprintf("%s=%d", kind, n))
	}
	slices.Sort(parts)
	return strings.Join(parts, " ")
}

// want fails the test unless the books say just this, in the words of String.
func (b *books) want(t *testing.T, counts string) {
	t.Helper()
	if got := b.String(); got != counts {
		t.Errorf("the books say %s, want %s", got, counts)
	}
}

// balance fails the test unless every lock that was acquired has ended once, and tasks have had outcomes in all. Call it
// when nothing runs any more.
func (b *books) balance(t *testing.T, tasks int) {
	t.Helper()
	begun, ended := b.count(EventAcquired), b.count(EventReleased, EventLost, EventAbandoned)
	if begun != ended {
		t.Errorf("%d locks acquired, %d ended: %s", begun, ended, b)
	}
	open := map[string]int{} // by holder, which tells locks apart well enough: task and time
	for _, e := range b.of(EventAcquired, EventReleased, EventLost, EventAbandoned) {
		id := fmt.Sprint(e.Key, e.Holder)
		if e.Kind == EventAcquired {
			open[id]++
		} else {
			open[id]--
		}
	}
	for id, n := range open {
		if n != 0 {
			t.Errorf("lock %s: begun and ended do not match (%+d)", id, n)
		}
	}
	outcomes := b.count(EventRan, EventSkipped, EventDone, EventRequeued, EventArchived, EventRefused, EventPassed)
	if outcomes != tasks {
		t.Errorf("%d outcomes for %d deliveries: %s", outcomes, tasks, b)
	}
}

// locker returns a Locker of the host that logs into the world's log and reports to b.
func locker(h *virtual.Host, b *books, opts ...Option) *Locker {
	h.World.T.Helper()
	l, err := New(h.RDB, WithLogger(h.Logger), WithObserver(b.observe), Options(opts...))
	if err != nil {
		h.World.T.Fatal(err)
	}
	return l
}

// valueOf returns what is at the key while the lock is held.
func valueOf(k *Lock) string { return k.claim.Lease.(*redisLease).value.(string) }
