// Package sim plays random worlds in virtual time: several hosts, each a real asynq server with its own locks and its own two
// links that fail, a producer and two schedulers, and a Redis that forgets, is robbed and restarts. Each world leaves a history,
// which the checker of package history reads: with limits of milliseconds, since nothing is late here by chance.
//
//	go test ./sim                                # the usual worlds, with fixed seeds; with -short or -race a few
//	go test ./sim -sim.seed 1000 -sim.for 10m    # as many as begin within 10 minutes, with other seeds
//	go test ./sim -sim.seed 7 -sim.worlds 1      # one again; -sim.history prints all that happened in it, if it fails
//
// What a world is made of and what happens in it, and when, comes from its seed: the TTL of its locks, from 1 s to 10 min, by
// which everything else is measured, its kinds of tasks, what is enqueued, how each handler behaves, what breaks. The order in
// which goroutines run within one and the same instant does not, so a world that is played again may take another turn.
//
// The ledger is a model of the locks. It sees every command that Redis does, with its reply and in Redis's order, and tells
// the checker what it did to whose lock at which moment.
package sim

import (
	"cmp"
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"example.com/redislock"
	"example.com/redislock/faults/history"
	"example.com/redislock/internal/virtual"
	"github.com/hibiken/asynq"
)

const (
	bursts  = 60 // of tasks in a world
	longest = 3  // in TTLs: no lock and no marker has a longer one
)

// Result is what came of a world.
type Result struct {
	history.Findings
	Lasted   time.Duration
	TTL      time.Duration
	Kinds    []string // of tasks
	History  []history.Record
	Outcomes map[string]int // of the tasks, by their kind and the event's
}

// world is one world under way.
type world struct {
	*virtual.World
	seed      uint64
	ttl       time.Duration
	length    time.Duration // of the time in which things happen
	kinds     []kind
	keys      int     // of each kind
	lastShare float64 // of tasks whose first attempt is their last
	hosts     []*host
	ledger    *ledger
	bare      *redislock.Locker // over a link without faults

	deliveries atomic.Int64
	handlers   atomic.Int64 // that run, or wait for their lock
	working    atomic.Int64 // of these, in their critical section
	worked     atomic.Int64 // when the last of these was over

	mu       sync.Mutex
	records  []history.Record
	outcomes map[string]int
	cancels  map[string]func() // by task
}

// Play plays the world of a seed to its end.
func Play(t *testing.T, seed uint64) (result Result) {
	t.Helper()
	virtual.Run(t, func(t *testing.T, v *virtual.World) {
		w := newWorld(v, seed)
		w.play()
		result = w.result()
	})
	return result
}

func newWorld(v *virtual.World, seed uint64) *world {
	w := &world{World: v, seed: seed, outcomes: make(map[string]int), cancels: make(map[string]func())}
	r := w.rand("world")
	w.ttl = ttls[r.IntN(len(ttls))]
	w.length = max(w.times(35), 3*time.Minute)
	w.keys = 1 + r.IntN(2)
	w.lastShare = 0.2
	if w.ttl >= time.Minute { // who waits asks several times a second, which costs real time
		w.lastShare = 0.02
	}
	for _, i := range r.Perm(len(kinds))[:4+r.IntN(3)] {
		w.kinds = append(w.kinds, kinds[i])
	}
	w.ledger = newLedger(w)
	var err error
	if w.bare, err = redislock.New(v.RDB); err != nil {
		v.T.Fatal(err)
	}
	for i := range 2 + r.IntN(3) {
		w.hosts = append(w.hosts, newHost(w, fmt.Sprint("h", i), r))
	}
	return w
}

// play lets things happen for a time, mends everything, and waits until all is done.
func (w *world) play() {
	for _, h := range w.hosts {
		h.start()
	}
	var schedulers []*asynq.Scheduler
	for _, h := range w.hosts[:2] {
		schedulers = append(schedulers, h.schedule())
	}
	var troubles sync.WaitGroup
	for _, h := range w.hosts {
		troubles.Go(func() { w.trouble(w.rand(h.Name+" locks"), lockTroubles, h, 2.5, h.LockLink.Heal) })
		troubles.Go(func() { w.trouble(w.rand(h.Name+" queue"), queueTroubles, h, 15, h.QueueLink.Heal) })
		troubles.Go(func() { w.trouble(w.rand(h.Name+" server"), serverTroubles, h, 20, nil) })
	}
	troubles.Go(func() { w.trouble(w.rand("data"), dataTroubles, nil, 4, nil) })
	w.produce()
	troubles.Wait()
	for _, s := range schedulers {
		s.Shutdown()
	}
	w.drain()
	for _, h := range w.hosts {
		troubles.Go(h.stop)
	}
	troubles.Wait()
	time.Sleep(w.ttl + 10*time.Millisecond)
	w.inspectKeys()
	for w.handlers.Load() > 0 {
		time.Sleep(w.ttl)
	}
	time.Sleep(w.times(2) + 15*time.Second) // for calls that hang
	w.inspectQueue()
}

// drain waits until the queue is empty. Nothing is broken any more, so something must be done until it is.
func (w *world) drain() {
	patience := int64(w.times(20) + 15*time.Minute)
	for w.worked.Store(w.now()); !w.Drained() && (w.working.Load() > 0 || w.now()-w.worked.Load() < patience); {
		time.Sleep(max(w.ttl/2, time.Second))
	}
}

// inspectKeys looks for locks that are still there more than a TTL after the last server has ended.
func (w *world) inspectKeys() {
	for _, key := range w.lockKeys() {
		if value, err := w.Redis.Get(key); err == nil && isLock(key, value) {
			w.add(history.Record{Kind: history.KindLeftover, Key: key, Err: value})
		}
	}
}

// inspectQueue notes every task that the queue still has.
func (w *world) inspectQueue() {
	queued, err := history.Queued(w.Inspector, "default")
	if err != nil {
		w.T.Fatal(err)
	}
	for _, r := range queued {
		w.add(r)
	}
}

func (w *world) result() Result {
	w.mu.Lock()
	defer w.mu.Unlock()
	records := append(slices.Clone(w.records), w.ledger.records()...)
	slices.SortStableFunc(records, func(a, b history.Record) int { return cmp.Compare(a.T, b.T) })
	result := Result{
		Findings: history.Check(records, history.Terms{TTL: w.ttl, Slack: 5 * time.Millisecond, MayDrop: mayDrop, Exact: true}),
		Lasted:   w.Elapsed(), TTL: w.ttl, History: records, Outcomes: w.outcomes,
	}
	for _, k := range w.kinds {
		result.Kinds = append(result.Kinds, k.name)
	}
	for _, state := range []string{"pending", "active", "scheduled", "retry"} {
		if n := result.Queue[state]; n > 0 {
			result.Add(history.BadStuck, "%d tasks are still %s, and nothing has been done since %v", n, state, time.Duration(w.worked.Load()))
		}
	}
	return result
}

// now is the stamp of a record. No stamp is 0, which stands for the unknown.
func (w *world) now() int64 { return int64(w.Elapsed()) + 1 }

func (w *world) add(r history.Record) {
	if r.T == 0 {
		r.T = w.now()
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.records = append(w.records, r)
}

func (w *world) enqueued(task string) {
	w.add(history.Record{Kind: history.KindEnqueued, Process: "producer", Task: task})
}

// fault notes a fault that began at from and is over now.
func (w *world) fault(name, host, key string, from int64) {
	w.add(history.Record{Kind: history.KindFault, Fault: name, Process: host, Key: key, T: from, Until: w.now()})
}

// sleep reports whether things may still happen after d.
func (w *world) sleep(d time.Duration) bool {
	time.Sleep(min(d, max(w.length-w.Elapsed(), 0)))
	return w.Elapsed() < w.length
}

// gap is the pause between two troubles, n TTLs on average.
func (w *world) gap(r *rand.Rand, n float64) bool {
	return w.sleep(min(w.times(n*r.ExpFloat64()), w.times(4*n)))
}

// keyOf returns the key of a lock that exists in this world.
func (w *world) keyOf(r *rand.Rand) string {
	k := w.kinds[r.IntN(len(w.kinds))]
	name, err := w.hosts[0].lockerOf(k.name).Name(context.Background(),
		asynq.NewTask(k.name, fmt.Appendf(nil, `{"key":%d}`, r.IntN(w.keys))))
	if err != nil {
		w.T.Errorf("name of a lock of %s: %v", k.name, err)
	}
	return keyOf(name)
}

func keyOf(name string) string { return prefix + "{" + name + "}" }

func (w *world) count(taskType string, kind redislock.EventKind) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.outcomes[taskType+" "+string(kind)]++
}
